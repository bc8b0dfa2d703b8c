"""What turns a group into one score each: the Judge protocol and the table of built-ins.

A judge sees the trajectories of one group that finished without error, and answers by trajectory id. What it cannot
score it does not invent: it raises JudgeError and the group stays owed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from art_cli.plugins import resolve
from art_cli.trajectory import Score, Trajectory

if TYPE_CHECKING:
    from art_cli.config.schema import JudgeConfig

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


def make_judge(config: "JudgeConfig", directory: Path) -> Judge:
    """The judge that a configuration names, made as `Class(config, directory)`; paths are relative to `directory`.

    Raises UsageError: what the configuration names cannot be loaded.
    """
    judge: Judge = resolve(BUILT_INS[config.name], base=directory)(config, directory)
    return judge
