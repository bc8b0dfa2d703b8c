"""Reply: a whole answer; Chunk: a piece of a streamed one. ReplyBuilder joins the chunks of a stream to its Reply.

These records are the same for every client protocol. wires/ renders them to each protocol's JSON.

A model samples the arguments of a tool call as text. A protocol that hands them out as an object (`input_of`) loses how
they were written: the spaces, the order of the keys, 1.0 or 1. So a call that came back and the call that was sampled
are compared by their values (`are_same`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from art_cli.chat.requests import Json, Request
from art_cli.runtime.processes.plain_json import is_deep

MAX_GROWTH = 32  # how many times longer the same arguments may be, with line breaks, indents and escapes
MAX_DEPTH = 32  # levels of arguments handed out as an object; a client must be able to send them back (reading.py)


def input_of(arguments: str) -> Json:
    """Returns the arguments as an object. Text that is no object, as in a cut call, is its field `arguments`.

    Example: input_of('{"a": 2}') is {"a": 2}, and input_of('{"a": ') is {"arguments": '{"a": '}.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) and not is_deep(value, MAX_DEPTH) else {"arguments": arguments}


def are_same(sampled: str, returned: str) -> bool:
    """Returns whether two texts of arguments are the same JSON value, numbers compared as numbers."""
    if sampled == returned:
        return True
    if len(returned) > MAX_GROWTH * (len(sampled) + 1):  # so that no long text is read which cannot be the same
        return False
    try:
        return _is_same(input_of(sampled), msgspec.json.decode(returned))
    except (ValueError, RecursionError):
        return False


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_is_same(value, second[key]) for key, value in first.items())
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    return bool(first == second)


class Echo(msgspec.Struct, kw_only=True):
    """The prompt of a plain completion, P tokens, as the answer repeats it; the lists only if logprobs are asked for.

    Example: Echo(text="2 + 2", tokens=["2", " +", " 2"], offsets=[0, 1, 3], logprobs=[None, -4.1, -1.2])
    """

    text: str
    tokens: list[str] = []  # [P] each token as text; see `token_bytes`
    offsets: list[int] = []  # [P] number of characters of the text before each token
    logprobs: list[float | None] = []  # [P] under softmax(logits); None for the first token
    top_logprobs: list[list[tuple[str, float]] | None] | None = None  # [P][k]; None for the first token


class Choice(msgspec.Struct, kw_only=True):
    """One sampled answer of L tokens.

    Example: Choice(index=0, message={"role": "assistant", "content": "4"}, text="4", token_ids=[19, 2],
                    logprobs=[-0.1, -0.0], raw_logprobs=[-0.1, -0.0], tokens=["4", ""], finish_reason="stop")
    """

    index: int
    message: Json | None = None  # chat only: the assistant message in OpenAI's form, tool calls parsed
    text: str = ""  # the sampled text without special tokens
    token_ids: list[int] = []  # [L] sampled tokens, the stop token included
    logprobs: list[float] = []  # [L] logprobs under the distribution sampled from, before a grammar's mask
    raw_logprobs: list[float] | None = None  # [L] logprobs under the unmodified softmax(logits)
    is_masked: bool = False  # True: `logprobs` are those behind a grammar's mask, as vLLM reports them
    tokens: list[str] = []  # [L] each token as text, if the client asked for logprobs; see `token_bytes`
    top_logprobs: list[list[tuple[str, float]]] | None = None  # [L][k]
    finish_reason: str = "stop"  # stop, length, tool_calls
    echo: Echo | None = None  # set for a request that `needs_echo`
    prompt_ids: list[int] | None = None  # set for one of several prompts; None means those of the reply
    stop_string: str | None = None  # the stop string that ended it, if the endpoint reports one


class Reply(msgspec.Struct, kw_only=True):
    """The whole answer to one request."""

    id: str
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    prompt_ids: list[int]
    step: int = 0  # policy step that sampled it
    policy: str = ""  # digest of the proven policy that sampled it; "" if unknown
    sampling: Any = None  # the Sampling used, defaults filled in, or None if the endpoint does not report it
    usage: tuple[int, int] | None = None  # (prompt, sampled) token counts, if the endpoint reports counts and no ids

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Of the prompt, and sampled in all choices."""
        return self.usage or (len(self.prompt_ids), sum(len(choice.token_ids) for choice in self.choices))


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of one choice of a streamed answer.

    The first chunk of a stream carries `prompt_ids`; the last of each choice carries `finish_reason`. `choice` holds
    only what is new: its `message` is an OpenAI delta, its token lists are the new tokens.
    """

    id: str
    created: int
    model: str
    choice: Choice
    is_last: bool = False  # True: the last chunk of its choice, whose finish_reason counts
    prompt_ids: list[int] | None = None
    step: int = 0
    policy: str = ""  # see Reply
    sampling: Any = None
    usage: tuple[int, int] | None = None  # see Reply; the last chunks carry it


def thoughts_of(message: Json) -> str:
    """Returns the thoughts in a message or a delta, which vLLM has called both names."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def token_bytes(token: str) -> bytes:
    """Returns a token's bytes. In its text, bytes of an incomplete character are lone surrogates (PEP 383)."""
    return token.encode(errors="surrogateescape")


def token_text(token: str) -> str:
    """Returns a token as clients see it, with U+FFFD for bytes of an incomplete character."""
    return token if token.isascii() else token_bytes(token).decode(errors="replace")


# --- put together -----------------------------------------------------------------------------------------------------


def join_deltas(deltas: Iterable[Json]) -> Json:
    """Joins a choice's deltas: texts and tool calls in sequence, the role once, the newest of other values."""
    joined: Json = {}
    texts: dict[str, list[str]] = {}  # joined once at the end, so that long texts are copied once
    for delta in deltas:
        for name, value in delta.items():
            if isinstance(value, str) and name != "role":
                texts.setdefault(name, []).append(value)
            elif name == "tool_calls":
                joined.setdefault(name, []).extend(value or ())
            elif value is not None:
                joined[name] = value
    return joined | {name: "".join(pieces) for name, pieces in texts.items()}


class ReplyBuilder:
    """Joins the chunks of one request's stream. It is complete once every choice that was asked for has ended."""

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
        """Returns the Reply that the added chunks are pieces of. At least one chunk was added."""
        last = self._last
        assert last is not None, "a stream without chunks"
        return Reply(
            id=last.id,
            created=last.created,
            model=last.model,
            choices=[_finished(self._choices[index]) for index in sorted(self._choices)],
            prompt_ids=self._prompt_ids,
            step=last.step,
            policy=last.policy,
            sampling=last.sampling,
            usage=last.usage,
        )

    def partial_reply(self) -> Reply | None:
        """Returns the part that was streamed before the client left, or None if no choice has a token or text."""
        if self._last is None:
            return None
        reply = self.reply()
        begun = [choice for choice in reply.choices if choice.token_ids or choice.text]
        for choice in begun:
            if choice.index not in self._ended:
                choice.finish_reason = "cancelled"
        return msgspec.structs.replace(reply, choices=begun) if begun else None


def _extend(whole: Choice, piece: Choice) -> None:
    """Adds a piece's text and tokens in place."""
    whole.text += piece.text
    whole.is_masked |= piece.is_masked
    whole.echo = whole.echo or piece.echo
    whole.stop_string = piece.stop_string or whole.stop_string
    for name in ("token_ids", "logprobs", "raw_logprobs", "tokens", "top_logprobs"):
        getattr(whole, name).extend(getattr(piece, name) or ())


def _finished(choice: Choice) -> Choice:
    """Returns a copy with None for lists that no piece had, as more pieces may follow: endpoints send the usage last.

    Its content is null beside tool calls, else text.
    """
    num_tokens = len(choice.logprobs)
    message = choice.message
    if message is not None:
        message = {**message, "content": message["content"] or (None if "tool_calls" in message else "")}
    return msgspec.structs.replace(
        choice,
        message=message,
        raw_logprobs=choice.raw_logprobs if len(choice.raw_logprobs or ()) == num_tokens else None,
        top_logprobs=choice.top_logprobs if len(choice.top_logprobs or ()) == num_tokens else None,
    )


def _extend_message(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            _extend_calls(message.setdefault("tool_calls", []), value)
        elif name != "role" and value is not None:
            _join(message, name, value)


def _extend_calls(calls: list[Json], deltas: Sequence[Json]) -> None:
    """Adds deltas to tool calls by their `index`: a call's first delta names it, later ones extend its arguments."""
    for position, delta in enumerate(deltas):
        index = delta.get("index", position)
        while len(calls) <= index:
            calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[index]
        call["id"] = delta.get("id") or call["id"]
        for name, value in (delta.get("function") or {}).items():
            _join(call["function"], name, value or "")


def _join(whole: Json, name: str, value: Any) -> None:
    """Appends a string to a string; replaces anything else."""
    old = whole.get(name)
    whole[name] = old + value if isinstance(old, str) and isinstance(value, str) else value
