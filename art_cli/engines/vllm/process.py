"""ServerProcess: one server process from its start to its end, and its log. It knows nothing of HTTP or vLLM.

The server runs below keeper.py, so that it ends with this process however this one ends. Both are the leaders of
sessions of their own: a Ctrl-C in the terminal is for this process alone, which closes the server when it is done.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from art_cli.engines.vllm import keeper
from art_cli.errors import EngineError
from art_cli.private import make_directory, owner_only

SPAWN_DEADLINE_S = 30.0
STOP_DEADLINE_S = keeper.TERM_GRACE_S + 10.0
TAIL_LINES, TAIL_WIDTH = 15, 240
TAIL_BYTES = 64 * 1024


class ServerProcess:
    """Started once, stopped once. What it writes goes to the end of the file `log`."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, secrets: Sequence[str] = ()
    ) -> None:
        self.log = log
        self.pid = 0  # of the server itself; 0: not started
        self._command = list(command)
        self._environment = dict(environment)
        self._secrets = [secret for secret in secrets if secret]
        self._keeper: asyncio.subprocess.Process | None = None
        self._log_start = 0

    async def start(self) -> None:
        """The process is there when it returns. Raises EngineError: it cannot be started at all."""
        make_directory(self.log.parent)
        with open(self.log, "ab", opener=owner_only) as log:
            self._log_start = log.tell()
            starting = asyncio.ensure_future(self._start_keeper(log))
            try:
                self._keeper = await asyncio.shield(starting)
            except asyncio.CancelledError:  # the process may be there by now, and must not be left behind
                self._keeper = await starting
                await self.stop()
                raise
        assert self._keeper.stdout is not None
        try:
            async with asyncio.timeout(SPAWN_DEADLINE_S):
                line = await self._keeper.stdout.readline()
        except TimeoutError as error:
            await self.stop()
            raise EngineError(f"{self._command[0]}: not started within {SPAWN_DEADLINE_S:.0f} s") from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        if not line.strip().isdigit():
            await self.stop()
            raise EngineError(f"{self._command[0]}: cannot be started; its last words:\n{self.tail(3)}")
        self.pid = int(line)

    async def _start_keeper(self, log: IO[bytes]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", keeper.__file__, *self._command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=self._environment,
            start_new_session=True,
        )

    @property
    def has_ended(self) -> bool:
        return self._keeper is None or self._keeper.returncode is not None

    async def wait(self) -> str:
        """How it ended, when it has: "exit status 1", "killed by SIGKILL"."""
        assert self._keeper is not None, "not started"
        status = await self._keeper.wait()
        number = status - 128
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}" if number > 0 else f"exit status {status}"
        return f"exit status {status}"

    async def stop(self) -> None:
        """It is gone when this returns, and whatever it started in its process group."""
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()  # also after its end: the pipe holds the transport open
        if self._keeper.returncode is not None:
            return
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._keeper.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of what this server wrote, indented, secrets blotted out."""
        with self.log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - TAIL_BYTES))
            text = file.read().decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return "\n".join(f"  {line[:TAIL_WIDTH]}" for line in text.splitlines()[-lines:])


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now; somebody else may be quicker to take it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
