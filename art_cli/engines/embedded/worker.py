"""The thread that runs the model: takes answers in, samples all of them together, hands out what they gained.

Commands (add, cancel) come in through a queue and are taken between steps; pieces go out to mailboxes, once a step to
each, which are called in this thread and must only pass them on. When a step fails, every answer gets the failure, the
thread ends, and whatever is asked afterwards raises EngineError.

Each step holds `weights.lock` while it plans and runs the model. Weights that changed since the last step make
everything computed stale: caches are dropped, and running answers go on from their tokens under the new weights.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from art_cli import threads
from art_cli.engines.embedded import sampling
from art_cli.engines.embedded.grammars import GrammarError, Masks, reason
from art_cli.engines.embedded.runner import Runner
from art_cli.engines.embedded.sampling import Allowed, Drawn, Knobs
from art_cli.engines.embedded.scheduler import Scheduler, StepPlan
from art_cli.engines.embedded.scheduler import Sequence as Slotted
from art_cli.engines.embedded.text import Detokenizer
from art_cli.errors import EngineError

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)

Top = list[list[tuple[int, float]]]


class Piece(NamedTuple):
    """What an answer gained. L new tokens."""

    ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top: Top | None  # [L][k] token ids and raw logprobs; None: not asked for
    step: int
    finish_reason: str | None = None  # None: goes on
    failure: EngineError | None = None


@dataclass(eq=False)
class Answer:
    """One answer to sample: what is asked and who is told."""

    sequence: Slotted
    temperature: float
    top_p: float
    top_k: int
    seed: int  # in [0, 2**64)
    owner: Any  # the caller's own
    mailbox: "Mailbox"
    is_stream: bool = False  # a piece for every token; otherwise one at the end
    num_top: int = 0
    stops: tuple[str, ...] = ()
    text: Detokenizer | None = None  # where stop strings have to be found
    matcher: "LLMatcher | None" = None  # what holds it to a format, at what was sampled so far
    step: int | None = None  # the policy's step that sampled its first token
    num_delivered: int = 0
    seen: str = ""  # end of the text so far, as long as a stop string may reach back into it
    top: Top = field(default_factory=list)


Mailbox = Callable[[list[tuple[Answer, Piece]]], None]


class Worker:
    """Owns the scheduler; the runner is used by this thread alone once `start` was called."""

    def __init__(self, runner: Runner, scheduler: Scheduler, *, stop_ids: Sequence[int], vocab: int, step: int) -> None:
        self.step = step
        self._runner, self._scheduler = runner, scheduler
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._version = runner.weights.version
        self._is_stale = False
        self._is_closing = False
        self._out: dict[Mailbox, list[tuple[Answer, Piece]]] = {}  # pieces of this step
        self._ended: EngineError | None = None  # why the thread takes no more commands
        self._gate = threading.Lock()  # between a command that comes and a thread that ends
        self._stop_table = np.zeros(vocab, np.bool_)
        self._stop_table[[id for id in stop_ids if id < vocab]] = True
        size = scheduler.max_slots
        self._temperature = np.zeros(size, np.float32)
        self._top_p = np.ones(size, np.float32)
        self._top_k = np.zeros(size, np.int64)
        self._seeds = np.zeros(size, np.uint64)
        self._num_top = np.zeros(size, np.int64)
        self._is_held = np.zeros(size, np.bool_)  # to a format
        self._masks: Masks | None = None  # made when the first one is
        self._is_watched = np.zeros(size, np.bool_)  # streams, or has stop strings
        self._thread = threading.Thread(target=self._run, name="art-embedded-engine", daemon=True)

    # --- from any thread ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def add(self, answers: Sequence[Answer]) -> None:
        """Raises EngineError: the thread has ended."""

        def command() -> None:
            for answer in answers:
                self._scheduler.add(answer.sequence)

        self._put(command)

    def cancel(self, answers: Sequence[Answer]) -> None:
        def command() -> None:
            for answer in answers:
                self._scheduler.cancel(answer.sequence)

        with contextlib.suppress(EngineError):
            self._put(command)

    def check(self) -> None:
        """Raises EngineError: the thread has ended."""
        if self._ended is not None:
            raise self._ended

    def _put(self, command: Callable[[], None] | None) -> None:
        with self._gate:
            self.check()
            self._commands.put(command)

    def set_step(self, step: int) -> None:
        """From the next step on, what is sampled is tagged with `step`, and nothing computed before is used.

        The caller holds the weights.
        """
        self.step = step
        self._runner.refresh()
        self._is_stale = True

    def let_go(self) -> None:
        """Frees the cache and copies of weights. The caller holds the weights, so that no step is under way."""
        self._runner.cache.clear()
        self._runner.refresh()
        self._is_stale = True

    def close(self, timeout_s: float) -> bool:
        """Ends the thread; unfinished answers get a failure. False: it still runs after `timeout_s`."""
        with contextlib.suppress(EngineError):
            self._put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ended = EngineError("the embedded engine is closed")
        if self._runner.is_small:
            torch.get_num_threads()  # sets up torch's own for this thread, which would undo what follows
            threads.compute_alone()
        try:
            while self._take_commands():
                self._step()
        except BaseException as error:
            log.exception("the embedded engine failed")
            ended = EngineError(f"the embedded engine failed: {type(error).__name__}: {error}".splitlines()[0])
        self._end(ended)

    def _take_commands(self) -> bool:
        """Does what was asked since the last step; waits where there is nothing to sample. False: close."""
        while not self._is_closing:
            if self._scheduler.is_idle and self._commands.empty():
                threads.let_pool_go()
            try:
                command = self._commands.get(block=self._scheduler.is_idle)
            except queue.Empty:
                return True
            if command is None:
                self._is_closing = True
            else:
                command()
        return False

    def _step(self) -> None:
        with self._runner.weights.lock:
            self._drop_stale()
            plan = self._scheduler.plan()
            if plan is None:
                return
            self._set_knobs(plan)
            step = self.step
            logits = self._runner.forward(plan)
        if len(plan.rows) == 0:
            none = np.empty(0, np.float32)
            self._scheduler.commit(plan, plan.rows, none, none, plan.rows.astype(np.bool_))
            return
        allowed = self._allowed(plan)  # while a GPU still computes the logits
        drawn = sampling.draw(logits, self._knobs(plan), allowed)
        self._collect_top(plan, logits)
        self._take_in(plan, drawn, step)

    def _drop_stale(self) -> None:
        version = self._runner.weights.version
        if version != self._version or self._is_stale:
            self._scheduler.invalidate()
            self._version, self._is_stale = version, False

    def _set_knobs(self, plan: StepPlan) -> None:
        for sequence in plan.placed:
            answer: Answer = sequence.payload
            slot = sequence.slot
            self._temperature[slot], self._top_p[slot] = answer.temperature, answer.top_p
            self._top_k[slot], self._seeds[slot] = answer.top_k, answer.seed
            self._num_top[slot] = answer.num_top
            self._is_held[slot] = answer.matcher is not None
            self._is_watched[slot] = answer.is_stream or bool(answer.stops)

    def _knobs(self, plan: StepPlan) -> Knobs:
        slots = plan.slots
        return Knobs(
            self._temperature[slots], self._top_p[slots], self._top_k[slots], self._seeds[slots], plan.num_sampled
        )

    def _allowed(self, plan: StepPlan) -> Allowed | None:
        """What may follow in the answers that are held to a format; None where none is."""
        rows = np.flatnonzero(self._is_held[plan.slots])
        if not rows.size:
            return None
        if self._masks is None:
            self._masks = Masks(len(self._stop_table), torch.get_num_threads())
        running = self._scheduler.running
        return Allowed(rows, self._masks.allowed([running[int(slot)].payload.matcher for slot in plan.slots[rows]]))

    def _take_in(self, plan: StepPlan, drawn: Drawn, step: int) -> None:
        """Records what was drawn, ends what is at its end, hands out pieces."""
        ids, logprobs, raw_logprobs = (part.cpu().numpy() for part in drawn)
        running = self._scheduler.running
        for row in np.flatnonzero(plan.num_sampled == 0):
            running[int(plan.slots[row])].payload.step = step
        for row in np.flatnonzero(self._is_held[plan.slots]):
            running[int(plan.slots[row])].payload.matcher.consume_token(int(ids[row]))
        watched = [running[int(slot)].payload for slot in plan.slots[self._is_watched[plan.slots]]]
        finished = self._scheduler.commit(plan, ids, logprobs, raw_logprobs, self._stop_table[ids])
        for answer in watched:
            sequence = answer.sequence
            if answer.stops and self._meets_stop(answer):
                if sequence.slot >= 0:
                    self._scheduler.finish(sequence, "stop")
                    finished.append(sequence)
                sequence.finish_reason = "stop"
            elif answer.is_stream and sequence.slot >= 0:
                self._deliver(answer, None)
        for sequence in finished:
            self._deliver(sequence.payload, sequence.finish_reason)
        self._send()

    def _meets_stop(self, answer: Answer) -> bool:
        """Whether the newest token completes a stop string."""
        assert answer.text is not None
        ids, _, _ = self._scheduler.sampled_since(answer.sequence, self._scheduler.num_sampled(answer.sequence) - 1)
        answer.seen += answer.text.push(ids.tolist())
        is_met = any(stop in answer.seen for stop in answer.stops)
        answer.seen = answer.seen[-max(map(len, answer.stops)) :]
        return is_met

    def _collect_top(self, plan: StepPlan, logits: torch.Tensor) -> None:
        nums: npt.NDArray[np.int64] = self._num_top[plan.slots]
        rows = np.flatnonzero(nums)
        if not rows.size:
            return
        values, ids = sampling.top_logprobs(logits[torch.from_numpy(rows).to(logits.device)], int(nums.max()))
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            answer: Answer = self._scheduler.running[int(plan.slots[row])].payload
            answer.top.append(list(zip(row_ids, row_values, strict=True))[: answer.num_top])

    def _deliver(self, answer: Answer, finish_reason: str | None) -> None:
        start = answer.num_delivered
        ids, logprobs, raw_logprobs = self._scheduler.sampled_since(answer.sequence, start)
        answer.num_delivered += len(ids)
        top = answer.top[start : answer.num_delivered] if answer.num_top else None
        assert answer.step is not None
        failure = None
        if finish_reason is not None and answer.matcher is not None and answer.matcher.is_error():
            failure = GrammarError(reason(answer.matcher.get_error()))
        piece = Piece(ids.tolist(), logprobs.tolist(), raw_logprobs.tolist(), top, answer.step, finish_reason, failure)
        self._out.setdefault(answer.mailbox, []).append((answer, piece))

    def _send(self) -> None:
        for mailbox, pieces in self._out.items():
            mailbox(pieces)
        self._out = {}

    def _end(self, ended: EngineError) -> None:
        """Tells everyone who waits, also those whose command was not taken any more."""
        with self._gate:
            self._ended = ended
        while not self._commands.empty():
            if command := self._commands.get():
                command()
        for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting]:
            answer: Answer = sequence.payload
            self._out.setdefault(answer.mailbox, []).append((answer, Piece([], [], [], None, self.step, None, ended)))
        self._send()
