"""Calls to another process: what comes back, over every kind of stream, and from an end that misbehaves."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from art_cli.runtime.errors import ArtError, ConfigError, DataError, LearnerError, RolloutError, UsageError
from art_cli.runtime.processes import process_calls as calls
from art_cli.runtime.processes.child import ChildProcess
from art_cli.runtime.processes.process_calls import (
    FROM_PROCESS,
    TO_PROCESS,
    Advance,
    Call,
    CallingEnd,
    Cancel,
    ConnectionEnded,
    Heartbeat,
    Message,
    Raised,
    Returned,
    decode,
    encode,
    error_named,
)
from tests.support.attacks.hostile import NUM_MUTATIONS, mutations
from tests.support.processes.waiting import until

MESSAGES = [
    Call(3, "play", {"id": "é", "deep": [{"a": [1, 2.5, None, True]}]}),
    Cancel(4),
    Heartbeat(),
    Advance(5, 3, 8),
    Returned(5, {"reward": -1.5, "board": ["X", "\n"]}),
    Returned(6, None),
    Raised(6, "LearnerError", "'x'\n"),
]

# A process that answers calls: `child.py KIND ADDRESS`.
CHILD = """
import asyncio, os, socket, sys, time
from art_cli.runtime.errors import LearnerError
from art_cli.runtime.processes.process_server import run_and_exit, serve

class Target:
    async def double(self, number):
        return number * 2

    def train(self, steps, progress):
        for step in range(steps):
            progress(step + 1, steps)
        return os.getpid()

    def fail(self):
        raise LearnerError("no memory")

    def defect(self):
        raise KeyError("a mistake of ours")

    async def sleep(self):
        try:
            await asyncio.sleep(60)
        finally:
            self.was_cancelled = True

    async def cancelled(self):
        return self.was_cancelled

    def block(self):
        time.sleep(60)

    async def garbage(self):
        connection.send(b'{"type": "Returned", "id": 1}\\n')
        await asyncio.sleep(60)

kind, address = sys.argv[1:]
if kind == "pair":
    connection = socket.socket(fileno=int(address))
elif kind == "unix":
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
else:
    connection = socket.create_connection(("127.0.0.1", int(address)))
run_and_exit(serve(connection, Target(), heartbeat_s=0.05))
"""


class Server:
    """A process that answers, the calling end of its connection, and its log."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self._directory = directory

    async def start(self, kind: str = "pair") -> "Server":
        if kind == "pair":
            ours, theirs = socket.socketpair()
            with theirs:
                await self._run(kind, str(theirs.fileno()), keep=theirs.fileno())
        else:
            listener = socket.socket(socket.AF_UNIX) if kind == "unix" else socket.create_server(("127.0.0.1", 0))
            with listener:
                if kind == "unix":
                    listener.bind(str(self._directory / "socket"))
                    listener.listen()
                address = listener.getsockname() if kind == "unix" else str(listener.getsockname()[1])
                await self._run(kind, address)
                ours, _ = await asyncio.to_thread(listener.accept)
        self.end = await CallingEnd.open(ours)
        return self

    async def _run(self, kind: str, address: str, keep: int = -1) -> None:
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", CHILD, kind, address]
            self.child = await ChildProcess.start(command, keep=keep, stdout=log, stderr=log)

    async def stop(self) -> None:
        await self.child.stop()
        await self.end.close()


@pytest.mark.parametrize("kind", ["pair", "unix", "tcp"])
async def test_results_progress_and_errors_come_back_over_every_stream(tmp_path: Path, kind: str) -> None:
    server = await Server(tmp_path).start(kind)
    told: list[tuple[int, int]] = []
    doubled = [server.end.call("double", {"number": number}) for number in range(50)]
    assert await asyncio.gather(*doubled) == list(range(0, 100, 2))
    assert await server.end.call("double", {"number": "é\n"}) == "é\né\n"
    await server.end.call("train", {"steps": 3}, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(LearnerError, match="no memory"):
        await server.end.call("fail", {})
    server.end.hang_up()
    assert await asyncio.wait_for(server.child.wait(), 30) == 0
    await server.stop()


async def test_a_cancelled_call_is_cancelled_over_there(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    sleeping = asyncio.create_task(server.end.call("sleep", {}))
    assert await server.end.call("double", {"number": 1}) == 2
    sleeping.cancel()
    await asyncio.wait({sleeping})
    assert await server.end.call("cancelled", {}) is True
    await server.stop()


async def test_it_beats_while_it_works_and_ends_at_once_when_the_other_end_is_gone(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    heard: list[Message] = []
    server.end.heard = heard.append
    blocked = asyncio.create_task(server.end.call("block", {}))
    await until(lambda: heard.count(Heartbeat()) > 3)
    begin = time.monotonic()
    server.end.hang_up()
    assert await asyncio.wait_for(server.child.wait(), 30) == 0
    assert time.monotonic() - begin < 20
    with pytest.raises(ConnectionEnded):
        await blocked
    await server.stop()


async def test_a_process_that_dies_fails_every_call_that_waits_and_every_later_one(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    sleeping = [asyncio.create_task(server.end.call("sleep", {})) for _ in range(2)]
    os.kill(await server.end.call("train", {"steps": 0}), signal.SIGKILL)
    for call in (*sleeping, server.end.call("double", {"number": 1})):
        with pytest.raises(ConnectionEnded) as ended:
            await call
        assert ended.value.fault == ""
    assert await asyncio.wait_for(server.child.wait(), 30) == -signal.SIGKILL
    await server.stop()


async def test_a_defect_ends_the_process_with_a_traceback(tmp_path: Path) -> None:
    server = await Server(tmp_path).start()
    with pytest.raises(ConnectionEnded):
        await server.end.call("defect", {})
    assert await asyncio.wait_for(server.child.wait(), 30) == 1
    assert "KeyError: 'a mistake of ours'" in server.log.read_text()
    await server.stop()


async def test_an_end_that_sends_no_message_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await Server(tmp_path).start()
    with pytest.raises(ConnectionEnded, match="it sent an invalid message: Returned: its fields are id, value"):
        await server.end.call("garbage", {})
    await server.stop()

    monkeypatch.setattr(calls, "MAX_LINE_BYTES", 1000)
    server = await Server(tmp_path).start()
    assert await server.end.call("double", {"number": "x" * 400}) == "x" * 800
    with pytest.raises(ConnectionEnded, match="it sent an invalid message: .* limit"):
        await server.end.call("double", {"number": "x" * 900})
    await server.stop()


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was_and_spoiled_it_is_refused(message: Message) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line, (*TO_PROCESS, *FROM_PROCESS)) == message
    for spoiled in mutations(line, seed=len(line), count=NUM_MUTATIONS):
        try:
            found = decode(spoiled, (*TO_PROCESS, *FROM_PROCESS))
        except ValueError:
            continue
        assert isinstance(found, (*TO_PROCESS, *FROM_PROCESS))


@pytest.mark.parametrize(
    "change",
    [{"id": "5"}, {"total": 1.5}, {"done": None}, {"more": 1}, {"type": "Call"}, {"type": ["Advance"]}],
    ids=str,
)
def test_what_is_no_message_is_refused(change: dict[str, object]) -> None:
    good = {"type": "Advance", "id": 5, "done": 1, "total": 2}
    assert decode(json.dumps(good).encode(), FROM_PROCESS) == Advance(5, 1, 2)
    with pytest.raises(ValueError):
        decode(json.dumps(good | change).encode(), FROM_PROCESS)


@pytest.mark.parametrize(
    ("error", "read"),
    [
        (RolloutError("no"), RolloutError),
        (UsageError("no"), UsageError),
        (ConfigError([calls.errors.Problem("k", "f:1", "no")]), UsageError),
        (DataError("no", "file", 3), ArtError),
    ],
)
def test_an_error_is_made_again_from_its_name(error: ArtError, read: type[ArtError]) -> None:
    again = error_named(type(error).__name__, str(error))
    assert (type(again), str(again)) == (read, str(error))


@pytest.mark.parametrize("kind", ["SystemExit", "Sequence", "printable", "__doc__", ""])
def test_what_names_no_error_of_ours_is_an_error_in_its_words(kind: str) -> None:
    assert str(error_named(kind, "no")) == f"{kind}: no"
