"""NodeEnd: another node of a learner, as the first one calls it: like the connection to one of its processes.

No path of this machine is sent. A checkpoint that is loaded goes there file by file; nothing is written there.
"""

import asyncio
import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from art_cli.learners import Progress
from art_cli.learners.processes.remote_calls import LEARNER
from art_cli.runtime.errors import ArtError, LearnerError
from art_cli.runtime.processes.process_calls import CallingEnd, ConnectionEnded, Heartbeat, Json, Message

CHUNK_BYTES = 4 * 2**20  # largest part of a file in one message
CHUNK_DEADLINE_S = 60.0  # longest wait until the node has written one
FINISH_DEADLINE_S = 5.0
SENT = ("*.safetensors", "*.json")  # the files of a checkpoint that a learner reads


class NodeEnd:
    """Example: `NodeEnd(end, "node 1 (10.0.0.5)")`"""

    def __init__(self, end: CallingEnd, name: str) -> None:
        self.name = name
        self._end = end

    @property
    def has_ended(self) -> bool:
        return self._end.has_ended

    @property
    def fault(self) -> str:
        return self._end.fault

    @property
    def farewell(self) -> ArtError | None:
        return self._end.farewell

    def listen(self, heard: Callable[[Message], None]) -> None:
        """Has `heard` called with each message that comes."""
        self._end.heard = heard

    async def call(self, method: str, params: Json, *, progress: Progress | None = None) -> Any:
        """Returns what the node's processes answer to a call of the learner. Raises as CallingEnd.call does."""
        if method == "load":
            await self._send_files(LEARNER[method].decode(params["given"])["directory"])
        elsewhere = method == "open" or LEARNER[method].path  # the node has its own job and directories
        return await self._end.call(method, {} if elsewhere else params, progress=progress)

    async def start(self, node: int, port: int) -> None:
        """Starts the node's processes, which meet the others. Raises as `call` does."""
        await self._end.call("start", {"node": node, "port": port})

    async def _send_files(self, directory: Path) -> None:
        """Sends the files. Raises LearnerError if the node did not take them in time."""
        heard, self._end.heard = self._end.heard, lambda message: None  # these calls are not the learner's
        try:
            for name, offset, data in _chunks(directory):
                params = {"name": name, "offset": offset, "data": base64.b64encode(data).decode()}
                async with asyncio.timeout(CHUNK_DEADLINE_S):
                    await self._end.call("receive", params)
                heard(Heartbeat())
        except TimeoutError as error:
            raise LearnerError(f"{self.name} has not taken a part of {name} for {CHUNK_DEADLINE_S:.0f} s") from error
        finally:
            self._end.heard = heard

    async def finish(self, reason: str) -> None:
        """Sends the node the reason why its work is over: "" for an end that was meant."""
        with contextlib.suppress(TimeoutError, ConnectionEnded, LearnerError):
            await asyncio.wait_for(self._end.call("finish", {"reason": reason}), FINISH_DEADLINE_S)

    def hang_up(self) -> None:
        self._end.hang_up()

    async def close(self) -> None:
        await self._end.close()


def _chunks(directory: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yields (name, offset, bytes) of each part of what a learner reads in a checkpoint."""
    files = sorted(path for pattern in SENT for path in directory.rglob(pattern) if path.is_file())
    for path in files:
        with path.open("rb") as file:
            offset = 0
            while (data := file.read(CHUNK_BYTES)) or not offset:
                yield str(path.relative_to(directory)), offset, data
                offset += max(1, len(data))
