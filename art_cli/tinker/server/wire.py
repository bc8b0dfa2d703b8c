"""JSON requests and answers: request bodies, request types, and answer fields.

Bodies are read within limits, and hashed to recognize repeated requests.
"""

import hashlib
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.reading import BodyLimit, RequestReader, convert, decode_object, read_body
from art_cli.chat.requests import Json
from art_cli.tinker.server import Listed, ModelNumber, Seed, SequenceNumber, TtlSeconds
from art_cli.tinker.server.checkpoint_store import KINDS, Notes, Place
from art_cli.tinker.server.futures import Future
from art_cli.tinker.server.models import AdamParams

PROTO = "application/x-protobuf"
BODY_S = 120.0  # timeout for reading a request body
MAX_PAGE = 1000


class Bodies:
    """Reads request bodies of up to `max_bytes`."""

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
        body = await self.raw(http)
        fields: Json = await self.reader.read(decode_object, body or b"{}")
        return fields, digest_of(http, body)


def content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def digest_of(http: Request, body: bytes) -> bytes:
    """Returns the request hash, used to recognize repeated requests."""
    return hashlib.blake2b(http.url.path.encode() + b"\0" + body, digest_size=16).digest()


class NewSession(msgspec.Struct):
    user_metadata: Json | None = None
    display_name: str | None = None


class OfSession(msgspec.Struct):
    session_id: str


class Search(msgspec.Struct):
    session_id: str | None = None
    user_metadata: dict[str, str] = {}
    display_name: str | None = None
    limit: Listed = 50


class Lora(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, Meta(ge=1, le=2**15)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    model_seq_id: ModelNumber
    base_model: str
    user_metadata: Json | None = None
    lora_config: Lora | None = None
    optimizer_config: Json = {}
    type: str = ""


class OfModel(msgspec.Struct):
    model_id: str


class OptimStep(msgspec.Struct, forbid_unknown_fields=True):
    model_id: str
    seq_id: SequenceNumber | None = None
    adam_params: AdamParams | None = None
    optimizer_params: Json | None = None
    type: str = ""


class Save(msgspec.Struct, forbid_unknown_fields=True):
    model_id: str
    path: str | None = None
    seq_id: SequenceNumber | None = None
    sampling_session_seq_id: SequenceNumber | None = None
    kind: str = "snapshot"  # "snapshot" also satisfies "inflight", which accepts these weights or newer ones
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None
    type: str = ""


class Load(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    optimizer: bool = True
    model_id: str | None = None
    seq_id: SequenceNumber | None = None
    session_id: str | None = None
    model_seq_id: ModelNumber | None = None
    base_model: str | None = None
    user_metadata: Json | None = None
    optimizer_config: Json | None = None
    weights_access_token: str | None = None
    type: str = ""


class OfPath(msgspec.Struct):
    tinker_path: str


class Ttl(msgspec.Struct):
    ttl_seconds: TtlSeconds | None = None


class NewSampler(msgspec.Struct, forbid_unknown_fields=True):
    session_id: str
    sampling_session_seq_id: SequenceNumber
    base_model: str | None = None
    model_path: str | None = None
    type: str = ""


class Page(msgspec.Struct):
    offset: Listed = 0
    limit: Listed = 20


class Retrieve(msgspec.Struct):
    request_id: str


# --- answers ----------------------------------------------------------------------------------------------------------


def reply(fields: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(fields), status, headers, "application/json")


def try_again(future: Future) -> Json:
    state = "paused_capacity" if future.waits_for else "active"
    waiting = {"queue_state_reason": future.waits_for} if future.waits_for else {}
    return {"type": "try_again", "request_id": future.id, "queue_state": state, **waiting}


def checkpoint_of(at: Place, notes: Notes) -> Json:
    return {
        "checkpoint_id": f"{at.kind}/{at.name}",
        "checkpoint_type": KINDS[at.kind],
        "time": moment(notes.created),
        "tinker_path": at.uri,
        "size_bytes": notes.num_bytes,
        "public": notes.is_public,
        "user_metadata": notes.user_metadata,
        "expires_at": None if notes.expires is None else moment(notes.expires),
    }


def cursor(offset: int, limit: int, total: int) -> Json:
    return {"offset": offset, "limit": limit, "total_count": total}


def moment(seconds: float) -> str:
    """Returns an ISO timestamp. Example: "2026-08-01T12:00:00+00:00"."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def page(http: Request) -> tuple[int, int]:
    """Returns a listing's offset and limit. Raises ChatError 400 for invalid numbers."""
    asked = convert(dict(http.query_params), Page, strict=False)
    return asked.offset, min(asked.limit, MAX_PAGE)
