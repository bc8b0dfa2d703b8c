"""Keeps the arguments of tool calls as the model wrote them, in a server that reads and writes them anew.

vLLM parses the arguments of earlier calls, and most chat templates write them again (`arguments | tojson`), with
Python's spaces. Where the model wrote `{"a":2}`, the prompt of the next turn would not continue the sampled tokens.

`Verbatim` gives the server the template with one change: arguments that are an object with a certain key are written
as the text under that key. The key is random, and only `put_into` writes it. `restore_arguments` mends replies:
vLLM's parsers give the arguments of a call in their own spelling, and the sampled tokens have the model's.
"""

import json
import re
import secrets
from typing import Any

import msgspec

from art_cli.chat.replies import Choice
from art_cli.chat.requests import Request
from art_cli.chat.tool_arguments import are_same

Json = dict[str, Any]

_WRITTEN = re.compile(r"(?<![\w.\]])((?:\w+(?:\.|\[['\"]))*arguments(?:['\"]\])?)\s*\|\s*tojson(?:\([^()]*\))?")
_TAKEN_APART = re.compile(r"arguments(?:['\"]\])?\s*(?:\|\s*(?:items|dictsort)|\.items)")


class Verbatim:
    """Example: of "{{ call.arguments | tojson }}" the server's template is
    "{{ (call.arguments['1f3c'] if '1f3c' in call.arguments else call.arguments | tojson) }}"."""

    def __init__(self, template: str | None) -> None:
        """`template` is the model's, or None if it is unknown, and requests stay as they are."""
        self._key = secrets.token_hex(12)
        choice = rf"(\1['{self._key}'] if '{self._key}' in \1 else \g<0>)"
        self.template = None if template is None else _WRITTEN.sub(choice, template)
        self._is_changed = self.template != template
        self._takes_apart = template is not None and _TAKEN_APART.search(template) is not None

    def put_into(self, request: Request) -> Request:
        """Returns the request with the arguments of earlier calls under the key.

        A template that in some case takes arguments apart, as Llama 3.1's does for built-in tools, does so only where
        a client sets its variables; such a request stays as it is.
        """
        if not self._is_changed or not request.messages or (self._takes_apart and request.template_kwargs):
            return request
        return msgspec.structs.replace(request, messages=[self._marked(message) for message in request.messages])

    def _marked(self, message: Json) -> Json:
        if message.get("role") != "assistant" or not message.get("tool_calls"):
            return message
        return {**message, "tool_calls": [self._marked_call(call) for call in message["tool_calls"]]}

    def _marked_call(self, call: Json) -> Json:
        arguments = call["function"].get("arguments")
        if not isinstance(arguments, str) or not _is_object(arguments):
            return call
        return {**call, "function": {**call["function"], "arguments": json.dumps({self._key: arguments})}}


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def restore_arguments(choice: Choice) -> None:
    """Writes the arguments of the choice's calls as they stand in its tokens, where the same values stand there."""
    calls = (choice.message or {}).get("tool_calls") or []
    text, offset = "".join(choice.tokens) if calls else "", 0
    for call in calls:
        function = call.get("function") or {}
        written, offset = _find_object(text, offset, function.get("arguments") or "")
        if written is not None:
            function["arguments"] = written


def _find_object(text: str, offset: int, arguments: str) -> tuple[str | None, int]:
    """Returns the first JSON object from `offset` on that has the same value as `arguments`, and where it ends."""
    decoder = json.JSONDecoder()
    start = text.find("{", offset)
    while start >= 0:
        try:
            _, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = start
        if end > start and are_same(text[start:end], arguments):
            return text[start:end], end
        start = text.find("{", start + 1)
    return None, offset
