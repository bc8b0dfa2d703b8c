"""Rendezvous: the first node waits here for the other nodes and admits those with the same identity; NodeEnd.

Any host may connect until the secret is proven. Before that, a connection may send up to 64 bytes within ten seconds,
and up to MAX_STRANGERS are handled concurrently. A refused node gets the reason, and waiting continues.

The first node calls a NodeEnd like a connection to a local process. Local paths are never sent. To load a checkpoint,
its files are sent one by one; the node writes nothing permanent.
"""

import asyncio
import base64
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.learners import Progress
from art_cli.learners.processes.nodes.node_address import VARIABLE, Address, interface_of, keep_alive
from art_cli.learners.processes.nodes.node_identity import RATE, Identity, difference
from art_cli.learners.processes.remote_calls import LEARNER
from art_cli.runtime.errors import LearnerError, printable
from art_cli.runtime.processes import authenticated
from art_cli.runtime.processes.process_calls import MAX_LINE_BYTES, CallingEnd, ConnectionEnded, Heartbeat, Json

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20  # maximum bytes of a file per message
CHUNK_DEADLINE_S = 60.0  # longest wait for the node to write a chunk
FINISH_DEADLINE_S = 5.0
SENT = ("*.safetensors", "*.json")  # checkpoint files that a learner reads
MAX_STRANGERS = 16
REMIND_S = 30.0  # log interval while nodes are missing


class NodeEnd(CallingEnd):
    """The connection to another node. Its name is the peer's address, then for example "node 1 (10.0.0.5)"."""

    name = ""

    async def call(self, method: str, params: Json, *, progress: Progress | None = None) -> Any:
        """Calls the learner on the node and returns its answer. Raises like CallingEnd.call."""
        if method == "load":
            await self._send_files(LEARNER[method].decode(params["given"])["directory"])
        elsewhere = method == "open" or LEARNER[method].path  # the node uses its local job and directories
        return await super().call(method, {} if elsewhere else params, progress=progress)

    async def start(self, node: int, port: int) -> None:
        """Starts the node's processes, which join the others. Raises like `call`."""
        await super().call("start", {"node": node, "port": port})

    async def _send_files(self, directory: Path) -> None:
        """Sends checkpoint files. Raises LearnerError if the node does not accept them in time."""
        heard, self.heard = self.heard, lambda message: None  # these are not learner calls
        try:
            for name, offset, data in _chunks(directory):
                params = {"name": name, "offset": offset, "data": base64.b64encode(data).decode()}
                async with asyncio.timeout(CHUNK_DEADLINE_S):
                    await super().call("receive", params)
                heard(Heartbeat())
        except TimeoutError as error:
            raise LearnerError(f"{self.name} has not taken a part of {name} for {CHUNK_DEADLINE_S:.0f} s") from error
        finally:
            self.heard = heard

    async def finish(self, reason: str) -> None:
        """Sends the node the reason for ending; "" for a normal end."""
        with contextlib.suppress(TimeoutError, ConnectionEnded, LearnerError):
            await asyncio.wait_for(super().call("finish", {"reason": reason}), FINISH_DEADLINE_S)


def _chunks(directory: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields (name, offset, bytes) for the checkpoint files read by a learner, in chunks."""
    files = sorted(path for pattern in SENT for path in directory.rglob(pattern) if path.is_file())
    for path in files:
        with path.open("rb") as file:
            offset = 0
            while (data := file.read(CHUNK_BYTES)) or not offset:
                yield str(path.relative_to(directory)), offset, data
                offset += max(1, len(data))


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node's opening message. Example: Introduction({"package torch": "2.13.0", "device": "cpu", ...})"""

    identity: Identity


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reply. Example: Welcome("", "float32", 2e-4), or Welcome(refusal="other settings (loss.kl)")"""

    refusal: str = ""  # "": admitted
    dtype: str = ""  # base weights dtype, as decided by the run
    learning_rate: float = 0.0  # the run's rate, for a node whose rate is auto


class Meeting(NamedTuple):
    """The first node's settings. Example: Meeting(Address("10.0.0.4", 29500), 2, b"", {...}, "float32", 2e-4, 60.0)"""

    address: Address
    nodes: int  # including the first node
    secret: bytes
    identity: Callable[[], Identity]  # called once, in a thread, because it reads the base model's files
    dtype: str
    learning_rate: float
    deadline_s: float  # longest wait for the last node


class Rendezvous:
    """Listens from `meet` to `close`."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.interface = interface_of(meeting.address.host)
        self._identity: Identity = {}
        self._server: asyncio.Server | None = None
        self._met: list[NodeEnd] = []
        self._is_full = asyncio.Event()
        self._strangers = 0

    async def meet(self) -> list[NodeEnd]:
        """Returns the other nodes in order of arrival. Raises LearnerError if some do not arrive in time."""
        address, missing = self.meeting.address, self.meeting.nodes - 1
        self._identity = await asyncio.to_thread(self.meeting.identity)
        try:
            self._server = await asyncio.start_server(self._hear, *address, limit=2**20)
        except OSError as error:
            cure = f"learner.rendezvous is an address of this machine with a free port: {error.strerror or error}"
            raise LearnerError(f"cannot listen at {address}; {cure}") from error
        log.info("learner: nodes that are missing at %s: %d; run `art join CONFIG` on each", address, missing)
        try:
            async with asyncio.timeout(self.meeting.deadline_s):
                await self._wait()
        except TimeoutError as error:
            here, deadline_s = 1 + len(self._met), self.meeting.deadline_s
            raise LearnerError(
                f"{here} of {self.meeting.nodes} nodes came to {address} within {deadline_s:.0f} s; run `art "
                "join CONFIG` on the others, then the same command again here (learner.join_timeout_s waits longer)"
            ) from error
        for number, node in enumerate(self._met, 1):
            node.name = f"node {number} ({node.name})"
        return self._met

    async def close(self, reason: str = "") -> None:
        """Stops admitting nodes and sends the admitted nodes the reason for ending; "" for a normal end."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(node.finish(reason) for node in self._met))

    async def _wait(self) -> None:
        while not self._is_full.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_full.wait(), REMIND_S)
                return
            here = 1 + len(self._met)
            log.info("learner: %d of %d nodes are at %s", here, self.meeting.nodes, self.meeting.address)

    # --- one connection -----------------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection from a node or stranger. It stays open if the node is admitted."""
        peer = str((writer.get_extra_info("peername") or ["?"])[0])
        if self._strangers >= MAX_STRANGERS:
            writer.close()
            return
        self._strangers += 1
        is_admitted = False
        try:
            keep_alive(writer.get_extra_info("socket"))
            is_admitted = await self._introduce(reader, writer, peer)
        except authenticated.SecretRefused:
            log.warning("learner: a node at %s has another %s than this one, and is refused", peer, VARIABLE)
        except (OSError, TimeoutError, ValueError) as error:
            why = printable(error, limit=200) or "too slow"
            log.warning("learner: the connection from %s is not a node: %s", peer, why)
        finally:
            self._strangers -= 1
            if not is_admitted:
                writer.close()

    async def _introduce(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> bool:
        connection = await authenticated.listen(reader, writer, self.meeting.secret)
        async with asyncio.timeout(authenticated.HANDSHAKE_DEADLINE_S):
            # msgspec's errors are ValueErrors
            node = msgspec.json.decode(await connection.reader.readline(), type=Introduction)
        self._met = self._met if self._is_full.is_set() else [node for node in self._met if not node.has_ended]
        refusal = difference(self._identity, {RATE: self._identity[RATE]} | node.identity)
        if not refusal and len(self._met) == self.meeting.nodes - 1:
            refusal = f"the learner has its {self.meeting.nodes} nodes already (learner.nodes)"
        connection.writer.write(msgspec.json.encode(Welcome(refusal, self.meeting.dtype, self.meeting.learning_rate)))
        if refusal:
            log.warning("learner: a node at %s is refused: %s", peer, refusal)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.writer.drain(), authenticated.HANDSHAKE_DEADLINE_S)
            return False
        connection.reader.max_bytes = MAX_LINE_BYTES
        self._met.append(end := NodeEnd(*connection))
        end.name = peer
        log.info("learner: a node at %s is here", peer)
        if len(self._met) == self.meeting.nodes - 1:
            self._is_full.set()
        return True
