"""A program on a real pseudo-terminal, and what a person sees there: the screen of a terminal emulator."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyte

DEADLINE_S = 120.0
LOCAL_MODES = 3  # index into what tcgetattr returns


class Terminal:
    """Runs a program on a terminal of that size. `screens` are what was seen after each piece of its output."""

    def __init__(self, command: Sequence[str], *, columns: int, lines: int, cwd: Path, **environment: str) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000, ratio=1.0)
        self._stream = pyte.ByteStream(self.screen)
        self.screens: list[list[str]] = []
        self.was_hidden = False  # whether the cursor was ever hidden when output paused
        self.raw = b""
        self.handle, slave = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(slave)
        known = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL") if name in os.environ}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: _own_terminal(slave),
            env=known | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | environment,
        )
        self._slave, self._open = slave, [self.handle, slave]

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.handle, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def type(self, text: bytes) -> None:
        os.write(self.handle, text)

    def follow(self, until: Callable[["Terminal"], bool] = lambda terminal: False) -> None:
        """Reads what the program writes until that holds, or the program has ended and all is read."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            has_ended = self.process.poll() is not None  # asked first: what it wrote before is there then
            ready, _, _ = select.select([self.handle], [], [], 0.2)
            if ready:
                self._feed()
            elif has_ended:
                return
            if until(self):
                return
        self.close()
        raise AssertionError(f"not within {DEADLINE_S} s; seen: {self.screens[-1:]}")

    def _feed(self) -> None:
        with contextlib.suppress(OSError):
            data = os.read(self.handle, 65536)
            self.raw += data
            self._stream.feed(data)
        self.screens.append(self.lines())
        self.was_hidden |= self.screen.cursor.hidden

    def lines(self) -> list[str]:
        """What is on the screen, without the empty lines at its end."""
        shown = [line.rstrip() for line in self.screen.display]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def scrolled(self) -> list[str]:
        """What was scrolled off the top, and then the screen."""
        top = [_text(line, self.screen.columns) for line in self.screen.history.top]
        return [*top, *self.lines()]

    def close(self) -> int:
        """Ends the program if it still runs; its exit status."""
        if self.process.poll() is None:
            self.process.kill()
        status = self.process.wait(timeout=30)
        for handle in self._open:
            os.close(handle)
        self._open = []
        return status

    @property
    def awaits_a_key(self) -> bool:
        """Whether the program reads single keys now, rather than lines."""
        return not self.modes_now[LOCAL_MODES] & termios.ICANON

    @property
    def modes_now(self) -> list[Any]:
        return termios.tcgetattr(self._slave)


def _own_terminal(slave: int) -> None:
    """Makes the terminal the one that controls the new session, so that Ctrl-C reaches the program."""
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def _text(line: Any, columns: int) -> str:
    return "".join(line[column].data for column in range(columns)).rstrip()
