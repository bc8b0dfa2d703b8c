"""KeyGuard: requires the API key on server routes that vLLM leaves open, such as /sleep and /collective_rpc.

vLLM itself checks the key only on /v1 and a few more prefixes. `--middleware` loads this class inside the server, whose
Python does not have this package. So this file is alone in its directory, which is added to the server's path.
"""

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

OPEN = ("/health", "/metrics")  # read-only


class KeyGuard:
    """ASGI middleware. The key is the server's VLLM_API_KEY."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN or self._has_key(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        return any(hmac.compare_digest(value, self._wanted) for value in given)
