"""Distillation: a teacher scores every sampled token, and its score is the token's advantage.

    token advantage = reward weight * the trajectory's group advantage + the teacher's advantage

The teacher's advantage is computed from log teacher - log student: on-policy distillation (Thinking Machines 2025), and
SDPO (arXiv:2601.20802), where the teacher is the policy given feedback. This module uses numpy only. Teachers are in
../teachers/; SDPO's teacher is in sdpo.py.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.samples import (
    Credit,
    Floats,
    Sample,
    sampled_mask,
    split_by_turn,
    token_weights,
    trajectory_samples,
    turn_sizes,
)
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory

if TYPE_CHECKING:
    from art_cli.learners.packs.logprob_reader import Reader
    from art_cli.learners.teachers import Teacher

log = logging.getLogger(__name__)


Read = Callable[[Sequence[Sample]], Sequence[Floats]]  # samples -> [N] per sample: a model's logprobs for the targets
TaughtKnobs = TypeVar("TaughtKnobs", bound=loss_config.TaughtLossConfig)


def sampled_tokens(trajectory: Trajectory) -> list[Sample]:
    """Returns the trajectory's samples with every sampled token as a target.

    Two kinds of sampled tokens are not targets: tokens the rollout never saw, and a sequence's initial token.
    """
    return trajectory_samples(trajectory, token_weights(trajectory, 1.0))


def student_logprobs(samples: Sequence[Sample], policy: Read) -> list[Floats]:
    """Returns [N] logprobs per sample, under the weights and temperature used for sampling.

    They are the engine's logprobs. After truncated sampling, the policy itself reads the sample.
    """
    unknown = [index for index, sample in enumerate(samples) if np.isnan(sample.logprobs).any()]
    found = [sample.logprobs for sample in samples]
    for index, logprobs in zip(unknown, policy([samples[index] for index in unknown]), strict=True):
        found[index] = logprobs
    return found


def teacher_advantages(log_ratios: Floats, divergence: Literal["reverse_kl", "jensen_shannon"]) -> Floats:
    """Returns [N] advantages whose policy gradient lowers the divergence of student p and teacher q, where r = log q/p.

    reverse_kl       r                     for KL(p || q): unbounded, so one token may outweigh all others
    jensen_shannon   log((1 + q/p) / 2)    for 2 JS(p, q): at least -log 2 = -0.69, and about r / 2 for small r

    With m = (p + q) / 2, 2 JS = KL(p || m) + KL(q || m), and its derivative by p(y) is log(p(y) / m(y)). Example: the
    ratios -5, 0 and 2 give -5, 0 and 2, or -0.69, 0 and 1.43.
    """
    if divergence == "reverse_kl":
        return log_ratios
    values: Floats = np.logaddexp(0.0, log_ratios) - np.log(2.0)
    return values


class Lesson(NamedTuple):
    """A teacher's scores for one trajectory of M tokens."""

    advantages: Floats  # [M] NaN where the teacher was not asked
    log_ratios: Floats  # [N] log teacher - log student for the scored tokens


def taught_credit(trajectory: Trajectory, taught: Floats | None, reward_part: float | None) -> Credit | float | None:
    """Returns every token's teacher advantage [M] plus the reward part.

    With `taught` None, only the rewards teach. With `reward_part` None, only tokens scored by the teacher are trained,
    and an unscored trajectory is dropped.
    """
    if taught is None:
        return reward_part
    row = taught if reward_part is None else np.where(np.isnan(taught), reward_part, taught + reward_part)
    return Credit(policy=split_by_turn(trajectory, np.where(sampled_mask(trajectory), row, np.nan)))


def _lesson_numbers(lessons: Collection[Lesson], num_trajectories: int) -> dict[str, float]:
    """Returns the step's distillation metrics: mean distance to the teacher in nats, and share of scored trajectories.

    The mean of log student - log teacher over sampled tokens estimates KL(student || teacher) per token.
    """
    values = np.concatenate([np.empty(0), *(each.log_ratios for each in lessons)])
    shares = {"taught_share": len(lessons) / num_trajectories} if num_trajectories else {}
    return shares | ({"teacher_kl": -float(values.mean())} if len(values) else {})


class TaughtPreset(ClippedPreset[TaughtKnobs]):
    """A preset whose advantages come from a teacher, token by token. `reward_weight` adds reward advantages."""

    reads_policy = True

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit | float | None]]:
        """Returns the credits. A trajectory the teacher did not score only gets its reward credit, if rewards count."""
        lessons = self.lessons(groups)
        self._numbers = _lesson_numbers(lessons.values(), sum(map(len, groups)))
        taught = {name: each.advantages for name, each in lessons.items()}
        return [
            [
                taught_credit(trajectory, taught.get(trajectory.id), reward_part)
                for trajectory, reward_part in zip(group, self._reward_parts(group), strict=True)
            ]
            for group in groups
        ]

    def _lesson(self, trajectory: ScoredTrajectory, samples: Sequence[Sample], log_ratios: Sequence[Floats]) -> Lesson:
        """`log_ratios`: [N] log teacher - log student per sample, for the targets."""
        row = np.full(sum(turn_sizes(trajectory)), np.nan)
        for sample, ratios in zip(samples, log_ratios, strict=True):
            row[sample.indexes] = teacher_advantages(ratios, self.knobs.divergence)
        return Lesson(row, np.concatenate([np.empty(0), *log_ratios]))

    def _reward_parts(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        weight = self.knobs.reward_weight
        if weight == 0:
            return [None] * len(group)
        return [weight * value for value in advantages(rewards_of(group), scale=self.knobs.scale_advantages)]

    def lessons(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> dict[str, Lesson]:
        """Returns the lessons by trajectory id."""
        raise NotImplementedError


class Distill(TaughtPreset[loss_config.DistillConfig]):
    """On-policy distillation: Lu and Thinking Machines Lab 2025, "On-Policy Distillation".

    A_t = log teacher(y_t | y_<t) - log student(y_t | y_<t), detached, both at the sampling temperature. Its expectation
    over the student's tokens is the gradient of -KL(student || teacher), token by token. As in the original, a token is
    not charged for later consequences.
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
