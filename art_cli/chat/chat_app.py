"""The ASGI application over any Backend, used by the gateway, the embedded engine's server, and `art serve`.

    POST to the path of each wire (wires/)   GET /v1/models   GET /v1/models/{id}   GET /health (no key)

The caller's key selects the backend (`backend_for`); an unknown key gets a 401. If a client disconnects, its request is
cancelled. All answers, including errors, use the protocol of the request's path. Only bugs in art return a 500.

PromptList splits a request with several prompts into one request per prompt. Admission, recording, and engines
therefore handle only single prompts. As in OpenAI's API, the n choices of prompt i have the indices i * n to
i * n + n - 1.
"""

import asyncio
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from art_cli.chat import Backend
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import unless_disconnected
from art_cli.chat.proven_steps import POLICY_HEADER
from art_cli.chat.reading import BODY_TIMEOUT_S, BodyLimit, RequestReader, read_body
from art_cli.chat.replies import Choice, Chunk, Echo, Reply, ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import WIRES, Wire
from art_cli.chat.wires.openai_responses import Memory
from art_cli.runtime.state_key import NO_RECORD, RECORD_HEADER, STATE_HEADER, read_header
from art_cli.runtime.threads import end

log = logging.getLogger(__name__)

CANCEL_TIMEOUT_S = 10.0  # longest wait for other prompts to end after a failure or a disconnect
READ_HERE_BYTES = 64 * 2**10  # longest body to parse on the event loop, which takes up to 2 ms
CONVERSATION_HEADER = "X-Art-Conversation"  # percent-encoded like X-Art-State, with the same length limit
SCENARIO_HEADER = "X-Art-Scenario"
HEALTH = "/health"  # the only path that needs no key
RETRIES = "x-stainless-retry-count"  # header of many SDKs: number of earlier sends of this request

BackendFor = Callable[[str | None], Backend | None]  # the backend for a client's key, which may be None
_News = tuple[int, Chunk | Exception | None]  # a prompt's index with a chunk, an error, or None at the end


def wrong_key(key: str | None) -> ChatError:
    """Returns the error for a missing or invalid key, without quoting the key."""
    message = "no API key in the request" if key is None else "this API key is not, or no longer, valid here"
    return ChatError(401, message, "authentication_error", None, "invalid_api_key")


@dataclass(frozen=True, kw_only=True)
class AppSettings:
    """Settings of an application. Example: `AppSettings(body_limit=lambda: BodyLimit(2**20), is_processed=True)`"""

    refuse_key: Callable[[str | None], ChatError] = wrong_key  # returns the error for an unknown key
    body_limit: Callable[[], BodyLimit] = BodyLimit  # called for each request
    body_timeout_s: float = BODY_TIMEOUT_S
    is_processed: bool = False  # whether clients get logprobs of the distribution that tokens were sampled from
    policy_of: Callable[[str], str] = lambda name: ""  # model name -> digest of the policy that answers now


class PromptList:
    """Answers a request with several prompts. Sends one request per prompt to the backend concurrently."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def models(self) -> list[str]:
        return self._backend.models()

    async def reply(self, request: Request) -> Reply:
        requests = _parts(request)
        tasks = [asyncio.create_task(self._backend.reply(part)) for part in requests]
        try:
            replies = await asyncio.gather(*tasks)
        finally:
            await end(*tasks, timeout_s=CANCEL_TIMEOUT_S)
        counts = [reply.num_tokens for reply in replies]
        choices = [
            _placed(choice, part, number, reply.prompt_ids)
            for number, (part, reply) in enumerate(zip(requests, replies, strict=True))
            for choice in reply.choices
        ]
        return msgspec.structs.replace(
            replies[0],
            choices=choices,
            step=min(reply.step for reply in replies),
            policy=",".join(sorted({reply.policy for reply in replies})),  # two if a swap came between
            usage=(sum(num for num, _ in counts), sum(num for _, num in counts))
            if all(reply.is_counted for reply in replies)
            else None,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Yields the chunks of all prompts as they arrive. `usage` sums the prompts that have reported usage so far."""
        requests = _parts(request)
        chunks: asyncio.Queue[_News] = asyncio.Queue(maxsize=1)  # so that prompts wait for a slow client
        tasks = [asyncio.create_task(self._read(part, number, chunks)) for number, part in enumerate(requests)]
        usages: dict[int, tuple[int, int]] = {}
        name, num_open = "", len(tasks)
        try:
            while num_open:
                number, chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk is None:
                    num_open -= 1
                    continue
                name = name or chunk.id
                if chunk.usage is not None:
                    usages[number] = chunk.usage
                    chunk.usage = sum(u[0] for u in usages.values()), sum(u[1] for u in usages.values())
                chunk.id = name
                chunk.choice = _placed(chunk.choice, requests[number], number, chunk.prompt_ids)
                yield chunk
        finally:
            await end(*tasks, timeout_s=CANCEL_TIMEOUT_S)

    async def _read(self, request: Request, number: int, chunks: "asyncio.Queue[_News]") -> None:
        last: Exception | None = None
        try:
            async with contextlib.aclosing(self._backend.stream(request)) as stream:
                async for chunk in stream:
                    await chunks.put((number, chunk))
        except Exception as error:  # the boundary of this task; the stream raises it
            last = error
        await chunks.put((number, last))


def _parts(request: Request) -> list[Request]:
    """Returns one request per prompt. Different digests keep them from looking like retries."""
    assert request.prompt is not None, "chat has no prompts"
    return [
        msgspec.structs.replace(
            request, prompt=prompt, more_prompts=[], digest=request.digest and request.digest + b"%d" % number
        )
        for number, prompt in enumerate([request.prompt, *request.more_prompts])
    ]


def _placed(choice: Choice, request: Request, number: int, prompt_ids: list[int] | None) -> Choice:
    """Returns the choice with its index among all prompts' choices."""
    echo = choice.echo
    if request.echo and echo is None and isinstance(request.prompt, str):
        echo = Echo(text=request.prompt)
    index = number * request.sampling.n + choice.index
    return msgspec.structs.replace(choice, index=index, echo=echo, prompt_ids=prompt_ids)


def build_app(backend_for: BackendFor, settings: AppSettings | None = None, *, more: Sequence[Route] = ()) -> Starlette:
    """Builds the application. `backend_for` returns None for an unknown key. `more` lists additional routes."""
    settings = settings or AppSettings()
    routes = _Routes(backend_for, settings)
    app = Starlette(
        routes=[
            *(Route(wire.path, partial(routes.answer, wire), methods=["POST"]) for wire in WIRES),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{name:path}", routes.model, methods=["GET"]),
            Route(HEALTH, _health, methods=["GET"]),
            *more,
        ],
        exception_handlers={
            ChatError: routes.refuse,
            HTTPException: routes.refuse_route,
            ClientDisconnect: gone,
            Exception: routes.fail,
        },
    )
    app.router.redirect_slashes = False
    return app


@dataclass
class _Routes:
    backend_for: BackendFor
    settings: AppSettings
    reader: RequestReader = field(default_factory=RequestReader)
    memories: WeakKeyDictionary[Backend, Memory] = field(default_factory=WeakKeyDictionary)

    async def answer(self, wire: Wire, http: HttpRequest) -> Response:
        try:
            return await self._answer(wire, http)
        except (ChatError, ClientDisconnect):
            raise
        except Exception as error:  # boundary to the backend: a bug must not close the connection
            raise _internal(error) from error

    async def _answer(self, wire: Wire, http: HttpRequest) -> Response:
        key, backend = self.authenticate(http)
        body = await read_body(http, self.settings.body_limit(), self.settings.body_timeout_s)
        request = _with_headers(await self._parse(body, wire), http.headers)
        if self.settings.is_processed:
            request = msgspec.structs.replace(request, is_processed=True)
        _check_model(backend, request.model)
        memory = self.memories.setdefault(backend, Memory())
        request = memory.recall(request, key)
        if request.more_prompts:
            backend = PromptList(backend)
        if request.is_stream:
            return _EventStream(backend, request, wire, partial(memory.keep, request, key))
        reply = await unless_disconnected(http.receive, backend.reply(request))
        memory.keep(request, key, reply)
        return _json(wire.render(request, reply), headers=_policy_header(reply.policy))

    async def models(self, http: HttpRequest) -> Response:
        cards = [self._card(name) for name in self.authenticate(http)[1].models()]
        pages = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]} if cards else {}
        return _json(msgspec.json.encode({"object": "list", "data": cards, **pages}))

    async def model(self, http: HttpRequest) -> Response:
        name = http.path_params["name"]
        _check_model(self.authenticate(http)[1], name)
        return _json(msgspec.json.encode(self._card(name)))

    def _card(self, name: str) -> dict[str, Any]:
        """Returns the fields of OpenAI's and Anthropic's models, because both protocols use this path."""
        openai = {"id": name, "object": "model", "created": 0, "owned_by": "art"}
        digest = self.settings.policy_of(name)
        return {
            **openai,
            **({"policy": digest} if digest else {}),
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
            "lifecycle": "active",
        }

    async def _parse(self, body: bytes, wire: Wire) -> Request:
        if len(body) <= READ_HERE_BYTES:
            return _parse(wire, body)
        return await self.reader.read(_parse, wire, body)

    def authenticate(self, http: HttpRequest) -> tuple[str | None, Backend]:
        """Returns the client's key and backend. Raises ChatError for an unknown key."""
        key = WIRES.key(http.scope["path"], http.headers)
        backend = self.backend_for(key)
        if backend is None:
            raise self.settings.refuse_key(key)
        return key, backend

    # --- exceptions, answered in the protocol of the request's path ---------------------------------------------------

    async def refuse(self, http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ChatError), error
        return error_response(error, WIRES.at(http.scope["path"], http.headers))

    async def refuse_route(self, http: HttpRequest, error: Exception) -> Response:
        """Handles unknown paths and methods. Clients without a valid key get the usual refusal."""
        assert isinstance(error, HTTPException), error
        if http.scope["path"] != HEALTH:
            try:
                self.authenticate(http)
            except ChatError as refusal:
                return await self.refuse(http, refusal)
        message = f"{http.method} {http.scope['path']}: {error.detail.lower()}"
        if http.scope["path"] == "/v1/embeddings":
            message += "; the models here write text and give no embeddings"
        elif error.status_code == 404 and (near := _near(http.scope["path"])):
            message += (
                f"; the address is {near}: an OpenAI client's base URL ends in /v1, an Anthropic client's does not"
            )
        response = await self.refuse(http, ChatError(error.status_code, message))
        response.headers.update(error.headers or {})
        return response

    async def fail(self, http: HttpRequest, error: Exception) -> Response:
        return await self.refuse(http, ChatError(500, "internal error; the server's log has the details"))


def _near(path: str) -> str | None:
    """Returns the known path that a client with another base URL means by /chat/completions or /v1/v1/messages/."""
    plain = re.sub("/+", "/", path).rstrip("/")
    known = (*(wire.path for wire in WIRES), "/v1/models")
    return next((each for each in known if plain.endswith(each.removeprefix("/v1"))), None)


def _parse(wire: Wire, body: bytes) -> Request:
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return msgspec.structs.replace(wire.parse(body, Sampling()), digest=digest)


def _with_headers(request: Request, headers: Headers) -> Request:
    num_retries = headers.get(RETRIES, "")  # earlier sends, reported by the client's SDK
    fields: dict[str, Any] = {
        "num_retries": int(num_retries) if re.fullmatch("[0-9]{1,4}", num_retries) else 0,
        "state": read_header(headers.get(STATE_HEADER, "")),
        "conversation": read_header(headers.get(CONVERSATION_HEADER, "")),
        "scenario": read_header(headers.get(SCENARIO_HEADER, "")),
    }
    fields = {name: value for name, value in fields.items() if value}
    if headers.get(RECORD_HEADER) == NO_RECORD:
        fields["is_recorded"] = False
    return msgspec.structs.replace(request, **fields) if fields else request


def _check_model(backend: Backend, name: str) -> None:
    if name not in (names := backend.models()):
        message = f"the model {name!r} does not exist here; there is {', '.join(map(repr, names))}"
        raise ChatError(404, message, param="model", code="model_not_found")


def _policy_header(policy: str) -> dict[str, str]:
    return {POLICY_HEADER: policy} if policy else {}


# --- answering while the client is there ------------------------------------------------------------------------------


def _internal(error: Exception) -> ChatError:
    log.error("a request failed inside", exc_info=error)
    return ChatError(500, "internal error; the server's log has the details")


class _EventStream(Response):
    """Streams a backend's chunks. A failure before the first chunk is a normal error reply, and later an error event.

    The stream runs in a single task, because a backend may refer to the task that started it.
    """

    def __init__(self, backend: Backend, request: Request, wire: Wire, keep: Callable[[Reply], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._backend = backend
        self._request = request
        self._wire = wire
        self._keep = keep  # stores the complete reply, if the request is stored
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = self._wire.stream(self._request)
        builder = ReplyBuilder(self._request) if self._request.is_kept else None
        is_open = False
        try:
            async with contextlib.aclosing(self._backend.stream(self._request)) as chunks:
                async for chunk in chunks:
                    if is_open:
                        await asyncio.sleep(0)  # chunks that are there already would hold up all other requests
                    if builder is not None:
                        builder.add(chunk)
                    rendered = events.render(chunk)
                    if not is_open:
                        self.headers.update(_policy_header(chunk.policy))
                        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        is_open = True
                    if rendered:
                        await _send_piece(send, rendered)
            ending = events.finish()
            assert is_open, "a stream without chunks"
            if builder is not None:
                self._keep(builder.reply())
        except Exception as error:  # boundary to the backend, as in `answer`
            failure = error if isinstance(error, ChatError) else _internal(error)
            if not is_open:
                await error_response(failure, self._wire)(scope, receive, send)
                return
            ending = events.fail(failure)
        await _send_piece(send, ending, is_last=True)


async def _send_piece(send: Send, data: bytes, *, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": not is_last})


# --- other answers ----------------------------------------------------------------------------------------------------


async def _health(http: HttpRequest) -> Response:
    return _json(b'{"status":"ok"}')


def _json(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


def error_response(error: ChatError, wire: Wire) -> Response:
    """Returns the error as an HTTP response. A 408 closes the connection, because the body may never arrive."""
    headers = {"retry-after": error.retry_after} if error.retry_after else {}
    if error.status == 408:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json(wire.error(error), wire.status(error), headers)


async def gone(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)
