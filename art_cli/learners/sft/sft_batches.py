"""A supervised warm-up's batches: the examples in each optimizer step; Sums: progress numbers.

Numpy only, no torch. In a checkpoint, the sums are `sft/sums.json`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from art_cli.config.schema import SftConfig
from art_cli.learners.samples import Ints, Sample
from art_cli.runtime.errors import LearnerError


class Taken(NamedTuple):
    """Numbers from one optimizer step."""

    loss: float  # nats per token
    norm: float  # gradient norm before clipping
    num_trained: int  # tokens in the loss
    num_computed: int


class Sums(msgspec.Struct, kw_only=True):
    """sft/sums.json, from which the reported numbers are computed."""

    num_updates: int = 0  # optimizer steps taken
    loss_first: float = 0.0  # loss in the initial optimizer step, nats per token
    loss_epoch: float = 0.0  # sum of losses over the current epoch's optimizer steps
    grad_norm: float = 0.0  # sum over optimizer steps, before clipping
    tokens_trained: int = 0
    tokens_computed: int = 0
    evaluations: list[tuple[int, float]] = []  # (optimizer steps taken before it, loss in nats per token)
    train_s: float = 0.0
    eval_s: float = 0.0
    # a server's path to the weights with the lowest evaluation loss; None if not kept, unset without a server
    best: str | None | msgspec.UnsetType = msgspec.UNSET

    def add_update(self, taken: Taken, *, epoch_updates: int, seconds: float) -> None:
        """Adds an optimizer step. `epoch_updates` counts steps per epoch."""
        is_first = self.num_updates % epoch_updates == 0
        self.loss_first = self.loss_first if self.num_updates else taken.loss
        self.loss_epoch = taken.loss if is_first else self.loss_epoch + taken.loss
        self.grad_norm += taken.norm
        self.tokens_trained += taken.num_trained
        self.tokens_computed += taken.num_computed
        self.num_updates += 1
        self.train_s += seconds

    def add_evaluation(self, loss: float, *, seconds: float) -> bool:
        """Adds an evaluation's loss. Returns whether it is the lowest so far."""
        is_best = all(loss < before for _, before in self.evaluations)
        self.evaluations.append((self.num_updates, loss))
        self.eval_s += seconds
        return is_best

    def is_done(self, num_updates: int, *, patience: int | None) -> bool:
        """Returns whether all updates are taken, or the evaluation loss has not fallen for `patience` evaluations."""
        losses, is_last = [loss for _, loss in self.evaluations], self.num_updates >= num_updates
        if patience is None or not losses:
            return is_last
        return is_last or len(losses) - 1 - losses.index(min(losses)) >= patience

    def numbers(self, *, epoch_updates: int, patience: int | None, is_done: bool) -> dict[str, float]:
        """Returns the numbers so far. `loss` is the current epoch's mean, `loss_first` the initial update's loss.

        `eval_loss` is the newest evaluation's loss. For a finished warm-up with `patience` it is the best loss, because
        the best weights are kept.
        """
        num = self.num_updates
        if num == 0:
            return {"num_updates": 0.0}
        return {
            "loss": self.loss_epoch / ((num - 1) % epoch_updates + 1),
            "loss_first": self.loss_first,
            **self._evaluation_numbers(patience, is_done),
            "grad_norm": self.grad_norm / num,
            "num_updates": float(num),
            "tokens_trained": float(self.tokens_trained),
            "tokens_computed": float(self.tokens_computed),
            "train_s": self.train_s,
        }

    def _evaluation_numbers(self, patience: int | None, is_done: bool) -> dict[str, float]:
        if not self.evaluations:
            return {}
        numbers = {"eval_loss": self.evaluations[-1][1], "eval_loss_first": self.evaluations[0][1]}
        if patience is not None:
            best, loss = min(self.evaluations, key=lambda pair: pair[1])
            numbers |= {"eval_loss_best": loss, "best_update": float(best)}
            if is_done:
                numbers["eval_loss"] = loss
        return numbers | {"num_evaluations": float(len(self.evaluations)), "eval_s": self.eval_s}


class SftBatches:
    """Deals the examples (each a list of samples) into optimizer steps for all epochs.

    Every epoch has the same number of steps and a different order, drawn from `seed`. So the step index alone
    determines the examples.
    """

    def __init__(self, examples: Sequence[list[Sample]], config: SftConfig, *, seed: int) -> None:
        self.examples, self.seed = examples, seed
        self._batch_size = config.batch_size if config.batch_tokens is None else None
        self._num_tokens = np.array([sum(len(sample.targets) for sample in example) for example in examples])
        if config.batch_tokens is None:
            self.epoch_updates = -(-len(examples) // config.batch_size)
        else:
            self.epoch_updates = min(len(examples), max(1, round(int(self._num_tokens.sum()) / config.batch_tokens)))
        self.num_updates = config.epochs * self.epoch_updates  # optimizer steps in all epochs

    def batch(self, index: int) -> list[Sample]:
        """Returns the samples for this optimizer step."""
        epoch, place = divmod(index, self.epoch_updates)
        order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.examples))
        if self._batch_size is not None:
            chosen = order[place * self._batch_size :][: self._batch_size]
        else:
            bounds = even_bounds(self._num_tokens[order], self.epoch_updates)
            chosen = order[bounds[place] : bounds[place + 1]]
        return [sample for example in chosen for sample in self.examples[example]]


def plan_batches(examples: Sequence[list[Sample]], config: SftConfig, *, seed: int) -> SftBatches:
    """Returns a warm-up's batches. Raises LearnerError without examples, or if no updates are left for the decay."""
    if not examples:
        raise LearnerError("sft.demos: no examples")
    batches = SftBatches(examples, config, seed=seed)
    if config.decay != "none" and config.warmup_steps >= batches.num_updates:
        raise LearnerError(f"sft.decay: the warm-up steps leave none of the {batches.num_updates} updates for it")
    return batches


def even_bounds(sizes: Ints, parts: int) -> Ints:
    """Returns [parts + 1] bounds that cut a sequence into non-empty parts with about equal total sizes.

    Example: even_bounds([5, 1, 1, 1], 2) -> [0, 1, 4]. There must be at least as many sizes as parts.
    """
    total, bounds = np.concatenate([[0], np.cumsum(sizes)]), [0]
    for part in range(1, parts):
        nearest = int(np.argmin(np.abs(total * parts - part * total[-1])))
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - (parts - part)))
    return np.array([*bounds, len(sizes)])
