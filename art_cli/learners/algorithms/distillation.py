"""Distillation: a teacher's opinion of each token that the policy sampled is the token's advantage.

    advantage of a token = reward weight * the trajectory's group advantage + the teacher's advantage

The second part follows from log teacher - log student: on-policy distillation (Thinking Machines 2025), and SDPO
(arXiv:2601.20802), whose teacher is the policy with feedback. This arithmetic is numpy only. The teachers are in
../teachers/; SDPO's is in sdpo.py.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.samples import Credit, Floats, Sample, token_weights, trajectory_samples
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory

if TYPE_CHECKING:
    from art_cli.learners.packs.logprob_reader import Reader
    from art_cli.learners.teachers import Teacher

log = logging.getLogger(__name__)


Read = Callable[[Sequence[Sample]], Sequence[Floats]]  # samples -> [N] a model's logprobs of the targets of each
TaughtKnobs = TypeVar("TaughtKnobs", bound=loss_config.TaughtLossConfig)


def sampled_tokens(trajectory: Trajectory) -> list[Sample]:
    """Returns the trajectory's samples with every sampled token as a target.

    A sampled token that no sample holds (the rollout never saw it), and the first token of a sequence, is no target.
    """
    return trajectory_samples(trajectory, token_weights(trajectory, 1.0))


def student_logprobs(samples: Sequence[Sample], policy: Read) -> list[Floats]:
    """Returns [N] logprobs of each sample, under the weights and the temperature that sampled.

    They are the engine's. A sample that was drawn from a cut distribution is read by the policy itself.
    """
    unknown = [index for index, sample in enumerate(samples) if np.isnan(sample.logprobs).any()]
    found = [sample.logprobs for sample in samples]
    for index, logprobs in zip(unknown, policy([samples[index] for index in unknown]), strict=True):
        found[index] = logprobs
    return found


def prefix_weights(log_ratios: Floats, gamma: float) -> Floats:
    """Returns [N] 1 + gamma * (1 - D_t), where D_t is the share of the sequence's |log ratios| before token t.

    IW-OPD, Xie et al. 2026 (arXiv:2606.22600), algorithm 1: a teacher's logprobs of a text that has left its
    distribution teach less. The first token has 1 + gamma. Example: ratios 1, -3, 0 and gamma 0.5 give 1.5, 1.375, 1.
    """
    sizes = np.abs(log_ratios)
    total = sizes.sum()
    if total == 0:
        return np.full(len(sizes), 1 + gamma)
    weights: Floats = 1 + gamma * (1 - (np.cumsum(sizes) - sizes) / total)
    return weights


def teacher_advantages(log_ratios: Floats, divergence: Literal["reverse_kl", "jensen_shannon"]) -> Floats:
    """Returns [N] advantages whose policy gradient lowers that divergence of student p and teacher q, of r = log q/p.

    reverse_kl       r                     of KL(p || q): unbounded, so that one token may outweigh all others
    jensen_shannon   log((1 + q/p) / 2)    of 2 JS(p, q): never below -log 2 = -0.69, and r / 2 for small r

    Where m = (p + q) / 2, 2 JS = KL(p || m) + KL(q || m), and its derivative by p(y) is log(p(y) / m(y)). Example: the
    ratios -5, 0 and 2 give -5, 0 and 2, or -0.69, 0 and 1.43.
    """
    if divergence == "reverse_kl":
        return log_ratios
    values: Floats = np.logaddexp(0.0, log_ratios) - np.log(2.0)
    return values


class Lesson(NamedTuple):
    """A teacher's opinion of the M tokens of one trajectory."""

    advantages: Floats  # [M] NaN where it was not asked
    log_ratios: Floats  # [N] log teacher - log student of the tokens it was asked for


def lesson(
    trajectory: Trajectory, samples: Sequence[Sample], advantages: Sequence[Floats], log_ratios: Sequence[Floats]
) -> Lesson:
    """Returns each advantage [N] of the samples' targets at its token; `samples` come from `sampled_tokens`."""
    row = np.full(sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in trajectory.turns), np.nan)
    for sample, values in zip(samples, advantages, strict=True):
        row[sample.places] = values
    return Lesson(row, np.concatenate([np.empty(0), *log_ratios]))


def taught_credit(trajectory: Trajectory, taught: Floats | None, reward_part: float | None) -> Credit | float | None:
    """Returns the teacher's advantages [M] plus the part of the rewards, for each token of the trajectory.

    Without `taught` there is no lesson, and the rewards alone are learned from. Without `reward_part` only tokens with
    a lesson are trained, and a trajectory without one is left out.
    """
    if taught is None:
        return reward_part
    row = taught if reward_part is None else np.where(np.isnan(taught), reward_part, taught + reward_part)
    sizes = [(len(turn.prompt_ids), len(turn.sampled_ids)) for turn in trajectory.turns]
    parts, start = [], 0
    for num_prompt, num_sampled in sizes:
        part = row[start : start + num_prompt + num_sampled].copy()
        part[:num_prompt] = np.nan
        parts.append(part)
        start += len(part)
    return Credit(policy=parts)


def lesson_numbers(lessons: Collection[Lesson], num_trajectories: int) -> dict[str, float]:
    """Returns the numbers of a step's lessons: the mean distance to the teacher in nats, and the share with one.

    The mean of log student - log teacher over sampled tokens estimates KL(student || teacher) per token.
    """
    if not num_trajectories:
        return {}
    numbers = {"taught_share": len(lessons) / num_trajectories}
    values = np.concatenate([np.empty(0), *(each.log_ratios for each in lessons)])
    if len(values):
        numbers["teacher_kl"] = -float(values.mean())
    return numbers


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
