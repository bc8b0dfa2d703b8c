"""Records between the processes of a learner, as MessagePack that is read as the type that the reader expects.

torch's own way to send objects (all_gather_object) pickles them, and reading a pickle runs any program that the sender
put into it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

Value = TypeVar("Value")

# The dtypes that an array may have whose annotation names the type. An array is its dtype's code, shape and bytes.
NUMBERS: dict[type, dict[bytes, np.dtype[Any]]] = {
    np.float64: {b"d": np.dtype(np.float64), b"f": np.dtype(np.float32)},
    np.int64: {b"q": np.dtype(np.int64)},
}


def encode(value: object) -> bytes:
    """Returns the record's bytes. Its arrays have numbers of NUMBERS."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(data: bytes, kind: type[Value]) -> Value:
    """Returns the record of that type. Raises ValueError if the bytes hold another type."""
    value: Value = msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
    return value


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        code = next((code for codes in NUMBERS.values() for code in codes if codes[code] == value.dtype), None)
        if code is not None:
            return [code, value.shape, value.tobytes()]
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, Sequence):
        return list(value)
    raise NotImplementedError(f"no form for a {type(value).__name__}")


def _from_plain(kind: Any, given: object) -> object:
    """Returns the value. `kind` is Path, or an array's type with the type of its numbers, as NDArray[np.int64]."""
    if kind is Path and isinstance(given, str):
        return Path(given)
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"no form for {kind}")
    code, shape, numbers = msgspec.convert(given, tuple[bytes, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], bytes])
    [wanted] = get_args(get_args(kind)[1])
    if (dtype := NUMBERS[wanted].get(code)) is None:
        raise ValueError(f"an array of {wanted.__name__} with the code {code!r:.20}")
    return np.frombuffer(numbers, dtype).reshape(shape).copy()
