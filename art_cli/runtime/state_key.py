"""Headers of a model call. X-Art-State is an environment state key; `X-Art-Record: no` turns recording off.

The key is percent-encoded UTF-8. Unrecorded calls are answered normally. Only uses the standard library, because the
Python that runs rollouts may lack other packages (rollouts/bootstrap.py).
"""

import hashlib
from urllib.parse import quote, unquote_to_bytes

RECORD_HEADER = "X-Art-Record"
NO_RECORD = "no"
UNRECORDED = {RECORD_HEADER: NO_RECORD}

STATE_HEADER = "X-Art-State"
MAX_LENGTH = 256  # maximum characters of a key; longer keys are recorded as digests


def write_header(key: str) -> str:
    """Returns the header value for a key. An empty key means no state."""
    return quote(shortened(key), safe=" ", errors="replace")


def read_header(value: str) -> str | None:
    """Returns the key from a header value, up to MAX_LENGTH characters; None for an empty value.

    Starlette decodes a header's bytes as Latin-1. Many clients send UTF-8 without percent-encoding. Invalid
    percent-encoding is kept literally, so clients may send plain ASCII keys.
    """
    data = unquote_to_bytes(value.encode("latin-1"))
    try:
        return shortened(data.decode()) or None
    except UnicodeDecodeError:
        return shortened(data.decode("latin-1"))


def shortened(key: str) -> str:
    """Returns the key, or "sha256:" and a digest for keys above MAX_LENGTH. Equal keys stay equal."""
    if len(key) <= MAX_LENGTH:
        return key
    return "sha256:" + hashlib.sha256(key.encode(errors="replace")).hexdigest()
