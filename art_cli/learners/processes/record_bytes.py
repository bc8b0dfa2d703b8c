"""Records as bytes and back, by their types: what the processes of a learner tell each other while a step runs.

torch's own way to send objects between processes (all_gather_object) pickles them, and reading a pickle runs whatever
program the sender put into it. Here the bytes are MessagePack, and they are read as the type that the reader expects.
"""

from typing import Annotated, Any, TypeVar, get_args, get_origin

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from art_cli.runtime.errors import LearnerError

Value = TypeVar("Value")

MAX_BYTES = 2**31  # largest record
# The dtypes that an array may have whose annotation names the type. An array is its dtype's code, shape and bytes.
NUMBERS: dict[type, dict[bytes, np.dtype[Any]]] = {
    np.float64: {b"d": np.dtype(np.float64), b"f": np.dtype(np.float32)},
    np.int64: {b"q": np.dtype(np.int64)},
}


def gather(value: Value, kind: type[Value], size: int) -> list[Value]:
    """The record of each of the `size` processes of the group, which all call this, in the order of their ranks.

    Raises LearnerError: what another process sent is no such record.
    """
    written = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [int(each) for each in _gather(torch.tensor([len(written)]), size)]
    if not all(0 < each <= MAX_BYTES for each in sizes):
        raise LearnerError(f"the learner's processes sent records of impossible sizes: {sizes}")
    padded = torch.nn.functional.pad(written, (0, max(sizes) - len(written)))
    parts = zip(_gather(padded, size), sizes, strict=True)
    try:
        return [decode(part[:length].numpy().tobytes(), kind) for part, length in parts]
    except ValueError as error:
        raise LearnerError(f"a process of the learner sent what is no record of ours: {error}") from error


def _gather(tensor: Tensor, size: int) -> list[Tensor]:
    """Every process's tensor on the CPU. All have the same shape."""
    tensors = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(tensors, tensor)
    return tensors


def encode(value: object) -> bytes:
    """The record's bytes. Its arrays have numbers of NUMBERS."""
    return msgspec.msgpack.encode(value, enc_hook=_as_plain)


def decode(data: bytes, kind: type[Value]) -> Value:
    """The record of that type. Raises ValueError: the bytes are no such record."""
    value: Value = msgspec.msgpack.decode(data, type=kind, dec_hook=_from_plain)
    return value


def _as_plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        code = next((code for codes in NUMBERS.values() for code in codes if codes[code] == value.dtype), None)
        if code is not None:
            return [code, value.shape, value.tobytes()]
    raise NotImplementedError(f"no form for a {type(value).__name__}")


def _from_plain(kind: Any, given: object) -> object:
    """`kind` is an array's type with that of its numbers: NDArray[np.float64] or NDArray[np.int64]."""
    if get_origin(kind) is not np.ndarray:
        raise ValueError(f"no form for {kind}")
    code, shape, numbers = msgspec.convert(given, tuple[bytes, tuple[Annotated[int, msgspec.Meta(ge=0)], ...], bytes])
    [wanted] = get_args(get_args(kind)[1])
    if (dtype := NUMBERS[wanted].get(code)) is None:
        raise ValueError(f"an array of {wanted.__name__} with the code {code!r:.20}")
    return np.frombuffer(numbers, dtype).reshape(shape).copy()
