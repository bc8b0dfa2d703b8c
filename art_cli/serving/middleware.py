"""Middleware: the outer ASGI application, with API keys, Admission, access log, and Meter.

On a server with keys, every path except /health requires a key, even unknown paths, so clients without a key learn
nothing. On a server without keys, programs on this machine may send requests and web pages may not, even to /health.
The access log contains method, path, status and seconds, never headers, query strings or content. Unknown paths are
reduced to plain words, because some clients put keys into paths. Meter exports the same as Prometheus metrics, without
content and keys.

Admission counts running requests and decides whether to admit more. It does not depend on HTTP or engines.

    loading -> open -> draining        requests are only admitted in state open

An admitted request is read, and then waits for an engine slot in FIFO order. It keeps the slot until its answer is
fully sampled, and is in flight until the client has read the answer or disconnected. `concurrency` requests can have
slots; `queue` more may be in flight.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cli.chat.api_keys import Keys, check_sender
from art_cli.chat.chat_app import HEALTH, error_response, wrong_key
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.wires import WIRES

log = logging.getLogger(__name__)

LONGEST_RETRY_S = 60
LOADING_RETRY_S = 5
SMOOTHING = 0.1  # weight of the newest answer in the moving average of durations
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
READY = ("/ready", "/health/ready")  # answer 200 once requests are served
WATCHED = (*READY, "/metrics", HEALTH)  # polled by machines every few seconds, so logged at debug level
FEEDBACK_PATHS = ("/v1/feedback", "/feedback")  # TensorZero's clients append /feedback to the gateway's address
KNOWN = (*(wire.path for wire in WIRES), *WATCHED, *FEEDBACK_PATHS, "/v1/models")
WORD = re.compile(
    r"v\d|[a-z_]{1,24}"
)  # a plain path part, as in /v1/embeddings; keys contain digits, capitals, or more
MAX_WORDS = 8
GONE = 499  # nginx's status for disconnected clients


class Admission:
    def __init__(self, *, concurrency: int, queue: int) -> None:
        self.concurrency, self.queue = concurrency, queue
        self.state = "loading"  # loading, open, draining
        self.num_in_flight = 0  # admitted requests whose client is still connected and has not read the whole answer
        self.num_waiting = 0  # requests in flight, waiting for a slot
        self.num_answering = 0  # requests in flight with a slot
        self._slots = asyncio.Semaphore(concurrency)
        self._empty = asyncio.Event()
        self._empty.set()
        self._answer_s = 1.0  # moving average of answer durations

    def open(self) -> None:
        """Admits requests from now on, unless already draining."""
        if self.state == "loading":
            self.state = "open"

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.state = "draining"

    async def emptied(self) -> None:
        await self._empty.wait()

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Counts a request in flight. Raises ChatError 503 unless open, and 429 for too many requests."""
        self.check_loaded()
        if self.state == "draining":
            raise _shutting_down()
        if self.num_in_flight >= self.concurrency + self.queue:
            message = f"{self.num_in_flight} requests are here already; try again later"
            wait_s = round(self.num_waiting / self.concurrency * self._answer_s)  # until the waiting ones are answered
            retry_after = str(max(1, min(LONGEST_RETRY_S, wait_s)))
            raise ChatError(429, message, "rate_limit_error", None, "overloaded", retry_after=retry_after)
        self.num_in_flight += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.num_in_flight == 0:
                self._empty.set()

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Yields an engine slot, in FIFO order."""
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_answering += 1
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._slots.release()
            self.num_answering -= 1
            self._answer_s += SMOOTHING * (time.perf_counter() - begin - self._answer_s)

    def check_loaded(self) -> None:
        """Raises ChatError 503 while the model is loading."""
        if self.state == "loading":
            raise ChatError(503, "the model is being loaded", code="loading", retry_after=str(LOADING_RETRY_S))


class Meter:
    """A service's metrics, in a separate registry. The service sets the gauges' functions."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        text = "Requests by route and status; 499: the client went away."
        self.requests = Counter("art_requests", text, ["route", "code"], registry=own)
        self.prompt_tokens = Counter("art_prompt_tokens", "Tokens of prompts.", ["model"], registry=own)
        self.sampled_tokens = Counter("art_sampled_tokens", "Tokens sampled.", ["model"], registry=own)
        self.changes = Counter("art_checkpoint_changes", "Changes to another checkpoint.", ["model"], registry=own)
        text = "From a completion's request line to the end of its reply."
        self.request_s = Histogram("art_request_seconds", text, buckets=BUCKETS_S, registry=own)
        text = "From a streamed request's parsing to its first token."
        self.first_token_s = Histogram("art_first_token_seconds", text, buckets=BUCKETS_S, registry=own)
        text = "Requests let in and not gone: replies not yet read count."
        self.in_flight = Gauge("art_requests_inside", text, registry=own)
        self.answering = Gauge("art_requests_answering", "Of these, at the engine.", registry=own)
        self.ready = Gauge("art_ready", "Whether requests are taken.", registry=own)
        self.step = Gauge("art_policy_step", "The step whose weights answer.", ["model"], registry=own)

    @property
    def route(self) -> Route:
        return Route("/metrics", self._answer, methods=["GET"])

    async def _answer(self, http: HttpRequest) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class Middleware:
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
        except asyncio.CancelledError:  # the deadline for running requests has passed
            if status != GONE:
                raise
            await _refuse(_shutting_down(), scope, receive, send_noting)
        finally:
            self._note(scope, status, time.perf_counter() - begin)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        is_completion = path in WIRES and scope["method"] == "POST"
        with ExitStack() as stack:
            try:
                if not self._keys:
                    check_sender(scope["method"], headers)
                elif path != HEALTH and not self._keys.admits(key := WIRES.key(path, headers)):
                    raise wrong_key(key)
                if is_completion:
                    stack.enter_context(self._admission.admitted())
            except ChatError as error:
                await _refuse(error, scope, receive, send)
                return
            await self._app(scope, receive, _until_taken(send) if is_completion else send)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        path = scope["path"]
        self._meter.requests.labels(route=path if path in KNOWN else "other", code=str(status)).inc()
        if path in WIRES:
            self._meter.request_s.observe(seconds)
        level = logging.DEBUG if path in WATCHED else logging.INFO
        log.log(level, "%s %s %d %.3f s", scope["method"], self._shown(path), status, seconds)

    def _shown(self, path: str) -> str:
        """Returns the path without possible keys, for example /v1/models/* for /v1/models/sk-42."""
        if path in KNOWN:
            return path
        parts = path.split("/")
        shown = [part if not part or self._is_word(part) else "*" for part in parts[:MAX_WORDS]]
        return "/".join(shown + ["..."] * (len(parts) > MAX_WORDS))

    def _is_word(self, part: str) -> bool:
        return bool(WORD.fullmatch(part)) and not (self._keys and self._keys.admits(part))


async def _refuse(error: ChatError, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(error, WIRES.at(scope["path"], Headers(scope=scope)))(scope, receive, send)


def _shutting_down() -> ChatError:
    return ChatError(503, "the server is shutting down", code="shutting_down", retry_after=str(LOADING_RETRY_S))


def _until_taken(send: Send) -> Send:
    """Returns `send`, except that a reply's final message waits until the client has read the reply or disconnected.

    The final message is sent separately from the last piece of content, because a send waits for preceding pieces
    (chat/http_server.py).
    """

    async def send_apart(message: Message) -> None:
        if message["type"] == "http.response.body" and message.get("body") and not message.get("more_body"):
            await send({**message, "more_body": True})
            message = {**message, "body": b""}
        await send(message)

    return send_apart
