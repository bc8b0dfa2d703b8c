"""Startup: the time from process start to the first reply, split into parts."""

import logging
import os
import time
from pathlib import Path

log = logging.getLogger(__name__)


class Startup:
    """A clock with consecutive parts. `begin` is a `time.monotonic` time, by default now.

    Example: `reached("model")` adds the time since the previous mark to "model".
    """

    def __init__(self, begin: float | None = None) -> None:
        self._begin = self._last = time.monotonic() if begin is None else begin
        self.parts: dict[str, float] = {}  # seconds by name, in order
        self._is_over = False

    def reached(self, part: str) -> None:
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def end(self, part: str) -> None:
        """Ends the last part and logs all parts. Later calls do nothing."""
        if self._is_over:
            return
        self._is_over = True
        self.reached(part)
        texts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.parts.items())
        log.info("%s after %.2f s: %s", part, self._last - self._begin, texts)


def process_begin() -> float:
    """Returns the process's start time on the `time.monotonic` clock, or the current time if unavailable."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # field 22 of the line: clock ticks since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(0.0, age)
