"""Code that cannot hold up this process's event loop, because it runs in another loop or thread; and Ctrl-C meanwhile.

calling          the effect of Ctrl-C and SIGTERM while an event loop runs
run              a coroutine to its end, in the fastest event loop there is
LoopThread       an event loop in a thread, for async functions that may block
end              cancels tasks and waits for them
start_in_thread  a blocking function in a new thread; returns its future, for code that waits with a deadline
call_in_thread   the same, awaited
compute          a function that computes with torch, in a thread

The threads are daemons and belong to no pool. A function that never returns keeps no other call waiting and does not
hold up the end of the process. worker_pool.py bounds the number and the time of such calls.
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


Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Returns the coroutine's result, as `asyncio.run` gives it, in the event loop of `new_event_loop`."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed: the gateway answers 1.5 times as many calls (benchmarks/serving/gateway.py)."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def end(*tasks: asyncio.Future[Any], timeout_s: float) -> None:
    """Cancels the tasks and waits for them, at most `timeout_s`. What they raise meanwhile counts as seen."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def start_in_thread(function: Callable[..., Result], *arguments: Any, is_awaited: bool = False) -> Future[Result]:
    """Starts `function(*arguments)` in a daemon thread with a copy of this context, and returns its future.

    An event loop may await it with `is_awaited`, which passes an error on as `contained` makes it.
    """
    future: Future[Result] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(function, *arguments)
        except BaseException as error:  # also SystemExit, which would end this thread without a word
            finish(future, error=contained(error) if is_awaited else error)
        else:
            finish(future, result=result)

    # not the function itself where it has no name, because the repr of a partial shows its arguments, tensors included
    name = getattr(function, "__name__", type(function).__name__)
    threading.Thread(target=work, name=f"call {name}", daemon=True).start()
    return future


async def call_in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns `function(*arguments)`. A caller that is cancelled leaves at once; the thread runs on."""
    return await asyncio.wrap_future(start_in_thread(function, *arguments, is_awaited=True))


async def compute(function: Callable[..., Result], *arguments: Any, **knobs: Any) -> Result:
    """Returns the result, as `asyncio.to_thread` gives it. The thread's OpenMP pool is gone afterwards (openmp.py).

    The next computation runs in another thread, whose pool must not share the cores with an idle one, and whose heap
    may be another one than that which holds the memory freed here.
    """

    def work() -> Result:
        try:
            return function(*arguments, **knobs)
        finally:
            release_pool()
            give_back_freed_memory()

    return await asyncio.to_thread(work)


def contained(error: BaseException) -> BaseException:
    """Returns the error in a form that can cross into an event loop without breaking it.

    A SystemExit or KeyboardInterrupt would end the loop itself, and asyncio's futures refuse a StopIteration.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {message_of(error)}").with_traceback(error.__traceback__)


def finish(future: Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Gives the future its result or error, unless its caller was cancelled."""
    if future.set_running_or_notify_cancel():
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def is_being_cancelled() -> bool:
    """Returns whether the current task is asked to end; if not, its CancelledError is of code that cancelled itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class LoopThread:
    """An event loop in a daemon thread, which starts with the first coroutine.

    All coroutines share the loop. Code that stops it gets a RuntimeError, and it goes on after a SystemExit of a task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Returns the coroutine's result to another loop. A caller that is cancelled cancels the coroutine."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contain(coroutine), self._start()))

    def run_here(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Returns the coroutine's result, while this thread waits. Not to be called in that loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._start()).result()

    async def is_blocked(self, timeout_s: float) -> bool:
        """Returns whether code blocks the loop, so that it runs nothing else within that time."""
        if self._loop is None:
            return False
        turn = threading.Event()
        self._loop.call_soon_threadsafe(turn.set)
        return not await asyncio.to_thread(turn.wait, timeout_s)

    async def close(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancels what runs there, awaits `last` and stops the loop. Code that does not end in time is given up."""
        await asyncio.to_thread(self.end, timeout_s, last)

    def end(self, timeout_s: float, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Closes as `close` does, while this thread waits."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        endings = []
        work = _wind_up(last, timeout_s, self._is_over)
        loop.call_soon_threadsafe(lambda: endings.append(loop.create_task(work)))
        thread.join(2 * timeout_s)  # code that blocks keeps the thread until it returns, or for ever

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
