"""Secrets: keys and passwords, found in the environment and addresses, kept out of files, logs and errors; .env files.

Every text that comes back from a provider or an endpoint goes through `Secrets` before it reaches any of those.

`load_environment` adds the variables of .env files to the environment of this process. A variable of the environment
wins over a .env file. Values of a .env file are taken as they are written: python-dotenv neither expands variables in
them here, nor does it ever run anything.
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


def load_environment(directory: Path) -> None:
    """Adds to the environment what it lacks and a .env file has: the working directory's, then that of `directory`.

    Raises UsageError: a .env file cannot be read.
    """
    for path in dict.fromkeys((Path.cwd() / ".env", directory.resolve() / ".env")):
        try:
            for name, value in dotenv_values(path, interpolate=False, encoding="utf-8-sig").items():
                if value is not None:
                    os.environ.setdefault(name, value)
        except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8, a name or value with a NUL
            raise UsageError(f"{path}: {one_line(error)}") from error


_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_SECRET_PARAM = re.compile(r"api_?key|secret|password|credential|headers|authorization|[a-z]_token$", re.IGNORECASE)
_USERINFO = re.compile(r"(?<=://)[^/@\s]+@")
# One escaped character: %2d, \\u002d (also \\\\u002d), \\x2d, &#45;, &#x2d;, or any other behind backslashes.
# `{1,8}+` is not tried again with fewer, which never match: a text of backslashes takes 40 % of the time.
_ESCAPE = re.compile(
    r"""(?:%|\\{1,8}+(?:u00|u\{|x))(?P<hex>[0-9a-fA-F]{2})\}?"""
    r"""|&\#[xX]0{0,6}(?P<hash>[0-9a-fA-F]{2});?|&\#0{0,6}(?P<decimal>[0-9]{2,3});?|\\{1,8}+(?P<char>[^\\])""",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}  # controls that these letters mean behind backslashes
_BREAK = re.compile(r"[\r\n]")
_BLANKS = " \t"
_MARKS = ("%", "\\", "&")  # every escape begins with one
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/-_=")
_URL_SAFE = str.maketrans("+/", "-_")
MAX_ESCAPES = 50_000  # default number of escapes that are undone in one text
MAX_ROUNDS = 3  # times that escapes are undone, for example of a key in a URL in a JSON text in a JSON text
MIN_LENGTH = 6  # characters; a shorter value is no key, and replacing it would garble texts

Span = tuple[int, int]  # (start, end) offsets


class Secrets:
    """The values that must not be shown, in any of the forms in which they come back.

    Example: for sk-a/b1 these are masked as well: "SK-A/B1", "sk-a\\/b1", "\\u0073k-a/b1", "sk-a%2fb1", "sk-a%252Fb1",
    "&#115;k-a/b1", base64 of any text that holds it, and its hexadecimal digits; each also where line breaks and
    indentation, which may be escaped themselves, stand within it.
    """

    def __init__(self, values: Iterable[str], *, max_escapes: int = MAX_ESCAPES) -> None:
        """`max_escapes`: a text is cut off behind as many escapes, because undoing them takes time."""
        self._max_escapes = max_escapes
        values = {form for value in values for form in (value, value.strip()) if len(form.strip()) >= MIN_LENGTH}
        readings = {_lower(reading) for value in values for reading in _readings(value) if len(reading) >= MIN_LENGTH}
        self._plain = sorted(readings, key=len, reverse=True)
        self._plain += sorted({value.encode("utf-8", "surrogatepass").hex() for value in values})
        self._encoded = sorted({form for value in values for form in _base64_forms(value)})
        forms = (self._plain, self._encoded)  # a squeezed text has them with or without their blanks
        self._sought = [{each for form in some for each in (form, re.sub(r"[ \t]", "", form))} for some in forms]

    def redact(self, text: str) -> str:
        """Returns the text with every secret, and every user:password in a URL, replaced by ***."""
        if self._plain:
            text = self._shortened(text)
            if self._may_occur(text):
                text = _mask(text, sorted(self._find(text)))
        return _USERINFO.sub("***@", text) if "://" in text else text

    def _shortened(self, text: str) -> str:
        """Returns the text up to where it has too many escapes, which no verdict and no error has."""
        if sum(map(text.count, _MARKS)) <= self._max_escapes:
            return text
        too_many = next(itertools.islice(_ESCAPE.finditer(text), self._max_escapes, None), None)
        return text if too_many is None else text[: too_many.start()]

    def _may_occur(self, text: str) -> bool:
        """Returns whether `_find` can find anything. It is much faster, because it records no offsets."""
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
        """Yields the spans of secrets in the text, as it is and with its escapes undone up to MAX_ROUNDS times."""
        lines = _Derived(text, None)
        for _ in range(MAX_ROUNDS + 1):
            joined = lines.join_lines()
            lowered = _lower(joined.text)
            for value in self._plain:
                yield from (joined.origin(start, start + len(value)) for start in _occurrences(lowered, value))
            for form in self._encoded:
                for start in _occurrences(joined.text, form):
                    end = start + len(form)
                    word = _around(lines.text, *joined.source(start, end))  # a word ends where the line does
                    beside = joined.source(*_around(joined.text, start, end, most=1))
                    yield lines.origin(min(word[0], beside[0]), max(word[1], beside[1]))
            if (undone := joined.undo_escapes()) is None:
                return
            lines = undone

    def __repr__(self) -> str:
        return f"Secrets({len(self._plain) // 2} values)"


class _Derived:
    """A text made from another one, `parent`, by taking parts away and replacing parts by one character each."""

    def __init__(self, text: str, parent: "_Derived | None") -> None:
        self.text, self.parent = text, parent
        # Piece i begins here at _begins[i], and comes from _firsts[i] up to _lasts[i] of the parent's text.
        self._begins, self._firsts, self._lasts = array("q"), array("q"), array("q")

    def origin(self, start: int, end: int) -> Span:
        """Returns the span of the original that a span of this text comes from."""
        return (start, end) if self.parent is None else self.parent.origin(*self.source(start, end))

    def source(self, start: int, end: int) -> Span:
        """Returns the span of the parent's text that a span of this one comes from."""
        first, last = bisect_right(self._begins, start) - 1, bisect_right(self._begins, end - 1) - 1
        after = self._begins[last + 1] if last + 1 < len(self._begins) else len(self.text)
        return self._firsts[first] + start - self._begins[first], self._lasts[last] - (after - end)

    def join_lines(self) -> "_Derived":
        """Returns the text as `_joined` has it."""
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
        """Returns the text with one round of escapes undone, or None if it has none."""
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
    """Returns the text without its line breaks and the blanks around them."""
    if "\n" not in text and "\r" not in text:
        return text.strip(_BLANKS)
    return "".join([line.strip(_BLANKS) for line in _BREAK.split(text)])


def _squeezed(text: str) -> str:
    """Returns a text of one line as it is, and others without any white space, which is faster than `_joined`."""
    if "\n" not in text and "\r" not in text:
        return text
    data = text.encode("utf-8", "surrogatepass").translate(None, b" \t\r\n")
    return data.decode("utf-8", "surrogatepass")


def _readings(value: str) -> Iterator[str]:
    """Yields the value as it reads when escapes are undone in a text that quotes it; several if it has escapes."""
    for _ in range(MAX_ROUNDS + 1):
        value = _joined(value)
        yield value
        value, num = _ESCAPE.subn(_character, value)
        if not num:
            return


def _character(escape: "re.Match[str]") -> str:
    """Returns the one character that an escape stands for."""
    digits = next((group for group in escape.group("hex", "hash") if group), "")
    try:
        code = int(digits, 16) if digits else int(escape["decimal"])
        return chr(code)
    except (TypeError, ValueError, OverflowError):
        return _CONTROLS.get(escape["char"], escape["char"]) or "\ufffd"


def _lower(text: str) -> str:
    """Returns the text in lower case, as long as before: a character that would become several stays as it is."""
    lowered = text.lower()
    return lowered if len(lowered) == len(text) else "".join(c if len(c.lower()) != 1 else c.lower() for c in text)


def _occurrences(text: str, value: str) -> Iterator[int]:
    start = text.find(value)
    while start >= 0:
        yield start
        start = text.find(value, start + len(value))


def _around(text: str, start: int, end: int, *, most: int | None = None) -> Span:
    """Returns the base64 word around a span of it, because the characters beside a key encode some of its bits.

    `most`: so many further characters on each side.
    """
    least, highest = (0, len(text)) if most is None else (max(0, start - most), min(len(text), end + most))
    while start > least and text[start - 1] in _BASE64:
        start -= 1
    while end < highest and text[end] in _BASE64:
        end += 1
    return start, end


def _base64_forms(value: str) -> Iterator[str]:
    """Yields the part of the value's base64 that is the same in every text that holds it: 3 alignments, 2 alphabets."""
    data = value.encode("utf-8", "surrogatepass")
    for shift in range(3):
        whole = base64.b64encode(b"\0" * shift + data).rstrip(b"=")
        first = (0, 2, 3)[shift]
        last = (shift + len(data)) // 3 * 4 + (0, 1, 2)[(shift + len(data)) % 3]
        core = whole[first:last].decode()
        if len(core) >= MIN_LENGTH:
            yield from {core, core.translate(_URL_SAFE)}


def _mask(text: str, spans: Sequence[Span]) -> str:
    """Returns the text with *** in place of the spans, which are in order and may overlap."""
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
    """Finds the secrets of a process: `values`, variables named like secrets or in `names`, passwords and queries
    in `urls`, and from `params` the headers and the values under a name like a secret's.
    """
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
    """Returns a configuration without what stands under names like a secret's in its `params`, and under headers."""
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
    """Returns the texts in parameters that stand under a name like a secret's, or under headers."""
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
