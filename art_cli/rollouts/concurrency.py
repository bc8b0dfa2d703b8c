"""Concurrency: adapts the number of concurrent rollouts to the engine's load; Openings: admits this number.

A rollout does not use the engine while its agent computes or waits for a tool. The best number of rollouts is therefore
larger than the engine's capacity for agents with slow tools, and close to the capacity for other agents.

    samples of engine load and calls -> sums over a window of two calls per rollout -> a new number, or the same number

Decisions depend only on counts and ratios, not on rollouts per second, so busy and idle machines reach the same number.
By Little's law, n rollouts that spend a fraction s of their time in calls fill a capacity of r requests with n = r / s.
If the engine does not report its capacity, the number grows until requests queue or the memory is full.

Having more conversations than cache slots has a cost: a slot that switches conversations loses its cached prefix, and
the prefix must be computed again. The number therefore stays within the capacity if recomputation costs more tokens, by
factor, than unused slots cost requests.
"""

import asyncio
import math

from art_cli.chat import EngineLoad
from art_cli.config.sections.rollout_config import MAX_AT_ONCE
from art_cli.rollouts.call_counts import CallCounts

FIRST = 128  # initial number if the capacity is unknown, and the maximum if the load is unknown
SAMPLE_S = 0.25  # sampling interval
MIN_SAMPLES = 4  # minimum samples per window
STEP = 1.5  # maximum factor per change
CUT = 0.7  # factor after refusals, like TCP congestion control (RFC 9438, section 4.6)
REFUSED = 1 / 16  # share of calls refused for a rate limit above which the number is cut
FEW, ENOUGH, MANY = 1.2, 1.3, 1.5  # requests per request that the engine has room for; a reserve keeps it full
FULL, CROWDED = 0.85, 0.95  # memory use up to which the number grows, and above which it shrinks
MARGIN = 2.0  # weight of tokens read again against idle places
GAIN = 0.25  # minimum ratio of request growth to rollout growth; below it the agents are the bottleneck


class Concurrency:
    """The number of concurrent rollouts. `note` updates `number`."""

    def __init__(self, load: EngineLoad | None) -> None:
        """`load` is the engine's load before the first rollout, if known."""
        self._room = None if load is None else load.room
        self.number = min(MAX_AT_ONCE, self._room or FIRST)
        self._busy_share = 0.0  # fraction of rollout time spent in calls; 0 before the first window
        self._window: list[tuple[int, EngineLoad | None]] = []
        self._calls = CallCounts()  # calls in the current window
        self._is_settled = False  # the first window with a new number is ignored, because all rollouts start together
        self._grown = (math.inf, 0.0)  # rollouts and concurrent requests at the last increase
        self._computed_before = 0  # tokens that the engine had computed at the last sample
        # Tokens that the engine computed per token of the calls, with rollouts within its room and beyond it.
        self._within = self._beyond = 0.0
        self._need = 0.0  # capacity per request, with a reserve, measured while rollouts are within the capacity

    def __str__(self) -> str:
        """Example: "48 (the engine answers 32 requests at once; rollouts are without a call 35% of their time)"."""
        facts = [f"the engine answers {self._room} requests at once"] if self._room else []
        facts += [f"rollouts are without a call {1 - self._busy_share:.0%} of their time"] if self._busy_share else []
        return f"{self.number} ({'; '.join(facts)})" if facts else str(self.number)

    def note(self, in_flight: int, load: EngineLoad | None, calls: CallCounts) -> int:
        """Takes a sample (rollouts in flight, engine load, calls since the last sample) and returns the new number.

        Samples with fewer rollouts than the number, such as during a step's last rollouts, are ignored.
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
            if self._room:  # the capacity was reported before
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
        """Returns whether recomputing evicted conversations costs more than leaving slots unused."""
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
    """Admits up to `number` rollouts, first come, first served. Lowering the number evicts no running rollout."""

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
        while self._there_are > self.number:  # the number was lowered, so remove this permit
            self._there_are -= 1
            await self._free.acquire()
        self.num_taken += 1

    async def __aexit__(self, *exc: object) -> None:
        self.num_taken -= 1
        self._free.release()
