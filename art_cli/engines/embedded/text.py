"""Sampled tokens as text, piece by piece: Detokenizer, and StopWatch on top of it.

Whether a reply is streamed or answered whole, its text comes from here, so that the pieces put together are the whole.
No message structure (messages.py) and no torch.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any

from art_cli.engines.embedded.templates import ChatTemplate

UNKNOWN = "\ufffd"  # what bytes that are no character are decoded to
MAX_WAITING = 16  # tokens; the bytes of a character are in 4 at most, between tokens that have no text
MAX_UNKNOWN = 3  # U+FFFD that the beginning of a character may be decoded to, one for each of its bytes
SURE = 8  # characters a token beyond which a text is counted in parts first; English has 4 to 5
SMALLEST_PART = 4096  # characters
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Markers that are part of the text also where they are special tokens, since a message is read from them.
SHOWN = (*MARKERS, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>")


class Vocabulary:
    """What the engine asks of a tokenizer: tokens of text and text of tokens, and which tokens are never shown."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in SHOWN} - {tokenizer.unk_token_id}
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.hidden = frozenset(special | set(tokenizer.all_special_ids)) - shown
        self._size = 1 + max(tokenizer.get_vocab().values())
        self._texts: dict[int, str] = {}

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text of more than n times as many has more than n tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str, *, most: int, adds_special: bool) -> list[int] | None:
        """The tokens of a text; None: they are more than `most`. What is far too long is not tokenized as a whole."""
        if len(text) > most * self.longest or (len(text) > SURE * most and self._is_too_long(text, most)):
            return None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=adds_special)
        return ids if len(ids) <= most else None

    def _is_too_long(self, text: str, most: int) -> bool:
        """Whether the parts of a text have more tokens than the whole may have, with room for those at the cuts."""
        num_tokens = 0
        for number, start in enumerate(range(0, len(text), size := max(most, SMALLEST_PART)), 1):
            num_tokens += len(self.tokenizer.encode(text[start : start + size], add_special_tokens=False))
            if num_tokens > most + most // 8 + 8 * number:
                return True
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens, hidden ones left out."""
        return str(
            self.tokenizer.decode(self.shown(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def shown(self, ids: Iterable[int]) -> list[int]:
        """Those of the tokens that have text: models have rows beyond their tokenizer's last token."""
        return [id for id in ids if id < self._size and id not in self.hidden]

    def text_of(self, id: int) -> str:
        """One token as text, "" for a hidden one. Bytes of a part of a character are lone surrogates (PEP 383)."""
        if id not in self._texts:
            text = self.decode([id])
            data = _bytes_of(self.tokenizer.convert_ids_to_tokens(id)) if UNKNOWN in text else None
            self._texts[id] = text if data is None else data.decode(errors="surrogateescape")
        return self._texts[id]


def _bytes_of(token: str | None) -> bytes | None:
    """The bytes that a byte-level token or a byte token such as <0xE4> stands for; None: it is neither."""
    if token is None:
        return None
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Which byte each letter of a byte-level vocabulary stands for: `bytes_to_unicode` of GPT-2's encoder.py."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


class Detokenizer:
    """Text that grows by tokens and never shows a part of a character.

    Some tokenizers' text of a token depends on the one before it (a leading space dropped at the start), so each piece
    is the end of a decoding that begins at a place where the text was whole. What waits for the end of a character is
    MAX_WAITING tokens at most, since no character has so many: each token is decoded a bounded number of times.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: the last tokens of the prompt."""
        self._vocabulary = vocabulary
        self._ids = vocabulary.shown(context)  # decoding begins with these
        self._num_shown = len(self._ids)  # tokens whose text is in what was pushed, but for what was held of it
        self._length = len(vocabulary.decode(self._ids))  # characters of the decoding that were shown

    def push(self, ids: Iterable[int]) -> str:
        """What these tokens add; a character begun and not ended waits for the next call."""
        self._ids.extend(self._vocabulary.shown(ids))
        text = self._new_text()
        if not text.endswith(UNKNOWN):
            return self._show(text, 0)
        if len(self._ids) - self._num_shown <= MAX_WAITING:
            return ""
        return self._show(text, min(MAX_UNKNOWN, len(text) - len(text.rstrip(UNKNOWN))))

    def flush(self) -> str:
        """What still waits; an unfinished character is U+FFFD."""
        return self._show(self._new_text(), 0)

    def _new_text(self) -> str:
        return self._vocabulary.decode(self._ids)[self._length :]

    def _show(self, text: str, num_held: int) -> str:
        """The text but for its last characters, which may yet change. The next decoding begins later."""
        if text and not num_held:
            self._begin(self._ids[self._num_shown :], 0)
        elif len(self._ids) - self._num_shown > MAX_WAITING:
            self._begin(self._ids[-MAX_WAITING:], num_held)
        return text[: len(text) - num_held]

    def _begin(self, ids: list[int], num_held: int) -> None:
        self._ids, self._num_shown = ids, len(ids)
        self._length = len(self._vocabulary.decode(ids)) - num_held


class StopWatch:
    """Cuts a growing text before the first stop string; holds back an end that may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, text: str) -> str:
        """What may be shown of the text so far and was not yet. Nothing once a stop string was found."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """How much of the end of `text` is a beginning of `marker`, but not all of it. overlap("a <to", "<tool>") is 3."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
