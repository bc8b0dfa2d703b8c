"""Runs other people's code where it cannot hold up this process's event loop.

run             a coroutine to its end, in the fastest event loop there is
LoopThread      an event loop of its own in a thread, for async functions that may block
call_in_thread  a blocking function in a thread of its own
Crew            some threads that take calls in order, and break off a call that overruns its time
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
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, NoReturn, TypeVar

from art_cli.errors import message_of

Result = TypeVar("Result")

_LOADED = getattr(os, "RTLD_NOLOAD", 0)  # only where torch has loaded it
_IDLE_S = 5.0  # a crew's thread without calls ends after this
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


# --- calls that are broken off ----------------------------------------------------------------------------------------


class Crowded(Exception):
    """A call had to wait too long for a thread."""


class Overran(Exception):
    """A call took too long and was broken off."""


class _BrokenOff(BaseException):
    """Raised inside a call that nobody waits for any more. No `except Exception` in the called code catches it."""


class Crew:
    """At most `size` daemon threads, which take calls in order; any event loop may call.

    A call that overruns `run_s`, or whose caller is cancelled, gets an exception at the next Python instruction that
    it runs. A call that is inside C code keeps its thread until it is back, so no more than `size` ever run.
    """

    def __init__(self, *, size: int, wait_s: float, run_s: float) -> None:
        self._size, self._wait_s, self._run_s = size, wait_s, run_s
        self._waiting: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._num_threads = self._num_idle = 0

    async def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of `function(*arguments)`. Raises Crowded, Overran, or what the function raises."""
        call = _Call(function, arguments)
        self._add(call)
        try:
            if not await _is_done(call.begun, self._wait_s):
                raise Crowded
            if not await _is_done(call.result, self._run_s):
                raise Overran
            result: Result = call.result.result()
            return result
        finally:
            self._drop(call)

    def _add(self, call: "_Call") -> None:
        with self._changed:
            self._waiting.append(call)
            if len(self._waiting) <= self._num_idle or self._num_threads == self._size:
                self._changed.notify()
            else:
                self._start_thread()

    def _drop(self, call: "_Call") -> None:
        call.break_off()
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="crew", daemon=True).start()

    def _work(self) -> None:
        """Takes calls until there were none for a while, or until one was broken off: that thread is not used again."""
        while (call := self._next()) is not None:
            if not call.run():
                with self._changed:
                    self._num_threads -= 1
                    if len(self._waiting) > self._num_idle:
                        self._start_thread()
                return

    def _next(self) -> "_Call | None":
        with self._changed:
            if not self._waiting:
                self._num_idle += 1
                self._changed.wait(_IDLE_S)
                self._num_idle -= 1
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None


class _Call:
    """One call: `begun` is done when a thread has taken it, `result` when it has ended."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.begun: Future[None] = Future()
        self.result: Future[Any] = Future()
        self._work = partial(contextvars.copy_context().run, function, *arguments)
        self._lock = threading.Lock()
        self._thread: int | None = None  # the thread that runs it now
        self._is_broken_off = False

    def run(self) -> bool:
        """False: it was broken off on the way."""
        with contextlib.suppress(_BrokenOff):
            self._run()
        return not self._is_broken_off

    def break_off(self) -> None:
        """Nothing if it has ended; it never begins if it has not."""
        self.begun.cancel()
        with self._lock:
            if self._thread is not None and not self._is_broken_off:
                self._is_broken_off = True
                _raise_in(self._thread, _BrokenOff)

    def _run(self) -> None:
        with self._lock:
            self._thread = threading.get_ident()
        try:
            if self.begun.set_running_or_notify_cancel():
                self.begun.set_result(None)
                self._settle()
        finally:
            with self._lock:
                self._thread = None
                _raise_in(threading.get_ident(), None)  # an exception that has not been raised yet must not be any more

    def _settle(self) -> None:
        try:
            result = self._work()
        except _BrokenOff:
            raise
        except BaseException as error:
            _settle(self.result, error=_contained(error))
        else:
            _settle(self.result, result=result)


async def _is_done(future: Future[Any], timeout_s: float) -> bool:
    """Whether it is done in time. It is cancelled otherwise, and when the caller is."""
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait((waiter,), timeout=timeout_s)
        return waiter.done()
    finally:
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # seen: the caller reads it from `future`


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises the exception in that thread as soon as it is back in Python; None takes back one not raised yet."""
    kind = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)


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
