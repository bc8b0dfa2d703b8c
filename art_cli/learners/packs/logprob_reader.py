"""Reader: a model's logprobs of given tokens, or a critic's values, without gradient, using the learner's packs.

Shared tokens are computed once. A reader for the policy runs in all learner processes together. Other models are held
whole in every process, and `divided` assigns each process a part of the samples.

`side_by_side` computes items in separate threads, for models whose matrix products are too small to divide between
cores. Results come in item order, so sums over them do not depend on the number of cores.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from art_cli.learners.packs.logprobs import TokenScores
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import Pack
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.samples import Floats, Sample
from art_cli.runtime.errors import ArtError, LearnerError
from art_cli.runtime.openmp import compute_alone, num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 8  # Python code runs in one thread at a time, so additional threads would wait for each other


def side_by_side(
    compute: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int | None = None
) -> Iterator[Result]:
    """Yields `compute(item)` for every item, in order, using up to `num_threads` threads (default: one per core).

    Thread-local torch state such as `torch.no_grad` is not inherited. If `compute` raises, the earliest item's
    exception is raised and the remaining items are canceled.
    """
    num_threads = min(len(items), min(MOST_THREADS, num_cores()) if num_threads is None else num_threads)
    if num_threads < 2:
        yield from map(compute, items)
        return
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(num_threads, "pack", initializer=compute_alone) as pool:
        try:
            for item in items:
                begun.append(pool.submit(compute, item))
                if len(begun) > num_threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()


class Reader:
    """Reads with a runner's weights. `packing` is the runner's check (default: a new check)."""

    def __init__(self, runner: PackRunner, packing: PackingCheck | None = None) -> None:
        self.runner, self.packing = runner, packing or PackingCheck(runner)

    def logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] per sample: log p of its targets under softmax(logits / temperature), in nats."""
        return self._read(samples, lambda scores: scores.logprobs)

    def values(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] per sample: the critic's value before each target. Only the policy's reader supports this."""
        return self._read(samples, _values)

    def _read(self, samples: Sequence[Sample], choose: Callable[[TokenScores], Tensor]) -> list[Floats]:
        if not samples:
            return []

        @torch.no_grad()
        def read_pack(pack: Pack) -> Floats:
            return choose(self.runner.run(pack)).cpu().double().numpy()

        places = {id(sample): index for index, sample in enumerate(samples)}
        found: dict[int, Floats] = {}
        with self.runner.weights.lock, torch.no_grad():
            self.packing.probe(samples[0])
            with self.runner.running():
                packs = self.runner.deal(samples)
                num_threads = None if self.runner.is_side_by_side(packs) else 1
                for pack, read in zip(packs, side_by_side(read_pack, packs, num_threads=num_threads), strict=True):
                    numbers = read[pack.terms.edges]
                    for index, sample in enumerate(pack.samples):
                        found[places[id(sample)]] = numbers[pack.terms.samples == index]
        return _in_order(found, self.runner.ranks, len(samples))


def _values(scores: TokenScores) -> Tensor:
    assert scores.values is not None, "a reader of values needs a critic's head"
    return scores.values


def divided(
    samples: Sequence[Sample], ranks: Ranks, read: Callable[[Sequence[Sample]], Sequence[Floats]]
) -> list[Floats]:
    """Returns `read`'s results for all samples; every process of a learner reads only a part.

    Raises LearnerError in all processes if `read` raises an ArtError in any process.
    """
    alike = sorted(range(len(samples)), key=lambda index: samples[index].token_ids.tobytes())
    mine = alike[len(alike) * ranks.rank // ranks.size : len(alike) * (ranks.rank + 1) // ranks.size]
    found: dict[int, Floats] = {}
    faults: list[str] = []
    try:
        found = dict(zip(mine, read([samples[index] for index in mine]), strict=True))
    except ArtError as error:
        if ranks.size == 1:
            raise
        faults = [str(error)]
    if faults := [fault for of_rank in ranks.gather(faults, list[str]) for fault in of_rank]:
        raise LearnerError(faults[0])
    return _in_order(found, ranks, len(samples))


def _in_order(found: dict[int, Floats], ranks: Ranks, num_samples: int) -> list[Floats]:
    """Returns the results from all processes, in sample order."""
    whole: dict[int, Floats] = {}
    for part in ranks.gather(found, dict[int, Floats]):
        whole |= part
    return [whole[index] for index in range(num_samples)]
