"""Rendezvous: the first node of a learner waits here for the others, and admits those that are like it.

A connection may come from anybody until it has proven the secret. Until then no more than 64 bytes of it are read, in
ten seconds at most, and MAX_STRANGERS are heard at once. A refused node gets the reason, and the wait goes on.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from art_cli.learners.processes.nodes.node_address import Address, interface_of, keep_alive
from art_cli.learners.processes.nodes.node_end import NodeEnd
from art_cli.learners.processes.nodes.node_identity import Identity, difference
from art_cli.learners.processes.nodes.node_secret import VARIABLE
from art_cli.runtime.errors import LearnerError, printable
from art_cli.runtime.processes import authenticated
from art_cli.runtime.processes.process_calls import MAX_LINE_BYTES, CallingEnd

log = logging.getLogger(__name__)

MAX_STRANGERS = 16
REMIND_S = 30.0  # interval of the line that nodes are still missing


class Introduction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first message of a node. Example: Introduction({"package torch": "2.13.0", "device": "cpu", ...})"""

    identity: Identity


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to it. Example: Welcome(dtype="float32"), or Welcome(refusal="other settings (loss.kl)")"""

    refusal: str = ""  # "": it is admitted
    dtype: str = ""  # dtype of the base's weights, as the run has decided


class Meeting(NamedTuple):
    """The first node's settings. Example: Meeting(Address("10.0.0.4", 29500), 2, b"...", {...}, "float32", 600.0)"""

    address: Address
    nodes: int  # this one counted
    secret: bytes
    identity: Callable[[], Identity]  # called once, in a thread, because it reads the base's files
    dtype: str
    deadline_s: float  # longest wait for the last node


class Rendezvous:
    """Listens from `open` to `close`. `meet` gives the other nodes."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.interface = interface_of(meeting.address.host)
        self._identity: Identity = {}
        self._server: asyncio.Server | None = None
        self._met: list[NodeEnd] = []
        self._is_full = asyncio.Event()
        self._strangers = 0

    async def meet(self) -> list[NodeEnd]:
        """Returns the other nodes in the order of their coming. Raises LearnerError if some did not come in time."""
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
            raise LearnerError(self._too_late()) from error
        for number, node in enumerate(self._met, 1):
            node.name = f"node {number} ({node.name})"
        return self._met

    async def close(self, reason: str = "") -> None:
        """Lets no more nodes come, and sends those that came the reason of the end; "" is an end that was meant."""
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

    def _too_late(self) -> str:
        meeting, here = self.meeting, 1 + len(self._met)
        return (
            f"{here} of {meeting.nodes} nodes came to {meeting.address} within {meeting.deadline_s:.0f} s; run "
            "`art join CONFIG` on the others, then the same command again here (learner.join_timeout_s waits longer)"
        )

    # --- one connection -----------------------------------------------------------------------------------------------

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one connection, which is a node's or a stranger's. It stays open if its node is admitted."""
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
            log.warning("learner: what came from %s is no node: %s", peer, printable(error, limit=200) or "too slow")
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
        refusal = difference(self._identity, node.identity)
        if not refusal and len(self._met) == self.meeting.nodes - 1:
            refusal = f"the learner has its {self.meeting.nodes} nodes already (learner.nodes)"
        connection.writer.write(msgspec.json.encode(Welcome(refusal, self.meeting.dtype)))
        if refusal:
            log.warning("learner: a node at %s is refused: %s", peer, refusal)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.writer.drain(), authenticated.HANDSHAKE_DEADLINE_S)
            return False
        connection.reader.max_bytes = MAX_LINE_BYTES
        self._met.append(NodeEnd(CallingEnd(*connection), peer))
        log.info("learner: a node at %s is here", peer)
        if len(self._met) == self.meeting.nodes - 1:
            self._is_full.set()
        return True
