"""Refuses requests that another site's page may have made a browser send. Each answer limits what a page may load.

A page of another site cannot read our answers, but its name may be made to point to this machine (DNS rebinding): then
the Host header has that name. A browser says in Origin and Sec-Fetch-Site which site a request comes from.
"""

import ipaddress
import socket
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cli.chat.api_keys import is_loopback

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
OWN = ("same-origin", "none")  # values of Sec-Fetch-Site: our page, or an address that the user typed


class Guard:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(Headers(scope=scope), scope)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.setdefault("content-security-policy", POLICY)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if refusal is None:
            await self._app(scope, receive, send_guarded)
            return
        body = b'{"error":"' + refusal.encode() + b'"}'
        await send_guarded(
            {
                "type": "http.response.start",
                "status": 403,
                "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            }
        )
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, headers: Headers, scope: Scope) -> str | None:
        """Returns the reason why the request is refused, or None."""
        port = scope["server"][1] if scope.get("server") else None
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_own(host[0], port):
            return "this page is asked for by its own address only"
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host[0]}":
            return "this page answers no other site"
        if headers.get("sec-fetch-site", "none") not in OWN:
            return "this page answers no other site"
        return None

    def _is_own(self, host: str, port: int | None) -> bool:
        name, _, given = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not name:
            name, given = host, ""
        if port is not None and given != str(port) and not (given == "" and port == 80):
            return False
        return is_own_name(name.removeprefix("[").removesuffix("]").lower(), self._host)


def is_own_name(name: str, host: str) -> bool:
    """Returns True if a server that listens on `host` is meant by this name.

    A server on all addresses has all of them.
    """
    if is_loopback(name) or name == host.lower():
        return True
    if host not in ("0.0.0.0", "::", ""):
        return False
    return _is_address(name) or name in _machine_names()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _machine_names() -> Sequence[str]:
    own = socket.gethostname().lower()
    return (own, f"{own}.local")
