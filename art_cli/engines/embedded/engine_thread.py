"""EngineThread: runs the model, samples all generations together, and hands out their new tokens.

Commands (add, cancel) arrive through a queue, and the thread runs them between steps. Pieces go to mailboxes, one call
per step and mailbox. Mailboxes are called in this thread, so they must only forward the pieces. If a step fails, every
generation gets the error, the thread ends, and later calls raise EngineError.

Each step holds `weights.lock` while it plans and runs the model. After a weight change everything computed is stale:
caches are dropped, and running generations continue from their tokens under the new weights.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from art_cli.chat import EngineLoad
from art_cli.chat.requests import Sampling
from art_cli.engines.embedded import token_sampling
from art_cli.engines.embedded.choices import Piece, Top
from art_cli.engines.embedded.grammars import GrammarError, Masks, reason
from art_cli.engines.embedded.model_runner import ForwardRunner
from art_cli.engines.embedded.reply_text import Detokenizer
from art_cli.engines.embedded.scheduler import Scheduler, StepPlan, TokenSequence
from art_cli.engines.embedded.token_sampling import Allowed, Drawn, Knobs, Reshaping
from art_cli.runtime import openmp
from art_cli.runtime.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Generation:
    """One choice being sampled: its settings, and the mailbox for its pieces."""

    sequence: TokenSequence
    sampling: Sampling
    seed: int  # a number in [0, 2**64)
    owner: Any  # the caller's object, opaque to the thread
    choice: int  # index among the request's choices
    mailbox: "Mailbox"
    is_stream: bool = False  # True: a piece for every token; False: one piece at the end
    num_top: int = 0
    top_temperature: float = 0.0  # temperature for the reported likeliest tokens; 0: softmax(logits)
    text: Detokenizer | None = None  # decodes sampled text if there are stop strings
    reshaping: Reshaping | None = None  # penalties and biases
    matcher: "LLMatcher | None" = None  # the required grammar, advanced by every sampled token
    step: int | None = None  # policy step that sampled the initial token
    num_delivered: int = 0
    seen: str = ""  # end of the text so far, as long as the longest stop string
    top: Top = field(default_factory=list)


Mailbox = Callable[[list[tuple[Generation, Piece]]], None]


class _SlotSettings:
    """Settings of the generations in the slots, as arrays of [slots]."""

    def __init__(self, size: int) -> None:
        self.temperature = np.zeros(size, np.float32)
        self.top_p = np.ones(size, np.float32)
        self.top_k = np.zeros(size, np.int64)
        self.seeds = np.zeros(size, np.uint64)
        self.num_top = np.zeros(size, np.int64)
        self.is_held = np.zeros(size, np.bool_)  # whether a grammar applies
        self.has_stop_ids = np.zeros(size, np.bool_)
        self.ignores_ends = np.zeros(size, np.bool_)
        self.is_reshaped = np.zeros(size, np.bool_)
        self.is_watched = np.zeros(size, np.bool_)  # whether it streams or has stop strings

    def set(self, slot: int, generation: Generation) -> None:
        sampling = generation.sampling
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.seeds[slot] = sampling.top_k, generation.seed
        self.num_top[slot] = generation.num_top
        self.is_held[slot] = generation.matcher is not None
        self.has_stop_ids[slot] = bool(sampling.stop_ids)
        self.ignores_ends[slot] = sampling.ignore_eos
        self.is_reshaped[slot] = generation.reshaping is not None
        self.is_watched[slot] = generation.is_stream or bool(sampling.stop)

    def knobs(self, plan: StepPlan) -> Knobs:
        slots = plan.slots
        return Knobs(self.temperature[slots], self.top_p[slots], self.top_k[slots], self.seeds[slots], plan.num_sampled)


class EngineThread:
    """Owns the scheduler. After `start`, other threads need the weights' lock to use the runner."""

    def __init__(self, runner: ForwardRunner, scheduler: Scheduler, *, step: int) -> None:
        self.step = step
        self._runner, self._scheduler = runner, scheduler
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # requests from other threads
        self._ended: EngineError | None = None  # the error for later commands
        self._gate = threading.Lock()  # between new commands and the thread's end
        self._version = runner.weights.version
        self._is_stale = False
        self._is_closing = False
        self._out: dict[Mailbox, list[tuple[Generation, Piece]]] = {}  # pieces from this step
        vocab = runner.weights.vocabulary
        self._stop_table = np.zeros(vocab, np.bool_)
        self._stop_table[[id for id in runner.weights.stop_ids if id < vocab]] = True
        self._settings = _SlotSettings(scheduler.max_slots)
        self._masks: Masks | None = None  # built when a grammar is needed
        self._thread = threading.Thread(target=self._run, name="art-embedded-engine", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def add(self, generations: Sequence[Generation]) -> None:
        """Raises EngineError after the thread's end."""
        self._put(partial(_for_each, self._scheduler.add, generations))

    def cancel(self, generations: Sequence[Generation]) -> None:
        with contextlib.suppress(EngineError):
            self._put(partial(_for_each, self._scheduler.cancel, generations))

    def _put(self, command: Callable[[], None]) -> None:
        with self._gate:
            self.check()
            self._commands.put(command)

    def check(self) -> None:
        """Raises EngineError after the thread's end."""
        if self._ended is not None:
            raise self._ended

    def hold(self, is_held: bool) -> None:
        """Stops or resumes admitting new generations."""
        self._put(partial(setattr, self._scheduler, "is_held", is_held))

    @property
    def is_drained(self) -> bool:
        """Whether new generations are on hold and all others have ended."""
        return self._scheduler.is_held and not self._scheduler.has_begun

    def occupancy(self) -> EngineLoad:
        scheduler, num_new = self._scheduler, self._commands.qsize()
        running, waiting = len(scheduler.running), len(scheduler.waiting) + num_new
        return EngineLoad(running, waiting, scheduler.room, computed=scheduler.num_computed)

    def set_step(self, step: int) -> None:
        """Tags later tokens with `step` and drops everything computed. The caller holds the weights."""
        self.step = step
        self._runner.refresh()
        self._is_stale = True

    def let_go(self) -> None:
        """Frees the cache and weight copies. The caller owns the weights, so no step can be running."""
        self._runner.cache.clear()
        self._runner.refresh()
        self._is_stale = True

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; unfinished generations get an error. Returns False if it still runs after `timeout_s`."""
        with contextlib.suppress(EngineError):
            self._put(partial(setattr, self, "_is_closing", True))
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended = EngineError("the embedded engine is closed")
        try:
            with openmp.single_threaded() if self._runner.is_small else contextlib.nullcontext():
                while self._take_commands():
                    self._step()
        except BaseException as error:
            log.exception("the embedded engine failed")
            ended = EngineError(f"the embedded engine failed: {type(error).__name__}: {error}".splitlines()[0])
        self._end(ended)

    def _take_commands(self) -> bool:
        """Runs queued commands; waits while idle. Returns False after `close`."""
        while not self._is_closing:
            if self._scheduler.is_idle and self._commands.empty():
                openmp.release_pool()
            if not self._run_next(waits=self._scheduler.is_idle):
                return True
        return False

    def _run_next(self, *, waits: bool) -> bool:
        """Runs the next command. Returns False if the queue is empty."""
        try:
            command = self._commands.get(block=waits)
        except queue.Empty:
            return False
        command()
        return True

    def _step(self) -> None:
        with self._runner.weights.lock:
            self._drop_stale()
            plan = self._scheduler.plan()
            if plan is None:
                return
            for sequence in plan.placed:
                self._settings.set(sequence.slot, sequence.payload)
            step = self.step
            logits = self._runner.forward(plan)
        if len(plan.rows) == 0:
            none = np.empty(0, np.float32)
            self._scheduler.commit(plan, plan.rows, none, none, plan.rows.astype(np.bool_))
            return
        allowed = self._allowed(plan)  # before reading the logits, because a GPU is still computing them
        drawn = token_sampling.draw(logits, self._settings.knobs(plan), allowed, self._reshaped(plan, logits))
        self._collect_top(plan, logits)
        self._take_in(plan, drawn, step)

    def _drop_stale(self) -> None:
        version = self._runner.weights.version
        if version != self._version or self._is_stale:
            self._scheduler.invalidate()
            self._version, self._is_stale = version, False

    def _allowed(self, plan: StepPlan) -> Allowed | None:
        """Returns the tokens allowed by grammars; None when the plan has no grammar."""
        rows = np.flatnonzero(self._settings.is_held[plan.slots])
        if not rows.size:
            return None
        if self._masks is None:
            self._masks = Masks(len(self._stop_table), torch.get_num_threads())
        running = self._scheduler.running
        return Allowed(rows, self._masks.allowed([running[int(slot)].payload.matcher for slot in plan.slots[rows]]))

    def _reshaped(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor | None:
        """Returns a copy of the logits [R, V] after biases and penalties; None when the plan has neither."""
        rows = np.flatnonzero(self._settings.is_reshaped[plan.slots])
        if not rows.size:
            return None
        reshaped = logits.clone()
        for row in rows:
            generation: Generation = self._scheduler.running[int(plan.slots[row])].payload
            assert generation.reshaping is not None
            sampled, _, _ = self._scheduler.sampled_since(generation.sequence, 0)
            generation.reshaping.apply(reshaped[row], sampled)
        return reshaped

    def _take_in(self, plan: StepPlan, drawn: Drawn, step: int) -> None:
        """Records the drawn tokens, ends finished generations and hands out pieces."""
        ids, logprobs, raw_logprobs = (part.cpu().numpy() for part in drawn)
        running = self._scheduler.running
        for row in np.flatnonzero(plan.num_sampled == 0):
            running[int(plan.slots[row])].payload.step = step
        for row in np.flatnonzero(self._settings.is_held[plan.slots]):
            running[int(plan.slots[row])].payload.matcher.consume_token(int(ids[row]))
        watched = [running[int(slot)].payload for slot in plan.slots[self._settings.is_watched[plan.slots]]]
        finished = self._scheduler.commit(plan, ids, logprobs, raw_logprobs, self._stops(plan, ids))
        for generation in watched:
            sequence = generation.sequence
            if generation.sampling.stop and self._meets_stop(generation):
                if sequence.slot >= 0:
                    self._scheduler.finish(sequence, "stop")
                    finished.append(sequence)
                sequence.finish_reason = "stop"
            elif generation.is_stream and sequence.slot >= 0:
                self._deliver(generation, None)
        for sequence in finished:
            self._deliver(sequence.payload, sequence.finish_reason)
        self._send()

    def _stops(self, plan: StepPlan, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Returns [R] whether each drawn token ends its generation."""
        stops: npt.NDArray[np.bool_] = self._stop_table[ids] & ~self._settings.ignores_ends[plan.slots]
        for row in np.flatnonzero(self._settings.has_stop_ids[plan.slots]):
            stops[row] |= int(ids[row]) in self._scheduler.running[int(plan.slots[row])].payload.sampling.stop_ids
        return stops

    def _meets_stop(self, generation: Generation) -> bool:
        """Returns True if the newest token completes a stop string."""
        assert generation.text is not None
        num_sampled = self._scheduler.num_sampled(generation.sequence)
        ids, _, _ = self._scheduler.sampled_since(generation.sequence, num_sampled - 1)
        text = generation.text.push(ids.tolist())
        if num_sampled <= generation.sampling.min_tokens:
            return False
        stops = generation.sampling.stop
        generation.seen += text
        is_met = any(stop in generation.seen for stop in stops)
        generation.seen = generation.seen[-max(map(len, stops)) :]
        return is_met

    def _collect_top(self, plan: StepPlan, logits: torch.Tensor) -> None:
        nums: npt.NDArray[np.int64] = self._settings.num_top[plan.slots]
        rows = np.flatnonzero(nums)
        if not rows.size:
            return
        generations: list[Generation] = [self._scheduler.running[int(plan.slots[row])].payload for row in rows]
        temperature = np.array([generation.top_temperature for generation in generations], np.float32)
        wanted = logits[torch.from_numpy(rows).to(logits.device)]
        values, ids = token_sampling.top_logprobs(wanted, int(nums.max()), temperature)
        for generation, row_ids, row_values in zip(generations, ids.tolist(), values.tolist(), strict=True):
            generation.top.append(list(zip(row_ids, row_values, strict=True))[: generation.num_top])

    def _deliver(self, generation: Generation, finish_reason: str | None) -> None:
        start = generation.num_delivered
        ids, logprobs, raw_logprobs = self._scheduler.sampled_since(generation.sequence, start)
        generation.num_delivered += len(ids)
        top = generation.top[: len(ids)] if generation.num_top else None
        del generation.top[: len(ids)]  # otherwise a stream of many choices would keep them all
        assert generation.step is not None
        failure = None
        if finish_reason is not None and generation.matcher is not None and generation.matcher.is_error():
            failure = GrammarError(reason(generation.matcher.get_error()))
        piece = Piece(
            ids.tolist(), logprobs.tolist(), raw_logprobs.tolist(), top, generation.step, finish_reason, failure
        )
        self._out.setdefault(generation.mailbox, []).append((generation, piece))

    def _send(self) -> None:
        for mailbox, pieces in self._out.items():
            mailbox(pieces)
        self._out = {}

    def _end(self, ended: EngineError) -> None:
        """Passes the error to every generation, including those still in the command queue."""
        with self._gate:
            self._ended = ended
        while self._run_next(waits=False):
            pass
        for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting]:
            generation: Generation = sequence.payload
            piece = Piece([], [], [], None, self.step, None, ended)
            self._out.setdefault(generation.mailbox, []).append((generation, piece))
        self._send()


def _for_each(act: Callable[[TokenSequence], None], generations: Sequence[Generation]) -> None:
    for generation in generations:
        act(generation.sequence)
