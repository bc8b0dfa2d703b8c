"""Guard: refuses requests of other sites' pages (chat/pages.py), and sends with each answer what a page may load."""

import ipaddress
import socket
from collections.abc import Sequence
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cli.chat.api_keys import is_loopback
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.pages import check_sender

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
REFUSAL = b'{"error":"ask for this page by its own address, from no other site, and send application/json"}'


class Guard:
    """An ASGI application in front of another one."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.setdefault("content-security-policy", POLICY)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        port = str(scope["server"][1])
        try:
            check_sender(scope["method"], Headers(scope=scope), is_own=partial(self._is_own, port))
        except ChatError as error:
            refusal = Response(REFUSAL, 415 if error.status == 415 else 403, media_type="application/json")
            await refusal(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)

    def _is_own(self, port: str, name: str, given: str) -> bool:
        return given == (port if port != "80" else given or port) and is_own_name(name, self._host)


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
