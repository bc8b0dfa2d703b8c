"""Lots drawn by a hash: the same for the same key, in every process and after a restart."""

import hashlib


def is_drawn(key: str, share: float) -> bool:
    """Returns True for about this share of all keys."""
    return int.from_bytes(hashlib.sha256(key.encode(errors="replace")).digest()[:8]) < share * 2**64
