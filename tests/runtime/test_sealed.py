"""Sealed connections: only who knows the secret is heard, and no message can be changed, repeated or left out."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from art_cli.runtime.processes import authenticated as sealed
from art_cli.runtime.processes.authenticated import SealedReader, SealedWriter, SecretRefused

SECRET = b"0123456789abcdef"
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


async def met(listening: Handler, dialling: Handler) -> tuple[object, object]:
    """What both ends of one TCP connection gave, or the errors that they raised."""
    heard: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            heard.set_result(await listening(reader, writer))
        except Exception as error:
            heard.set_result(error)
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        dialled = await dialling(reader, writer)
    except Exception as error:
        dialled = error
    finally:
        writer.close()
    found = await asyncio.wait_for(heard, 30)
    server.close()
    return found, dialled


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
    connection, messages = await sealed.listen(reader, writer, SECRET), []
    while message := await connection.reader.readline():
        messages.append(message)
        connection.writer.write(message)
    return messages


async def test_messages_go_both_ways_between_ends_with_the_same_secret() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> list[bytes]:
        connection = await sealed.dial(reader, writer, SECRET)
        answers = []
        for message in (b"one\n", b"two\n", b"x" * 500_000):
            connection.writer.write(message)
            answers.append(await connection.reader.readline())
        connection.writer.write_eof()
        return answers

    there, here = await met(echo, talk)
    assert there == here == [b"one\n", b"two\n", b"x" * 500_000]


async def test_another_secret_is_refused_on_both_ends_before_any_message() -> None:
    there, here = await met(echo, lambda reader, writer: sealed.dial(reader, writer, b"another secret 0"))
    assert isinstance(there, SecretRefused) and isinstance(here, SecretRefused)


async def test_a_listener_without_the_secret_is_found_out_by_the_dialler() -> None:
    """It says that the proof is right without knowing; its own proof is wrong."""

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sealed.MAGIC + bytes(32))
        await reader.readexactly(64)
        writer.write(b"+" + bytes(32))
        await writer.drain()

    _, here = await met(pretend, lambda reader, writer: sealed.dial(reader, writer, SECRET))
    assert isinstance(here, SecretRefused)


async def test_a_proof_that_is_sent_back_is_no_proof() -> None:
    """The dialler's own proof, reflected as that of the listener."""

    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sealed.MAGIC + bytes(32))
        said = await reader.readexactly(64)
        writer.write(b"+" + said[32:])
        await writer.drain()

    _, here = await met(reflect, lambda reader, writer: sealed.dial(reader, writer, SECRET))
    assert isinstance(here, SecretRefused)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 8, bytes(64), b"art-sealed-1\n"])
async def test_a_stranger_is_never_heard(said: bytes) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        writer.write_eof()
        await reader.read()

    there, _ = await met(echo, babble)
    assert isinstance(there, SecretRefused | ConnectionError)


async def test_a_stranger_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "HANDSHAKE_DEADLINE_S", 0.2)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        return await reader.read()

    there, _ = await met(echo, wait)
    assert isinstance(there, TimeoutError)


class Wire:
    """Takes what a SealedWriter writes, one entry for each message."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []

    def write(self, data: bytes) -> None:
        if self.messages and len(self.messages[-1]) == sealed.LENGTH + sealed.SEAL:
            self.messages[-1] += data
        else:
            self.messages.append(data)


async def read_all(messages: list[bytes]) -> list[bytes]:
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(messages))
    reader.feed_eof()
    sealed_reader, read = SealedReader(reader, b"key"), []
    while message := await sealed_reader.readline():
        read.append(message)
    return read


def written(*messages: bytes) -> list[bytes]:
    wire = Wire()
    writer = SealedWriter(wire, b"key")  # type: ignore[arg-type]
    for message in messages:
        writer.write(message)
    return wire.messages


async def test_a_message_that_was_changed_repeated_left_out_or_moved_is_refused() -> None:
    one, two = written(b"one\n", b"two\n")
    assert await read_all([one, two]) == [b"one\n", b"two\n"]
    for tampered in ([one[:-2] + b"x\n", two], [one, one], [two], [two, one], [one, bytes(8) + two[8:]]):
        with pytest.raises(ValueError, match="seal"):
            await read_all(tampered)
    assert await read_all([one, two[:-1]]) == [b"one\n"]  # torn: the end of the connection


async def test_a_long_message_is_refused_before_it_is_read() -> None:
    [long] = written(bytes(sealed.FIRST_BYTES + 1))
    with pytest.raises(ValueError, match="bytes"):
        await read_all([long[: sealed.LENGTH + sealed.SEAL]])
