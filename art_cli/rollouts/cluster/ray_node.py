"""NodeActor: plays attempts on a Ray node, with the same classes as without a cluster.

The user's code runs in a child process of the actor. Its objects never reach Ray, and an attempt that kills its process
does not affect the node. All input and output is JSON lines (runtime/processes/process_calls.py). Needs only the
standard library.
"""

import asyncio
import contextlib
import http.client
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

from art_cli.rollouts.attempt_errors import Json
from art_cli.rollouts.command_rollout import CommandRollout
from art_cli.rollouts.process import ProcessRollout
from art_cli.rollouts.process_worker import ServedRollout
from art_cli.runtime.errors import ArtError, RolloutError
from art_cli.runtime.processes.process_calls import Call, Raised, Returned, decode, encode

REACH_DEADLINE_S = 10.0  # longest wait for the gateway's first answer
QUIET_S = 20.0  # longest wait for output before an empty answer
PAUSE_S = 0.5  # pause between two pieces of output
MAX_OUTPUT = 2**16  # maximum buffered characters of output


class NodeActor:
    """The actor. One for each process of rollouts."""

    def __init__(self) -> None:
        self._served = ServedNode()

    async def where(self) -> str:
        """Returns the machine's name after placement."""
        return socket.gethostname()

    async def answer(self, line: bytes) -> bytes:
        """Returns the answer to one call, as lines both."""
        call = decode(line, (Call,))
        try:
            return encode(Returned(call.id, await getattr(self._served, call.method)(**call.params)))
        except ArtError as error:
            return encode(Raised(call.id, type(error).__name__, str(error)))


class ServedNode(ServedRollout):
    """The methods that ray_driver.py calls."""

    def __init__(self) -> None:
        self._printed = Printed()

    async def load(
        self, entry: str | None, environment: Json | None, command: list[str] | None, gateway: str, variables: Json
    ) -> str:
        """Returns the Python version after loading the rollout. Raises UsageError or RolloutError."""
        await asyncio.to_thread(_reach, gateway)
        os.environ.update(variables)
        if command is not None:
            self._rollout = CommandRollout(command, directory=Path.cwd(), env=list(variables))
            return sys.version.split()[0]
        assert entry is not None, "a rollout without a command has an entry"
        here = Path.cwd()
        rollout = ProcessRollout(entry, directory=here, environment=environment, printed=self._printed.add)
        try:
            await rollout.open()
        except ArtError as error:  # paths as the user knows them
            raise type(error)(str(error).replace(f"{here}{os.sep}", "")) from error
        self._rollout = rollout
        return rollout.version

    async def close(self) -> None:
        """Closes the rollout; a waiting `output` call returns immediately."""
        await super().close()
        self._printed.end()

    async def output(self) -> str:
        """Returns the output since the last call, or "" after a timeout."""
        return await self._printed.take()


class Printed:
    """The output of the attempts, up to MAX_OUTPUT characters at a time."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._room = MAX_OUTPUT
        self._num_dropped = 0
        self._is_there = asyncio.Event()
        self._is_over = asyncio.Event()

    def add(self, text: str) -> None:
        kept = text[: self._room]
        self._room -= len(kept)
        self._num_dropped += len(text) - len(kept)
        self._parts.append(kept)
        self._is_there.set()

    def end(self) -> None:
        self._is_over.set()
        self._is_there.set()

    async def take(self) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_there.wait(), QUIET_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_over.wait(), PAUSE_S)
        dropped = f"\n({self._num_dropped:,} more characters were printed)\n" if self._num_dropped else ""
        text = "".join(self._parts) + dropped
        self._parts, self._room, self._num_dropped = [], MAX_OUTPUT, 0
        if not self._is_over.is_set():
            self._is_there.clear()
        return text


def _reach(gateway: str) -> None:
    """Returns when the gateway has answered. Raises RolloutError: this node cannot reach it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{gateway}/health", timeout=REACH_DEADLINE_S) as answer:
            json.load(answer)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        cure = "set gateway.host to an address that the nodes can reach, or rollout.cluster.gateway_url"
        why = getattr(reason, "strerror", None) or str(reason)
        raise RolloutError(f"it cannot reach the gateway at {gateway}: {why}; {cure}") from error
