"""What the C library does with memory that a computation has freed: it is kept for the next one.

torch asks for every tensor anew. With glibc's defaults a large one is mapped and unmapped each time, and the kernel
clears its pages again: 8 % of the time of training a model of a million parameters. Other C libraries are left alone.
"""

import contextlib
import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # numbers of mallopt's settings (man 3 mallopt)
LARGEST = 32 * 2**20  # bytes of the largest block that is taken from the heap, the most that glibc allows
KEPT = 512 * 2**20  # bytes that may be free at the end of a heap before it shrinks
GROWTH = 16 * 2**20  # bytes by which a heap grows beyond what is asked for


def keep_freed_memory() -> None:
    """Sets this for the process. A user's own MALLOC_ variables in the environment are left as they are."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError, TypeError):  # TypeError: Windows has no handle for None
        library = ctypes.CDLL(None)
        for setting, value in ((_MMAP_THRESHOLD, LARGEST), (_TRIM_THRESHOLD, KEPT), (_TOP_PAD, GROWTH)):
            library.mallopt(setting, value)
