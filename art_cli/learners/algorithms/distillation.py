"""Distillation: a teacher's opinion of each token the policy sampled is the token's advantage.

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
    from art_cli.learners.packs.logprob_reader import Reader
    from art_cli.learners.teachers import Teacher

TaughtKnobs = TypeVar("TaughtKnobs", bound=loss_config.TaughtLossConfig)


class TaughtPreset(ClippedPreset[TaughtKnobs]):
    """A preset whose advantages a teacher gives token by token; those of rewards are added with `reward_weight`."""

    reads_policy = True
    _policy: "Reader"
    _numbers: dict[str, float] = {}

    def bind(self, policy: "Reader", directory: Path) -> None:
        self._policy = policy

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        """Returns the credits. A trajectory without a lesson has that of its rewards, or None if these count
        nothing."""
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
        """Returns [N] the advantages of the tokens of one sample."""
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
