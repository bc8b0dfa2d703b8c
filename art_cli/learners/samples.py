"""Samples: the token sequences to train on, cut out of a trajectory's prefix tree of turns. Numpy only.

turn 0   1 2 3 [4 5]              a leaf is a turn that no other turn continues whole;
turn 1   1 2 3 [4 5] 6 [7]        each leaf is one sample, from the root of the tree to its last sampled token
turn 2   1 2 3  4  8 [9]
                                  sample of turn 1: 1 2 3 4 5 6 7, trained on 4 5 7
                                  sample of turn 2: 1 2 3 4 8 9,   trained on 9; the 4 is trained on once already

A token with a weight is trained, and counts by it. Usually the sampled ones have a weight.

The rollout never saw what an abandoned turn sampled. It is not trained on, unless a later turn continues it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_cli.learners.token_weights import CROSS_ENTROPY, NUM_ROWS, POLICY, Floats, sampled_tokens
from art_cli.runs.trajectory import Trajectory, Turn
from art_cli.runtime.errors import LearnerError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One token sequence to train on. L tokens, N of them trained.

    Example: Sample(token_ids=[1 2 3 4 5], targets=[3 4], places=[3 4], logprobs=[-0.1 -0.7],
                    raw_logprobs=[-0.1 -0.7], temperatures=[1.0 1.0], weights=[[0.5 0.5] [nan nan] ...],
                    trajectory_id="t7", turn=0)
    """

    token_ids: Ints  # [L]
    targets: Ints  # [N] places of the trained tokens, ascending; never 0, which nothing predicts
    places: Ints  # [N] index of each among the tokens that the trajectory's turns add (token_weights.py)
    logprobs: Floats  # [N] the engine's under softmax(logits / temperature); NaN: from a cut distribution, or a prompt
    raw_logprobs: Floats  # [N] the engine's under softmax(logits); NaN: the engine did not report them
    temperatures: Floats  # [N] divisors of the logits
    weights: Floats  # [6, N] in each component of the loss (token_weights.py); NaN: not in it
    trajectory_id: str
    turn: int  # index of the leaf

    @property
    def advantages(self) -> Floats:
        """[N] the weights in the policy component."""
        advantages: Floats = self.weights[POLICY]
        return advantages

    def num_in(self, component: int) -> int:
        """Returns the number of tokens that are in that component of the loss."""
        return int(np.count_nonzero(~np.isnan(self.weights[component])))


def trajectory_samples(trajectory: Trajectory, weights: Floats) -> list[Sample]:
    """Returns the trajectory's samples. Every token with a weight is trained once, in the first leaf that holds it.

    `weights` [6, M] come from `token_weights`. A trajectory without turns, or without weights, gives []. The first
    token of a sequence is never trained, because nothing predicts it. Raises LearnerError if logprobs are
    not one per sampled token, or not finite.
    """
    turns = trajectory.turns
    if not turns:
        return []
    for index, turn in enumerate(turns):
        _check(turn, f"trajectory {trajectory.id}, turn {index}")
    tokens = _Tokens(turns)
    is_owed: npt.NDArray[np.bool_] = np.any(~np.isnan(weights), axis=0)  # [M]
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
    weights = np.full((NUM_ROWS, len(targets)), np.nan)
    weights[CROSS_ENTROPY] = 1.0
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


def _check(turn: Turn, where: str) -> None:
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


def _trained_leaves(turns: Sequence[Turn], is_owed: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Ints, Ints, Ints]]:
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
