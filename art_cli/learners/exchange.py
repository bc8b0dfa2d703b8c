"""Records as bytes and back, by their types: what the processes of a learner tell each other while a step runs.

torch's own way to send objects between processes (all_gather_object) pickles them, and reading a pickle runs whatever
program the sender put into it. Here the bytes are MessagePack, and they are read as the type that the reader expects.
"""

from typing import Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

Value = TypeVar("Value")

MAX_BYTES = 2**31  # largest record


def encode(value: object) -> bytes:
    """The record's bytes. Arrays have one axis; floats are kept in float64 and integers in int64."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(data: bytes, kind: type[Value]) -> Value:
    """The record of that type. Raises ValueError: the bytes are no such record."""
    value: Value = msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
    return value


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "if":
        return value.astype(np.float64 if value.dtype.kind == "f" else np.int64).tobytes()
    raise NotImplementedError(f"no form for a {type(value).__name__}")


def _from_plain(kind: Any, given: object) -> object:
    """`kind` is an array's type with that of its numbers: NDArray[np.float64] or NDArray[np.int64]."""
    if get_origin(kind) is not np.ndarray or not isinstance(given, bytes):
        raise ValueError(f"expected {kind}")
    [number] = get_args(get_args(kind)[1])
    return np.frombuffer(given, number).copy()
