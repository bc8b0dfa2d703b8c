"""`art` as a process of its own, forked from one that has torch, transformers and openai: without seconds of imports.

Its code, directory, environment, streams, signals and exit are those of `python -m art_cli`. What a test says about
imports, about the first instants of a process or about a terminal needs that command itself; so does a variable that
is read when a library is imported.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.support.paths import ROOT

NEWS_BYTES = 8
# The word `art` on a shell's path: asks the same server, over a descriptor that the shell must inherit.
ART = """#!{python} -SE
import json, os, socket, sys

news, end = os.pipe()
asked = ["art_cli", sys.argv[1:], os.getcwd(), dict(os.environ), False]
socket.send_fds(socket.socket(fileno={server}), [json.dumps(asked).encode()], [0, 1, 2, end])
os.close(end)
_, status = (int.from_bytes(os.read(news, {bytes}), sys.byteorder, signed=True) for _ in range(2))
os._exit(status if status >= 0 else 128 - status)
"""
PIPE, DEVNULL, STDOUT = subprocess.PIPE, subprocess.DEVNULL, subprocess.STDOUT


class Forked:
    """A process with the part of subprocess.Popen that tests need. Its pipes are of text."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        module: str = "art_cli",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[str] | IO[bytes] | None = None,
        stderr: int | IO[str] | IO[bytes] | None = None,
        start_new_session: bool = False,
    ) -> None:
        self.args = [module, *map(str, words)]
        self.returncode: int | None = None
        self.stdout, out = _stream(stdout, 1)
        self.stderr, err = (None, os.dup(out)) if stderr == STDOUT else _stream(stderr, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._news, news = os.pipe()
        asked = [module, self.args[1:], str(cwd or Path.cwd()), dict(env or os.environ), start_new_session]
        passed = [nothing, out, err, news]
        socket.send_fds(_server(), [json.dumps(asked).encode()], passed)
        for descriptor in passed:
            os.close(descriptor)
        self.pid = self._read_news(deadline=time.monotonic() + 120)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._news], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            status = self._read_news(None if timeout is None else time.monotonic() + timeout)
            os.close(self._news)
            self.returncode = status
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and its error output. Raises subprocess.TimeoutExpired."""
        texts = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            with stream:
                texts[place] = stream.read()

        streams = [
            (place, stream)
            for place, stream in enumerate((self.stdout, self.stderr))
            if stream is not None and not stream.closed
        ]
        readers = [threading.Thread(target=read, args=pair, daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def _read_news(self, deadline: float | None) -> int:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([self._news], [], [], left)[0]:
            raise subprocess.TimeoutExpired(self.args, left or 0.0)
        news = os.read(self._news, NEWS_BYTES)
        assert len(news) == NEWS_BYTES, "the process that forks has ended"
        return int.from_bytes(news, sys.byteorder, signed=True)


def run(
    words: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run with captured text."""
    process = Forked(words, cwd=cwd, env=env, stdout=PIPE, stderr=PIPE)
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def write_art(path: Path) -> int:
    """Writes the command `art` to that path. Returns the descriptor that whoever runs it needs (`pass_fds`)."""
    server = _server().fileno()
    path.write_text(ART.format(python=sys.executable, server=server, bytes=NEWS_BYTES))
    path.chmod(0o755)
    return server


def _stream(wish: int | IO[str] | IO[bytes] | None, own: int) -> tuple[IO[str] | None, int]:
    """Our end of a pipe, where one is wished; and the other process's stream."""
    if wish == PIPE:
        ours, theirs = os.pipe()
        return open(ours, encoding="utf-8"), theirs
    if wish == DEVNULL:
        return None, os.open(os.devnull, os.O_WRONLY)
    return None, os.dup(own if wish is None else wish if isinstance(wish, int) else wish.fileno())


@functools.cache
def _server() -> socket.socket:
    """What the one that forks for this process of tests is asked over. It ends with them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end() -> None:
        ours.close()
        process.wait(timeout=60)

    atexit.register(end)
    return ours
