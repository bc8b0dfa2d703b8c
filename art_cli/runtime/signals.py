"""The effect of Ctrl-C and SIGTERM while an event loop runs."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def calling(act: Callable[[], object]) -> Iterator[None]:
    """Inside, SIGINT and SIGTERM call `act` in the running event loop.

    Only a process's main thread gets signals. In any other thread nothing is set up, and its owner calls `act`.
    """
    loop = asyncio.get_running_loop()
    numbers = NUMBERS if threading.current_thread() is threading.main_thread() else ()
    for number in numbers:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
