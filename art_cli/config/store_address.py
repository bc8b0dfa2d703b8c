"""Addresses in an object store, such as s3://bucket/prefix."""

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from art_cli.runtime.errors import printable

_ADDRESS = re.compile(r"(?P<protocol>[a-z][a-z0-9+.-]*)://(?P<rest>[^\s\\]+)", re.ASCII)
_PASSWORD = re.compile(r"[^/@]*:[^/@]*@")  # "key:secret@" after the protocol
MAX_ADDRESS = 1000
PACKAGES = {"s3": "pip install 'art-cli[s3]'", "s3a": "pip install 'art-cli[s3]'", "gs": "pip install gcsfs",
            "gcs": "pip install gcsfs", "az": "pip install adlfs", "abfs": "pip install adlfs"}  # fmt: skip


def is_address(text: object) -> bool:
    """Returns True for an address, False for a path."""
    return isinstance(text, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def problem_of(text: str) -> str:
    """Returns the reason why the address is invalid, else ""."""
    match = _ADDRESS.fullmatch(text)
    if match is None or len(text) > MAX_ADDRESS:
        return "not an address of an object store; it looks like s3://bucket/prefix"
    if _PASSWORD.match(match["rest"]):
        return "an address must not hold a key; the store's client finds it in the environment"
    if "?" in text or "#" in text or "::" in text:
        return "an object store address cannot contain '?', '#' or '::'"
    if any(part in ("", ".", "..") for part in match["rest"].strip("/").split("/")):
        return "an address must not have empty parts, '.' or '..'"
    return ""


def shown(text: str) -> str:
    """Returns the address for error messages, without credentials."""
    return printable(re.sub(r"://[^/]*@", "://***@", text), limit=200)


def protocol_of(address: str) -> str:
    return address.partition("://")[0]


def missing_client(address: str) -> str:
    """Returns the missing client package and its cure, or "" if the client is installed."""
    protocol = protocol_of(address)
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(protocol)
    except ValueError:
        return f"no object store is known as {protocol}://; s3://, gs:// and az:// are"
    except ImportError as error:
        cure = PACKAGES.get(protocol) or f"install what fsspec needs for {protocol}://"
        cure = "pip install 'art-cli[storage]'" if error.name == "fsspec" else cure
        return f"the client of {protocol}:// is not installed; {cure}"
    return ""


def _checked(text: str) -> str:
    if problem := problem_of(text):
        raise ValueError(f"{shown(text)}: {problem}")
    return text.rstrip("/")


StoreAddress = Annotated[str, AfterValidator(_checked)]


def _no_address(value: Any) -> Any:
    if is_address(value):
        problem = problem_of(value) or "an address, and a directory is wanted here"
        raise ValueError(f"{shown(value)}: {problem}")
    return value


Directory = Annotated[Path, BeforeValidator(_no_address)]
