"""Crew: some threads that take calls in order, and break off a call that takes too long."""

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from art_cli.runtime.threads import contained, finish

Result = TypeVar("Result")

AGAIN_S = 0.5  # interval between two attempts to break a call off
IDLE_S = 5.0  # a thread that has had no call for this long ends


class Crowded(Exception):
    """A call had to wait too long for a thread."""


class Overran(Exception):
    """A call took too long and was broken off."""


class _BrokenOff(BaseException):
    """Raised inside a call whose caller has left. No `except Exception` in the called code catches it."""


class Crew:
    """At most `size` daemon threads, which take calls in order. Any event loop may call.

    A call that takes longer than `run_s`, or whose caller is cancelled, gets an exception at its next Python
    instruction. A call that is inside C code keeps its thread until it is back, so no more than `size` ever run.
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
        self._break_off(call)
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def _break_off(self, call: "_Call") -> None:
        """Breaks the call off, again and again: Python drops an exception that meets a `__del__` or a gc callback."""
        if call.break_off():
            with contextlib.suppress(RuntimeError):  # the event loop is gone
                asyncio.get_running_loop().call_later(AGAIN_S, self._break_off, call)

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="crew", daemon=True).start()

    def _work(self) -> None:
        """Takes calls until none came for IDLE_S, or until one was broken off. The thread is not used again."""
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
                self._changed.wait(IDLE_S)
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
        self._thread: int | None = None  # the thread that is in `function` now
        self._is_broken_off = self._has_ended = False

    def run(self) -> bool:
        """Whether it came to its end; False when it was broken off."""
        if self.begun.set_running_or_notify_cancel():
            self.begun.set_result(None)
            with contextlib.suppress(_BrokenOff):
                self._run()
        return not self._is_broken_off

    def break_off(self) -> bool:
        """Whether it is still to end, and has been told so now. A call that waits never begins."""
        if self.begun.cancel():
            return False
        with self._lock:
            if self._has_ended:
                return False
            self._is_broken_off = True
            if self._thread is not None:
                _raise_in(self._thread, _BrokenOff)
            return True

    def _run(self) -> None:
        """The exception reaches the function only: in the futures' own code it would leave their locks taken."""
        try:
            result = self._call()
        except _BrokenOff:
            raise
        except BaseException as error:
            finish(self.result, error=contained(error))
        else:
            finish(self.result, result=result)

    def _call(self) -> Any:
        with self._lock:
            if self._is_broken_off:
                self._has_ended = True
                raise _BrokenOff
            self._thread = threading.get_ident()
        try:
            return self._work()
        finally:
            with self._lock:
                self._thread, self._has_ended = None, True
                _raise_in(threading.get_ident(), None)  # takes back an exception that has not been raised yet


async def _is_done(future: Future[Any], timeout_s: float) -> bool:
    """Whether the future is done in time. It is cancelled when it is not, and when the caller is cancelled."""
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait((waiter,), timeout=timeout_s)
        return waiter.done()
    finally:
        if not waiter.cancel() and not waiter.cancelled():
            waiter.exception()  # marks it as seen, because the caller reads it from `future`


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raises the exception in that thread as soon as it runs Python code. None takes back one not raised yet."""
    kind = ctypes.py_object(error) if error is not None else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind)
