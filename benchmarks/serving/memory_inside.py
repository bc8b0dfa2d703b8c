"""A command of `art` that notes its own memory: what Python holds, what the C library holds, and what it only keeps.

    python -m benchmarks.serving.memory_inside NOTES SECONDS art-arguments...   or: serve_load --inside

A line of NOTES every SECONDS. `held_mib` grows with a leak; `free_mib`, which was freed and not given back, with
fragments. The last line has the places whose Python memory grew most since half of the lines. Looking takes memory
itself, so the process's size is to be read from a run without this.
"""

import ctypes
import gc
import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

NUM_LINES = 10
NUM_TOP = 12
MIB = 2**20


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2 (man 3 mallinfo), over all arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def malloc_mib() -> dict[str, float]:
    """The C library's bytes in use, mapped and kept free; empty where it is not glibc."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return {}
    read.restype = _MallInfo
    info = read()
    return {
        "held_mib": round((info.uordblks + info.hblkhd) / MIB, 1),
        "free_mib": round(info.fordblks / MIB, 1),
    }


def note(path: Path, every_s: float) -> None:
    """Writes the lines. `python_mib` is tracemalloc's."""
    half: dict[str, int] | None = None
    for number in range(1, NUM_LINES + 1):
        time.sleep(every_s)
        line: dict[str, object] = {"number": number, "python_mib": round(tracemalloc.get_traced_memory()[0] / MIB, 2)}
        line |= malloc_mib()
        if number in (NUM_LINES // 2, NUM_LINES):
            now = places_and_kinds()
            if half is not None:
                grown = Counter({name: count - half.get(name, 0) for name, count in now.items()})
                line["grown"] = grown.most_common(NUM_TOP)
            half = now
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def places_and_kinds() -> dict[str, int]:
    """Bytes by the line that asked for them, and the number of objects of each type."""
    gc.collect()
    found = {str(each.traceback[0]): each.size for each in tracemalloc.take_snapshot().statistics("lineno")}
    return found | Counter(type(each).__name__ for each in gc.get_objects())


def main() -> None:
    path, every_s = Path(sys.argv[1]), float(sys.argv[2])
    sys.argv[1:3] = []
    tracemalloc.start()
    threading.Thread(target=note, args=(path, every_s), daemon=True).start()
    from art_cli.__main__ import main as art

    art()


if __name__ == "__main__":
    main()
