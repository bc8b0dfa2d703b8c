"""Sampled tokens as text, piece by piece: Detokenizer, and StopWatch on top of it.

Whether a reply is streamed or answered whole, its text comes from here, so that the pieces put together are the whole.
No message structure (messages.py) and no torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # part of the text also where they are special tokens


class Vocabulary:
    """What the engine asks of a tokenizer: text of tokens, and which tokens are never shown."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS}
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.hidden = frozenset(special | set(tokenizer.all_special_ids)) - shown
        self._texts: dict[int, str] = {}

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these tokens, hidden ones left out."""
        kept = [id for id in ids if id not in self.hidden]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def text_of(self, id: int) -> str:
        """One token as text, "" for a hidden one. Bytes that are no whole character are U+FFFD."""
        if id not in self._texts:
            self._texts[id] = self.decode([id])
        return self._texts[id]


class Detokenizer:
    """Text that grows by tokens and never shows a part of a character.

    Some tokenizers' text of a token depends on the one before it (a leading space dropped at the start), so each piece
    is the difference between two decodings from a place where the text was whole: of what was shown, and of all.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: the last tokens of the prompt."""
        self._vocabulary = vocabulary
        self._ids = list(context)
        self._start = 0  # decoding begins here
        self._shown = len(self._ids)  # tokens before this one are in the text already

    def push(self, ids: Iterable[int]) -> str:
        """What these tokens add; a character begun and not ended waits for the next call."""
        self._ids.extend(ids)
        text = self._new_text()
        return "" if text.endswith("\ufffd") else self._show(text)

    def flush(self) -> str:
        """What still waits; an unfinished character is U+FFFD."""
        return self._show(self._new_text())

    def _new_text(self) -> str:
        before = self._vocabulary.decode(self._ids[self._start : self._shown])
        return self._vocabulary.decode(self._ids[self._start :])[len(before) :]

    def _show(self, text: str) -> str:
        if text:
            self._start, self._shown = self._shown, len(self._ids)
        return text


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
