"""What turns a group into one score each: the Judge protocol and the table of built-ins.

A judge sees the trajectories of one group that finished without error, and answers by trajectory id. What it cannot
score it does not invent: it raises JudgeError and the group stays owed.

    rollout.py function.py reward_model.py blend.py    the small judges
    ruler.py          RULER: docket -> poll -> votes -> panel mean
      docket.py         a group's different attempts: transcript.py (messages), shorten.py (what is left out)
      prompt.py         the record the judge reads: tree.py (what is shared once), instructions.py (rubric)
      poll.py           one model's votes: verdict.py (reads an answer or refuses it), cache.py (what was paid for)
      caller.py         patience around one provider: provider.py, http_provider.py, litellm_provider.py,
                        budget.py, prices.py, keys.py
      votes.py scale.py orders and means; groups too large for one call
    files.py output.py pipeline.py session.py          a file judged into another, resumed
    report.py report_text.py agreement.py              how far a judge can be trusted
    estimate.py spending.py trial.py call.py           --dry-run; what was spent; `art check`; ruler_score_group
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
    "reward_model": "art_cli.judges.reward_model:RewardModelJudge",
    "blend": "art_cli.judges.blend:BlendJudge",
}
SPENDING = frozenset({"ruler", "blend"})  # judges that cost money, and keep to a budget


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a trajectory gets: the reward it is trained with, and the scores behind it."""

    reward: float  # finite
    scores: list[Score] = []


class Judge(Protocol):
    @property
    def settings(self) -> str:
        """A digest of all that decides its rewards: two files with the same one can be compared. May read files."""
        ...

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """One verdict per trajectory id, complete. An empty group gives an empty mapping. Raises JudgeError."""
        ...

    async def close(self) -> None: ...


def make_judge(config: "JudgeConfig", directory: Path, *, job: str = "") -> Judge:
    """The judge that a configuration names, made as `Class(config, directory)`; paths are relative to `directory`.

    `job` names whose budget is spent: what it spent before, in other processes, counts. Raises UsageError: what the
    configuration names cannot be loaded.
    """
    kind = resolve(BUILT_INS[config.name], base=directory)
    judge: Judge = kind(config, directory, job=job) if config.name in SPENDING else kind(config, directory)
    return judge
