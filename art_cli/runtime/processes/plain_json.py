"""The JSON of run files, read and written with the standard library alone.

The rollout process may be a Python without our dependencies (bootstrap.py), so msgspec is unavailable. Common types
that JSON lacks (dates, sets, dataclasses) are encoded like msgspec does; NaN becomes null.
"""

import base64
import dataclasses
import json
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

MAX_DEPTH = 200  # maximum nesting of lists and objects; Python versions have different json limits
MAX_CHAT_DEPTH = 64  # maximum nesting of requests, transcripts and scenarios; a tool's schema nests 10 to 20 deep


def dump(value: Any) -> bytes:
    """Returns a line of JSON without its newline.

    Raises TypeError for types without a JSON form, and ValueError for invalid Unicode, circular references, too deep
    nesting, and integers with thousands of digits.
    """
    try:
        return _ENCODER.encode(value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load(data: bytes) -> Any:
    """Decodes JSON. Raises ValueError for invalid JSON, too deep nesting, and huge numbers."""
    try:
        return _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_deep(value: Any, depth: int = MAX_DEPTH + 1) -> bool:
    """Returns True if lists and objects are nested more than `depth` levels, counting the outermost."""
    level = [value]
    for _ in range(depth):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _as_plain(value: Any) -> Any:
    """Returns the JSON form for a value of a type that JSON lacks."""
    match value:
        case set() | frozenset():
            return list(value)
        case date() | time():  # a datetime is a date
            return value.isoformat()
        case Decimal() | UUID():
            return str(value)
        case Enum():
            return value.value
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_plain)
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)
