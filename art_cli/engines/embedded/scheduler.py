"""Decides what the next forward pass computes: which tokens of which sequences, in which slots. No torch here.

A slot is a row in the key-value cache. A sequence (one choice being sampled) holds a slot while it runs. Afterwards,
the slot retains its keys and values until another sequence needs it. A prompt with a matching prefix reuses them in the
same slot or copies them to another slot. So the attempts of a group compute their prompt once, and a conversation's
next turn computes only its new tokens.

    add, cancel, finish -> plan() -> the runner computes it -> commit(sampled tokens) -> the finished sequences

`computed` counts a slot's tokens with keys and values in the cache, `length` all its known tokens. Tokens in between
are pending: a prompt chunk, or one sampled token while decoding. `invalidate` forgets everything computed; running
sequences are then recomputed from their tokens.

Nothing here waits, locks or fails. A sequence that does not fit stays in the waiting queue, and a running sequence that
outgrows the cache returns to the queue.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

MIN_COPY = 8  # shortest prefix worth copying; below, copying keys and values costs more calls than recomputing
MIN_WAIT = 32  # shortest prefix worth waiting for while another slot computes it
MIN_LENGTH = 64  # slot lengths in the cache are multiples of this many tokens
NEVER = np.iinfo(np.int64).max


@dataclass(eq=False)
class TokenSequence:
    """One choice being sampled. The scheduler fills every field after `payload`.

    Example: TokenSequence(prompt=np.array([1, 2, 3]), limit=3 + 64, payload=request)
    """

    prompt: Ints  # [P]
    limit: int  # largest total length, prompt included; then finish_reason is "length"
    payload: Any = None  # the caller's object, opaque to the scheduler
    slot: int = -1  # -1 while waiting and after the end
    sampled: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # filled when the sequence leaves its slot
    logprobs: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    raw_logprobs: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    finish_reason: str | None = None
    num_reused: int = 0  # prompt tokens already computed by another sequence


class Shape(NamedTuple):
    """Cache size: number of slots, and tokens per slot."""

    slots: int
    length: int


class Copy(NamedTuple):
    """Copies the leading `length` tokens' keys and values from slot `source` to each slot in `targets`."""

    source: int
    targets: list[int]
    length: int


class PromptChunk(NamedTuple):
    """Tokens `start` to `start + num` in a slot; with `is_last`, the following token is sampled."""

    slot: int
    start: int
    num: int
    is_last: bool


class StepPlan(NamedTuple):
    """One forward pass over T tokens: one per decoding slot (ascending), followed by the prompt chunks.

    The runner performs the `copies` beforehand, in order. A token is sampled after R of the T tokens (`rows`).
    """

    shape: Shape
    copies: list[Copy]
    decodes: Ints  # [n] slots; the same array object as in the previous step if the same slots decode
    shared: Ints  # [n] length of the prefix shared with the previous decoding slot; 0 at index 0
    chunks: list[PromptChunk]
    tokens_T: Ints
    slots_T: Ints
    positions_T: Ints
    rows: Ints  # [R]
    slots: Ints  # [R] slots of `rows`
    num_sampled: Ints  # [R] tokens sampled in these slots so far
    placed: list[TokenSequence]  # sequences that received a slot in this plan


class Scheduler:
    """Sequences, slots and the waiting queue (first come, first served)."""

    def __init__(self, *, max_slots: int, prefill_tokens: int, max_length: int, max_tokens: int) -> None:
        """`max_tokens` bounds the cache: slots times length. One sequence of `max_length` always fits."""
        self.max_slots, self.prefill_tokens, self.max_length = max_slots, prefill_tokens, max_length
        self.max_tokens = max(max_tokens, _round_up(max_length, MIN_LENGTH))
        self.waiting: deque[TokenSequence] = deque()
        self.running: dict[int, TokenSequence] = {}  # slot -> sequence, in admission order
        self.shape = Shape(0, 0)
        self.num_preempted = self.num_computed = 0  # sequences; tokens
        self.is_held = False  # True: no new sequence starts, so weights can change between two replies
        self._parked: dict[int, tuple[int, int]] = {}  # waiting slot -> (slot to copy from, tokens to copy)
        self._copies: list[Copy] = []  # copies for the next plan
        self._placed: list[TokenSequence] = []
        self._clock = 0
        self._computed = np.zeros(max_slots, np.int64)
        self._length = np.zeros(max_slots, np.int64)
        self._num_prompt = np.zeros(max_slots, np.int64)
        self._limit = np.zeros(max_slots, np.int64)
        self._last_used = np.full(max_slots, -1, np.int64)  # -1 for an empty slot
        self._tokens = np.zeros((0, 0), np.int64)
        self._logprobs = np.zeros((0, 0), np.float32)
        self._raw_logprobs = np.zeros((0, 0), np.float32)
        self._order: Ints | None = None  # running slots, ascending; None when outdated
        self._shared_of = (np.empty(0, np.int64), np.empty(0, np.int64))

    # --- what the caller calls ----------------------------------------------------------------------------------------

    def add(self, sequence: TokenSequence) -> None:
        assert 0 < len(sequence.prompt) < sequence.limit <= self.max_length, (len(sequence.prompt), sequence.limit)
        self.waiting.append(sequence)

    def cancel(self, sequence: TokenSequence) -> None:
        """Drops the sequence and frees its slot. Ended sequences are ignored."""
        if sequence.slot >= 0:
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def finish(self, sequence: TokenSequence, reason: str) -> None:
        """Ends a running sequence on the caller's request, for example at a stop string."""
        self._release(sequence)
        sequence.finish_reason = reason

    def invalidate(self) -> None:
        """Forgets everything computed, because the weights changed. Sampled tokens stay."""
        self._computed[:] = 0
        for slot in range(self.shape.slots):
            if slot not in self.running:
                self._empty(slot)

    @property
    def has_begun(self) -> bool:
        """Whether any sequence has started and not ended, including preempted sequences."""
        return bool(self.running) or any(len(sequence.sampled) for sequence in list(self.waiting))

    @property
    def room(self) -> int:
        """How many sequences of the current length fit at the same time."""
        return self._num_slots(self.shape.length)

    @property
    def is_idle(self) -> bool:
        return not self.running and self._next() is None

    def num_sampled(self, sequence: TokenSequence) -> int:
        if sequence.slot < 0:
            return len(sequence.sampled)
        return int(self._length[sequence.slot]) - len(sequence.prompt)

    def sampled_since(self, sequence: TokenSequence, start: int) -> tuple[Ints, Floats, Floats]:
        """Returns ids, logprobs and raw logprobs of a running or ended sequence, skipping `start` sampled tokens."""
        if sequence.slot < 0:
            return sequence.sampled[start:], sequence.logprobs[start:], sequence.raw_logprobs[start:]
        span = slice(len(sequence.prompt) + start, int(self._length[sequence.slot]))
        slot = sequence.slot
        return self._tokens[slot, span], self._logprobs[slot, span], self._raw_logprobs[slot, span]

    # --- the step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Returns the next forward pass; None when idle."""
        self._copies, self._placed = [], []
        self._make_room()
        self._unpark()
        self._admit()
        if not self.running:
            return None
        slots = self._running_slots()
        is_decoding = self._length[slots] - self._computed[slots] == 1
        if is_decoding.all():
            return self._assemble(slots, [])
        return self._assemble(slots[is_decoding], self._chunks())

    def commit(
        self, plan: StepPlan, ids: Ints, logprobs: Floats, raw_logprobs: Floats, stops: Bools
    ) -> list[TokenSequence]:
        """Records the tokens sampled after `plan.rows`; returns the sequences that ended, with their results."""
        self._clock += 1
        self.num_computed += len(plan.tokens_T)
        self._computed[plan.decodes] += 1
        for chunk in plan.chunks:
            self._computed[chunk.slot] += chunk.num
        slots, positions = plan.slots, self._length[plan.slots]
        self._tokens[slots, positions] = ids
        self._logprobs[slots, positions] = logprobs
        self._raw_logprobs[slots, positions] = raw_logprobs
        self._length[slots] += 1
        ended = stops | (self._length[slots] >= self._limit[slots])
        finished = []
        for row in np.flatnonzero(ended):
            sequence = self.running[int(slots[row])]
            self.finish(sequence, "stop" if stops[row] else "length")
            finished.append(sequence)
        return finished

    def _running_slots(self) -> Ints:
        if self._order is None:
            self._order = np.array(sorted(slot for slot in self.running if slot not in self._parked), np.int64)
        return self._order

    def _chunks(self) -> list[PromptChunk]:
        """Returns up to `prefill_tokens` pending prompt tokens, first come, first served; sorted by slot."""
        chunks, left = [], self.prefill_tokens
        for slot in self.running:
            pending = int(self._length[slot] - self._computed[slot])
            if pending <= 1 or slot in self._parked:
                continue
            num = min(pending, left)
            chunks.append(PromptChunk(slot, int(self._computed[slot]), num, num == pending))
            left -= num
            if left == 0:
                break
        return sorted(chunks)

    def _assemble(self, decodes: Ints, chunks: list[PromptChunk]) -> StepPlan:
        positions = self._computed[decodes]
        tokens = self._tokens[decodes, positions]
        rows, sampled = np.arange(len(decodes)), decodes
        if chunks:
            spans = [np.arange(chunk.start, chunk.start + chunk.num) for chunk in chunks]
            ends = len(decodes) + np.cumsum([chunk.num for chunk in chunks]) - 1
            is_last = np.array([chunk.is_last for chunk in chunks])
            of_chunks = np.array([chunk.slot for chunk in chunks], np.int64)
            tokens = np.concatenate([tokens, *(self._tokens[c.slot, s] for c, s in zip(chunks, spans, strict=True))])
            positions = np.concatenate([positions, *spans])
            rows = np.concatenate([rows, ends[is_last]])
            sampled = np.concatenate([decodes, of_chunks[is_last]])
            slots_T = np.concatenate([decodes, np.repeat(of_chunks, [chunk.num for chunk in chunks])])
        else:
            slots_T = decodes
        num_sampled = self._length[sampled] - self._num_prompt[sampled]
        return StepPlan(
            shape=self.shape,
            copies=self._copies,
            decodes=decodes,
            shared=self._shared(decodes),
            chunks=chunks,
            tokens_T=tokens,
            slots_T=slots_T,
            positions_T=positions,
            rows=rows,
            slots=sampled,
            num_sampled=num_sampled,
            placed=self._placed,
        )

    def _shared(self, slots: Ints) -> Ints:
        """`StepPlan.shared`, recomputed only when different slots decode, because shared prefixes never shrink."""
        if slots is self._shared_of[0]:
            return self._shared_of[1]
        shared = np.zeros(len(slots), np.int64)
        computed = self._computed[slots]
        most = np.minimum(computed[1:], computed[:-1])
        if most.any():
            tokens = self._tokens[slots, : int(most.max())]
            differs = tokens[1:] != tokens[:-1]
            first = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])
            shared[1:] = np.minimum(first, most)
        self._shared_of = (slots, shared)
        return shared

    # --- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while (sequence := self._next()) is not None and self._place(sequence):
            self.waiting.remove(sequence)

    def _next(self) -> TokenSequence | None:
        """Returns the next sequence to place. During a hold, only sequences with sampled tokens qualify."""
        return next((each for each in self.waiting if not self.is_held or len(each.sampled)), None)

    def _place(self, sequence: TokenSequence) -> bool:
        """Gives the sequence a slot, reusing keys and values if possible. Returns False if it must wait."""
        tokens = np.concatenate([sequence.prompt, sequence.sampled])
        if not self._reserve(len(tokens) + 1):
            return False
        if len(self.running) >= self._num_slots(self.shape.length):
            return False
        shared = np.minimum(self._common_prefix(tokens), len(tokens) - 1)  # the last token's logits are needed
        now = np.minimum(shared, self._computed[: len(shared)])
        source, promised = _argmax(now), _argmax(shared)
        if shared.size and shared[promised] - now[source] >= MIN_WAIT:
            target = self._pick_slot(keep=-1)
            self._occupy(target, sequence, tokens, computed=0)
            self._parked[target] = (promised, int(shared[promised]))
            return True
        reused = int(now[source]) if now.size else 0
        if reused and source not in self.running and reused == self._computed[source]:
            self._occupy(source, sequence, tokens, computed=reused)
            return True
        target = self._pick_slot(keep=source if reused >= MIN_COPY else -1)
        if target != source:
            reused = reused if reused >= MIN_COPY else 0
            self._copy(source, target, reused)
        self._occupy(target, sequence, tokens, computed=reused)
        return True

    def _common_prefix(self, tokens: Ints) -> Ints:
        """Returns [slots] length of the common prefix of each slot's known tokens and `tokens`; 0 for parked slots."""
        num_slots = self.shape.slots
        shared = np.zeros(num_slots, np.int64)
        alive = np.flatnonzero(self._length[:num_slots] > 0)
        start, width = 0, 32
        while alive.size and start < len(tokens):  # block widths double, over slots that matched so far
            block = tokens[start : start + width]
            equal = self._tokens[alive, start : start + len(block)] == block
            whole = equal.all(axis=1)
            shared[alive] = start + np.where(whole, len(block), equal.argmin(axis=1))
            alive, start, width = alive[whole], start + width, 2 * width
        shared = np.minimum(shared, self._length[:num_slots])
        shared[list(self._parked)] = 0
        return shared

    def _pick_slot(self, keep: int) -> int:
        """Returns an idle slot to overwrite: the lowest empty slot, else the least recently used; avoids `keep`."""
        allowed = self._num_slots(self.shape.length)
        is_empty = self._last_used[:allowed] < 0
        if is_empty.any():
            empty = int(is_empty.argmax())
            if empty >= self.shape.slots:
                self._set_shape(Shape(min(allowed, max(8, 2 * self.shape.slots)), self.shape.length))
            return empty
        last_used = self._last_used[: self.shape.slots].copy()
        last_used[list(self.running)] = NEVER
        if keep >= 0 and len(self.running) + 1 < self.shape.slots:
            last_used[keep] = NEVER
        return int(last_used.argmin())

    def _occupy(self, slot: int, sequence: TokenSequence, tokens: Ints, *, computed: int) -> None:
        self._tokens[slot, : len(tokens)] = tokens
        if num := len(sequence.sampled):
            self._logprobs[slot, len(tokens) - num : len(tokens)] = sequence.logprobs
            self._raw_logprobs[slot, len(tokens) - num : len(tokens)] = sequence.raw_logprobs
        self._length[slot], self._computed[slot], self._limit[slot] = len(tokens), computed, sequence.limit
        self._last_used[slot] = self._clock
        sequence.slot, sequence.num_reused = slot, min(computed, len(sequence.prompt))
        self._num_prompt[slot] = len(sequence.prompt)
        self.running[slot] = sequence
        self._placed.append(sequence)
        self._order = None

    def _copy(self, source: int, target: int, length: int) -> None:
        if length == 0:
            return
        last = self._copies[-1] if self._copies else None
        if last and last.source == source and last.length == length:
            last.targets.append(target)
        else:
            self._copies.append(Copy(source, [target], length))

    def _unpark(self) -> None:
        """Starts parked sequences whose shared prefix is now computed or whose source slot has stopped."""
        for slot, (source, length) in list(self._parked.items()):
            if source in self.running and self._computed[source] < length:
                continue
            del self._parked[slot]
            self._order = None
            reused = min(length, int(self._computed[source]))
            self._copy(source, slot, reused)
            self._computed[slot] = reused
            sequence = self.running[slot]
            sequence.num_reused = min(reused, len(sequence.prompt))

    # --- slots and room -----------------------------------------------------------------------------------------------

    def _release(self, sequence: TokenSequence) -> None:
        """Makes the slot idle, retaining its keys and values, and copies the sampled tokens into the sequence."""
        slot = sequence.slot
        sampled, logprobs, raw_logprobs = self.sampled_since(sequence, 0)
        sequence.sampled, sequence.logprobs = sampled.copy(), logprobs.copy()
        sequence.raw_logprobs = raw_logprobs.copy()
        sequence.slot = -1
        del self.running[slot]
        self._parked.pop(slot, None)
        self._length[slot] = self._computed[slot]
        self._last_used[slot] = self._clock if self._computed[slot] else -1
        self._order = None

    def _empty(self, slot: int) -> None:
        self._computed[slot] = self._length[slot] = 0
        self._last_used[slot] = -1

    def _num_slots(self, length: int) -> int:
        """Returns how many slots of this length the cache may hold."""
        return max(1, min(self.max_slots, self.max_tokens // length)) if length else self.max_slots

    def _make_room(self) -> None:
        """Gives each running sequence room for one more token. Sequences that no longer fit are preempted."""
        if not self.running:
            return
        slots = list(self.running)
        needed = int(self._length[slots].max()) + 1
        if needed <= self.shape.length:
            return
        length = self._roomy(needed)
        for slot in [slot for slot in reversed(slots) if slot >= self._num_slots(length)]:
            self._preempt(self.running[slot])
        self._set_shape(Shape(min(self.shape.slots, self._num_slots(length)), length))

    def _preempt(self, sequence: TokenSequence) -> None:
        self._release(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _reserve(self, needed: int) -> bool:
        """Returns True if slots of `needed` tokens are free without preemption. Shrinks a long cache if this helps."""
        length = self.shape.length
        if needed > length:
            length = self._roomy(needed)
        elif len(self.running) >= self._num_slots(length) and self._num_slots(length) < self.max_slots:
            longest = max([needed, *(int(self._length[slot]) + 1 for slot in self.running)])
            length = min(length, self._roomy(longest))
        if length == self.shape.length:
            return True
        shape = Shape(min(self.shape.slots, self._num_slots(length)), length)
        if any(slot >= self._num_slots(length) for slot in self.running):
            return False
        if self._copies and (shape.slots < self.shape.slots or shape.length < self.shape.length):
            return False  # a planned copy may read the part to be cut off; the next plan resizes
        self._set_shape(shape)
        return True

    def _roomy(self, needed: int) -> int:
        """Returns `needed` plus a quarter: growing copies every token, so the cache should grow rarely."""
        roomy = _round_up(needed + needed // 4, MIN_LENGTH)
        return max(_round_up(needed, MIN_LENGTH), min(roomy, _round_up(self.max_length, MIN_LENGTH)))

    def _set_shape(self, shape: Shape) -> None:
        """Slots get shorter only if all remaining slots are running and need less."""
        for slot in range(shape.slots, self.shape.slots):
            self._empty(slot)
        self._tokens = _resized(self._tokens, shape)
        self._logprobs = _resized(self._logprobs, shape)
        self._raw_logprobs = _resized(self._raw_logprobs, shape)
        self.shape = shape


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _argmax(values: Ints) -> int:
    return int(values.argmax()) if values.size else -1


def _resized(table: Any, shape: Iterable[int]) -> Any:
    """Returns a table of this shape: old content in the corner, zeros elsewhere."""
    rows, columns = shape
    new = np.zeros((rows, columns), table.dtype)
    kept = table[:rows, :columns]
    new[: kept.shape[0], : kept.shape[1]] = kept
    return new
