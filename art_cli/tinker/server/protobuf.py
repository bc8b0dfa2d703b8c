"""Messages of the Tinker protocol in protocol buffers, as the SDK ships them, read within a bound on their fields.

A message of a few bytes may hold thousands of others, each of which becomes an object. So a request is scanned first.
"""

from typing import Any, NoReturn

from google.protobuf.descriptor import FieldDescriptor  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tinker.proto import tinker_public_pb2

messages: Any = tinker_public_pb2  # its classes differ between versions of the SDK

MAX_FIELDS = 400_000  # fields of one request, the numbers of packed ones included; scanning them takes 0.4 s
MAX_VARINT = 10  # bytes
SIZES = {1: 8, 5: 4}  # bytes of a value, by its kind on the wire
VARINT, BYTES = 0, 2
WHOLE = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


def read_message(kind: Any, body: bytes) -> Any:
    """Returns the message of that class. Raises ValueError if the body is none, or has too many fields."""
    _count(body, kind.DESCRIPTOR, 0)
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise ValueError(f"no protocol buffer: {error}") from None


def _count(data: bytes, kind: Any, num: int) -> int:
    """Returns `num` and the number of fields, those of the messages inside included. `kind` is a descriptor."""
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
            _refuse("a field that is longer than the message")
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
    """Returns a number and the index after it."""
    number = 0
    for count, byte in enumerate(data[index : index + MAX_VARINT]):
        number |= (byte & 0x7F) << 7 * count
        if byte < 0x80:
            return number, index + count + 1
    _refuse("a number without an end")


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"no protocol buffer: {why}")
