"""FeedbackService: `POST /v1/feedback` and `DELETE /v1/feedback/{id}`, in TensorZero's form.

An entry is on disk before its answer. It names a reply or a conversation of the same client, looked up in the journal
(also days later). A body equal to the entry that counts for its target, or with an earlier Idempotency-Key, is answered
with that entry's id and counts once.
"""

import hashlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat.chat_app import READ_HERE_BYTES, wrong_key
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.reading import BODY_TIMEOUT_S, BodyLimit, RequestReader, convert, decode_object, read_body
from art_cli.chat.replies import hex_id
from art_cli.chat.requests import Json
from art_cli.chat.wires import WIRES
from art_cli.config.schema import FeedbackMetricConfig
from art_cli.runs.durable import LineWriter, SharedSync, read_lines
from art_cli.runs.feedback import COMMENT, DEMONSTRATION, FEEDBACK_FILE, USER, FeedbackEntry, Target
from art_cli.runs.outcome import MAX_NUMBER
from art_cli.runtime.state_key import shortened
from art_cli.serving.gateway.journal import RETRY_S, Journal
from art_cli.serving.gateway.redaction import REDACTED, Redactor
from art_cli.serving.gateway.reply_index import episode_keys, reply_key
from art_cli.serving.middleware import FEEDBACK_PATHS, Admission

log = logging.getLogger(__name__)

LIMIT = BodyLimit(2**20, "feedback is a value, or a text")
KEY_HEADER = "Idempotency-Key"
MAX_NAME = 256  # characters of a name or an Idempotency-Key
EARLY_RETRY_S = "1"  # a streamed reply's id is known before the reply is recorded

Result = TypeVar("Result")
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    metric_name: _Name
    value: Any  # null withdraws
    inference_id: _Name | None = None
    episode_id: Annotated[str, Meta(min_length=1)] | None = None  # a long name counts as its digest, as in calls
    tags: dict[str, str] | None = None
    dryrun: bool | None = None
    internal: bool | None = None  # sent by TensorZero's client, without effect


class _Text(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    text: str


class _ToolCall(msgspec.Struct, tag="tool_call", forbid_unknown_fields=True):
    name: _Name
    arguments: str | Json
    id: str | None = None


class _Entered(msgspec.Struct, frozen=True, gc=False):
    id: str
    content: bytes  # digest of target, value and tags


class FeedbackLog:
    """`feedback.jsonl`, with what its lines say about later entries. For one event loop."""

    def __init__(self, writer: LineWriter) -> None:
        """Reads the file. Raises DataError for a line that is not an entry."""
        self._writer, self._shared = writer, SharedSync(writer)
        # A target is one text here, because the file may have a million lines and all of them are in memory.
        self._counts: dict[str, _Entered] = {}  # target -> the entry that counts
        self._by_key: dict[str, _Entered] = {}  # digest of an Idempotency-Key -> its entry
        self._targets: dict[str, dict[str, str]] = {}  # client -> id -> the entry's target
        for entry in read_lines(writer.path, FeedbackEntry):
            self._note(entry)

    async def add(self, entry: FeedbackEntry) -> str:
        """Returns the id under which the entry counts, once it is on disk. Raises ChatError and OSError."""
        content = _content(entry)
        before = self._by_key.get(entry.key)
        if before is not None and before.content != content:
            raise invalid(f"{KEY_HEADER}: another body came with it; take a new one")
        counting = before or self._counts.get(_text_of(entry.target))
        if counting is not None and counting.content == content:
            if before is not None or not entry.key:
                await self._shared.sync()  # the first one may still be on its way to the disk
                return counting.id
            entry = msgspec.structs.replace(entry, id=counting.id)  # the line keeps the key for a later double
        elif entry.value is None and counting is None:
            raise ChatError(404, "value: null withdraws feedback, and there is none for this target and metric")
        self._append(entry)
        await self._shared.sync()
        return entry.id

    async def withdraw(self, client: str, id: str) -> None:
        """Withdraws an entry if it still counts. Raises ChatError 404 for an id that the client was not given."""
        target = self._targets.get(client, {}).get(id)
        if target is None:
            raise ChatError(404, "no feedback of yours has this id")
        if self._counts[target].id == id:
            conversation, reply, metric = msgspec.json.decode(target, type=Target)
            entry = FeedbackEntry(
                id=new_id(), at=time.time(), client=client, conversation=conversation, reply=reply, metric=metric
            )
            self._append(entry)
        await self._shared.sync()

    def _append(self, entry: FeedbackEntry) -> None:
        """Raises ChatError if the file was moved, because the entry would never be read."""
        if not self._writer.is_in_place():
            raise ChatError(503, f"{FEEDBACK_FILE} was moved away; restart the gateway", code="not_recorded")
        self._shared.append(entry)
        self._note(entry)

    def _note(self, entry: FeedbackEntry) -> None:
        entered, target = _Entered(entry.id, _content(entry)), _text_of(entry.target)
        self._counts[target] = entered
        self._targets.setdefault(entry.client, {})[entry.id] = target
        if entry.key:
            self._by_key[entry.key] = entered


class FeedbackService:
    """Answers the feedback of a journal's clients, while `opened`."""

    def __init__(
        self,
        journal: Journal,
        redactor: Redactor,
        admission: Admission,
        metrics: Mapping[str, FeedbackMetricConfig],
        label: Callable[[str | None], str | None],
    ) -> None:
        """`label` returns the client of an API key."""
        self._journal, self._redactor, self._admission = journal, redactor, admission
        self._metrics, self._label = metrics, label
        self._reader = RequestReader()
        self._log: FeedbackLog
        self.routes = [Route(path, self._add, methods=["POST"]) for path in FEEDBACK_PATHS]
        self.routes += [Route(f"{path}/{{id}}", self._withdraw, methods=["DELETE"]) for path in FEEDBACK_PATHS]

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Raises DataError if the file is unreadable."""
        with LineWriter(self._journal.directory / FEEDBACK_FILE) as writer:
            self._log = FeedbackLog(writer)
            yield

    async def _add(self, http: HttpRequest) -> Response:
        client = self._client(http)
        with self._admission.admitted(), _disk_failures():
            body = await read_body(http, LIMIT, BODY_TIMEOUT_S)
            sent = self._read(body) if len(body) <= READ_HERE_BYTES else await self._reader.read(self._read, body)
            entry = await self._entry(client, sent, http.headers.get(KEY_HEADER, ""))
            return _answer(entry.id if sent.dryrun else await self._log.add(entry))

    async def _withdraw(self, http: HttpRequest) -> Response:
        client, id = self._client(http), http.path_params["id"]
        with self._admission.admitted(), _disk_failures():
            await self._log.withdraw(client, id)
            return _answer(id)

    def _client(self, http: HttpRequest) -> str:
        key = WIRES.key(http.scope["path"], http.headers)
        client = self._label(key)
        if client is None:
            raise wrong_key(key)
        return client

    def _read(self, body: bytes) -> _Body:
        """Returns the checked body, redacted. Raises ChatError 400."""
        sent = _converted(decode_object(body), _Body)
        if (sent.inference_id is None) == (sent.episode_id is None):
            raise invalid("give either inference_id, the id of a reply, or episode_id, a conversation", "inference_id")
        tags = self._redactor.document(sent.tags or {})
        if (user := (sent.tags or {}).get(USER)) is not None:
            tags = {**tags, USER: self._redactor.name(user, tags.get(USER, REDACTED))}
        return msgspec.structs.replace(sent, value=self._value(sent), tags=tags)

    def _value(self, sent: _Body) -> bool | float | str | Json | None:
        name, value = sent.metric_name, sent.value
        metric = self._metrics.get(name)
        if metric is None and name not in (COMMENT, DEMONSTRATION):
            declared = ", ".join([*self._metrics, COMMENT, DEMONSTRATION])
            raise invalid(f"metric_name: {name[:80]!r} is not declared in gateway.feedback; there is {declared}")
        if value is None:
            return None
        if metric is None and name == DEMONSTRATION:
            return self._redactor.value(_message(value))
        if metric is None:
            if not isinstance(value, str):
                raise invalid("value: a comment is a text", "value")
            return self._redactor.text(value)
        if metric.type == "boolean":
            if not isinstance(value, bool):
                raise invalid(f"value: {name} is boolean, so true or false", "value")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise invalid(f"value: {name} is float, so a number of at most {MAX_NUMBER:g}", "value")
        return float(value)

    async def _entry(self, client: str, sent: _Body, key: str) -> FeedbackEntry:
        """Returns the entry for the client's reply or conversation. Raises ChatError 400 and 404."""
        if len(key) > MAX_NAME:
            raise invalid(f"{KEY_HEADER}: at most {MAX_NAME} characters")
        metric = self._metrics.get(sent.metric_name)
        level: Literal["reply", "conversation", "any"] = metric.level if metric is not None else "any"
        if sent.inference_id is None and (level == "reply" or sent.metric_name == DEMONSTRATION):
            raise invalid(f"episode_id: {sent.metric_name[:80]} rates a reply; give its inference_id", "episode_id")
        reply = "" if sent.inference_id is None else hex_id(sent.inference_id)
        name = None if sent.episode_id is None else self._redactor.name(shortened(sent.episode_id))
        keys = [reply_key(reply)] if name is None else episode_keys(name)
        found = await self._journal.find(client, keys) if reply or sent.episode_id is not None else None
        if found is None:
            message = (
                "no recorded reply or conversation of this key has this id; after a streamed reply's end, try again"
            )
            raise ChatError(404, message, code="not_recorded", retry_after=EARLY_RETRY_S)
        return FeedbackEntry(
            id=new_id(),
            at=time.time(),
            client=client,
            conversation=found.conversation,
            policy=found.policy,
            answered_at=found.at,
            reply="" if level == "conversation" else reply,  # a reply's id also names its conversation
            metric=sent.metric_name,
            value=sent.value,
            optimize="max" if metric is None else metric.optimize,
            tags=sent.tags or {},
            key=_digest([client, key]).hex() if key else "",
        )


def _message(value: Any) -> Json:
    """Returns a demonstration as an assistant message in OpenAI's form. Raises ChatError 400."""
    if isinstance(value, str):
        return {"role": "assistant", "content": value}
    blocks = _converted({"value": value}, _Demonstration).value
    texts = [block.text for block in blocks if isinstance(block, _Text)]
    calls = [
        {
            "id": block.id or f"call_{number}",
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": block.arguments
                if isinstance(block.arguments, str)
                else msgspec.json.encode(block.arguments).decode(),
            },
        }
        for number, block in enumerate(blocks)
        if isinstance(block, _ToolCall)
    ]
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    return {**message, "tool_calls": calls} if calls else message


def _converted(fields: Json, kind: type[Result]) -> Result:
    """Converts like `convert`, and also names a field that does not exist."""
    try:
        return convert(fields, kind)
    except ChatError as error:
        if (unknown := re.search("contains unknown field `(.*)`", error.message)) is None:
            raise
        param = f"{error.param or ''}.{unknown[1][:80]}".removeprefix(".")
        raise invalid(f"{param}: unknown field", param) from None


class _Demonstration(msgspec.Struct):
    value: Annotated[list[_Text | _ToolCall], Meta(min_length=1)]


def new_id() -> str:
    """Returns a UUIDv7 (RFC 9562): milliseconds since the epoch, then random bits."""
    bits = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    bits = bits & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=bits & ~(0b11 << 62) | 0b10 << 62))


def _text_of(target: Target) -> str:
    return msgspec.json.encode(target).decode()


def _content(entry: FeedbackEntry) -> bytes:
    return _digest([entry.target, entry.value, entry.tags])


def _digest(value: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()


def _answer(id: str) -> Response:
    return Response(msgspec.json.encode({"feedback_id": id}), media_type="application/json")


@contextmanager
def _disk_failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.error("feedback is not recorded: %s", error)
        message = "the gateway cannot record this feedback; its log has the reason"
        raise ChatError(503, message, code="not_recorded", retry_after=RETRY_S) from error
