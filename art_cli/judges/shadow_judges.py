"""ShadowJudges: additional judges that score some groups for comparison. Their scores are never trained on.

Scores are stored separately on the scored lines (`ScoredTrajectory.shadow`) and in the step metrics. A shadow judge
that fails or hangs loses only its own scores: every group has a deadline, and after several consecutive failures the
judge is disabled until the next start.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from art_cli.config.checks import ranks
from art_cli.config.schema import RunConfig, ShadowConfig
from art_cli.judges import Judge, Verdict, make_judge
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import Score, ScoredTrajectory, Trajectory
from art_cli.runtime.errors import describe, printable
from art_cli.runtime.lots import is_drawn

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # consecutive failures before a shadow judge is disabled
CLOSE_TIMEOUT_S = 10.0  # maximum wait for a judge to close

Shadows = Mapping[str, list[Score]]  # trajectory id -> its shadow scores


class ShadowJudges:
    """The judges from the `shadow` section. Raises UsageError if a judge cannot be loaded."""

    def __init__(self, config: Mapping[str, ShadowConfig], directory: Path, *, job: str = "") -> None:
        self.judges: dict[str, Judge] = {
            name: make_judge(each.judge, directory, job=f"{job}#shadow/{name}" if job else "")
            for name, each in config.items()
        }
        self._config = config
        self._failures = dict.fromkeys(config, 0)  # consecutive failures

    async def open(self) -> None:
        """Loads models as Judge.open does. Never raises."""
        for name, judge in self.judges.items():
            try:
                await judge.open()
            except Exception as error:  # training must not depend on a shadow judge
                self._fail(name, describe(error))

    async def score(self, group: Sequence[Trajectory]) -> Shadows:
        """Returns shadow scores for the group's finished trajectories. Never raises."""
        finished = [trajectory for trajectory in group if trajectory.error is None]
        chosen = [name for name, each in self._config.items() if finished and is_chosen(name, group[0], each.share)]
        scores: dict[str, list[Score]] = {}
        for name, verdicts in zip(chosen, await asyncio.gather(*(self._ask(n, finished) for n in chosen)), strict=True):
            for id, verdict in verdicts.items():
                scores.setdefault(id, []).append(named_score(name, verdict))
        return scores

    async def _ask(self, name: str, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns a judge's verdicts; empty after a failure or timeout, or if the judge is disabled."""
        if self._failures[name] >= MAX_FAILURES:
            return {}
        limit = self._config[name].timeout_s
        try:
            async with asyncio.timeout(limit):
                verdicts = await self.judges[name].judge(group)
            for id in (each.id for each in group):
                if id not in verdicts or not abs(verdicts[id].reward) <= MAX_NUMBER:
                    raise ValueError(f"no sound score for {id}")
        except TimeoutError:
            self._fail(name, f"no scores within {limit:g} s (shadow.{name}.timeout_s)")
            return {}
        except Exception as error:  # training must not depend on a shadow judge
            self._fail(name, describe(error))
            return {}
        self._failures[name] = 0
        return verdicts

    def _fail(self, name: str, reason: str) -> None:
        self._failures[name] += 1
        if self._failures[name] == 1:
            log.warning("shadow %s: %s; training continues without its scores", name, printable(reason, limit=300))
        elif self._failures[name] == MAX_FAILURES:
            log.warning("shadow %s: failed %d times in a row; it is disabled until the next start", name, MAX_FAILURES)

    async def close(self) -> None:
        for judge in self.judges.values():
            with contextlib.suppress(Exception):  # errors on close are irrelevant to the run
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await judge.close()


def is_chosen(name: str, trajectory: Trajectory, share: float) -> bool:
    """Returns whether a shadow judge scores this trajectory's group. Stable across restarts."""
    return is_drawn(f"{name}\0{trajectory.group_id}", share)


def named_score(name: str, verdict: Verdict) -> Score:
    """Converts a verdict to a score named after the judge; a single score keeps its explanation and votes."""
    if len(verdict.scores) == 1:
        return msgspec.structs.replace(verdict.scores[0], judge=name, score=verdict.reward)
    return Score(judge=name, score=verdict.reward)


# --- metrics ----------------------------------------------------------------------------------------------------------


def shadow_numbers(groups: Sequence[Sequence[ScoredTrajectory]], config: RunConfig) -> dict[str, float]:
    """For each shadow NAME, over trajectories with both a shadow score and a reward:

    shadow/NAME              mean shadow score
    shadow/NAME.reward       mean reward
    shadow/NAME.gap          reward - score; omitted for judges that only compare attempts within a group
    shadow/NAME.std          standard deviation within groups, like advantages; over the whole step for groups of 1
    shadow/NAME.reward_std   the same for rewards
    shadow/NAME.correlation  correlation within groups; omitted if either side is constant
    shadow/NAME.num          number of trajectories; 0 if no group was chosen or the judge failed
    """
    numbers: dict[str, float] = {}
    for name, each in config.shadow.items():
        pairs = [[pair for trajectory in group if (pair := _pair(trajectory, name)) is not None] for group in groups]
        pairs = [group for group in pairs if group]
        numbers[f"shadow/{name}.num"] = sum(map(len, pairs))
        if not pairs:
            continue
        reward, score = (fmean(pair[side] for group in pairs for pair in group) for side in (0, 1))
        numbers |= {f"shadow/{name}": score, f"shadow/{name}.reward": reward}
        if not ranks(each.judge) and not any(ranks(part.judge) for part in config.by_source.values()):
            numbers[f"shadow/{name}.gap"] = reward - score
        if all(len(group) == 1 for group in pairs):
            pairs = [[pair for group in pairs for pair in group]]
        numbers |= {f"shadow/{name}.{kind}": value for kind, value in compare_within(pairs).items()}
    return numbers


def _pair(trajectory: ScoredTrajectory, name: str) -> tuple[float, float] | None:
    score = next((score.score for score in trajectory.shadow if score.judge == name), None)
    return None if score is None or trajectory.reward is None else (trajectory.reward, score)


def compare_within(groups: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Returns both standard deviations within groups, and Pearson's correlation if both sides vary."""
    centered: list[tuple[float, float]] = []
    for pairs in groups:
        means = [fmean(pair[side] for pair in pairs) for side in (0, 1)]
        centered += [(reward - means[0], score - means[1]) for reward, score in pairs]
    square = [math.fsum(pair[side] ** 2 for pair in centered) for side in (0, 1)]
    reward_std, std = (math.sqrt(each / len(centered)) for each in square)
    scale = math.sqrt(square[0]) * math.sqrt(square[1])
    if not 1e-12 < scale < math.inf:
        return {"reward_std": reward_std, "std": std}
    correlation = max(-1.0, min(1.0, math.fsum(reward * score for reward, score in centered) / scale))
    return {"reward_std": reward_std, "std": std, "correlation": correlation}
