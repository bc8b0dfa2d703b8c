"""Sides that are measured in turn, each living in a process of its own: memory, allocator and threads are not shared.

A side is any object with methods that take and give plain data; `Side` calls them from here.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

DEADLINE_S = 1800.0  # longest time for one call


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float  # processor seconds, which other programs on the machine disturb less


class Row(NamedTuple):
    """A line of a table of results. Example: Row("1a", "prompt 240", "2.6 s (2.5-2.7)", "12.8 s", 4.9, ">= 4", "")"""

    figure: str
    what: str
    ours: str
    theirs: str
    ratio: float | None  # better above 1, unless `note` says otherwise
    target: str
    note: str = ""


class Side:
    """An object in a process of its own, made there by `make(*args)` at once, while this process goes on."""

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self._process.start()

    def call(self, method: str, *args: Any) -> Any:
        """What the method gives. Raises RuntimeError with what it raised there."""
        self._pipe.send((method, args))
        if not self._pipe.poll(DEADLINE_S):
            raise RuntimeError(f"{method}: no answer in {DEADLINE_S:.0f} s")
        is_done, value = self._pipe.recv()
        if not is_done:
            raise RuntimeError(value)
        return value

    def take(self, method: str = "step") -> Taken:
        """How long the method takes there."""
        wall, cpu = self.call("_timed", method)
        return Taken(wall, cpu)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def in_turn(sides: Mapping[str, Side], repeats: int) -> dict[str, list[Taken]]:
    """Each side's step, once each, `repeats` times over."""
    taken: dict[str, list[Taken]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            taken[name].append(side.take())
    return taken


def median(taken: Sequence[Taken]) -> float:
    return statistics.median(one.wall_s for one in taken)


def ratio(theirs: Sequence[Taken], ours: Sequence[Taken]) -> float:
    return round(median(theirs) / median(ours), 2)


def seconds(taken: Sequence[Taken]) -> str:
    """Median of wall seconds, their range, and the median of processor seconds."""
    walls = [one.wall_s for one in taken]
    cpu = statistics.median(one.cpu_s for one in taken)
    return f"{median(taken):.2f} s ({min(walls):.2f}-{max(walls):.2f}; cpu {cpu:.2f}; n={len(taken)})"


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = ["| figure | what | ours | other side | ratio | target | note |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        shown = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append("| " + " | ".join([*row[:4], shown, row.target, row.note]) + " |")
    return "\n".join(lines)


class Memory:
    """Peak memory of this process above what it held when this was made, in MB."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.before = status_mb("VmRSS")

    def peak(self) -> float:
        return status_mb("VmHWM") - self.before


def status_mb(key: str, process: int | str = "self") -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key + ":"))


def _serve(pipe: Connection, make: Callable[..., Any], args: Sequence[Any]) -> None:
    """The other process: makes the object and answers calls until the pipe closes."""
    side, failure = None, ""
    try:
        side = make(*args)
    except Exception as error:  # told at every call
        failure = f"{type(error).__name__}: {error}"
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        try:
            if side is None:
                raise RuntimeError(failure)
            if method == "_timed":
                begin, begin_cpu = time.perf_counter(), time.process_time()
                getattr(side, *given)()
                pipe.send((True, (time.perf_counter() - begin, time.process_time() - begin_cpu)))
            else:
                pipe.send((True, getattr(side, method)(*given)))
        except Exception as error:  # the boundary between the processes: the caller raises it
            pipe.send((False, f"{type(error).__name__}: {error}"))
