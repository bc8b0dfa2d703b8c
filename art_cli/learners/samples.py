"""Samples: the token sequences to train on, cut out of a trajectory's prefix tree of turns, with their weights.

Numpy only.

turn 0   1 2 3 [4 5]              a leaf is a turn that no other turn continues whole;
turn 1   1 2 3 [4 5] 6 [7]        each leaf is one sample, from the root of the tree to its last sampled token
turn 2   1 2 3  4  8 [9]
                                  sample of turn 1: 1 2 3 4 5 6 7, trained on 4 5 7
                                  sample of turn 2: 1 2 3 4 8 9,   trained on 9; the 4 is trained on once already

The rollout never saw what an abandoned turn sampled. It is not trained on, unless a later turn continues it.

A token with a weight is trained, and counts by it, in each component of the loss. Usually the sampled ones have one.

    policy          the advantage, for the algorithm's objective; sampled tokens only
    cross_entropy   -weight * log p: imitation of any token, a tool's output included
    reference_kl    weight * KL(policy || reference), estimator k3
    value           the error of the critic's value of the state before the token; the number is the value's target

A token may be in several components, or in none. Each component is divided by its own counts over the whole optimizer
step. M tokens of a trajectory: of each turn the prompt tokens that it adds, then the sampled ones.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runs.trajectory import MAX_TOKEN_ID, Trajectory, Turn
from art_cli.runtime.errors import LearnerError, one_line

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

Weights = float | Sequence[Sequence[float] | Floats]


class Row(IntEnum):
    """The rows of a weights array [6, N]: a number for each token, or NaN if the token is not in the row.

    The first four rows are the components of the loss, each with separate counts.
    """

    POLICY = 0  # the advantage
    CROSS_ENTROPY = 1  # the factor of -log p
    REFERENCE_KL = 2  # the factor of KL(policy || reference)
    VALUE = 3  # the target of the critic's value
    OLD_VALUE = 4  # the critic's value before the step, of tokens in VALUE
    NEAR_OLD = 5  # the factor of KL(old || new), of tokens in POLICY that loss.kl_cov holds


COMPONENTS = (Row.POLICY, Row.CROSS_ENTROPY, Row.REFERENCE_KL, Row.VALUE)


def mask_of(weights: Floats, row: Row) -> Mask:
    """Returns [N] whether each token is in that row of [6, N] weights. A weight of 0 is in it, NaN is not."""
    mask: Mask = ~np.isnan(weights[row])
    return mask


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
    rows = np.full((len(Row), len(is_sampled)), np.nan)
    for name, weights in credit._asdict().items():
        rows[Row[name.upper()]] = _row(name, weights, trajectory, is_sampled)
    if mask_of(rows, Row.POLICY)[~is_sampled].any():
        raise LearnerError(f"trajectory {trajectory.id}: policy weights for tokens of a prompt, which were not sampled")
    return rows


def turn_row(turn: Turn, first: float, rest: float) -> list[float]:
    """Returns one turn's weights in a component of Credit: `first` at its first sampled token, `rest` at the others."""
    sampled = [first, *[rest] * (len(turn.sampled_ids) - 1)] if turn.sampled_ids else []
    return [*[math.nan] * len(turn.prompt_ids), *sampled]


def sampled_tokens(trajectory: Trajectory) -> Mask:
    """Returns [M] whether each token was sampled."""
    lengths = [(len(turn.prompt_ids), len(turn.sampled_ids)) for turn in trajectory.turns]
    return np.repeat(np.tile([False, True], len(lengths)), np.array(lengths, dtype=np.int64).ravel())


def observed_tokens(trajectory: Trajectory) -> Mask:
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


def _row(name: str, weights: Weights | None, trajectory: Trajectory, is_sampled: Mask) -> Floats:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One token sequence to train on. L tokens, N of them trained.

    Example: Sample(token_ids=[1 2 3 4 5], targets=[3 4], places=[3 4], logprobs=[-0.1 -0.7],
                    raw_logprobs=[-0.1 -0.7], temperatures=[1.0 1.0], weights=[[0.5 0.5] [nan nan] ...],
                    trajectory_id="t7", turn=0)
    """

    token_ids: Ints  # [L]
    targets: Ints  # [N] places of the trained tokens, ascending; never 0, which nothing predicts
    places: Ints  # [N] index of each among the tokens that the trajectory's turns add
    logprobs: Floats  # [N] the engine's under softmax(logits / temperature); NaN: from a cut distribution, or a prompt
    raw_logprobs: Floats  # [N] the engine's under softmax(logits); NaN: the engine did not report them
    temperatures: Floats  # [N] divisors of the logits
    weights: Floats  # [6, N] by Row; NaN: the token is not in the row
    trajectory_id: str
    turn: int  # index of the leaf

    @property
    def advantages(self) -> Floats:
        """[N] the weights in the policy component."""
        advantages: Floats = self.weights[Row.POLICY]
        return advantages

    def num_in(self, row: Row) -> int:
        """Returns the number of tokens in that row of the weights."""
        return int(np.count_nonzero(mask_of(self.weights, row)))


def trajectory_samples(trajectory: Trajectory, weights: Floats) -> list[Sample]:
    """Returns the trajectory's samples. Every token with a weight is trained once, in the first leaf that holds it.

    `weights` [6, M] come from `token_weights`. A trajectory without turns, or without weights, gives []. The first
    token of a sequence is never trained, because nothing predicts it. Raises LearnerError if logprobs are
    not one per sampled token, or not finite.
    """
    turns = trajectory.turns
    if not turns:
        return []
    lengths: list[int] = []  # tokens of each turn's sequence
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
            places=chosen,
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
    """Returns the numbers of tokens and of samples, if every sampled token had a weight."""
    leaves = _trained_leaves(trajectory.turns, sampled_tokens(trajectory))
    sizes = [len(targets) for _, _, targets, _ in leaves]
    return sum(sizes), len(sizes)


def bare_sample(token_ids: Ints, targets: Ints, name: str, *, temperature: float = 1.0, turn: int = 0) -> Sample:
    """Returns a sample that no engine sampled, to imitate: its targets have weight 1 in the cross entropy."""
    unknown = np.full(len(targets), np.nan)
    weights = np.full((len(Row), len(targets)), np.nan)
    weights[Row.CROSS_ENTROPY] = 1.0
    return Sample(
        token_ids=token_ids,
        targets=targets,
        places=targets,
        logprobs=unknown,
        raw_logprobs=unknown,
        temperatures=np.full(len(targets), temperature),
        weights=weights,
        trajectory_id=name,
        turn=turn,
    )


def check_fits(samples: Iterable[Sample], *, max_length: int, vocabulary: int) -> None:
    """Raises LearnerError if a sample has a token that the model does not have, or more tokens than its context."""
    for sample in samples:
        where = f"trajectory {sample.trajectory_id}, turn {sample.turn}"
        if len(sample.token_ids) > max_length:
            raise LearnerError(f"{where}: {len(sample.token_ids)} tokens, over the model's {max_length}; leave it out")
        if not 0 <= int(np.min(sample.token_ids)) <= int(np.max(sample.token_ids)) < vocabulary:
            raise LearnerError(f"{where}: a token that the model does not have; it was sampled from another model")


def _check(turn: Turn, there: int, where: str) -> None:
    """Raises LearnerError if the turn's numbers cannot be. `there` is the number of tokens before it."""
    if not 0 <= turn.kept <= there:
        raise LearnerError(f"{where}: it keeps {turn.kept} tokens of the {there} before it")
    if not all(0 <= id <= MAX_TOKEN_ID for id in (*turn.prompt_ids, *turn.sampled_ids)):
        raise LearnerError(f"{where}: a token id below 0 or above {MAX_TOKEN_ID}; no model has it")
    if not 0 <= turn.temperature <= MAX_NUMBER:
        raise LearnerError(f"{where}: its temperature is {turn.temperature}")
    for name, values in (("logprobs", turn.logprobs), ("raw_logprobs", turn.raw_logprobs)):
        if values is None:
            continue
        if len(values) != len(turn.sampled_ids):
            raise LearnerError(f"{where}: {len(turn.sampled_ids)} sampled tokens but {len(values)} {name}")
        if not np.isfinite(np.asarray(values, dtype=np.float64)).all():
            raise LearnerError(f"{where}: {name} that are not finite; the engine that sampled it is at fault")


class _Tokens:
    """The engine's numbers of a trajectory's tokens, in flat arrays of [M]; NaN for the tokens of prompts."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        logprobs, raw_logprobs, temperatures = [], [], []
        for turn in turns:
            prompt, sampled = np.full(len(turn.prompt_ids), np.nan), np.full(len(turn.sampled_ids), np.nan)
            logprobs += [prompt, sampled if turn.is_truncated_sampling else np.asarray(turn.logprobs)]
            raw_logprobs += [prompt, sampled if turn.raw_logprobs is None else np.asarray(turn.raw_logprobs)]
            # a greedy turn is trained as softmax(logits), because its temperature of 0 cannot divide
            temperatures += [np.ones(len(prompt)), np.full(len(sampled), turn.temperature or 1.0)]
        self.logprobs: Floats = np.concatenate(logprobs)
        self.raw_logprobs: Floats = np.concatenate(raw_logprobs)
        self.temperatures: Floats = np.concatenate(temperatures)


def _trained_leaves(turns: Sequence[Turn], is_owed: Mask) -> Iterator[tuple[int, Ints, Ints, Ints]]:
    """Yields for each leaf with trained tokens: its turn, its token ids [L], and its N trained tokens' places and the
    indexes among the trajectory's M tokens. `is_owed` [M] marks those to be trained; it is consumed.
    """
    for index, token_ids, sources in _leaves(turns):
        targets = np.flatnonzero(is_owed[sources])
        targets = targets[targets > 0]
        if len(targets):
            is_owed[sources[targets]] = False
            yield index, token_ids, targets, sources[targets]


def _leaves(turns: Sequence[Turn]) -> Iterator[tuple[int, Ints, Ints]]:
    """Yields for each leaf: its turn, its token ids [L], and the index of each among the trajectory's M tokens [L].

    The abandoned leaves come last, each without what it sampled.
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
