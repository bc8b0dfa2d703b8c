"""Waiting until something holds, with a deadline."""

import asyncio
import subprocess
import time
from collections.abc import Callable

from tests.support.processes.forked import Forked


async def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns once `holds()` is true; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)


def wait_until(
    holds: Callable[[], object],
    timeout_s: float = 120.0,
    *,
    while_running: "subprocess.Popen[str] | Forked | None" = None,
) -> None:
    """The same outside an event loop; fails at once when the process `while_running` has ended."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        has_ended = while_running is not None and while_running.poll() is not None
        assert not has_ended or holds(), while_running and while_running.communicate()
        assert time.monotonic() < deadline, f"it did not hold within {timeout_s:g} s"
        time.sleep(0.02)
