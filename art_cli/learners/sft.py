"""Supervised training on demos: assistant tokens, mean cross entropy, an optimizer of its own."""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from art_cli.config.schema import SftConfig
from art_cli.errors import LearnerError
from art_cli.learners import Progress
from art_cli.learners.batch import count
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.pack_runner import PackRunner
from art_cli.learners.samples import Sample


class SftUpdate(NamedTuple):
    """What one optimizer step did."""

    loss: float  # mean of -log p over its assistant tokens, nats
    grad_norm: float  # before clipping
    tokens_trained: int
    tokens_computed: int


def train_on_demos(
    runner: PackRunner,
    optimizer: Optimizer,
    transcripts: Sequence[list[Sample]],
    config: SftConfig,
    *,
    seed: int,
    progress: Progress | None = None,
) -> list[SftUpdate]:
    """Every optimizer step, in order. Raises LearnerError: a gradient that is not finite; weights are as before it."""
    batches = shuffled_batches(transcripts, config, seed=seed)
    updates = []
    for done, samples in enumerate(batches, 1):
        updates.append(_update(runner, optimizer, samples))
        if progress is not None:
            progress(done, len(batches))
    return updates


def shuffled_batches(transcripts: Sequence[list[Sample]], config: SftConfig, *, seed: int) -> list[list[Sample]]:
    """The samples of each optimizer step, epoch after epoch, each epoch in an order of its own."""
    batches = []
    for epoch in range(config.epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(transcripts))
        for start in range(0, len(order), config.batch_size):
            chosen = order[start : start + config.batch_size]
            batches.append([sample for index in chosen for sample in transcripts[index]])
    return batches


def summarize(updates: Sequence[SftUpdate], *, epochs: int, begin: float) -> dict[str, float]:
    """The numbers of an sft; `loss` is the mean over the last epoch, `loss_first` that of the first optimizer step."""
    last_epoch = updates[-(len(updates) // epochs) :]
    return {
        "loss": sum(update.loss for update in last_epoch) / len(last_epoch),
        "loss_first": updates[0].loss,
        "grad_norm": sum(update.grad_norm for update in updates) / len(updates),
        "num_updates": float(len(updates)),
        "tokens_trained": float(sum(update.tokens_trained for update in updates)),
        "tokens_computed": float(sum(update.tokens_computed for update in updates)),
        "train_s": time.perf_counter() - begin,
    }


def _update(runner: PackRunner, optimizer: Optimizer, samples: Sequence[Sample]) -> SftUpdate:
    counts = count(samples)
    packs = runner.deal(samples)
    total = 0.0
    for pack in packs:
        edges = torch.from_numpy(pack.terms.edges).to(runner.weights.device)
        loss = -runner.run(pack).logprobs[edges].sum() / counts.tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    norm = optimizer.clip()
    if not math.isfinite(norm):
        optimizer.clear()
        names = sorted({sample.trajectory_id for sample in samples})
        raise LearnerError(f"sft: the gradient is not finite, in one of {', '.join(names)}; lower sft.learning_rate")
    optimizer.counts.num_steps += 1
    optimizer.update()
    losses, computed = zip(*runner.ranks.gather((total, sum(len(pack.token_ids) for pack in packs))), strict=True)
    return SftUpdate(sum(losses), norm, counts.tokens, sum(computed))
