"""The wire format of protocol buffers, as far as the Tinker protocol needs it: fields in, fields out, no generator.

https://protobuf.dev/programming-guides/encoding: a message is a list of (number, kind, value), where a value is a
varint, 8 bytes, 4 bytes, or a length and that many bytes.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NoReturn

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
MAX_FIELDS = 400_000  # fields of one request; reading them takes 0.4 s
MAX_VARINT = 10  # bytes

Value = int | float | bytes


class ProtoReader:
    """Reads the messages of one request, and counts their fields. Raises ValueError: it is none, or it has too many."""

    def __init__(self) -> None:
        self._num_fields = 0

    def fields(self, data: bytes, kinds: Mapping[int, int]) -> Iterator[tuple[int, Value]]:
        """Number and value of each field that `kinds` names with its kind; other fields are skipped.

        An 8-byte value is read as a double and a 4-byte one as a float.
        """
        place = 0
        while place < len(data):
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise ValueError(f"more than {MAX_FIELDS:,} fields")
            key, place = _varint(data, place)
            number, kind = key >> 3, key & 7
            value: Value
            if kind == VARINT:
                value, place = _varint(data, place)
            elif kind == BYTES:
                size, place = _varint(data, place)
                value, place = _take(data, place, size)
            elif kind == EIGHT:
                raw, place = _take(data, place, 8)
                [value] = struct.unpack("<d", raw)
            elif kind == FOUR:
                raw, place = _take(data, place, 4)
                [value] = struct.unpack("<f", raw)
            else:
                _refuse(f"field {number} has the unknown kind {kind}")
            if number in kinds:
                if kinds[number] != kind:
                    _refuse(f"field {number} has kind {kind}, not {kinds[number]}")
                yield number, value

    def varints(self, value: Value) -> list[int]:
        """The numbers of a packed field, as signed 64-bit ones."""
        assert isinstance(value, bytes)
        numbers, place = [], 0
        while place < len(value):
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise ValueError(f"more than {MAX_FIELDS:,} fields")
            number, place = _varint(value, place)
            numbers.append(signed(number))
        return numbers


def signed(number: int) -> int:
    """The varint as int32 and int64 mean it."""
    return number - 2**64 if number >= 2**63 else number


def text(value: Value) -> str:
    """Raises ValueError: not UTF-8."""
    assert isinstance(value, bytes)
    return value.decode()


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    for count in range(MAX_VARINT):
        if place + count >= len(data):
            break
        byte = data[place + count]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (2**64 - 1), place + count + 1
        shift += 7
    _refuse("a number without an end")


def _take(data: bytes, place: int, size: int) -> tuple[bytes, int]:
    if size > len(data) - place:
        _refuse("a field that is longer than the message")
    return data[place : place + size], place + size


def _refuse(why: str) -> NoReturn:
    raise ValueError(f"no protocol buffer: {why}")


# --- writing ----------------------------------------------------------------------------------------------------------


def bytes_field(number: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return write_varint(number << 3 | BYTES) + write_varint(len(raw)) + raw


def varint_field(number: int, value: int) -> bytes:
    return write_varint(number << 3 | VARINT) + write_varint(value)


def double_field(number: int, value: float) -> bytes:
    return write_varint(number << 3 | EIGHT) + struct.pack("<d", value)


def packed_field(number: int, values: Iterable[int]) -> bytes:
    return bytes_field(number, b"".join(map(write_varint, values)))


def write_varint(number: int) -> bytes:
    number &= 2**64 - 1
    written = bytearray()
    while number > 0x7F:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)
