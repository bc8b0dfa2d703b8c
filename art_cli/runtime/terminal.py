"""LiveTerminal: a picture at the bottom of the terminal that is drawn again and again, with all other output above it.

While it runs, what any part of this process or of its children writes to the terminal comes through a pipe and is
printed above the picture, line by line. Such text may quote models and users' code, so nothing in it can steer the
terminal. The cursor stays visible throughout, so that a process that is killed leaves a terminal that works.
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

REDRAW_S = 0.5  # time between two drawings
MAX_LINE = 10_000  # characters of a line of foreign output; a longer one is cut there
CLOSE_TIMEOUT_S = 5.0  # longest wait for the last output to be printed
DUMB = ("", "dumb", "unknown")  # values of TERM of terminals that cannot move the cursor


def can_draw(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether standard error is a terminal on which a picture can be drawn again."""
    return sys.stderr.isatty() and environment.get("TERM", "").lower() not in DUMB


@contextlib.contextmanager
def drawn(render: Callable[["Console"], "RenderableType"]) -> Iterator[None]:
    """Draws what `render` gives for as long as the block runs; at the end the picture is gone."""
    from rich.live import Live

    sys.stdout.flush()
    sys.stderr.flush()
    if not os.isatty(2):  # sys.stderr is another stream than the process's own
        yield
        return
    saved = {number: os.dup(number) for number in (1, 2) if os.isatty(number)}
    console = _console(saved[2])
    live = Live(
        get_renderable=lambda: render(console),
        console=console,
        auto_refresh=False,  # the relay's thread draws, because rich leaves remnants where two threads print
        transient=True,
        redirect_stdout=False,  # the pipe takes it
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
            if number != 2:  # the console's own
                os.close(terminal)


def _console(terminal: int) -> "Console":
    """Returns a console on the terminal itself, whatever the process's standard streams are."""
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
            """Leaves the cursor visible, because a process that is killed could not show it again."""
            return False

    encoding = sys.stderr.encoding or "utf-8"
    return OnTerminal(file=os.fdopen(terminal, "w", encoding=encoding, errors="replace"), force_terminal=True)


class _Relay:
    """A thread that reads a pipe and prints its lines, and draws the picture again in between."""

    def __init__(self, source: int, show: Callable[[str], Any], *, redraw: Callable[[], Any]) -> None:
        self._source, self._show, self._redraw = source, show, redraw
        self._wake, self._waker = os.pipe()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""  # the text after the last newline
        self._drawn_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="terminal", daemon=True)

    def start(self) -> None:
        os.set_blocking(self._source, False)
        self._thread.start()

    def close(self) -> None:
        """Prints all that was written before. Processes that still hold the pipe can no longer print."""
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # a terminal that is stopped (Ctrl-S) takes nothing
            for handle in (self._source, self._wake):
                os.close(handle)

    def _run(self) -> None:
        is_open = True
        while is_open:
            ready, _, _ = select.select([self._source, self._wake], [], [], REDRAW_S)
            is_open, has_more = self._wake not in ready, True
            while has_more:  # also where the output never pauses, the picture is drawn again
                has_more = self._read()
                if is_open and time.monotonic() - self._drawn_at >= REDRAW_S:
                    with contextlib.suppress(OSError):
                        self._redraw()
                    self._drawn_at = time.monotonic()
        if self._rest:
            self._print(self._rest)

    def _read(self) -> bool:
        """Prints what is there; whether there may be more."""
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
        """Prints a line; of one that was overwritten, as bars are, only its last state."""
        shown = line.rstrip("\r").rpartition("\r")[2]
        with contextlib.suppress(OSError):  # the terminal is gone; the pipe is read on, so that nobody waits for it
            self._show(printable(shown.expandtabs(), limit=MAX_LINE))
