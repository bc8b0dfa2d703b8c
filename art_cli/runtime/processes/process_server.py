"""Answers calls with an object's methods: the child process side of process_calls.py.

This module and its imports only use the standard library, because the Python may lack our dependencies.
"""

import asyncio
import contextlib
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn

from art_cli.runtime import threads
from art_cli.runtime.errors import ArtError
from art_cli.runtime.processes import process_calls

FAREWELL_DEADLINE_S = 2.0  # timeout for sending the last message


async def serve(connection: socket.socket, target: object, *, heartbeat_s: float | None = None) -> None:
    """Answers calls with the public methods of `target` until the peer closes the connection.

    Coroutine methods run concurrently in this event loop. Plain methods run sequentially in a thread. A method with a
    parameter `progress` receives a function of (done, total). An ArtError is sent as the call's answer. Any other
    exception is a bug and is raised here. During calls, a heartbeat is sent every `heartbeat_s`.
    """
    reader, writer = await asyncio.open_connection(sock=connection, limit=process_calls.MAX_LINE_BYTES)
    await answer(reader, writer, target, heartbeat_s=heartbeat_s)


async def answer(
    reader: process_calls.MessageReader,
    writer: process_calls.MessageWriter,
    target: object,
    *,
    heartbeat_s: float | None = None,
    watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Answers calls over an open connection. `watch` raises an ArtError, which the peer gets, to stop the process."""
    await _AnsweringEnd(writer, target).answer(reader, heartbeat_s, watch)


def run_and_exit(
    main: Coroutine[Any, Any, None], *, status_of: Callable[[BaseException], int] = lambda error: 1
) -> NoReturn:
    """Runs `main`, then ends the process with `status_of` its error, without waiting for other threads."""
    status = 0
    try:
        threads.run(main)
    except BaseException as error:
        traceback.print_exc()
        status = status_of(error)
    sys.stdout.flush()
    os._exit(status)


class _AnsweringEnd:
    def __init__(self, writer: process_calls.MessageWriter, target: object) -> None:
        self._writer, self._target = writer, target
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="calls")
        self._defect: asyncio.Future[None] = self._loop.create_future()

    async def answer(
        self,
        reader: process_calls.MessageReader,
        heartbeat_s: float | None,
        watch: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        """Runs until the peer closes the connection. Raises unexpected errors of methods, and errors of `watch`."""
        around = [asyncio.create_task(self._read(reader))]
        if heartbeat_s is not None:
            around.append(asyncio.create_task(self._beat(heartbeat_s)))
        if watch is not None:
            around.append(asyncio.create_task(watch()))
        try:
            done, _ = await asyncio.wait({self._defect, *around}, return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        except ArtError as error:
            self._send(process_calls.Raised(process_calls.FAREWELL, type(error).__name__, str(error)))
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(self._writer.drain(), FAREWELL_DEADLINE_S)
            raise
        finally:
            for task in (*around, *self._tasks.values()):
                task.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, reader: process_calls.MessageReader) -> None:
        while line := await reader.readline():
            message = process_calls.decode(line, process_calls.TO_PROCESS)
            if isinstance(message, process_calls.Call):
                task = self._tasks[message.id] = asyncio.create_task(self._answer(message))
                task.add_done_callback(partial(self._forget, message.id))
            elif (running := self._tasks.get(message.id)) is not None:
                running.cancel()

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            if self._tasks:
                self._send(process_calls.Heartbeat())

    async def _answer(self, call: process_calls.Call) -> None:
        if call.method.startswith("_"):
            raise ValueError(f"no public method: {call.method:.40}")
        method = getattr(self._target, call.method)
        given: process_calls.Json = dict(call.params)
        if "progress" in inspect.signature(method).parameters:
            given["progress"] = self._progress(call.id)
        try:
            if inspect.iscoroutinefunction(method):
                value = await method(**given)
            else:
                value = await self._loop.run_in_executor(self._thread, partial(method, **given))
            self._send(process_calls.Returned(call.id, value))
        except ArtError as error:
            self._send(process_calls.Raised(call.id, type(error).__name__, str(error)))

    def _progress(self, id: int) -> Callable[[int, int], None]:
        def send(done: int, total: int) -> None:
            self._loop.call_soon_threadsafe(self._send, process_calls.Advance(id, done, total))

        return send

    def _send(self, message: process_calls.Message) -> None:
        self._writer.write(process_calls.encode(message))

    def _forget(self, id: int, task: "asyncio.Task[None]") -> None:
        self._tasks.pop(id, None)
        if not task.cancelled() and (error := task.exception()) is not None and not self._defect.done():
            self._defect.set_exception(error)
