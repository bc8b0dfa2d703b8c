"""Clients' names in files: "key 1", "key 2", ... A name stays with its key, and no other key ever gets it.

clients.json in the gateway's directory lists salted hashes of the keys, in the order in which they were first given.
The order of the key file is therefore free, and a key that takes another's place there cannot rate or continue the
other's conversations. The file's salt also tells apart names that redaction makes equal (redaction.py).
"""

import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from art_cli.runs.durable import read_object, write_file
from art_cli.runtime.errors import DataError, one_line

FILE = "clients.json"


class _Known(msgspec.Struct):
    salt: str
    hashes: list[str]  # scrypt


def name_clients(directory: Path, keys: Sequence[str]) -> list[str]:
    """Returns each key's name and records new keys. Raises DataError for a file that art did not write."""
    path, known = directory / FILE, _read(directory) or _Known(secrets.token_hex(16), [])
    hashes = [_hash(key, known.salt) for key in keys]
    new = [each for each in dict.fromkeys(hashes) if each not in known.hashes]
    if new or not path.exists():
        known.hashes += new
        write_file(path, msgspec.json.format(msgspec.json.encode(known)) + b"\n")
    return [f"key {known.hashes.index(each) + 1}" for each in hashes]


def read_salt(directory: Path) -> bytes:
    """Returns the salt of a directory whose clients have names; b"" without them. Raises DataError."""
    known = _read(directory)
    return known.salt.encode() if known is not None else b""


def _read(directory: Path) -> _Known | None:
    path = directory / FILE
    if not path.exists():
        return None
    try:
        return msgspec.convert(read_object(path), _Known)
    except msgspec.ValidationError as error:
        raise DataError(f"not a list of clients: {one_line(error)}", path) from None


def _hash(key: str, salt: str) -> str:
    """Takes some 10 ms, so that a reader of the file cannot find a short key by trying."""
    return hashlib.scrypt(key.encode(), salt=salt.encode(), n=2**12, r=8, p=1, dklen=32).hex()
