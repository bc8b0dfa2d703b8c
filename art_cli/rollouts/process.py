"""ProcessRollout: the user's Python function in separate processes (process_worker.py).

That is this interpreter, or `python`: one that has the function's packages and need not have ours (bootstrap.py).
What the function computes does not take the interpreter from the engine and the gateway here, several processors can
work for it, and an attempt that kills its process does not kill the run. The processes answer calls over a socket pair
(runtime/processes/process_calls.py): `load`, `play`, `explain_timeout`.

A process that dies fails the attempts in it as transport, which is tried again; the next attempt starts a new process.
The last try has a process to itself, so that an attempt that kills its process fails no other one.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from art_cli.rollouts import bootstrap
from art_cli.rollouts.attempt_errors import AttemptError, describe_exit, read_report
from art_cli.rollouts.policy import Json, Policy
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import RolloutError, UsageError, describe
from art_cli.runtime.processes.child import ChildProcess, child_environment
from art_cli.runtime.processes.process_calls import CallingEnd, ConnectionEnded
from art_cli.runtime.threads import end

START_DEADLINE_S = 300.0  # longest import of the user's modules
LONE_PER_CORE = 4  # number of processes per core that play a single attempt
EXPLAIN_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 15.0  # longest wait for a process to close the function's clients and end
EXIT_GRACE_S = 1.0  # time that a process has to end after its socket, so that its exit status is known
OUTPUT_DEADLINE_S = 10.0  # longest wait for the rest of its output
FUNCTION = "process_worker"  # the module that plays a function (bootstrap.py)
# Variables with which another Python would import our packages, or take itself for this one.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def show(text: str) -> None:
    """Writes what a process prints to standard error here, above a progress bar where one is drawn."""
    sys.stderr.write(text)
    sys.stderr.flush()


class ProcessRollout:
    """Plays the function `entry` of `directory` in `processes` processes, each attempt in the least busy one.

    `python` is the interpreter that runs them; None means this one, with its `sys.path`. With `environment`, the fields
    of its Settings, they play that environment, and `entry` is its name. `printed` gets what they print.
    """

    def __init__(
        self,
        entry: str,
        *,
        directory: Path,
        processes: int = 1,
        python: Path | None = None,
        environment: Json | None = None,
        printed: Callable[[str], None] = show,
    ) -> None:
        what = {"entry": entry, "directory": str(directory), "environment": environment}
        self._make = partial(RolloutProcess, entry, what, python=python, printed=printed)
        self._processes = [self._make() for _ in range(processes)]
        self._lone = asyncio.Semaphore(LONE_PER_CORE * (os.cpu_count() or 1))

    @property
    def version(self) -> str:
        """The version of the Python that has loaded the function, such as "3.12.1"; empty before `open`."""
        return self._processes[0].version

    async def begin(self) -> None:
        """Starts all processes and has them load the function; `open` waits for that."""
        try:
            await asyncio.gather(*(process.begin() for process in self._processes))
        except BaseException:
            await self.close()
            raise

    async def open(self) -> None:
        """Loads the function in all processes. Raises UsageError: it cannot be; RolloutError: it does not fit."""
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
        """Plays in a process for this attempt only, so that an attempt that kills its process fails no other one."""
        async with self._lone:
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


class RolloutProcess:
    """One process that plays attempts, started when it is needed and not there.

    `module` answers its calls (bootstrap.py), the first of which is `load` with the parameters `what`. Messages name it
    `title`, and name `python` by its `key` in the configuration. Standard error goes to `errors`, or to `printed`,
    as standard output does, if that is None.
    """

    version = ""  # its Python's, once that has loaded the function
    num_playing = 0  # number of attempts in it
    verb = "imported"  # a word for what it does at its start, for messages

    def __init__(
        self,
        title: str,
        what: Json,
        *,
        python: Path | None,
        key: str = "rollout.python",
        module: str = FUNCTION,
        printed: Callable[[str], None] = show,
        errors: IO[bytes] | None = None,
    ) -> None:
        self._title, self._what, self._python, self._key, self._module = title, what, python, key, module
        self._printed, self._errors = printed, errors
        self._child: ChildProcess | None = None
        self._calls: CallingEnd | None = None
        self._output: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[Any] | None = None  # the loading that `begin` has begun
        self._starting: asyncio.Task[None] | None = None  # the latest start, which may be over

    @property
    def is_running(self) -> bool:
        return self._calls is not None and not self._calls.has_ended

    async def begin(self) -> None:
        """Returns when there is a process that loads the function."""
        await self._launch()
        self._loading = asyncio.create_task(self._load())
        await asyncio.sleep(0)  # the task sends its message now, as what the caller does next may hold up the loop

    async def start(self) -> None:
        """Returns when a process has loaded the function, the present one or a new one.

        A start goes on when its caller is cancelled, because an import may take longer than an attempt.
        """
        if self._starting is None or self._starting.done():
            if self.is_running and self._loading is None:
                return
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        loading, self._loading = self._loading, None
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                if loading is None:
                    await self._end()
                    await self._launch()
                self.version = str(await (loading or self._load()))
        except BaseException as error:
            await self._end()  # it is not asked to end, because a process that imports reads nothing
            if (explained := self._explain_start(error)) is error:
                raise
            raise explained from error

    async def _load(self) -> Any:
        """Returns the version of the Python that has loaded the function."""
        return await self.ask("load", **self._what)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._calls = await CallingEnd.open(ours)
            worker = [str(self._python or sys.executable), "-u", "-X", "faulthandler", bootstrap.__file__]
            worker += [str(theirs.fileno()), self._module, *([json.dumps(sys.path)] if self._python is None else [])]
            self._child = await ChildProcess.start(
                worker,
                keep=theirs.fileno(),
                stdout=asyncio.subprocess.PIPE,
                stderr=self._errors or asyncio.subprocess.STDOUT,
                environment=None if self._python is None else _environment(self._python),
            )
        assert self._child.stdout is not None
        self._output = asyncio.create_task(_pass_on(self._child.stdout, self._printed))

    def _explain_start(self, error: BaseException) -> BaseException:
        """Returns the error of a start as the user reads it, with the Python where that is the user's choice."""
        where = f" ({self._key}: {self._python})" if self._python is not None else ""
        match error:
            case TimeoutError():
                return RolloutError(f"{self._title}: not {self.verb} within {START_DEADLINE_S:.0f} s{where}")
            case AttemptError():
                return RolloutError(f"{self._title}: {error.message} while it was {self.verb}{where}")
            case UsageError() | RolloutError() if where:
                return type(error)(f"{error}{where}")
        return error

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        self.num_playing += 1
        try:
            await self.start()
            plain = {name: getattr(policy, name) for name in ("base_url", "api_key", "model", "step")}
            ending = read_report(await self.ask("play", scenario=scenario, is_alone=is_alone, **plain))
        except ValueError as error:
            raise AttemptError("process", f"its process answered with no outcome: {error}") from error
        except OSError as error:  # no memory or file for another process at the moment
            raise AttemptError("process", f"its process cannot start: {describe(error)}", is_transport=True) from error
        finally:
            self.num_playing -= 1
        if isinstance(ending, AttemptError):
            raise ending
        return ending

    async def explain_timeout(self) -> str:
        if not self.is_running:
            return ""
        with contextlib.suppress(TimeoutError, AttemptError):
            async with asyncio.timeout(EXPLAIN_DEADLINE_S):
                return str(await self.ask("explain_timeout"))
        return ""

    async def close(self) -> None:
        """Closes the function's clients, then ends the process and every one that descends from it."""
        if self._starting is not None:
            await end(self._starting, timeout_s=CLOSE_DEADLINE_S)
        if self._loading is not None:  # it was never opened, and a process that imports reads nothing
            await end(self._loading, timeout_s=CLOSE_DEADLINE_S)
        elif self._calls is not None:
            self._calls.hang_up()
        if self._child is not None and self._loading is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), CLOSE_DEADLINE_S)
        await self._end()

    async def ask(self, method: str, *, progress: Callable[[int, int], None] | None = None, **params: Any) -> Any:
        """Returns the method's result. Raises the ArtError that it raised; AttemptError if the process ended."""
        assert self._calls is not None and self._child is not None
        child = self._child
        try:
            return await self._calls.call(method, params, progress=progress)
        except ConnectionEnded as error:
            status = await self._exit_of(child, is_at_fault=bool(error.fault))
            fault = f"; {error.fault}" if error.fault else ""
            raise AttemptError("process", f"its process ended ({status}{fault})", is_transport=True) from error

    async def _exit_of(self, child: ChildProcess, *, is_at_fault: bool) -> str:
        """Returns how a process ended whose connection is over. One that still runs is ended."""
        if not is_at_fault:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), EXIT_GRACE_S)
        child.terminate()
        return describe_exit(await child.wait())

    async def _end(self) -> None:
        """Ends the process and every one that descends from it, and passes their last output on."""
        if self._child is not None:
            await self._child.stop()
        if self._calls is not None:
            await self._calls.close()
        if self._output is not None and (await asyncio.wait({self._output}, timeout=OUTPUT_DEADLINE_S))[1]:
            self._output.cancel()


async def _pass_on(output: asyncio.StreamReader, printed: Callable[[str], None]) -> None:
    while received := await output.read(1 << 16):
        printed(received.decode(errors="replace"))


def _environment(python: Path) -> dict[str, str]:
    """Returns the variables for another Python: ours, as if its environment had been activated instead of this one."""
    environment = {name: value for name, value in child_environment().items() if name not in OWN_VARIABLES}
    home = python.parent.parent
    if (home / "pyvenv.cfg").is_file():
        environment["VIRTUAL_ENV"] = str(home)
        environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", os.defpath)])
    return environment
