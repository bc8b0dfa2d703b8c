"""Rejection sampling: the best attempts of scored groups, as examples to learn from. No torch.

As in RAFT, Dong et al. 2023 (arXiv:2304.06767), and the rejection sampling of Llama 2 (arXiv:2307.09288, section
3.2.3). An attempt is learned from with the tokens that the policy sampled, never with its messages rendered again.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.learners.samples import count_sampled
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import EQUAL_REWARDS, ScoredTrajectory, Trajectory, Turn
from art_cli.runtime.errors import DataError

Json = dict[str, Any]


class ScoredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """The part of one attempt to learn from. Example: ScoredAttempt(id="t7", scenario="easy-17", turns=[Turn(...)])"""

    id: str
    scenario: str  # id of its scenario; that of its group, where the record names none
    turns: list[Turn]


def scored_files(path: Path) -> list[Path]:
    """Returns a scored file itself, or all scored files of a run directory, in the order of their steps."""
    if not path.is_dir():
        return [path]
    return sorted(path.glob("step_*/scored.jsonl"), key=lambda file: (len(file.parent.name), file.parent.name))


def best_attempts(path: Path, num: int, *, min_reward: float | None = None) -> list[Json]:
    """Returns the best `num` attempts of each group of a scored file or run directory, as examples, group by group.

    An attempt must have at least `min_reward`, or if that is None more than the worst attempt of its group, so that a
    group of equal rewards gives none. Of equal rewards the lower index comes first. Attempts with an error, and those
    that sampled nothing, are left out. Raises DataError if the file, rewards or tokens are missing.
    """
    if not path.exists():
        raise DataError("no such file; best_of needs a scored file or the directory of a run", path)
    files = scored_files(path)
    if not files:
        raise DataError("no scored trajectories there; a run has them in step_*/scored.jsonl", path)
    return [example for file in files for group in _groups(file) for example in _best(group, num, min_reward, file)]


def _groups(path: Path) -> Iterable[Sequence[ScoredTrajectory]]:
    """Returns each group's attempts in the order of their indexes; of one written twice, the last line counts."""
    groups: dict[str, dict[int, ScoredTrajectory]] = {}
    for trajectory in read_lines(path, ScoredTrajectory):
        groups.setdefault(trajectory.group_id, {})[trajectory.index] = trajectory
    return [[members[index] for index in sorted(members)] for members in groups.values()]


def _best(group: Sequence[ScoredTrajectory], num: int, min_reward: float | None, path: Path) -> list[Json]:
    rewarded = [(_reward(each, path), each) for each in group if each.error is None]
    worst = min((reward for reward, _ in rewarded), default=0.0)
    chosen = [
        (reward, trajectory)
        for reward, trajectory in rewarded
        if (reward - worst > EQUAL_REWARDS if min_reward is None else reward >= min_reward)
        and count_sampled(trajectory)[0]
    ]
    chosen.sort(key=lambda pair: -pair[0])  # a stable sort, so equal rewards stay in the order of their indexes
    return [_example(trajectory) for _, trajectory in chosen[:num]]


def _reward(trajectory: ScoredTrajectory, path: Path) -> float:
    name = f"trajectory {trajectory.id}"
    if trajectory.reward is None or not math.isfinite(trajectory.reward):
        raise DataError(f"{name}: its reward is {trajectory.reward}; score the file first with art judge", path)
    if not trajectory.turns and not trajectory.is_silent:
        raise DataError(
            f"{name}: no token ids, so another tool or an endpoint's own model made it; play it with art generate, or "
            "learn from its messages without --best-of",
            path,
        )
    return trajectory.reward


def _example(trajectory: Trajectory) -> Json:
    scenario = trajectory.scenario.get("id", trajectory.group_id)
    attempt = ScoredAttempt(id=trajectory.id, scenario=str(scenario), turns=trajectory.turns)
    example: Json = msgspec.to_builtins(attempt)
    return example
