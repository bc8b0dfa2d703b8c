"""The arguments of a tool call: as a JSON object for protocols that have them so, and compared as JSON.

A model samples arguments as text. A protocol that hands them out as an object loses how they were written: the spaces,
the order of the keys, 1.0 or 1. So a call that came back and the call that was sampled are compared by their values.
"""

from typing import Any

import msgspec

from art_cli.runtime.processes.plain_json import is_deep

Json = dict[str, Any]

MAX_GROWTH = 32  # how many times longer the same arguments may be, with line breaks, indents and escapes
MAX_DEPTH = 32  # levels of arguments handed out as an object; a client must be able to send them back (reading.py)


def input_of(arguments: str) -> Json:
    """Returns the arguments as an object. Text that is no object, as in a cut call, is its field `arguments`.

    Example: input_of('{"a": 2}') is {"a": 2}, and input_of('{"a": ') is {"arguments": '{"a": '}.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) and not is_deep(value, MAX_DEPTH) else {"arguments": arguments}


def are_same(sampled: str, returned: str) -> bool:
    """Returns whether two texts of arguments are the same JSON value, numbers compared as numbers."""
    if sampled == returned:
        return True
    if len(returned) > MAX_GROWTH * (len(sampled) + 1):  # so that no long text is read which cannot be the same
        return False
    try:
        return _is_same(input_of(sampled), msgspec.json.decode(returned))
    except (ValueError, RecursionError):
        return False


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return bool(first == second)
