"""Finds keys and passwords in the environment and URLs, and keeps them out of files, logs and errors. Loads .env files.

All text from providers and endpoints passes through `Secrets` before it is written, logged or raised.

`load_environment` adds variables from .env files to this process. Existing environment variables take precedence.
Values are used literally: python-dotenv neither expands variables here nor runs anything.
"""

import base64
import itertools
import os
import re
import string
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from dotenv import dotenv_values

from art_cli.runtime.errors import UsageError, one_line

_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_PARAM = re.compile(r"api_?key|secret|password|credential|headers|authorization|[a-z]_token$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
# An escaped character: %2d, \\u002d (also \\\\u002d), \\x2d, &#45;, &#x2d;, or any character after backslashes.
# The possessive `{1,8}+` does not backtrack, which cannot match; a text of backslashes then takes 40 % of the time.
_ESCAPE = re.compile(
    r"""(?:%|\\{1,8}+(?:u00|u\{|x))(?P<hex>[0-9a-fA-F]{2})\}?"""
    r"""|&\#[xX]0{0,6}(?P<hash>[0-9a-fA-F]{2});?|&\#0{0,6}(?P<decimal>[0-9]{2,3});?|\\{1,8}+(?P<char>[^\\])""",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}  # controls written as a backslash and a letter
_BREAK = re.compile(r"[\r\n]")
_BLANKS = " \t"
_MARKS = ("%", "\\", "&")  # start of every escape
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/-_=")
_URL_SAFE = str.maketrans("+/", "-_")
MAX_ESCAPES = 50_000  # default limit of undone escapes per text
MAX_ROUNDS = 3  # rounds of undoing escapes, for example for a key in a URL in nested JSON texts
MIN_LENGTH = 6  # characters; shorter values are not keys, and replacing them would garble texts

Span = tuple[int, int]  # (start, end) offsets


def load_environment(directory: Path) -> None:
    """Sets missing variables from ./.env, then from the one in `directory`. Raises UsageError for unreadable files."""
    for path in dict.fromkeys((Path.cwd() / ".env", directory.resolve() / ".env")):
        try:
            for name, value in dotenv_values(path, interpolate=False, encoding="utf-8-sig").items():
                if value is not None:
                    os.environ.setdefault(name, value)
        except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in a name or value
            raise UsageError(f"{path}: {one_line(error)}") from error


class Secrets:
    """Secret values that must not be shown, in all forms in which they may come back.

    Example: for sk-a/b1, these are also masked: "SK-A/B1", "sk-a\\/b1", "\\u0073k-a/b1", "sk-a%2fb1", "sk-a%252Fb1",
    "&#115;k-a/b1", base64 of any text containing it, and its hexadecimal digits. Line breaks and indentation inside a
    form, even escaped, are ignored.
    """

    def __init__(self, values: Iterable[str], *, max_escapes: int = MAX_ESCAPES) -> None:
        """Text after `max_escapes` escapes is cut off, because undoing escapes takes time."""
        self._max_escapes = max_escapes
        values = {form for value in values for form in (value, value.strip()) if len(form.strip()) >= MIN_LENGTH}
        readings = {_lower(reading) for value in values for reading in _readings(value) if len(reading) >= MIN_LENGTH}
        self._plain = sorted(readings, key=len, reverse=True)
        self._plain += sorted({value.encode("utf-8", "surrogatepass").hex() for value in values})
        self._encoded = sorted({form for value in values for form in _base64_forms(value)})
        forms = (self._plain, self._encoded)  # squeezed text may lack blanks
        self._sought = [{each for form in some for each in (form, re.sub(r"[ \t]", "", form))} for some in forms]

    def redact(self, text: str) -> str:
        """Returns the text with every secret, and every user:password in a URL, replaced by ***."""
        if self._plain:
            text = self._shortened(text)
            if self._may_occur(text):
                text = _mask(text, sorted(self._find(text)))
        return _USERINFO.sub("***@", text) if "://" in text else text

    def _shortened(self, text: str) -> str:
        """Cuts the text before it exceeds the escape limit. Real verdicts and errors never do."""
        if sum(map(text.count, _MARKS)) <= self._max_escapes:
            return text
        too_many = next(itertools.islice(_ESCAPE.finditer(text), self._max_escapes, None), None)
        return text if too_many is None else text[: too_many.start()]

    def _may_occur(self, text: str) -> bool:
        """Returns True if `_find` may find something. Much faster than `_find`, because no offsets are recorded."""
        plain, encoded = self._sought
        for _ in range(MAX_ROUNDS + 1):
            squeezed = _squeezed(text)
            lowered = _lower(squeezed)
            if any(value in lowered for value in plain) or any(form in squeezed for form in encoded):
                return True
            if not any(mark in text for mark in _MARKS):
                return False
            text, num = _ESCAPE.subn(_character, _joined(text))
            if not num:
                return False
        return False

    def _find(self, text: str) -> Iterator[Span]:
        """Yields the spans of secrets, in the text itself and with escapes undone up to MAX_ROUNDS times."""
        lines = _Derived(text, None)
        for _ in range(MAX_ROUNDS + 1):
            joined = lines.join_lines()
            lowered = _lower(joined.text)
            for value in self._plain:
                yield from (joined.origin(start, start + len(value)) for start in _occurrences(lowered, value))
            for form in self._encoded:
                for start in _occurrences(joined.text, form):
                    end = start + len(form)
                    word = _around(lines.text, *joined.source(start, end))  # words end at line ends
                    beside = joined.source(*_around(joined.text, start, end, most=1))
                    yield lines.origin(min(word[0], beside[0]), max(word[1], beside[1]))
            if (undone := joined.undo_escapes()) is None:
                return
            lines = undone

    def __repr__(self) -> str:
        return f"Secrets({len(self._plain) // 2} values)"


class _Derived:
    """A text derived from `parent` by removing parts and replacing parts by single characters."""

    def __init__(self, text: str, parent: "_Derived | None") -> None:
        self.text, self.parent = text, parent
        # Piece i starts at _begins[i] and corresponds to _firsts[i] up to _lasts[i] in the parent's text.
        self._begins, self._firsts, self._lasts = array("q"), array("q"), array("q")

    def origin(self, start: int, end: int) -> Span:
        """Maps a span of this text to the original text."""
        return (start, end) if self.parent is None else self.parent.origin(*self.source(start, end))

    def source(self, start: int, end: int) -> Span:
        """Maps a span of this text to the parent's text."""
        first, last = bisect_right(self._begins, start) - 1, bisect_right(self._begins, end - 1) - 1
        after = self._begins[last + 1] if last + 1 < len(self._begins) else len(self.text)
        return self._firsts[first] + start - self._begins[first], self._lasts[last] - (after - end)

    def join_lines(self) -> "_Derived":
        """Applies `_joined` and records offsets."""
        derived = _Derived(_joined(self.text), self)
        begin = place = 0
        for line in _BREAK.split(self.text):
            kept = line.strip(_BLANKS)
            if kept:
                first = place + len(line) - len(line.lstrip(_BLANKS))
                derived._add(begin, first, first + len(kept))
                begin += len(kept)
            place += len(line) + 1
        return derived

    def undo_escapes(self) -> "_Derived | None":
        """Undoes one round of escapes; None without escapes."""
        pieces: list[str] = []
        derived = _Derived("", self)
        before = begin = 0
        for found in _ESCAPE.finditer(self.text):
            pieces += (self.text[before : found.start()], _character(found))
            if found.start() > before:
                derived._add(begin, before, found.start())
            begin += found.start() - before
            derived._add(begin, found.start(), found.end())
            begin += 1
            before = found.end()
        if not pieces:
            return None
        if before < len(self.text):
            derived._add(begin, before, len(self.text))
        derived.text = "".join(pieces) + self.text[before:]
        return derived

    def _add(self, begin: int, first: int, last: int) -> None:
        for places, place in ((self._begins, begin), (self._firsts, first), (self._lasts, last)):
            places.append(place)


def _joined(text: str) -> str:
    """Removes line breaks and surrounding blanks."""
    if "\n" not in text and "\r" not in text:
        return text.strip(_BLANKS)
    return "".join([line.strip(_BLANKS) for line in _BREAK.split(text)])


def _squeezed(text: str) -> str:
    """Removes all white space from multi-line text, which is faster than `_joined`. Single lines stay unchanged."""
    if "\n" not in text and "\r" not in text:
        return text
    data = text.encode("utf-8", "surrogatepass").translate(None, b" \t\r\n")
    return data.decode("utf-8", "surrogatepass")


def _readings(value: str) -> Iterator[str]:
    """Yields the value, and its forms after undoing escapes."""
    for _ in range(MAX_ROUNDS + 1):
        value = _joined(value)
        yield value
        value, num = _ESCAPE.subn(_character, value)
        if not num:
            return


def _character(escape: "re.Match[str]") -> str:
    digits = next((group for group in escape.group("hex", "hash") if group), "")
    try:
        code = int(digits, 16) if digits else int(escape["decimal"])
        return chr(code)
    except (TypeError, ValueError, OverflowError):
        return _CONTROLS.get(escape["char"], escape["char"]) or "\ufffd"


def _lower(text: str) -> str:
    """Lowercases without changing the length: characters that would expand stay unchanged."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else "".join(c if len(c.lower()) != 1 else c.lower() for c in text)


def _occurrences(text: str, value: str) -> Iterator[int]:
    start = text.find(value)
    while start >= 0:
        yield start
        start = text.find(value, start + len(value))


def _around(text: str, start: int, end: int, *, most: int | None = None) -> Span:
    """Returns the base64 word around a span, up to `most` characters more: they encode some of a key's bits."""
    least, highest = (0, len(text)) if most is None else (max(0, start - most), min(len(text), end + most))
    while start > least and text[start - 1] in _BASE64:
        start -= 1
    while end < highest and text[end] in _BASE64:
        end += 1
    return start, end


def _base64_forms(value: str) -> Iterator[str]:
    """Yields the part of the value's base64 common to all texts containing it: 3 alignments, 2 alphabets."""
    data = value.encode("utf-8", "surrogatepass")
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + data).rstrip(b"=")
        first = (0, 2, 3)[shift]
        last = (shift + len(data)) // 3 * 4 + (0, 1, 2)[(shift + len(data)) % 3]
        core = whole[first:last].decode()
        if len(core) >= MIN_LENGTH:
            yield from {core, core.translate(_URL_SAFE)}


def _mask(text: str, spans: Sequence[Span]) -> str:
    """Replaces the spans by ***. Spans are sorted and may overlap."""
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
    environment: Mapping[str, str],
    *,
    values: Iterable[str] = (),
    names: Iterable[str] = (),
    urls: Iterable[str] = (),
    params: Iterable[Any] = (),
    max_escapes: int = MAX_ESCAPES,
) -> Secrets:
    """Finds a process's secrets: `values`, environment variables named like secrets or listed in `names`, passwords and
    queries in `urls`, and in `params` all headers and values with secret-like names."""
    named = set(names)
    found = [*values, *(value for name, value in environment.items() if name in named or _SECRET_NAME.search(name))]
    for url in urls:
        found += _secrets_of_url(url)
    for each in params:
        found += _secrets_of_params(each, is_secret=False)
    return Secrets(found, max_escapes=max_escapes)


def _secrets_of_url(url: str) -> list[str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        return []
    query = [value for _, value in parse_qsl(parts.query)]
    password = unquote(parts.password or "")
    return [password, f"{unquote(parts.username or '')}:{password}", *query] if password else query


def without_secrets(value: Any, *, is_params: bool = False) -> Any:
    """Masks values with secret-like names in a configuration's `params`, and headers."""
    if isinstance(value, list):
        return [without_secrets(each, is_params=is_params) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: "***"
        if is_params and each and _SECRET_PARAM.search(str(name))
        else without_secrets(each, is_params=is_params or name == "params")
        for name, each in value.items()
    }


def _secrets_of_params(value: Any, *, is_secret: bool) -> list[str]:
    """Returns the texts in parameters with secret-like names, or in headers."""
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
