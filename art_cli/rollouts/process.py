"""ProcessRollout: the user's Python function in processes of their own (process_worker.py).

That is this interpreter, or `python`: one that has the function's packages and need not have ours (start.py).
What it computes does not take the interpreter from the engine and the gateway here, more than one processor can work
for it, and what kills its process kills attempts, not the run. Messages (messages.py) go each way over a socket:

    to the process      Play, Cancel, Explain; its end of file: the process lets go of all and ends
    from it             Ready or Refused when it has loaded the function; then Done, Failed or Refused for each Play,
                        Guess for each Explain

A process that dies fails the attempts in it as transport, which is tried again; the next attempt starts a new process.
The last try is made in a process of its own, so that an attempt that kills its process takes no other one along.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from art_cli.errors import RolloutError, UsageError, printable
from art_cli.outcome import Outcome
from art_cli.processes.child import ChildProcess
from art_cli.rollouts import start
from art_cli.rollouts.attempt import AttemptError, describe_exit
from art_cli.rollouts.messages import (
    FROM_PROCESS,
    MAX_LINE_BYTES,
    Cancel,
    Done,
    Explain,
    Failed,
    FromProcess,
    Guess,
    Play,
    Ready,
    Refused,
    ToProcess,
    decode,
    encode,
)
from art_cli.rollouts.policy import Json, Policy

START_DEADLINE_S = 300.0  # for the user's modules to be imported
LONE_PER_CORE = 4  # processes of a single attempt at once, for each core
EXPLAIN_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 15.0  # for the function's clients to be closed, and for what it started in threads
EXIT_GRACE_S = 1.0  # for a process that closed its socket to end by itself, so that it is told how
OUTPUT_DEADLINE_S = 10.0  # for its descendants to be killed, and what they printed to be passed on
# What would have another Python import our packages, or take itself for this one.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class ProcessRollout:
    """Plays the function `entry` of `directory` in `processes` processes, each attempt in the least busy one.

    `python` is the interpreter that runs them; None: this one, with its `sys.path`.
    """

    def __init__(self, entry: str, *, directory: Path, processes: int = 1, python: Path | None = None) -> None:
        self._make = partial(_Process, entry, directory, python)
        self._processes = [self._make() for _ in range(processes)]
        self._lone_places = asyncio.Semaphore(LONE_PER_CORE * (os.cpu_count() or 1))

    @property
    def version(self) -> str:
        """Of the Python that has loaded the function. Example: "3.12.1". Empty before `open`."""
        return self._processes[0].version

    async def open(self) -> None:
        """All processes have loaded the function. Raises UsageError: it cannot be; RolloutError: it does not fit."""
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.close()
            raise

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError: this attempt failed, or its process died; RolloutError: every attempt would."""
        if is_alone:
            return await self._play_alone(policy, scenario)
        process = min(self._processes, key=lambda process: process.num_playing)
        return await process.play(policy, scenario)

    async def _play_alone(self, policy: Policy, scenario: Json) -> Outcome:
        """In a process for this attempt only: what kills it kills no other attempt."""
        async with self._lone_places:
            process = self._make()
            try:
                return await process.play(policy, scenario)
            finally:
                await process.close()

    async def explain_timeout(self) -> str:
        guesses = await asyncio.gather(*(process.explain_timeout() for process in self._processes))
        return next(filter(None, guesses), "")

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes))


class _Process:
    """One process, started when it is needed and not there."""

    version = ""  # of its Python, as soon as that has loaded the function

    def __init__(self, entry: str, directory: Path, python: Path | None) -> None:
        self._entry, self._directory, self._python = entry, directory, python
        self._ids = itertools.count(1)  # 0 is the start
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._child: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()

    @property
    def num_playing(self) -> int:
        return len(self._answers)

    async def start(self) -> None:
        """Returns when the function is loaded, in the process there is or a new one."""
        async with self._starting:
            if self._writer is not None:
                return
            await self._end()
            self._answers[0] = ready = asyncio.get_running_loop().create_future()
            reader, self._child, self._writer = await self._launch()
            assert self._child.stdout is not None
            self._tasks = [
                asyncio.create_task(_pass_on(self._child.stdout)),
                asyncio.create_task(self._receive(reader, self._writer, self._child)),
            ]
            try:
                async with asyncio.timeout(START_DEADLINE_S):
                    self.version = await self._answer(0, ready)
            except BaseException as error:
                await self._end()  # at once: it is importing, and hears nothing
                if (explained := self._explain_start(error)) is error:
                    raise
                raise explained from error

    async def _launch(self) -> tuple[asyncio.StreamReader, ChildProcess, asyncio.StreamWriter]:
        ours, theirs = socket.socketpair()
        with theirs:
            worker = [str(self._python or sys.executable), "-u", "-X", "faulthandler", start.__file__]
            worker += [str(theirs.fileno()), self._entry, str(self._directory)]
            worker += [json.dumps(sys.path)] if self._python is None else []
            child = await ChildProcess.start(
                worker,
                keep=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                environment=None if self._python is None else _environment(self._python),
            )
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
        return reader, child, writer

    def _explain_start(self, error: BaseException) -> BaseException:
        """The error of a start as the user reads it: with the Python, where that is the user's choice."""
        where = f" (rollout.python: {self._python})" if self._python is not None else ""
        match error:
            case TimeoutError():
                return RolloutError(f"{self._entry}: not imported within {START_DEADLINE_S:.0f} s{where}")
            case AttemptError():
                return RolloutError(f"{self._entry}: {error.message} while it was imported{where}")
            case UsageError() | RolloutError() if where:
                return type(error)(f"{error}{where}")
        return error

    async def play(self, policy: Policy, scenario: Json) -> Outcome:
        await self.start()
        id = next(self._ids)
        try:
            outcome = await self._ask(Play(id, policy.base_url, policy.api_key, policy.model, policy.step, scenario))
        except asyncio.CancelledError:
            self._send(Cancel(id))
            raise
        if not isinstance(outcome, Outcome):
            raise AttemptError("process", "its process answered with another message than an outcome")
        return outcome

    async def explain_timeout(self) -> str:
        if self._writer is None:
            return ""
        with contextlib.suppress(TimeoutError, AttemptError):
            async with asyncio.timeout(EXPLAIN_DEADLINE_S):
                return str(await self._ask(Explain(next(self._ids))))
        return ""

    async def close(self) -> None:
        """No process is left, nor one that descends from it."""
        if self._writer is not None:
            self._writer.write_eof()
        if self._child is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), CLOSE_DEADLINE_S)
        await self._end()

    async def _ask(self, message: Play | Explain) -> Any:
        future = self._answers[message.id] = asyncio.get_running_loop().create_future()
        self._send(message)
        return await self._answer(message.id, future)

    async def _answer(self, id: int, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        finally:
            self._answers.pop(id, None)

    def _send(self, message: ToProcess) -> None:
        if self._writer is not None:
            self._writer.write(encode(message))

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, child: ChildProcess) -> None:
        """Until the process is gone: then whatever still waits for it fails. One that sends no messages is killed."""
        fault = ""
        try:
            try:
                await self._read(reader)
            except ConnectionError:
                pass
            except ValueError as error:
                fault = f"; what it sent is no message of ours: {printable(error, limit=200)}"
                child.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(child.wait()), EXIT_GRACE_S)
            child.terminate()  # a function that closed its socket may live on
            status = describe_exit(await child.wait())
        finally:
            self._writer = None
            writer.close()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(AttemptError("process", f"its process ended ({status}{fault})", is_transport=True))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Settles what its messages answer, until there are no more. Raises ConnectionError; ValueError: no message."""
        while line := await reader.readline():
            message: FromProcess = decode(line, FROM_PROCESS)
            future = self._answers.get(message.id)
            if future is not None and not future.done():
                _settle(future, message)

    async def _end(self) -> None:
        """The process and all that descends from it are gone, its last words passed on."""
        if self._child is not None:
            await self._child.stop()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=OUTPUT_DEADLINE_S)
            for task in unfinished:
                task.cancel()
            if unfinished:
                await asyncio.wait(unfinished, timeout=CLOSE_DEADLINE_S)
        self._tasks = []


def _settle(future: asyncio.Future[Any], message: FromProcess) -> None:
    match message:
        case Done():
            future.set_result(message.outcome)
        case Guess():
            future.set_result(message.text)
        case Ready():
            future.set_result(message.version)
        case Failed():
            future.set_exception(AttemptError(message.kind, message.message, is_transport=message.is_transport))
        case Refused():
            error = UsageError if message.error == "UsageError" else RolloutError
            future.set_exception(error(message.message))


async def _pass_on(output: asyncio.StreamReader) -> None:
    """What the process prints goes to standard error here, above a progress bar where one is drawn."""
    while received := await output.read(1 << 16):
        sys.stderr.write(received.decode(errors="replace"))
        sys.stderr.flush()


def _environment(python: Path) -> dict[str, str]:
    """The variables for another Python: those here, as if its environment had been activated instead of ours."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    home = python.parent.parent
    if (home / "pyvenv.cfg").is_file():
        environment["VIRTUAL_ENV"] = str(home)
        environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", os.defpath)])
    return environment
