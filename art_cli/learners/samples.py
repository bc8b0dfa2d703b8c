"""Samples: the token sequences to train on, cut out of a trajectory's prefix tree of turns. Numpy only.

turn 0   1 2 3 [4 5]              a leaf is a turn that no other turn carries on whole;
turn 1   1 2 3 [4 5] 6 [7]        each leaf is one sample, from the root of the tree to its last sampled token
turn 2   1 2 3  4  8 [9]
                                  sample of turn 1: 1 2 3 4 5 6 7, trained on 4 5 7
                                  sample of turn 2: 1 2 3 4 8 9,   trained on 9; the 4 is trained on once already

What an abandoned turn sampled was never seen by the rollout, and is not trained on unless a later turn carries it on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from art_cli.errors import LearnerError
from art_cli.trajectory import Trajectory, Turn

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Sample:
    """One token sequence to train on. L tokens, N of them trained.

    Example: Sample(token_ids=[1 2 3 4 5], targets=[3 4], logprobs=[-0.1 -0.7], raw_logprobs=[-0.1 -0.7],
                    temperatures=[1.0 1.0], advantage=0.5, trajectory_id="t7", turn=0)
    """

    token_ids: Ints  # [L]
    targets: Ints  # [N] which of them are trained, ascending; never 0, which nothing predicts
    logprobs: Floats  # [N] the engine's, under softmax(logits / temperature); NaN: sampled from a cut distribution
    raw_logprobs: Floats  # [N] the engine's, under softmax(logits); NaN: the engine did not say
    temperatures: Floats  # [N] what the logits are divided by
    advantage: float
    trajectory_id: str
    turn: int  # the leaf


def trajectory_samples(trajectory: Trajectory, advantage: float) -> list[Sample]:
    """The trajectory's samples: every sampled token is trained in exactly one of them, the first leaf that holds it.

    A trajectory without turns, or whose turns sampled nothing, gives []. Raises LearnerError: logprobs that are not one
    per sampled token, or not finite.
    """
    turns = trajectory.turns
    if not any(turn.sampled_ids for turn in turns):
        return []
    for index, turn in enumerate(turns):
        _check(turn, f"trajectory {trajectory.id}, turn {index}")
    tokens = _SampledTokens(turns)
    is_trained = np.zeros(len(tokens.logprobs), dtype=bool)
    samples = []
    for index, token_ids, sources in _leaves(turns):
        targets = np.flatnonzero(sources >= 0)
        targets = targets[~is_trained[sources[targets]] & (targets > 0)]
        if len(targets):
            chosen = sources[targets]
            is_trained[chosen] = True
            samples.append(
                Sample(
                    token_ids=token_ids,
                    targets=targets,
                    logprobs=tokens.logprobs[chosen],
                    raw_logprobs=tokens.raw_logprobs[chosen],
                    temperatures=tokens.temperatures[chosen],
                    advantage=advantage,
                    trajectory_id=trajectory.id,
                    turn=index,
                )
            )
    return samples


def bare_sample(token_ids: Ints, targets: Ints, name: str, *, temperature: float = 1.0, turn: int = 0) -> Sample:
    """A sample that no engine sampled: nothing known but its tokens. Advantage 1."""
    unknown = np.full(len(targets), np.nan)
    return Sample(
        token_ids=token_ids,
        targets=targets,
        logprobs=unknown,
        raw_logprobs=unknown,
        temperatures=np.full(len(targets), temperature),
        advantage=1.0,
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


class _SampledTokens:
    """What is known of each sampled token of a trajectory, turn after turn, in flat arrays."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        unknown = [np.full(len(turn.sampled_ids), np.nan) for turn in turns]
        self.logprobs = np.concatenate(
            [
                gap if turn.is_truncated_sampling else np.asarray(turn.logprobs)
                for turn, gap in zip(turns, unknown, strict=True)
            ]
        )
        self.raw_logprobs = np.concatenate(
            [
                gap if turn.raw_logprobs is None else np.asarray(turn.raw_logprobs)
                for turn, gap in zip(turns, unknown, strict=True)
            ]
        )
        # a greedy turn has no temperature to divide by: it is trained as softmax(logits)
        self.temperatures = np.repeat(
            [turn.temperature or 1.0 for turn in turns], [len(turn.sampled_ids) for turn in turns]
        )


def _leaves(turns: Sequence[Turn]) -> Iterator[tuple[int, Ints, Ints]]:
    """(turn, its token ids [L], which sampled token of the trajectory each of them is, -1 for a prompt's) per leaf.

    The abandoned leaves come last, each without what it sampled.
    """
    sequences: list[tuple[Ints, Ints]] = []
    num_sampled = 0
    is_leaf = [True] * len(turns)
    for turn in turns:
        fresh = np.arange(num_sampled, num_sampled + len(turn.sampled_ids))
        num_sampled += len(turn.sampled_ids)
        ids: list[Ints] = [np.asarray(turn.prompt_ids, dtype=np.int64), np.asarray(turn.sampled_ids, dtype=np.int64)]
        sources: list[Ints] = [np.full(len(turn.prompt_ids), -1), fresh]
        if turn.parent is not None:
            kept_ids, kept_sources = sequences[turn.parent]
            ids.insert(0, kept_ids[: turn.kept])
            sources.insert(0, kept_sources[: turn.kept])
            if turn.kept == len(kept_ids):
                is_leaf[turn.parent] = False
        sequences.append((np.concatenate(ids), np.concatenate(sources)))
    leaves = [index for index in range(len(turns)) if is_leaf[index]]
    for index in sorted(leaves, key=lambda index: turns[index].is_abandoned):
        token_ids, token_sources = sequences[index]
        end = len(token_ids) - (len(turns[index].sampled_ids) if turns[index].is_abandoned else 0)
        yield index, token_ids[:end], token_sources[:end]
