"""HttpBackend: any OpenAI-compatible endpoint as a Backend, such as vLLM, art's own server, or a hosted model.

It requests logprobs and token ids. vLLM and art report both for every token; other endpoints often report only text.
vLLM must report logprobs of the distribution sampled from (`--logprobs-mode processed_logprobs`). art reports these
logprobs separately as `sampled_logprobs`.

It uses aiohttp because the gateway spends most of its time here: a call costs 0.1 ms of CPU, compared with 1.2 ms for
httpx (32 concurrent calls of 18 kB). Other clients use `open_session` and `read_answer` too. Answers have a size limit.
aiohttp decompresses incrementally, so the limit also stops decompression bombs.
"""

import codecs
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.openai_reply import ChoiceJson, ReplyJson, ReplyReader
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import RESHAPING, Json, Request, Sampling, masks_logits, needs_echo
from art_cli.runtime.secrets import find_secrets

LOCAL = ("127.0.0.1", "localhost", "::1")  # names of this machine
IDLE_S = 4.0  # shorter than uvicorn's keep-alive of 5 s, so only this side closes idle connections
MAX_ANSWER = 64 << 20  # bytes; 8 choices of 32k tokens with ids and logprobs take 40 MB
MAX_ERROR = 1 << 20  # maximum bytes of an error answer, which is quoted in a message
CONNECT_TIMEOUT_S = 10.0
MAX_MESSAGE = 10_000  # maximum characters of an endpoint's error for the client
_STATUS = re.compile("[45][0-9][0-9]")  # an HTTP status as an error's code
_FIELD = re.compile(rb":|(data|event|id|retry)(:|$)")  # begins a line of an event
_REFUSED = re.compile(r"unsupported|not support|unrecognized|unknown|not permitted|unexpected", re.IGNORECASE)
_TOOLS = re.compile(r"schema|context=|\b(?:tool|function)s?\b", re.IGNORECASE)  # a tool's fields have any names
# ways in which a message names the field %s: after one of these words, perhaps in a list, or before "is not ..."
_WORDS = "parameters?|arguments?|supplied|property|field|name|value|model|unsupported|unknown|unexpected|'body',"
_NAMED = rf"(?i:(?:{_WORDS})[\s:'\"`]+(?:\w+, )*%s\b|\b%s\b['\"`]?:? (?:(?:is|are|was|does|do) )?(?:not\b|un|extra))"


class AnswerTooLarge(aiohttp.ClientError):
    """The endpoint's answer is larger than any request asks for."""


class ErrorAnswer(msgspec.Struct):
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
    """Returns the error from an OpenAI body, vLLM's older flat body, or FastAPI's `detail`; otherwise empty."""
    try:
        fields = msgspec.json.decode(answer)
        error = fields.get("error", fields) if isinstance(fields, dict) else {}
        error = {"message": error} if isinstance(error, str) else error
        texts = {n: error.get(n) for n in ("message", "type", "param", "code")}
        texts["message"] = texts["message"] or error.get("detail")
    except (ValueError, RecursionError, AttributeError):
        return ErrorAnswer()
    return ErrorAnswer(**{name: str(value) for name, value in texts.items() if value is not None})


class HttpBackend:
    """Sends requests to `base_url` (`http://127.0.0.1:8000/v1`) for `model`, regardless of the client's model name.

    Policy digests from the endpoint are dropped, because they are not proven here.
    """

    def __init__(self, base_url: str, api_key: str, model: str, *, step: int = 0, timeout_s: float = 300.0) -> None:
        self.model = model
        # step to record if the endpoint does not report one; the caller updates it after loading weights
        self.step = step
        # without the password, because messages contain the URL
        self._url = str(URL(base_url.rstrip("/")).with_user(None))
        self._api_key = api_key
        self._secrets = find_secrets({}, values=[api_key], urls=[base_url])
        self._timeout_s = timeout_s
        self._refused: frozenset[str] = frozenset()  # fields that the endpoint does not know
        self._session: aiohttp.ClientSession | None = None

    def models(self) -> list[str]:
        return [self.model]

    async def reply(self, request: Request) -> Reply:
        """Raises ChatError: the endpoint's refusal, 502 if it is unreachable, 504 on a timeout."""
        async with self._post(request, is_stream=False) as response:
            body = await read_answer(response)
        reader = ReplyReader(request)
        with self._unreadable(body):
            parsed = reader.read(body)
            self._raise_error(parsed, body)
            if not parsed.choices:
                raise ValueError("it has no choices")
            choices = [_masked(request, reader.choice(choice)) for choice in parsed.choices]
        return Reply(
            id=parsed.id or "",
            created=int(parsed.created or 0),
            model=request.model,
            choices=choices,
            prompt_ids=parsed.prompt_ids or [],
            step=self.step if parsed.step is None else parsed.step,
            sampling=request.sampling,
            usage=parsed.counts,
        )

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Raises ChatError like `reply`, and if the stream ends before its choices."""
        open_choices = set(range(request.sampling.n))
        begun, reader = set[int](), ReplyReader(request)
        async with self._post(request, is_stream=True) as response:
            async for data in read_events(response):
                if data == b"[DONE]":  # also the end of choices for which the endpoint named no finish_reason
                    ends = [ChoiceJson(index=index, finish_reason="stop") for index in sorted(open_choices & begun)]
                    parsed = ReplyJson(choices=ends)
                else:
                    with self._unreadable(data):
                        parsed = reader.read(data)
                self._raise_error(parsed, data)
                for chunk in self._chunks(request, parsed, reader):
                    begun.add(chunk.choice.index)
                    if chunk.is_last:
                        open_choices.discard(chunk.choice.index)
                    yield chunk
                if data == b"[DONE]":
                    break
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
        refused = self._refused
        with self._transport_errors():
            while True:
                body = msgspec.json.encode(self._body(request, refused, is_stream=is_stream))
                async with self._open().post(url, data=body, timeout=timeout, allow_redirects=False) as response:
                    if response.status == 200:
                        self._refused |= refused
                        yield response
                        return
                    answer = await read_answer(response, MAX_ERROR)
                    named = self._refused_by(request, refused, response.status, answer)
                    if not named:
                        raise self._refusal(response.status, answer, response.headers.get("Retry-After"))
                    refused |= named

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(self._url, self._headers())
        return self._session

    def _path(self, request: Request) -> str:
        return "completions" if request.messages is None else "chat/completions"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._api_key}", "Content-Type": "application/json"}

    def _body(self, request: Request, refused: Set[str], *, is_stream: bool) -> Json:
        """Returns the body without the `refused` fields. Raises ChatError 400 if the protocol cannot express it."""
        return openai_body(request, self.model, refused, is_stream=is_stream)

    def _refused_by(self, request: Request, refused: Set[str], status: int, answer: bytes) -> frozenset[str]:
        """Returns the further fields without which the endpoint may accept the request, after this refusal."""
        return refused_fields(request, refused, status, answer)

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

    def _raise_error(self, parsed: ReplyJson, answer: bytes) -> None:
        """Raises ChatError for an error in an answer of status 200."""
        if not parsed.error and parsed.choices:
            return
        error = read_error(answer)
        if parsed.error or error.message:
            raise self._refusal(int(error.code or 0) if _STATUS.fullmatch(error.code or "") else 502, answer)

    def _refusal(self, status: int, answer: bytes, retry_after: str | None = None) -> ChatError:
        """Returns the endpoint's error with our key removed."""
        if status in (401, 403):
            return ChatError(status, f"{self._url}: it refused our API key", code="upstream_authentication")
        error = read_error(answer)
        text = error.message or answer[:200].decode(errors="replace").strip()
        if status < 400 or not text:
            text = f"{self._url}: status {status}: {text or 'an empty answer'}"
        message = self._hide_key(text)[:MAX_MESSAGE]
        status = status if 400 <= status < 600 else 502
        if not (retry_after or "").isascii():  # as headers must be
            retry_after = None
        return ChatError(status, message, error.type, error.param, error.code, retry_after=retry_after)

    def _broken(self, message: str) -> ChatError:
        return ChatError(502, f"{self._url}: {message}", code="upstream_broken")

    @contextmanager
    def _unreadable(self, answer: bytes = b"{") -> Iterator[None]:
        try:
            yield
        except (ValueError, RecursionError) as error:
            quoted = "" if answer.startswith(b"{") else self._hide_key(f": {answer[:200].decode(errors='replace')!r}")
            raise self._broken(f"not an OpenAI reply: {error}{quoted}") from error

    def _hide_key(self, text: str) -> str:
        return self._secrets.redact(text[: 2 * MAX_MESSAGE])

    def _chunks(self, request: Request, parsed: ReplyJson, reader: ReplyReader) -> Iterator[Chunk]:
        prompt_ids = parsed.prompt_ids
        for piece in parsed.choices or ([ChoiceJson()] if parsed.usage else []):
            with self._unreadable():
                choice = _masked(request, reader.choice(piece))
            yield Chunk(
                id=parsed.id or "",
                created=int(parsed.created or 0),
                model=request.model,
                choice=choice,
                is_last=bool(piece.finish_reason) or piece.message is not None,
                prompt_ids=prompt_ids,
                step=self.step if parsed.step is None else parsed.step,
                sampling=request.sampling,
                usage=parsed.counts,
            )
            prompt_ids = None


def _masked(request: Request, choice: Choice) -> Choice:
    """Marks logprobs that a mask, penalty or bias has changed, because the endpoint reports no raw logprobs."""
    choice.is_masked = choice.raw_logprobs is None and bool(choice.logprobs) and masks_logits(request)
    return choice


# --- what an endpoint understands -------------------------------------------------------------------------------------


def openai_body(request: Request, model: str, refused: Set[str], *, is_stream: bool) -> Json:
    """Returns the body without the refused fields that the client did not set; all others, as defaults differ."""
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
    if "max_tokens" in refused and "max_tokens" in body:
        body["max_completion_tokens"] = body.pop("max_tokens")
    for name in refused - _asked_for(request):
        body.pop(name, None)
    return body


def refused_fields(request: Request, refused: Set[str], status: int, answer: bytes) -> frozenset[str]:
    """Returns the optional fields that a refusal names: in `param`, else in the message, which may quote the client."""
    error = read_error(answer)
    message = error.message[:MAX_MESSAGE]
    variables = "chat_template_kwargs"
    param = variables if (error.param or "").startswith(f"{variables}.") else error.param
    is_refused = _REFUSED.search(message) or param != error.param  # the template does not read a variable
    if status not in (400, 422) or not is_refused or (not param and _TOOLS.search(message)):
        return frozenset()
    body = openai_body(request, "", refused, is_stream=request.is_stream)
    optional = {"max_tokens", "logprobs", "return_token_ids", "stream_options", "parallel_tool_calls", variables}
    optional |= _sampling(request.sampling).keys()
    optional = (optional & body.keys()) - (_asked_for(request) - {"max_tokens"})
    return frozenset(n for n in optional if (n == param if param else re.search(_NAMED.replace("%s", n), message)))


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
        question |= {} if request.calls_in_parallel else {"parallel_tool_calls": False}
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


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event. A body that is not events, such as an error, is yielded whole."""
    data, other = bytearray(), bytearray()
    is_begun = False
    async for line in _lines(response):
        if other or (line and not is_begun and not _FIELD.match(line)):
            other += line + b"\n"
        elif line.startswith(b"data:"):
            value = line[5:].strip()
            if data.endswith(b"}") and value.startswith((b"{", b"[")):  # no empty line before this event
                yield bytes(data)
                data.clear()
            data += b"\n" + value if data else value
        elif not line and data:
            yield bytes(data)
            data.clear()
        is_begun = is_begun or bool(line)
        if len(data) + len(other) > MAX_ANSWER:
            raise AnswerTooLarge(f"an event of the stream is larger than {MAX_ANSWER >> 20} MiB")
    if rest := data or other.strip():
        yield bytes(rest)


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields lines that end with LF, CR, or both. Avoids aiohttp's line reader, which limits the line length."""
    rest, is_behind_cr = bytearray(), False
    async for piece in response.content.iter_any():
        piece = piece[1:] if is_behind_cr and piece.startswith(b"\n") else piece
        is_behind_cr = piece.endswith(b"\r")
        *lines, last = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            yield bytes(rest + line).removeprefix(codecs.BOM_UTF8)
            rest.clear()
        rest += last
        if len(rest) > MAX_ANSWER:
            raise AnswerTooLarge(f"a line of the stream is larger than {MAX_ANSWER >> 20} MiB")
    yield bytes(rest)
