"""Token weights: how much each token of a trajectory counts in each component of the loss. Numpy only.

    policy          the advantage, for the algorithm's objective; sampled tokens only
    cross_entropy   -weight * log p: imitation of any token, a tool's output included
    reference_kl    weight * KL(policy || reference), estimator k3
    value           the error of the critic's value of the state before the token; the number is the value's target

A token may be in several components, or in none. Each component is divided by its own counts over the whole optimizer
step. M tokens of a trajectory: of each turn the prompt tokens that it adds, then the sampled ones.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.runs.trajectory import Trajectory, Turn
from art_cli.runtime.errors import LearnerError, one_line

POLICY, CROSS_ENTROPY, REFERENCE_KL, VALUE = range(4)
NUM_COMPONENTS = 4
OLD_VALUE = 4  # the row behind the components: the critic's value before the step, where the token is in VALUE
NEAR_OLD = 5  # and the weight of KL(old || new) of tokens in POLICY, which loss.kl_cov sets; NaN: none
NUM_ROWS = 6

Floats = npt.NDArray[np.float64]
Weights = float | Sequence[Sequence[float] | Floats]


class Credit(NamedTuple):
    """The weights of one trajectory's tokens. Example: Credit(policy=0.5, reference_kl=0.01)

    Each component is one weight for all sampled tokens, or a sequence of weights per turn, one for each of its
    prompt_ids and sampled_ids, NaN where the token is not in the component. None if no token is in it.

    `value` holds targets of the critic, so a 0 there counts too, and `old_value` its values before the step. Only a
    loss with a critic (loss=ppo) can train them.
    """

    policy: Weights | None = None
    cross_entropy: Weights | None = None
    reference_kl: Weights | None = None
    value: Weights | None = None
    old_value: Weights | None = None


def token_weights(trajectory: Trajectory, credit: Credit | float) -> Floats:
    """Returns [6, M] the weight of each token in each component, NaN outside it. A number is a policy weight.

    Raises LearnerError if there is not one weight per token, an infinite one, or a policy weight in a prompt.
    """
    credit = credit if isinstance(credit, Credit) else Credit(policy=credit)
    is_sampled = sampled_tokens(trajectory)
    rows = [_row(name, weights, trajectory, is_sampled) for name, weights in credit._asdict().items()]
    if not np.isnan(rows[POLICY][~is_sampled]).all():
        raise LearnerError(f"trajectory {trajectory.id}: policy weights for tokens of a prompt, which were not sampled")
    return np.stack([*rows, np.full(len(is_sampled), np.nan)])


def turn_row(turn: Turn, first: float, rest: float) -> list[float]:
    """Returns one turn's weights in a component of Credit: `first` at its first sampled token, `rest` at the others."""
    sampled = [first, *[rest] * (len(turn.sampled_ids) - 1)] if turn.sampled_ids else []
    return [*[math.nan] * len(turn.prompt_ids), *sampled]


def sampled_tokens(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """Returns [M] whether each token was sampled."""
    lengths = [(len(turn.prompt_ids), len(turn.sampled_ids)) for turn in trajectory.turns]
    return np.repeat(np.tile([False, True], len(lengths)), np.array(lengths, dtype=np.int64).ravel())


def observed_tokens(trajectory: Trajectory) -> npt.NDArray[np.bool_]:
    """Returns [M] whether a token is of the environment's answer to a reply: a tool's output, a further user message.

    These are the prompt tokens that a turn adds right after the end of an earlier reply, with what the chat template
    puts around the messages, which no record tells apart. A turn that leaves the earlier tokens elsewhere renders its
    replies anew, or begins another conversation: its prompt tokens are not taken for the environment's.
    """
    ends: list[set[int]] = []  # each turn's places in its whole sequence where a reply ends
    parts = [np.zeros(0, dtype=np.bool_)]
    for turn in trajectory.turns:
        before = set() if turn.parent is None else {end for end in ends[turn.parent] if end <= turn.kept}
        parts += [np.full(len(turn.prompt_ids), turn.kept in before), np.zeros(len(turn.sampled_ids), dtype=np.bool_)]
        ends.append(before | {turn.kept + len(turn.prompt_ids) + len(turn.sampled_ids)})
    return np.concatenate(parts)


def _row(name: str, weights: Weights | None, trajectory: Trajectory, is_sampled: npt.NDArray[np.bool_]) -> Floats:
    """Returns [M] the weights of one component."""
    row = np.full(len(is_sampled), np.nan)
    if isinstance(weights, float | int | np.number):
        row[is_sampled] = weights
    elif weights is not None:
        sizes = [len(turn.prompt_ids) + len(turn.sampled_ids) for turn in trajectory.turns]
        try:
            parts = [np.asarray(part, dtype=np.float64) for part in weights]
        except (TypeError, ValueError) as error:
            raise LearnerError(f"trajectory {trajectory.id}: {name}: {one_line(error)}") from error
        if [part.shape for part in parts] != [(size,) for size in sizes]:
            raise LearnerError(f"trajectory {trajectory.id}: {name} needs a weight per token of each turn: {sizes}")
        row = np.concatenate([row[:0], *parts])
    if np.isinf(row).any():
        raise LearnerError(f"trajectory {trajectory.id}: a weight in {name} is infinite")
    return row
