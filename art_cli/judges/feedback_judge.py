"""FeedbackJudge: the reward is a metric that clients of `art gateway` gave a conversation (runs/feedback.py)."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from art_cli.config.sections.judge_config import FeedbackJudgeConfig
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.blend import SeveralJudges, make_each
from art_cli.judges.costs import CostEstimate
from art_cli.runs.feedback import COMMENT, DEMONSTRATION, FEEDBACK_FILE, latest, rating
from art_cli.runs.trajectory import Score, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError

log = logging.getLogger(__name__)


class FeedbackJudge(SeveralJudges):
    """Attempts without the metric are scored by the judge in `otherwise`, which sees the whole group if it compares."""

    def __init__(
        self, config: FeedbackJudgeConfig, directory: Path, *, job: str = "", judges: Mapping[str, Judge] | None = None
    ) -> None:
        """Reads the feedback. Raises UsageError for a missing file, and DataError for an unreadable one."""
        super().__init__(judges or make_each(config, directory, job))
        self._otherwise = self.judges.get("otherwise")
        self.compares = self._otherwise is not None and self._otherwise.compares
        self.title, self._metric = f"feedback {config.metric}", config.metric
        file = directory / (config.file or FEEDBACK_FILE)
        if not file.is_file():
            raise UsageError(f"judge.file: {file}: no such file; art gateway writes {FEEDBACK_FILE} in its directory")
        self._entries = latest(file)
        named = {entry.metric for entries in self._entries.values() for entry in entries} - {COMMENT, DEMONSTRATION}
        if named and config.metric not in named:
            log.warning("judge.metric: %s has no %r; it has: %s", file, config.metric, ", ".join(sorted(named)))

    @property
    def settings(self) -> str:
        """A digest of all ratings and of the other judge."""
        ratings = {id: rating(entries, self._metric) for id, entries in self._entries.items()}
        other = None if self._otherwise is None else self._otherwise.settings
        return make_key(metric=self._metric, ratings=ratings, otherwise=other)[:12]

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Raises JudgeError if an attempt without feedback has no other judge, or no attempt to be compared with."""
        rated = {each.id: self._verdict(each) for each in group}
        rest = [each for each in group if rated[each.id] is None]
        verdicts: dict[str, Verdict] = {}
        if rest:
            if self._otherwise is None:
                cure = "name a judge for such attempts in judge.otherwise"
                raise JudgeError(f"trajectory {rest[0].id}: no feedback {self._metric!r}; {cure}")
            if self._otherwise.compares and len(group) == 1:
                reason = "judge.otherwise compares attempts, and this group has one"
                raise JudgeError(f"trajectory {rest[0].id}: no feedback {self._metric!r}; {reason}")
            verdicts |= await self._otherwise.judge(group if self._otherwise.compares else rest)
        return verdicts | {id: verdict for id, verdict in rated.items() if verdict is not None}

    def _verdict(self, trajectory: Trajectory) -> Verdict | None:
        entries = self._entries.get(trajectory.id, [])
        value = rating(entries, self._metric)
        if value is None:
            return None
        comments = [str(entry.value) for entry in entries if entry.metric == COMMENT]
        score = Score(judge="feedback", model=self._metric, score=value, explanation="\n".join(comments) or None)
        return Verdict(reward=value, scores=[score])

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        """Returns the other judge's cost; no cost if every attempt has feedback."""
        if self._otherwise is None or (estimate := self._otherwise.estimate(group)) is None:
            return None
        return estimate if not group or any(self._verdict(each) is None for each in group) else CostEstimate()

    @property
    def parts(self) -> Sequence[Judge]:
        return super().parts or (self,)
