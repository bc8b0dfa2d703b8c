"""JSON lines from arbitrary programs, and safe opening of run directory files.

The reader repairs what Python's json and Windows programs write: a byte order mark is dropped, NaN and Infinity become
null (dropped from a record's `metrics`), and lone surrogates U+FFFD. Every ValueError is one printable line.

A run directory may come from a stranger. Reading a FIFO would block forever, reading a device would never end, and a
link could point to any file on this machine. `open_file` refuses all three.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from art_cli.runtime.errors import DataError, UsageError, printable

BUFFER = 2**18  # bytes per read; trajectory lines have kilobytes
Record = TypeVar("Record")

MAX_LINE_BYTES = 256 * 2**20  # longest accepted line; a trajectory with a million tokens takes about 30 MiB
_MARK = b"\xef\xbb\xbf"  # UTF-8's byte order mark
_NO_TEXT = {  # first bytes of other formats, and what to do about each
    b"\x1f\x8b": "packed with gzip; unpack it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "packed with zstandard; unpack it first (unzstd)",
    b"PK\x03\x04": "a zip archive or a spreadsheet; unpack it, or save it as text",
    b"PAR1": "a Parquet file; write its rows as JSON lines (pandas: to_json(PATH, orient='records', lines=True))",
}
HALF_PAIRS = re.compile("[\ud800-\udfff]")  # lone surrogates
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY


def open_file(path: Path, *, within: Path | None = None, max_bytes: int | None = None) -> BufferedReader:
    """Opens a regular file for reading.

    Raises OSError (with the reason in `strerror`) if the file is missing, is a directory, pipe or device, exceeds
    `max_bytes`, or lies outside `within` after following links. `within` may itself be a link.
    """
    place = os.path.realpath(path)
    if within is not None and leads_out(path, within):
        raise OSError(errno.EPERM, f"a link that leads out of {within}", str(path))
    if not stat.S_ISREG(os.stat(place).st_mode):  # opening a device can have side effects
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle = os.open(place, _FLAGS)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes; at most {max_bytes} are read", str(path))
    except BaseException:
        os.close(handle)
        raise
    return BufferedReader(FileIO(handle), BUFFER)


def read_file(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """Returns the bytes of a regular file of up to `max_bytes`. Raises OSError like `open_file`."""
    with open_file(path, within=within, max_bytes=max_bytes) as file:
        return file.read(max_bytes)


def require_file(path: Path) -> None:
    """Raises UsageError if the path is not a file."""
    if not path.is_file():
        raise UsageError(f"{path}: {'not a file' if os.path.lexists(path) else 'no such file'}")


def is_inside(path: Path, within: Path | None) -> bool:
    """Returns True if the resolved path is a regular file, inside the directory `within` (if given)."""
    return path.is_file() and (within is None or not leads_out(path, within))


def leads_out(path: Path, within: Path) -> bool:
    """Returns True if the resolved path is outside the resolved directory `within`."""
    return not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(within))


class Line(NamedTuple):
    """A line with its position. Example: Line(number=2, offset=812, data=b'{"id": "a"}\\n')."""

    number: int  # line number, starting at 1
    offset: int  # byte offset in the file
    data: bytes  # the line including its newline; only the last line may lack a newline


def lines(path: Path, *, within: Path | None = None) -> Iterator[Line]:
    """Yields all lines but blank ones. Raises DataError for other formats, oversized lines and refused files."""
    offset = number = 0
    try:
        opened = open_file(path, within=within)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", path) from error
    with opened as file:
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1 and (words := foreign_format(data)):
                raise DataError(words, path)
            if len(data) > MAX_LINE_BYTES:
                raise DataError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB", path, number)
            if data.strip():
                yield Line(number, offset, data)
            offset += len(data)


def decode(line: bytes, decoder: "msgspec.json.Decoder[Record]", *, mends_numbers: bool = True) -> Record:
    """Decodes one line, repairing it if necessary (NaN only with `mends_numbers`). Raises ValueError in one line."""
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if line.removeprefix(_MARK).lstrip().startswith(b"["):
            raise ValueError("a JSON array begins here; write one object per line (jq -c '.[]' FILE)") from None
        mended = _mend(line, mends_numbers)
    try:
        return decoder.decode(mended)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(_in_words(error)) from error


def is_torn(line: bytes) -> bool:
    """Returns True for an incomplete last line, left by a killed writer."""
    if line.endswith(b"\n") or not line.removeprefix(_MARK).lstrip().startswith(b"{"):
        return False
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return not error.msg.startswith("Extra data")  # the line's object is complete
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    except (ValueError, RecursionError):
        return False
    return False


def foreign_format(start: bytes) -> str | None:
    """Returns the format detected from the first bytes, and what to do about it, unless they can be UTF-8."""
    if not any(start[:4]):
        return None
    encoding = json.detect_encoding(start[:4]).upper().removesuffix("-LE").removesuffix("-BE")
    if not encoding.startswith("UTF-8"):
        return f"the text is {encoding}; save it as UTF-8"
    return next((words for mark, words in _NO_TEXT.items() if start.startswith(mark)), None)


def _mend(line: bytes, mends_numbers: bool) -> bytes:
    """Returns the line as strict JSON. Raises ValueError if no JSON writer can have written it."""

    def number(text: str, value: float | None) -> float | None:
        if value is None and not mends_numbers:
            raise ValueError(f"{text[:20]} is not a number in JSON")
        return value

    try:
        record = json.loads(
            line.removeprefix(_MARK).decode(),
            parse_constant=lambda name: number(name, None),
            parse_float=lambda digits: number(digits, _finite(digits)),
            parse_int=lambda digits: number(digits, _whole(digits)),
        )
        if isinstance(record, dict) and isinstance(metrics := record.get("metrics"), dict):
            record["metrics"] = {name: value for name, value in metrics.items() if value is not None}
        text = json.dumps(record, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(_in_words(error)) from error
    return HALF_PAIRS.sub("\ufffd", text).encode()


def _finite(digits: str) -> float | None:
    """Returns None for numbers beyond the float range ("1e999")."""
    value = float(digits)
    return value if math.isfinite(value) else None


def _whole(digits: str) -> int | None:
    """Returns None for integers beyond the float range. Counts and ids never get this large."""
    return int(digits) if len(digits) <= 308 else None


def _in_words(error: Exception) -> str:
    match error:
        case RecursionError():
            return "JSON is nested too deeply"
        case UnicodeDecodeError():
            return f"the text is not UTF-8 (byte {error.start} of the line)"
        case json.JSONDecodeError() if error.doc[error.pos :].strip() == ",":
            return "a comma follows the object; each line is one object, without commas between lines"
        case json.JSONDecodeError():
            return f"JSON is malformed: {error.msg} (column {error.colno})"
    return printable(error, limit=200)
