"""Keys: valid API keys, stored as hashes, compared in constant time, and never shown or logged; and a check of senders.

The check protects servers without a key from web pages, because any page can make the user's browser call this machine.
A page can send a `text/plain` POST to any address without permission. It can also point its own host name to 127.0.0.1
(DNS rebinding), which the browser then treats as the page's own server. Browsers reveal both attacks in headers that a
page cannot change. Programs (curl, the OpenAI clients) do not send these headers.
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from starlette.datastructures import Headers

from art_cli.chat.chat_errors import ChatError
from art_cli.runtime.errors import UsageError

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(?::(\d{0,5}))?")
OWN_SITES = ("same-origin", "none")  # "none" means that the user typed the address
CURE = "start the server with a key (ART_API_KEY) to reach it this way"


class Keys:
    """The valid keys. Without any key, every client may ask."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def __repr__(self) -> str:
        return f"Keys({len(self._hashes)} of them)"

    def admits(self, key: str | None) -> bool:
        """Returns whether the key is valid. The response time does not depend on the keys."""
        if not self._hashes:
            return True
        sent = _hash(key or "")
        return bool(sum(hmac.compare_digest(sent, known) for known in self._hashes)) and key is not None


def bearer(headers: Headers) -> str | None:
    """Returns the key from `Authorization: Bearer KEY`."""
    scheme, _, key = single(headers, "authorization").partition(" ")
    return (key.strip() or None) if scheme.lower() == "bearer" else None


def single(headers: Headers, name: str) -> str:
    """Returns a header's value; "" if it is missing, or repeated with values that a proxy could read differently."""
    values = set(headers.getlist(name))
    return values.pop() if len(values) == 1 else ""


def read_key_texts(key: str | None, file: Path | None) -> list[str]:
    """Returns the keys of an option and of a file's lines, without # lines. Raises UsageError for unusable keys."""
    keys = [] if key is None else [key]
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
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
    """Raises UsageError if other machines can reach the address and no key is set."""
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


def check_sender(
    method: str,
    headers: Headers,
    kinds: Sequence[str] = ("application/json",),
    is_own: Callable[[str, str], bool] = lambda name, port: is_loopback(name),
) -> None:
    """Raises ChatError: 421 for a foreign host name, 403 for another site's page, 415 for a POST that is not JSON.

    `kinds` lists the accepted content types of a POST. Pages need permission to send them. `is_own` returns whether the
    name and port ("" if missing) from a Host header are this server's.

    Requests without a Host header are accepted, because browsers always send the header and old health checks do not.
    """
    hosts = headers.getlist("host")
    if not all((p := HOST.fullmatch(host)) and is_own(p[1].strip("[]").lower(), p[2] or "") for host in hosts):
        message = f"the Host header names another machine; this server is localhost, 127.0.0.1 or [::1]; {CURE}"
        raise ChatError(421, message, code="foreign_host")
    if any(origin not in [f"http://{host}" for host in hosts] for origin in headers.getlist("origin")):
        raise ChatError(403, f"a web page of another origin may not ask here; {CURE}", code="foreign_origin")
    if any(site not in OWN_SITES for site in headers.getlist("sec-fetch-site")):
        raise ChatError(403, f"a web page of another site may not ask here; {CURE}", code="foreign_origin")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method == "POST" and kind not in kinds:
        message = "requests are JSON: send the header Content-Type: application/json"
        raise ChatError(415, message, code="unsupported_media_type")
