"""Tinker protocol messages and tensors: the SDK's protocol buffers, read with a limit on fields.

A message of a few bytes may contain thousands of nested messages, and each becomes an object. Requests are therefore
scanned first. Dense and sparse tensors, from JSON or protocol buffers, become numpy arrays.
"""

import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tinker.proto import tinker_public_pb2

from art_cli.tinker.server import Count, Finite

Array = npt.NDArray[Any]  # float64 or int64
messages: Any = tinker_public_pb2  # the classes differ between SDK versions

MAX_NUMBERS = 1 << 22  # maximum numbers in a tensor, including implicit zeros
FLOAT32, INT64, INT32 = 1, 2, 3
DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4"}
MAX_FIELDS = 400_000  # maximum fields in a request, including packed numbers; scanning takes 0.4 s
MAX_VARINT = 10  # bytes
SIZES = {1: 8, 5: 4}  # wire type -> bytes of a value
VARINT, BYTES = 0, 2
WHOLE = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


class TensorData(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in JSON. Example: TensorData([0.0, 1.0], "float32", [2])"""

    data: list[Finite]
    dtype: str
    shape: list[Count] | None = None
    sparse_crow_indices: list[Count] | None = None
    sparse_col_indices: list[Count] | None = None


def of_json(tensor: TensorData) -> Array:
    """Returns a JSON tensor as an array. Raises ValueError for inconsistent parts."""
    values: Array = np.asarray(tensor.data, dtype=np.float64)
    if tensor.dtype == "int64":
        if not (np.abs(values) < 2**53).all() or (values != np.floor(values)).any():
            raise ValueError("an int64 tensor with other numbers than integers")
        values = values.astype(np.int64)
    elif tensor.dtype != "float32":
        raise ValueError(f"dtype {tensor.dtype!r}, not float32 or int64")
    if tensor.sparse_crow_indices is None:
        return _shaped(values, tensor.shape)
    rows = np.asarray(tensor.sparse_crow_indices, dtype=np.int64)
    return _dense(values, rows, np.asarray(tensor.sparse_col_indices or [], dtype=np.int64), tensor.shape)


def of_proto(tensor: Any) -> Array:
    """Returns a Tensor message as an array. Raises ValueError for inconsistent parts."""
    dtype, shape = DTYPES.get(tensor.dtype), list(tensor.shape)
    if dtype is None:
        raise ValueError(f"dtype {tensor.dtype} is not supported")
    if not tensor.HasField("sparse_csr"):
        return _shaped(_numbers(tensor.dense, dtype), shape or None)
    sparse = tensor.sparse_csr
    rows, columns = _numbers(sparse.crow_indices, "<i8"), _numbers(sparse.col_indices, "<i8")
    return _dense(_numbers(sparse.values, dtype), rows, columns, shape)


def int32s(raw: bytes) -> npt.NDArray[np.int64]:
    """Decodes packed token ids. Raises ValueError if bytes are missing."""
    return _numbers(raw, "<i4").astype(np.int64)


def _numbers(raw: bytes, dtype: str) -> Array:
    if len(raw) % np.dtype(dtype).itemsize:
        raise ValueError("a tensor with an incomplete last number")
    values = np.frombuffer(raw, dtype)
    return values.astype(np.float64 if dtype == "<f4" else np.int64)


def _shaped(values: Array, shape: list[int] | None) -> Array:
    if shape is None:
        return values
    if len(shape) > 2 or min(shape, default=0) < 0 or math.prod(shape) != values.size:
        raise ValueError(f"{values.size} numbers do not have the shape {shape[:8]}")
    return values.reshape(shape)


def _dense(values: Array, rows: Array, columns: Array, shape: list[int] | None) -> Array:
    """Expands compressed sparse rows; unlisted entries are 0."""
    if shape is None or len(shape) != 2 or min(shape) < 0 or math.prod(shape) > MAX_NUMBERS:
        raise ValueError("a sparse tensor needs a shape of two dimensions")
    is_whole = len(rows) == shape[0] + 1 and len(columns) == len(values) and rows[0] == 0 and rows[-1] == len(values)
    if not is_whole or (np.diff(rows) < 0).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise ValueError("the indices of a sparse tensor do not fit its shape")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return dense


def read_message(kind: Any, body: bytes) -> Any:
    """Decodes a message. Raises ValueError for invalid bodies and too many fields."""
    _count(body, kind.DESCRIPTOR, 0)
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(f"no protocol buffer: {error}") from None


def _count(data: bytes, kind: Any, num: int) -> int:
    """Returns `num` plus the number of fields, including nested messages. `kind` is a descriptor."""
    index = 0
    while index < len(data):
        key, index = _varint(data, index)
        size, wire = 0, key & 7
        if wire == VARINT:
            _, index = _varint(data, index)
        elif wire == BYTES:
            size, index = _varint(data, index)
        else:
            size = SIZES.get(wire, len(data))
        if size > len(data) - index:
            raise ValueError("no protocol buffer: a field that is longer than the message")
        field = kind.fields_by_number.get(key >> 3)
        num += 1
        if wire == BYTES and field is not None and field.message_type is not None:
            num = _count(data[index : index + size], field.message_type, num)
        elif wire == BYTES and field is not None and field.type not in WHOLE:
            num += size
        if num > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS:,} fields")
        index += size
    return num


def _varint(data: bytes, index: int) -> tuple[int, int]:
    """Returns a number and the following index."""
    number = 0
    for count, byte in enumerate(data[index : index + MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return number, index + count + 1
    raise ValueError("no protocol buffer: a number without an end")
