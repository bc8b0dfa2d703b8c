"""JSON as the run's files hold it, written and read with the standard library alone.

The rollout process may be a Python that has none of our dependencies (bootstrap.py), so it has no msgspec. What msgspec
writes of the common types that JSON lacks (a date, a set, a dataclass), this writes as well; NaN becomes null.
"""

import base64
import dataclasses
import json
from datetime import date, time
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

MAX_DEPTH = 200  # lists and objects inside each other; Python versions differ in how many their json can read


def dump(value: Any) -> bytes:
    """Returns one line of JSON, without its newline.

    Raises TypeError, which names the type that JSON has no form for; ValueError: text that is not Unicode, an object
    that holds itself, nesting that Python's json cannot follow, a number of thousands of digits.
    """
    try:
        return _ENCODER.encode(value).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def load(data: bytes) -> Any:
    """Returns the value of a JSON text. Raises ValueError: it is none, is nested too deeply, or has a huge number."""
    try:
        return _DECODER.decode(data.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_deep(value: Any, depth: int = MAX_DEPTH + 1) -> bool:
    """Returns whether more than `depth` lists and objects stand inside each other, the outermost one counted."""
    level = [value]
    for _ in range(depth):
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def _as_plain(value: Any) -> Any:
    """Returns what stands in JSON for a value of a type that it lacks."""
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
