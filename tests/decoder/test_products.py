"""Products are the same sums whichever library computes them."""

import pytest
import torch
from torch import Tensor

from art_cli.decoder import products
from art_cli.decoder.products import add_product, inner_product, product

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SMALLEST", 0 if request.param else 1 << 60)


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("width", [8, 200])
def test_products_are_those_of_float64(library: None, width: int, is_view: bool) -> None:
    """A view of a transposed matrix, or of some columns, is multiplied as its values are."""
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


def _matrix(rows: int, columns: int, is_view: bool) -> Tensor:
    draw = torch.Generator().manual_seed(rows + columns)
    if is_view:
        return torch.randn(columns + 5, rows, generator=draw).t()[:, :columns]
    return torch.randn(rows, columns, generator=draw)
