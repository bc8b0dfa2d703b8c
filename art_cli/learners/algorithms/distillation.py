"""Distillation and SDPO: a teacher's opinion of each token the policy sampled is the token's advantage.

The arithmetic is in distill_math.py, the teachers are in ../teachers/.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.distill_math import (
    Lesson,
    lesson,
    lesson_numbers,
    prefix_weights,
    sampled_tokens,
    student_logprobs,
    taught_credit,
    teacher_advantages,
)
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.samples import Sample
from art_cli.learners.token_weights import Credit, Floats
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.learners.algorithms.moving_average import MovingAverage
    from art_cli.learners.packs.logprob_reader import Reader
    from art_cli.learners.teachers import Teacher
    from art_cli.learners.teachers.feedback import Feedback

TaughtKnobs = TypeVar("TaughtKnobs", bound=loss_config.TaughtLossConfig)


class TaughtPreset(ClippedPreset[TaughtKnobs]):
    """A preset whose advantages a teacher gives token by token; those of rewards are added with `reward_weight`."""

    _policy: "Reader"
    _numbers: dict[str, float] = {}

    def bind(self, policy: "Reader", directory: Path) -> None:
        self._policy = policy

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        """A trajectory without a lesson learns from its rewards alone, or is left out if these count nothing."""
        lessons = self.lessons(groups)
        self._numbers = lesson_numbers(lessons.values(), sum(map(len, groups)))
        taught = {name: each.advantages for name, each in lessons.items()}
        return [
            [
                taught_credit(trajectory, taught.get(trajectory.id), reward_part)
                for trajectory, reward_part in zip(group, self._reward_parts(group), strict=True)
            ]
            for group in groups
        ]

    def _lesson(self, trajectory: ScoredTrajectory, samples: Sequence[Sample], log_ratios: Sequence[Floats]) -> Lesson:
        """`log_ratios`: [N] log teacher - log student of the targets of each sample."""
        return lesson(trajectory, samples, [self._advantages(ratios) for ratios in log_ratios], log_ratios)

    def _advantages(self, log_ratios: Floats) -> Floats:
        """[N] of the tokens of one sample."""
        return teacher_advantages(log_ratios, self.knobs.divergence)

    def _reward_parts(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        weight = self.knobs.reward_weight
        if weight == 0:
            return [None] * len(group)
        return [weight * value for value in advantages(rewards_of(group), scale=self.knobs.scale_advantages)]

    def lessons(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, Lesson]:
        """By trajectory id."""
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        return self._numbers


class Distill(TaughtPreset[loss_config.DistillConfig]):
    """On-policy distillation: Lu and Thinking Machines Lab 2025, "On-Policy Distillation".

    A_t = log teacher(y_t | y_<t) - log student(y_t | y_<t), detached, both at the temperature that sampled. Its
    expectation over the student's own tokens is the gradient of -KL(student || teacher), token by token; as there, a
    token is not charged with what it leads to later. `prefix_weight` multiplies it by IW-OPD's weights, one sequence
    at a time.
    """

    _teacher: "Teacher"

    def bind(self, policy: "Reader", directory: Path) -> None:
        from art_cli.learners.teachers import make_teacher

        super().bind(policy, directory)
        self._teacher = make_teacher(self.knobs.teacher, policy, directory)

    def lessons(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, Lesson]:
        trajectories = [trajectory for group in groups for trajectory in group]
        samples_of = [sampled_tokens(trajectory) for trajectory in trajectories]
        samples = [sample for samples in samples_of for sample in samples]
        students = student_logprobs(samples, self._policy.logprobs)
        ratios = [teacher - student for teacher, student in zip(self._teacher.logprobs(samples), students, strict=True)]
        values = iter(ratios)
        return {
            trajectory.id: self._lesson(trajectory, samples, [next(values) for _ in samples])
            for trajectory, samples in zip(trajectories, samples_of, strict=True)
        }

    def _advantages(self, log_ratios: Floats) -> Floats:
        return super()._advantages(log_ratios) * prefix_weights(log_ratios, self.knobs.prefix_weight)


class Sdpo(TaughtPreset[loss_config.SdpoConfig]):
    """SDPO: self-distillation policy optimization, 2026 (arXiv:2601.20802), on sampled tokens, with a judge's words.

    A_t = log q(y_t | x, feedback, y_<t) - log p(y_t | x, y_<t), detached, where p is the policy that sampled and q, the
    teacher, is the moving average of the policy over the steps so far. The feedback is the judge's explanation of this
    very attempt, its score and rank, in the first user message; the paper's is a successful attempt or an environment's
    message. An attempt without an explanation has no lesson, nor has one whose longer prompt would exceed the context.
    """

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
