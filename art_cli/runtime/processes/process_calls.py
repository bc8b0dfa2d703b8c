"""Calls to another process. Requests are sent; progress, results and errors by name come back.

    to the process      Call, Cancel; end of stream: the process exits
    from the process    Heartbeat and Advance during calls; Returned or Raised once per call; Raised with id FAREWELL
                        before the process exits on its own

A message is a line of JSON over a connected stream socket: a socket pair, a Unix socket or TCP. Between machines,
messages are sealed (authenticated.py). process_server.py implements the answering side. Its messages may come from a
process that runs user code, or from another machine. Each line is therefore fully checked before use; callers check the
results.
"""

import asyncio
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple, Self, get_origin

from art_cli.runtime import errors
from art_cli.runtime.errors import ArtError, printable
from art_cli.runtime.processes.authenticated import SealedReader, SealedWriter
from art_cli.runtime.processes.plain_json import dump, load

Json = dict[str, Any]
MessageReader = asyncio.StreamReader | SealedReader
MessageWriter = asyncio.StreamWriter | SealedWriter

MAX_LINE_BYTES = 2**30  # maximum message length
FIRST_ID = 1  # rollouts/bootstrap.py answers the first call without reading it
FAREWELL = 0  # id of the farewell message sent before exiting


@dataclass(frozen=True)
class Call:
    """Example: Call(7, "play", {"scenario": {"id": "s"}})"""

    id: int
    method: str
    params: Json


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Heartbeat:
    """The process is alive and working on a call."""


@dataclass(frozen=True)
class Advance:
    """Progress of a call. Example: Advance(7, 3, 8) means 3 of 8."""

    id: int
    done: int
    total: int


@dataclass(frozen=True)
class Returned:
    id: int
    value: object  # plain JSON data


@dataclass(frozen=True)
class Raised:
    """An error from errors.py. Example: Raised(7, "LearnerError", "the loss is not finite")"""

    id: int
    kind: str
    message: str


Message = Call | Cancel | Heartbeat | Advance | Returned | Raised
TO_PROCESS = (Call, Cancel)
FROM_PROCESS = (Heartbeat, Advance, Returned, Raised)


class ConnectionEnded(Exception):
    """The peer closed the connection. `fault` is the peer's final error, or describes an invalid message."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.fault = fault


class CallingEnd:
    """The calling side of a connection. Reads until the peer closes it."""

    def __init__(self, reader: MessageReader, writer: MessageWriter) -> None:
        self.fault = ""  # describes an invalid message, or the peer's last error
        self.farewell: ArtError | None = None  # the peer's error before it exited on its own
        self.heard: Callable[[Message], None] = lambda message: None  # called with each received message
        self._writer = writer
        self._ids = itertools.count(FIRST_ID)
        self._pending: dict[int, _Pending] = {}
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def open(cls, connection: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES))

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    async def call(self, method: str, params: Json, *, progress: Callable[[int, int], None] | None = None) -> Any:
        """Returns the method's unchecked result. Raises the method's ArtError, or ConnectionEnded."""
        if self.has_ended:
            raise ConnectionEnded(self.fault)
        id = next(self._ids)
        self._writer.write(encode(Call(id, method, params)))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[id] = _Pending(future, progress)
        try:
            return await future
        except asyncio.CancelledError:
            if not self.has_ended:
                self._writer.write(encode(Cancel(id)))
            raise
        finally:
            del self._pending[id]

    def hang_up(self) -> None:
        """Ends the stream, so the peer's process exits."""
        if not self.has_ended:
            self._writer.write_eof()

    async def close(self) -> None:
        """Closes the connection. All pending calls fail."""
        self._writer.close()
        await asyncio.wait({self._reading})

    async def _read(self, reader: MessageReader) -> None:
        """Reads messages until the connection ends. All pending calls then fail."""
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._take(decode(line, FROM_PROCESS))
        except ConnectionError:
            pass
        except ValueError as error:
            self.fault = f"it sent an invalid message: {printable(error, limit=200)}"
        finally:
            self._writer.close()
            for pending in self._pending.values():
                _resolve(pending.future, error=ConnectionEnded(self.fault))

    def _take(self, message: Any) -> None:
        self.heard(message)
        pending = None if isinstance(message, Heartbeat) else self._pending.get(message.id)
        match message:
            case Advance() if pending is not None and pending.progress is not None:
                pending.progress(message.done, message.total)
            case Returned() if pending is not None:
                _resolve(pending.future, result=message.value)
            case Raised() if message.id == FAREWELL:
                self.farewell = error_named(message.kind, message.message)
                self.fault = message.message
            case Raised() if pending is not None:
                _resolve(pending.future, error=error_named(message.kind, message.message))


class _Pending(NamedTuple):
    future: "asyncio.Future[Any]"
    progress: Callable[[int, int], None] | None


def _resolve(future: "asyncio.Future[Any]", *, result: object = None, error: Exception | None = None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def error_named(kind: str, message: str) -> ArtError:
    """Returns the named error from errors.py, or the nearest base class whose only argument is a message."""
    named = getattr(errors, kind, None)
    if not isinstance(named, type) or not issubclass(named, ArtError):
        return ArtError(f"{kind}: {message}")
    plain: type[ArtError] = next(base for base in named.__mro__ if "__init__" not in vars(base))
    return plain(message)


def encode(message: Message) -> bytes:
    """Encodes a message as a line. Raises TypeError or ValueError for values without a JSON form."""
    return dump({"type": type(message).__name__, **vars(message)}) + b"\n"


def decode(line: bytes, kinds: tuple[type, ...]) -> Any:
    """Decodes a message of these kinds. Raises ValueError for other messages and wrong fields."""
    given = load(line)
    if not isinstance(given, dict):
        raise ValueError(f"a message is a JSON object, not {type(given).__name__}")
    name = given.pop("type", None)
    kind = next((kind for kind in kinds if kind.__name__ == name), None)
    if kind is None:
        raise ValueError(f"no such message: {name!r:.40}")
    return checked(kind, given)


def checked(kind: type, given: object) -> Any:
    """Creates the dataclass `kind` from a JSON object. Raises ValueError for wrong fields or field types."""
    wanted = _types(kind)
    if not isinstance(given, dict) or given.keys() != wanted.keys():
        raise ValueError(f"{kind.__name__}: its fields are {', '.join(wanted)}")
    for field, expected in wanted.items():
        if not isinstance(given[field], expected):
            raise ValueError(f"{kind.__name__}.{field}: {type(given[field]).__name__}")
    return kind(**given)


@cache
def _types(kind: type) -> dict[str, Any]:
    return {each.name: dict if get_origin(each.type) is dict else each.type for each in fields(kind)}
