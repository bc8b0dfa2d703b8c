"""Runs: neighbouring slots in the cache that are attended together.

One call per layer reads a run's keys and values in place. A run may span idle slots and read past shorter neighbours
where that costs less than another call. Decoding neighbours that begin with the same tokens (the attempts of a group)
make a run that reads its shared tokens once. While the same slots decode, each grows by one token per step and the runs
stay. Short chunks of prompt (a conversation's next turn) make other runs, padded to the longest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from art_cli.engines.embedded.scheduler import NEVER, Ints, PromptChunk, StepPlan
from art_cli.models.decoder.shared_calls import join_calls

# Bytes of keys and values that are read in the time of a choice. One CPU core, float32, 2 heads of 32 and of 64.
CALL_BYTES = 2**19  # one more call per layer (30 us)
SHARED_BYTES = 5 * 2**19  # reading shared tokens apart and joining two softmaxes (150 us)
MIN_SHARED = 64  # fewest shared tokens that are read once; fewer were not measured
MAX_PAIRS = 2**15  # pairs of tokens in the largest chunk that is joined with others; alone, it skips the masked pairs


class Run(NamedTuple):
    """Decoding slots attended together: rows `first` to `last` of the plan, in slots `start` to `stop`."""

    first: int
    last: int
    start: int
    stop: int
    length: int  # tokens of the longest slot
    shared: int  # length of the prefix that is read once for all slots; 0: each slot reads its own
    is_even: bool  # whether all slots have that length
    members: torch.Tensor | None  # [last - first] the slots, counted from `start`, if the run has gaps
    lengths: torch.Tensor  # [stop - start] tokens of each slot, the new one included; idle slots: `length`


class Costs(NamedTuple):
    """The costs of a choice, in tokens whose keys and values could be read in its time."""

    call: int
    shared: int

    @classmethod
    def of(cls, token_bytes: int) -> "Costs":
        """`token_bytes`: size of one token's keys and values in one layer."""
        return cls(CALL_BYTES // token_bytes, SHARED_BYTES // token_bytes)


class RunPlanner:
    """Plans the runs of each step, and keeps them while the same slots decode."""

    def __init__(self, costs: Costs, device: torch.device) -> None:
        self._costs, self._device = costs, device
        self._decodes: Ints = np.empty(0, np.int64)
        self._lengths: Ints = np.empty(0, np.int64)
        self._runs: list[Run] = []

    def runs(self, plan: StepPlan) -> list[Run]:
        decodes, lengths = plan.decodes, plan.positions_T[: len(plan.decodes)] + 1
        if decodes is self._decodes and (lengths == self._lengths + 1).all():
            self._runs = [run._replace(length=run.length + 1, lengths=run.lengths + 1) for run in self._runs]
        else:
            self._runs = plan_runs(decodes, lengths, plan.shared, self._costs, self._device)
        self._decodes, self._lengths = decodes, lengths
        return self._runs


def plan_runs(slots: Ints, lengths: Ints, shared: Ints, costs: Costs, device: torch.device) -> list[Run]:
    """Returns the slots (ascending) in runs. `shared[i]`: length of the prefix that slot i shares with slot i - 1."""
    runs: list[Run] = []
    plain = 0  # rows from here on are in no run yet
    row = 0
    while row < len(slots):
        last, common = _family(shared, row, costs.shared)
        if common:
            runs += _plain_runs(slots, lengths, plain, row, costs.call, device)
            runs.append(_run(slots, lengths, row, last, common, device))
            plain = last
        row = last
    return runs + _plain_runs(slots, lengths, plain, len(slots), costs.call, device)


def _family(shared: Ints, first: int, cost: int) -> tuple[int, int]:
    """Returns the end of the rows from `first` on that best share one span, and the span's length; 0: none does.

    The next row joins while that saves more reading. Saved are all rows but one, times the tokens they share.
    """
    last, common = first + 1, 0
    while last < len(shared) and shared[last] >= MIN_SHARED:
        joined = int(shared[last]) if last == first + 1 else min(common, int(shared[last]))
        if (last - first) * joined < (last - first - 1) * common:
            break
        last, common = last + 1, joined
    is_worth_it = (last - first - 1) * common > cost
    return (last, common) if is_worth_it else (first + 1, 0)


def _plain_runs(slots: Ints, lengths: Ints, first: int, last: int, cost: int, device: torch.device) -> list[Run]:
    """Returns the rows `first` to `last` in runs. A slot joins while the extra reading costs less than a call."""
    if first == last:
        return []
    everything = (slots[last - 1] + 1 - slots[first]) * lengths[first:last].max()
    if everything - lengths[first:last].sum() <= cost:
        return [_run(slots, lengths, first, last, 0, device)]
    runs = []
    longest = int(lengths[first])
    for row in range(first + 1, last):
        length, before, start = int(lengths[row]), int(slots[row - 1]), int(slots[first])
        apart = (before + 1 - start) * longest + length
        together = (int(slots[row]) + 1 - start) * max(longest, length)
        if together - apart > cost:
            runs.append(_run(slots, lengths, first, row, 0, device))
            first, longest = row, 0
        longest = max(longest, length)
    return [*runs, _run(slots, lengths, first, last, 0, device)]


def _run(slots: Ints, lengths: Ints, first: int, last: int, shared: int, device: torch.device) -> Run:
    start, stop = int(slots[first]), int(slots[last - 1]) + 1
    members, longest = slots[first:last] - start, int(lengths[first:last].max())
    has_gaps = stop - start > last - first
    all_lengths = np.full(stop - start, longest, np.int64)
    all_lengths[members] = lengths[first:last]
    return Run(
        first=first,
        last=last,
        start=start,
        stop=stop,
        length=longest,
        shared=shared,
        is_even=bool((all_lengths == longest).all()),
        members=torch.from_numpy(members).to(device) if has_gaps else None,
        lengths=torch.from_numpy(all_lengths).to(device),
    )


class ChunkRun(NamedTuple):
    """Chunks attended together, padded to `width` new tokens each, in slots `start` to `stop`."""

    num: int  # new tokens of all chunks
    start: int
    stop: int
    width: int
    length: int  # tokens of the longest slot, those before its chunk included
    chunk: PromptChunk | None  # the chunk, if it is the only one
    places: torch.Tensor  # [num] indices of the tokens in the padded (stop - start) * width
    positions: torch.Tensor  # [stop - start, width] positions of the tokens; 0 where there is none


def plan_chunk_runs(chunks: list[PromptChunk], device: torch.device) -> list[ChunkRun]:
    """Chunks (by slot, ascending) in runs. A long chunk is alone, because it gains nothing by a shared call."""
    groups = join_calls(chunks, _num_pairs)
    return [_chunk_run(group, device) for group in groups]


def _num_pairs(group: Sequence[PromptChunk]) -> int:
    if len(group) > 1 and any(chunk.num * _end(chunk) > MAX_PAIRS for chunk in group):
        return NEVER
    num_slots = group[-1].slot + 1 - group[0].slot
    return num_slots * max(chunk.num for chunk in group) * max(map(_end, group))


def _chunk_run(group: list[PromptChunk], device: torch.device) -> ChunkRun:
    start, stop, width = group[0].slot, group[-1].slot + 1, max(chunk.num for chunk in group)
    positions = np.zeros((stop - start, width), np.int64)
    places = [(chunk.slot - start) * width + np.arange(chunk.num) for chunk in group]
    for chunk in group:
        positions[chunk.slot - start, : chunk.num] = np.arange(chunk.start, _end(chunk))
    return ChunkRun(
        num=sum(chunk.num for chunk in group),
        start=start,
        stop=stop,
        width=width,
        length=max(map(_end, group)),
        chunk=group[0] if len(group) == 1 else None,
        places=torch.from_numpy(np.concatenate(places)).to(device),
        positions=torch.from_numpy(positions).to(device),
    )


def _end(chunk: PromptChunk) -> int:
    return chunk.start + chunk.num
