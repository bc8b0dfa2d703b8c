"""Workers: the processes of a learner that has several, seen from their owner.

torch's own launcher (torchrun) starts them, once and without restarts. Each connects to a socket in a directory that
only this user can enter, and from then on a line of JSON goes each way:

    to every process    {"method": "step", "params": {...}}; at last {"method": "end"}
    from each one       {"beat": true} every second and {"progress": [3, 8]} with each pack, while it works;
                        then {"result": ...} or {"error": [kind, message]}

What keeps them together: a process whose connection closes is dead, and then so are all; one that lives and does not go
on is ended with all (Silence); a process whose connection to this one closes ends itself, whatever it is doing. So none
outlives the others, or this process, however it died.
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
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from art_cli import errors
from art_cli.errors import ArtError, LearnerError
from art_cli.learners import Progress
from art_cli.private import make_directory, owner_only
from art_cli.scratch import Scratch, scratch

log = logging.getLogger(__name__)

WORKER = "art_cli.learners.worker"
START_DEADLINE_S = 300.0  # until every process has connected: Python has started, torch is not imported yet
HUNG_S = 60.0  # without a beat, which comes every second: long enough for a machine that swaps. The first call imports
# torch, which lets nothing else run, from a disk that may be slow: it has the start's deadline.
PACK_DEADLINE_S = 900.0  # until something is done: the first pack has all preparation before it, some calls report none
PACK_FLOOR_S, TIMES_LONGEST = 60.0, 10.0  # from then on: so many times what the longest pack took, at least the floor
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
        self._scratch = Scratch("learner") if logs is None else None
        self.logs = self._scratch.path if self._scratch is not None else (logs or Path())
        self.pids: dict[int, int] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._connections: dict[int, _Connection] = {}
        self._death: str | None = None
        self._mourning = threading.Lock()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All processes are connected when it returns. Raises LearnerError: one ended, or did not start in time."""
        assert self._launcher is None, "started twice"
        make_directory(self.logs)
        log.info("learner: starting %d processes; their logs: %s", self.size, self.logs / "learner*.log")
        with scratch("socket") as home, socket.socket(socket.AF_UNIX) as listener:
            address = home / "s"  # short: a socket's path has 108 characters at most
            listener.bind(str(address))
            listener.listen(self.size)
            listener.settimeout(POLL_S)
            try:
                self._launch(address)
                self._accept(listener)
            except BaseException:
                self._kill()
                if self._scratch is not None:  # the error names a log
                    self._scratch.keep_logs()
                raise

    def _launch(self, address: Path) -> None:
        threads = max(1, (os.cpu_count() or 1) // self.size)
        with open(self._log(), "wb", opener=owner_only) as file:
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
        if self._scratch is not None and self._death is None:
            self._scratch.close()
        elif self._scratch is not None:  # the error names a log
            self._scratch.keep_logs()

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

        LearnerError: one died or hangs, or only some failed; then all of them are gone.
        """
        line = msgspec.json.encode({"method": method, "params": params}) + b"\n"
        for rank, connection in self._connections.items():
            try:
                connection.send(line)
            except TimeoutError:
                self._end(f"process {rank} of the learner's {self.size} took in nothing for {SEND_DEADLINE_S:.0f} s")
            except OSError:
                self._mourn(rank)
        answers = self._collect(Silence(self._connections, START_DEADLINE_S if method == "open" else HUNG_S), progress)
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if not failed:
            return answers[0].get("result")
        if len(failed) < self.size:
            rank = min(failed)
            self._end(f"process {rank} of the learner's {self.size} failed alone: {failed[rank][1]}")
        kind, message = failed[0]
        error: ArtError = getattr(errors, kind)(message)
        raise error

    def _collect(self, silence: "Silence", progress: Progress | None) -> dict[int, dict[str, Any]]:
        """Each process's answer; fewer, when one has failed and others have not said so in time."""
        answers: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection.socket, selectors.EVENT_READ, rank)
            while len(answers) < self.size and not silence.is_disagreed:
                for key, _ in selector.select(POLL_S):
                    rank = key.data
                    messages = self._connections[rank].read()
                    if messages is None:
                        self._mourn(rank)
                    for message in messages:
                        silence.hear(rank, message)
                        if "progress" in message and progress is not None:
                            progress(*message["progress"])
                        elif "result" in message or "error" in message:
                            answers[rank] = message
                if (problem := silence.problem()) is not None:
                    self._end(f"{problem}; nothing is lost: run the same command again to go on")
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


class Silence:
    """How long the processes may still be silent in one call, by what was heard of them.

    Its clock stands while this process is stopped (a Ctrl-Z): what came meanwhile is heard first.
    """

    def __init__(self, ranks: Iterable[int], hung_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`hung_s`: without a beat."""
        self._hung_s = hung_s
        self._clock, self._last, self._now = clock, clock(), 0.0
        self._beats = dict.fromkeys(ranks, 0.0)  # of those that work: when they said anything
        self._done = 0.0  # when the newest pack was
        self._longest: float | None = None  # from one pack to the next
        self._failed: float | None = None  # when the first error came

    def hear(self, rank: int, message: dict[str, Any]) -> None:
        self._tick()
        self._beats[rank] = self._now
        if "progress" in message:
            self._longest = max(self._longest or 0.0, self._now - self._done)
            self._done = self._now
        elif "error" in message and self._failed is None:
            self._failed = self._now
        if "error" in message or "result" in message:
            del self._beats[rank]

    @property
    def is_disagreed(self) -> bool:
        """Whether some have failed and the others did not say so in time."""
        self._tick()
        return self._failed is not None and self._now - self._failed > AGREE_DEADLINE_S

    def problem(self) -> str | None:
        """Who does not go on; None: nothing is overdue."""
        self._tick()
        for rank, heard in self._beats.items():
            if self._now - heard > self._hung_s:
                return f"process {rank} of the learner's hangs: it lives, and has not moved for {self._hung_s:.0f} s"
        limit = PACK_DEADLINE_S
        if self._longest is not None:
            limit = min(limit, max(PACK_FLOOR_S, TIMES_LONGEST * self._longest))
        if self._failed is None and self._now - self._done > limit:
            return f"the learner's processes hang: they have done nothing for {limit:.0f} s"
        return None

    def _tick(self) -> None:
        now = self._clock()
        self._now += min(now - self._last, 2 * POLL_S)
        self._last = now


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
