"""PPO: every turn gets an advantage from a critic, by generalized advantage estimation.

The learner owns the critic (../critic.py). Turn credit and critic metrics are functions on numbers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import pvariance
from typing import TYPE_CHECKING

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.normalization import UpdateCounts
from art_cli.learners.algorithms.objectives import ValueTerms, clipped_value_error
from art_cli.learners.algorithms.preset import ClippedPreset
from art_cli.learners.samples import Credit, Floats, Row, Sample, token_weights, trajectory_samples, turn_row
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, Turn

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


EQUAL_ADVANTAGES = 1e-5  # advantages this close are equal up to float32 rounding of the critic's values

# samples -> [N] per sample: the critic's values before the targets
Read = Callable[[Sequence[Sample]], Sequence[Floats]]

# trajectory id -> [K] the critic's value before every turn; NaN for untrained turns: the turn sampled nothing, or its
# reply was neither seen by the rollout nor continued by a later turn
TurnValues = Mapping[str, Sequence[float]]


def turn_advantages(values: Sequence[float], reward: float, *, gamma: float, gae_lambda: float) -> list[float]:
    """Returns [K] advantages for a trajectory's K turns with these state values; the reward follows the last turn.

    Generalized advantage estimation, Schulman et al. 2016 (arXiv:1506.02438), equation 16, over turns as in Turn-PPO
    (arXiv:2512.17008): A_t = sum_l (gamma lambda)^l delta_(t+l) with delta_t = r_t + gamma V_(t+1) - V_t. r_t is the
    reward after the last turn and 0 before; V is 0 after the last turn. A_t + V_t is the lambda-return, the target for
    V_t.

    values 0.2 and 0.5, reward 1, gamma 1, lambda 0.5: deltas 0.3 and 0.5, advantages 0.3 + 0.5 * 0.5 = 0.55 and 0.5. A
    turn with value NaN is skipped and gets advantage NaN. Without turns the result is [].
    """
    advantages: list[float] = []
    gained, following, advantage = reward, 0.0, 0.0
    for value in reversed(values):
        if math.isnan(value):
            advantages.append(value)
            continue
        advantage = gained + gamma * following - value + gamma * gae_lambda * advantage
        advantages.append(advantage)
        gained, following = 0.0, value
    return advantages[::-1]


def credit_by_values(
    groups: Sequence[Sequence[ScoredTrajectory]], values: TurnValues, *, gamma: float, gae_lambda: float
) -> list[list[Credit]]:
    """Returns policy weights and critic targets for all tokens, computed from the critic's turn values.

    Advantages are shifted and scaled to mean 0 and standard deviation 1 over all turns in the step, and assigned to the
    turn's sampled tokens. The value target is value + advantage before scaling. It applies to the turn's initial
    sampled token, because the state before that token is the turn's state.
    """
    plain = [
        [
            turn_advantages(values[each.id], reward, gamma=gamma, gae_lambda=gae_lambda)
            for each, reward in zip(group, rewards_of(group), strict=True)
        ]
        for group in groups
    ]
    known = [number for of_group in plain for turns in of_group for number in turns if not math.isnan(number)]
    is_flat = not known or max(known) - min(known) <= EQUAL_ADVANTAGES
    scaled = iter([0.0] * len(known) if is_flat else advantages(known, scale=True))
    return [
        [_credit(each, values[each.id], turns, scaled) for each, turns in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, plain, strict=True)
    ]


def _credit(trajectory: Trajectory, values: Sequence[float], plain: Sequence[float], scaled: Iterator[float]) -> Credit:
    """`scaled` yields the scaled advantage of every trained turn, in order."""
    turns = trajectory.turns
    worth = [number if math.isnan(number) else next(scaled) for number in plain]
    return Credit(
        policy=[turn_row(turn, each, each) for turn, each in zip(turns, worth, strict=True)],
        value=_at_first_sampled(turns, [value + each for value, each in zip(values, plain, strict=True)]),
        old_value=_at_first_sampled(turns, values),
    )


def turn_values(trajectories: Sequence[Trajectory], read: Read) -> TurnValues:
    """Returns the critic's turn values. `read` gives the critic's values for the states before the samples' targets."""
    found = {trajectory.id: [math.nan] * len(trajectory.turns) for trajectory in trajectories}
    samples = [sample for trajectory in trajectories for sample in _states(trajectory)]
    for sample, values in zip(samples, read(samples), strict=True):
        for turn, value in zip(sample.weights[Row.VALUE], values, strict=True):
            found[sample.trajectory_id][int(turn)] = float(value)
    return found


def _states(trajectory: Trajectory) -> list[Sample]:
    """Returns samples whose targets are the turns' initial sampled tokens, weighted by turn index."""
    credit = Credit(value=_at_first_sampled(trajectory.turns, range(len(trajectory.turns))))
    return trajectory_samples(trajectory, token_weights(trajectory, credit))


def critic_numbers(trajectories: Sequence[ScoredTrajectory], values: TurnValues, *, gamma: float) -> dict[str, float]:
    """Returns `value_mean` and `explained_variance` for StepMetrics, over all turns in the step."""
    known, returns = [], []
    for trajectory, reward in zip(trajectories, rewards_of(trajectories), strict=True):
        of_turns = values[trajectory.id]
        got = discounted_returns(of_turns, reward, gamma=gamma)
        known += [value for value in of_turns if not math.isnan(value)]
        returns += [each for each in got if not math.isnan(each)]
    mean = math.fsum(known) / len(known) if known else math.nan
    return {"value_mean": mean, "explained_variance": explained_variance(known, returns)}


def discounted_returns(values: Sequence[float], reward: float, *, gamma: float) -> list[float]:
    """Returns [K] discounted returns: gamma^(turns remaining) * reward. NaN where the value is NaN."""
    returns: list[float] = []
    gained = reward
    for value in reversed(values):
        returns.append(value if math.isnan(value) else gained)
        gained = gained if math.isnan(value) else gamma * gained
    return returns[::-1]


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """Returns 1 - Var(return - value) / Var(return): 1 is exact, 0 equals a constant prediction, below 0 is worse.

    NaN if all returns are equal (within 1e-8), because then there is nothing to explain.
    """
    if not returns or max(returns) - min(returns) <= 1e-8:
        return math.nan
    errors = [each - value for each, value in zip(returns, values, strict=True)]
    return 1 - pvariance(errors) / pvariance(returns)


def _at_first_sampled(turns: Sequence[Turn], numbers: Sequence[float]) -> list[list[float]]:
    """Returns weights for each turn's prompt_ids and sampled_ids: the number at the initial sampled token, else NaN."""
    return [turn_row(turn, number, math.nan) for turn, number in zip(turns, numbers, strict=True)]


class Ppo(ClippedPreset[loss_config.PpoConfig]):
    """PPO with a critic: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9; turns as in arXiv:2512.17008.

    An action is a turn, and its state is the prompt before it. Generalized advantage estimation runs over every
    trajectory's turns (`turn_advantages`). Advantages are shifted and scaled to mean 0 and standard deviation 1 over
    all turns in the step, and assigned to all sampled tokens in the turn.

    Groups with equal rewards have signal here, because attempts are compared with the critic's values rather than with
    each other. If all advantages in a step are equal (within 1e-5), only the critic is trained.
    """

    reads_policy = True

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit]]:
        knobs, trajectories = self.knobs, [trajectory for group in groups for trajectory in group]
        values = turn_values(trajectories, self._policy.values)
        self._numbers = critic_numbers(trajectories, values, gamma=knobs.gamma)
        return credit_by_values(groups, values, gamma=knobs.gamma, gae_lambda=knobs.gae_lambda)

    def value_error(self, terms: ValueTerms) -> "Tensor":
        return clipped_value_error(terms, self.knobs.value_clip)

    def value_share(self, update: UpdateCounts) -> float:
        return self.knobs.value_coefficient / update.tokens
