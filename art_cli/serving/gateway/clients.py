"""Clients: the API keys of `art gateway`, and the client and the conversation that a key names.

    KEY           one of the keys; conversations differ by how they go on
    KEY:NAME      the same client; all calls with it are the conversation NAME

NAME is chosen by the client. It reaches the application as the header X-Art-Conversation, which a client may also send
itself.
"""

from collections.abc import Sequence
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art_cli.chat.api_keys import Keys
from art_cli.chat.chat_app import CONVERSATION_HEADER
from art_cli.chat.wires import WIRES
from art_cli.runtime.errors import UsageError
from art_cli.runtime.secrets import MIN_LENGTH

ANYONE = "anyone"  # the client of every call where there are no keys
SEPARATOR = ":"


class Clients(Keys):
    """The valid keys, in order. Without any key, every caller on this machine is one client."""

    def __init__(self, keys: Sequence[str]) -> None:
        """Raises UsageError: a key is too short to be kept out of texts."""
        super().__init__(keys)
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_LENGTH:
                raise UsageError(f"key {number}: it is shorter than {MIN_LENGTH} characters; take a longer one")
        self._single = [Keys([key]) for key in keys]

    @property
    def labels(self) -> list[str]:
        """The clients by the names that the files have for them: "key 1", "key 2", ..."""
        return [f"key {number}" for number in range(1, len(self._single) + 1)] or [ANYONE]

    def admits(self, key: str | None) -> bool:
        return self.label(key) is not None

    def label(self, key: str | None) -> str | None:
        """Returns the client with this key, or None if the key is not valid."""
        if not self._single:
            return ANYONE
        base, _ = self.split(key)
        admitted = [keys.admits(base) for keys in self._single]  # all of them, so that the time reveals nothing
        return next((label for label, is_its in zip(self.labels, admitted, strict=True) if is_its), None)

    def split(self, key: str | None) -> tuple[str | None, str]:
        """Returns the key itself, and the name behind it; "" where there is none."""
        if key is None or super().admits(key) and self._single:
            return key, ""
        base, _, name = key.partition(SEPARATOR)
        return base, name


class NamedConversations:
    """An application around another: the name behind a key becomes a header, unless the client sends that header."""

    def __init__(self, app: ASGIApp, clients: Clients) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        _, name = self._clients.split(WIRES.key(scope["path"], headers))
        if name and CONVERSATION_HEADER not in headers:
            header = (CONVERSATION_HEADER.lower().encode(), quote(name, errors="replace").encode())
            scope = {**scope, "headers": [*scope["headers"], header]}
        await self._app(scope, receive, send)
