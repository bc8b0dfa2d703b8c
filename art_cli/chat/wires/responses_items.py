"""Converts OpenAI Responses items to chat messages, and assistant messages to items.

A reply has several items: a `reasoning`, a `message`, and a `function_call` for each call. When a client sends them
back as input, they must become the same assistant message again, so that the chat template renders the sampled tokens.
Item ids contain the response's id. If a client omits the ids, the order of the items decides.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from art_cli.chat.chat_errors import invalid
from art_cli.chat.requests import Json

_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})_\d+")  # an id from `item_id`
_ENCRYPTED = "art-reasoning-1."  # the beginning of our `encrypted_content`; base64 of the text follows
_PARTS = ("input_text", "output_text", "text", "summary_text", "refusal")
KINDS = ("message", "function_call", "function_call_output", "reasoning", "item_reference")


# --- from the client --------------------------------------------------------------------------------------------------


class TextPart(msgspec.Struct):
    """A piece of text of any type."""

    type: str
    text: str = ""
    refusal: str = ""


class _Item(msgspec.Struct, tag_field="type"):
    id: str | None = None


class MessageItem(_Item, tag="message", kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[TextPart]


class CallItem(_Item, tag="function_call", kw_only=True):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class OutputItem(_Item, tag="function_call_output", kw_only=True):
    call_id: str
    output: str | list[TextPart]


class ReasoningItem(_Item, tag="reasoning", kw_only=True):
    summary: list[TextPart] = []
    content: list[TextPart] | None = None
    encrypted_content: str | None = None


class ReferenceItem(_Item, tag="item_reference", kw_only=True):
    """An item of a stored reply. It represents the whole reply, because clients never send partial replies."""


Item = MessageItem | CallItem | OutputItem | ReasoningItem | ReferenceItem


def name_kinds(items: Any) -> None:
    """Adds the type to messages and references without one. Raises ChatError 400 for unsupported items or parts."""
    for place, item in enumerate(items if isinstance(items, list) else []):
        if not isinstance(item, dict):
            continue
        kind = item["type"] = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind not in KINDS:
            message = f"input[{place}]: items of type {_shown(kind)} are not supported; there are {', '.join(KINDS)}"
            raise invalid(message, f"input[{place}]", "unsupported_parameter")
        for name in ("content", "output") if kind != "reasoning" else ():
            _check_parts(item.get(name), f"input[{place}].{name}")


def _check_parts(parts: Any, param: str) -> None:
    for place, part in enumerate(parts if isinstance(parts, list) else []):
        if isinstance(part, dict) and part.get("type") not in _PARTS:
            message = f"{param}[{place}]: {_shown(part.get('type'))} is not supported; the model reads text"
            raise invalid(message, f"{param}[{place}]", "unsupported_parameter")


def _shown(kind: Any) -> str:
    return repr(kind[:80]) if isinstance(kind, str) else "another kind"


def messages_of(items: str | Sequence[Item]) -> list[Json]:
    """Returns the items as chat messages. One with a `reply_id` means a reply in `Memory`."""
    fold = _Fold()
    for item in [MessageItem(role="user", content=items)] if isinstance(items, str) else items:
        fold.add(item)
    return fold.messages()


class _Fold:
    """Messages that grow by items. Texts of assistant messages are lists of pieces, which are joined at the end."""

    def __init__(self) -> None:
        self._messages: list[Json] = []
        self._assistant: Json | None = None  # the last assistant message
        self._response: str | None = None  # the message's response, if an item id names it
        self._follows: Literal["nothing", "outputs", "more"] = "nothing"  # the type of item after the message

    def add(self, item: Item) -> None:
        match item:
            case MessageItem(role="assistant"):
                self._open(item)["content"].append(_text(item.content))
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                self._messages.append({"role": role, "content": _text(item.content)})
                self._follows = "more"
            case ReasoningItem():
                if thought := _thought(item):
                    self._open(item).setdefault("reasoning_content", []).append(thought)
            case CallItem():
                function = {"name": full_name(item.namespace, item.name), "arguments": item.arguments}
                calls = self._open(item).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case ReferenceItem():
                self._open(item)["reply_id"] = response_of(item.id) or ""
            case OutputItem():
                output = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
                self._messages.append(output)
                self._follows = "more" if self._follows == "more" else "outputs"

    def messages(self) -> list[Json]:
        for message in self._messages:
            if message["role"] == "assistant":
                message |= {
                    name: "".join(message[name]) for name in ("content", "reasoning_content") if name in message
                }
        return self._messages

    def _open(self, item: Item) -> Json:
        """Returns the assistant message that this item is a part of."""
        response = response_of(item.id)
        if self._assistant is None or not self._continues(self._assistant, item, response):
            self._assistant = {"role": "assistant", "content": []}
            self._messages.append(self._assistant)
            self._response, self._follows = None, "nothing"
        self._response = response or self._response
        return self._assistant

    def _continues(self, message: Json, item: Item, response: str | None) -> bool:
        """Returns whether the item is part of the last assistant message. Outputs may be between a response's calls."""
        if response is not None and self._response is not None:
            return response == self._response and self._follows != "more"
        if self._follows != "nothing" or isinstance(item, ReasoningItem):
            return False
        return isinstance(item, CallItem) or not any(message["content"])


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def _thought(item: ReasoningItem) -> str:
    """Returns a reasoning item's text: plain, from our encrypted content, or the summary."""
    if item.content:
        return _text(item.content)
    return _text(item.summary) if item.encrypted_content is None else decrypted(item.encrypted_content)


def conversation(instructions: str | None, messages: Sequence[Json]) -> list[Json]:
    """Returns the messages for chat templates.

    Leading system messages are merged into one, with `instructions` first, and later system messages become user
    messages, because most templates support no more. Outputs of functions called in the same message are sorted in call
    order, because templates show no ids.
    """
    first = next((place for place, sent in enumerate(messages) if sent["role"] != "system"), len(messages))
    texts = [text for text in (instructions, *(sent["content"] for sent in messages[:first])) if text]
    system = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
    later = [{**sent, "role": "user"} if sent["role"] == "system" else sent for sent in messages[first:]]
    return [*system, *_in_order_of_calls(later)]


def without_instructions(instructions: str | None, messages: list[Json]) -> list[Json]:
    """Returns the messages without a response's instructions, which do not apply to the next response."""
    if not instructions:
        return messages
    rest = messages[0]["content"].removeprefix(instructions).removeprefix("\n\n")
    return [*([{"role": "system", "content": rest}] if rest else []), *messages[1:]]


def _in_order_of_calls(messages: Sequence[Json]) -> list[Json]:
    ordered: list[Json] = []
    places: dict[str, int] = {}  # call id -> position in the last assistant message
    outputs: list[Json] = []

    def flush() -> None:
        ordered.extend(sorted(outputs, key=lambda sent: places.get(sent["tool_call_id"], len(places))))
        outputs.clear()

    for message in messages:
        if message["role"] == "tool":
            outputs.append(message)
            continue
        flush()
        ordered.append(message)
        if message["role"] == "assistant":
            places = {call.get("id") or "": place for place, call in enumerate(message.get("tool_calls") or ())}
    flush()
    return ordered


# --- tools ------------------------------------------------------------------------------------------------------------


def full_name(namespace: str | None, name: str) -> str:
    """Returns the model's name for a function: `mcp__mail__send` for `send` in the namespace `mcp__mail`."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def functions_of(tools: Sequence[Json]) -> list[tuple[str, Json]]:
    """Returns the tools' functions by full name, including functions in namespaces."""
    functions = []
    for tool in tools:
        namespace = tool["name"] if tool["type"] == "namespace" else None
        inner = tool["tools"] if namespace else [tool]
        functions += [(full_name(namespace, each["name"]), {**each, "namespace": namespace}) for each in inner]
    return functions


# --- to the client ----------------------------------------------------------------------------------------------------


def item_id(prefix: str, response: str, place: int) -> str:
    """Returns the id for an item at this position in the output of `response`, 32 hexadecimal digits."""
    return f"{prefix}_{response}_{place}"


def response_of(id: str | None) -> str | None:
    """Returns the response in an item's id, if `art` made the id."""
    found = _ID.fullmatch(id or "")
    return found[1] if found else None


def reasoning_item(id: str, text: str, status: str, *, is_encrypted: bool) -> Json:
    """Returns the thoughts as text. `is_encrypted` adds the field that every client sends back."""
    item: Json = {"id": id, "type": "reasoning", "summary": [], "content": [reasoning_part(text)], "status": status}
    return item | ({"encrypted_content": encrypted(text)} if is_encrypted else {})


def message_item(id: str, text: str, status: str, logprobs: Sequence[Any] = ()) -> Json:
    content = [text_part(text, logprobs)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def call_item(id: str, call: Json, status: str, functions: Mapping[str, Json]) -> Json:
    """Returns a call of one of these functions, keyed by full name. The item's id replaces a missing one."""
    function = call.get("function") or {}
    name = function.get("name") or ""
    called = functions.get(name) or {"name": name, "namespace": None}
    call_id = call.get("id") or id
    item = {"id": id, "type": "function_call", "status": status, "call_id": call_id, "name": called["name"]}
    item |= {"namespace": called["namespace"]} if called["namespace"] else {}
    return item | {"arguments": function.get("arguments") or ""}


def text_part(text: str, logprobs: Sequence[Any] = ()) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def reasoning_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def encrypted(text: str) -> str:
    """Returns the text as `encrypted_content`. The text is not secret; some clients keep no other field."""
    return _ENCRYPTED + base64.b64encode(text.encode(errors="replace")).decode()


def decrypted(packed: str) -> str:
    """Returns the text from `encrypted`. Raises ChatError 400 if another endpoint made it."""
    message = "input: the encrypted_content of a reasoning item does not come from this endpoint; leave the item out"
    if not packed.startswith(_ENCRYPTED):
        raise invalid(message, "input")
    try:
        return base64.b64decode(packed[len(_ENCRYPTED) :].encode(), validate=True).decode()
    except ValueError:
        raise invalid(message, "input") from None
