"""Workers: the processes of a learner that has several, seen from their owner.

torch's own launcher (torchrun) starts them, once and without restarts, as one child of this process. Each connects to
a Unix socket in a directory that only this user can enter, and answers calls (processes/calls.py). Every call goes to
all of them.

They live and end together. When one dies, or lives and does not go on (watchdog.py), all are ended. When this process
dies, they end with it (processes/supervisor.py).
"""

import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from art_cli.errors import LearnerError
from art_cli.learners import Progress
from art_cli.learners.watchdog import POLL_S, Watchdog
from art_cli.private import make_directory, owner_only
from art_cli.processes.calls import CallingEnd, ConnectionEnded
from art_cli.processes.child import ChildProcess, describe_end, last_lines
from art_cli.scratch import Scratch, scratch
from art_cli.threads import LoopThread

log = logging.getLogger(__name__)

WORKER = "art_cli.learners.worker"
START_DEADLINE_S = 300.0  # longest wait for every process to connect: Python has started, torch is not imported yet
# Longest silence of a process that works. A heartbeat comes every second, so this is long enough for a machine that
# swaps. The first call has START_DEADLINE_S, because it imports torch, during which nothing else runs, from a disk that
# may be slow.
HUNG_S = 60.0
STOP_DEADLINE_S = 10.0
TAIL_LINES = 8


class Workers:
    """Started once, closed once. Rank r's log is `learner_<r>.log` in `logs`, the launcher's `learner.log`."""

    def __init__(self, size: int, *, logs: Path | None) -> None:
        """`logs`: None for a temporary directory."""
        self.size = size
        self._scratch = Scratch("learner") if logs is None else None
        self.logs = self._scratch.path if self._scratch is not None else (logs or Path())
        self.pids: dict[int, int] = {}
        self._loop = LoopThread("learner processes")
        self._launcher: ChildProcess | None = None
        self._ends: dict[int, CallingEnd] = {}  # rank -> its connection
        self._death: str | None = None
        self._dying = asyncio.Lock()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All processes are connected when it returns. Raises LearnerError: one ended, or did not start in time."""
        assert self._launcher is None, "started twice"
        make_directory(self.logs)
        log.info("learner: starting %d processes; their logs: %s", self.size, self.logs / "learner*.log")
        try:
            self._loop.run_here(self._start())
        except BaseException:
            self._loop.run_here(self._kill())
            if self._scratch is not None:  # the error names a log
                self._scratch.keep_logs()
            raise

    async def _start(self) -> None:
        with scratch("socket") as home, socket.socket(socket.AF_UNIX) as listener:
            address = home / "s"  # short, because a socket's path has 108 characters at most
            listener.bind(str(address))
            listener.listen(self.size)
            listener.setblocking(False)
            self._launcher = await self._launch(address)
            connected = asyncio.ensure_future(self._accept(listener))
            ended = asyncio.ensure_future(self._launcher.wait())
            try:
                await asyncio.wait({connected, ended}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
                if connected.done():
                    return connected.result()
                if ended.done():
                    raise LearnerError(f"the learner's processes did not start{self._last_lines(None)}")
                raise LearnerError(f"the learner's processes did not start within {START_DEADLINE_S:.0f} s")
            finally:
                connected.cancel()
                ended.cancel()

    async def _launch(self, address: Path) -> ChildProcess:
        threads = max(1, (os.cpu_count() or 1) // self.size)
        with open(self._log(), "wb", opener=owner_only) as file:
            return await ChildProcess.start(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
                    *("--max-restarts", "0", "--nproc-per-node", str(self.size)),
                    *("-m", WORKER, str(address), str(self.logs.resolve())),
                ],
                stdout=file,
                stderr=file,
                environment={"OMP_NUM_THREADS": str(threads), **os.environ},
            )

    async def _accept(self, listener: socket.socket) -> None:
        while len(self._ends) < self.size:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            end = await CallingEnd.open(connection)
            with contextlib.suppress(ConnectionEnded):  # it died; then the launcher ends as well
                rank, pid = map(int, await end.call("identify", {}))
                self._ends[rank], self.pids[rank] = end, pid

    def close(self) -> None:
        """No process is left."""
        self._loop.run_here(self._close())
        self._loop.end(STOP_DEADLINE_S)
        if self._scratch is not None and self._death is None:
            self._scratch.close()
        elif self._scratch is not None:  # the error names a log
            self._scratch.keep_logs()

    async def _close(self) -> None:
        for end in self._ends.values():
            end.hang_up()
        if self._launcher is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._launcher.wait(), STOP_DEADLINE_S)
        await self._kill()
        self._ends = {}

    async def _kill(self) -> None:
        if self._launcher is not None:
            await self._launcher.stop()
        for end in self._ends.values():
            await end.close()

    # --- while they live ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LearnerError: one of them is dead."""
        for rank, end in list(self._ends.items()):
            if end.has_ended:
                self._loop.run_here(self._on_death(rank, end.fault))

    def call(self, method: str, params: dict[str, Any], *, progress: Progress | None = None) -> Any:
        """What the first process answers when all have. Raises the error that all of them answer with.

        LearnerError: one died or hangs, or only some failed; then all of them are gone.
        """
        return self._loop.run_here(self._call(method, params, progress))

    async def _call(self, method: str, params: dict[str, Any], progress: Progress | None) -> Any:
        watchdog = Watchdog(self._ends, START_DEADLINE_S if method == "open" else HUNG_S)
        calls = {}
        for rank, end in self._ends.items():
            end.heard = partial(watchdog.hear, rank)
            calls[rank] = asyncio.ensure_future(end.call(method, params, progress=progress))
        try:
            await self._watch(calls, watchdog)
            failed = {rank: call.exception() for rank, call in calls.items() if call.done() and call.exception()}
            if 0 < len(failed) < self.size:
                rank = min(failed)
                await self._end(f"process {rank} of the learner's {self.size} failed alone: {failed[rank]}")
            return calls[0].result()
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def _watch(self, calls: Mapping[int, "asyncio.Future[Any]"], watchdog: Watchdog) -> None:
        """Returns when all processes have answered, or some failed and the others have not said so in time."""
        waiting = set(calls.values())
        while waiting and not watchdog.has_disagreement:
            _, waiting = await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for rank, call in calls.items():
                if call.done() and isinstance(error := call.exception(), ConnectionEnded):
                    await self._on_death(rank, error.fault)
            if (problem := watchdog.problem()) is not None:
                await self._end(f"{problem}; nothing is lost: run the same command again to go on")

    # --- how they die -------------------------------------------------------------------------------------------------

    async def _on_death(self, rank: int, fault: str) -> NoReturn:
        """Ends the others and says how the first one died. A call and `check` may find it out at the same time."""
        async with self._dying:
            if self._death is None:
                assert self._launcher is not None
                with contextlib.suppress(TimeoutError):  # the launcher knows how its children died
                    await asyncio.wait_for(self._launcher.wait(), 0 if fault else STOP_DEADLINE_S / 2)
                rank, how = (rank, fault) if fault else self._first_death(rank)
                await self._kill()
                self._death = (
                    f"process {rank} of the learner's {self.size} died ({how}); nothing is lost: run the same command "
                    f"again to go on{self._last_lines(rank)}"
                )
        raise LearnerError(self._death)

    async def _end(self, message: str) -> NoReturn:
        await self._kill()
        self._death = message
        raise LearnerError(message)

    def _first_death(self, rank: int) -> tuple[int, str]:
        """Which process died first, and how, from the launcher's last words; `rank` where it says nothing of it.

        The launcher may see several deaths at once. A killed process comes first then, because the others fail when
        they lose it.
        """
        _, _, failures = self._log().read_text(errors="replace").rpartition("\nFailures:")
        others, _, root = failures.partition("Root Cause")
        deaths = [
            (int(rank), int(status))
            for rank, status in re.findall(r"rank\s*: (\d+) .*?\n\s*exitcode\s*: (-?\d+)", root + others)
        ]
        deaths.sort(key=lambda death: death[1] >= 0)
        return (deaths[0][0], describe_end(deaths[0][1])) if deaths else (rank, "how is not known")

    def _log(self, rank: int | None = None) -> Path:
        return self.logs / ("learner.log" if rank is None else f"learner_{rank}.log")

    def _last_lines(self, rank: int | None) -> str:
        """The end of a message; empty where the log is."""
        lines = last_lines(self._log(rank), count=TAIL_LINES)
        return f"; the last lines of {self._log(rank)}:\n{lines}" if lines else ""
