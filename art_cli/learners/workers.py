"""Workers: the processes of a learner that has several, seen from their owner.

torch's own launcher (torchrun) starts them, once and without restarts. Each connects to a socket in a directory that
only this user can enter, and from then on a line of JSON goes each way:

    to every process    {"method": "step", "params": {...}}; at last {"method": "end"}
    from each one       {"progress": [3, 8]} while it works, then {"result": ...} or {"error": [kind, message]}

What keeps them together: a process whose connection closes is dead, and then so are all; a process whose connection to
this one closes ends itself, whatever it is doing. So none outlives the others, or this process, however it died.
"""

import contextlib
import logging
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from art_cli import errors
from art_cli.errors import ArtError, LearnerError
from art_cli.learners import Progress

log = logging.getLogger(__name__)

WORKER = "art_cli.learners.worker"
START_DEADLINE_S = 300.0  # until every process has connected: Python has started, torch is not imported yet
SILENCE_DEADLINE_S = 900.0  # of all processes while they work; a pass of one pack is reported when it is done
AGREE_DEADLINE_S = 10.0  # in which all fail where one has: they make the same checks on the same data
SEND_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
POLL_S = 0.2
TAIL_LINES, TAIL_BYTES, TAIL_WIDTH = 8, 64 * 1024, 240


class Workers:
    """Started once, closed once. Rank r's log is `learner_<r>.log` in `logs`, the launcher's `learner.log`."""

    def __init__(self, size: int, *, logs: Path | None) -> None:
        """`logs`: None for a temporary directory."""
        self.size = size
        self._scratch = tempfile.TemporaryDirectory(prefix="art-") if logs is None else None
        self.logs = Path(self._scratch.name) if self._scratch is not None else (logs or Path())
        self.pids: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._connections: dict[int, _Connection] = {}
        self._death: str | None = None
        self._mourning = threading.Lock()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All processes are connected when it returns. Raises LearnerError: one ended, or did not start in time."""
        assert self._launcher is None, "started twice"
        self.logs.mkdir(parents=True, exist_ok=True)
        log.info("learner: starting %d processes; their logs: %s", self.size, self.logs / "learner*.log")
        with tempfile.TemporaryDirectory(prefix="art-") as home, socket.socket(socket.AF_UNIX) as listener:
            address = Path(home) / "s"  # short: a socket's path has 108 characters at most
            listener.bind(str(address))
            listener.listen(self.size)
            listener.settimeout(POLL_S)
            try:
                self._launch(address)
                self._accept(listener)
            except BaseException:
                self._kill()
                raise

    def _launch(self, address: Path) -> None:
        threads = max(1, (os.cpu_count() or 1) // self.size)
        with self._log().open("wb") as file:
            self._launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
                    *("--max-restarts", "0", "--nproc-per-node", str(self.size)),
                    *("-m", WORKER, str(address), str(self.logs.resolve()), str(os.getpid())),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={"OMP_NUM_THREADS": str(threads), **os.environ},
                start_new_session=True,  # a Ctrl-C in the terminal is for this process, which decides
            )

    def _accept(self, listener: socket.socket) -> None:
        assert self._launcher is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while len(self._connections) < self.size:
            if self._launcher.poll() is not None:
                raise LearnerError(f"the learner's processes did not start{self._last_lines(None)}")
            if time.monotonic() > deadline:
                raise LearnerError(f"the learner's processes did not start within {START_DEADLINE_S:.0f} s")
            with contextlib.suppress(TimeoutError):
                connection = _Connection(listener.accept()[0])
                if (hello := connection.first()) is not None:
                    self.pids[hello["rank"]] = hello["pid"]
                    self._connections[hello["rank"]] = connection

    def close(self) -> None:
        """No process is left."""
        for connection in self._connections.values():
            connection.hang_up()
        if self._launcher is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(STOP_DEADLINE_S)
        self._kill()
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.socket.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _kill(self) -> None:
        """At once. The launcher is the one whose children they are: nobody else waits for them."""
        for rank, connection in self._connections.items():
            if not connection.has_ended():  # otherwise its process id may be somebody else's by now
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[rank], signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait(STOP_DEADLINE_S)

    # --- while they live ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LearnerError: one of them is dead."""
        for rank, connection in list(self._connections.items()):
            if connection.has_ended():
                self._mourn(rank)

    def call(self, method: str, params: Any, *, progress: Progress | None = None) -> Any:
        """What the first process answers when all have. Raises the error that all of them answer with.

        LearnerError: one died, only some failed, or none said a word for too long; then all of them are gone.
        """
        line = msgspec.json.encode({"method": method, "params": params}) + b"\n"
        for rank, connection in self._connections.items():
            try:
                connection.send(line)
            except OSError:
                self._mourn(rank)
        answers = self._collect(progress)
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if not failed:
            return answers[0].get("result")
        if len(failed) < self.size:
            rank = min(failed)
            self._end(f"process {rank} of the learner's {self.size} failed alone: {failed[rank][1]}")
        kind, message = failed[0]
        error: ArtError = getattr(errors, kind)(message)
        raise error

    def _collect(self, progress: Progress | None) -> dict[int, dict[str, Any]]:
        """Each process's answer; fewer, when one has failed and others have not said so in time."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + SILENCE_DEADLINE_S
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, rank)
            while len(answers) < self.size and time.monotonic() < deadline:
                for key, _ in selector.select(POLL_S):
                    rank = key.data
                    messages = self._connections[rank].read()
                    if messages is None:
                        self._mourn(rank)
                    for message in messages:
                        if "progress" in message:
                            deadline = time.monotonic() + SILENCE_DEADLINE_S
                            if progress is not None:
                                progress(*message["progress"])
                        else:
                            answers[rank] = message
                            limit = AGREE_DEADLINE_S if "error" in message else SILENCE_DEADLINE_S
                            deadline = min(deadline, time.monotonic() + limit)
        if len(answers) < self.size and not any("error" in answer for answer in answers.values()):
            silent = sorted(set(self._connections) - set(answers))
            self._end(f"no word from process {silent[0]} of the learner's for {SILENCE_DEADLINE_S:.0f} s")
        return answers

    # --- how they die -------------------------------------------------------------------------------------------------

    def _mourn(self, rank: int) -> NoReturn:
        """One is dead: ends the others and says how it died. Any thread may find it out first."""
        with self._mourning:
            if self._death is None:
                assert self._launcher is not None
                with contextlib.suppress(subprocess.TimeoutExpired):  # it knows of what its children died
                    self._launcher.wait(STOP_DEADLINE_S / 2)
                rank, how = self._first_death(rank)
                self._kill()
                self._death = (
                    f"process {rank} of the learner's {self.size} died ({how}); nothing is lost: run the same command "
                    f"again to go on{self._last_lines(rank)}"
                )
        raise LearnerError(self._death)

    def _end(self, message: str) -> NoReturn:
        self._kill()
        self._death = message
        raise LearnerError(message)

    def _first_death(self, rank: int) -> tuple[int, str]:
        """Which process died first, and how: the launcher's last word; `rank` where it has none."""
        _, _, root = self._log().read_text(errors="replace").rpartition("Root Cause")
        found = re.search(r"rank\s*: (\d+) .*?\n\s*exitcode\s*: (-?\d+)", root)
        if found is None:
            return rank, "how is not known"
        status = int(found[2])
        with contextlib.suppress(ValueError):
            return int(found[1]), f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return int(found[1]), f"exit status {status}"

    def _log(self, rank: int | None = None) -> Path:
        return self.logs / ("learner.log" if rank is None else f"learner_{rank}.log")

    def _last_lines(self, rank: int | None) -> str:
        """As the end of a message; nothing where there are none."""
        path = self._log(rank)
        if not path.is_file() or not path.stat().st_size:
            return ""
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"; the last lines of {path}:", *(f"  {line[:TAIL_WIDTH]}" for line in lines)])


class _Connection:
    """One process's end of the socket: lines out, messages in."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(SEND_DEADLINE_S)
        self._received = b""

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def first(self) -> dict[str, Any] | None:
        """The first message; None: the other end is gone."""
        messages: list[dict[str, Any]] | None = []
        while messages == []:
            messages = self.read()
        return messages[0] if messages else None

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come, at least a part of one; None: the other end is gone."""
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionError:
            received = b""
        if not received:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        return [msgspec.json.decode(line) for line in lines]

    def has_ended(self) -> bool:
        """Whether the other end is gone, without reading what it may have said before."""
        readable = select.poll()
        readable.register(self.socket, select.POLLIN)
        try:
            return bool(readable.poll(0)) and not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def hang_up(self) -> None:
        """The other end may go."""
        with contextlib.suppress(OSError):
            self.send(b'{"method":"end"}\n')
            self.socket.shutdown(socket.SHUT_WR)
