"""Workers: a learner's worker processes, as seen by their owner. ParallelLearner: a Learner running on them.

torchrun starts the processes without restarts, as a single child of this process. They connect to a Unix socket in
a directory only accessible to this user, and answer calls (runtime/processes/process_calls.py). Every call goes to all
processes. With several nodes, it also goes once to every other node, which runs Workers as well.

They live and die together: if one dies or hangs, all are ended. They also end if this process dies
(runtime/processes/supervisor.py). Watchdog detects hanging processes from the messages during one call, but ends
nothing itself. Its clock stops while this process is stopped (Ctrl-Z), because messages that arrived meanwhile must be
processed before any timeout.

ParallelLearner holds no weights. Each method (remote_calls.py) calls all processes, which are TorchLearners sharing one
sharded model (worker.py). Checkpoints have the same format as a one-process learner's, and both can resume each other's
checkpoints.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from art_cli.learners import Learner, Progress
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.nodes.node_address import (
    VARIABLE,
    Address,
    NodeSetup,
    interface_of,
    read_secret,
    reserved_port,
)
from art_cli.learners.processes.nodes.node_identity import identity_of
from art_cli.learners.processes.nodes.rendezvous import Meeting, NodeEnd, Rendezvous
from art_cli.learners.processes.remote_calls import LOST, RemoteLearner
from art_cli.runtime.errors import LearnerError, PeersLost, ProcessDied
from art_cli.runtime.processes.child import ChildProcess, child_environment, describe_end, last_lines
from art_cli.runtime.processes.process_calls import (
    MAX_LINE_BYTES,
    Advance,
    CallingEnd,
    ConnectionEnded,
    Message,
    Raised,
    Returned,
)
from art_cli.runtime.scratch import Scratch, make_directory, owner_only, scratch
from art_cli.runtime.threads import LoopThread

log = logging.getLogger(__name__)

POLL_S = 0.2  # polling interval of the watchdog
PACK_DEADLINE_S = 900.0  # longest wait for the initial pack, including all preparation; some calls report none
# calls that read or write disks, possibly downloading a model, and report no packs
FROM_DISK, DISK_S = ("open", "save", "load"), 7200.0
# later packs may take 10 times as long as the longest so far, but at least 60 s
PACK_FLOOR_S, TIMES_LONGEST = 60.0, 10.0
# longest time between the earliest and latest error; all processes run the same checks on the same data
AGREE_DEADLINE_S = 10.0
MOST_GIVEN = MAX_LINE_BYTES - 2**16  # characters of a call's parameters
LAUNCHER, WORKER = (f"art_cli.learners.processes.{name}" for name in ("launcher", "worker"))
DEATHS_FILE = ".deaths.json"  # in the log directory
START_DEADLINE_S = 300.0  # longest wait for all processes to connect: Python has started, torch is not imported yet
# Longest silence of a working process. A heartbeat comes every second, so this is long enough for a machine that swaps.
# The opening call has START_DEADLINE_S instead, because it imports torch, possibly from a slow disk, and nothing else
# runs meanwhile.
HUNG_S = 60.0
STOP_DEADLINE_S = 10.0
SETTLE_S = 8.0  # longest wait for a node's report after local processes have lost others
AGAIN = "nothing is lost: run the same command again to continue"
AGAIN_ON_NODES = "nothing is lost: run the same commands again, here and on the other nodes, to continue"
TAIL_LINES = 8
Calls = Mapping[str, "asyncio.Future[Any]"]  # process or node name -> its answer


class Watchdog:
    """Watches one call. Example: `hear("process 1", Heartbeat())` until `problem()` returns an error."""

    def __init__(
        self,
        names: Iterable[str],
        hung_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet_s: float = PACK_DEADLINE_S,
    ) -> None:
        """`hung_s` is the longest silence of a working process, `quiet_s` the longest wait for the initial pack."""
        self._hung_s, self._quiet_s = hung_s, quiet_s
        self._clock, self._last, self._now = clock, clock(), 0.0
        self._heard = dict.fromkeys(names, 0.0)  # last message time for every process still working
        self._advanced = 0.0  # when the newest pack was done
        self._longest: float | None = None  # longest time from one pack to the next
        self._failed: float | None = None  # time of the earliest error

    def hear(self, name: str, message: Message) -> None:
        self._tick()
        self._heard[name] = self._now
        match message:
            case Advance():
                self._longest = max(self._longest or 0.0, self._now - self._advanced)
                self._advanced = self._now
            case Raised() | Returned():
                del self._heard[name]
                if isinstance(message, Raised) and self._failed is None:
                    self._failed = self._now

    @property
    def has_disagreement(self) -> bool:
        """True if some processes have failed and the others have not failed in time."""
        self._tick()
        return self._failed is not None and self._now - self._failed > AGREE_DEADLINE_S

    def problem(self) -> str | None:
        """Returns an error message for a hanging process; None while nothing is overdue."""
        self._tick()
        for name, heard in self._heard.items():
            if self._now - heard > self._hung_s:
                state = "it lives, and has not moved" if name.startswith("process ") else "nothing has come from it"
                return f"learner {name} hangs: {state} for {self._hung_s:.0f} s"
        limit = self._quiet_s
        if self._longest is not None:
            limit = min(limit, max(PACK_FLOOR_S, TIMES_LONGEST * self._longest))
        if self._failed is None and self._now - self._advanced > limit:
            return f"the learner's processes hang: they have done nothing for {limit:.0f} s"
        return None

    def _tick(self) -> None:
        now = self._clock()
        self._now += min(now - self._last, 2 * POLL_S)
        self._last = now


class Workers:
    """Started once, closed once. Rank r logs to `learner_<r>.log` in `logs`, the launcher to `learner.log`."""

    def __init__(
        self,
        size: int,
        *,
        logs: Path | None,
        rendezvous: Rendezvous | None = None,
        node: NodeSetup | None = None,
    ) -> None:
        """`size` is the number of local processes. Without `logs`, logs go to a temporary directory.

        `rendezvous` is where the first node waits for other nodes; `node` describes an additional node.
        """
        node = node or NodeSetup(interface=interface_of("127.0.0.1"))
        nodes = rendezvous.meeting.nodes if rendezvous is not None else node.nodes
        self.size = size * nodes  # total number of processes across all nodes
        self._here, self._rendezvous, self._node = size, rendezvous, node._replace(nodes=nodes)
        self._again = AGAIN if nodes == 1 else AGAIN_ON_NODES
        self._scratch = Scratch("learner") if logs is None else None
        self.logs = self._scratch.path if self._scratch is not None else (logs or Path())
        self._deaths_file = self.logs / DEATHS_FILE
        self.pids: dict[int, int] = {}
        self._loop = LoopThread("learner processes")
        self._launcher: ChildProcess | None = None
        self._ends: dict[str, CallingEnd] = {}  # "process 0" or "node 1 (10.0.0.5)" -> its connection
        self._death: LearnerError | None = None
        self._dying = asyncio.Lock()

    # --- beginning and end --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts and connects all processes. Raises LearnerError if one exits or they do not start in time."""
        assert self._launcher is None, "started twice"
        make_directory(self.logs)
        log.info("learner: processes to start here: %d; their logs: %s", self._here, self.logs / "learner*.log")
        try:
            self._loop.run_here(self._start())
        except BaseException as error:
            interrupted = LearnerError("it was interrupted while starting")
            self._death = error if isinstance(error, LearnerError) else interrupted
            self._loop.run_here(self._let_nodes_go())
            self._loop.run_here(self._kill())
            if self._scratch is not None:  # the error names a log
                self._scratch.keep_logs()
            raise

    async def _start(self) -> None:
        nodes: list[NodeEnd] = []
        if self._rendezvous is not None:
            nodes = await self._rendezvous.meet()
            meeting = self._rendezvous.meeting
            self._node = NodeSetup(0, meeting.nodes, meeting.address.host, interface=self._rendezvous.interface)
        with contextlib.ExitStack() as held:
            home = held.enter_context(scratch("socket"))
            listener = held.enter_context(socket.socket(socket.AF_UNIX))
            if self._node.node == 0:
                self._node = self._node._replace(port=held.enter_context(reserved_port()))
            address = home / "s"  # short, because socket paths are limited to 108 characters
            listener.bind(str(address))
            listener.listen(self._here)
            listener.setblocking(False)
            self._launcher = await self._launch(address)
            connected = asyncio.ensure_future(self._join(listener, nodes))
            ended = asyncio.ensure_future(self._launcher.wait())
            try:
                await asyncio.wait({connected, ended}, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
                if connected.done():
                    connected.result()
                    if self._node.node == 0:
                        place = f"*:{self._node.port} without a key: keep others from it (docs/safety.md)"
                        log.info("learner: torch's store listens on %s", place)
                    return
                if ended.done():
                    raise LearnerError(f"the learner's processes did not start{self._last_lines(self._log())}")
                raise LearnerError(f"the learner's processes did not start within {START_DEADLINE_S:.0f} s")
            finally:
                connected.cancel()
                ended.cancel()

    async def _launch(self, address: Path) -> ChildProcess:
        threads, node = max(1, (os.cpu_count() or 1) // self._here), self._node
        # each process would otherwise start up to 32 more to compile FlexAttention's kernel
        environment = {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1", **child_environment()}
        environment.pop(VARIABLE, None)
        if node.interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                environment.setdefault(name, node.interface)
        self._deaths_file.unlink(missing_ok=True)
        with open(self._log(), "wb", opener=owner_only) as file:
            return await ChildProcess.start(
                [
                    # not c10d's rendezvous, whose store holds a pickle and listens on every network
                    *(sys.executable, "-m", LAUNCHER, str(self._deaths_file), "--rdzv-backend", "static"),
                    *("--nnodes", str(node.nodes), "--node-rank", str(node.node)),
                    *("--master-addr", node.host, "--master-port", str(node.port)),
                    *("--rdzv-conf", f"timeout={START_DEADLINE_S:.0f}", "--local-addr", node.host),
                    *("--max-restarts", "0", "--nproc-per-node", str(self._here)),
                    *("-m", WORKER, str(address), str(self.logs.resolve())),
                ],
                stdout=file,
                stderr=file,
                environment=environment,
            )

    async def _join(self, listener: socket.socket, nodes: Sequence[NodeEnd]) -> None:
        """Connects all processes and nodes. Raises LearnerError if a node's processes did not start."""
        await asyncio.gather(self._accept(listener), *(self._start_node(*each) for each in enumerate(nodes, 1)))
        self._ends = dict(sorted(self._ends.items(), key=lambda item: isinstance(item[1], NodeEnd)))

    async def _accept(self, listener: socket.socket) -> None:
        ends: dict[int, CallingEnd] = {}
        while len(ends) < self._here:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            end = await CallingEnd.open(connection)
            with contextlib.suppress(ConnectionEnded):  # it died; the launcher then ends as well
                rank, pid = map(int, await end.call("identify", {}))
                ends[rank], self.pids[rank] = end, pid
        self._ends |= {f"process {rank}": ends[rank] for rank in sorted(ends)}

    async def _start_node(self, number: int, node: NodeEnd) -> None:
        self._ends[node.name] = node
        try:
            await node.start(number, self._node.port)
        except ConnectionEnded as error:
            raise LearnerError(f"{node.name} is gone: {error.fault or 'its connection ended'}") from error
        except LearnerError as error:
            raise LearnerError(f"{node.name}: {error}") from error

    def close(self) -> None:
        """Ends all processes."""
        self._loop.run_here(self._close())
        self._loop.end(STOP_DEADLINE_S)
        if self._scratch is not None and self._death is None:
            self._scratch.close()
        elif self._scratch is not None:  # the error names a log
            self._scratch.keep_logs()

    async def _close(self) -> None:
        await self._let_nodes_go()
        for end in self._ends.values():
            end.hang_up()
        if self._launcher is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._launcher.wait(), STOP_DEADLINE_S)
        await self._kill()
        self._ends = {}

    async def _let_nodes_go(self) -> None:
        """Tells the other nodes the reason and ends them."""
        reason = "" if self._death is None else str(self._death).split("\n", 1)[0]
        if self._rendezvous is not None:
            await self._rendezvous.close(reason)

    async def _kill(self) -> None:
        if self._launcher is not None:
            await self._launcher.stop()
        for end in self._ends.values():
            await end.close()

    # --- while they live ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LearnerError if any process is dead."""
        for name, end in list(self._ends.items()):
            if end.has_ended:
                self._loop.run_here(self._on_death(name, {}))

    def call(self, method: str, params: dict[str, Any], *, progress: Progress | None = None) -> Any:
        """Calls all processes and returns rank 0's answer. If all raise, raises the error.

        Raises LearnerError if a process dies or hangs, or only some fail; then all processes are ended.
        """
        return self._loop.run_here(self._call(method, params, progress))

    async def _call(self, method: str, params: dict[str, Any], progress: Progress | None) -> Any:
        hung_s = START_DEADLINE_S if method == "open" else HUNG_S
        watchdog = Watchdog(self._ends, hung_s, quiet_s=DISK_S if method in FROM_DISK else PACK_DEADLINE_S)
        calls = {}
        for name, end in self._ends.items():
            end.heard = partial(watchdog.hear, name)
            calls[name] = asyncio.ensure_future(end.call(method, params, progress=progress))
        try:
            await self._watch(calls, watchdog)
            failed = {name: call.exception() for name, call in calls.items() if call.done() and call.exception()}
            if 0 < len(failed) < len(calls):
                name = next(iter(failed))
                await self._end(f"{self._among(name)} failed alone: {failed[name]}")
            return next(iter(calls.values())).result()
        finally:
            for call in calls.values():
                call.cancel()
            await asyncio.gather(*calls.values(), return_exceptions=True)

    async def _watch(self, calls: "Calls", watchdog: Watchdog) -> None:
        """Returns when all processes have answered, or some failed and the others have not failed in time."""
        waiting = set(calls.values())
        while waiting and not watchdog.has_disagreement:
            _, waiting = await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for name, call in calls.items():
                if call.done() and isinstance(call.exception(), ConnectionEnded | ProcessDied | PeersLost):
                    await self._on_death(name, calls)
            if (problem := watchdog.problem()) is not None:
                await self._end(f"{problem}; {self._again}")

    # --- how they die -------------------------------------------------------------------------------------------------

    async def _on_death(self, name: str, calls: "Calls") -> NoReturn:
        """Ends the other processes and raises the root cause. A call and `check` may notice a death concurrently."""
        async with self._dying:
            if self._death is None:
                self._death = await self._find_cause(name, calls)
                await self._let_nodes_go()
                await self._kill()
        raise self._death

    async def _find_cause(self, name: str, calls: "Calls") -> LearnerError:
        """Returns the root cause. `name` was noticed before the others, but may itself have lost another process."""
        end = self._ends[name]
        if not isinstance(end, NodeEnd) and end.fault:
            return ProcessDied(f"{self._among(name)} died ({end.fault}); {self._again}")
        here: tuple[str, int | None] | None = None
        if any(each.has_ended for each in self._ends.values() if not isinstance(each, NodeEnd)):
            here = await self._first_death(name)
            if here[1] != LOST:
                return ProcessDied(self._describe(*here))
        if (elsewhere := await self._find_cause_elsewhere(calls)) is not None:
            return elsewhere
        if here is not None:
            return PeersLost(self._describe(*here))
        return ProcessDied(f"{self._among(name)} died; {self._again}")

    async def _find_cause_elsewhere(self, calls: "Calls") -> LearnerError | None:
        """Returns how a node or a remote process ended; None without a report within SETTLE_S."""
        nodes = {name: end for name, end in self._ends.items() if isinstance(end, NodeEnd)}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        while nodes and loop.time() < deadline:
            for name in nodes:
                error = calls[name].exception() if name in calls and calls[name].done() else None
                if isinstance(error := error or nodes[name].farewell, ProcessDied):
                    return ProcessDied(f"{name}: {error}")
            for name, end in nodes.items():
                if end.has_ended and not isinstance(end.farewell, PeersLost):
                    how = f"{name}: {end.fault}" if end.fault else f"{self._among(name)} is gone"
                    return ProcessDied(f"{how}; {self._again}")
            await asyncio.sleep(POLL_S)
        return None

    async def _end(self, message: str) -> NoReturn:
        self._death = LearnerError(message)
        await self._let_nodes_go()
        await self._kill()
        raise self._death

    async def _first_death(self, name: str) -> tuple[str, int | None]:
        """Returns the local process that died earliest, with its exit status; (name, None) if the launcher left no
        record.

        The launcher may notice several deaths together. Killed processes sort before failed ones, because others fail
        when they lose a killed process; processes with status LOST sort last.
        """
        assert self._launcher is not None
        deaths: list[tuple[int, int]] = []
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._launcher.wait(), STOP_DEADLINE_S / 2)
        with contextlib.suppress(OSError, ValueError):
            deaths = [(int(rank), int(status)) for rank, status in json.loads(self._deaths_file.read_bytes())]
        deaths.sort(key=lambda death: (death[1] >= 0, death[1] == LOST))
        return (f"process {deaths[0][0]}", deaths[0][1]) if deaths else (name, None)

    def _describe(self, name: str, status: int | None) -> str:
        how = "exit status unknown" if status is None else describe_end(status)
        if status == LOST:
            how = "it lost another process"
        log = self._log(name.removeprefix("process ")) if name.startswith("process ") else self._log()
        return f"{self._among(name)} died ({how}); {self._again}{self._last_lines(log)}"

    def _among(self, name: str) -> str:
        """Returns the name with the total. Example: "learner process 1 of 4"."""
        return f"learner {name} of {self.size if name.startswith('process ') else self._node.nodes}"

    def _log(self, rank: str | None = None) -> Path:
        return self.logs / ("learner.log" if rank is None else f"learner_{rank}.log")

    def _last_lines(self, log: Path) -> str:
        """Formats the last log lines for an error message; "" for an empty log."""
        lines = last_lines(log, count=TAIL_LINES)
        return f"; the last lines of {log}:\n{lines}" if lines else ""


class ParallelLearner(RemoteLearner, Learner):
    """The Learner protocol over Workers, which are started when needed."""

    def __init__(self, job: Job, workers: Workers) -> None:
        self.job, self.workers = job, workers
        self._is_open = False

    def call(self, method: str, given: str, progress: Progress | None) -> str:
        if not self._is_open:
            self.start()
            self.workers.call("open", self.job.model_dump(mode="json"))
            self._is_open = True
        if len(given) > MOST_GIVEN:
            size, most = (f"{num * 3 / 4 / 1e9:.1f} GB" for num in (len(given), MOST_GIVEN))
            message = f"{size} of attempts or examples, over the {most} that the learner's processes accept"
            raise LearnerError(f"{method}: {message}")
        result: str = self.workers.call(method, {"given": given}, progress=progress)
        return result

    def start(self) -> None:
        if not self.workers.pids:
            self.workers.start()

    def check(self) -> None:
        self.workers.check()

    def close(self) -> None:
        self.workers.close()


def parallel_learner(job: Job, *, logs: Path | None) -> ParallelLearner:
    """Returns a job's learner, with logs in `logs` (default: a temporary directory).

    Raises UsageError if other machines could reach the rendezvous and no secret is set.
    """
    rendezvous = None
    if job.learner.nodes > 1:
        assert job.learner.rendezvous is not None, "checked by the configuration"
        address = Address.parse(job.learner.rendezvous)
        rendezvous = Rendezvous(
            Meeting(
                address=address,
                nodes=job.learner.nodes,
                secret=read_secret(address),
                identity=partial(identity_of, job),
                dtype=job.model.dtype,
                learning_rate=job.train.rate,
                deadline_s=job.learner.join_timeout_s,
            )
        )
    return ParallelLearner(job, Workers(job.learner.processes, logs=logs, rendezvous=rendezvous))
