"""Keys: the API keys that are valid. They are kept as hashes, compared in constant time, and never shown or logged."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers

from art_cli.runtime.errors import UsageError


class Keys:
    """The valid keys. Without any key, every client may ask."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def __repr__(self) -> str:
        return f"Keys({len(self._hashes)} of them)"

    def admits(self, key: str | None) -> bool:
        """Returns whether a client with this key may ask. The time it takes does not depend on the keys."""
        if not self._hashes:
            return True
        sent = _hash(key or "")
        return bool(sum(hmac.compare_digest(sent, known) for known in self._hashes)) and key is not None


def bearer(headers: Headers) -> str | None:
    """Returns the key of `Authorization: Bearer KEY`, or None if there is none."""
    scheme, _, key = single(headers, "authorization").partition(" ")
    return (key.strip() or None) if scheme.lower() == "bearer" else None


def single(headers: Headers, name: str) -> str:
    """Returns the header's value; "" if it is missing, or sent several times with values that differ.

    A proxy and this server could otherwise each check another one of them.
    """
    values = set(headers.getlist(name))
    return values.pop() if len(values) == 1 else ""


def read_keys(key: str | None, file: Path | None) -> Keys:
    """Returns the keys of `read_key_texts` as hashes."""
    return Keys(read_key_texts(key, file))


def read_key_texts(key: str | None, file: Path | None) -> list[str]:
    """Returns the keys of an option and of a file, one a line. Blank lines and lines that begin with # are skipped.

    Raises UsageError: a file without keys, or a key that no header can carry.
    """
    keys = [] if key is None else [key]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--api-key-file: cannot read {file}: {type(error).__name__}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise UsageError(f"--api-key-file: no keys in {file}; write one a line")
        keys += found
    for number, text in enumerate(keys, 1):
        if not text or not text.isascii() or not text.isprintable() or text != text.strip():
            raise UsageError(f"key {number}: a key is printable ASCII without spaces around it")
    return keys


def check_exposure(host: str, keys: Keys) -> None:
    """Raises UsageError: other machines can reach the address, and there is no key."""
    if not keys and not is_loopback(host):
        raise UsageError(
            f"--host {host}: others can reach it, so it needs a key: set ART_API_KEY, or give --api-key-file"
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
