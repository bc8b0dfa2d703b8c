"""Computes items side by side, each in one thread, for models whose products are too small to be divided between cores.

The results come in the order of the items, so that what is summed from them is the same on any number of cores.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from art_cli.runtime.openmp import compute_alone, num_cores

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_THREADS = 8  # Python's part of the work is done by one thread at a time, so more would wait for each other


def side_by_side(
    compute: Callable[[Item], Result], items: Sequence[Item], *, num_threads: int | None = None
) -> Iterator[Result]:
    """Yields the result of `compute` for each item, in order, up to `num_threads` at a time (default: one per core).

    The threads take over no thread-local state of torch's, such as `torch.no_grad`. Raises what `compute` raises, for
    the first item for which it does; then nothing is computed any more.
    """
    num_threads = min(len(items), min(MOST_THREADS, num_cores()) if num_threads is None else num_threads)
    if num_threads < 2:
        yield from map(compute, items)
        return
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(num_threads, "pack", initializer=compute_alone) as pool:
        try:
            for item in items:
                begun.append(pool.submit(compute, item))
                if len(begun) > num_threads:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
        finally:
            for future in begun:
                future.cancel()
