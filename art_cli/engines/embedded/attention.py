"""Attention over slots: the key-value cache, runs of slots that attend together, and attention in each layer.

The batch is one row of T tokens from many sequences: one token per decoding slot, followed by prompt chunks. For each
layer, `Layout.attend` gets queries, keys and values. It writes the new keys and values into the cache. Then

* decoding slots attend in runs of neighboring slots, which are read in place, reading shared prefixes only once;
* short prompt chunks attend together, long chunks separately.

Tokens attend to their own slot up to their position (within the sliding window, if any). `attend` has the interface of
a transformers attention function, so a model's own layers run on it unchanged.

SlotCache has one slab per layer, `[slots, heads, length, head_dim]`, grown as needed. It knows nothing about sequences.
Beyond its computed tokens, a slot contains leftovers from earlier sequences. Leftovers are finite, never uninitialized
memory, and attention masks them.

One call per layer reads a run's keys and values in place. A run may span idle slots and read past shorter neighbors if
this costs less than another call. Decoding neighbors with a common prefix (attempts in a group) form a run that reads
shared tokens once. As long as the same slots decode, each grows by one token per step and the runs remain. Short prompt
chunks (the next turn in a conversation) form other runs, padded to the longest chunk.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from art_cli.engines.embedded.scheduler import NEVER, Copy, Ints, PromptChunk, Shape, StepPlan
from art_cli.models.decoder.maths import join_calls
from art_cli.runtime.errors import EngineError

Tensor = torch.Tensor

NAME = "art_slots"
# Costs as bytes of keys and values read in the same time. One CPU core, float32, 2 heads of 32 and of 64.
CALL_BYTES = 2**19  # another call per layer (30 us)
SHARED_BYTES = 5 * 2**19  # reading shared tokens separately and joining two softmaxes (150 us)
MIN_SHARED = 64  # shortest shared prefix read once; shorter prefixes were not measured
MAX_PAIRS = 2**15  # token pairs in the largest chunk that joins others; a chunk alone skips masked pairs


class SlotRun(NamedTuple):
    """Decoding slots attended together: rows `first` to `last` of the plan, in slots `start` to `stop`."""

    first: int
    last: int
    start: int
    stop: int
    length: int  # tokens of the longest slot
    shared: int  # length of the prefix read once for all slots; 0 if every slot reads its own
    is_even: bool  # whether all slots have the same length
    members: torch.Tensor | None  # [last - first] slots relative to `start`, if the run has gaps
    positions: torch.Tensor  # [stop - start, 1] position of each slot's new token; idle slots: `length` - 1


class Costs(NamedTuple):
    """Costs in tokens: how many tokens' keys and values could be read in the same time."""

    call: int
    shared: int

    @classmethod
    def of(cls, token_bytes: int) -> "Costs":
        """`token_bytes`: size of one token's keys and values in one layer."""
        return cls(CALL_BYTES // token_bytes, SHARED_BYTES // token_bytes)


class RunPlanner:
    """Plans the runs of each step, and keeps them as long as the same slots decode."""

    def __init__(self, costs: Costs, device: torch.device) -> None:
        self._costs, self._device = costs, device
        self._decodes: Ints = np.empty(0, np.int64)
        self._lengths: Ints = np.empty(0, np.int64)
        self._runs: list[SlotRun] = []

    def runs(self, plan: StepPlan) -> list[SlotRun]:
        decodes, lengths = plan.decodes, plan.positions_T[: len(plan.decodes)] + 1
        if decodes is self._decodes and (lengths == self._lengths + 1).all():
            self._runs = [run._replace(length=run.length + 1, positions=run.positions + 1) for run in self._runs]
        else:
            self._runs = plan_runs(decodes, lengths, plan.shared, self._costs, self._device)
        self._decodes, self._lengths = decodes, lengths
        return self._runs


def plan_runs(slots: Ints, lengths: Ints, shared: Ints, costs: Costs, device: torch.device) -> list[SlotRun]:
    """Groups ascending slots into runs. `shared[i]`: length of the prefix that slots i and i - 1 share."""
    runs: list[SlotRun] = []
    plain = 0  # rows from here on have no run yet
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
    """Returns the end of the best family of rows starting at `first`, and its shared length; 0 if sharing never pays.

    Rows join while this saves more reading: (number of rows - 1) * shared tokens.
    """
    last, common = first + 1, 0
    while last < len(shared) and shared[last] >= MIN_SHARED:
        joined = int(shared[last]) if last == first + 1 else min(common, int(shared[last]))
        if (last - first) * joined < (last - first - 1) * common:
            break
        last, common = last + 1, joined
    is_worth_it = (last - first - 1) * common > cost
    return (last, common) if is_worth_it else (first + 1, 0)


def _plain_runs(slots: Ints, lengths: Ints, first: int, last: int, cost: int, device: torch.device) -> list[SlotRun]:
    """Groups rows `first` to `last` into runs. A slot joins if the extra reading costs less than a call."""
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


def _run(slots: Ints, lengths: Ints, first: int, last: int, shared: int, device: torch.device) -> SlotRun:
    start, stop = int(slots[first]), int(slots[last - 1]) + 1
    members, longest = slots[first:last] - start, int(lengths[first:last].max())
    has_gaps = stop - start > last - first
    all_lengths = np.full(stop - start, longest, np.int64)
    all_lengths[members] = lengths[first:last]
    return SlotRun(
        first=first,
        last=last,
        start=start,
        stop=stop,
        length=longest,
        shared=shared,
        is_even=bool((all_lengths == longest).all()),
        members=torch.from_numpy(members).to(device) if has_gaps else None,
        positions=torch.from_numpy(all_lengths[:, None] - 1).to(device),
    )


class ChunkRun(NamedTuple):
    """Prompt chunks attended together, padded to `width` new tokens each, in slots `start` to `stop`."""

    num: int  # new tokens in all chunks
    start: int
    stop: int
    width: int
    length: int  # total tokens in the longest slot
    chunk: PromptChunk | None  # set if there is only one chunk
    places: torch.Tensor  # [num] token indices in the padded (stop - start) * width
    positions: torch.Tensor  # [stop - start, width] token positions; 0 for padding


def plan_chunk_runs(chunks: list[PromptChunk], device: torch.device) -> list[ChunkRun]:
    """Groups chunks (by slot, ascending) into runs. A long chunk is alone, because it gains nothing from sharing."""
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


class SlotCache:
    """Slabs of keys and values, allocated at a layer's initial write with its heads and dtype."""

    def __init__(self) -> None:
        self.shape = Shape(0, 0)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def resize(self, shape: Shape) -> None:
        """Reshapes every slab and keeps the common part. One layer at a time, to save memory."""
        if shape == self.shape:
            return
        self.shape = shape
        for slabs in (self.keys, self.values):
            for layer, old in slabs.items():
                new = old.new_zeros(shape.slots, old.shape[1], shape.length, old.shape[3])
                slots, length = min(old.shape[0], shape.slots), min(old.shape[2], shape.length)
                new[:slots, :, :length] = old[:slots, :, :length]
                slabs[layer] = new

    def copy(self, copies: list[Copy]) -> None:
        for copy in copies:
            for slabs in (self.keys, self.values):
                for slab in slabs.values():
                    copied = slab[copy.source, :, : copy.length]
                    for target in copy.targets:  # one by one takes half the time of a call with indices
                        slab[target, :, : copy.length] = copied

    def write(self, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Writes keys and values `[T, heads, head_dim]` into these slab rows, one row per token and head."""
        for slabs, states in ((self.keys, key), (self.values, value)):
            _, heads, head_dim = states.shape
            if layer not in slabs:
                slabs[layer] = states.new_zeros(self.shape.slots, heads, self.shape.length, head_dim)
            slabs[layer].view(-1, head_dim).index_copy_(0, rows, states.reshape(-1, head_dim))

    def clear(self) -> None:
        """Frees all slabs."""
        self.keys.clear()
        self.values.clear()


class Layout:
    """Attention inputs for one step's tokens, computed once for all layers."""

    def __init__(self, plan: StepPlan, runs: list[SlotRun], cache: SlotCache, device: torch.device) -> None:
        self.tokens_T = torch.from_numpy(plan.tokens_T).to(device)
        self.positions_T = torch.from_numpy(plan.positions_T).to(device)
        self._slots_T = torch.from_numpy(plan.slots_T).to(device)
        self._cache = cache
        self._num_decodes = len(plan.decodes)
        self._runs, self._chunk_runs = runs, plan_chunk_runs(plan.chunks, device)
        self._masks: dict[tuple[int, int | None], Tensor] = {}
        self._slab_rows: dict[int, Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,  # [T, heads, head_dim]
        key: Tensor,  # [T, heads_kv, head_dim]
        value: Tensor,
        *,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Returns [T, heads, head_dim]."""
        self._cache.write(layer, key, value, self._slab_rows_of(key.shape[1]))
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        parts = []
        for index, run in enumerate(self._runs):
            mask = self._run_mask(index, window, query.dtype)
            rows = query[run.first : run.last]
            is_shared = run.shared > 0 and not window
            attend = _attend_run_with_shared if is_shared else _attend_run
            parts.append(attend(run, rows, keys, values, mask, scaling))
        offset = self._num_decodes
        for index, chunks in enumerate(self._chunk_runs):
            mask = self._chunk_mask(index, window, query.dtype)
            rows = query[offset : offset + chunks.num]
            if chunks.chunk is not None:
                parts.append(_attend_chunk(chunks.chunk, rows, keys, values, mask, scaling))
            else:
                parts.append(_attend_chunks(chunks, rows, keys, values, mask, scaling))
            offset += chunks.num
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slab_rows_of(self, heads: int) -> Tensor:
        """Returns [T * heads] slab row indices (rows of head_dim) for every token and head."""
        if heads not in self._slab_rows:
            length = self._cache.shape.length
            first = self._slots_T * (heads * length) + self.positions_T
            self._slab_rows[heads] = (first[:, None] + torch.arange(heads, device=first.device) * length).view(-1)
        return self._slab_rows[heads]

    def _run_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns [slots, 1, 1, length]; None when everything is attended."""
        run = self._runs[index]
        if run.is_even and not (window and run.length > window):
            return None
        return self._mask((index, window), run.positions, run.length, dtype)

    def _chunk_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns [slots, 1, width, length]; None for plain causal attention."""
        run = self._chunk_runs[index]
        if run.chunk is not None and run.chunk.start == 0 and not (window and run.length > window):
            return None
        return self._mask((-1 - index, window), run.positions, run.length, dtype)

    def _mask(self, key: tuple[int, int | None], positions: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Returns [slots, 1, width, length] 0 where the token at each of `positions` [slots, width] attends, else -inf.

        `key` is the run's index and the window.
        """
        if key not in self._masks:
            column, position, window = torch.arange(length, device=positions.device), positions[:, :, None], key[1]
            hidden = column > position
            if window:
                hidden |= column <= position - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None]
        return self._masks[key]


def attend(
    module: Any,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, heads_kv, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Returns [1, T, heads, head_dim] like transformers' AttentionInterface; the model passes `layout` through."""
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if others.get(unsupported) is not None:
            raise EngineError(f"the embedded engine cannot run this model: its attention uses {unsupported}")
    assert layout is not None, "the model does not hand its keyword arguments on to its attention"
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    return layout.attend(module.layer_idx, *rows, scaling=scaling, window=sliding_window)[None], None


def _attend_run(
    run: SlotRun, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [rows, heads, head_dim] for queries with the same shape."""
    grouped = _grouped(run, query, keys.shape[1])
    slots, tokens = slice(run.start, run.stop), slice(run.length)
    out = F.scaled_dot_product_attention(
        grouped, keys[slots, :, tokens], values[slots, :, tokens], attn_mask=mask, scale=scaling
    )
    return _rows(run, out, query.shape[1])


def _attend_run_with_shared(
    run: SlotRun, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Like `_attend_run`, but one product for all rows reads the shared prefix, from the run's lowest slot.

    Two softmaxes over two spans are joined by their normalizers: with e the log-sum-exp of the span's scores, the
    shared span has weight sigmoid(e1 - e2).
    """
    grouped = _grouped(run, query, keys.shape[1])
    num, heads_kv, group, dim = grouped.shape
    first, slots = slice(run.start, run.start + 1), slice(run.start, run.stop)
    shared, own = slice(run.shared), slice(run.shared, run.length)
    for_all = grouped.transpose(0, 1).reshape(1, heads_kv, num * group, dim)
    out_1, norm_1 = _attend_normed(for_all, keys[first, :, shared], values[first, :, shared], None, scaling)
    out_1, norm_1 = (part.reshape(heads_kv, num, group, -1).transpose(0, 1) for part in (out_1, norm_1))
    own_mask = None if mask is None else mask[..., own]
    out_2, norm_2 = _attend_normed(grouped, keys[slots, :, own], values[slots, :, own], own_mask, scaling)
    return _rows(run, torch.lerp(out_2, out_1, torch.sigmoid(norm_1 - norm_2)).to(query.dtype), query.shape[1])


def _attend_normed(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Returns attention in float32, and its scores' log-sum-exp [..., 1]."""
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, norm = flash(query, keys, values, attn_mask=mask, scale=scaling)
        return out.float(), norm[..., None]
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    scores = torch.matmul(query * scale, keys.transpose(-1, -2)).float()
    if mask is not None:
        scores += mask
    norm = scores.logsumexp(-1, keepdim=True)
    probs = (scores - norm).exp_().to(values.dtype)
    return torch.matmul(probs, values).float(), norm


def _grouped(run: SlotRun, query: Tensor, heads_kv: int) -> Tensor:
    """Returns [slots, heads_kv, heads / heads_kv, head_dim]; heads with common keys become rows of one product."""
    rows, heads, dim = query.shape
    grouped = query.reshape(rows, heads_kv, heads // heads_kv, dim)
    if run.members is None:
        return grouped
    spread = grouped.new_zeros(run.stop - run.start, *grouped.shape[1:])
    spread[run.members] = grouped
    return spread


def _rows(run: SlotRun, out: Tensor, heads: int) -> Tensor:
    out = out if run.members is None else out[run.members]
    return out.reshape(run.last - run.first, heads, out.shape[3])


def _attend_chunk(
    chunk: PromptChunk, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [num, heads, head_dim] for queries with the same shape."""
    slot, end = slice(chunk.slot, chunk.slot + 1), chunk.start + chunk.num
    key, value = (_exact(_per_head(slab[slot, :, :end], query.shape[1])) for slab in (keys, values))
    out = F.scaled_dot_product_attention(
        _exact(query.transpose(0, 1)[None]),
        key,
        value,
        attn_mask=None if mask is None else _exact(mask),
        is_causal=mask is None,
        scale=scaling,
    )
    return out[0].transpose(0, 1).to(query.dtype)


def _attend_chunks(
    run: ChunkRun, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [num, heads, head_dim] for queries with the same shape."""
    assert mask is not None
    heads_kv, (_, heads, dim) = keys.shape[1], query.shape
    num, group = run.stop - run.start, heads // heads_kv
    padded = query.new_zeros(num * run.width, heads, dim)
    padded[run.places] = query
    grouped = padded.view(num, run.width, heads_kv, group, dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num, heads_kv, group * run.width, dim)
    slots, tokens = slice(run.start, run.stop), slice(run.length)
    for_group = mask if group == 1 else mask.repeat(1, 1, group, 1)
    key, value = _exact(keys[slots, :, tokens]), _exact(values[slots, :, tokens])
    out = F.scaled_dot_product_attention(_exact(grouped), key, value, attn_mask=_exact(for_group), scale=scaling)
    out = out.to(query.dtype).view(num, heads_kv, group, run.width, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(num * run.width, heads, -1)[run.places]


def _exact(states: Tensor) -> Tensor:
    """Converts 16-bit prompt states to float32 on CPUs, as the learner does: faster, with the same rounding."""
    return states.float() if states.device.type == "cpu" and states.dtype.itemsize < 4 else states


def _per_head(states: Tensor, heads: int) -> Tensor:
    repeats = heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)
