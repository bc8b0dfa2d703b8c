"""Reply: a complete answer; Chunk: a piece of a streamed answer. ReplyBuilder joins a stream's chunks to a Reply.

PieceQueue orders a stream's pieces.

All client protocols use these records. wires/ renders them to each protocol's JSON.

A model samples tool call arguments as text. Protocols with arguments as objects (`input_of`) lose the original text:
spaces, key order, 1.0 or 1. Therefore calls are compared by their values (`are_same`).
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from art_cli.chat.requests import Json, Request, text_of
from art_cli.runtime.processes.plain_json import is_deep

MAX_GROWTH = 32  # how many times longer the same arguments may be, with line breaks, indents and escapes
MAX_DEPTH = 32  # levels of arguments handed out as an object; a client must be able to send them back (reading.py)


def input_of(arguments: str) -> Json:
    """Returns the arguments as an object. Invalid text, such as a truncated call, becomes the field `arguments`.

    Example: input_of('{"a": 2}') is {"a": 2}, and input_of('{"a": ') is {"arguments": '{"a": '}.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) and not is_deep(value, MAX_DEPTH) else {"arguments": arguments}


def are_same(sampled: str, returned: str) -> bool:
    """Returns whether two argument texts have the same JSON value. Numbers are compared by value."""
    if sampled == returned:
        return True
    if len(returned) > MAX_GROWTH * (len(sampled) + 1):  # skips long texts that cannot be equal
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
    """A plain completion's prompt with P tokens, echoed in the answer; the lists are set if logprobs are requested.

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
    logprobs: list[float] = []  # [L] logprobs under the sampled distribution, before a grammar's mask
    raw_logprobs: list[float] | None = None  # [L] logprobs under the unmodified softmax(logits)
    is_masked: bool = False  # whether `logprobs` were computed after a grammar's mask, as in vLLM
    tokens: list[str] = []  # [L] each token as text, if the client asked for logprobs; see `token_bytes`
    top_logprobs: list[list[tuple[str, float]]] | None = None  # [L][k]
    finish_reason: str = "stop"  # stop, length, tool_calls
    echo: Echo | None = None  # set for a request that `needs_echo`
    prompt_ids: list[int] | None = None  # set for requests with several prompts; default: the reply's prompt
    stop_string: str | None = None  # matched stop string, if the endpoint reports it


class Reply(msgspec.Struct, kw_only=True):
    id: str
    created: int  # seconds since the epoch
    model: str
    choices: list[Choice]
    prompt_ids: list[int]
    step: int = 0  # policy step that sampled it
    policy: str = ""  # digest of the proven policy that sampled it; "" if unknown
    sampling: Any = None  # Sampling with all defaults, if the endpoint reports it
    usage: tuple[int, int] | None = None  # (prompt, sampled) token counts, if the endpoint reports counts and no ids

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and tokens of all choices."""
        return self.usage or (len(self.prompt_ids), sum(len(choice.token_ids) for choice in self.choices))

    @property
    def is_counted(self) -> bool:
        """Whether the endpoint reported token counts or ids."""
        return self.usage is not None or bool(self.prompt_ids) or any(choice.token_ids for choice in self.choices)


class Chunk(msgspec.Struct, kw_only=True):
    """A piece of a streamed choice.

    The first chunk of a stream has `prompt_ids`; the last chunk of each choice has `finish_reason`. `choice` has only
    new content: its `message` is an OpenAI delta, and its token lists are the new tokens.
    """

    id: str
    created: int
    model: str
    choice: Choice
    is_last: bool = False  # whether this is the choice's last chunk, whose finish_reason counts
    prompt_ids: list[int] | None = None
    step: int = 0
    policy: str = ""  # see Reply
    sampling: Any = None
    usage: tuple[int, int] | None = None  # see Reply; the last chunks carry it


def hex_id(id: str) -> str:
    """Returns the 32 hexadecimal digits of an id (chatcmpl-HEX, resp_HEX, msg_HEX, a UUID); "" for other ids."""
    digits = re.sub("^(chatcmpl-|cmpl-|msg_|resp_)", "", id).replace("-", "").lower()
    return digits if re.fullmatch("[0-9a-f]{32}", digits) else ""


def thoughts_of(message: Json) -> str:
    """Returns the thoughts in a message or a delta, which vLLM has called both names."""
    return message.get("reasoning_content") or message.get("reasoning") or ""


def answer_of(message: Json) -> str:
    """Returns the text of a message or a delta; a refusal is text too."""
    return text_of(message.get("content")) or message.get("refusal") or ""


def token_bytes(token: str) -> bytes:
    """Returns a token's bytes. In the text, bytes of an incomplete character are lone surrogates (PEP 383)."""
    return token.encode(errors="surrogateescape")


def token_text(token: str) -> str:
    """Returns a token for display, with U+FFFD for bytes of an incomplete character."""
    return token if token.isascii() else token_bytes(token).decode(errors="replace")


# --- in order ---------------------------------------------------------------------------------------------------------


class PieceQueue:
    """Orders a stream's pieces for protocols in which one block ends before the next begins.

    Endpoints may interleave the pieces of tool calls. Pieces of other blocks wait until the open call's arguments are a
    JSON object, or until the end. Pieces behind such an object are dropped.

    Example: the names of calls 0 and 1, then the arguments of 0 and 1, become call 0, then call 1.
    """

    def __init__(self) -> None:
        self._open: str | int = ""  # "thinking", "text", or a call's index
        self._arguments = ""  # of the open call
        self._ended = set[int]()  # indices of calls that have ended
        self._waiting: dict[str | int, list[Any]] = {}  # block -> its pieces

    def add(self, delta: Json) -> Iterator[tuple[str | int, Any]]:
        """Yields pieces to send now: ("thinking", text), ("text", text), or (index, call)."""
        calls = [(call.get("index", place), call) for place, call in enumerate(delta.get("tool_calls") or ())]
        for block, piece in [("thinking", thoughts_of(delta)), ("text", answer_of(delta)), *calls]:
            if piece and block not in self._ended:
                self._waiting.setdefault(block, []).append(piece)
        return self._release(is_end=False)

    def end(self) -> Iterator[tuple[str | int, Any]]:
        return self._release(is_end=True)

    def _release(self, *, is_end: bool) -> Iterator[tuple[str | int, Any]]:
        while self._waiting:
            if self._open not in self._waiting:
                if isinstance(self._open, int) and not is_end and not _is_object(self._arguments):
                    return
                if isinstance(self._open, int):
                    self._ended.add(self._open)
                self._open, self._arguments = next(iter(self._waiting)), ""
            for piece in self._waiting.pop(self._open):
                if isinstance(self._open, int):
                    self._arguments += (piece.get("function") or {}).get("arguments") or ""
                yield self._open, piece


def _is_object(arguments: str) -> bool:
    try:
        return arguments.rstrip().endswith("}") and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


# --- put together -----------------------------------------------------------------------------------------------------


def join_deltas(deltas: Iterable[Json]) -> Json:
    """Joins a choice's deltas: concatenates text and tool calls, and keeps the newest of other values."""
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
    """Joins a stream's chunks. Complete when every requested choice has ended."""

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
        whole.text += piece.text
        whole.is_masked |= piece.is_masked
        whole.echo = whole.echo or piece.echo
        whole.stop_string = piece.stop_string or whole.stop_string
        for name in ("token_ids", "logprobs", "raw_logprobs", "tokens", "top_logprobs"):
            getattr(whole, name).extend(getattr(piece, name) or ())
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
        """Returns the streamed part of an answer, if any choice has a token or text."""
        if self._last is None:
            return None
        reply = self.reply()
        begun = [choice for choice in reply.choices if choice.token_ids or choice.text]
        for choice in begun:
            if choice.index not in self._ended:
                choice.finish_reason = "cancelled"
        return msgspec.structs.replace(reply, choices=begun) if begun else None


def _finished(choice: Choice) -> Choice:
    """Returns a copy with None for missing lists, and null content if there are tool calls but no text."""
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
    """Merges tool call deltas by `index`: the first delta has the name, and later deltas extend the arguments."""
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
