"""Attention over slots: what each layer computes between its projections.

The batch is one row of T tokens of many sequences: first one token of each decoding slot, then chunks of prompt. A
layer gives queries, keys and values. `Layout.attend` writes the new keys and values into the cache, then

* decoding slots attend in runs (runs.py) of neighbouring slots, which are read in place, a shared prefix only once;
* short chunks of prompt attend together, long ones one by one.

Tokens attend to their own slot's tokens at or before their position (inside the sliding window, where there is one).
`attend` does the same as a transformers attention function, so that a model's own layers run on it unchanged.
"""

from typing import Any

import torch
import torch.nn.functional as F

from art_cli.engines.embedded.kv_cache import SlotCache
from art_cli.engines.embedded.runs import ChunkRun, Run, plan_chunk_runs
from art_cli.engines.embedded.scheduler import PromptChunk, StepPlan
from art_cli.runtime.errors import EngineError

Tensor = torch.Tensor

NAME = "art_slots"


class Layout:
    """The attention of one step's tokens: computed once for all layers."""

    def __init__(self, plan: StepPlan, runs: list[Run], cache: SlotCache, device: torch.device) -> None:
        self.tokens_T = torch.from_numpy(plan.tokens_T).to(device)
        self.positions_T = torch.from_numpy(plan.positions_T).to(device)
        self._slots_T = torch.from_numpy(plan.slots_T).to(device)
        self._cache = cache
        self._num_decodes = len(plan.decodes)
        self._runs, self._chunk_runs = runs, plan_chunk_runs(plan.chunks, device)
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
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
        """[T, heads, head_dim]"""
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
        """Returns [T * heads] the row of a slab, as rows of head_dim, for keys or values of each token and head."""
        if heads not in self._slab_rows:
            length = self._cache.shape.length
            first = self._slots_T * (heads * length) + self.positions_T
            self._slab_rows[heads] = (first[:, None] + torch.arange(heads, device=first.device) * length).view(-1)
        return self._slab_rows[heads]

    def _run_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns [slots, 1, 1, length] 0 where attended, else -inf; or None if all are attended."""
        run, key = self._runs[index], (index, window)
        if run.is_even and not (window and run.length > window):
            return None
        if key not in self._masks:
            column = torch.arange(run.length, device=run.lengths.device)
            hidden = column >= run.lengths[:, None]
            if window:
                hidden |= column < run.lengths[:, None] - window
            self._masks[key] = _additive(hidden, dtype)[:, None, None]
        return self._masks[key]

    def _chunk_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Returns [slots, 1, width, length], or None for causal attention from the first token on."""
        key, run = (-1 - index, window), self._chunk_runs[index]
        if run.chunk is not None and run.chunk.start == 0 and not (window and run.length > window):
            return None
        if key not in self._masks:
            column, position = torch.arange(run.length, device=run.positions.device), run.positions[:, :, None]
            hidden = column > position
            if window:
                hidden |= column <= position - window
            self._masks[key] = _additive(hidden, dtype)[:, None]
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
    """Returns [1, T, heads, head_dim], as transformers' AttentionInterface; `layout` comes through the model."""
    for unsupported in ("softcap", "s_aux", "position_bias"):
        if others.get(unsupported) is not None:
            raise EngineError(f"the embedded engine cannot run this model: its attention uses {unsupported}")
    assert layout is not None, "the model does not hand its keyword arguments on to its attention"
    rows = (states[0].transpose(0, 1) for states in (query, key, value))
    return layout.attend(module.layer_idx, *rows, scaling=scaling, window=sliding_window)[None], None


def _attend_run(
    run: Run, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [rows, heads, head_dim] for queries of that shape."""
    grouped = _grouped(run, query, keys.shape[1])
    slots, tokens = slice(run.start, run.stop), slice(run.length)
    out = F.scaled_dot_product_attention(
        grouped, keys[slots, :, tokens], values[slots, :, tokens], attn_mask=mask, scale=scaling
    )
    return _rows(run, out, query.shape[1])


def _attend_run_with_shared(
    run: Run, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """As `_attend_run`, but the shared prefix is read from the first slot in one product for all rows.

    Two softmaxes over the two spans of tokens are joined by their normalisers: with e the log-sum-exp of a span's
    scores, the weight of the first span is sigmoid(e1 - e2).
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
    """Attention in float32, and the log-sum-exp of its scores [..., 1]."""
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


def _grouped(run: Run, query: Tensor, heads_kv: int) -> Tensor:
    """Returns [slots, heads_kv, heads / heads_kv, head_dim]; heads that share keys become rows of one product."""
    rows, heads, dim = query.shape
    grouped = query.reshape(rows, heads_kv, heads // heads_kv, dim)
    if run.members is None:
        return grouped
    spread = grouped.new_zeros(run.stop - run.start, *grouped.shape[1:])
    spread[run.members] = grouped
    return spread


def _rows(run: Run, out: Tensor, heads: int) -> Tensor:
    out = out if run.members is None else out[run.members]
    return out.reshape(run.last - run.first, heads, out.shape[3])


def _attend_chunk(
    chunk: PromptChunk, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [num, heads, head_dim] for queries of that shape."""
    slot, end = slice(chunk.slot, chunk.slot + 1), chunk.start + chunk.num
    key, value = (_per_head(slab[slot, :, :end], query.shape[1]) for slab in (keys, values))
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key, value, attn_mask=mask, is_causal=mask is None, scale=scaling
    )
    return out[0].transpose(0, 1)


def _attend_chunks(
    run: ChunkRun, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Returns [num, heads, head_dim] for queries of that shape."""
    assert mask is not None
    heads_kv, (_, heads, dim) = keys.shape[1], query.shape
    num, group = run.stop - run.start, heads // heads_kv
    padded = query.new_zeros(num * run.width, heads, dim)
    padded[run.places] = query
    grouped = padded.view(num, run.width, heads_kv, group, dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num, heads_kv, group * run.width, dim)
    slots, tokens = slice(run.start, run.stop), slice(run.length)
    for_group = mask if group == 1 else mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(
        grouped, keys[slots, :, tokens], values[slots, :, tokens], attn_mask=for_group, scale=scaling
    )
    out = out.view(num, heads_kv, group, run.width, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(num * run.width, heads, -1)[run.places]


def _per_head(states: Tensor, heads: int) -> Tensor:
    repeats = heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
