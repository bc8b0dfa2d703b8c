"""Cleanup and token estimates for text sent to judges. Pure functions."""

import json
from typing import Any

# Control characters except tab and newline. Some providers reject them, and they carry no meaning.
_CONTROL = {code: "\ufffd" for code in (*range(9), 11, 12, *range(14, 32), 127)}
BYTES_PER_TOKEN = 4  # measured on English and code with tokenizers from 2023 on; other scripts need fewer bytes


def clean(value: Any) -> str:
    """Returns sendable text without lone surrogates and control characters. Values other than strings become JSON."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode().replace("\r\n", "\n").translate(_CONTROL)


def call_text(call: Any) -> str:
    """Returns a tool call as `name(arguments)`."""
    function = call.get("function", call.get("custom")) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return clean(call)
    return f"{clean(function.get('name'))}({clean(function.get('arguments', function.get('input')))})"


def count_tokens(text: str) -> int:
    """Returns the estimated token count, rounded up."""
    size = len(text) if text.isascii() else len(text.encode())
    return -(-size // BYTES_PER_TOKEN)
