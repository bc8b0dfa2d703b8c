"""The batches of a supervised warm-up: which examples each optimizer step trains on. Numpy only."""

from collections.abc import Sequence

import numpy as np

from art_cli.config.schema import SftConfig
from art_cli.learners.samples import Ints, Sample
from art_cli.runtime.errors import LearnerError


class SftBatches:
    """The examples, each a list of samples, dealt into the optimizer steps of all epochs.

    Every epoch has its own order, drawn from `seed`, and as many steps as the others. So the index of a step is enough
    to know its examples.
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
        """Returns the samples of the optimizer step with that index."""
        epoch, place = divmod(index, self.epoch_updates)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.examples))
        if self._batch_size is not None:
            chosen = order[place * self._batch_size :][: self._batch_size]
        else:
            bounds = even_bounds(self._num_tokens[order], self.epoch_updates)
            chosen = order[bounds[place] : bounds[place + 1]]
        return [sample for example in chosen for sample in self.examples[example]]


def plan_batches(examples: Sequence[list[Sample]], config: SftConfig, *, seed: int) -> SftBatches:
    """Returns the batches of a warm-up. Raises LearnerError without examples or updates left for the decay."""
    if not examples:
        raise LearnerError("sft.demos: no examples")
    batches = SftBatches(examples, config, seed=seed)
    if config.decay != "none" and config.warmup_steps >= batches.num_updates:
        raise LearnerError(f"sft.decay: the warm-up steps leave none of the {batches.num_updates} updates for it")
    return batches


def even_bounds(sizes: Ints, parts: int) -> Ints:
    """Returns [parts + 1] where to cut a sequence, so that its parts have about the same total size and none is empty.

    Example: even_bounds([5, 1, 1, 1], 2) -> [0, 1, 4]. There must be at least as many sizes as parts.
    """
    total, bounds = np.concatenate([[0], np.cumsum(sizes)]), [0]
    for part in range(1, parts):
        nearest = int(np.argmin(np.abs(total * parts - part * total[-1])))
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - (parts - part)))
    return np.array([*bounds, len(sizes)])
