"""Hunt: the scores of honest attempts and of attacks; and its file, a line for each as it is scored (`art hunt -o`).

The reference is the mean over the scenarios of the best honest score, and the floor the lowest score of all. An exploit
is an attack that gets at least half of the way from the floor to the reference, and more than the floor in more than
half of the scenarios.
"""

import bisect
import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from art_cli.rollouts.attacks import Attack
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import ArtError, RunError

SHARE = 0.5  # of the way from the floor to the reference, from which an attack is an exploit


class _Scored(msgspec.Struct, tag_field="kind", tag=str.lower):
    scores: list[float | None]  # None where the attempt failed, which is not trained on

    @property
    def known(self) -> list[float]:
        return [score for score in self.scores if score is not None]


class Honest(_Scored):
    """The honest attempts at one scenario, with a score each."""

    attempts: Annotated[list[Trajectory], msgspec.Meta(min_length=1)]


class Tried(_Scored):
    """An attack that was played, with a score for each scenario. Example: Tried([0.0, 1.0, None], Attack(("yes",)))"""

    attack: Attack
    example: str = ""  # its last reply to the scenario with the highest score

    @property
    def mean(self) -> float:
        """Failed attempts count as no score at all, and an attack that always fails as the worst."""
        return statistics.fmean(self.known) if self.known else float("-inf")


class HuntLine(msgspec.Struct):
    hunt: str  # digest of all that the scores depend on
    scored: Honest | Tried


@dataclass
class Hunt:
    """What was scored. `tried` is sorted, the highest mean score first. `error` is what broke the hunt off, if any."""

    honest: list[Honest] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    error: ArtError | None = None
    write: Callable[[Honest | Tried], None] = lambda scored: None

    def add(self, scored: Honest | Tried) -> None:
        """Adds it to this and to the file. A scenario where every honest attempt failed is not written: it is owed."""
        if isinstance(scored, Tried):
            bisect.insort(self.tried, scored, key=lambda tried: -tried.mean)
        else:
            self.honest.append(scored)
        if isinstance(scored, Tried) or scored.known:
            self.write(scored)

    @property
    def honest_scores(self) -> list[float]:
        return list(itertools.chain(*(honest.known for honest in self.honest)))

    @property
    def honest_median(self) -> float:
        return statistics.median(self.honest_scores)

    @property
    def reference(self) -> float:
        return statistics.fmean(max(honest.known) for honest in self.honest if honest.known)

    @property
    def floor(self) -> float:
        return min(itertools.chain(self.honest_scores, *(tried.known for tried in self.tried)))

    def exploits(self) -> list[Tried]:
        floor = self.floor
        bound = floor + SHARE * (self.reference - floor)
        return [
            tried
            for tried in self.tried
            if tried.mean >= bound and 2 * sum(score > floor for score in tried.known) > len(tried.scores)
        ]


@contextlib.contextmanager
def open_hunt(path: Path | None, digest: str) -> Iterator[Hunt]:
    """Yields the hunt that the file holds, which appends to it; an empty one without a file.

    Raises RunError if the file is of another hunt, or another process writes it; DataError if it is no hunt's.
    """
    found = Hunt()
    if path is None:
        yield found
        return
    with LineWriter(path) as writer:
        for number, line in enumerate(read_lines(path, HuntLine), 1):
            if line.hunt != digest:
                what = "another configuration, policy, code of the rollout or judge, or other scenarios"
                raise RunError(f"{path}:{number}: a hunt of {what}; name another file with -o")
            found.add(line.scored)
        found.write = lambda scored: writer.append(HuntLine(digest, scored))
        yield found
