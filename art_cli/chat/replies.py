"""What comes back, in our words: Reply, whole, and Chunk, a piece of one. Rendering to OpenAI's JSON is below them.

    render_reply     a Reply as chat.completion or text_completion
    StreamRenderer   Chunks as server-sent events
    ReplyBuilder     the chunks of a stream put together to the Reply they are pieces of

Where the client asked for `return_token_ids`, replies carry vLLM's fields `prompt_token_ids` and `choices[].token_ids`
and two of our own: `step`, the policy's step, and `choices[].raw_logprobs`, under softmax(logits) untouched.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from art_cli.chat.errors import ChatError
from art_cli.chat.requests import Request

Json = dict[str, Any]


class Choice(msgspec.Struct, kw_only=True):
    """One sampled answer. L sampled tokens.

    Example: Choice(index=0, message={"role": "assistant", "content": "4"}, text="4", token_ids=[19, 2],
                    logprobs=[-0.1, -0.0], raw_logprobs=[-0.1, -0.0], tokens=["4", ""], finish_reason="stop")
    """

    index: int
    message: Json | None = None  # chat: the assistant message, tool calls parsed
    text: str = ""  # what was sampled, special tokens left out
    token_ids: list[int] = []  # [L] as sampled, the stop token included
    logprobs: list[float] = []  # [L] under the distribution really sampled from, a grammar's mask left aside
    raw_logprobs: list[float] | None = None  # [L] under softmax(logits) untouched
    is_masked: bool = False  # a grammar's mask is in `logprobs` all the same, as in vLLM's
    tokens: list[str] = []  # [L] each token as text, for clients that asked for logprobs; see `token_bytes`
    top_logprobs: list[list[tuple[str, float]]] | None = None  # [L][k]
    finish_reason: str = "stop"  # stop, length, tool_calls


class Reply(msgspec.Struct, kw_only=True):
    """The whole answer to one request."""

    id: str
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    prompt_ids: list[int]
    step: int = 0  # the policy's step that sampled it
    sampling: Any = None  # the Sampling really used, defaults filled in; None: the endpoint did not say
    usage: tuple[int, int] | None = None  # (prompt, sampled) tokens of an endpoint that counts and gives no ids


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of one choice of a streamed answer.

    The first chunk of a stream carries `prompt_ids`; the last of each choice carries `finish_reason`. `choice` holds
    what is new: its `message` is an OpenAI delta, its token lists are the new tokens only.
    """

    id: str
    created: int
    model: str
    choice: Choice
    is_last: bool = False  # of its choice: finish_reason counts
    prompt_ids: list[int] | None = None
    step: int = 0
    sampling: Any = None
    usage: tuple[int, int] | None = None  # as in Reply; with the last chunks


# --- logprobs ---------------------------------------------------------------------------------------------------------

_LOWEST_LOGPROB = -9999.0  # OpenAI's and vLLM's stand-in for -inf, which JSON cannot say


class _TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_TopLogprob] = []


def _chat_logprobs(choice: Choice) -> Json:
    """`{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`"""
    content = [
        _TokenLogprob(token_text(token), max(logprob, _LOWEST_LOGPROB), list(token_bytes(token)))
        for token, logprob in zip(_tokens(choice), choice.logprobs, strict=True)
    ]
    for entry, top in zip(content, choice.top_logprobs or (), strict=False):
        entry.top_logprobs = _top(top)
    return {"content": content, "refusal": None}


def _top(top: list[tuple[str, float]]) -> list[_TopLogprob]:
    return [
        _TopLogprob(token_text(token), max(logprob, _LOWEST_LOGPROB), list(token_bytes(token)))
        for token, logprob in top
    ]


def token_bytes(token: str) -> bytes:
    """A token's bytes. Those of a part of a character stand as lone surrogates in its text (PEP 383)."""
    return token.encode(errors="surrogateescape")


def token_text(token: str) -> str:
    """A token as clients see it: bytes that are no character are U+FFFD."""
    return token if token.isascii() else token_bytes(token).decode(errors="replace")


def _text_logprobs(choice: Choice, offset: int) -> Json:
    """The older form of plain completions; `offset` characters came before."""
    offsets, tokens = [], [token_text(token) for token in _tokens(choice)]
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = choice.top_logprobs
    return {
        "tokens": tokens,
        "token_logprobs": [max(logprob, _LOWEST_LOGPROB) for logprob in choice.logprobs],
        "top_logprobs": [_top_texts(top) for top in tops] if tops else None,
        "text_offset": offsets,
    }


def _top_texts(top: list[tuple[str, float]]) -> dict[str, float]:
    """By text: of several tokens with the same one, the likeliest, which is the first."""
    texts: dict[str, float] = {}
    for token, logprob in top:
        texts.setdefault(token_text(token), max(logprob, _LOWEST_LOGPROB))
    return texts


def _tokens(choice: Choice) -> list[str]:
    """Each token as text; empty strings where the backend knows only ids."""
    return choice.tokens or [""] * len(choice.logprobs)


# --- plain ------------------------------------------------------------------------------------------------------------


def render_reply(request: Request, reply: Reply) -> bytes:
    """The JSON body of a chat.completion, or of a text_completion when the request had a prompt."""
    is_chat = request.messages is not None
    body: Json = {
        "id": reply.id,
        "object": "chat.completion" if is_chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [(_chat_choice if is_chat else _text_choice)(request, choice) for choice in reply.choices],
        "usage": _usage(*(reply.usage or (len(reply.prompt_ids), sum(len(c.token_ids) for c in reply.choices)))),
    }
    if request.wants_token_ids:
        body |= {"prompt_token_ids": reply.prompt_ids, "step": reply.step}
    return msgspec.json.encode(body)


def _chat_choice(request: Request, choice: Choice) -> Json:
    return {
        "index": choice.index,
        "message": choice.message or {"role": "assistant", "content": choice.text},
        "logprobs": _chat_logprobs(choice) if request.wants_logprobs else None,
        "finish_reason": choice.finish_reason,
        **_token_fields(request, choice),
    }


def _text_choice(request: Request, choice: Choice) -> Json:
    return {
        "index": choice.index,
        "text": f"{request.prompt}{choice.text}" if request.echo else choice.text,
        "logprobs": _text_logprobs(choice, 0) if request.wants_logprobs else None,
        "finish_reason": choice.finish_reason,
        **_token_fields(request, choice),
    }


def _token_fields(request: Request, choice: Choice) -> Json:
    if not request.wants_token_ids:
        return {}
    return {"token_ids": choice.token_ids, "raw_logprobs": choice.raw_logprobs}


def _usage(num_prompt: int, num_sampled: int) -> Json:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}


# --- streamed ---------------------------------------------------------------------------------------------------------


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_event(error: ChatError) -> bytes:
    """What a client of a broken stream gets; no [DONE] follows."""
    return event(error.body())


class StreamRenderer:
    """Renders the chunks of one stream as events: each choice's beginning, its pieces, at last usage and [DONE]."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_chat = request.messages is not None
        self._wants_tokens = request.wants_logprobs or request.wants_token_ids
        self._offsets: dict[int, int] = {}  # choice index -> characters sent; a choice not in here has not begun
        self._num_prompt = 0
        self._num_sampled = 0
        self._last: Chunk | None = None

    def render(self, chunk: Chunk) -> bytes:
        """The events of one chunk; empty for one that holds nothing the client asked for."""
        self._last = chunk
        self._num_prompt += len(chunk.prompt_ids or ())
        self._num_sampled += len(chunk.choice.token_ids)
        events = b""
        if chunk.choice.index not in self._offsets:
            self._offsets[chunk.choice.index] = 0
            events = self._begin(chunk)
        piece = self._chat_delta(chunk.choice) if self._is_chat else {"text": chunk.choice.text}
        has_tokens = self._wants_tokens and bool(chunk.choice.token_ids or chunk.choice.logprobs)
        if chunk.is_last or has_tokens or any(piece.values()):
            events += self._event(chunk, self._piece(chunk, piece))
        return events

    def finish(self) -> bytes:
        """The usage chunk, where it was asked for, and the end of the stream."""
        done = event(b"[DONE]")
        if self._last is None or not self._request.wants_usage:
            return done
        usage = _usage(*(self._last.usage or (self._num_prompt, self._num_sampled)))
        return event(msgspec.json.encode({**self._head(self._last), "choices": [], "usage": usage})) + done

    def _begin(self, chunk: Chunk) -> bytes:
        """A choice's first event: in chat the role, in plain text the echo; the prompt's token ids go with it."""
        extra: Json = {}
        if self._request.wants_token_ids and chunk.prompt_ids is not None:
            extra = {"prompt_token_ids": chunk.prompt_ids}
        if not (self._is_chat or self._request.echo or extra):
            return b""
        echo = self._request.prompt if self._request.echo else ""
        piece: Json = {"delta": {"role": "assistant", "content": ""}} if self._is_chat else {"text": echo}
        choice = {"index": chunk.choice.index, **piece, "logprobs": None, "finish_reason": None}
        return self._event(chunk, choice, extra)

    def _chat_delta(self, choice: Choice) -> Json:
        delta: Json = {"content": choice.text} if choice.message is None else choice.message
        delta = {name: value for name, value in delta.items() if name != "role" and value}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
        return {"delta": delta}

    def _piece(self, chunk: Chunk, piece: Json) -> Json:
        return {
            "index": chunk.choice.index,
            **piece,
            "logprobs": self._logprobs(chunk.choice),
            "finish_reason": chunk.choice.finish_reason if chunk.is_last else None,
            **_token_fields(self._request, chunk.choice),
        }

    def _logprobs(self, choice: Choice) -> Json | None:
        if not self._request.wants_logprobs or not choice.logprobs:
            return None
        if self._is_chat:
            return _chat_logprobs(choice)
        offset = self._offsets[choice.index]
        self._offsets[choice.index] = offset + sum(len(token_text(token)) for token in _tokens(choice))
        return _text_logprobs(choice, offset)

    def _event(self, chunk: Chunk, choice: Json, extra: Json | None = None) -> bytes:
        return event(msgspec.json.encode({**self._head(chunk), "choices": [choice], **(extra or {})}))

    def _head(self, chunk: Chunk) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        step = {"step": chunk.step} if self._request.wants_token_ids else {}
        return {"id": chunk.id, "object": kind, "created": chunk.created, "model": chunk.model, **step}


# --- put together -----------------------------------------------------------------------------------------------------


class ReplyBuilder:
    """Puts the chunks of one request's stream together. `is_complete` once every choice it asked for has ended."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._choices: dict[int, Choice] = {}
        self._ended: set[int] = set()
        self._prompt_ids: list[int] = []
        self._last: Chunk | None = None

    @property
    def is_complete(self) -> bool:
        return len(self._ended) == self._request.sampling.n

    def add(self, chunk: Chunk) -> None:
        self._last = chunk
        self._prompt_ids = chunk.prompt_ids or self._prompt_ids
        piece = chunk.choice
        whole = self._choices.setdefault(piece.index, Choice(index=piece.index, raw_logprobs=[], top_logprobs=[]))
        _extend(whole, piece)
        if self._request.messages is not None:
            whole.message = whole.message or {"role": "assistant", "content": None}
            _extend_message(whole.message, {"content": piece.text} if piece.message is None else piece.message)
        if chunk.is_last:
            whole.finish_reason = piece.finish_reason
            self._ended.add(piece.index)

    def reply(self) -> Reply:
        """The Reply whose pieces were added; at least one was."""
        last = self._last
        assert last is not None, "a stream without chunks"
        return Reply(
            id=last.id,
            created=last.created,
            model=last.model,
            choices=[_settle(self._choices[index]) for index in sorted(self._choices)],
            prompt_ids=self._prompt_ids,
            step=last.step,
            sampling=last.sampling,
            usage=last.usage,
        )


def _extend(whole: Choice, piece: Choice) -> None:
    """Adds a piece's text and tokens in place."""
    whole.text += piece.text
    whole.is_masked |= piece.is_masked
    for name in ("token_ids", "logprobs", "raw_logprobs", "tokens", "top_logprobs"):
        getattr(whole, name).extend(getattr(piece, name) or ())


def _settle(choice: Choice) -> Choice:
    """None for what the pieces did not carry; content is null beside tool calls, and otherwise text, if empty."""
    num_tokens = len(choice.logprobs)
    if len(choice.raw_logprobs or ()) != num_tokens:
        choice.raw_logprobs = None
    if len(choice.top_logprobs or ()) != num_tokens:
        choice.top_logprobs = None
    if choice.message is not None:
        choice.message["content"] = choice.message["content"] or (None if "tool_calls" in choice.message else "")
    return choice


def _extend_message(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            _extend_calls(message.setdefault("tool_calls", []), value)
        elif name != "role" and value is not None:
            _join(message, name, value)


def _extend_calls(calls: list[Json], deltas: Sequence[Json]) -> None:
    """Tool calls by their `index`: the first delta of one names it, later ones add to its arguments."""
    for place, delta in enumerate(deltas):
        index = delta.get("index", place)
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = delta.get("id") or call["id"]
        for name, value in (delta.get("function") or {}).items():
            _join(call["function"], name, value or "")


def _join(whole: Json, name: str, value: Any) -> None:
    """Strings are put one after the other; anything else is replaced."""
    old = whole.get(name)
    whole[name] = old + value if isinstance(old, str) and isinstance(value, str) else value
