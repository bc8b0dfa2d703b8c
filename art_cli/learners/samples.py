"""Samples: the token sequences to train on, extracted from a trajectory's prefix tree of turns, plus token weights.

Numpy only.

turn 0   1 2 3 [4 5]              [sampled tokens]; a leaf is a turn not continued in full by any later turn;
turn 1   1 2 3 [4 5] 6 [7]        each leaf gives one sample, from the tree's root to the leaf's last sampled token
turn 2   1 2 3  4  8 [9]
                                  sample for turn 1: 1 2 3 4 5 6 7, trained on 4 5 7
                                  sample for turn 2: 1 2 3 4 8 9,   trained on 9; token 4 was already trained once

The rollout never saw the tokens sampled in an abandoned turn. They are not trained unless a later turn continues them.

A token with a weight in some loss component is trained in that component. Usually only sampled tokens have weights.

    policy          the advantage, for the algorithm's objective; sampled tokens only
    cross_entropy   -weight * log p: imitation, which may cover any token, including tool output
    reference_kl    weight * KL(policy || reference), estimator k3
    value           the critic's value error for the state before the token; the weight is the value target

A token may belong to several components or to none. Each component is normalized by separate counts over the whole
optimizer step. M counts a trajectory's tokens: per turn, the newly added prompt tokens, then the sampled tokens.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.runs.trajectory import MAX_TOKEN_ID, Trajectory, Turn
from art_cli.runtime.errors import LearnerError, one_line

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MAX_LOGPROB = 1e-6  # rounding can raise a logprob slightly above 0

Weights = float | Sequence[Sequence[float] | Floats]


class Row(IntEnum):
    """Row indexes for a weights array [5, N]. Each entry is a token's number, NaN where the token is not in the row.

    The first four rows are the loss components, each normalized by separate counts.
    """

    POLICY = 0  # the advantage
    CROSS_ENTROPY = 1  # factor for -log p
    REFERENCE_KL = 2  # factor for KL(policy || reference)
    VALUE = 3  # target for the critic's value
    OLD_VALUE = 4  # the critic's value before the step, for tokens in VALUE


COMPONENTS = (Row.POLICY, Row.CROSS_ENTROPY, Row.REFERENCE_KL, Row.VALUE)


def mask_of(weights: Floats, row: Row) -> Mask:
    """Returns [N] whether each token is in this row of [5, N] weights. A weight of 0 counts; NaN does not."""
    mask: Mask = ~np.isnan(weights[row])
    return mask


class Credit(NamedTuple):
    """Token weights for one trajectory. Example: Credit(policy=0.5, reference_kl=0.01)

    Each component is one weight for all sampled tokens, or one sequence per turn with a weight for every token in
    prompt_ids and sampled_ids (NaN where the token is not in the component). None leaves the component empty.

    `value` holds the critic's targets, so 0 counts as a target; `old_value` holds the critic's values before the step.
    Both require a loss with a critic (loss=ppo).
    """

    policy: Weights | None = None
    cross_entropy: Weights | None = None
    reference_kl: Weights | None = None
    value: Weights | None = None
    old_value: Weights | None = None


def token_weights(trajectory: Trajectory, credit: Credit | float) -> Floats:
    """Returns [5, M] the weight of every token in each component, NaN where absent. A number is a policy weight.

    Raises LearnerError if the number of weights is wrong, a weight is infinite, or a prompt token has a policy weight.
    """
    credit = credit if isinstance(credit, Credit) else Credit(policy=credit)
    is_sampled = sampled_mask(trajectory)
    rows = np.full((len(Row), len(is_sampled)), np.nan)
    for name, weights in credit._asdict().items():
        rows[Row[name.upper()]] = _row(name, weights, trajectory, is_sampled)
    if mask_of(rows, Row.POLICY)[~is_sampled].any():
        raise LearnerError(f"trajectory {trajectory.id}: policy weights for tokens of a prompt, which were not sampled")
    return rows


def turn_row(turn: Turn, first: float, rest: float) -> list[float]:
    """Returns one turn's weights for a Credit component: `first` at the initial sampled token, then `rest`."""
    sampled = [first, *[rest] * (len(turn.sampled_ids) - 1)] if turn.sampled_ids else []
    return [*[math.nan] * len(turn.prompt_ids), *sampled]


def turn_sizes(trajectory: Trajectory) -> list[int]:
    """Returns the number of tokens that each turn adds; they sum to M."""
    return [len(turn.prompt_ids) + len(turn.sampled_ids) for turn in trajectory.turns]


def split_by_turn(trajectory: Trajectory, values: Floats) -> list[Floats]:
    """Splits [M] values into one array per turn."""
    return np.split(values, np.cumsum(turn_sizes(trajectory), dtype=np.int64))[:-1]


def common_prefix(left: Ints, right: Ints) -> int:
    """Returns the number of leading entries that the two arrays share."""
    length = min(len(left), len(right))
    differs = left[:length] != right[:length]
    return int(differs.argmax()) if differs.any() else length


def sampled_mask(trajectory: Trajectory) -> Mask:
    """Returns [M] whether each token was sampled."""
    lengths = [(len(turn.prompt_ids), len(turn.sampled_ids)) for turn in trajectory.turns]
    return np.repeat(np.tile([False, True], len(lengths)), np.array(lengths, dtype=np.int64).ravel())


def observed_tokens(trajectory: Trajectory) -> Mask:
    """Returns [M] whether each token comes from the environment's answer to a reply (tool output, next user message).

    Those are the prompt tokens that a turn adds directly after an earlier reply's end. They include the chat template's
    markup around the messages, which the record cannot separate. A turn that diverges anywhere else has re-rendered
    earlier replies or started another conversation, so its prompt tokens do not count.
    """
    ends: list[set[int]] = []  # per turn: the positions in its whole sequence where a reply ends
    parts = [np.zeros(0, dtype=np.bool_)]
    for turn in trajectory.turns:
        before = set() if turn.parent is None else {end for end in ends[turn.parent] if end <= turn.kept}
        parts += [np.full(len(turn.prompt_ids), turn.kept in before), np.zeros(len(turn.sampled_ids), dtype=np.bool_)]
        ends.append(before | {turn.kept + len(turn.prompt_ids) + len(turn.sampled_ids)})
    return np.concatenate(parts)


def _row(name: str, weights: Weights | None, trajectory: Trajectory, is_sampled: Mask) -> Floats:
    row = np.full(len(is_sampled), np.nan)
    if isinstance(weights, float | int | np.number):
        row[is_sampled] = weights
    elif weights is not None:
        sizes = turn_sizes(trajectory)
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One token sequence to train on, with L tokens of which N are trained.

    Example: Sample(token_ids=[1 2 3 4 5], targets=[3 4], indexes=[3 4], logprobs=[-0.1 -0.7],
                    raw_logprobs=[-0.1 -0.7], temperatures=[1.0 1.0], weights=[[0.5 0.5] [nan nan] ...],
                    trajectory_id="t7", turn=0)
    """

    token_ids: Ints  # [L]
    targets: Ints  # [N] positions of the trained tokens, ascending; never 0, because nothing predicts position 0
    indexes: Ints  # [N] each target's index among the trajectory's M tokens
    # [N] engine logprobs under softmax(logits / temperature); NaN: truncated sampling, or a prompt token
    logprobs: Floats
    raw_logprobs: Floats  # [N] engine logprobs under softmax(logits); NaN: not reported
    temperatures: Floats  # [N] divisors for the logits
    weights: Floats  # [5, N] by Row; NaN: the token is not in the row
    trajectory_id: str
    turn: int  # the leaf's turn index

    @property
    def advantages(self) -> Floats:
        """[N] weights in the policy component."""
        advantages: Floats = self.weights[Row.POLICY]
        return advantages

    def num_in(self, row: Row) -> int:
        """Returns the number of tokens in this row of the weights."""
        return int(np.count_nonzero(mask_of(self.weights, row)))


def trajectory_samples(trajectory: Trajectory, weights: Floats) -> list[Sample]:
    """Returns the trajectory's samples. Every weighted token is trained once, in the earliest leaf that contains it.

    `weights` [5, M] come from `token_weights`. Returns [] for a trajectory without turns or weights. A sequence's
    initial token is never trained, because nothing predicts it. Raises LearnerError if a sampled token has no logprob,
    a non-finite one, or one above 0.
    """
    turns = trajectory.turns
    if not turns:
        return []
    lengths: list[int] = []  # sequence length after each turn
    for index, turn in enumerate(turns):
        there = 0 if turn.parent is None else lengths[turn.parent]
        _check(turn, there, f"trajectory {trajectory.id}, turn {index}")
        lengths.append(turn.kept + len(turn.prompt_ids) + len(turn.sampled_ids))
    tokens = _Tokens(turns)
    is_owed: Mask = np.any(~np.isnan(weights), axis=0)  # [M]
    return [
        Sample(
            token_ids=token_ids,
            targets=targets,
            indexes=chosen,
            logprobs=tokens.logprobs[chosen],
            raw_logprobs=tokens.raw_logprobs[chosen],
            temperatures=tokens.temperatures[chosen],
            weights=weights[:, chosen],
            trajectory_id=trajectory.id,
            turn=index,
        )
        for index, token_ids, targets, chosen in _trained_leaves(turns, is_owed)
    ]


def count_sampled(trajectory: Trajectory) -> tuple[int, int]:
    """Returns the numbers of tokens and samples that would be trained if every sampled token had a weight."""
    leaves = _trained_leaves(trajectory.turns, sampled_mask(trajectory))
    sizes = [len(targets) for _, _, targets, _ in leaves]
    return sum(sizes), len(sizes)


def bare_sample(token_ids: Ints, targets: Ints, name: str, *, temperature: float = 1.0, turn: int = 0) -> Sample:
    """Returns an imitation sample, not sampled by any engine: its targets have cross-entropy weight 1."""
    unknown = np.full(len(targets), np.nan)
    weights = np.full((len(Row), len(targets)), np.nan)
    weights[Row.CROSS_ENTROPY] = 1.0
    return Sample(
        token_ids=token_ids,
        targets=targets,
        indexes=targets,
        logprobs=unknown,
        raw_logprobs=unknown,
        temperatures=np.full(len(targets), temperature),
        weights=weights,
        trajectory_id=name,
        turn=turn,
    )


def check_fits(samples: Iterable[Sample], *, max_length: int, vocabulary: int) -> None:
    """Raises LearnerError if a sample exceeds the model's context or contains a token outside its vocabulary."""
    for sample in samples:
        where = f"trajectory {sample.trajectory_id}, turn {sample.turn}"
        if len(sample.token_ids) > max_length:
            raise LearnerError(f"{where}: {len(sample.token_ids)} tokens, over the model's {max_length}; leave it out")
        if not 0 <= int(np.min(sample.token_ids)) <= int(np.max(sample.token_ids)) < vocabulary:
            raise LearnerError(f"{where}: a token outside the model's vocabulary; another model sampled it")


def _check(turn: Turn, there: int, where: str) -> None:
    """Raises LearnerError if the turn's numbers are impossible. `there` is the parent sequence's length."""
    if not 0 <= turn.kept <= there:
        raise LearnerError(f"{where}: it keeps {turn.kept} tokens of the {there} before it")
    if not all(0 <= id <= MAX_TOKEN_ID for id in (*turn.prompt_ids, *turn.sampled_ids)):
        raise LearnerError(f"{where}: a token id below 0 or above {MAX_TOKEN_ID}; no model has it")
    for name, values in (("logprobs", turn.logprobs), ("raw_logprobs", turn.raw_logprobs)):
        if values is None:
            continue
        if len(values) != len(turn.sampled_ids):
            raise LearnerError(f"{where}: {len(turn.sampled_ids)} sampled tokens but {len(values)} {name}")
        numbers = np.asarray(values, dtype=np.float64)
        if not np.isfinite(numbers).all():
            raise LearnerError(f"{where}: {name} that are not finite, from the sampling engine")
        if (numbers > MAX_LOGPROB).any():
            raise LearnerError(
                f"{where}: {name} of up to {numbers.max():g}, and a logprob is at most 0; leave the trajectory out"
            )


class _Tokens:
    """Engine numbers for a trajectory's tokens, as flat [M] arrays; NaN for prompt tokens."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        logprobs, raw_logprobs, temperatures = [], [], []
        for turn in turns:
            prompt, sampled = np.full(len(turn.prompt_ids), np.nan), np.full(len(turn.sampled_ids), np.nan)
            logprobs += [prompt, sampled if turn.is_truncated_sampling else np.asarray(turn.logprobs)]
            raw_logprobs += [prompt, sampled if turn.raw_logprobs is None else np.asarray(turn.raw_logprobs)]
            # a greedy turn is trained as softmax(logits), because logits cannot be divided by temperature 0
            temperatures += [np.ones(len(prompt)), np.full(len(sampled), turn.temperature or 1.0)]
        self.logprobs: Floats = np.concatenate(logprobs)
        self.raw_logprobs: Floats = np.concatenate(raw_logprobs)
        self.temperatures: Floats = np.concatenate(temperatures)


def _trained_leaves(turns: Sequence[Turn], is_owed: Mask) -> Iterator[tuple[int, Ints, Ints, Ints]]:
    """Yields (turn, token ids [L], target positions [N], target indexes among the M tokens [N]) for leaves with
    targets.

    `is_owed` [M] marks the tokens to train; each token is cleared once it is assigned to a leaf.
    """
    for index, token_ids, sources in _leaves(turns):
        targets = np.flatnonzero(is_owed[sources])
        targets = targets[targets > 0]
        if len(targets):
            is_owed[sources[targets]] = False
            yield index, token_ids, targets, sources[targets]


def _leaves(turns: Sequence[Turn]) -> Iterator[tuple[int, Ints, Ints]]:
    """Yields (turn, token ids [L], each token's index among the trajectory's M tokens [L]) for every leaf.

    Abandoned leaves come last, without their sampled tokens.
    """
    sequences: list[tuple[Ints, Ints]] = []
    num_tokens = 0
    is_leaf = [True] * len(turns)
    for turn in turns:
        ids = np.array([*turn.prompt_ids, *turn.sampled_ids], dtype=np.int64)
        sources = np.arange(num_tokens, num_tokens + len(ids))
        num_tokens += len(ids)
        if turn.parent is not None:
            kept_ids, kept_sources = sequences[turn.parent]
            ids = np.concatenate([kept_ids[: turn.kept], ids])
            sources = np.concatenate([kept_sources[: turn.kept], sources])
            if turn.kept == len(kept_ids):
                is_leaf[turn.parent] = False
        sequences.append((ids, sources))
    leaves = [index for index in range(len(turns)) if is_leaf[index]]
    for index in sorted(leaves, key=lambda index: turns[index].is_abandoned):
        token_ids, token_sources = sequences[index]
        end = len(token_ids) - (len(turns[index].sampled_ids) if turns[index].is_abandoned else 0)
        yield index, token_ids[:end], token_sources[:end]
