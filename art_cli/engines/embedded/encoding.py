"""TextEncoder: the tokens of a text, where most of the text was tokenized before.

A conversation that goes on sends its earlier messages again, and the attempts of a group send the same first ones. Chat
templates write each message behind a special token, such as <|im_start|>, and a tokenizer cuts a text at its special
tokens before it does anything else. So the part from one special token up to the next has the same tokens in any text,
and the tokens of parts are remembered. A tokenizer in which a part's tokens could depend on what stands before it is
used on whole texts, and so is every tokenizer where the caller wants its extra tokens.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from art_cli.chat.control_tokens import ControlTokens, Guard

MAX_KEPT = 16 * 2**20  # bytes of all parts that are remembered
PART_BYTES = 400  # memory that a part takes beside its characters and tokens: 340 measured
MAX_NEW = 64  # new parts of a text that are tokenized one by one; a text with more is tokenized as a whole
MAX_PART = 2**16  # characters of the longest part that is remembered
# Steps that treat every part by itself. Metaspace and others may treat a text's beginning otherwise.
SEPARATE = frozenset({"Split", "Digits", "ByteLevel", "Whitespace", "WhitespaceSplit", "Punctuation", "UnicodeScripts"})
NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "StripAccents"})


class TextEncoder:
    """`tokenizer` is one of transformers. Tokens that are added to it later are not seen. Any thread may call."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._marks = _marks(tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # part -> its tokens, the latest used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Returns the same as `tokenizer.encode(text, add_special_tokens=adds_special)`."""
        if adds_special or self._marks is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special)
            return ids
        parts = _cut(text, self._marks)
        if sum(part not in self._known for part in parts) > MAX_NEW:
            return self._whole(text)
        return [id for part in parts for id in self._of_part(part)]

    def encode_chat(self, text: str, guard: Guard, controls: ControlTokens) -> list[int]:
        """Returns the tokens of a text that the chat template made of guarded values. Raises as ControlTokens does.

        Parts in which no text would have become a control token are remembered as always, the others beside them.
        """
        whole = guard.restored(text)
        if not controls.differ(text, whole):
            return self.encode(whole, adds_special=False)
        parts = (
            [] if self._marks is None or controls.folds else [(p, guard.restored(p)) for p in _cut(text, self._marks)]
        )
        keys = [f"{part}\0{own}\0" if controls.differ(part, own) else own for part, own in parts]
        if not parts or sum(key not in self._known for key in keys) > MAX_NEW:
            return controls.encode_apart(text, whole)
        ids: list[int] = []
        for key, (part, own) in zip(keys, parts, strict=True):
            ids += self._of_part(key, (part, own, controls) if key != own else None)
        return ids

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _of_part(self, part: str, apart: tuple[str, str, ControlTokens] | None = None) -> Iterable[int]:
        """Returns the tokens of a part, or of one that holds markers as text: with stand-ins, and without."""
        with self._lock:
            if (known := self._known.get(part)) is not None:
                self._known.move_to_end(part)
                return known
        ids = self._whole(part) if apart is None else apart[2].encode_apart(*apart[:2])
        if len(part) <= MAX_PART:
            self._keep(part, ids)
        return ids

    def _keep(self, part: str, ids: list[int]) -> None:
        with self._lock:
            if part not in self._known:
                self._known[part] = array("i", ids)
                self._num_bytes += _size(part, self._known[part])
            while self._num_bytes > MAX_KEPT:
                self._num_bytes -= _size(*self._known.popitem(last=False))


def _size(part: str, ids: "array[int]") -> int:
    return PART_BYTES + len(part) + ids.itemsize * len(ids)


def _cut(text: str, marks: "re.Pattern[str]") -> list[str]:
    """Returns the parts of a text: what stands before the first mark, and each mark with what follows it."""
    starts = [found.start() for found in marks.finditer(text)]
    if starts[:1] != [0]:
        starts.insert(0, 0)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _marks(tokenizer: Any) -> "re.Pattern[str] | None":
    """Returns a pattern of the special tokens at which a text may be cut, or None if there are none, or cutting is
    unsafe."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens or getattr(tokenizer, "split_special_tokens", False):
        return None
    if not (_is_separate(backend.pre_tokenizer, SEPARATE) and _is_separate(backend.normalizer, NORMALIZERS)):
        return None
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
    if any(token.lstrip or token.single_word for token in added):  # these look at the text around them
        return None
    plain = [token.content for token in added if token.special and not token.rstrip and not token.normalized]
    marks = [mark for mark in plain if not any(_overlaps(token.content, mark) for token in added)]
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def _overlaps(other: str, mark: str) -> bool:
    """Returns whether an occurrence of `mark` in a text may lie in, or begin in, an occurrence of the token `other`."""
    if other == mark:
        return any(mark[-length:] == mark[:length] for length in range(1, len(mark)))
    if mark in other or other in mark:
        return True
    return any(other[-length:] == mark[:length] for length in range(1, min(len(other), len(mark))))


def _is_separate(step: Any, kinds: frozenset[str]) -> bool:
    """Returns whether a step of the tokenizer, or each of a sequence of them, is of these kinds."""
    return step is None or _are_kinds(json.loads(step.__getstate__()), kinds)


def _are_kinds(described: dict[str, Any], kinds: frozenset[str]) -> bool:
    steps = described.get("pretokenizers") or described.get("normalizers")
    if described["type"] == "Sequence" and steps is not None:
        return all(_are_kinds(each, kinds) for each in steps)
    return described["type"] in kinds
