"""Memory: how much this process may use, and what the C library does with what a computation has freed.

Freed memory is kept for the next computation, up to a bound.

torch asks for every tensor anew. With glibc's defaults a large one is mapped and unmapped each time, and the kernel
clears its pages again: 8 % of the time of training a model of a million parameters. And each thread gets an arena, a
separate heap that keeps what the thread freed, though the next computation may run in another thread: 135 million
parameters took 3 GB more every few steps. Other C libraries are left alone.
"""

import contextlib
import ctypes
import os
import re
from pathlib import Path

LARGEST = 32 * 2**20  # bytes of the largest block that is taken from the heap, the most that glibc allows
KEPT = 512 * 2**20  # bytes that may be free before they go back to the kernel: at the heap's end, or in all heaps
GROWTH = 16 * 2**20  # bytes by which a heap grows beyond what is asked for
_SETTINGS = (  # (mallopt's number of the setting (man 3 mallopt), its name in the environment, value)
    (-1, "trim_threshold", KEPT),
    (-2, "top_pad", GROWTH),
    (-3, "mmap_threshold", LARGEST),
    (-8, "arena_max", 1),
)
_CGROUP = "/sys/fs/cgroup"
_LIMITS = (f"{_CGROUP}/memory.max", f"{_CGROUP}/memory/memory.limit_in_bytes")  # files of versions 2 and 1
UNKNOWN = 8 * 2**30  # bytes that a machine is taken to have where the system has no number for it

# The words of torch, CUDA, HIP, NCCL ("Cuda failure 2 'out of memory'"), cuBLAS, cuDNN and torch's allocator for a CPU.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)


class _Numbers(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a computation ended because memory ran out, on a GPU or here, whichever library says so."""
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_known or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None)


def memory_size() -> int:
    """Returns the bytes that this process may use, whatever else uses them: the machine's, or the container's limit."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # AttributeError: Windows has no sysconf
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes, default=UNKNOWN)


def keep_freed_memory() -> None:
    """Sets this for the process. A user's own thresholds and padding in the environment are left as they are.

    Their largest number of arenas is not read, because one is within every such bound.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no handle for None
        library = ctypes.CDLL(None)
        for setting, name, value in _SETTINGS:
            if name == "arena_max" or not _is_set(name):
                library.mallopt(setting, value)


def give_back_freed_memory() -> None:
    """Returns the free memory of all arenas to the kernel, if it is more than `KEPT` bytes.

    A bound for holes between blocks that are used, and for arenas that were there before `keep_freed_memory`.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # AttributeError: glibc before 2.33 has no mallinfo2
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Numbers
        if library.mallinfo2().fordblks > KEPT:
            library.malloc_trim(0)


def _is_set(name: str) -> bool:
    """Example: "top_pad" is set by MALLOC_TOP_PAD_=4096, and by GLIBC_TUNABLES=glibc.malloc.top_pad=4096."""
    return f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in os.environ.get("GLIBC_TUNABLES", "")
