"""ChildProcess: starts, awaits and ends a program, and reads its log. Messages are handled elsewhere.

The program runs under a supervisor (supervisor.py), so it and all its descendants end with this process, even if this
process is killed. Supervisor and program have separate sessions: Ctrl-C in the terminal reaches only this process,
which decides when to end its children.
"""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from art_cli.runtime.processes import supervisor

PID_DEADLINE_S = 30.0  # timeout for the supervisor to start the program
STOP_DEADLINE_S = supervisor.KILL_DEADLINE_S + 6.0  # timeout for a program's end, beyond its grace period
TAIL_WIDTH = 240  # characters shown per log line
TAIL_BYTES = 64 * 1024
MAX_OUTPUT_BYTES = 2**20  # maximum bytes read from the tail of a program's output
MAX_WRITTEN_BYTES = 2**28  # maximum output of a program; stored on disk until the program exits

Stream = int | IO[bytes] | None

_before: dict[str, str | None] = {}  # variables changed by an import -> earlier value, None if unset


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Keeps changes to os.environ inside the block (such as Unsloth's import) away from child processes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() | before.keys():
            if os.environ.get(name) != before.get(name):
                _before.setdefault(name, before.get(name))


def child_environment() -> dict[str, str]:
    """Returns os.environ for a child process, without changes made in `kept_from_children`."""
    return {name: value for name, value in {**os.environ, **_before}.items() if value is not None}


class ChildProcess:
    """A child process, started by `start` and ended by `stop`. Example: `await ChildProcess.start(["sleep", "9"])`

    `supervisor_pid` is the ancestor of all the program's processes.
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, grace_s: float) -> None:
        self.supervisor_pid = process.pid
        self.stdout = process.stdout  # a reader if `stdout` was PIPE
        self._process, self._control, self._grace_s = process, control, grace_s

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        stdin: Stream = asyncio.subprocess.DEVNULL,
        stdout: Stream = None,
        stderr: Stream = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        keep: int = -1,
        grace_s: float = 0.0,
    ) -> "ChildProcess":
        """Returns the child; the supervisor is running and will start the program. Raises OSError if no process can
        start.

        `environment` defaults to `child_environment()`, which is also the basis for callers that add variables. `keep`
        is an extra descriptor for the program; its number is passed as an argument. `grace_s` is the time between
        SIGTERM and SIGKILL (0: SIGKILL immediately). A missing program ends with status 127 and a line on stderr.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            starting = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", supervisor.__file__),
                    *(str(theirs.fileno()), str(keep), str(grace_s), *command),
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=cwd,
                    env=child_environment() if environment is None else environment,
                    pass_fds=[theirs.fileno(), *([keep] if keep >= 0 else [])],
                    start_new_session=True,
                )
            )
            try:
                return cls(await asyncio.shield(starting), ours, grace_s)
            except asyncio.CancelledError:  # the process may already exist and must not be left behind
                await cls(await starting, ours, grace_s).stop()
                raise
            except BaseException:
                ours.close()
                raise

    async def program_pid(self) -> int:
        """Returns the program's process id; 0 if it never started. Call this only once."""
        self._control.setblocking(False)
        try:
            async with asyncio.timeout(PID_DEADLINE_S):
                return int(await asyncio.get_running_loop().sock_recv(self._control, 32) or 0)
        except (TimeoutError, ConnectionError):
            return 0

    async def wait(self) -> int:
        """Waits for the program and returns its exit status (negative signal number if killed)."""
        return await self._process.wait()

    def terminate(self) -> None:
        with contextlib.suppress(OSError):  # already ended
            self._control.shutdown(socket.SHUT_WR)

    async def stop(self) -> None:
        """Kills the program and its descendants."""
        self.terminate()
        try:
            async with asyncio.timeout(self._grace_s + STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # the supervisor; on Linux the program dies too
        finally:
            self._control.close()


class Finished(NamedTuple):
    """A finished program. Example: Finished(0, b"1.0\\n", b"")"""

    status: int  # negative signal number if killed
    stdout: bytes  # the last MAX_OUTPUT_BYTES
    stderr: bytes


async def run_program(
    command: Sequence[str],
    given: bytes,
    *,
    timeout_s: float | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_start: Callable[[ChildProcess], None] = lambda child: None,
) -> Finished:
    """Runs the program with `given` on standard input, then ends all its processes. Raises TimeoutError, and OSError
    also for output above MAX_WRITTEN_BYTES.

    Output goes to files instead of pipes, because a background process could keep a pipe open.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        child = await ChildProcess.start(
            command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, environment=environment
        )
        try:
            on_start(child)
            async with asyncio.timeout(timeout_s):
                status = await _bounded(child, stdout, stderr)
        finally:
            await child.stop()
        return Finished(status, *(_tail(file, MAX_OUTPUT_BYTES) for file in (stdout, stderr)))


async def _bounded(child: ChildProcess, *outputs: IO[bytes]) -> int:
    """Returns the exit status. Raises OSError if the output grows too large."""
    waiting = asyncio.ensure_future(child.wait())
    try:
        while not (await asyncio.wait({waiting}, timeout=1.0))[0]:
            if sum(os.fstat(output.fileno()).st_size for output in outputs) > MAX_WRITTEN_BYTES:
                raise OSError(errno.EFBIG, f"it wrote more than {MAX_WRITTEN_BYTES >> 20} MiB of output")
        return waiting.result()
    finally:
        waiting.cancel()


def _tail(file: IO[bytes], size: int, start: int = 0) -> bytes:
    """Returns the last `size` bytes of a file, starting at byte `start` or later."""
    file.seek(max(start, file.seek(0, os.SEEK_END) - size))
    return file.read()


def describe_end(status: int) -> str:
    """Describes an exit status. Examples: 1 is "exit status 1", -9 is "killed by SIGKILL"."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"exit status {status}"


def last_lines(log: Path, *, count: int, start: int = 0, secrets: Sequence[str] = ()) -> str:
    """Returns the last `count` lines of a log after byte `start`, indented, with secrets masked by "***"."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        text = _tail(file, TAIL_BYTES, start).decode(errors="replace")
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return "\n".join(f"  {line[:TAIL_WIDTH]}" for line in text.splitlines()[-count:])
