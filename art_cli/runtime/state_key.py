"""Headers of a model call. X-Art-State is an environment state key; `X-Art-Record: no` turns recording off.

The key is percent-encoded UTF-8. Unrecorded calls are answered normally. Only uses the standard library, because the
Python that runs rollouts may lack other packages (rollouts/bootstrap.py).
"""

import hashlib
from urllib.parse import quote, unquote

RECORD_HEADER = "X-Art-Record"
NO_RECORD = "no"
UNRECORDED = {RECORD_HEADER: NO_RECORD}

STATE_HEADER = "X-Art-State"
MAX_LENGTH = 256  # maximum characters of a key; longer keys are recorded as digests


def write_header(key: str) -> str:
    """Returns the header value for a key. An empty key means no state."""
    return quote(shortened(key), safe=" ", errors="replace")


def read_header(value: str) -> str | None:
    """Returns the header's key, or None if empty. Invalid percent-encoding is literal, as of plain ASCII keys."""
    return shortened(unquote(read_text(value), errors="replace")) or None


def read_text(value: str) -> str:
    """Returns a header value's text. Starlette decodes the bytes as Latin-1, and many clients send UTF-8."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def shortened(key: str) -> str:
    """Returns the key, or "sha256:" and a digest for keys above MAX_LENGTH. Equal keys stay equal."""
    if len(key) <= MAX_LENGTH:
        return key
    return "sha256:" + hashlib.sha256(key.encode(errors="replace")).hexdigest()
