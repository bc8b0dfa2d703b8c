"""Runs other people's code where it cannot hold up this process's event loop.

run             a coroutine to its end, in the fastest event loop there is
LoopThread      an event loop of its own in a thread, for async functions that may block
call_in_thread  a blocking function in a thread of its own
compute         a function that computes with torch in a thread, which lets its pool go
let_pool_go     ends the threads that compute for this one
compute_alone   none computes for this one

The threads are daemons and belong to no pool: a function that never returns is given up, takes no place that others
wait for, and does not keep the process from ending.
"""

import asyncio
import contextlib
import contextvars
import ctypes
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from art_cli.plugins import message_of

Result = TypeVar("Result")

_LOADED = getattr(os, "RTLD_NOLOAD", 0)  # only where torch has loaded it
_SOFT = 1  # omp_pause_soft (OpenMP 5.2, section 18.6.2)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's: the gateway answers half as many calls again in it (benchmarks/gateway.py)."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def call_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of `function(*arguments)`; cancelled, it returns at once and the thread is left to itself."""
    future: Future[Result] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *arguments)
        except BaseException as error:  # also SystemExit, which would end this thread and nobody would know
            _settle(future, error=_contained(error))
        else:
            _settle(future, result=result)

    threading.Thread(target=work, name=f"call {getattr(function, '__name__', function)}", daemon=True).start()
    return await asyncio.wrap_future(future)


async def compute(function: Callable[..., Result], *arguments: Any, **knobs: Any) -> Result:
    """As `asyncio.to_thread`; the next to compute is another thread, and finds no idle pool beside its own."""

    def work() -> Result:
        try:
            return function(*arguments, **knobs)
        finally:
            let_pool_go()

    return await asyncio.to_thread(work)


def let_pool_go() -> None:
    """Ends the OpenMP threads that compute for this one; they are back with its next computation (0.1 ms).

    Each thread that computes with torch keeps a pool of its own. While there are more of all pools' threads than cores,
    GNU's OpenMP lets idle ones sleep at once and wakes them for every product, which takes half the time of small ones
    (https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html). So who has done computing for now lets go.
    Nothing where torch came with another OpenMP.
    """
    with contextlib.suppress(OSError, AttributeError):
        _openmp().omp_pause_resource_all(_SOFT)


def compute_alone() -> None:
    """This thread computes by itself from now on. torch has set up its own for it already (`torch.get_num_threads()`).

    Nothing where torch came with another OpenMP than GNU's.
    """
    with contextlib.suppress(OSError, AttributeError):
        _openmp().omp_set_num_threads(1)


def _openmp() -> ctypes.CDLL:
    """Raises OSError: torch has not loaded GNU's."""
    return ctypes.CDLL("libgomp.so.1", mode=_LOADED)


def _contained(error: BaseException) -> BaseException:
    """The error in a form that can cross into an event loop without breaking it.

    A SystemExit or KeyboardInterrupt would end the loop itself, and asyncio's futures refuse a StopIteration.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {message_of(error)}").with_traceback(error.__traceback__)


def _settle(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Gives the future its end, unless nobody waits for it any more."""
    if future.set_running_or_notify_cancel():
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class LoopThread:
    """An event loop in a daemon thread; it starts with the first `run`.

    What runs in it shares it: code that stops it gets a RuntimeError, and it goes on after a SystemExit of a task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The coroutine's result, awaited from another loop; cancelling it cancels the coroutine over there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contain(coroutine), self._start()))

    async def is_blocked(self, timeout_s: float) -> bool:
        """Whether the loop does not get round to anything within that time: code in it blocks."""
        if self._loop is None:
            return False
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        return not await asyncio.to_thread(turn.wait, timeout_s)

    async def close(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancels what runs there, awaits `last` and stops the loop; gives up on code that does not let go in time."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        endings = []
        work = _wind_up(last, timeout_s, self._is_over)
        loop.call_soon_threadsafe(lambda: endings.append(loop.create_task(work)))
        await asyncio.to_thread(thread.join, 2 * timeout_s)  # blocked: it ends when it comes to itself, or never

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = new_event_loop()
            self._loop.stop = _refuse_to_stop  # type: ignore[method-assign]
            self._is_over = threading.Event()
            arguments = (self._loop, self._is_over)
            self._thread = threading.Thread(target=_run, args=arguments, name=self._name, daemon=True)
            self._thread.start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop, is_over: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    try:
        while not is_over.is_set():
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a task or callback, through the loop
                loop.run_forever()
    finally:
        loop.close()


def _refuse_to_stop() -> NoReturn:
    raise RuntimeError("this event loop is shared: code that runs in it must not stop it")


async def _contain(coroutine: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise _contained(error) from error


async def _wind_up(last: Callable[[], Awaitable[None]] | None, timeout_s: float, is_over: threading.Event) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    if last is not None:
        await last()
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    is_over.set()
    type(loop).stop(loop)
