"""StepRecord: per-token numbers of a step, collected pack by pack, and the lines for learned.jsonl.

Recording only copies numbers that the step computes anyway, so it does not affect training. Per-token numbers are
float32, as in the loss, written with the fewest digits that restore the same value.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from art_cli.learners.samples import Floats, Ints, Sample, sampled_mask, split_by_turn, turn_sizes
from art_cli.runs.trajectory import LearnedTrajectory, LeftOut, PerToken, ScoredTrajectory, Trajectory, has_signal

if TYPE_CHECKING:
    from torch import Tensor

    from art_cli.learners.algorithms.pack_loss import LossTerms, PackLoss
    from art_cli.learners.packs.packing import Pack


class _Piece(NamedTuple):
    """The N terms of one sample."""

    indexes: Ints  # [N] each term's index among the trajectory's tokens
    advantages: Floats  # [N] policy weights; NaN: not in the policy component
    logprobs: Floats  # [N] nats
    importance: Floats | None  # [N] weights from loss.off_policy; None if unset
    reference: Floats | None  # [N] nats, under the reference policy; None if not computed
    loss: float
    update: int


class StepRecord(msgspec.Struct):
    """Collects one step's numbers. Each learner process has a record for its packs."""

    pieces: dict[str, list[_Piece]] = {}  # trajectory id -> pieces, one per sample
    is_stopped: bool = False  # whether train.max_kl ended the step before some attempts were trained

    def add(self, pack: "Pack", terms: "LossTerms", loss: "PackLoss", *, update: int) -> None:
        """Adds a pack. Call it when the pack's optimizer step (number `update`) is first computed."""
        logprobs = _array(terms.new)
        importance = None if terms.importance is None else _array(terms.importance)
        reference = None if terms.reference is None else _array(terms.reference)
        parts = _array(loss.parts)
        ends = np.searchsorted(pack.terms.samples, np.arange(len(pack.samples) + 1))
        for sample, start, end in zip(pack.samples, ends[:-1], ends[1:], strict=True):
            piece = _Piece(
                indexes=sample.indexes,
                advantages=sample.advantages,
                logprobs=logprobs[start:end],
                importance=None if importance is None else importance[start:end],
                reference=None if reference is None else reference[start:end],
                loss=math.fsum(parts[start:end]),
                update=update,
            )
            self.pieces.setdefault(sample.trajectory_id, []).append(piece)

    def note_learned(self, sample: Sample, logprobs: Floats, *, loss: float, update: int) -> None:
        """Like `add`, for one sample that ran elsewhere. `logprobs` are [N], for the sample's targets."""
        piece = _Piece(sample.indexes, sample.advantages, logprobs.astype(np.float32), None, None, loss, update)
        self.pieces.setdefault(sample.trajectory_id, []).append(piece)

    @classmethod
    def total(cls, parts: Sequence["StepRecord"]) -> "StepRecord":
        """Combines the records of all processes."""
        total = cls()
        total.is_stopped = parts[0].is_stopped
        for part in parts:
            for name, pieces in part.pieces.items():
                total.pieces.setdefault(name, []).extend(pieces)
        return total

    def lines(self, groups: Sequence[Sequence[ScoredTrajectory]]) -> list[LearnedTrajectory]:
        """Returns one line per trajectory, ordered by group and index."""
        return [
            self._line(trajectory, group)
            for group in groups
            for trajectory in sorted(group, key=lambda trajectory: trajectory.index)
        ]

    def _line(self, trajectory: ScoredTrajectory, group: Sequence[ScoredTrajectory]) -> LearnedTrajectory:
        pieces = self.pieces.get(trajectory.id)
        if pieces is None:
            left_out = _left_out(trajectory, group)
            is_skipped = left_out == "algorithm" and self.is_stopped
            return LearnedTrajectory(id=trajectory.id, left_out="max_kl" if is_skipped else left_out)
        advantages = _spread(trajectory, [(piece.indexes, piece.advantages) for piece in pieces])
        logprobs = _spread(trajectory, [(piece.indexes, piece.logprobs) for piece in pieces])
        weights = [
            (piece.indexes, _inside(piece.importance, piece)) for piece in pieces if piece.importance is not None
        ]
        reference = [(piece.indexes, piece.reference) for piece in pieces if piece.reference is not None]
        return LearnedTrajectory(
            id=trajectory.id,
            update=pieces[0].update,
            num_tokens=sum(len(piece.indexes) for piece in pieces),
            advantages=_by_turn(trajectory, advantages),
            logprobs=_by_turn(trajectory, logprobs),
            reference=_by_turn(trajectory, _spread(trajectory, reference)) if reference else None,
            importance=_by_turn(trajectory, _spread(trajectory, weights)) if weights else None,
            loss=math.fsum(piece.loss for piece in pieces),
            masked=self._masked_tokens(trajectory, advantages, pieces),
        )

    def _masked_tokens(self, trajectory: Trajectory, advantages: Floats, pieces: Sequence[_Piece]) -> dict[str, int]:
        """Counts the sampled tokens that do not move the policy, by reason."""
        is_silent = np.isnan(advantages) & sampled_mask(trajectory)
        is_abandoned = np.repeat([turn.is_abandoned for turn in trajectory.turns], turn_sizes(trajectory))
        weights = [_inside(piece.importance, piece) for piece in pieces if piece.importance is not None]
        masked = {
            "abandoned": int(np.count_nonzero(is_silent & is_abandoned)),
            "no_advantage": int(np.count_nonzero(is_silent & ~is_abandoned)),
            "off_policy": sum(int(np.count_nonzero(each == 0)) for each in weights),
        }
        return {reason: num for reason, num in masked.items() if num}


def _array(tensor: "Tensor") -> Floats:
    array: Floats = tensor.detach().cpu().double().numpy()
    return array


def _inside(values: Floats, piece: _Piece) -> Floats:
    """Returns the values in the policy component; NaN elsewhere."""
    return np.where(np.isnan(piece.advantages), np.nan, values)


def _left_out(trajectory: ScoredTrajectory, group: Sequence[ScoredTrajectory]) -> LeftOut:
    """Returns the reason why no token of this trajectory was trained."""
    if trajectory.error is not None:
        return "failed"
    if not trajectory.num_sampled:
        return "no_tokens"
    finished = [each for each in group if each.error is None]
    if not has_signal([each.reward for each in finished if each.reward is not None]):
        return "no_signal"
    reliability = finished[0].reliability
    return "unreliable" if reliability is not msgspec.UNSET and reliability.is_left_out else "algorithm"


def _spread(trajectory: Trajectory, parts: Sequence[tuple[Ints, Floats]]) -> Floats:
    """Returns [M] the values at their token indexes; NaN elsewhere."""
    whole = np.full(sum(turn_sizes(trajectory)), np.nan)
    for indexes, values in parts:
        whole[indexes] = values
    return whole


def _by_turn(trajectory: Trajectory, values: Floats) -> list[PerToken]:
    """Returns the values for each turn's sampled tokens."""
    parts = zip(trajectory.turns, split_by_turn(trajectory, values), strict=True)
    return [_compact(part[len(turn.prompt_ids) :]) for turn, part in parts]


def _compact(values: Floats) -> PerToken:
    """Returns a single number if all values are equal, null where a value is unknown."""
    is_known = ~np.isnan(values)
    if not is_known.any():
        return None
    if is_known.all() and (values == values[0]).all():
        return short_floats(values[:1])[0]
    return [value if known else None for value, known in zip(short_floats(values), is_known, strict=True)]


def short_floats(values: Floats) -> list[float]:
    """Returns the values rounded to float32, as decimals with the fewest digits that round to the same float32."""
    shortest: list[float] = values.astype(np.float32).astype("U24").astype(np.float64).tolist()
    return shortest
