"""An additional node of a learner: `art join`. It joins the first node and forwards its calls to local processes.

The job is local: base model, settings and code come from the configuration on this machine. The network only delivers
scored trajectories, tokens, demos and checkpoints, as JSON and safetensors, and all of them are validated when read.
Local processes only write to a temporary directory. The node ends with the learner.
"""

import asyncio
import base64
import logging
import re
import shutil
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from art_cli.learners import Progress
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.nodes.node_address import (
    VARIABLE,
    Address,
    NodeSetup,
    interface_of,
    keep_alive,
    read_secret,
)
from art_cli.learners.processes.nodes.node_identity import Identity, identity_of
from art_cli.learners.processes.nodes.rendezvous import Introduction, Welcome
from art_cli.learners.processes.remote_calls import LEARNER, RemoteMethod
from art_cli.learners.processes.worker import HEARTBEAT_S
from art_cli.learners.processes.workers import Workers
from art_cli.runtime import threads
from art_cli.runtime.errors import Interrupted, LearnerError, printable
from art_cli.runtime.processes import authenticated
from art_cli.runtime.processes.process_calls import MAX_LINE_BYTES, Json
from art_cli.runtime.processes.process_server import answer

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DIAL_DEADLINE_S = 10.0  # longest wait for one connection attempt
DIAL_EVERY_S = 0.5
REMIND_S = 30.0  # log interval while nothing answers
ADMISSION_DEADLINE_S = 60.0
WATCH_EVERY_S = 1.0
FILE_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/){0,2}[A-Za-z0-9][\w.-]*\.(safetensors|json)", re.ASCII)


async def join(job: Job, *, files: Path, logs: Path, wait_s: float) -> None:
    """Joins a learner and returns when it is closed. `files` is a directory for received checkpoints.

    Raises LearnerError if the first node refuses this node, does not answer within `wait_s`, or fails later; UsageError
    without a secret; Interrupted after a signal.
    """
    assert job.learner.rendezvous is not None, "checked by the configuration"
    address = Address.parse(job.learner.rendezvous)
    secret = read_secret(address)
    interrupted = asyncio.Event()
    with threads.calling(interrupted.set):
        identity = await _or_interrupt(asyncio.to_thread(identity_of, job), interrupted)
        first = await _or_interrupt(_meet(address, secret, identity, wait_s), interrupted)
        log.info("learner: this node belongs to the run at %s; it starts when all nodes are there", address)
        job = _as_decided(job, first)
        setup = NodeSetup(nodes=job.learner.nodes, host=address.host, interface=interface_of(first.own_host))
        node = JoinedNode(job, setup, files=files, logs=logs)
        try:
            await answer(*first.connection, node, heartbeat_s=HEARTBEAT_S, watch=lambda: node.watch(interrupted))
        except authenticated.Tampered as error:
            raise LearnerError(f"the connection to the run at {address} cannot be trusted: {error}") from error
        finally:
            first.connection.writer.close()
            await asyncio.to_thread(node.close)
    if node.end is None:
        raise LearnerError(f"the run at {address} is gone; start it there again, and run the same command again here")
    if node.end:
        raise LearnerError(f"the run at {address} ended: {node.end}")
    log.info("learner: the run at %s has closed its learner", address)


# --- meeting the first node -------------------------------------------------------------------------------------------


class _First(NamedTuple):
    connection: authenticated.Sealed
    dtype: str
    learning_rate: float
    own_host: str  # this machine's address on the connection


def _as_decided(job: Job, first: _First) -> Job:
    """Returns the job with the run's dtype, and with the run's learning rate instead of auto."""
    train = job.train
    if train.learning_rate == "auto":
        train = train.model_copy(update={"learning_rate": first.learning_rate})
    return job.model_copy(update={"model": job.model.model_copy(update={"dtype": first.dtype}), "train": train})


async def _meet(address: Address, secret: bytes, identity: Identity, wait_s: float) -> _First:
    """Returns the first node's connection after admission. Raises LearnerError if it refuses or does not answer."""
    loop = asyncio.get_running_loop()
    deadline, reminder = loop.time() + wait_s, loop.time() + REMIND_S
    while True:
        try:
            async with asyncio.timeout(min(DIAL_DEADLINE_S, wait_s)):
                reader, writer = await asyncio.open_connection(*address, limit=2**20)
            break
        except (OSError, TimeoutError) as error:
            if loop.time() > deadline:
                why = printable(getattr(error, "strerror", None) or "no answer", limit=100)
                raise LearnerError(
                    f"nothing listens at {address} after {wait_s:.0f} s ({why}); start the run there with "
                    "`art train CONFIG`, and look whether this machine reaches that port"
                ) from error
        if loop.time() > reminder:
            log.info("learner: nothing listens at %s yet; waiting for `art train` there", address)
            reminder += REMIND_S
        await asyncio.sleep(DIAL_EVERY_S)
    try:
        keep_alive(writer.get_extra_info("socket"))
        connection = await authenticated.dial(reader, writer, secret)
        connection.writer.write(msgspec.json.encode(Introduction(identity)))
        async with asyncio.timeout(ADMISSION_DEADLINE_S):
            said = msgspec.json.decode(await connection.reader.readline(), type=Welcome)
    except authenticated.SecretRefused as error:
        writer.close()
        raise LearnerError(f"the run at {address} has another {VARIABLE} than this machine") from error
    except (OSError, TimeoutError, ValueError) as error:  # includes msgspec's errors
        writer.close()
        reason = printable(error, limit=200) or "too slow"
        raise LearnerError(f"{address} is not a learner waiting for nodes: {reason}") from error
    if said.refusal:
        writer.close()
        raise LearnerError(f"the run at {address} refuses this node: {printable(said.refusal, limit=1000)}")
    connection.reader.max_bytes = MAX_LINE_BYTES
    return _First(connection, said.dtype, said.learning_rate, str(writer.get_extra_info("sockname")[0]))


# --- its calls --------------------------------------------------------------------------------------------------------


class JoinedNode:
    """Answers the first node. Its public methods receive network data."""

    def __init__(self, job: Job, setup: NodeSetup, *, files: Path, logs: Path) -> None:
        # reason why the learner ended; "": it was closed; None before anything is received
        self.end: str | None = None
        self._job, self._setup, self._files, self._logs = job, setup, files, logs
        self._workers: Workers | None = None
        self._is_busy = False  # a call is running, which notices deaths itself

    def start(self, node: int, port: int) -> None:
        """Starts the local processes. `node` is this node's number in the learner; torch's store is at `port`."""
        if not 0 < node < self._setup.nodes or not 0 < port < 65536 or self._workers is not None:
            raise LearnerError(f"no place for a node: {node}, port {port}")
        setup = self._setup._replace(node=node, port=port)
        workers = Workers(self._job.learner.processes, logs=self._logs, node=setup)
        workers.start()
        self._workers = workers

    def open(self) -> None:
        self._call("open", self._job.model_dump(mode="json"))

    def receive(self, name: str, offset: int, data: str) -> None:
        """Writes part of a checkpoint file for `load`. Raises LearnerError for an invalid file name or offset."""
        if not FILE_NAME.fullmatch(name) or offset < 0:
            raise LearnerError(f"no file of a checkpoint: {printable(name, limit=80)}")
        path = self._files / "loaded" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(base64.b64decode(data, validate=True))

    def __getattr__(self, name: str) -> Callable[..., str]:
        if name not in LEARNER:
            raise AttributeError(name)
        return partial(self._answer, LEARNER[name])

    def _answer(self, method: RemoteMethod[..., Any], given: str = "", progress: Progress | None = None) -> str:
        """Forwards a learner call. Paths are replaced by paths below `files`; files written there are discarded."""
        path = self._files / method.path
        if method.name == "save":
            self._empty(method.path).mkdir()
        try:
            result: str = self._call(method.name, {"given": method.at(path) if method.path else given}, progress)
        finally:
            if method.name == "load":
                self._empty(method.path)
        return result

    async def finish(self, reason: str) -> None:
        """Records that the learner is over, with the reason."""
        self.end = printable(reason, limit=2000)

    async def watch(self, interrupted: asyncio.Event) -> None:
        """Raises LearnerError if a local process dies between calls, and Interrupted after a signal."""
        while True:
            await _or_interrupt(asyncio.sleep(WATCH_EVERY_S), interrupted)
            if self._workers is not None and not self._is_busy:
                await asyncio.to_thread(self._workers.check)

    def close(self) -> None:
        """Ends all local processes."""
        if self._workers is not None:
            self._workers.close()

    def _call(self, method: str, params: Json, progress: Progress | None = None) -> Any:
        if self._workers is None:
            raise LearnerError(f"{method} was called before the processes were started")
        self._is_busy = True
        try:
            return self._workers.call(method, params, progress=progress)
        finally:
            self._is_busy = False

    def _empty(self, name: str) -> Path:
        """Returns the path after removing any existing directory there."""
        shutil.rmtree(self._files / name, ignore_errors=True)
        return self._files / name


# --- signals ----------------------------------------------------------------------------------------------------------


async def _or_interrupt(work: Awaitable[Result], interrupted: asyncio.Event) -> Result:
    """Awaits `work`. Raises Interrupted if a signal arrives before the result."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Interrupted("interrupted; the run on the first node stops as well; the same commands resume it")
        return working.result()
    finally:
        for task in (working, waiting):
            task.cancel()
