"""A reply as OpenAI's Responses: the whole response, and the events of a streamed one.

Both have one content: `response.completed` carries the whole answer. A streamed call that text follows is the one
difference: the text before it and the text after it are two messages, where a whole answer has one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk, Reply, thoughts_of
from art_cli.chat.requests import Request
from art_cli.chat.wires.openai_shared import token_logprobs
from art_cli.chat.wires.responses_items import (
    call_item,
    functions_of,
    item_id,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)

Json = dict[str, Any]

ENCRYPTED = "reasoning.encrypted_content"  # value of `include` that asks for it


def whole_response(request: Request, reply: Reply) -> Json:
    """Returns the JSON body of a response that is not streamed."""
    choice = reply.choices[0]
    counts = reply.num_tokens
    return _response(request, reply.created, _status(choice.finish_reason), _output(request, choice), counts)


def _response(request: Request, created: int, status: str, output: list[Json], counts: tuple[int, int] | None) -> Json:
    """Returns the response as it is now; `counts` are the tokens of prompt and answer."""
    repeated = {name: value for name, value in request.repeated.items() if name != "include"}
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": request.model,
        "output": output,
        "usage": None if counts is None else _usage(*counts),
        **repeated,
    }


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _usage(num_prompt: int, num_sampled: int) -> Json:
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_sampled,
    }


def _output(request: Request, choice: Choice) -> list[Json]:
    """Returns the items of a whole answer: the thought, the text, the calls. An empty answer is an empty message."""
    message = choice.message or {"content": choice.text}
    thought, text, calls = thoughts_of(message), message.get("content") or "", message.get("tool_calls") or []
    status = _status(choice.finish_reason)
    logprobs = token_logprobs(request, choice) if request.wants_logprobs else []
    items: list[Json] = []
    if thought:
        id = item_id("rs", request.id, 0)
        items.append(reasoning_item(id, thought, status, is_encrypted=_wants_encrypted(request)))
    if text or not (thought or calls):
        items.append(message_item(item_id("msg", request.id, len(items)), text, status, logprobs))
    for call in calls:
        items.append(call_item(item_id("fc", request.id, len(items)), call, status, _functions(request)))
    return items


def _functions(request: Request) -> Mapping[str, Json]:
    return dict(functions_of(request.repeated["tools"]))


def _wants_encrypted(request: Request) -> bool:
    return ENCRYPTED in request.repeated["include"]


# --- the streamed reply -----------------------------------------------------------------------------------------------

Event = tuple[str, Json]  # name without "response.", and fields


class _OpenItem:
    """One item that grows: the events of its beginning, of each piece, of its end."""

    prefix: str  # beginning of its id

    def __init__(self, request: Request, place: int) -> None:
        self.request = request
        self.id = item_id(self.prefix, request.id, place)
        self.text = ""

    def item(self, status: str) -> Json:
        """Returns the item as it is now."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        raise NotImplementedError

    def grow(self, text: str) -> list[Event]:
        raise NotImplementedError

    def end(self) -> list[Event]:
        raise NotImplementedError


class _OpenThought(_OpenItem):
    prefix = "rs"

    def item(self, status: str) -> Json:
        if status == "in_progress":
            return {**reasoning_item(self.id, "", status, is_encrypted=False), "content": []}
        return reasoning_item(self.id, self.text, status, is_encrypted=_wants_encrypted(self.request))

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": reasoning_part("")})]

    def grow(self, text: str) -> list[Event]:
        self.text += text
        return [("reasoning_text.delta", {"content_index": 0, "delta": text})]

    def end(self) -> list[Event]:
        part = reasoning_part(self.text)
        return [
            ("reasoning_text.done", {"content_index": 0, "text": self.text}),
            ("content_part.done", {"content_index": 0, "part": part}),
        ]


class _OpenText(_OpenItem):
    prefix = "msg"

    def __init__(self, request: Request, place: int) -> None:
        super().__init__(request, place)
        self.logprobs: list[Any] = []  # one for each token so far
        self.num_told = 0  # number of logprobs that deltas have carried

    def item(self, status: str) -> Json:
        if status == "in_progress":
            return {**message_item(self.id, "", status), "content": []}
        return message_item(self.id, self.text, status, self.logprobs)

    def begin(self) -> list[Event]:
        return [("content_part.added", {"content_index": 0, "part": text_part("")})]

    def grow(self, text: str) -> list[Event]:
        self.text += text
        new, self.num_told = self.logprobs[self.num_told :], len(self.logprobs)
        return [("output_text.delta", {"content_index": 0, "delta": text, "logprobs": new})] if text or new else []

    def end(self) -> list[Event]:
        part = text_part(self.text, self.logprobs)
        return [
            *self.grow(""),
            ("output_text.done", {"content_index": 0, "text": self.text, "logprobs": self.logprobs}),
            ("content_part.done", {"content_index": 0, "part": part}),
        ]


class _OpenCall(_OpenItem):
    prefix = "fc"

    def __init__(self, request: Request, place: int) -> None:
        super().__init__(request, place)
        self.call_id = self.name = ""  # the name is the full one, as the model calls it
        self._functions = _functions(request)

    def item(self, status: str) -> Json:
        function = {"name": self.name, "arguments": "" if status == "in_progress" else self.text}
        return call_item(self.id, {"id": self.call_id, "function": function}, status, self._functions)

    def begin(self) -> list[Event]:
        return []

    def grow(self, text: str) -> list[Event]:
        self.text += text
        return [("function_call_arguments.delta", {"delta": text})] if text else []

    def end(self) -> list[Event]:
        name = self.item("completed")["name"]
        return [("function_call_arguments.done", {"name": name, "arguments": self.text})]


class ResponseEvents:
    """The events of one streamed response. One item is open at a time, the last one; the next item closes it."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._items: list[Json] = []  # those that are closed
        self._call = -1  # index of the open call among the calls of the reply
        self._logprobs: list[Any] = []  # one for each token that came while no message was open
        self._counts = [0, 0]  # tokens of the prompt and of the answer
        self._finish_reason = "stop"
        self._last: Chunk | None = None

    def render(self, chunk: Chunk) -> bytes:
        """Returns the events of one chunk; empty when it holds nothing to show."""
        events = self._begin(chunk) if self._last is None else b""
        self._last = chunk
        if chunk.is_last:  # a chunk with counts alone may follow
            self._finish_reason = chunk.choice.finish_reason
        self._counts[0] += len(chunk.prompt_ids or ())
        self._counts[1] += len(chunk.choice.token_ids)
        if self._request.wants_logprobs:
            self._logprobs += token_logprobs(self._request, chunk.choice)
        delta: Json = {"content": chunk.choice.text} if chunk.choice.message is None else chunk.choice.message
        if thought := thoughts_of(delta):
            events += self._grow(_OpenThought, thought)
        if text := delta.get("content"):
            events += self._grow(_OpenText, text)
        for place, call in enumerate(delta.get("tool_calls") or ()):
            events += self._grow_call(call.get("index", place), call)
        return events

    def finish(self) -> bytes:
        """Returns the end of the last item and of the response."""
        assert self._last is not None, "a stream without chunks"
        status = _status(self._finish_reason)
        events = b"" if self._items or self._open else self._grow(_OpenText, "")
        events += self._close(status)
        return events + self._event(f"response.{status}", {"response": self._body(status)})

    def fail(self, error: ChatError) -> bytes:
        """Returns the failed response, and the error once more in the form in which OpenAI's clients raise it.

        They take `response.failed` for an event like any other, so that its error would be missed.
        """
        shown = {"code": error.code or error.type, "message": error.message}
        body = {**self._body("failed"), "error": shown}
        whole = {**shown, "type": error.type, "param": error.param}
        failed = self._event("response.failed", {"response": body})
        return failed + self._event("error", {**shown, "param": error.param, "error": whole})

    def _begin(self, chunk: Chunk) -> bytes:
        body = _response(self._request, chunk.created, "in_progress", [], None)
        return b"".join(self._event(f"response.{name}", {"response": body}) for name in ("created", "in_progress"))

    def _body(self, status: str) -> Json:
        """Returns the response as it is once its last item is closed."""
        last = self._last
        counts = (self._counts[0], self._counts[1]) if last is None or last.usage is None else last.usage
        return _response(self._request, 0 if last is None else last.created, status, self._items, counts)

    def _grow(self, kind: type[_OpenItem], text: str) -> bytes:
        """Returns the events of a piece of the open item, which is opened anew unless it is of that kind."""
        events = b""
        if not isinstance(self._open, kind):
            events = self._close("completed")
            events += self._start(kind(self._request, len(self._items)))
        assert self._open is not None
        if isinstance(self._open, _OpenText):
            self._open.logprobs += self._logprobs
            self._logprobs.clear()
        return events + self._tell(self._open.grow(text))

    def _grow_call(self, index: int, delta: Json) -> bytes:
        """Returns the events of a piece of a call. Its first piece has the name."""
        function = delta.get("function") or {}
        events = b""
        if not isinstance(self._open, _OpenCall) or index != self._call:
            events = self._close("completed")
            call = _OpenCall(self._request, len(self._items))
            call.call_id, call.name = delta.get("id") or call.id, function.get("name") or ""
            self._call = index
            events += self._start(call)
        return events + self._grow(_OpenCall, function.get("arguments") or "")

    def _start(self, item: _OpenItem) -> bytes:
        self._open = item
        added = self._event(
            "response.output_item.added", {"output_index": len(self._items), "item": item.item("in_progress")}
        )
        return added + self._tell(item.begin())

    def _close(self, status: str) -> bytes:
        """Returns the end of the open item, if there is one."""
        if (item := self._open) is None:
            return b""
        if isinstance(item, _OpenText):
            item.logprobs += self._logprobs
            self._logprobs.clear()
        events = self._tell(item.end())
        whole = item.item(status)
        events += self._event("response.output_item.done", {"output_index": len(self._items), "item": whole})
        self._items.append(whole)
        self._open = None
        return events

    def _tell(self, events: Sequence[Event]) -> bytes:
        """Events of the open item."""
        assert self._open is not None
        common = {"item_id": self._open.id, "output_index": len(self._items)}
        return b"".join(self._event(f"response.{name}", common | fields) for name, fields in events)

    def _event(self, name: str, fields: Json) -> bytes:
        data = msgspec.json.encode({"type": name, "sequence_number": self._num_events, **fields})
        self._num_events += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
