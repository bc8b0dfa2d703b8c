"""OpenMP threads for torch computations on a CPU.

Controls GNU OpenMP; has no effect if torch uses another OpenMP. Each thread that runs torch has a separate pool of
OpenMP threads.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from functools import cache

_LOADED = getattr(os, "RTLD_NOLOAD", 0)  # only finds a library that torch has already loaded
_SOFT = 1  # omp_pause_soft (OpenMP 5.2, section 18.6.2)


def release_pool() -> None:
    """Ends the calling thread's pool. Its next computation restarts the pool, which takes 0.1 ms.

    If all pools together have more threads than there are cores, GNU OpenMP puts idle threads to sleep immediately and
    wakes them for every product. For small products this costs half the time
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). A thread that stops computing therefore releases
    its pool.
    """
    with contextlib.suppress(OSError, AttributeError):
        _library().omp_pause_resource_all(_SOFT)


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Makes the calling thread compute without a pool inside the block. Other threads keep their pools."""
    before = compute_alone()
    try:
        yield
    finally:
        _set_num_threads(before)


def compute_alone() -> int:
    """Makes the calling thread compute without a pool. Returns its previous number of threads."""
    import torch

    before = torch.get_num_threads()  # a thread's first call sets torch's default and would otherwise undo this setting
    _set_num_threads(1)
    return before


def num_cores() -> int:
    """Returns the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _set_num_threads(num: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        _library().omp_set_num_threads(num)


@cache
def _library() -> ctypes.CDLL:
    """Raises OSError unless torch has loaded GNU OpenMP."""
    return ctypes.CDLL("libgomp.so.1", mode=_LOADED)
