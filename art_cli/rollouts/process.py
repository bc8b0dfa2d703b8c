"""ProcessRollout: runs the user's Python function in separate processes (process_worker.py).

The processes use this interpreter or `python`, an interpreter with the function's packages that need not have ours
(bootstrap.py). Separate processes keep the function's CPU work away from the engine and the gateway, use several cores,
and protect the run from attempts that kill their process. The processes answer calls over a socket pair
(runtime/processes/process_calls.py): `load`, `play`, `explain_timeout`.

If a process dies, its attempts fail as transport errors and are retried; the next attempt starts a new process. The
last retry runs in a separate process, so an attempt that kills its process affects no other attempt.
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
from art_cli.rollouts.attempt_errors import AttemptError, Json, describe_exit, read_report
from art_cli.rollouts.policy import Policy
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import RolloutError, UsageError, describe
from art_cli.runtime.processes.child import ChildProcess, child_environment
from art_cli.runtime.processes.process_calls import CallingEnd, ConnectionEnded
from art_cli.runtime.threads import end

START_DEADLINE_S = 300.0  # longest import of the user's modules
LONE_PER_CORE = 4  # number of processes per core that play a single attempt
EXPLAIN_DEADLINE_S = 5.0
CLOSE_DEADLINE_S = 15.0  # longest wait for a process to close the function's clients and end
EXIT_GRACE_S = 1.0  # time for a process to exit after its socket closed, which makes its exit status available
OUTPUT_DEADLINE_S = 10.0  # longest wait for the remaining output
FUNCTION = "process_worker"  # the module that plays a function (bootstrap.py)
# Variables that would make another Python import our packages or mistake itself for this interpreter.
OWN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def show(text: str) -> None:
    """Writes a process's output to stderr, above the progress bar."""
    sys.stderr.write(text)
    sys.stderr.flush()


class ProcessRollout:
    """Plays the function `entry` in `processes` processes. Each attempt goes to the least busy process.

    `python` is the interpreter; by default this interpreter with its `sys.path`. `environment` holds the fields of
    environment Settings. The processes then play this environment, and `entry` is the environment's name. `printed`
    receives their output.
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
        """Python version of the loaded process, such as "3.12.1"; empty before `open`."""
        return self._processes[0].version

    async def begin(self) -> None:
        """Starts all processes and begins loading; `open` waits until the function is loaded."""
        try:
            await asyncio.gather(*(process.begin() for process in self._processes))
        except BaseException:
            await self.close()
            raise

    async def open(self) -> None:
        """Loads the function in all processes. Raises UsageError, and RolloutError for a wrong signature."""
        try:
            await asyncio.gather(*(process.start() for process in self._processes))
        except BaseException:
            await self.close()
            raise

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError if this attempt or its process failed, and RolloutError if every attempt would fail."""
        if not is_alone:
            return await min(self._processes, key=lambda process: process.num_playing).play(policy, scenario)
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
    """One worker process, started on demand.

    `module` is the worker module (bootstrap.py). Its first call is `load` with the parameters `what`. Error messages
    contain `title`, and the configuration `key` of `python`. Standard error goes to `errors`, or to `printed` like
    standard output.
    """

    version = ""  # Python version after loading
    num_playing = 0  # attempts in progress
    verb = "imported"  # verb for startup messages

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
        self._loading: asyncio.Task[Any] | None = None  # loading started by `begin`
        self._starting: asyncio.Task[None] | None = None  # the latest start, which may be over

    @property
    def is_running(self) -> bool:
        return self._calls is not None and not self._calls.has_ended

    async def begin(self) -> None:
        """Returns when there is a process that loads the function."""
        await self._launch()
        self._loading = asyncio.create_task(self._load())
        await asyncio.sleep(0)  # lets the task send its message now, because the caller may block the loop next

    async def start(self) -> None:
        """Returns when a process has loaded the function. Cancelling the caller does not stop the start."""
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
            await self._end()  # stopped immediately, because processes do not read messages during imports
            if (explained := self._explain_start(error)) is error:
                raise
            raise explained from error

    async def _load(self) -> Any:
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
        """Returns the startup error for the user, with the interpreter if the user chose it."""
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
        except OSError as error:  # currently not enough memory or file descriptors for another process
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
        """Closes the function's clients, then stops the process and its descendants."""
        if self._starting is not None:
            await end(self._starting, timeout_s=CLOSE_DEADLINE_S)
        if self._loading is not None:  # never opened, and a process does not read messages during imports
            await end(self._loading, timeout_s=CLOSE_DEADLINE_S)
        elif self._calls is not None:
            self._calls.hang_up()
        if self._child is not None and self._loading is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._child.wait(), CLOSE_DEADLINE_S)
        await self._end()

    async def ask(self, method: str, *, progress: Callable[[int, int], None] | None = None, **params: Any) -> Any:
        """Returns the method's result. Raises the worker's ArtError, or AttemptError if the process ended."""
        assert self._calls is not None and self._child is not None
        child = self._child
        try:
            return await self._calls.call(method, params, progress=progress)
        except ConnectionEnded as error:
            if not error.fault:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), EXIT_GRACE_S)
            child.terminate()
            status = describe_exit(await child.wait())
            fault = f"; {error.fault}" if error.fault else ""
            raise AttemptError("process", f"its process ended ({status}{fault})", is_transport=True) from error

    async def _end(self) -> None:
        """Stops the process and its descendants, and forwards their remaining output."""
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
    """Returns the environment for another Python, as if that Python's virtual environment were activated."""
    environment = {name: value for name, value in child_environment().items() if name not in OWN_VARIABLES}
    home = python.parent.parent
    if (home / "pyvenv.cfg").is_file():
        environment["VIRTUAL_ENV"] = str(home)
        environment["PATH"] = os.pathsep.join([str(python.parent), environment.get("PATH", os.defpath)])
    return environment
