"""GB of the card that a row takes, as the driver counts them; where there is no GPU, those of the largest process.

The driver is asked through NVML, because a CUDA context of this process would take half a GB of the card itself.
`only_free` makes a large card a small one: another process holds the rest of it.
"""

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

EVERY_S = 0.1  # between two looks at the card
KIB, GIB = 1024, 2**30
# Allocates all that is free but so many bytes, and ends with the process that started it.
HOLD = """
import sys, torch
torch.empty(1, device="cuda")
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(0, free - int(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


class Peak:
    """The most that was in use so far. On a GPU without what was in use before."""

    def __init__(self) -> None:
        self._before = card_gb() or 0.0
        self.gb = 0.0

    def look(self) -> None:
        self.gb = max(self.gb, used_gb() - self._before)


def used_gb() -> float:
    """Returns GB of the card that any process holds; without a GPU, of the largest of this process and its children."""
    used = card_gb()
    if used is not None:
        return used
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return most * KIB / 1e9


def card_gb() -> float | None:
    """Returns GB of the first visible GPU that any process holds, or None if no driver answers."""
    card = _card()
    if card is None:
        return None
    library, handle = card
    memory = _Memory()
    return memory.used / 1e9 if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else None


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]
    used: int


@cache
def _card() -> tuple[Any, ctypes.c_void_p] | None:
    """Returns NVML and its handle of the first visible GPU."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if not first or library.nvmlInit_v2():
        return None
    if first.isdigit():
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(handle))
    else:
        status = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    return None if status else (library, handle)


def wait_for_card(most_gb: float, *, timeout_s: float) -> bool:
    """Returns whether no more than `most_gb` of the card are in use, at the latest after the time."""
    end = time.monotonic() + timeout_s
    while (used := card_gb()) is not None and used > most_gb:
        if time.monotonic() > end:
            return False
        time.sleep(EVERY_S)
    return True


@contextlib.contextmanager
def only_free(gib: float) -> Iterator[None]:
    """Leaves at most so many GiB of the card free inside the block. Raises RuntimeError if the rest cannot be held."""
    command = [sys.executable, "-c", HOLD, str(int(gib * GIB))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline().strip() != b"held":
                raise RuntimeError("the rest of the card could not be held; the row's log says why")
            yield
        finally:
            holder.kill()


@contextlib.contextmanager
def watched() -> Iterator[Peak]:
    """Looks at the memory while the block runs."""
    peak, ended = Peak(), threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            peak.look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()
        peak.look()
