"""Concurrency: the number of rollouts that are played at once, by the engine's load; Openings: admits that many.

An engine answers so many requests at once and lets further ones wait. A rollout leaves its place there idle while its
agent computes or waits for a tool, so the right number is above the engine's for slow tools and about the same without.

    samples of the engine's load and of the calls -> their sums over two calls per rollout -> a new number, or the same

Only counts and shares decide, so that a busy machine and a quiet one come to the same: no rate of rollouts is compared.
By Little's law n rollouts that spend a share s of their time at an engine with room r fill it with n = r / s. Where the
engine does not report its room, the number grows until requests wait or the memory is full.

More conversations than places have a price: a place that answers another one loses what it had computed, and the
conversation is read again. So the number stays within the room if reading again costs more tokens, by factor, than idle
places cost requests.
"""

import asyncio
import math
from types import TracebackType

from art_cli.chat import EngineLoad
from art_cli.config.sections.rollout_config import MAX_AT_ONCE
from art_cli.rollouts.call_counts import CallCounts

FIRST = 128  # rollouts at first where the engine does not report its room, and the most where it reports nothing
SAMPLE_S = 0.25  # time between two samples
MIN_SAMPLES = 4  # fewest samples of one window
STEP = 1.5  # largest factor between two numbers
CUT = 0.7  # factor after refusals, as in TCP's congestion control (RFC 9438, section 4.6)
REFUSED = 1 / 16  # share of calls refused for a rate limit above which the number is cut
FEW, ENOUGH, MANY = 1.2, 1.3, 1.5  # requests per request that the engine has room for; a reserve keeps it full
FULL, CROWDED = 0.85, 0.95  # share of the memory up to which the number grows, and above which it becomes smaller
MARGIN = 2.0  # weight of tokens read again against idle places
GAIN = 0.25  # share of the growth in rollouts by which requests must grow, or the agents and not the engine are slow


class Concurrency:
    """The number of rollouts at once: `number`, changed by `note`."""

    def __init__(self, load: EngineLoad | None) -> None:
        """`load` is the engine's before the first rollout, or None if the engine does not report it."""
        self._room = None if load is None else load.room
        self.number = min(MAX_AT_ONCE, self._room or FIRST)
        self._busy_share = 0.0  # share of the rollouts' time with a call at the engine; 0 before the first window
        self._window: list[tuple[int, EngineLoad | None]] = []
        self._calls = CallCounts()  # those of the window
        self._is_settled = False  # the first window with a number does not count: all begin at once, in a wave
        self._grown = (math.inf, 0.0)  # rollouts and their calls in flight when the number last grew
        self._computed_before = 0  # tokens that the engine had computed at the last sample
        # Tokens that the engine computed per token of the calls, with rollouts within its room and beyond it.
        self._within = self._beyond = 0.0
        self._need = 0.0  # factor by which more rollouts would fill the room, with rollouts within it

    def __str__(self) -> str:
        """Example: "48 (the engine answers 32 requests at once; rollouts are without a call 35% of their time)"."""
        facts = [f"the engine answers {self._room} requests at once"] if self._room else []
        facts += [f"rollouts are without a call {1 - self._busy_share:.0%} of their time"] if self._busy_share else []
        return f"{self.number} ({'; '.join(facts)})" if facts else str(self.number)

    def note(self, in_flight: int, load: EngineLoad | None, calls: CallCounts) -> int:
        """Returns the number from now on, after a sample: rollouts in flight, load, and calls since the last sample.

        Moments with fewer rollouts than the number, as at a step's end, do not count.
        """
        if load is not None:
            calls.computed, self._computed_before = load.computed - self._computed_before, load.computed
        if in_flight < self.number and not calls.refused:
            return self.number
        self._window.append((in_flight, load))
        self._calls.add(calls)
        num_calls = self._calls.answered + self._calls.refused
        if len(self._window) < MIN_SAMPLES or num_calls < self.number:
            return self.number
        before, rollouts = self.number, sum(each for each, _ in self._window) / len(self._window)
        if self._calls.refused > REFUSED * num_calls:
            self.number = max(1, math.floor(CUT * min(before, rollouts)))
        elif self._is_settled:
            wanted = min(max(self._wanted(rollouts, self._calls), before / STEP), before * STEP, MAX_AT_ONCE)
            self.number = max(1, math.ceil(wanted) if wanted > before else math.floor(wanted))
        self._is_settled = self.number == before
        self._window, self._calls = [], CallCounts()
        return self.number

    def _wanted(self, rollouts: float, calls: CallCounts) -> float:
        """Returns the number that the window speaks for."""
        self._busy_share = _mixed(self._busy_share, calls.busy_s / max(calls.busy_s + calls.idle_s, 1e-9))
        loads = [load for _, load in self._window if load is not None]
        if not loads:
            if self._room:  # it was known before
                return self.number
            grown = self.number if calls.refused else self.number + max(1.0, self.number / 16)
            return min(grown, max(FIRST, self.number))
        memory = math.fsum(load.memory for load in loads) / len(loads)
        if memory > CROWDED:
            return min(self.number, rollouts * FULL / memory)
        if (known := loads[-1].room) is None:
            room = sum(load.running for load in loads) / len(loads)
            busy = room + sum(load.waiting for load in loads) / len(loads)
        else:
            self._room, room, busy = known, float(known), rollouts * self._busy_share
        factor = ENOUGH * room / max(busy, 1e-9)
        if busy > MANY * room:
            return rollouts * factor
        if known is not None and self._is_cheaper_within(rollouts, known, factor, calls):
            return min(self.number, room)
        if busy > FEW * room or memory > FULL or calls.refused:
            return self.number
        return self._grow(rollouts, busy, min(STEP if known is None else factor, FULL / max(memory, 1e-9)))

    def _is_cheaper_within(self, rollouts: float, room: int, factor: float, calls: CallCounts) -> bool:
        """Returns whether conversations that lose their place, and are read again, cost more than idle places."""
        ratio = calls.computed / max(1, calls.tokens)
        if rollouts <= room:
            self._within, self._need = _mixed(self._within, ratio), _mixed(self._need, factor)
        else:
            self._beyond = _mixed(self._beyond, ratio)
        loss = self._beyond / self._within if self._within else 0.0
        return 1 + MARGIN * (loss - 1) > self._need > 0

    def _grow(self, rollouts: float, busy: float, factor: float) -> float:
        """Returns a larger number, or the same if the last growth brought hardly a request more to the engine."""
        before, busy_before = self._grown
        if rollouts > before and busy < busy_before * (1 + GAIN * (rollouts / before - 1)):
            return self.number
        self._grown = rollouts, busy
        return rollouts * factor


def _mixed(before: float, now: float) -> float:
    return (before + now) / 2 if before else now


class Openings:
    """Admits `number` at once, first come, first served. The number may change meanwhile: nobody is put out."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_taken = 0
        self._free, self._there_are = asyncio.Semaphore(number), number

    def resize(self, number: int) -> None:
        self.number = number
        for _ in range(number - self._there_are):
            self._there_are += 1
            self._free.release()

    async def __aenter__(self) -> None:
        await self._free.acquire()
        while self._there_are > self.number:  # it became smaller, so that this one is withdrawn
            self._there_are -= 1
            await self._free.acquire()
        self.num_taken += 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.num_taken -= 1
        self._free.release()
