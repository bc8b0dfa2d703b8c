"""Products are the same sums whichever library computes them."""

import pytest
import torch
from torch import Tensor

from art_cli.models.decoder import maths
from art_cli.models.decoder.maths import Projection, add_product, inner_product, product

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maths, "SMALLEST", 0 if request.param else 1 << 60)
    monkeypatch.setattr(maths, "prefers_onednn", lambda: request.param)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("width", [8, 200])
def test_products_are_those_of_float64(library: None, width: int, is_view: bool) -> None:
    """Views of transposed matrices or column ranges are multiplied correctly."""
    x, weight, base = (_matrix(*shape, is_view) for shape in ((300, 96), (width, 96), (300, width)))
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(product(x, weight).double(), exact, **TOLERANCE)
    torch.testing.assert_close(add_product(base, x, weight).double(), base.double() + exact, **TOLERANCE)
    for left, right in ((x, base), (base, x)):
        torch.testing.assert_close(inner_product(left, right).double(), left.double().t() @ right.double(), **TOLERANCE)


def test_a_product_leaves_what_it_is_added_to(library: None) -> None:
    x, weight, base = _matrix(300, 96, False), _matrix(96, 96, False), _matrix(300, 96, False)
    before = base.clone()
    add_product(base, x, weight)
    assert torch.equal(base, before)
    assert torch.equal(add_product(base, x, weight, is_spare=True), add_product(before, x, weight))


@pytest.mark.parametrize("is_intel", [False, True])
def test_intels_processors_multiply_with_mkl_and_need_no_padding(
    is_intel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN multiplies bfloat16 on all of them."""
    monkeypatch.setattr(maths, "_is_intel", lambda: is_intel)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(maths, "prefers_onednn", maths.prefers_onednn.__wrapped__)
    assert maths.is_shape_costly(torch.float32) == (maths.has_onednn() and not is_intel)
    assert maths.is_shape_costly(torch.bfloat16)


def _matrix(rows: int, columns: int, is_view: bool) -> Tensor:
    draw = torch.Generator().manual_seed(rows + columns)
    if is_view:
        return torch.randn(columns + 5, rows, generator=draw).t()[:, :columns]
    return torch.randn(rows, columns, generator=draw)


@pytest.mark.parametrize("scale", [1e-5, 1.0])
def test_an_adapter_added_into_the_weights_gives_the_same(scale: float) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = ((96, 64), (4, 64), (96, 4), (400, 64), (400, 96))
    weight, down, up, x, grad = (torch.randn(*shape, generator=draw) for shape in shapes)
    plain = Projection(weight, None, down, scale * up, 2.0)
    merged = plain.merging()
    assert merged.is_merged
    for found, wanted in zip(merged.apply(x), plain.apply(x), strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)
    inner = plain.apply(x)[1]
    for found, wanted in zip(merged.backward(grad, x, inner), plain.backward(grad, x, inner), strict=True):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_below_float32_an_adapter_is_not_added_into_the_weights() -> None:
    weight, down, up = torch.zeros(8, 8), torch.zeros(2, 8), torch.zeros(8, 2)
    assert Projection(weight, None, down, up, 1.0).merging().is_merged
    assert not Projection(weight.bfloat16(), None, down, up, 1.0).merging().is_merged
    assert not Projection(weight).merging().is_merged
