"""ChildProcess: one program, started, waited for and ended; the last lines of its log. It knows nothing of messages.

The program runs under a supervisor (supervisor.py), so that it and all that descends from it end with this process,
however this one ends. Both lead new sessions, so that a Ctrl-C in the terminal reaches this process alone,
which decides when its children end.
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

PID_DEADLINE_S = 30.0  # longest wait for the supervisor to start the program
STOP_DEADLINE_S = supervisor.KILL_DEADLINE_S + 6.0  # longest wait for a program's end, beyond its grace period
TAIL_WIDTH = 240  # characters of a log's line that a message shows
TAIL_BYTES = 64 * 1024
MAX_OUTPUT_BYTES = 2**20  # largest part that is read of a program's output, its end
MAX_WRITTEN_BYTES = 2**28  # largest output that a program may write, which lies on a disk until it ends

Stream = int | IO[bytes] | None

_before: dict[str, str | None] = {}  # variables that an import changed, with their values before, None if not set


@contextlib.contextmanager
def kept_from_children() -> Iterator[None]:
    """Keeps changes of os.environ inside the block, as Unsloth's import makes, to this process: no child gets them."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() | before.keys():
            if os.environ.get(name) != before.get(name):
                _before.setdefault(name, before.get(name))


def child_environment() -> dict[str, str]:
    """Returns os.environ for a child process, without the changes in `kept_from_children`."""
    return {name: value for name, value in {**os.environ, **_before}.items() if value is not None}


class ChildProcess:
    """Started once with `start`, stopped once with `stop`. Example: `child = await ChildProcess.start(["sleep", "9"])`

    `supervisor_pid` is the process that everything of the program descends from.
    """

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket, grace_s: float) -> None:
        self.supervisor_pid = process.pid
        self.stdout = process.stdout  # a reader where `stdout` was PIPE
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
        """Returns the child; its supervisor runs, the program soon will. Raises OSError if no process can be started.

        `environment` None is `child_environment()`, which a caller that adds to it begins with as well.
        `keep` is one more descriptor for the program, which has its number in an argument. `grace_s` is the time that
        the program has between SIGTERM and SIGKILL; 0 is SIGKILL at once. A program that does not exist ends with
        status 127 and a line on standard error.
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
            except asyncio.CancelledError:  # the process may be there by now, and must not be left behind
                await cls(await starting, ours, grace_s).stop()
                raise
            except BaseException:
                ours.close()
                raise

    async def program_pid(self) -> int:
        """Returns the process id of the program; 0 where it never started. To be asked once."""
        self._control.setblocking(False)
        try:
            async with asyncio.timeout(PID_DEADLINE_S):
                return int(await asyncio.get_running_loop().sock_recv(self._control, 32) or 0)
        except (TimeoutError, ConnectionError):
            return 0

    async def wait(self) -> int:
        """Returns the program's exit status when it has ended; negative for the signal that ended it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Begins the program's end, and returns at once."""
        with contextlib.suppress(OSError):  # it is over
            self._control.shutdown(socket.SHUT_WR)

    async def stop(self) -> None:
        """Ends the program and everything that descends from it."""
        self.terminate()
        try:
            async with asyncio.timeout(self._grace_s + STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()  # the supervisor; on Linux the program dies with it
        finally:
            self._control.close()


class Finished(NamedTuple):
    """The end of a program. Example: Finished(0, b"1.0\\n", b"")"""

    status: int  # negative for the signal that ended it
    stdout: bytes  # the last MAX_OUTPUT_BYTES at most
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
    """Runs the program with `given` on standard input; nothing of it is left. Raises OSError, also where its output has
    more than MAX_WRITTEN_BYTES, and TimeoutError.

    Files, not pipes, take its output, because a background process could keep a pipe open.
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
    """Returns the exit status. Raises OSError if the outputs grow past what a disk should hold."""
    waiting = asyncio.ensure_future(child.wait())
    try:
        while not (await asyncio.wait({waiting}, timeout=1.0))[0]:
            if sum(os.fstat(output.fileno()).st_size for output in outputs) > MAX_WRITTEN_BYTES:
                raise OSError(errno.EFBIG, f"it wrote more than {MAX_WRITTEN_BYTES >> 20} MiB of output")
        return waiting.result()
    finally:
        waiting.cancel()


def _tail(file: IO[bytes], size: int, start: int = 0) -> bytes:
    """Returns the last `size` bytes of a file, none of them before byte `start`."""
    file.seek(max(start, file.seek(0, os.SEEK_END) - size))
    return file.read()


def describe_end(status: int) -> str:
    """Returns how a process ended, from its exit status. Examples: 1 is "exit status 1", -9 is "killed by SIGKILL"."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"exit status {status}"


def last_lines(log: Path, *, count: int, start: int = 0, secrets: Sequence[str] = ()) -> str:
    """Returns the last `count` lines of a log from byte `start` on, indented, with secrets as "***"."""
    if not log.is_file():
        return ""
    with log.open("rb") as file:
        text = _tail(file, TAIL_BYTES, start).decode(errors="replace")
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    return "\n".join(f"  {line[:TAIL_WIDTH]}" for line in text.splitlines()[-count:])
