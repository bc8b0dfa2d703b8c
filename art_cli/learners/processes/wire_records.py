"""Records exchanged between a learner's processes, as MessagePack decoded to the type the reader expects.

torch's all_gather_object would pickle objects, and unpickling runs any program that the sender put in.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np

Value = TypeVar("Value")

# Array dtypes allowed for each annotated number type. An array is encoded as dtype code, shape and bytes.
NUMBERS: dict[type, dict[bytes, np.dtype[Any]]] = {
    np.float64: {b"d": np.dtype(np.float64), b"f": np.dtype(np.float32)},
    np.int64: {b"q": np.dtype(np.int64)},
}


def encode(value: object) -> bytes:
    """Encodes a record. Its arrays must use dtypes from NUMBERS."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(data: bytes, kind: type[Value]) -> Value:
    """Decodes a record of type `kind`. Raises ValueError if the bytes hold another type."""
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
    raise NotImplementedError(f"cannot encode a {type(value).__name__}")


def _from_plain(kind: Any, given: object) -> object:
    """Decodes Path and NDArray values. `kind` is Path or an array type such as NDArray[np.int64]."""
    if kind is Path and isinstance(given, str):
        return Path(given)
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"cannot decode {kind}")
    code, shape, numbers = msgspec.convert(given, tuple[bytes, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], bytes])
    [wanted] = get_args(get_args(kind)[1])
    if (dtype := NUMBERS[wanted].get(code)) is None:
        raise ValueError(f"an array of {wanted.__name__} with the code {code!r:.20}")
    return np.frombuffer(numbers, dtype).reshape(shape).copy()
