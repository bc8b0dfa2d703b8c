"""A process that plays attempts at the user's function; start.py begins it, process.py asks it.

Standard library only, here and in all that is imported: its Python may have none of our dependencies.
When the other end of its socket closes, however that process died, this one lets go of what it plays and ends.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from art_cli import log, threads
from art_cli.errors import ArtError, message_of
from art_cli.rollouts import Rollout
from art_cli.rollouts.attempt import AttemptError
from art_cli.rollouts.function import load_function
from art_cli.rollouts.messages import (
    MAX_LINE_BYTES,
    TO_PROCESS,
    Cancel,
    Done,
    Explain,
    Failed,
    FromProcess,
    Guess,
    Play,
    Ready,
    Refused,
    decode,
    encode,
)
from art_cli.rollouts.policy import Policy


def main() -> None:
    descriptor, entry, directory = sys.argv[1:]
    log.set_up()
    threads.run(_serve(socket.socket(fileno=int(descriptor)), entry, Path(directory)))
    os._exit(0)  # threads that a function left behind keep nothing


async def _serve(connection: socket.socket, entry: str, directory: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)
    worker = _Worker(writer)
    try:
        rollout = load_function(entry, directory)
    except ArtError as error:
        worker.send(Refused(0, type(error).__name__, str(error)))
        await writer.drain()
        return
    worker.send(Ready(0, sys.version.split()[0]))
    await worker.serve(reader, rollout)
    await rollout.close()


class _Worker:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def send(self, message: FromProcess) -> None:
        self._writer.write(encode(message))

    async def serve(self, reader: asyncio.StreamReader, rollout: Rollout) -> None:
        """Until the other end is gone."""
        while line := await reader.readline():
            message = decode(line, TO_PROCESS)
            match message:
                case Play():
                    self._begin(message.id, self._play(rollout, message))
                case Explain():
                    self._begin(message.id, self._explain(rollout, message))
                case Cancel():
                    if (running := self._tasks.get(message.id)) is not None:
                        running.cancel()

    def _begin(self, id: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(id))

    async def _play(self, rollout: Rollout, asked: Play) -> None:
        policy = Policy(base_url=asked.base_url, api_key=asked.api_key, model=asked.model, step=asked.step)
        try:
            outcome = await rollout.play(policy, asked.scenario)
            self.send(Done(asked.id, outcome.reward, outcome.metrics, outcome.metadata))
        except AttemptError as error:
            self.send(Failed(asked.id, error.kind, error.message, error.is_transport))
        except ArtError as error:
            self.send(Refused(asked.id, type(error).__name__, str(error)))
        except Exception as error:  # the boundary to a defect of ours: an attempt without an answer waits for ever
            self.send(Failed(asked.id, type(error).__name__, message_of(error), False))

    async def _explain(self, rollout: Rollout, asked: Explain) -> None:
        self.send(Guess(asked.id, await rollout.explain_timeout()))
