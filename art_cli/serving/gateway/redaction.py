"""Redactor: replaces keys and what the user's rules match, in everything that is written of a call.

It sees a call before the journal does. A value in which nothing is replaced comes back as the same object, so that the
caller knows whether the call's token ids may be written: they would tell what the text does not.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from functools import partial
from typing import Any, TypeVar

import msgspec

from art_cli.chat.requests import Request
from art_cli.config.schema import RedactConfig
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.secrets import Secrets

Value = TypeVar("Value")
Json = dict[str, Any]

REDACTED = "[redacted]"
MAX_REMEMBERED = 1024  # number of messages whose outcome is remembered, because each call sends all earlier ones again
MAX_REMEMBERED_BYTES = 64 * 2**20  # bytes of all redacted messages that are remembered
MAX_NESTED = 8  # levels of JSON in strings of JSON that are read
MAX_DEPTH = 64  # levels of lists and objects in such JSON; deeper ones are replaced as a whole
STRUCTURE = ("role", "type")  # names whose values are the protocol's words, in which only keys are looked for
DATA = ("parameters", "input_schema", "schema", "arguments", "input", "metadata")  # names below which it has no words


class Redactor:
    """Example: with keys ["password"], '{"user": "x", "password": "y"}' is '{"user":"x","password":"[redacted]"}'."""

    def __init__(self, rules: RedactConfig, secrets: Secrets) -> None:
        self._secrets = secrets
        self._patterns = [re.compile(pattern) for pattern in rules.patterns]
        self._names = frozenset(name.lower() for name in rules.keys)
        names = "|".join(re.escape(name) for name in rules.keys)
        self._named = re.compile(rf'"(?:{names})"\s*:\s*', re.IGNORECASE) if rules.keys else None
        # Digest of a message -> it redacted, or None if nothing is replaced, and the bytes that this takes.
        self._remembered: OrderedDict[bytes, tuple[Json | None, int]] = OrderedDict()
        self._num_bytes = 0  # of all that is remembered
        self._lock = threading.Lock()  # long requests are redacted in a thread, short ones on the event loop

    @property
    def has_rules(self) -> bool:
        return bool(self._patterns or self._names)

    def messages(self, messages: list[Json]) -> list[Json]:
        """Returns the messages; the same list if nothing is replaced."""
        redacted = [self._message(message) for message in messages]
        return messages if all(map(_is_same, redacted, messages)) else redacted

    def prompt(self, prompt: str) -> str:
        """Returns the prompt of a plain completion, which is remembered as a message is."""
        text: str = self._message({"prompt": prompt})["prompt"]
        return text

    def request(self, request: Request) -> Request:
        """Returns the request with its messages, tools and prompt redacted, without a prompt of token ids."""
        prompt = self.prompt(request.prompt) if isinstance(request.prompt, str) else None
        messages = None if request.messages is None else self.messages(request.messages)
        return msgspec.structs.replace(request, messages=messages, tools=self.messages(request.tools), prompt=prompt)

    def value(self, value: Value) -> Value:
        """Any JSON value with its strings redacted, also strings that are JSON; the same object if nothing is."""
        redacted: Value = self._walk(value, is_document=False, nested=0)
        return redacted

    def text(self, text: str) -> str:
        """Returns the text; the same object if nothing is replaced."""
        return self._text(text, nested=0)

    def num_new_bytes(self, request: Request) -> int:
        """Returns the size of what it has not seen lately of a request, which is the work that `request` would be."""
        prompts = [{"prompt": request.prompt}] if isinstance(request.prompt, str) else []
        encoded = map(msgspec.json.encode, [*(request.messages or ()), *request.tools, *prompts])
        return sum(len(data) for data in encoded if _digest(data) not in self._remembered)

    def _message(self, message: Json) -> Json:
        digest = _digest(msgspec.json.encode(message))
        with self._lock:
            if digest in self._remembered:
                self._remembered.move_to_end(digest)
                return self._remembered[digest][0] or message
        redacted = self.value(message)
        remembered = (None, 0) if redacted is message else (redacted, len(msgspec.json.encode(redacted)))
        with self._lock:
            if digest not in self._remembered:
                self._remembered[digest] = remembered
                self._num_bytes += remembered[1]
            while len(self._remembered) > MAX_REMEMBERED or self._num_bytes > MAX_REMEMBERED_BYTES:
                self._num_bytes -= self._remembered.popitem(last=False)[1][1]
        return redacted

    def _walk(self, value: Any, *, is_document: bool, nested: int, is_data: bool = False) -> Any:
        """`is_document`: the value was read from a string, so that its keys are data and not the protocol's.

        `is_data`: it is below one of DATA, so that `role` and `type` are no words of the protocol.
        """
        if isinstance(value, str):
            return self._text(value, nested=nested)
        walk = partial(self._walk, is_document=is_document, nested=nested)
        if isinstance(value, list):
            items = [walk(item, is_data=is_data) for item in value]
            return value if all(map(_is_same, items, value)) else items
        if not isinstance(value, dict):
            return self._number(value) if is_document else value
        found = {}
        for name, inner in value.items():
            if is_document and name.lower() in self._names:
                walked: Any = inner if inner == REDACTED else REDACTED
            elif not (is_document or is_data) and name in STRUCTURE and isinstance(inner, str):
                masked = self._masked(inner)
                walked = inner if masked == inner else masked
            else:
                walked = walk(inner, is_data=is_data or name in DATA)
            found[self._masked(name)] = walked
        is_same = len(found) == len(value) and all(name in found and found[name] is value[name] for name in value)
        return value if is_same else found

    def _number(self, value: Any) -> Any:
        """Returns a number or word of JSON; it becomes a string where a pattern matches its digits."""
        if isinstance(value, bool) or value is None:
            return value
        text = json.dumps(value)
        return REDACTED if any(pattern.search(text) for pattern in self._patterns) else value

    def _text(self, text: str, *, nested: int) -> str:
        redacted = self._masked(text)
        if self.has_rules:
            redacted = self._in_json(redacted, nested)
            redacted = self._named_values(redacted)
            for pattern in self._patterns:
                redacted = pattern.sub(REDACTED, redacted)
        return text if redacted == text else redacted

    def _masked(self, text: str) -> str:
        return self._secrets.redact(text)

    def _in_json(self, text: str, nested: int) -> str:
        """Returns a text that is one JSON object or list, with its values redacted, written anew if any is."""
        stripped = text.strip()
        if not stripped.startswith(("{", "[")) or not stripped.endswith(("}", "]")):
            return text
        try:
            value = msgspec.json.decode(stripped)
        except (ValueError, RecursionError):
            return text
        if nested == MAX_NESTED or is_deep(value, MAX_DEPTH):
            return REDACTED
        walked = self._walk(value, is_document=True, nested=nested + 1)
        return text if walked is value else msgspec.json.encode(walked).decode()

    def _named_values(self, text: str) -> str:
        """Returns a text that quotes JSON, with the named keys' values replaced, a cut one to the line's end."""
        pieces, end = list[str](), 0
        while self._named is not None and (found := self._named.search(text, end)):
            pieces += text[end : found.end()], f'"{REDACTED}"'
            try:
                _, end = json.JSONDecoder().raw_decode(text, found.end())
            except (ValueError, RecursionError):
                newline = text.find("\n", found.end())
                end = len(text) if newline < 0 else newline
        return "".join([*pieces, text[end:]])


def _is_same(one: object, other: object) -> bool:
    return one is other


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
