"""Replies as Anthropic's messages: the content blocks of a whole message, and the events of a streamed one.

Thoughts come before text, and text before calls. A block of thoughts carries a signature, because clients drop thoughts
without one; it is a digest of the thoughts, and nothing checks it. The `input` of a call is the object that its sampled
arguments are (calls.py). It is streamed in one piece once the call is whole, because cut arguments are no object.
"""

import hashlib
import uuid
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk, Reply, thoughts_of
from art_cli.chat.requests import text_of
from art_cli.chat.tool_arguments import input_of

Json = dict[str, Any]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class _RendersErrors(Protocol):
    def error(self, error: ChatError) -> bytes: ...


def message_of(reply: Reply) -> Json:
    """Returns the whole message."""
    choice = reply.choices[0]
    message = choice.message if choice.message is not None else {"content": choice.text}
    return {
        **_head(reply.model),
        "content": list(_blocks(message)),
        **_ending(choice),
        "usage": _usage(*reply.num_tokens),
    }


def signature_of(thoughts: str) -> str:
    """Returns the same signature for the same thoughts, so that a message that is sent again is the same one."""
    return b64encode(hashlib.blake2b(thoughts.encode(errors="replace"), digest_size=48).digest()).decode()


def _blocks(message: Json) -> Iterator[Json]:
    if thoughts := thoughts_of(message):
        yield {"type": "thinking", "thinking": thoughts, "signature": signature_of(thoughts)}
    if text := text_of(message.get("content")):
        yield {"type": "text", "text": text}
    for call in message.get("tool_calls") or ():
        yield {**_tool_use(call), "input": input_of(_function(call).get("arguments") or "")}


def _tool_use(call: Json) -> Json:
    """Returns the block of a call without its input. It has an id, which an endpoint may not give."""
    id = call.get("id") or f"toolu_{uuid.uuid4().hex[:24]}"
    return {"type": "tool_use", "id": id, "name": _function(call).get("name") or ""}


def _function(call: Json) -> Json:
    """Returns the function that is called; empty for a call of another kind, which some endpoints have."""
    return call.get("function") or {}


def _head(model: str) -> Json:
    """Returns the message's head. Its id is new, because Claude Code joins messages of one id."""
    return {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}


def _ending(choice: Choice) -> Json:
    """Returns the reason of the end, and the stop sequence if one was it."""
    if choice.finish_reason == "stop" and choice.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": STOP_REASONS.get(choice.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(num_prompt: int, num_sampled: int) -> Json:
    """Nothing is counted as cached, so that the prompt's tokens are one number."""
    caches = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": num_prompt, **caches, "output_tokens": num_sampled}


# --- streamed ---------------------------------------------------------------------------------------------------------


class MessageEvents:
    """The events of one message: message_start, each block's start, deltas and stop, message_delta, message_stop."""

    def __init__(self, wire: _RendersErrors) -> None:
        self._wire = wire
        self._last: Chunk | None = None
        self._ended = Choice(index=0)  # the piece that ended the answer; a chunk with counts may follow it
        self._num_prompt = self._num_sampled = 0
        self._index = -1  # position of the newest block
        self._open = ""  # type of the block that is open; "": none is
        self._thoughts: list[str] = []
        self._call: Json | None = None  # the call that is not yet whole
        self._call_index = -1

    def render(self, chunk: Chunk) -> bytes:
        """Returns the events of one chunk; empty when it holds nothing that the client would see."""
        is_first, self._last = self._last is None, chunk
        if chunk.is_last:
            self._ended = chunk.choice
        self._num_prompt += len(chunk.prompt_ids or ())
        self._num_sampled += len(chunk.choice.token_ids)
        events = self._start(chunk) if is_first else b""
        delta = {"content": chunk.choice.text} if chunk.choice.message is None else chunk.choice.message
        if thoughts := thoughts_of(delta):
            events += self._piece("thinking", thoughts)
        if text := text_of(delta.get("content")):
            events += self._piece("text", text)
        for position, call in enumerate(delta.get("tool_calls") or ()):
            events += self._extend_call(call, call.get("index", position))
        return events

    def finish(self) -> bytes:
        assert self._last is not None, "a stream without chunks"
        events = self._end_call() + self._close()
        counts = self._last.usage or (self._num_prompt, self._num_sampled)
        ending = {"type": "message_delta", "delta": _ending(self._ended), "usage": _usage(*counts)}
        return events + _event(ending) + _event({"type": "message_stop"})

    def fail(self, error: ChatError) -> bytes:
        """Returns the error; no message_stop follows."""
        return b"event: error\ndata: " + self._wire.error(error) + b"\n\n"

    def _start(self, chunk: Chunk) -> bytes:
        message = {**_head(chunk.model), "content": [], "stop_reason": None, "stop_sequence": None}
        counts = chunk.usage or (self._num_prompt, 0)
        return _event({"type": "message_start", "message": {**message, "usage": _usage(*counts)}})

    def _piece(self, kind: str, text: str) -> bytes:
        """Returns the text in a block of this type, which is opened if another one or none is open."""
        events = self._end_call()
        if self._open != kind:
            empty = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            events += self._close() + self._begin(empty)
        if kind == "thinking":
            self._thoughts.append(text)
        return events + self._delta({"type": f"{kind}_delta", kind: text})

    def _extend_call(self, piece: Json, index: int) -> bytes:
        """Returns the events of a piece of a call. The first has its name, later ones the rest of its arguments."""
        events = b""
        if self._call is None or index != self._call_index:
            events = self._end_call()
            self._call, self._call_index = {"id": None, "function": {"name": "", "arguments": ""}}, index
        self._call["id"] = piece.get("id") or self._call["id"]
        for name, value in _function(piece).items():
            if name in ("name", "arguments"):
                self._call["function"][name] += value or ""
        return events

    def _end_call(self) -> bytes:
        """Returns the whole block of the call that has ended."""
        if (call := self._call) is None:
            return b""
        self._call = None
        events = self._close() + self._begin({**_tool_use(call), "input": {}})
        given = msgspec.json.encode(input_of(call["function"]["arguments"])).decode()
        return events + self._delta({"type": "input_json_delta", "partial_json": given}) + self._close()

    def _begin(self, block: Json) -> bytes:
        self._index += 1
        self._open = block["type"]
        return _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Json) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        """Returns the end of the open block; thoughts end with their signature."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thoughts))})
            self._thoughts = []
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})


def _event(data: Json) -> bytes:
    """Returns one server-sent event, named by its type."""
    name: str = data["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"
