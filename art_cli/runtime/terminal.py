"""LiveTerminal: a live picture at the bottom of the terminal, with other output above it.

All terminal output from this process and its children goes through a pipe and is printed above the picture, line by
line. Such text may quote models and user code, so it must not control the terminal. The cursor stays visible, so a
killed process leaves a working terminal.
"""

import codecs
import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from art_cli.runtime.errors import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REDRAW_S = 0.5  # interval between redraws
MAX_LINE = 10_000  # maximum characters per line of foreign output; longer lines are cut
CLOSE_TIMEOUT_S = 5.0  # maximum wait for the last output to be printed
DUMB = ("", "dumb", "unknown")  # TERM values of terminals without cursor movement


def can_draw(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True if stderr is a terminal that supports redrawing."""
    return sys.stderr.isatty() and environment.get("TERM", "").lower() not in DUMB


@contextlib.contextmanager
def drawn(render: Callable[["Console"], "RenderableType"]) -> Iterator[None]:
    """Draws the output of `render` while the block runs, then removes it."""
    from rich.live import Live

    sys.stdout.flush()
    sys.stderr.flush()
    if not os.isatty(2):  # sys.stderr is not the process's real stderr
        yield
        return
    saved = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}
    console = _console(saved[2])
    live = Live(
        get_renderable=lambda: render(console),
        console=console,
        auto_refresh=False,  # the relay thread draws, because rich leaves artifacts when two threads print
        transient=True,
        redirect_stdout=False,  # the pipe captures it
        redirect_stderr=False,
    )
    source, sink = os.pipe()
    show = partial(console.print, markup=False, highlight=False, emoji=False, soft_wrap=True)
    relay = _Relay(source, show, redraw=live.refresh)
    for number in saved:
        os.dup2(sink, number)
    os.close(sink)
    try:
        live.start(refresh=True)
        relay.start()
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, terminal in saved.items():
            os.dup2(terminal, number)
        relay.close()
        for close in (live.stop, console.file.close):
            with contextlib.suppress(OSError):
                close()
        for number, terminal in saved.items():
            if number != 2:  # owned by the console
                os.close(terminal)


def _console(terminal: int) -> "Console":
    """Returns a console on the terminal itself, independent of the standard streams."""
    from rich.console import Console, ConsoleDimensions

    class OnTerminal(Console):
        @property  # type: ignore[misc]  # rich's can be set, too
        def size(self) -> ConsoleDimensions:
            try:
                columns, lines = os.get_terminal_size(terminal)
            except OSError:
                columns = lines = 0
            return ConsoleDimensions(columns or 80, lines or 25)

        def show_cursor(self, show: bool = True) -> bool:
            """Keeps the cursor visible, because a killed process could not restore it."""
            return False

    encoding = sys.stderr.encoding or "utf-8"
    return OnTerminal(file=os.fdopen(terminal, "w", encoding=encoding, errors="replace"), force_terminal=True)


class _Relay:
    """A thread that prints lines from a pipe and redraws the picture in between."""

    def __init__(self, source: int, show: Callable[[str], Any], *, redraw: Callable[[], Any]) -> None:
        self._source, self._show, self._redraw = source, show, redraw
        self._wake, self._waker = os.pipe()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""  # text after the last newline
        self._drawn_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def start(self) -> None:
        os.set_blocking(self._source, False)
        self._thread.start()

    def close(self) -> None:
        """Prints all earlier output. Processes still holding the pipe can no longer print."""
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # a stopped terminal (Ctrl-S) accepts nothing
            for handle in (self._source, self._wake):
                os.close(handle)

    def _run(self) -> None:
        is_open = True
        while is_open:
            ready, _, _ = select.select([self._source, self._wake], [], [], REDRAW_S)
            is_open, has_more = self._wake not in ready, True
            while has_more:  # redraw even if the output never pauses
                has_more = self._read()
                if is_open and time.monotonic() - self._drawn_at >= REDRAW_S:
                    with contextlib.suppress(OSError):
                        self._redraw()
                    self._drawn_at = time.monotonic()
        if self._rest:
            self._print(self._rest)

    def _read(self) -> bool:
        """Prints available output. Returns True if more may follow."""
        try:
            data = os.read(self._source, 65536)
        except BlockingIOError:
            return False
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        self._rest = self._rest[-MAX_LINE:]
        for line in lines:
            self._print(line)
        return bool(data)

    def _print(self, line: str) -> None:
        """Prints a line. For lines overwritten in place (progress bars), prints only the last state."""
        shown = line.rstrip("\r").rpartition("\r")[2]
        with contextlib.suppress(OSError):  # the terminal is lost; keep reading so that writers do not block
            self._show(printable(shown.expandtabs(), limit=MAX_LINE))
