"""Memory limits of this process, and malloc settings for freed memory.

Freed memory is kept for the next computation, up to a bound.

By default, glibc maps and unmaps large tensors each time, and the kernel clears the pages again: 8 % of the training
time of a small model. It also gives each thread an arena that keeps the thread's freed memory: a model with 135 million
parameters grew by 3 GB every few steps. Other C libraries keep their defaults.
"""

import contextlib
import ctypes
import os
import re
from pathlib import Path

LARGEST = 32 * 2**20  # largest block taken from the heap in bytes; glibc's maximum
KEPT = 512 * 2**20  # free bytes kept before returning memory to the kernel: at the heap's end, or in all heaps
GROWTH = 16 * 2**20  # extra bytes per heap growth
_SETTINGS = (  # (mallopt's setting number (man 3 mallopt), environment name, value)
    (-1, "trim_threshold", KEPT),
    (-2, "top_pad", GROWTH),
    (-3, "mmap_threshold", LARGEST),
    (-8, "arena_max", 1),
)
_CGROUP = "/sys/fs/cgroup"
_LIMITS = (f"{_CGROUP}/memory.max", f"{_CGROUP}/memory/memory.limit_in_bytes")  # limit files of cgroup versions 2 and 1
UNKNOWN = 8 * 2**30  # assumed memory if the system does not report it

# Error texts from torch, CUDA, HIP, NCCL ("Cuda failure 2 'out of memory'"), cuBLAS, cuDNN and torch's CPU allocator.
_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|_STATUS_ALLOC_FAILED", re.IGNORECASE)


class _Numbers(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if a computation ran out of memory, on a GPU or CPU, for any library's error."""
    is_known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_known or (isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None)


def memory_size() -> int:
    """Returns the bytes available to this process: the machine's memory or the container's limit, regardless of use."""
    sizes = []
    with contextlib.suppress(AttributeError, ValueError, OSError):  # AttributeError: Windows has no sysconf
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
            sizes.append(int(Path(path).read_text()))
    return min(sizes, default=UNKNOWN)


def keep_freed_memory() -> None:
    """Applies the settings, unless the user's environment sets them; one arena satisfies every arena maximum."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no handle for None
        library = ctypes.CDLL(None)
        for setting, name, value in _SETTINGS:
            if name == "arena_max" or not _is_set(name):
                library.mallopt(setting, value)


def give_back_freed_memory() -> None:
    """Returns more than `KEPT` bytes of free memory to the kernel: holes, and arenas made before the settings."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # AttributeError: glibc before 2.33 has no mallinfo2
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Numbers
        if library.mallinfo2().fordblks > KEPT:
            library.malloc_trim(0)


def _is_set(name: str) -> bool:
    """Example: "top_pad" is set by MALLOC_TOP_PAD_=4096, or by GLIBC_TUNABLES=glibc.malloc.top_pad=4096."""
    return f"MALLOC_{name.upper()}_" in os.environ or f"malloc.{name}=" in os.environ.get("GLIBC_TUNABLES", "")
