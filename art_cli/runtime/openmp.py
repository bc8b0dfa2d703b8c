"""The OpenMP threads that torch computes with on a CPU.

This drives GNU's OpenMP and does nothing where torch came with another one. Each thread that computes with torch keeps
a separate pool of OpenMP threads.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache

_LOADED = getattr(os, "RTLD_NOLOAD", 0)  # finds the library only where torch has loaded it
_SOFT = 1  # omp_pause_soft (OpenMP 5.2, section 18.6.2)


def release_pool() -> None:
    """Ends the pool of the calling thread. Its next computation starts it again, which takes 0.1 ms.

    While there are more threads in all pools than cores, GNU's OpenMP lets idle ones sleep at once and wakes them for
    every product, which takes half the time of small ones
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). So a thread that has finished computing for now
    releases its pool.
    """
    with contextlib.suppress(OSError, AttributeError):
        _library().omp_pause_resource_all(_SOFT)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, the calling thread computes without a pool; other threads keep theirs."""
    before = compute_alone()
    try:
        yield
    finally:
        _set_num_threads(before)


def compute_alone() -> int:
    """From now on the calling thread computes without a pool. Returns how many threads it had."""
    import torch

    before = torch.get_num_threads()  # its first call in a thread sets torch's default, which would undo this
    _set_num_threads(1)
    return before


def num_cores() -> int:
    """Returns the cores that this process may use, whatever else runs on them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_num_threads(num: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        _library().omp_set_num_threads(num)


@cache
def _library() -> ctypes.CDLL:
    """Raises OSError: torch has not loaded GNU's."""
    return ctypes.CDLL("libgomp.so.1", mode=_LOADED)
