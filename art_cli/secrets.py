"""Secrets: keys and passwords, found in the environment and in addresses, and kept out of every file, log and error.

Every text that comes back from a provider or an endpoint goes through `Secrets` before it reaches any of those.
"""

import base64
import itertools
import re
import string
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_PARAM = re.compile(r"api_?key|secret|password|credential|headers|authorization|[a-z]_token$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
# One escaped character: %2d, \\u002d (also \\\\u002d), \\x2d, &#45;, &#x2d;, or any other behind backslashes.
_ESCAPE = re.compile(
    r"""(?:%|\\{1,8}u00|\\{1,8}u\{|\\{1,8}x)(?P<hex>[0-9a-fA-F]{2})\}?"""
    r"""|&\#[xX]0{0,6}(?P<hash>[0-9a-fA-F]{2});?|&\#0{0,6}(?P<decimal>[0-9]{2,3});?|\\{1,8}(?P<char>[^\\])""",
    re.DOTALL,
)
_MARKS = ("%", "\\", "&")  # every escape begins with one
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/-_=")
_URL_SAFE = str.maketrans("+/", "-_")
MAX_ESCAPES = 50_000  # escapes that are undone in one text, unless the caller says otherwise
MAX_ROUNDS = 3  # times that escapes are undone, for example of a key in a URL in a JSON text in a JSON text
MIN_LENGTH = 6  # characters; a shorter value is no key, and replacing it would garble texts

Span = tuple[int, int]  # (start, end) offsets


class Secrets:
    """The values that must not be shown, in any of the forms in which they come back.

    Example: for sk-a/b1 these are masked as well: "SK-A/B1", "sk-a\\/b1", "\\u0073k-a/b1", "sk-a%2fb1", "sk-a%252Fb1",
    "&#115;k-a/b1", base64 of any text that holds it, and its hexadecimal digits.
    """

    def __init__(self, values: Iterable[str], *, max_escapes: int = MAX_ESCAPES) -> None:
        """`max_escapes`: a text is cut off behind as many escapes, because undoing them takes time."""
        self._max_escapes = max_escapes
        values = {value for value in values if len(value) >= MIN_LENGTH}
        self._plain = sorted({value.lower() for value in values}, key=len, reverse=True)
        self._plain += sorted({value.encode().hex() for value in values})
        self._encoded = sorted({form for value in values for form in _base64_forms(value)})

    def redact(self, text: str) -> str:
        """The text with every secret, and every user:password in a URL, replaced by ***."""
        if self._plain:
            text = self._shortened(text)
            if self._occurs(text):
                text = _mask(text, sorted(self._find(text)))
        return _USERINFO.sub("***@", text) if "://" in text else text

    def _shortened(self, text: str) -> str:
        """The text up to where it has too many escapes, which no verdict and no error has."""
        if sum(map(text.count, _MARKS)) <= self._max_escapes:
            return text
        too_many = next(itertools.islice(_ESCAPE.finditer(text), self._max_escapes, None), None)
        return text if too_many is None else text[: too_many.start()]

    def _occurs(self, text: str) -> bool:
        """Whether `_find` finds anything. It is ten times as fast, as it notes no places."""
        for _ in range(MAX_ROUNDS + 1):
            lowered = _lower(text)
            if any(value in lowered for value in self._plain) or any(form in text for form in self._encoded):
                return True
            if not any(mark in text for mark in _MARKS):
                return False
            text, num = _ESCAPE.subn(_character, text)
            if not num:
                return False
        return False

    def _find(self, text: str) -> Iterator[Span]:
        """The spans of secrets in the text, as it is and with its escapes undone up to MAX_ROUNDS times."""
        decoded = _Decoded(text, None)
        for _ in range(MAX_ROUNDS + 1):
            lowered = _lower(decoded.text)
            for value in self._plain:
                yield from (decoded.span(start, start + len(value)) for start in _occurrences(lowered, value))
            for form in self._encoded:
                for start in _occurrences(decoded.text, form):
                    yield decoded.span(*_around(decoded.text, start, start + len(form)))
            further = decoded.undo_escapes()
            if further is None:
                return
            decoded = further

    def __repr__(self) -> str:
        return f"Secrets({len(self._plain) // 2} values)"


class _Decoded:
    """A text with its escapes undone. `starts` are the offsets of its characters in the original, and of its end."""

    def __init__(self, text: str, starts: Sequence[int] | None) -> None:
        self.text, self._starts = text, starts  # None: this is the original

    def span(self, start: int, end: int) -> Span:
        """The span of the original that a span of this text comes from."""
        return (start, end) if self._starts is None else (self._starts[start], self._starts[end])

    def undo_escapes(self) -> "_Decoded | None":
        """The text with one round of escapes undone; None when it has none."""
        pieces: list[str] = []
        offsets = array("q")
        before = 0
        for found in _ESCAPE.finditer(self.text):
            pieces += (self.text[before : found.start()], _character(found))
            offsets.extend(range(before, found.start()))
            offsets.append(found.start())
            before = found.end()
        if not pieces:
            return None
        offsets.extend(range(before, len(self.text) + 1))
        starts = offsets if self._starts is None else array("q", [self._starts[offset] for offset in offsets])
        return _Decoded("".join(pieces) + self.text[before:], starts)


def _character(escape: "re.Match[str]") -> str:
    """The one character that an escape stands for."""
    digits = next((group for group in escape.group("hex", "hash") if group), "")
    try:
        code = int(digits, 16) if digits else int(escape["decimal"])
        return chr(code)
    except (TypeError, ValueError, OverflowError):
        return escape["char"] or "\ufffd"


def _lower(text: str) -> str:
    """The text in lower case, as long as before: a character that would become several stays as it is."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else "".join(c if len(c.lower()) != 1 else c.lower() for c in text)


def _occurrences(text: str, value: str) -> Iterator[int]:
    start = text.find(value)
    while start >= 0:
        yield start
        start = text.find(value, start + len(value))


def _around(text: str, start: int, end: int) -> Span:
    """The whole base64 word around a span of it, because the characters beside a key encode some of its bits."""
    while start > 0 and text[start - 1] in _BASE64:
        start -= 1
    while end < len(text) and text[end] in _BASE64:
        end += 1
    return start, end


def _base64_forms(value: str) -> Iterator[str]:
    """The part of the value's base64 that is the same in every text that holds it: 3 alignments, 2 alphabets."""
    data = value.encode("utf-8", "surrogatepass")
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + data).rstrip(b"=")
        first = (0, 2, 3)[shift]
        last = (shift + len(data)) // 3 * 4 + (0, 1, 2)[(shift + len(data)) % 3]
        core = whole[first:last].decode()
        if len(core) >= MIN_LENGTH:
            yield from {core, core.translate(_URL_SAFE)}


def _mask(text: str, spans: Sequence[Span]) -> str:
    """The text with *** in place of the spans, which are in order and may overlap."""
    pieces: list[str] = []
    before = 0
    for start, end in spans:
        if end <= before:
            continue
        if start >= before:
            pieces += (text[before:start], "***")
        before = end
    return "".join([*pieces, text[before:]])


def find_secrets(
    environment: Mapping[str, str], *, names: Iterable[str] = (), urls: Iterable[str] = (), params: Iterable[Any] = ()
) -> Secrets:
    """The secrets of a process: values of variables that are named like secrets or in `names`, passwords and queries
    in `urls`, and from `params` the headers and the values under a name like a secret's.
    """
    named = set(names)
    values = [value for name, value in environment.items() if name in named or _SECRET_NAME.search(name)]
    for url in urls:
        values += _secrets_of_url(url)
    for each in params:
        values += _secrets_of_params(each, is_secret=False)
    return Secrets(values)


def _secrets_of_url(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    query = [value for _, value in parse_qsl(parts.query)]
    password = unquote(parts.password or "")
    return [password, f"{unquote(parts.username or '')}:{password}", *query] if password else query


def _secrets_of_params(value: Any, *, is_secret: bool) -> list[str]:
    """The texts in parameters that stand under a name like a secret's, or under headers."""
    if isinstance(value, dict):
        return [
            text
            for name, inner in value.items()
            for text in _secrets_of_params(inner, is_secret=is_secret or bool(_SECRET_PARAM.search(str(name))))
        ]
    if isinstance(value, list):
        return [text for inner in value for text in _secrets_of_params(inner, is_secret=is_secret)]
    if not is_secret or not isinstance(value, str):
        return []
    return [value, value.rpartition(" ")[2]]  # "Bearer KEY" and KEY alone
