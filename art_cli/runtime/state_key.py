"""Headers of a model call: X-Art-State, the key of an environment's state, and `X-Art-Record: no`, a call not recorded.

The key is percent-encoded UTF-8. A call with the second header is answered all the same. Standard library only, because
the Python that runs rollouts may have nothing else (rollouts/bootstrap.py).
"""

import hashlib
from urllib.parse import quote, unquote

RECORD_HEADER = "X-Art-Record"
NO_RECORD = "no"
UNRECORDED = {RECORD_HEADER: NO_RECORD}

STATE_HEADER = "X-Art-State"
MAX_LENGTH = 256  # characters of a key that is recorded as it is; a longer one is recorded as its digest


def write_header(key: str) -> str:
    """Returns the header's value for a key. An empty key means that the state has none."""
    return quote(_shortened(key), safe=" ", errors="replace")


def read_header(value: str) -> str | None:
    """Returns the key in a header's value, at most MAX_LENGTH characters; None for an empty one.

    What is no percent-encoding stands for itself, so a client may send a plain ASCII key as it is.
    """
    return _shortened(unquote(value, errors="replace")) or None


def _shortened(key: str) -> str:
    """Returns the key, or "sha256:" and a digest of one that is longer than MAX_LENGTH. Equal keys stay equal."""
    if len(key) <= MAX_LENGTH:
        return key
    return "sha256:" + hashlib.sha256(key.encode(errors="replace")).hexdigest()
