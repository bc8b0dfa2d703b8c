"""FlexAttention over packs: its mask is the tree's, what it computes the dense mask's, and where it fails that serves.

Its backward pass and its compiled kernel need a GPU: tests marked `gpu`. What surrounds the kernel (padding, gradients,
settling) runs here too, around one that computes the same function from the same mask with all pairs.
"""

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention
from torch.profiler import ProfilerActivity, profile

from art_cli.config.schema import TorchLearnerConfig
from art_cli.learners.packs.flex_attention import BLOCK, MOST_LENGTHS, FlexAttention, _compiled, padded_length
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import pack_samples
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.packs.tree_attention import Tree, attend, masked_attention
from art_cli.learners.samples import bare_sample
from art_cli.models.weights import Weights
from tests.learners.test_pack_runner import SHAPE, assert_runs_exactly, samples, weights_of

SCALE = 0.3
STEM = list(range(700))
TREE = [STEM + [1000 + i] * 40 for i in range(6)] + [STEM[:300] + [2000] * 200]  # 700 + 240 + 200 tokens
COMPILES = pytest.mark.filterwarnings("default")  # an error made of a warning inside the compiler is its failure
trees = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=8)


class Dense:
    """In the kernel's place: the same function, forward and backward, on any device; fails from call `broken` on."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken
        self.calls: list[tuple[Any, ...]] = []  # what torch.compile would look at

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, block_mask: BlockMask, scale: float, enable_gqa: bool
    ) -> Tensor:
        seen = [(tensor.shape, tensor.stride(), tensor.requires_grad) for tensor in (query, key, value)]
        self.calls.append((*seen, torch.is_grad_enabled(), scale, enable_gqa))
        if len(self.calls) == self.broken:
            raise RuntimeError("the kernel broke")
        return masked_attention(query, key, value, dense(block_mask), scale)


def tree_of(token_lists: list[list[int]], flex: FlexAttention | None = None, device: str = "cpu") -> Tree:
    [pack] = pack_samples(
        [bare_sample(np.array(ids), np.array([], dtype=np.int64), "s") for ids in token_lists], budget=10_000
    )
    return Tree.of(pack, torch.device(device), flex)


def dense(mask: BlockMask) -> Tensor:
    """[length, length] bool: the mask asked for every pair."""
    device = mask.kv_num_blocks.device
    return create_mask(mask.mask_mod, 1, 1, mask.shape[-2], mask.shape[-1], device=device)[0, 0]


def states(
    length: int, *, width: int = 16, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of 6, 2 and 2 heads, laid out as a model's layers make them."""
    generator = torch.Generator().manual_seed(length)

    def made(heads: int) -> Tensor:
        drawn = torch.randn(1, length, heads, width, generator=generator)
        return drawn.to(device, dtype).transpose(1, 2).requires_grad_()

    return made(6), made(2), made(2)


def with_gradients(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), inputs)]


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes of tensors that stand at a time while `work` runs, without those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    results = profiler.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


# --- the mask ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=30)
@given(trees, st.sampled_from([1, 30]), st.sampled_from([None, 1, 5, 70]))
def test_the_mask_is_the_trees_and_padding_sees_itself_alone(
    token_lists: list[list[int]], stretch: int, window: int | None
) -> None:
    """And the kept blocks are those that hold a visible pair: none too few, none too many."""
    flex = FlexAttention(100)
    tree = tree_of([np.repeat(ids, stretch).tolist() for ids in token_lists], flex)
    mask, size = tree.block_mask(flex, window), len(tree.depths)
    length = padded_length(size, 100)
    expected = torch.eye(length, dtype=torch.bool)
    expected[:size, :size] = tree.mask(window)
    assert torch.equal(dense(mask), expected)
    blocks = expected.view(length // BLOCK, BLOCK, -1, BLOCK).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)
    theirs = create_block_mask(mask.mask_mod, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK)
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for each in (name, f"full_{name}"):
            ours, expected_list = getattr(mask, each), getattr(theirs, each)
            assert ours.dtype == expected_list.dtype and torch.equal(ours, expected_list)
    assert mask.shape == theirs.shape


def test_making_a_mask_takes_memory_that_grows_as_the_length_does() -> None:
    """At most 6 bytes for each of 1,024 queries and each key, and the list of blocks. Made whole, a mask takes 10 L^2:
    43 bytes for each of these at 4,096 tokens, and 86 at 8,192."""
    for length in (4096, 8192):
        mask = functools.partial(FlexAttention(length).mask, torch.full((length,), length), torch.arange(length))
        assert 0 < peak_bytes(mask) < 6 * 1024 * length


def test_making_a_mask_waits_for_no_device() -> None:
    """On torch's device `meta` a value that the CPU would have to wait for is an error."""
    flex = FlexAttention(1280)
    tree = tree_of(TREE, flex, "meta")
    assert tree.block_mask(flex).kv_indices.device.type == "meta"
    assert tree.mask(50).device.type == "meta"


def test_a_branch_keeps_the_blocks_of_its_stem_and_its_own() -> None:
    """A stem of 2 blocks keeps 1 + 2, each of 4 branches of a block 2 + 1, each of 2 blocks of padding 1: 17 of 64."""
    flex = FlexAttention(8 * BLOCK)
    tree = tree_of([list(range(2 * BLOCK)) + [1000 + i] * BLOCK for i in range(4)], flex)
    mask = tree.block_mask(flex)
    assert int(mask.to_dense().sum()) == 17
    assert mask.full_kv_num_blocks is not None
    assert int(mask.full_kv_num_blocks.sum()) == 9  # all but the diagonal: no pair of these is asked for


@pytest.mark.parametrize(
    ("num_tokens", "budget", "length"),
    [(1, 1, 128), (128, 100, 128), (129, 100, 1024), (7, 300, 384), (8193, 8192, 9216), (16_385, 8192, 18_432)],
)
def test_lengths_are_the_budget_or_eighths_of_a_doubling(num_tokens: int, budget: int, length: int) -> None:
    assert padded_length(num_tokens, budget) == length


def test_no_run_has_more_lengths_than_torch_compiles() -> None:
    """Of 2,000 rows of up to sixteen budgets, every one fits its length; the limit is eight shapes of a function."""
    flex = FlexAttention(8192)
    draw = np.random.default_rng(0)
    for num_tokens in draw.integers(1, 16 * 8192, 2000).tolist():
        assert num_tokens <= flex._length_for(num_tokens) < max(8192, 2 * num_tokens) + BLOCK
    assert MOST_LENGTHS <= len(flex._lengths) <= torch._dynamo.config.recompile_limit


# --- what it computes -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 50])
def test_the_uncompiled_kernel_gives_what_the_dense_mask_gives(window: int | None) -> None:
    """Forward, 1140 tokens in 1280 (and 3 query heads to one of keys), as far as a CPU can."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        out: Tensor = flex_attention(query.detach(), key.detach(), value.detach(), **options)
        return out

    flex = FlexAttention(1280, kernel)
    tree = tree_of(TREE, flex)
    query, key, value = states(len(tree.depths))
    out = flex.attend(query, key, value, tree.block_mask(flex, window), SCALE)
    torch.testing.assert_close(out, masked_attention(query, key, value, tree.mask(window), SCALE), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_padding_leaves_value_and_gradient(window: int | None) -> None:
    flex = FlexAttention(1280, Dense())
    tree, plain = tree_of(TREE, flex), tree_of(TREE)
    inputs = states(len(tree.depths))
    got, expected = (
        with_gradients(
            attend(torch.nn.Module(), *inputs, None, tree=t, scaling=SCALE, sliding_window=window)[0], inputs
        )
        for t in (tree, plain)
    )
    assert flex.works == {16: True}
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@COMPILES
def test_the_kernel_is_compiled_once_for_all_trees_and_windows() -> None:
    graphs = []

    def backend(module: Any, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(flex_attention, backend=backend, dynamic=False, fullgraph=True)
    flex = FlexAttention(300)
    for token_lists in ([[1, 2, 3], [1, 2, 4, 5]], [STEM[:200], STEM[:100] + [2000] * 150], [STEM[:384]]):
        for window in (None, 20, 3):
            mask = tree_of(token_lists, flex).block_mask(flex, window)
            query, key, value = (tensor.detach().contiguous() for tensor in states(384))
            out = compiled(query, key, value, block_mask=mask, scale=SCALE, enable_gqa=True)
            torch.testing.assert_close(out, masked_attention(query, key, value, dense(mask), SCALE))
    assert len(graphs) == 1


def test_every_call_looks_the_same_to_the_compiler() -> None:
    """With and without gradients, whichever inputs need one, whatever the length: and the result needs one if due."""
    kernel = Dense()
    flex = FlexAttention(300, kernel)
    for size in (384, 200, 3):
        tree = tree_of([STEM[:size]], flex)
        query, key, value = states(size)
        for inputs, has_gradient in (((query, key, value), True), ((query.detach(), key.detach(), value), True)):
            assert flex.attend(*inputs, tree.block_mask(flex), SCALE).requires_grad is has_gradient
        assert not flex.attend(query.detach(), key.detach(), value.detach(), tree.block_mask(flex), SCALE).requires_grad
        with torch.no_grad():
            assert not flex.attend(query, key, value, tree.block_mask(flex), SCALE).requires_grad
    assert len(kernel.calls) == 12 and len(set(kernel.calls)) == 1


# --- where it serves, and where it does not ---------------------------------------------------------------------------

QWEN = transformers.Qwen3Config(**SHAPE, head_dim=16)
GEMMA = transformers.Gemma3TextConfig(
    **SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
)


def runner_with(flex: FlexAttention, config: Any = QWEN) -> PackRunner:
    runner = PackRunner(weights_of(config), TorchLearnerConfig())
    runner.flex = flex
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack
    return runner


@pytest.mark.parametrize("config", [QWEN, GEMMA], ids=["full", "windows"])
def test_models_run_packs_through_it(config: Any) -> None:
    kernel = Dense()
    runner = runner_with(FlexAttention(40, kernel), config)
    assert runner.flex is not None and runner.flex.works == {16: True}
    before = len(kernel.calls)
    assert_runs_exactly(runner, share=True)
    assert len(kernel.calls) == before + 2  # a call a layer


@COMPILES
def test_where_it_cannot_be_run_that_is_said_once_and_the_dense_mask_serves(caplog: pytest.LogCaptureFixture) -> None:
    """The real one, compiled: on a CPU it has no backward pass."""
    with caplog.at_level(logging.WARNING):
        runner = runner_with(FlexAttention(40))
        assert_runs_exactly(runner, share=True)
    assert runner.flex is not None and runner.flex.works == {16: False}
    [said] = [record.message for record in caplog.records]
    assert said.startswith("no FlexAttention (") and said.endswith("attending by a dense mask, slower")


def test_heads_of_odd_width_keep_the_dense_mask(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Dense()
    flex = FlexAttention(40, kernel)
    tree = tree_of([[1, 2, 3], [1, 4]], flex)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attend(torch.nn.Module(), *states(4, width=24), None, tree=tree, scaling=SCALE)
    assert flex.works == {24: False} and not kernel.calls
    [said] = [record.message for record in caplog.records]
    assert "heads are 24 wide" in said


def test_a_failure_after_it_worked_is_raised() -> None:
    """Call 1 probes, 2 and 3 are the first two packs'."""
    flex = FlexAttention(40, Dense(broken=3))
    tree = tree_of([[1, 2, 3], [1, 4]], flex)
    attend(torch.nn.Module(), *states(4), None, tree=tree, scaling=SCALE)
    with pytest.raises(RuntimeError, match="the kernel broke"):
        attend(torch.nn.Module(), *states(4), None, tree=tree, scaling=SCALE)
    assert flex.works == {16: True}


def test_layers_whose_heads_are_too_wide_for_it_keep_the_dense_mask() -> None:
    """Gemma 4's windows have heads of half the width of its other layers. Call 3 is the probe of these."""
    flex = FlexAttention(40, Dense(broken=3))
    tree, plain = tree_of([[1, 2, 3], [1, 4]], flex), tree_of([[1, 2, 3], [1, 4]])
    attend(torch.nn.Module(), *states(4), None, tree=tree, scaling=SCALE)
    wide = states(4, width=32)
    got, expected = (attend(torch.nn.Module(), *wide, None, tree=t, scaling=SCALE)[0] for t in (tree, plain))
    torch.testing.assert_close(got, expected)
    assert flex.works == {16: True, 32: False}


@pytest.mark.slow
@COMPILES
def test_a_teachers_lengths_do_not_count_with_the_policys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine shapes in all, where torch compiles eight of one function. Without inductor, whose kernel needs a GPU."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for width, lengths in ((16, range(1, 6)), (64, range(1, 5))):
        kernel = _compiled.__wrapped__((6, width, torch.float32))
        for length in (BLOCK * num for num in lengths):
            mask = tree_of([STEM[:3]]).block_mask(FlexAttention(length))
            query, key, value = (tensor.detach() for tensor in states(length, width=width))
            out = kernel(query, key, value, block_mask=mask, scale=SCALE, enable_gqa=True)
            torch.testing.assert_close(out, masked_attention(query, key, value, dense(mask), SCALE))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@COMPILES
@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_on_a_gpu_value_and_gradient_are_the_dense_masks(
    dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    """Relative to the norm, against the dense mask in float32; compiled. Kernels sum in other orders, and a pair too
    many or too few is far above both tolerances."""
    flex = FlexAttention(1280)
    tree = tree_of(TREE, flex, "cuda")
    inputs = states(len(tree.depths), width=64, device="cuda", dtype=dtype)
    out, _ = attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=SCALE, sliding_window=window)
    assert flex.works == {64: True}
    query, key, value = exact = tuple(tensor.detach().float().requires_grad_() for tensor in inputs)
    expected = masked_attention(query, key, value, tree.mask(window), SCALE).transpose(1, 2)
    for ours, theirs in zip(with_gradients(out, inputs), with_gradients(expected, exact), strict=True):
        assert float((ours.detach().float() - theirs.detach()).norm() / theirs.detach().norm()) < tolerance


@COMPILES
@pytest.mark.gpu
def test_on_a_gpu_one_compilation_serves_all_packs() -> None:
    """Of different trees, with gradients and without."""
    from torch._dynamo.utils import counters

    flex = FlexAttention(1280)
    counters.clear()
    for token_lists in (TREE, TREE[:3], [STEM], [[1, 2, 3], [1, 4]]):
        tree = tree_of(token_lists, flex, "cuda")
        inputs = states(len(tree.depths), width=32, device="cuda")
        attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=SCALE)
        with torch.no_grad():
            attend(torch.nn.Module(), *inputs, None, tree=tree, scaling=SCALE)
    assert flex.works == {32: True}
    assert counters["stats"]["unique_graphs"] == 1


@COMPILES
@pytest.mark.gpu
def test_on_a_gpu_a_model_runs_packs_through_it() -> None:
    weights = weights_of(GEMMA)
    weights = Weights(
        weights.model.cuda(), weights.tokenizer, torch.device("cuda"), torch.float32, 256, "tiny", has_adapter=False
    )
    runner = PackRunner(weights, TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack and runner.flex is not None and runner.flex.works == {16: True}
