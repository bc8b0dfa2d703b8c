"""Runs blocking code without blocking this process's event loop, and handles Ctrl-C meanwhile.

The threads are daemons without a pool. A function that never returns does not delay other calls or the process's exit.
worker_pool.py limits the number and duration of such calls.
"""

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from art_cli.runtime.allocator import give_back_freed_memory
from art_cli.runtime.errors import message_of
from art_cli.runtime.openmp import release_pool

NUMBERS = (signal.SIGINT, signal.SIGTERM)
Result = TypeVar("Result")


@contextlib.contextmanager
def calling(act: Callable[[], object]) -> Iterator[None]:
    """Makes SIGINT and SIGTERM call `act` in the running event loop while the block runs.

    Only a process's main thread receives signals. In other threads nothing is set up, and their owner calls `act`.
    """
    loop = asyncio.get_running_loop()
    numbers = NUMBERS if threading.current_thread() is threading.main_thread() else ()
    terminate = signal.getsignal(signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, act)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if numbers:  # asyncio has left the system's handler, which ends the process without a word
            signal.signal(signal.SIGTERM, terminate)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Like `asyncio.run`, but uses the event loop from `new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns uvloop's loop if installed: 1.5 times as many calls (benchmarks/serving/gateway.py)."""
    try:
        import uvloop
    except ModuleNotFoundError:  # uvloop does not support Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def end(*tasks: asyncio.Future[Any], timeout_s: float) -> None:
    """Cancels the tasks and waits up to `timeout_s`. Their errors are marked as retrieved."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def start_in_thread(function: Callable[..., Result], *arguments: Any, is_awaited: bool = False) -> Future[Result]:
    """Starts the call in a daemon thread with this context. `is_awaited`: errors are `contained` for a loop."""
    future: Future[Result] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *arguments)
        except BaseException as error:  # includes SystemExit, which would end this thread silently
            finish(future, error=contained(error) if is_awaited else error)
        else:
            finish(future, result=result)

    # for unnamed functions, the type's name: a partial's repr would include its arguments, even tensors
    name = getattr(function, "__name__", type(function).__name__)
    threading.Thread(target=work, name=f"call {name}", daemon=True).start()
    return future


async def call_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns `function(*arguments)`. A cancelled caller returns immediately; the thread continues."""
    return await asyncio.wrap_future(start_in_thread(function, *arguments, is_awaited=True))


async def compute(function: Callable[..., Result], *arguments: Any, **knobs: Any) -> Result:
    """Like `asyncio.to_thread`, and then releases the thread's OpenMP pool (openmp.py).

    The next computation may run in a different thread. Its pool must not share cores with an idle pool, and its heap
    may differ from the heap that keeps the freed memory.
    """

    def work() -> Result:
        try:
            return function(*arguments, **knobs)
        finally:
            release_pool()
            give_back_freed_memory()

    return await asyncio.to_thread(work)


def contained(error: BaseException) -> BaseException:
    """Returns the error in a form that an event loop survives and an asyncio future accepts."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {message_of(error)}").with_traceback(error.__traceback__)


def finish(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Sets the future's result or error unless its caller was cancelled."""
    if future.set_running_or_notify_cancel():
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def is_being_cancelled() -> bool:
    """Returns True if the current task is being cancelled, and did not cancel itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class LoopThread:
    """An event loop in a daemon thread, started by the first coroutine.

    All coroutines share the loop. Code that stops the loop gets a RuntimeError. The loop survives a task's SystemExit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine for another loop's caller, whose cancellation cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contain(coroutine), self._start()))

    def run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs the coroutine while this thread waits. Must not be called from the loop itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._start()).result()

    async def is_blocked(self, timeout_s: float) -> bool:
        """Returns True if code blocks the loop for the whole timeout."""
        if self._loop is None:
            return False
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        return not await asyncio.to_thread(turn.wait, timeout_s)

    async def close(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancels running tasks, awaits `last` and stops the loop. Code that does not end in time is abandoned."""
        await asyncio.to_thread(self.end, timeout_s, last)

    def end(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Like `close`, but blocks this thread."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        endings = []
        work = _wind_up(last, timeout_s, self._is_over)
        loop.call_soon_threadsafe(lambda: endings.append(loop.create_task(work)))
        thread.join(2 * timeout_s)  # blocking code keeps the thread until it returns, possibly forever

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
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a task or callback
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
        raise contained(error) from error


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
