"""Text that a judge is shown: what can be sent, and an estimate of the tokens that it takes. Pure."""

import json
from typing import Any

# Control characters but tab and newline. Providers refuse some of them, and none means anything to a judge.
_CONTROL = {code: "\ufffd" for code in (*range(9), 11, 12, *range(14, 32), 127)}
BYTES_PER_TOKEN = 4  # measured on English and code with tokenizers of 2023 and later; other scripts need fewer bytes


def clean(value: Any) -> str:
    """`value` as text that can be sent: JSON unless it is a text, without lone surrogates and control characters."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode().replace("\r\n", "\n").translate(_CONTROL)


def count_tokens(text: str) -> int:
    """Returns the estimated number of tokens, rounded up."""
    size = len(text) if text.isascii() else len(text.encode())
    return -(-size // BYTES_PER_TOKEN)
