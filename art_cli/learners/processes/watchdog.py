"""Watchdog: finds the process of a learner that does not go on, from their messages during one call. It ends none.

Its clock stands while this process is stopped (a Ctrl-Z), because what came meanwhile must be heard first.
"""

import time
from collections.abc import Callable, Iterable

from art_cli.runtime.processes.process_calls import Advance, Message, Raised, Returned

POLL_S = 0.2  # how often the watchdog is asked
PACK_DEADLINE_S = 900.0  # longest wait for the first pack, which has all preparation before it; some calls report none
PACK_FLOOR_S, TIMES_LONGEST = 60.0, 10.0  # later packs may take 10 times as long as the longest so far, at least 60 s
AGREE_DEADLINE_S = 10.0  # longest time from the first error to the last; all make the same checks on the same data


class Watchdog:
    """One for each call. Example: `hear("process 1", Heartbeat())` until `problem()` returns what is wrong."""

    def __init__(self, names: Iterable[str], hung_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`hung_s` is the longest silence of a process that works."""
        self._hung_s = hung_s
        self._clock, self._last, self._now = clock, clock(), 0.0
        self._heard = dict.fromkeys(names, 0.0)  # when each process that still works said anything
        self._advanced = 0.0  # when the newest pack was done
        self._longest: float | None = None  # longest time from one pack to the next
        self._failed: float | None = None  # when the first error came

    def hear(self, name: str, message: Message) -> None:
        self._tick()
        self._heard[name] = self._now
        match message:
            case Advance():
                self._longest = max(self._longest or 0.0, self._now - self._advanced)
                self._advanced = self._now
            case Raised() | Returned():
                del self._heard[name]
                if isinstance(message, Raised) and self._failed is None:
                    self._failed = self._now

    @property
    def has_disagreement(self) -> bool:
        """True if some processes have failed and the others have not done so in time."""
        self._tick()
        return self._failed is not None and self._now - self._failed > AGREE_DEADLINE_S

    def problem(self) -> str | None:
        """Returns which process does not go on, or None while nothing is overdue."""
        self._tick()
        for name, heard in self._heard.items():
            if self._now - heard > self._hung_s:
                state = "it lives, and has not moved" if name.startswith("process ") else "nothing has come from it"
                return f"learner {name} hangs: {state} for {self._hung_s:.0f} s"
        limit = PACK_DEADLINE_S
        if self._longest is not None:
            limit = min(limit, max(PACK_FLOOR_S, TIMES_LONGEST * self._longest))
        if self._failed is None and self._now - self._advanced > limit:
            return f"the learner's processes hang: they have done nothing for {limit:.0f} s"
        return None

    def _tick(self) -> None:
        now = self._clock()
        self._now += min(now - self._last, 2 * POLL_S)
        self._last = now
