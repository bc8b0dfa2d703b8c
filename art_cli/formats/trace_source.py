"""Reads records of files that other tools wrote: JSON lines, whole JSON, zip archives of JSON. All of it is hostile.

A record that cannot be read is yielded as its reason, and the others are read.
"""

import importlib
import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from art_cli.runs import json_lines
from art_cli.runs.json_lines import MAX_LINE_BYTES
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import DataError, describe
from art_cli.runtime.processes.plain_json import is_deep

MAX_DEPTH = 100  # levels of a record
MAX_ENTRIES = 1_000_000  # most entries of an archive
MAX_ARCHIVE_BYTES = 64 * 2**30  # size of all its entries unpacked
CHUNK = 2**20
ZSTANDARD = 93  # method of zip that Python reads from 3.14 on
METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, ZSTANDARD}  # others reserve what memory the archive asks for
LISTS = ("data", "samples", "traces", "observations")  # keys under which a whole file has its records
_ANY = msgspec.json.Decoder()


class SourceRecord(NamedTuple):
    """One record, or why it cannot be read. Example: SourceRecord("log.jsonl:3", None, "JSON is malformed: ...")"""

    origin: str
    record: Json | None
    problem: str = ""


def records(path: Path) -> Iterator[SourceRecord]:
    """Yields the records of a file. Raises DataError if there is no such file, or none of its content can be read."""
    if not path.is_file():
        raise DataError("not a file" if os.path.lexists(path) else "no such file", path)
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04":
        yield from _of_archive(path)
    elif start[:2] == b"\x1f\x8b":
        raise DataError("packed with gzip; unpack it first (gunzip)", path)
    elif encoding := json_lines.foreign_encoding(start):
        raise DataError(f"the text is {encoding}; save it as UTF-8", path)
    else:
        yield from _of_text(path)


# --- text -------------------------------------------------------------------------------------------------------------


def _of_text(path: Path) -> Iterator[SourceRecord]:
    """JSON lines; or, where the first line is no whole value, one JSON value over many lines."""
    is_first = True
    for number, line in _lines(path):
        origin = f"{path}:{number}"
        if line is None:
            yield SourceRecord(origin, None, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        elif is_first and _opens(line) and (whole := _whole(path)) is not None:
            yield from _parsed(whole, str(path))
            return
        elif json_lines.is_torn(line):
            yield SourceRecord(origin, None, "the last line is half-written")
        else:
            yield from _parsed(line, origin)
        is_first = False


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, line) of each line that is not blank; None for one that is too long."""
    number = 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(CHUNK)
                yield number, None
            elif line.strip():
                yield number, line


def _opens(line: bytes) -> bool:
    """Returns whether a line is only the beginning of a value over many lines, as programs write it that indent."""
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    return text in (b"[", b"{") or (text[:1] in b"[{" and text[-1:] in b"[{,")


def _whole(path: Path) -> bytes | None:
    """Returns the content of a file that is one JSON value, or None if it is too large."""
    return path.read_bytes() if path.stat().st_size <= MAX_LINE_BYTES else None


def _parsed(text: bytes, origin: str) -> Iterator[SourceRecord]:
    try:
        value = json_lines.decode(text, _ANY)
    except (ValueError, MemoryError) as error:
        yield SourceRecord(origin, None, str(error) or "too large for the memory")
        return
    yield from _found(value, origin)


def _found(value: Any, origin: str) -> Iterator[SourceRecord]:
    """Yields the records in a value: itself, the items of a list, or those of an object that is only their envelope."""
    if isinstance(value, dict | list) and is_deep(value, MAX_DEPTH):
        yield SourceRecord(origin, None, "JSON is nested too deeply")
        return
    items = value if isinstance(value, list) else _enveloped(value)
    if items is None:
        is_record = isinstance(value, dict)
        yield SourceRecord(origin, value if is_record else None, "" if is_record else "not a JSON object")
        return
    for number, item in enumerate(items, 1):
        is_record = isinstance(item, dict)
        yield SourceRecord(
            f"{origin}, item {number}", item if is_record else None, "" if is_record else "not a JSON object"
        )


def _enveloped(value: Any) -> list[Any] | None:
    """Returns the items of {"data": [...]} and the like. A record that has such a key besides its own is no
    envelope."""
    if not isinstance(value, dict) or "id" in value or "messages" in value:
        return None
    return next((value[key] for key in LISTS if isinstance(value.get(key), list)), None)


# --- archives ---------------------------------------------------------------------------------------------------------


def _of_archive(path: Path) -> Iterator[SourceRecord]:
    """Yields the JSON entries below `samples/` of a zip archive, as inspect writes it, each with the header's task."""
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"a damaged zip archive: {describe(error)}", path) from None
    with archive, path.open("rb") as file:
        entries = [entry for entry in archive.infolist() if entry.filename.startswith("samples/")]
        if not entries:
            raise DataError("a zip archive without samples/; only .eval files of inspect are read", path)
        if len(entries) > MAX_ENTRIES:
            raise DataError(f"a zip archive of {len(entries)} entries; at most {MAX_ENTRIES} are read", path)
        left = MAX_ARCHIVE_BYTES
        for entry in entries:
            origin = f"{path}, {entry.filename[:200]}"
            try:
                text = _unpacked(archive, entry, file, min(MAX_LINE_BYTES, left))
            except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
                yield SourceRecord(origin, None, f"it cannot be unpacked: {describe(error)}")
                continue
            if text is None:
                yield SourceRecord(origin, None, f"it unpacks to more than {MAX_LINE_BYTES >> 20} MiB")
                continue
            left -= len(text)
            yield from _parsed(text, origin)


def _unpacked(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, file: IO[bytes], limit: int) -> bytes | None:
    """Returns the content of an entry, or None if it really is larger than `limit`."""
    if entry.compress_type not in METHODS:
        raise ValueError(f"packed by method {entry.compress_type} of zip, which inspect does not use")
    if entry.compress_type != ZSTANDARD or hasattr(zipfile, "ZIP_ZSTANDARD"):
        with archive.open(entry) as stream:
            text = stream.read(limit + 1)
    else:
        text = _read_zstandard(entry, file, limit + 1)
    return text if len(text) <= limit else None


def _read_zstandard(entry: zipfile.ZipInfo, file: IO[bytes], limit: int) -> bytes:
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ImportError:
        raise ValueError("it is packed with zstandard: pip install 'art-cli[data]'") from None
    file.seek(entry.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))  # lengths of what stands between the header and the data
    file.seek(name + extra, io.SEEK_CUR)
    packed = file.read(min(entry.compress_size, MAX_LINE_BYTES))
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(packed), "zstd") as stream:
        read: bytes = stream.read(limit)
    return read
