"""Compared: a quantity of a step as it was recorded and as it is computed again, and where the two differ. Pure."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any, Literal

import msgspec

from art_cli.runs.trajectory import LearnedTrajectory, PerToken, ScoredTrajectory

# Largest difference that counts as rounding. In float32 the same packs on the same machine give the same bits; another
# machine, or a learner of several processes, adds up in another order.
ROUNDING = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
EXACT = 1e-6  # the same for numbers that no model computes
Sameness = Literal["same", "differs", "not computed"]


class Compared(msgspec.Struct, frozen=True):
    """One quantity. Example: Compared("reward", "same", recorded=0.5, computed=0.5, difference=0.0)"""

    name: str
    verdict: Sameness
    recorded: Any = None
    computed: Any = None
    difference: float | None = None  # the largest one; None: the values are no numbers, or were not computed
    at: str = ""  # where the largest difference is
    why: str = ""  # why it was not computed


def compare_learned(
    line: LearnedTrajectory,
    computed: LearnedTrajectory | None,
    scored: ScoredTrajectory,
    *,
    rounding: float,
    why: str,
) -> Iterator[Compared]:
    """The rows of what learned.jsonl says; `why` it was not computed."""
    if computed is None:
        for name in ("advantages", "logprobs", "loss"):
            yield Compared(name, "not computed", getattr(line, name), why=why)
        return
    for name in ("left_out", "update", "num_tokens"):
        one, other = getattr(line, name), getattr(computed, name)
        yield Compared(name, "same" if one == other else "differs", one, other)
    yield compare_tokens("advantages", line.advantages, computed.advantages, scored, EXACT)
    if why:  # there are no weights to compute with
        for name in ("logprobs", "loss"):
            yield Compared(name, "not computed", getattr(line, name), why=why)
        return
    yield Compared("masked", "same" if line.masked == computed.masked else "differs", line.masked, computed.masked)
    by_model = partial(compare_tokens, scored=scored, rounding=rounding)
    later = (
        f"the step had taken {line.update} of its updates before it trained on this trajectory (train.updates_per_step)"
    )
    for name in ("logprobs", "reference", "importance"):
        one, other = getattr(line, name), getattr(computed, name)
        if line.update and name != "reference" and one is not None:
            yield Compared(name, "not computed", one, why=later)
        elif one is not None or other is not None:
            yield by_model(name, one or [], other or [])
    if line.update:
        yield Compared("loss", "not computed", line.loss, why=later)
    else:
        yield compare_numbers("loss", line.loss, computed.loss, rounding * max(1.0, abs(line.loss)))


def compare_numbers(name: str, recorded: float | None, computed: float, rounding: float) -> Compared:
    if recorded is None or not math.isfinite(recorded):
        return Compared(name, "differs", recorded, computed)
    difference = abs(recorded - computed)
    return Compared(name, "same" if difference <= rounding else "differs", recorded, computed, difference)


def compare_tokens(
    name: str, recorded: Sequence[PerToken], computed: Sequence[PerToken], scored: ScoredTrajectory, rounding: float
) -> Compared:
    """Compares token by token; a token that only one of them has a value for differs."""
    worst, at = 0.0, ""
    for number, turn in enumerate(scored.turns):
        pairs = zip(
            _values(recorded, number, len(turn.sampled_ids)),
            _values(computed, number, len(turn.sampled_ids)),
            strict=True,
        )
        for token, (one, other) in enumerate(pairs):
            difference = 0.0 if one is other is None else math.inf if one is None or other is None else abs(one - other)
            if difference > worst:
                worst, at = difference, f"turn {number}, token {token}"
    verdict: Sameness = "same" if worst <= rounding else "differs"
    return Compared(name, verdict, list(recorded), list(computed), worst if math.isfinite(worst) else None, at)


def _values(by_turn: Sequence[PerToken], turn: int, num: int) -> list[float | None]:
    """The values of one turn's tokens; None for those that a list lacks."""
    found = by_turn[turn] if turn < len(by_turn) else None
    if not isinstance(found, list):
        return [found] * num
    return (found + [None] * num)[:num]


def first_difference(one: Any, other: Any) -> str:
    """Where two values begin to differ. Example: ", [2].logprobs[5]"."""
    if isinstance(one, list) and isinstance(other, list):
        if len(one) != len(other):
            return f", {len(one)} and {len(other)} entries"
        place = next(index for index in range(len(one)) if one[index] != other[index])
        return f", [{place}]{first_difference(one[place], other[place]).removeprefix(', ')}"
    if isinstance(one, msgspec.Struct) and type(one) is type(other):
        name = next(name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name))
        inside = first_difference(getattr(one, name), getattr(other, name)).removeprefix(", ")
        return f", .{name}{inside}"
    return ""


def _pairs(
    scored: ScoredTrajectory, one: Sequence[PerToken] | None, other: Sequence[PerToken] | None
) -> list[tuple[float, float]]:
    """The values of the tokens that both have."""
    if one is None or other is None:
        return []
    return [
        (left, right)
        for number, turn in enumerate(scored.turns)
        for left, right in zip(
            _values(one, number, len(turn.sampled_ids)), _values(other, number, len(turn.sampled_ids)), strict=True
        )
        if left is not None and right is not None
    ]


def mean_gap(scored: ScoredTrajectory, old: Sequence[PerToken] | None) -> float | None:
    engine: list[PerToken] = [list(turn.logprobs) for turn in scored.turns]
    pairs = _pairs(scored, engine, old)
    return fmean(abs(left - right) for left, right in pairs) if pairs else None


def mean_change(
    scored: ScoredTrajectory, old: Sequence[PerToken] | None, new: Sequence[PerToken] | None
) -> float | None:
    pairs = _pairs(scored, old, new)
    return fmean(right - left for left, right in pairs) if pairs else None
