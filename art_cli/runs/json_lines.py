"""Reads JSON lines that any program may have written: everything that Python's json writes, and nothing else.

Python writes NaN, Infinity and half surrogate pairs, which are not JSON. Windows programs put a byte order mark in
front. Such a line is mended: a number that is not finite becomes null (and is left out of a record's `metrics`), half
a pair becomes U+FFFD. Every ValueError from here is one printable line with the reason. The caller adds the
file and line.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from art_cli.runs.run_file import open_file
from art_cli.runtime.errors import DataError, printable

Record = TypeVar("Record")

MAX_LINE_BYTES = 256 * 2**20  # longest line that is read; a trajectory of a million tokens takes about 30 MiB
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark
_HALF_PAIRS = re.compile("[\ud800-\udfff]")


class Line(NamedTuple):
    """One line of a file. Example: Line(number=2, offset=812, data=b'{"id": "a"}\\n')."""

    number: int  # line number, the first is 1
    offset: int  # position of the first byte in the file
    data: bytes  # the line, newline included; only the last line of a file may lack one


def lines(path: Path, *, within: Path | None = None) -> Iterator[Line]:
    """Yields the lines that are not blank.

    Raises DataError: the file is UTF-16 or UTF-32, a line exceeds the limit, it is no regular file, or a link leads
    out of the directory `within`.
    """
    offset = number = 0
    try:
        opened = open_file(path, within=within)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path) from error
    with opened as file:
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1 and (encoding := foreign_encoding(data)):
                raise DataError(f"the text is {encoding}; save it as UTF-8", path)
            if len(data) > MAX_LINE_BYTES:
                raise DataError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", path, number)
            if data.strip():
                yield Line(number, offset, data)
            offset += len(data)


def decode(line: bytes, decoder: "msgspec.json.Decoder[Record]") -> Record:
    """Returns the record of one line, mended if it must be. Raises ValueError with a one-line reason."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        mended = _mend(line)
    try:
        return decoder.decode(mended)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(_in_words(error)) from error


def is_torn(line: bytes) -> bool:
    """Whether a line is the start of a record whose writer was killed: the last line, and no whole JSON value."""
    if line.endswith(b"\n") or not line.removeprefix(_MARK).lstrip().startswith(b"{"):
        return False
    try:
        json.loads(line)
    except ValueError:
        return True
    except RecursionError:
        return False
    return False


def foreign_encoding(start: bytes) -> str | None:
    """Returns the encoding that the first bytes show, or None if it may be UTF-8."""
    if not any(start[:4]):
        return None
    encoding = json.detect_encoding(start[:4]).upper()
    return None if encoding.startswith("UTF-8") else encoding.removesuffix("-LE").removesuffix("-BE")


def _mend(line: bytes) -> bytes:
    """Returns the line as strict JSON. Raises ValueError: no JSON writer writes this."""
    try:
        record = json.loads(
            line.removeprefix(_MARK).decode(), parse_constant=lambda _: None, parse_float=_finite, parse_int=_whole
        )
        if isinstance(record, dict) and isinstance(metrics := record.get("metrics"), dict):
            record["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        text = json.dumps(record, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(_in_words(error)) from error
    return _HALF_PAIRS.sub("\ufffd", text).encode()


def _finite(digits: str) -> float | None:
    """Returns the number; None if it is larger than any float ("1e999")."""
    value = float(digits)
    return value if math.isfinite(value) else None


def _whole(digits: str) -> int | None:
    """Returns the number; None if it is larger than any float, as no count and no id is."""
    return int(digits) if len(digits) <= 308 else None


def _in_words(error: Exception) -> str:
    match error:
        case RecursionError():
            return "JSON is nested too deeply"
        case UnicodeDecodeError():
            return f"the text is not UTF-8 (byte {error.start} of the line)"
        case json.JSONDecodeError():
            return f"JSON is malformed: {error.msg} (column {error.colno})"
    return printable(error, limit=200)
