"""What turns a group into one score each: the Judge protocol and the table of built-ins.

A judge sees the trajectories of one group that finished without error, and answers by trajectory id. What it cannot
score it does not invent: it raises JudgeError and the group stays owed.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from art_cli.trajectory import Score, Trajectory

BUILT_INS = {
    "rollout": "art_cli.judges.rollout:RolloutJudge",
    "function": "art_cli.judges.function:FunctionJudge",
    "ruler": "art_cli.judges.ruler:RulerJudge",
}


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory gets: the reward it is trained with, and the scores behind it."""

    reward: float  # finite
    scores: list[Score] = []


class Judge(Protocol):
    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """One verdict per trajectory id, complete. An empty group gives an empty mapping. Raises JudgeError."""
        ...

    async def close(self) -> None: ...
