"""The rules by which the leaderboard checks a call in Python: `ast_checker` of bfcl-eval, for one call.

Importing that checker imports the clients of some thirty model providers, so its rules stand here again, leniencies
included; tests/recipes/test_function_calling.py compares both. Text is compared without case, spaces and punctuation.
"""

import re
from typing import Any

TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}


def is_right(arguments: dict[str, Any], schema: dict[str, Any], answer: dict[str, list[Any]]) -> bool:
    """Returns whether the arguments of a call with the right name are all right.

    `schema` is the function's `parameters`, `answer` maps each parameter to its right values.
    """
    if not set(schema["required"]) <= set(arguments):
        return False
    missing = set(answer) - set(arguments)
    return all("" in answer[name] for name in missing) and all(
        is_right_argument(name, value, schema, answer) for name, value in arguments.items()
    )


def is_right_argument(name: str, value: Any, schema: dict[str, Any], answer: dict[str, list[Any]]) -> bool:
    if name not in schema["properties"] or name not in answer:
        return False
    try:
        return _is_right_value(value, schema["properties"][name], answer[name])
    except (TypeError, AttributeError, KeyError, OverflowError):  # where the leaderboard's checker stops
        return False


def _is_right_value(value: Any, schema: dict[str, Any], right: list[Any]) -> bool:
    expected = TYPES[schema["type"]]
    inner = TYPES[schema["items"]["type"]] if expected is list else None
    if expected is float and type(value) is int:
        value = float(value)
    known = _type_of(right)
    if type(value) is not expected:  # a variable's name in place of its value, for example
        return type(value) is known and value in right
    if inner is not None and not any(_has_types(value, each, inner) for each in right):
        return False
    if known is not None and known is not expected:
        return value in right
    if expected is dict:
        return any(_is_right_dict(value, each) for each in right if each != "")
    if inner is dict:
        return any(_are_right_dicts(value, each) for each in right)
    if expected is str:
        return _plain(value) in [_plain(each) for each in right if type(each) is str]
    if expected is list:
        return [_plain(each) for each in value] in [[_plain(each) for each in option] for option in right]
    return value in right


def _has_types(values: list[Any], right: Any, inner: type) -> bool:
    """Returns whether each value has the declared type or that of the right values."""
    return not isinstance(right, list) or all(type(value) in (inner, _type_of(right)) for value in values)


def _is_right_dict(value: dict[str, Any], right: dict[str, list[Any]]) -> bool:
    return all(_plain(each) in [_plain(option) for option in right.get(name, [])] for name, each in value.items()) and (
        all(name in value or "" in options for name, options in right.items())
    )


def _are_right_dicts(values: list[Any], right: list[Any]) -> bool:
    return len(values) == len(right) and all(map(_is_right_dict, values, right))


def _type_of(right: list[Any]) -> type | None:
    return next((type(each) for each in right if each != ""), None)


def _plain(value: Any) -> Any:
    """Returns text without case, spaces and punctuation, any other value as it is."""
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if type(value) is str else value
