"""An authenticated connection between two machines that share a secret. Every message carries a seal.

    listener -> dialler   MAGIC and 32 random bytes
    dialler -> listener   32 random bytes, and a proof: HMAC-SHA256 with the secret over role and both nonces
    listener -> dialler   b"+" and the listener's proof, or b"-" and close if the dialler's proof is wrong
    afterwards            8 bytes of length, 32 bytes of seal, the message

The seal is an HMAC over the message and its sequence number, with a key for this connection and direction. Forged,
changed, repeated, missing or reordered messages end the connection. Messages are not encrypted.
"""

import asyncio
import hmac
import os
from typing import NamedTuple

MAGIC = b"art-sealed-1\n"
NONCE, SEAL, LENGTH = 32, 32, 8  # bytes
HANDSHAKE_DEADLINE_S = 10.0
FIRST_BYTES = 2**20  # maximum message size until the caller trusts the peer


class SecretRefused(Exception):
    """The peer has a different secret."""


class Tampered(ValueError):
    """A message differs from the peer's original."""


class SealedReader:
    """Reads authenticated messages from the peer. `max_bytes` is the maximum message size."""

    def __init__(self, reader: asyncio.StreamReader, key: bytes) -> None:
        self.max_bytes = FIRST_BYTES
        self._reader, self._key, self._number = reader, key, 0

    async def readline(self) -> bytes:
        """Returns the next message; b"" at the end. Raises Tampered for oversized messages and wrong seals."""
        try:
            head = await self._reader.readexactly(LENGTH + SEAL)
            size = int.from_bytes(head[:LENGTH])
            if size > self.max_bytes:
                raise Tampered(f"a message of {size} bytes")
            message = await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError):  # the peer or the network is down
            return b""
        if not hmac.compare_digest(_seal(self._key, self._number, message), head[LENGTH:]):
            raise Tampered("a message has a wrong seal: another party wrote or changed it")
        self._number += 1
        return message


class SealedWriter:
    def __init__(self, writer: asyncio.StreamWriter, key: bytes) -> None:
        self._writer, self._key, self._number = writer, key, 0

    def write(self, message: bytes) -> None:
        self._writer.write(len(message).to_bytes(LENGTH) + _seal(self._key, self._number, message))
        self._writer.write(message)
        self._number += 1

    def write_eof(self) -> None:
        self._writer.write_eof()

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class Sealed(NamedTuple):
    reader: SealedReader
    writer: SealedWriter


async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Sealed:
    """Authenticates a peer's connection. Raises SecretRefused; ConnectionError or TimeoutError for other programs."""
    async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
        ours = os.urandom(NONCE)
        writer.write(MAGIC + ours)
        theirs, proof = await _read(reader, NONCE), await _read(reader, SEAL)
        if not hmac.compare_digest(proof, _hash(secret, b"dialler", ours, theirs)):
            writer.write(b"-")
            await writer.drain()
            raise SecretRefused
        writer.write(b"+" + _hash(secret, b"listener", ours, theirs))
    keys = [_hash(secret, name, ours, theirs) for name in (b"to listener", b"to dialler")]
    return Sealed(SealedReader(reader, keys[0]), SealedWriter(writer, keys[1]))


async def dial(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Sealed:
    """Authenticates our connection. Raises SecretRefused; ConnectionError or TimeoutError for other programs."""
    async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
        if await _read(reader, len(MAGIC)) != MAGIC:
            raise ConnectionError("it is not a learner of art, or has another version")
        theirs, ours = await _read(reader, NONCE), os.urandom(NONCE)
        writer.write(ours + _hash(secret, b"dialler", theirs, ours))
        if await _read(reader, 1) != b"+":
            raise SecretRefused
        if not hmac.compare_digest(await _read(reader, SEAL), _hash(secret, b"listener", theirs, ours)):
            raise SecretRefused
    keys = [_hash(secret, name, theirs, ours) for name in (b"to listener", b"to dialler")]
    return Sealed(SealedReader(reader, keys[1]), SealedWriter(writer, keys[0]))


async def _read(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("it closed the connection") from error


def _hash(secret: bytes, name: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"art learner, " + name + b"\0" + b"".join(nonces), "sha256")


def _seal(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8) + message, "sha256")
