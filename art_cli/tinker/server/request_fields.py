"""The bodies of requests: read within bounds, as JSON fields, with the hash by which a repeated request is known."""

import hashlib
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.reading import RequestReader, decode_object
from art_cli.chat.request_body import BodyLimit, read_body

Json = dict[str, Any]
PROTO = "application/x-protobuf"
BODY_S = 120.0  # longest wait for a request's body


class Bodies:
    """Reads bodies of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._limit = BodyLimit(max_bytes)
        self.reader = RequestReader()

    async def raw(self, http: Request) -> bytes:
        body = await read_body(http, self._limit, BODY_S)
        encoding = http.headers.get("content-encoding", "identity").lower()
        if encoding not in ("", "identity"):
            raise ChatError(415, f"content-encoding {encoding[:50]!r}: send the body as it is")
        return body

    async def fields(self, http: Request) -> Json:
        return (await self.signed(http))[0]

    async def signed(self, http: Request) -> tuple[Json, bytes]:
        """Returns the body's fields, and its hash, by which a repeated request is known."""
        body = await self.raw(http)
        fields: Json = await self.reader.read(decode_object, body or b"{}")
        return fields, digest_of(http, body)


def content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def digest_of(http: Request, body: bytes) -> bytes:
    """Returns the hash of what is asked, by which a repeated request is known."""
    return hashlib.blake2b(http.url.path.encode() + b"\0" + body, digest_size=16).digest()
