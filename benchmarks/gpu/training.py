"""A learner's step on a GPU: torch with FlexAttention and without, and Unsloth.

The batch is a training step's: prompts with several completions at each, tokens drawn at random. Its operations are
counted as benchmarks/step/operations.py says, so that the share of the peak counts no work twice.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import cards
from benchmarks.gpu.order import NotHere, Order
from benchmarks.gpu.shapes import adapter_of, base_of, built_base, config_of, load_of

Figures = dict[str, Any]


def torch_step(order: Order) -> Iterator[Figures]:
    """FlexAttention on: what art does on a GPU. On a CPU it is put there too, and says why it does not work."""
    from art_cli.learners.packs.flex_attention import FlexAttention

    weights = _load(order)
    learner = _learner(weights)
    flex = learner.runner.flex
    if flex is None:  # a CPU has the kernel's forward pass alone, and compiling it there tells nothing
        from torch.nn.attention.flex_attention import flex_attention

        flex = learner.runner.flex = FlexAttention(256, flex_attention)
    with _warnings() as said:
        yield from _measure(order, weights, learner)
    yield {
        "attention": "flex" if any(flex.works.values()) else "dense mask",
        **({"flex_reason": said[0]} if said else {}),
    }


def dense_step(order: Order) -> Iterator[Figures]:
    """FlexAttention off: attention under a dense mask."""
    weights = _load(order)
    learner = _learner(weights)
    learner.runner.flex = None
    yield from _measure(order, weights, learner)
    yield {"attention": "dense mask"}


def unsloth_step(order: Order) -> Iterator[Figures]:
    """The same step on weights that Unsloth loaded."""
    from art_cli.learners import unsloth

    if (reason := unsloth.obstacle()) is not None:
        raise NotHere(reason)
    weights = _load(order, unsloth.load_model)
    learner = _learner(weights)
    yield from _measure(order, weights, learner)
    yield {"attention": "Unsloth's"}


def _load(order: Order, load: Any = None) -> Any:
    """The policy as a run loads it, with adapter "a" in it."""
    from art_cli.models.loading import load_weights
    from art_cli.models.saved_weights import load_checkpoint

    base = base_of(order) if load is None else built_base(order)
    weights = load_weights(config_of(order, base), str(base), load=load)
    load_checkpoint(weights, adapter_of(order, "a"))
    return weights


def _learner(weights: Any) -> Any:
    from benchmarks.step.batches import make_learner

    return make_learner(weights)


def _measure(order: Order, weights: Any, learner: Any) -> Iterator[Figures]:
    import torch

    from benchmarks.gpu.memory import used_gb
    from benchmarks.step.batches import single_turn
    from benchmarks.step.operations import step_operations, tokens_of

    load = load_of(order)
    groups = single_turn(load.prompts, load.attempts, prompt=load.prompt_tokens, completion=load.new_tokens)
    model_gb = torch.cuda.memory_allocated() / 1e9 if order.has_gpu else used_gb()
    begin = time.perf_counter()
    metrics = learner.step(groups)
    cards.synchronize()
    yield {"first_step_s": time.perf_counter() - begin}
    if order.has_gpu:
        torch.cuda.reset_peak_memory_stats()
    walls = []
    for _ in range(load.repeats):
        begin = time.perf_counter()
        metrics = learner.step(groups)
        cards.synchronize()
        walls.append(time.perf_counter() - begin)
    step_s = statistics.median(walls)
    most = torch.cuda.max_memory_allocated() / 1e9 if order.has_gpu else used_gb()
    kept = {"kept_gb": torch.cuda.memory_reserved() / 1e9} if order.has_gpu else {}
    is_packed = metrics.tokens_computed < metrics.tokens_flat
    tokens = tokens_of(groups, learner.algorithm, is_shared=is_packed)
    operations = step_operations(weights.model, tokens)
    rate = sum(operations) / 1e3 / step_s
    peak = cards.peak(order)
    yield {
        "step_s": step_s,
        "tokens_trained": metrics.tokens_trained,
        "tokens_flat": metrics.tokens_flat,
        "tokens_computed": metrics.tokens_computed,
        "tokens_per_s": metrics.tokens_flat / step_s,
        "tflops": rate,
        "peak_tflops": peak,
        "mfu": rate / peak,
        "memory_gb": most,
        "model_gb": model_gb,
        **kept,
        "packed": metrics.packed,
        "grad_norm": metrics.grad_norm,
    }


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """What FlexAttention warns of inside."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, log = Keep(logging.WARNING), logging.getLogger("art_cli.learners.packs.flex_attention")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)
