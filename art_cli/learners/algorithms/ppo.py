"""PPO: a critic gives each turn its advantage, by generalized advantage estimation.

The learner owns the critic (../critic.py). The credit of turns and the measures of the critic are functions of numbers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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

    from art_cli.learners.packs.logprob_reader import Reader

log = logging.getLogger(__name__)


EQUAL_ADVANTAGES = 1e-5  # a step's that are this close differ by the rounding of the critic's values, in float32

Read = Callable[[Sequence[Sample]], Sequence[Floats]]  # samples -> [N] the critic's values before the targets of each

# trajectory's id -> [K] the critic's value of the state before each of its turns; NaN: a turn that is not trained,
# because no later turn goes on from what it sampled and the rollout never saw it, or because it sampled nothing
TurnValues = Mapping[str, Sequence[float]]


def turn_advantages(values: Sequence[float], reward: float, *, gamma: float, gae_lambda: float) -> list[float]:
    """Returns [K] the advantages of a trajectory's K turns, whose states have these values; the reward ends the last.

    Generalized advantage estimation, Schulman et al. 2016 (arXiv:1506.02438), equation 16, over turns as in Turn-PPO
    (arXiv:2512.17008): A_t = sum_l (gamma lambda)^l delta_(t+l) with delta_t = r_t + gamma V_(t+1) - V_t. r_t is the
    reward after the last turn and 0 before, and V is 0 after the last turn. A_t + V_t is the lambda-return, the target
    of V_t.

    values 0.2 and 0.5, reward 1, gamma 1, lambda 0.5: deltas 0.3 and 0.5, advantages 0.3 + 0.5 * 0.5 = 0.55 and 0.5.
    A turn of value NaN is passed over, and its advantage is NaN. No turns give [].
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
    """Policy weights and the critic's targets of each trajectory's tokens, from the critic's values of all turns.

    The advantages of all turns of the step are shifted and scaled to mean 0 and standard deviation 1 together, and each
    turn's sampled tokens get its own. The target of a value is value + advantage, before the scaling; it is at the
    turn's first sampled token, because the state before that is the turn's.
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
    """`scaled` gives the scaled advantage of each turn that is trained, in order."""
    turns = trajectory.turns
    worth = [number if math.isnan(number) else next(scaled) for number in plain]
    return Credit(
        policy=[turn_row(turn, each, each) for turn, each in zip(turns, worth, strict=True)],
        value=_at_first_sampled(turns, [value + each for value, each in zip(values, plain, strict=True)]),
        old_value=_at_first_sampled(turns, values),
    )


def turn_values(trajectories: Sequence[Trajectory], read: Read) -> TurnValues:
    """Returns the critic's value of each turn. `read` gives its values of the states before the targets of samples."""
    found = {trajectory.id: [math.nan] * len(trajectory.turns) for trajectory in trajectories}
    samples = [sample for trajectory in trajectories for sample in _states(trajectory)]
    for sample, values in zip(samples, read(samples), strict=True):
        for turn, value in zip(sample.weights[Row.VALUE], values, strict=True):
            found[sample.trajectory_id][int(turn)] = float(value)
    return found


def _states(trajectory: Trajectory) -> list[Sample]:
    """Returns the trajectory's samples; each turn's first sampled token is a target, weighted by the turn's index."""
    credit = Credit(value=_at_first_sampled(trajectory.turns, range(len(trajectory.turns))))
    return trajectory_samples(trajectory, token_weights(trajectory, credit))


def critic_numbers(trajectories: Sequence[ScoredTrajectory], values: TurnValues, *, gamma: float) -> dict[str, float]:
    """Returns what StepMetrics has of the values: `value_mean` and `explained_variance`, over all turns of the step."""
    known, returns = [], []
    for trajectory, reward in zip(trajectories, rewards_of(trajectories), strict=True):
        of_turns = values[trajectory.id]
        got = discounted_returns(of_turns, reward, gamma=gamma)
        known += [value for value in of_turns if not math.isnan(value)]
        returns += [each for each in got if not math.isnan(each)]
    mean = math.fsum(known) / len(known) if known else math.nan
    return {"value_mean": mean, "explained_variance": explained_variance(known, returns)}


def discounted_returns(values: Sequence[float], reward: float, *, gamma: float) -> list[float]:
    """Returns [K] the return from each turn on: gamma^(turns after it) * reward. NaN where the value is NaN."""
    returns: list[float] = []
    gained = reward
    for value in reversed(values):
        returns.append(value if math.isnan(value) else gained)
        gained = gained if math.isnan(value) else gamma * gained
    return returns[::-1]


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """Returns 1 - Var(return - value) / Var(return): 1 foretold exactly, 0 no better than a constant, below 0 worse.

    NaN where all returns are the same (to 1e-8), because there is nothing to explain.
    """
    if not returns or max(returns) - min(returns) <= 1e-8:
        return math.nan
    errors = [each - value for each, value in zip(returns, values, strict=True)]
    return 1 - _variance(errors) / _variance(returns)


def _at_first_sampled(turns: Sequence[Turn], numbers: Sequence[float]) -> list[list[float]]:
    """Returns each turn's weights for its prompt_ids and sampled_ids: the number at the first sampled, else NaN."""
    return [turn_row(turn, number, math.nan) for turn, number in zip(turns, numbers, strict=True)]


def _variance(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.fsum((number - mean) ** 2 for number in numbers) / len(numbers)


class Ppo(ClippedPreset[loss_config.PpoConfig]):
    """PPO with a critic: Schulman et al. 2017 (arXiv:1707.06347), equations 7 and 9; turns as in arXiv:2512.17008.

    An action is a turn, and its state is the prompt before it. Generalized advantage estimation runs over the turns of
    each trajectory (`turn_advantages`). The advantages of all turns of the step are shifted and scaled to mean 0 and
    standard deviation 1 together, and each turn's is given to all its sampled tokens.

    A group whose rewards are equal has signal here, because attempts are compared with the critic's values and not with
    each other. Where all advantages of a step are equal (to 1e-5), the critic alone is trained.
    """

    reads_policy = True
    _policy: "Reader"
    _numbers: dict[str, float] = {}

    def bind(self, policy: "Reader", directory: Path) -> None:
        self._policy = policy

    def credit_step(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> Sequence[Sequence[Credit]]:
        knobs, trajectories = self.knobs, [trajectory for group in groups for trajectory in group]
        values = turn_values(trajectories, self._policy.values)
        self._numbers = critic_numbers(trajectories, values, gamma=knobs.gamma)
        return credit_by_values(groups, values, gamma=knobs.gamma, gae_lambda=knobs.gae_lambda)

    def numbers(self) -> dict[str, float]:
        return self._numbers

    def value_error(self, terms: ValueTerms) -> "Tensor":
        return clipped_value_error(terms, self.knobs.value_clip)

    def value_share(self, update: UpdateCounts) -> float:
        return self.knobs.value_coefficient / update.tokens
