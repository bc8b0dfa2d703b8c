"""HttpBackend: any OpenAI-compatible endpoint as a Backend: vLLM, art's own server, a hosted model.

It asks for logprobs and token ids. vLLM and art report both for every token, other endpoints often the text alone.
vLLM's logprobs must be those of the distribution sampled from (`--logprobs-mode processed_logprobs`); art reports
these apart, as `sampled_logprobs`.

It uses aiohttp because the gateway spends its time here: a call costs 0.1 ms of CPU, with httpx 1.2 ms (32 calls at
once, 18 kB each). `open_session` and `read_answer` serve other clients as well. An answer is read up to a size, and
aiohttp decompresses it in pieces, so that a decompression bomb is stopped too.
"""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

import aiohttp
import msgspec
from msgspec import Meta
from yarl import URL

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.proven_steps import POLICY_HEADER, read_policy
from art_cli.chat.replies import Choice, Chunk, Echo, Reply
from art_cli.chat.requests import RESHAPING, Json, Request, Sampling, needs_echo
from art_cli.runtime.secrets import find_secrets

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine
IDLE_S = 4.0  # below uvicorn's keep-alive of 5 s, so that this side closes idle connections, never both at once
MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens with ids and logprobs take 40 MB
MAX_ERROR = 1 << 20  # bytes of an error answer, which is only quoted in a message


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint's answer is larger than any request asks for."""


class ErrorAnswer(msgspec.Struct):
    """The parts of an endpoint's error."""

    message: str = ""
    type: str | None = None
    param: str | None = None
    code: str | None = None


def open_session(url: str, headers: Mapping[str, str], **more: Any) -> aiohttp.ClientSession:
    """Returns a session to the endpoint. The environment's proxies are for hosted models, not for this machine."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
    return aiohttp.ClientSession(connector=connector, headers=headers, trust_env=URL(url).host not in LOCAL, **more)


async def read_answer(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER) -> bytes:
    """Returns the whole body, decompressed. Raises AnswerTooLarge and closes the connection beyond `limit` bytes."""
    pieces, size = [], 0
    async for piece in response.content.iter_any():
        size += len(piece)
        if size > limit:
            response.close()
            raise AnswerTooLarge(f"the answer is larger than {limit >> 20} MiB")
        pieces.append(piece)
    return b"".join(pieces)


def read_error(answer: bytes) -> ErrorAnswer:
    """Returns the error of an OpenAI body, vLLM's older flat body, or FastAPI's `detail`; empty for other answers."""
    try:
        fields = msgspec.json.decode(answer)
        error = fields.get("error", fields) if isinstance(fields, dict) else {}
        error = {"message": error} if isinstance(error, str) else error
        texts = {n: error.get(n) for n in ("message", "type", "param", "code")}
        texts["message"] = texts["message"] or error.get("detail")
    except (ValueError, RecursionError, AttributeError):
        return ErrorAnswer()
    return ErrorAnswer(**{name: str(value) for name, value in texts.items() if value is not None})


CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE = 10_000  # characters of an endpoint's error that reach the client


class HttpBackend:
    """Sends requests to `base_url` (`http://127.0.0.1:8000/v1`). It asks for `model`, whatever the client asked for."""

    def __init__(self, base_url: str, api_key: str, model: str, *, step: int = 0, timeout_s: float = 300.0) -> None:
        self.model = model
        self.step = step  # step to record when the endpoint does not report one; the caller updates it after a load
        self._url = str(URL(base_url.rstrip("/")).with_user(None))  # has no password, because messages show it
        self._api_key = api_key
        self._secrets = find_secrets({}, values=[api_key], urls=[base_url])
        self._timeout_s = timeout_s
        self._dialect = _Dialect()
        self._session: aiohttp.ClientSession | None = None

    def models(self) -> list[str]:
        return [self.model]

    async def reply(self, request: Request) -> Reply:
        """Raises ChatError: the endpoint's refusal, 502 when it cannot be reached, 504 when it is too slow."""
        async with self._post(request, is_stream=False) as response:
            body, policy = await read_answer(response), read_policy(response.headers.get(POLICY_HEADER))
        parsed = self._decode(body)
        if not parsed.choices:
            raise self._broken("no choices in the reply")
        return Reply(
            id=parsed.id or "",
            created=int(parsed.created or 0),
            model=request.model,
            choices=[_choice(request, choice) for choice in parsed.choices],
            prompt_ids=_prompt_ids(parsed) or [],
            step=self.step if parsed.step is None else parsed.step,
            policy=policy,
            sampling=request.sampling,
            usage=_usage(parsed),
        )

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Raises ChatError as `reply` does, also when the stream ends before its choices do."""
        open_choices = set(range(request.sampling.n))
        async with self._post(request, is_stream=True) as response:
            policy = read_policy(response.headers.get(POLICY_HEADER))
            async for data in read_events(response):
                if data == b"[DONE]":
                    break
                parsed = self._decode(data)
                if parsed.error is not None:
                    raise self._refusal(502, data)
                for chunk in self._chunks(request, parsed):
                    chunk.policy = policy
                    if chunk.is_last:
                        open_choices.discard(chunk.choice.index)
                    yield chunk
        if open_choices:
            raise self._broken("the stream ended before the answer did")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- asking -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _post(self, request: Request, *, is_stream: bool) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields an answer of status 200. A field that the endpoint refuses and the client did not ask for goes."""
        url = f"{self._url}/{self._path(request)}"
        timeout = aiohttp.ClientTimeout(
            total=None if is_stream else self._timeout_s, sock_connect=CONNECT_TIMEOUT_S, sock_read=self._timeout_s
        )
        with self._transport_errors():
            while True:
                body = msgspec.json.encode(self._body(request, is_stream=is_stream))
                async with self._open().post(url, data=body, timeout=timeout, allow_redirects=False) as response:
                    if response.status == 200:
                        yield response
                        return
                    answer = await read_answer(response, MAX_ERROR)
                    if not self._learn(request, response.status, answer):
                        raise self._refusal(response.status, answer, response.headers.get("Retry-After"))

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(self._url, self._headers())
        return self._session

    def _path(self, request: Request) -> str:
        return "completions" if request.messages is None else "chat/completions"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}

    def _body(self, request: Request, *, is_stream: bool) -> Json:
        """Raises ChatError 400: the protocol has no place for something that the client asks."""
        return self._dialect.body(request, self.model, is_stream=is_stream)

    def _learn(self, request: Request, status: int, answer: bytes) -> bool:
        """Returns whether another body may be accepted, after this refusal."""
        return self._dialect.learn(request, status, answer)

    # --- failing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transport_errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            message = f"{self._url}: no answer within {self._timeout_s:.0f} s"
            raise ChatError(504, message, code="upstream_timeout") from error
        except AnswerTooLarge as error:
            raise self._broken(str(error)) from error
        except aiohttp.ClientError as error:
            message = f"{self._url}: {type(error).__name__}: {self._hide_key(str(error))}"
            raise ChatError(502, message, code="upstream_unreachable") from error

    def _refusal(self, status: int, answer: bytes, retry_after: str | None = None) -> ChatError:
        """Returns the endpoint's error without our key, which it may quote."""
        if status in (401, 403):
            return ChatError(status, f"{self._url}: it refused our API key", code="upstream_authentication")
        error = read_error(answer)
        message = self._hide_key(error.message or answer[:200].decode(errors="replace"))[:MAX_MESSAGE]
        status = status if 400 <= status < 600 else 502
        return ChatError(status, message, error.type, error.param, error.code, retry_after=retry_after)

    def _broken(self, message: str) -> ChatError:
        return ChatError(502, f"{self._url}: {message}", code="upstream_broken")

    def _decode(self, data: bytes) -> "_ReplyJson":
        try:
            return msgspec.json.decode(data, type=_ReplyJson)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"not an OpenAI reply: {error}") from error

    def _hide_key(self, text: str) -> str:
        return self._secrets.redact(text[: 2 * MAX_MESSAGE])

    def _chunks(self, request: Request, parsed: "_ReplyJson") -> Iterator[Chunk]:
        prompt_ids = _prompt_ids(parsed)
        for choice in parsed.choices or ([_ChoiceJson()] if parsed.usage else []):
            yield Chunk(
                id=parsed.id or "",
                created=int(parsed.created or 0),
                model=request.model,
                choice=_choice(request, choice),
                is_last=choice.finish_reason is not None,
                prompt_ids=prompt_ids,
                step=self.step if parsed.step is None else parsed.step,
                sampling=request.sampling,
                usage=_usage(parsed),
            )
            prompt_ids = None


# --- what an endpoint understands -------------------------------------------------------------------------------------

_REFUSED = re.compile(r"unsupported|not support|unrecognized|unknown|not permitted|unexpected", re.IGNORECASE)


class _Dialect:
    """The request body with the fields that one endpoint understands, learnt from its refusals.

    All sampling fields are sent, because endpoints have other defaults (vLLM takes the model's
    generation_config.json). A field that the client did not ask for is left out once the endpoint has refused it.
    """

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def body(self, request: Request, model: str, *, is_stream: bool) -> Json:
        body: Json = {"model": model, **_question(request), **_sampling(request.sampling)}
        body |= {"logprobs": True, "return_token_ids": True}
        if request.messages is None:
            body["logprobs"] = request.top_logprobs
        elif request.top_logprobs:
            body["top_logprobs"] = request.top_logprobs
        if needs_echo(request):
            body["echo"] = True
        if is_stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if "max_tokens" in self._refused and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        for name in self._refused - _asked_for(request):
            body.pop(name, None)
        return body

    def learn(self, request: Request, status: int, answer: bytes) -> bool:
        """Returns whether the endpoint refused a field that can be left out; from now on it is."""
        error = read_error(answer)
        if status not in (400, 422) or not _REFUSED.search(error.message):
            return False
        body = self.body(request, "", is_stream=request.is_stream)
        optional = {"max_tokens", "logprobs", "return_token_ids", "stream_options", "chat_template_kwargs"}
        optional |= _sampling(request.sampling).keys()
        optional = (optional & body.keys()) - (_asked_for(request) - {"max_tokens"})
        named = {name for name in optional if name == error.param or re.search(rf"\b{name}\b", error.message)}
        self._refused |= named
        return bool(named)


def _asked_for(request: Request) -> frozenset[str]:
    """Returns the fields without which the client would get another answer."""
    sampling, neutral = request.sampling, Sampling()
    decisive = ("temperature", "top_p", "top_k", "max_tokens", "stop", "n", "ignore_eos", *RESHAPING)
    differing = {name for name in decisive if getattr(sampling, name) != getattr(neutral, name)}
    asked = {
        "logprobs": request.wants_logprobs,
        "chat_template_kwargs": bool(request.template_kwargs),
        "stop_token_ids": bool(sampling.stop_ids),
    }
    return request.user_set | differing | {name for name, is_asked in asked.items() if is_asked}


def _question(request: Request) -> Json:
    if request.messages is None:
        return {"prompt": request.prompt} | (
            {} if request.response_format is None else {"response_format": request.response_format}
        )
    question: Json = {"messages": request.messages}
    if request.tools:
        question |= {"tools": request.tools, "tool_choice": request.tool_choice}
    if request.response_format is not None:
        question["response_format"] = request.response_format
    thinking = {} if request.thinks is None else {"enable_thinking": request.thinks}
    if variables := {**thinking, **request.template_kwargs}:
        question["chat_template_kwargs"] = variables
    return question


def _sampling(sampling: Sampling) -> Json:
    fields: Json = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_ids) or None,
        "seed": sampling.seed,
        "n": sampling.n,
        "ignore_eos": sampling.ignore_eos or None,
        **{name: getattr(sampling, name) for name in sampling.reshaping},
    }
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return {name: value for name, value in fields.items() if value is not None}


# --- what an endpoint answers -----------------------------------------------------------------------------------------


_Bytes = list[Annotated[int, Meta(ge=0, le=255)]]


class _TopJson(msgspec.Struct):
    token: str
    logprob: float
    bytes: _Bytes | None = None


class _TokenJson(_TopJson):
    top_logprobs: list[_TopJson] | None = None


class _LogprobsJson(msgspec.Struct):
    """Chat has `content`; plain completions have the older parallel lists."""

    content: list[_TokenJson] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int] | None = None


class _ChoiceJson(msgspec.Struct):
    index: int = 0
    message: Json | None = None
    delta: Json | None = None
    text: str | None = None
    logprobs: _LogprobsJson | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's: the stop string that ended it, or the id of the stop token
    token_ids: list[int] | None = None  # vLLM's and art's
    prompt_token_ids: list[int] | None = None  # vLLM's, in plain completions
    raw_logprobs: list[float] | None = None  # art's
    sampled_logprobs: list[float] | None = None  # art's, whose `logprobs` are the raw ones


class _UsageJson(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _ReplyJson(msgspec.Struct):
    """A reply or a piece of a streamed one."""

    id: str | None = None
    created: float | None = None
    choices: list[_ChoiceJson] = []
    usage: _UsageJson | None = None
    prompt_token_ids: list[int] | None = None  # vLLM's and art's
    step: int | None = None  # art's
    error: Any = None


def _choice(request: Request, parsed: _ChoiceJson) -> Choice:
    message = parsed.message if parsed.message is not None else parsed.delta
    if message is not None:
        message = {name: value for name, value in message.items() if name == "content" or value not in (None, [], "")}
        for call in message.get("tool_calls", ()):
            if "name" in (function := call.get("function") or {}):  # first piece of a call; clients append to it
                function["arguments"] = function.get("arguments") or ""
    choice = Choice(
        index=parsed.index,
        message=message,
        text=parsed.text or (message or {}).get("content") or "",
        token_ids=parsed.token_ids or [],
        raw_logprobs=parsed.raw_logprobs,
        finish_reason=parsed.finish_reason or "stop",
        stop_string=parsed.stop_reason if isinstance(parsed.stop_reason, str) else None,
    )
    if parsed.logprobs is not None and parsed.logprobs.tokens and needs_echo(request):
        _split_echo(request, choice, parsed.logprobs)
    elif parsed.logprobs is not None:
        _add_logprobs(choice, parsed.logprobs, wants_top=bool(request.top_logprobs))
    if parsed.sampled_logprobs is not None:
        choice.logprobs = parsed.sampled_logprobs
    return choice


def _split_echo(request: Request, choice: Choice, parsed: _LogprobsJson) -> None:
    """Takes the prompt's part out of a choice's text and lists, in which it comes before the sampled tokens."""
    if request.sampling.max_tokens == 0:
        choice.token_ids = []  # vLLM samples one and does not show it
    tokens, logprobs, tops = parsed.tokens or [], parsed.token_logprobs or [], parsed.top_logprobs or []
    num = len(tokens) - len(choice.token_ids)
    if num > 0:
        offsets = parsed.text_offset or []
        size = offsets[num] - offsets[0] if num < len(offsets) else len(choice.text)
        likeliest = [None if top is None else list(top.items()) for top in tops[:num]]
        choice.echo = Echo(
            text=choice.text[:size],
            tokens=tokens[:num],
            offsets=offsets[:num],
            logprobs=logprobs[:num],
            top_logprobs=likeliest if request.top_logprobs and likeliest else None,
        )
        choice.text = choice.text[size:]
    if choice.token_ids:
        rest = _LogprobsJson(tokens=tokens[num:], token_logprobs=logprobs[num:], top_logprobs=tops[num:] or None)
        _add_logprobs(choice, rest, wants_top=bool(request.top_logprobs))


def _add_logprobs(choice: Choice, parsed: _LogprobsJson, *, wants_top: bool) -> None:
    if parsed.content is not None:
        choice.tokens = [_token(token) for token in parsed.content]
        choice.logprobs = [token.logprob for token in parsed.content]
        if any(token.top_logprobs for token in parsed.content):
            choice.top_logprobs = [
                [(_token(t), t.logprob) for t in token.top_logprobs or []] for token in parsed.content
            ]
    elif parsed.token_logprobs is not None and None not in parsed.token_logprobs:
        choice.tokens = parsed.tokens or []
        choice.logprobs = [logprob for logprob in parsed.token_logprobs if logprob is not None]
        if parsed.top_logprobs is not None and wants_top:
            choice.top_logprobs = [list((top or {}).items()) for top in parsed.top_logprobs]


def _token(parsed: _TopJson) -> str:
    """Returns the token's text. Bytes of an incomplete character become lone surrogates (`replies.token_bytes`)."""
    if parsed.bytes is None or "\ufffd" not in parsed.token:
        return parsed.token
    return bytes(parsed.bytes).decode(errors="surrogateescape")


def _prompt_ids(parsed: _ReplyJson) -> list[int] | None:
    if parsed.prompt_token_ids is not None:
        return parsed.prompt_token_ids
    return parsed.choices[0].prompt_token_ids if parsed.choices else None


def _usage(parsed: _ReplyJson) -> tuple[int, int] | None:
    return None if parsed.usage is None else (parsed.usage.prompt_tokens, parsed.usage.completion_tokens or 0)


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event. aiohttp's line reader refuses lines as long as token ids."""
    rest = bytearray()
    async for piece in response.content.iter_any():
        *lines, last = piece.split(b"\n")
        for line in lines:
            rest += line
            if rest.startswith(b"data:"):
                yield bytes(rest[5:]).strip()
            rest.clear()
        rest += last
        if len(rest) > MAX_ANSWER:
            raise AnswerTooLarge(f"a line of the stream is larger than {MAX_ANSWER >> 20} MiB")
