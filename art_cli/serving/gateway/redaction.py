"""Redactor: replaces keys and matches of the user's rules in everything written about a call.

It runs before the journal. Unchanged values are returned as the same object, so the caller knows whether token ids may
be written: they would reveal replaced text.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from functools import partial
from operator import is_
from typing import Any, TypeVar

import msgspec

from art_cli.chat.requests import Json, Request
from art_cli.config.schema import RedactConfig
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.secrets import Secrets

Value = TypeVar("Value")

REDACTED = "[redacted]"
LETTERS = str.maketrans("0123456789", "ghijklmnop")  # digests of letters, which patterns for numbers leave alone
MAX_REMEMBERED = 1024  # maximum cached messages; cached because each call repeats all earlier messages
MAX_REMEMBERED_BYTES = 64 * 2**20  # maximum bytes of cached redacted messages
MAX_NESTED = 8  # maximum levels of JSON inside JSON strings
MAX_DEPTH = 64  # maximum nesting of such JSON; deeper values are replaced entirely
STRUCTURE = ("role", "type")  # protocol fields, only searched for keys
# fields with user data: no protocol fields inside
DATA = ("parameters", "input_schema", "schema", "arguments", "input", "metadata")


class Redactor:
    """Example: with keys ["password"], '{"user": "x", "password": "y"}' becomes
    '{"user":"x","password":"[redacted]"}'."""

    def __init__(self, rules: RedactConfig, secrets: Secrets, *, salt: bytes = b"") -> None:
        """`salt` is part of the digests in redacted names."""
        self._secrets, self._salt = secrets, salt[: hashlib.blake2b.MAX_KEY_SIZE]
        self._patterns = [re.compile(pattern) for pattern in rules.patterns]
        self._names = frozenset(name.lower() for name in rules.keys)
        names = "|".join(re.escape(name) for name in rules.keys)
        self._named = re.compile(rf'"(?:{names})"\s*:\s*', re.IGNORECASE) if rules.keys else None
        # message digest -> (redacted message or None if unchanged, size in bytes)
        self._remembered: OrderedDict[bytes, tuple[Json | None, int]] = OrderedDict()
        self._num_bytes = 0  # total size of cached messages
        self._lock = threading.Lock()  # long requests are redacted in a thread, short ones on the event loop

    @property
    def has_rules(self) -> bool:
        return bool(self._patterns or self._names)

    def messages(self, messages: list[Json]) -> list[Json]:
        """Redacts the messages; returns the same list if unchanged."""
        redacted = [self._message(message) for message in messages]
        return messages if all(map(is_, redacted, messages)) else redacted

    def prompt(self, prompt: str) -> str:
        """Redacts a plain completion's prompt, with caching."""
        text: str = self._message({"prompt": prompt})["prompt"]
        return text

    def request(self, request: Request) -> Request:
        """Redacts messages, tools and prompt. Token ids are dropped."""
        prompt = self.prompt(request.prompt) if isinstance(request.prompt, str) else None
        messages = None if request.messages is None else self.messages(request.messages)
        return msgspec.structs.replace(request, messages=messages, tools=self.messages(request.tools), prompt=prompt)

    def value(self, value: Value) -> Value:
        """Redacts all strings in a JSON value, including JSON inside strings. Returns the same object if unchanged."""
        redacted: Value = self._walk(value, is_document=False, nested=0)
        return redacted

    def document(self, value: Value) -> Value:
        """Like `value`, for a user's data: the values of named keys are replaced, too."""
        redacted: Value = self._walk(value, is_document=True, nested=0)
        return redacted

    def text(self, text: str, *, nested: int = 0) -> str:
        """Redacts a text; returns the same object if unchanged. `nested`: levels of JSON in strings around it."""
        redacted = self._secrets.redact(text)
        if self.has_rules:
            redacted = self._patterned(self._named_values(self._in_json(redacted, nested)))
        return text if redacted == text else redacted

    def name(self, name: str, redacted: str | None = None) -> str:
        """Redacts a name, or takes `redacted`. A changed name gets a digest, so different names stay different."""
        redacted = self.text(name) if redacted is None else redacted
        if redacted == name:
            return name
        digest = hashlib.blake2b(name.encode(errors="replace"), key=self._salt, digest_size=8).hexdigest()
        return f"{redacted} {digest.translate(LETTERS)}"

    def num_new_bytes(self, request: Request) -> int:
        """Returns the size of the request's uncached parts, which `request` would have to process."""
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
        """`is_document`: the value was parsed from a string, so its fields are user data instead of protocol fields.

        `is_data`: the value is below a DATA field, so `role` and `type` are not protocol fields.
        """
        if isinstance(value, str):
            return self.text(value, nested=nested)
        walk = partial(self._walk, is_document=is_document, nested=nested)
        if isinstance(value, list):
            items = [walk(item, is_data=is_data) for item in value]
            return value if all(map(is_, items, value)) else items
        if not isinstance(value, dict):
            return self._number(value) if is_document else value
        found = {}
        for name, inner in value.items():
            if is_document and name.lower() in self._names:
                walked: Any = inner if inner == REDACTED else REDACTED
            elif not (is_document or is_data) and name in STRUCTURE and isinstance(inner, str):
                masked = self._secrets.redact(inner)
                walked = inner if masked == inner else masked
            else:
                walked = walk(inner, is_data=is_data or name in DATA)
            masked = self._secrets.redact(name)
            found[self._patterned(masked) if is_document or is_data else masked] = walked
        is_same = len(found) == len(value) and all(name in found and found[name] is value[name] for name in value)
        return value if is_same else found

    def _number(self, value: Any) -> Any:
        """Redacts a JSON number or constant: it becomes a string if a pattern matches its digits."""
        if isinstance(value, bool) or value is None:
            return value
        text = json.dumps(value)
        return REDACTED if any(pattern.search(text) for pattern in self._patterns) else value

    def _patterned(self, text: str) -> str:
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def _in_json(self, text: str, nested: int) -> str:
        """Redacts the values in a text that is a JSON object or list. Changed text is re-encoded."""
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
        """Redacts the values of named keys in quoted JSON. A truncated value is replaced up to the line's end."""
        pieces, end = list[str](), 0
        while self._named is not None and (found := self._named.search(text, end)):
            pieces += text[end : found.end()], f'"{REDACTED}"'
            try:
                _, end = json.JSONDecoder().raw_decode(text, found.end())
            except (ValueError, RecursionError):
                newline = text.find("\n", found.end())
                end = len(text) if newline < 0 else newline
        return "".join([*pieces, text[end:]])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
