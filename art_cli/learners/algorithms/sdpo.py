"""SDPO, an experiment: the policy that has read the judge's explanation of an attempt teaches the one that has not."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from art_cli.config.sections.base_config import Float
from art_cli.config.sections.loss_config import TaughtLossConfig
from art_cli.learners.algorithms.distill_math import Lesson, sampled_tokens, student_logprobs
from art_cli.learners.algorithms.distillation import TaughtPreset
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.learners.algorithms.moving_average import MovingAverage
    from art_cli.learners.packs.logprob_reader import Reader
    from art_cli.learners.teachers.feedback import Feedback


class SdpoConfig(TaughtLossConfig):
    """SDPO (2026, arXiv:2601.20802): the policy that has read the judge's explanation teaches the one that has not."""

    needs_explanations: ClassVar[bool] = True

    name: Literal["sdpo"]
    teacher_rate: Annotated[Float, Field(gt=0, le=1)] = 0.05
    """The teacher is a moving average of the policy, as in the paper: after each step it moves by this share toward the
    policy's weights. 1: the teacher is the policy itself."""
    feedback: str | None = None
    """The text added to the first user message, where {explanation}, {score}, {rank} and {attempts} are the judge's.
    null: the one on docs/teachers.md."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if self.feedback is not None and "{explanation}" not in self.feedback:
            yield "feedback", "has no {explanation}, so that the policy would not read the judge's words"


class Sdpo(TaughtPreset[SdpoConfig]):
    """SDPO: self-distillation policy optimization, 2026 (arXiv:2601.20802), on sampled tokens, with a judge's words.

    A_t = log q(y_t | x, feedback, y_<t) - log p(y_t | x, y_<t), detached, where p is the policy that sampled and q, the
    teacher, is the moving average of the policy over the steps so far. The feedback is the judge's explanation of this
    very attempt, its score and rank, in the first user message; the paper's is a successful attempt or an environment's
    message. An attempt without an explanation has no lesson, nor has one whose longer prompt would exceed the context.
    """

    section = SdpoConfig
    _feedback: "Feedback"
    teacher: "MovingAverage"  # set by `bind`

    def bind(self, policy: "Reader", directory: Path) -> None:
        from art_cli.learners.algorithms.moving_average import MovingAverage
        from art_cli.learners.teachers.feedback import Feedback

        super().bind(policy, directory)
        self._feedback = Feedback(policy.runner.weights.tokenizer, self.knobs.feedback)
        self.teacher = MovingAverage(policy.runner, self.knobs.teacher_rate)

    def after_step(self) -> None:
        self.teacher.follow()

    def save(self, directory: Path) -> None:
        self.teacher.save(directory)

    def load(self, directory: Path) -> None:
        self.teacher.load(directory)

    def lessons(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, Lesson]:
        most = self._policy.runner.weights.max_length
        found = []
        for group in groups:
            for trajectory in group:
                samples = sampled_tokens(trajectory)
                told = self._feedback.told(trajectory, samples, group)
                if samples and told is not None and all(len(each.token_ids) <= most for each in told):
                    found.append((trajectory, samples, told))
        students = iter(
            student_logprobs([sample for _, samples, _ in found for sample in samples], self._policy.logprobs)
        )
        with self.teacher.installed():
            teachers = iter(self._policy.logprobs([sample for _, _, told in found for sample in told]))
        return {
            trajectory.id: self._lesson(trajectory, samples, [next(teachers) - next(students) for _ in samples])
            for trajectory, samples, _ in found
        }
