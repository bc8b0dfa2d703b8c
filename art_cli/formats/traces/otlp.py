"""Sends spans over OTLP/HTTP: compressed protobuf batches with retries and a deadline.

    OtlpSender("http://localhost:4318").send(spans)        POST http://localhost:4318/v1/traces

Requires only the opentelemetry-proto package. OpenTelemetry's SDK exporter has no deadline against slowly trickling
responses, and it logs rejections instead of raising. API keys come only from OTEL_EXPORTER_OTLP_HEADERS
(comma-separated `name=value` pairs, as in the SDKs) and are never written to files. A receiver that is slow, hangs,
responds endlessly or rejects the data raises DeliveryError after at most `timeout_s`.
"""

import asyncio
import gzip
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import aiohttp

from art_cli.chat.client import open_session, read_answer
from art_cli.formats.traces.spans import Span, Value
from art_cli.runtime import threads
from art_cli.runtime.errors import DeliveryError, UsageError, one_line, printable
from art_cli.runtime.secrets import Secrets, find_secrets

PATH = "/v1/traces"
DEFAULT_URL = "http://localhost:4318"  # OpenTelemetry collector
TIMEOUT_S = 30.0  # maximum time per batch, including retries
MAX_BATCH_BYTES = 2 << 20  # bytes per uncompressed request; Langfuse accepts 4.5 MB, collectors 20 MB
RETRIED = (429, 502, 503, 504)  # retryable status codes in OTLP
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 8.0
MAX_SECONDS = 9e9  # since the epoch; year 2255, within the format's 64 bits of nanoseconds
MAX_ANSWER = 1 << 20  # bytes per response; normal responses are tiny


class HttpAnswer(NamedTuple):
    status: int
    body: bytes
    retry_after: str | None


def traces_url(url: str) -> str:
    """Returns the URL for spans, with OTLP's path. Raises UsageError for non-HTTP URLs and URLs with credentials."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise UsageError(f"{url!r} is not an OTLP address; use a URL like {DEFAULT_URL}")
    if parts.username is not None or parts.query:
        raise UsageError("an OTLP address has no user, password or query; keys go into OTEL_EXPORTER_OTLP_HEADERS")
    return url if parts.path.rstrip("/").endswith(PATH) else url.rstrip("/") + PATH


def url_from(environment: Mapping[str, str]) -> str:
    """Returns the URL from OpenTelemetry's environment variables; defaults to a local collector."""
    if whole := environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return whole
    return traces_url(environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_URL)


def headers_from(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers from OpenTelemetry's environment variables. Raises UsageError for invalid pairs."""
    headers: dict[str, str] = {}
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for pair in filter(str.strip, environment.get(variable, "").split(",")):
            name, equals, value = pair.partition("=")
            text = unquote(value.strip())
            if not equals or not name.strip().isascii() or not text.isascii() or not text.isprintable():
                raise UsageError(f"{variable} is name=value, several with commas, values percent-encoded")
            headers[name.strip().lower()] = text
    return headers


class OtlpSender:
    """Sends spans to one receiver. Not thread-safe."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        """Raises UsageError if opentelemetry-proto is not installed."""
        try:
            from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
        except ImportError as error:
            raise UsageError("opentelemetry-proto is not installed; pip install 'art-cli[otel]'") from error
        self._messages = trace_service_pb2
        self.poster = Poster(url, {**(headers or {}), "content-type": "application/x-protobuf"}, timeout_s=timeout_s)
        self._version = version("art-cli")
        self._resource = {"service.name": "art", "service.version": self._version}

    def send(self, spans: Iterable[Span]) -> int:
        """Returns the number of accepted spans. Raises DeliveryError unless all spans were accepted."""
        sent = 0
        for batch in self._batches(spans):
            body = gzip.compress(batch.SerializeToString(), compresslevel=1)
            try:
                answer = self.poster.post(body, {"content-encoding": "gzip"})
            except DeliveryError as error:
                raise DeliveryError(f"{error}; {sent} spans were sent before") from error
            self._check(answer)
            sent += len(_spans_in(batch))
        return sent

    def _check(self, answer: bytes) -> None:
        """Raises DeliveryError if the receiver rejected some spans."""
        result = self._messages.ExportTraceServiceResponse()
        try:
            result.ParseFromString(answer)
        except Exception:  # some receivers respond with JSON or text instead of protobuf
            return
        if refused := result.partial_success.rejected_spans:
            why = self.poster.shown(result.partial_success.error_message)
            raise DeliveryError(f"{self.poster.host} refused {refused} spans: {why}")

    def _batches(self, spans: Iterable[Span]) -> Iterator[Any]:
        batch, size = self._new_batch(), 0
        for span in spans:
            record = _spans_in(batch).add()
            fill(record, span)
            size += record.ByteSize()
            if size >= MAX_BATCH_BYTES:
                yield batch
                batch, size = self._new_batch(), 0
        if _spans_in(batch):
            yield batch

    def _new_batch(self) -> Any:
        message = self._messages.ExportTraceServiceRequest()
        inside = message.resource_spans.add()
        _add_attributes(inside.resource.attributes, self._resource)
        scope = inside.scope_spans.add()
        scope.scope.name, scope.scope.version = "art_cli", self._version
        return message


def _spans_in(message: Any) -> Any:
    return message.resource_spans[0].scope_spans[0].spans


def fill(record: Any, span: Span) -> None:
    record.trace_id, record.span_id, record.parent_span_id = span.trace_id, span.id, span.parent or b""
    record.name = clean(span.name)
    record.kind = 3 if span.is_client else 1  # SPAN_KIND_CLIENT, SPAN_KIND_INTERNAL
    record.start_time_unix_nano, record.end_time_unix_nano = _nanoseconds(span.begin), _nanoseconds(span.end)
    _add_attributes(record.attributes, span.attributes)
    for event in span.events:
        added = record.events.add()
        added.name, added.time_unix_nano = event.name, _nanoseconds(event.time)
        _add_attributes(added.attributes, event.attributes)
    if span.error is not None:
        record.status.code, record.status.message = 2, clean(span.error)  # STATUS_CODE_ERROR


def _add_attributes(field: Any, attributes: Mapping[str, Value]) -> None:
    for name, value in attributes.items():
        pair = field.add()
        pair.key = clean(name)
        _set(pair.value, value)


def _set(field: Any, value: Value) -> None:
    match value:
        case str():  # most common case
            field.string_value = clean(value)
        case bool():
            field.bool_value = value
        case int():
            field.int_value = max(-(2**63), min(value, 2**63 - 1))
        case float():
            field.double_value = value
        case _:
            for each in value:
                field.array_value.values.add().string_value = clean(each)


def _nanoseconds(seconds: float) -> int:
    return round(min(max(0.0, seconds), MAX_SECONDS) * 1e9)


def clean(text: str) -> str:
    """Replaces lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


class Poster:
    """Posts to one URL and retries until a deadline if the receiver is busy or unreachable."""

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.host = urlsplit(url).netloc
        self._headers = dict(headers)
        self._secrets: Secrets = find_secrets(os.environ, params=[{"headers": self._headers}])

    def post(self, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """Returns the body of a successful response. Raises DeliveryError after the deadline."""
        deadline = time.monotonic() + self.timeout_s
        pause = FIRST_PAUSE_S
        while True:
            answer = threads.run(self._try(body, headers or {}, deadline))
            if isinstance(answer, HttpAnswer) and 200 <= answer.status < 300 and answer.status != 207:
                return answer.body  # 207: partial rejection
            if isinstance(answer, HttpAnswer) and answer.status not in RETRIED:
                raise DeliveryError(f"{self.host} answered {answer.status}: {self._explained(answer)}")
            wait = _seconds(answer.retry_after) if isinstance(answer, HttpAnswer) and answer.retry_after else pause
            if time.monotonic() + wait > deadline:
                why = f"answered {answer.status}" if isinstance(answer, HttpAnswer) else answer
                raise DeliveryError(f"{self.host} {why}; it was tried for {self.timeout_s:g} s")
            time.sleep(wait * random.uniform(0.8, 1.0))
            pause = min(2 * pause, MAX_PAUSE_S)

    async def _try(self, body: bytes, headers: Mapping[str, str], deadline: float) -> HttpAnswer | str:
        """Returns the response, or the reason for its absence."""
        try:
            async with (
                asyncio.timeout(max(0.01, deadline - time.monotonic())),
                open_session(self.url, self._headers) as session,
                session.post(self.url, data=body, headers=headers, allow_redirects=False) as response,
            ):
                said = await read_answer(response, MAX_ANSWER)
                return HttpAnswer(response.status, said, response.headers.get("retry-after"))
        except TimeoutError:
            return "did not answer in time"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"cannot be reached ({self.shown(one_line(error))})"

    def _explained(self, answer: HttpAnswer) -> str:
        said = self.shown(answer.body.decode("utf-8", "replace").strip()) or "without a word"
        return said + ("; is the key right?" if answer.status in (401, 403) else "")

    def shown(self, text: str) -> str:
        """Returns a receiver's text as a single line without secrets."""
        return printable(self._secrets.redact(" ".join(text.split())), limit=300)


def _seconds(retry_after: str) -> float:
    """Returns the requested pause in seconds; FIRST_PAUSE_S for dates."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return FIRST_PAUSE_S
