"""Middleware: the ASGI application around the application. It checks keys, admits requests, writes the access log.

Where the server has keys, everything but /health needs one, also paths that do not exist, so that a client without a
key learns nothing. Where it has none, programs on this machine may ask and web pages may not, /health included.
The log has method, path, status and seconds, never headers, query strings or content. Of an unknown path it shows only
the plain words, because some clients put a key in the path.
"""

import logging
import re
import time
from contextlib import ExitStack

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cli.chat.api_keys import Keys
from art_cli.chat.chat_app import HEALTH, error_response, wrong_key
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.pages import check_sender
from art_cli.chat.wires import WIRES
from art_cli.serving.admission import Admission
from art_cli.serving.meter import Meter

log = logging.getLogger(__name__)

WATCHED = ("/ready", "/metrics", HEALTH)  # machines ask these every few seconds, so they are logged at debug level
KNOWN = (*(wire.path for wire in WIRES), *WATCHED, "/v1/models")
WORD = re.compile(r"v\d|[a-z_]{1,24}")  # a part of a path such as /v1/embeddings; keys have digits, capitals, or more
MAX_WORDS = 8
GONE = 499  # nginx's status for a client that went away


class Middleware:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, keys: Keys, admission: Admission, meter: Meter) -> None:
        self._app, self._keys, self._admission, self._meter = app, keys, admission, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        begin, status = time.perf_counter(), GONE

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._pass(scope, receive, send_noting)
        finally:
            self._note(scope, status, time.perf_counter() - begin)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_completion = path in WIRES and scope["method"] == "POST"
        with ExitStack() as stack:
            try:
                self._check_caller(scope)
                if is_completion:
                    stack.enter_context(self._admission.admitted())
            except ChatError as error:
                await error_response(error, WIRES.at(path, Headers(scope=scope)))(scope, receive, send)
                return
            await self._app(scope, receive, _until_taken(send) if is_completion else send)

    def _check_caller(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if not self._keys:
            check_sender(scope["method"], headers)
        elif scope["path"] != HEALTH and not self._keys.admits(key := WIRES.key(scope["path"], headers)):
            raise wrong_key(key)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        self._meter.requests.labels(route=path if path in KNOWN else "other", code=str(status)).inc()
        if path in WIRES:
            self._meter.request_s.observe(seconds)
        level = logging.DEBUG if path in WATCHED else logging.INFO
        log.log(level, "%s %s %d %.3f s", scope["method"], self._shown(path), status, seconds)

    def _shown(self, path: str) -> str:
        """Returns the path without parts that may be keys: /v1/models/* of /v1/models/sk-42."""
        if path in KNOWN:
            return path
        parts = path.split("/")
        shown = [part if not part or self._is_word(part) else "*" for part in parts[:MAX_WORDS]]
        return "/".join(shown + ["..."] * (len(parts) > MAX_WORDS))

    def _is_word(self, part: str) -> bool:
        return bool(WORD.fullmatch(part)) and not (self._keys and self._keys.admits(part))


def _until_taken(send: Send) -> Send:
    """`send`, but the end of a reply returns only when the client has taken the reply or gone.

    The end is sent apart from the last piece, because a send waits for the pieces before it
    (chat/client_connection.py).
    """

    async def send_apart(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body") and not message.get("more_body"):
            await send({**message, "more_body": True})
            message = {**message, "body": b""}
        await send(message)

    return send_apart
