"""Attention over slots, as a transformers attention function: a model's own layers run on it unchanged.

The batch is one row of T tokens of many sequences: first one token of each decoding slot, then chunks of prompt. A
layer hands over queries, keys and values; the function writes the new keys and values into the cache, and attends

* decoding slots together, in runs of neighbouring slots read in place: a run may span idle slots and shorter
  neighbours where reading past them costs less than another call;
* chunks one by one.

Tokens attend to their own slot's tokens at or before their position (inside the sliding window, where there is one).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from art_cli.engines.embedded.cache import SlotCache
from art_cli.engines.embedded.scheduler import Chunk, Ints, StepPlan
from art_cli.errors import EngineError

Tensor = torch.Tensor

NAME = "art_slots"
CALL_COST = 2048  # tokens of keys and values that one more call per layer is worth (about 30 us on a CPU)


class Run(NamedTuple):
    """Decoding slots attended together: those of rows `first` to `last`, in slots `start` to `stop`."""

    first: int
    last: int
    start: int
    stop: int
    length: int  # tokens of the longest
    members: Tensor | None  # [last - first] their places in the run; None: it has no gaps
    lengths: Tensor  # [stop - start] tokens of each slot, its own included; 1 for a slot that only lies between


class Layout:
    """What every layer needs to know of the step, worked out once."""

    def __init__(self, plan: StepPlan, cache: SlotCache, device: torch.device) -> None:
        self.cache = cache
        self.tokens_T = torch.from_numpy(plan.tokens_T).to(device)
        self.slots_T = torch.from_numpy(plan.slots_T).to(device)
        self.positions_T = torch.from_numpy(plan.positions_T).to(device)
        self.num_decodes = len(plan.decodes)
        self.runs = _runs(plan.decodes, plan.positions_T[: len(plan.decodes)] + 1, device)
        self.chunks = plan.chunks
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def run_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[slots, 1, 1, length] 0 to attend, -inf not to; None: everything."""
        key = (index, window)
        if key not in self._masks:
            run = self.runs[index]
            place = torch.arange(run.length, device=run.lengths.device)
            seen = place < run.lengths[:, None]
            if window:
                seen &= place >= run.lengths[:, None] - window
            self._masks[key] = None if bool(seen.all()) else _additive(seen, dtype)[:, None, None]
        return self._masks[key]

    def chunk_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[num, start + num]; None: causal from the first token on."""
        key = (-1 - index, window)
        if key not in self._masks:
            chunk = self.chunks[index]
            end = chunk.start + chunk.num
            if chunk.start == 0 and (not window or end <= window):
                self._masks[key] = None
            else:
                query = torch.arange(chunk.start, end, device=self.tokens_T.device)[:, None]
                place = torch.arange(end, device=self.tokens_T.device)
                seen = place <= query
                if window:
                    seen &= place > query - window
                self._masks[key] = _additive(seen, dtype)
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
    """[1, T, heads, head_dim]: the signature of transformers' AttentionInterface; `layout` comes through the model."""
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if others.get(unsupported) is not None:
            raise EngineError(f"the embedded engine cannot run this model: its attention uses {unsupported}")
    assert layout is not None, "the model does not hand its keyword arguments on to its attention"
    cache, layer = layout.cache, module.layer_idx
    cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), layout.slots_T, layout.positions_T)
    keys, values = cache.keys[layer], cache.values[layer]
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])  # [T, heads, head_dim]
    for index, run in enumerate(layout.runs):
        mask = layout.run_mask(index, sliding_window, query.dtype)
        out[run.first : run.last] = _attend_run(run, query[0, :, run.first : run.last], keys, values, mask, scaling)
    offset = layout.num_decodes
    for index, chunk in enumerate(layout.chunks):
        mask = layout.chunk_mask(index, sliding_window, query.dtype)
        rows = slice(offset, offset + chunk.num)
        out[rows] = _attend_chunk(chunk, query[:, :, rows], keys, values, mask, scaling)
        offset += chunk.num
    return out[None], None


def _attend_run(
    run: Run, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """[rows, heads, head_dim] for queries [heads, rows, head_dim]: heads that share keys are rows of one product."""
    heads, rows, dim = query.shape
    grouped = query.transpose(0, 1).reshape(rows, keys.shape[1], heads // keys.shape[1], dim)
    if run.members is not None:
        spread = grouped.new_zeros(run.stop - run.start, *grouped.shape[1:])
        spread[run.members] = grouped
        grouped = spread
    span = (slice(run.start, run.stop), slice(None), slice(run.length))
    out = F.scaled_dot_product_attention(grouped, keys[span], values[span], attn_mask=mask, scale=scaling)
    if run.members is not None:
        out = out[run.members]
    return out.reshape(rows, heads, values.shape[3])


def _attend_chunk(
    chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """[num, heads, head_dim] for queries [1, heads, num, head_dim]."""
    end = chunk.start + chunk.num
    key, value = (_per_head(slab[chunk.slot : chunk.slot + 1, :, :end], query.shape[1]) for slab in (keys, values))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    return out[0].transpose(0, 1)


def _per_head(states: Tensor, heads: int) -> Tensor:
    repeats = heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def _runs(slots: Ints, lengths: Ints, device: torch.device) -> list[Run]:
    """The decoding slots (ascending) in runs. Greedy: a slot joins while that reads less than a call is worth."""
    runs: list[Run] = []
    first = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or _is_worth_a_call(slots, lengths, first, row):
            runs.append(_run(slots, lengths, first, row, device))
            first = row
    return runs


def _is_worth_a_call(slots: Ints, lengths: Ints, first: int, row: int) -> bool:
    """Whether a run of rows `first` to `row` and a new one from `row` read less than one run of all of them."""
    longest, next_length = int(lengths[first:row].max()), int(lengths[row])
    apart = (slots[row - 1] + 1 - slots[first]) * longest + next_length
    together = (slots[row] + 1 - slots[first]) * max(longest, next_length)
    return bool(together - apart > CALL_COST)


def _run(slots: Ints, lengths: Ints, first: int, last: int, device: torch.device) -> Run:
    start, stop = int(slots[first]), int(slots[last - 1]) + 1
    members = slots[first:last] - start
    has_gaps = stop - start > last - first
    all_lengths = np.ones(stop - start, np.int64)
    all_lengths[members] = lengths[first:last]
    return Run(
        first,
        last,
        start,
        stop,
        int(all_lengths.max()),
        torch.from_numpy(members).to(device) if has_gaps else None,
        torch.from_numpy(all_lengths).to(device),
    )
