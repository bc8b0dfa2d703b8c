"""ControlTokens: tokenizes rendered conversations so that only the template's own markers become control tokens.

A tokenizer turns every `<|im_start|>` into a control token. Text from a user, a tool, or the policy could therefore
forge an entire turn. This module prevents it:

    request values          {"role": "user", "content": "a<|im_end|>b"}
    Guard.messages          {"role": "user", "content": "a?|im_end|>b"}    ? is a private-use character
    chat template           <|im_start|>user\\na?|im_end|>b<|im_end|>\\n
    ControlTokens.encode    [<|im_start|>] user \\n a < | im _ end | > b [<|im_end|>] \\n

Stand-in characters replace part of each marker in a text. They also replace partial markers at the beginning and end of
a text, because several texts could combine to a marker. All markers in the rendered text then come from the template.
Conversations without markers are passed through as the same object and tokenized as usual.

Text is tokenized by the same model without its control tokens. Control tokens are the special tokens and added tokens
that look like tags (`<think>`, `[INST]`). Other added tokens, such as words or runs of spaces, are vocabulary.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

from art_cli.chat.chat_errors import invalid
from art_cli.chat.template_messages import for_template

Json = dict[str, Any]

THINK, THINK_END = "<think>", "</think>"
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})  # roles are structure, not text
# Message fields with free text. Other strings may be names that a template compares or looks up.
_FREE = frozenset({"role", "content", "text", "name", "reasoning_content", "reasoning", "thinking", "refusal"})
_TAG = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_JSON_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_STAND_INS = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # private-use characters
_MARK, _GAP = "\U0010ffff", "\U0010fffe"  # not valid characters, so no text needs them
_NO_TEXT = {ord(_MARK): "\ufffd", ord(_GAP): "\ufffd"}
_CONTROL = {code: None for code in (*range(9), *range(14, 28), 127)}  # control characters of ASCII but white space


class ControlTokens:
    """`tokenizer` comes from transformers. Tokens added later are ignored. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        texts = {id: token.content for id, token in added.items() if token.content.strip()}
        self._texts = {id: text for id, text in texts.items() if id in special or _TAG.fullmatch(text)}
        marks = tuple(self._texts.values())
        self._texts |= {id: text for id, text in texts.items() if any(mark in text for mark in marks)}
        self._others = [token for id, token in sorted(added.items()) if id not in self._texts]
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # Tokens that match normalized text have many spellings.
        self.folds = getattr(backend, "normalizer", None) is not None and any(
            added[id].normalized for id in self._texts
        )
        marks = tuple({_folded(text) if self.folds else text for text in self._texts.values()})
        ends = [mark for mark in marks if not mark.replace(" ", "_").isidentifier()]  # words begin in any text
        self._first = "".join({mark[0] for mark in marks})
        self._last = "".join({mark[-1] for mark in ends})
        self._heads = {mark[:length] for mark in ends for length in range(1, len(mark))}
        self._tails = {mark[-length:] for mark in ends for length in range(1, len(mark))}
        self._longest = max(map(len, marks), default=0)
        self._inner = "\n\n".join(mark[1:-1] for mark in ends)
        self._find = _finder(marks)

    def places(self, text: str, *, is_free: bool) -> set[int]:
        """Returns the characters to replace, by index, which removes all parts of markers from the text.

        `is_free` also covers the middle of a marker, such as "user" in <|user|>.
        """
        if not self.folds:
            return self._places(text, is_free=is_free)
        found = self._places(_folded(text), is_free=is_free)
        if not found:
            return found
        letters = [(index, letter) for index, old in enumerate(text) for letter in _folded(old)]
        return {letters[place][0] for place in self._places("".join(letter for _, letter in letters), is_free=is_free)}

    def _places(self, text: str, *, is_free: bool) -> set[int]:
        found: set[int] = set()
        if _has(text, self._first):
            found = {match.start() for match in self._find.finditer(text)}
            for end in {len(text), len(text.rstrip())}:  # a part of a marker may end there
                near = range(max(0, end - self._longest), end)
                if _has(text[near.start : end], self._first):
                    found |= {place for place in near if text[place] in self._first and text[place:end] in self._heads}
        for start in {0, len(text) - len(text.lstrip())}:  # or begin there
            near = range(start, min(len(text), start + self._longest))
            if _has(text[start : near.stop], self._last):
                found |= {end for end in near if text[end] in self._last and text[start : end + 1] in self._tails}
        if is_free and len(text) < self._longest and (inner := text.strip()) and inner in self._inner:
            found.add(len(text) - len(text.lstrip()))
        return found

    def marks_in(self, text: str) -> list[str]:
        return [match[0] + (match[match.lastindex] if match.lastindex else "") for match in self._find.finditer(text)]

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the chat template writes a reply's tool calls. Some templates leave them out without an error."""
        call = {"id": "call00000", "type": "function", "function": {"name": "fourteen", "arguments": {}}}
        talk = [{"role": "user", "content": "7 + 7"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return "fourteen" in self.tokenizer.apply_chat_template(talk, tokenize=False)
        except Exception:  # the boundary to the model's own template
            return False

    def chat_ids(self, messages: Sequence[Json], tools: Sequence[Json] = ()) -> list[int]:
        """Tokenizes a conversation with the tokenizer's template. Raises the template's errors and ValueError."""
        messages = [for_template(message) for message in messages]
        guard = Guard(self, messages, tools)
        text = self.tokenizer.apply_chat_template(
            guard.messages(messages), tools=guard.value(list(tools)) or None, tokenize=False
        )
        return self.encode(text, guard)

    def encode(self, text: str, guard: "Guard") -> list[int]:
        """Tokenizes text rendered from guarded values. Raises ValueError if a marker cannot be encoded as text."""
        whole = guard.restored(text)
        if not self.differ(text, whole):
            ids: list[int] = self.tokenizer.encode(whole, add_special_tokens=False)
            return ids
        return self.encode_apart(text, whole)

    def differ(self, text: str, whole: str) -> bool:
        """Returns whether `whole`, the text without stand-ins, may have more control tokens than the template wrote."""
        return text != whole and (self.folds or self._marks(whole) != self._marks(text))

    def encode_apart(self, text: str, whole: str) -> list[int]:
        """Returns the tokens of `whole` with the control tokens of `text` and no others."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        written = [
            (id, start, end)
            for id, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True)
            if id in self._texts and _folded(text[start:end]).strip() == _folded(self._texts[id]).strip()
        ]
        whole = whole.translate(_NO_TEXT)
        pieces, place = [], 0
        for _, start, end in written:
            pieces += [whole[place:start], _MARK]
            place = end
        return self._encode_text("".join([*pieces, whole[place:]]), [id for id, _, _ in written])

    def _marks(self, text: str) -> list[tuple[int, str | None]]:
        return [(match.start(), match[match.lastindex or 0]) for match in self._find.finditer(text)]

    def _encode_text(self, text: str, written: list[int]) -> list[int]:
        """Returns the text's tokens. The only control token is _MARK, which marks the next template marker."""
        tokenizer, own_ids = self._without
        encoding = tokenizer.encode(text, add_special_tokens=False)
        rest, ids = iter(written), []
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if text[start:end] == _MARK:
                ids.append(next(rest))
            elif id in self._texts and text[start:end] == self._texts[id]:  # the model's vocabulary contains the marker
                ids += [part.id for letter in text[start:end] for part in tokenizer.model.tokenize(letter)]
            else:
                ids.append(own_ids.get(id, id))
        if next(rest, None) is not None:
            raise ValueError("the tokenizer does not keep its special tokens apart from text")
        return ids

    @cached_property
    def _without(self) -> tuple[Any, dict[int, int]]:
        """Returns the tokenizer without control tokens, and a map of the added tokens whose ids changed.

        The model is shared, so this is cheap in time and memory. Raises ValueError if the model is missing.
        """
        from tokenizers import AddedToken, Tokenizer

        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(self.tokenizer).__name__} cannot encode the text of a special token as text")
        made = Tokenizer(backend.model)
        made.normalizer, made.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        known = made.get_vocab()
        gap = range(len(known), 1 + max(known.values(), default=-1))  # new ids may not be ids of the model
        made.add_tokens([AddedToken(f"{_GAP}{number}", normalized=False) for number in gap])
        made.add_tokens(self._others)
        made.add_special_tokens([AddedToken(_MARK, special=True, normalized=False)])
        own = {token.content: id for id, token in self.tokenizer.added_tokens_decoder.items()}
        return made, {int(made.token_to_id(token.content) or 0): own[token.content] for token in self._others}


@lru_cache(maxsize=4)
def controls_of(tokenizer: Any) -> ControlTokens:
    """Returns a tokenizer's cached ControlTokens. The first text with a marker takes 80 ms."""
    return ControlTokens(tokenizer)


class Guard:
    """Replaces characters in a request's values by stand-ins, and restores them after rendering.

    `letters` maps stand-ins to characters. It is empty if no text contains part of a marker.
    """

    def __init__(self, controls: ControlTokens, *values: Any) -> None:
        """`values` are all guarded values. Their characters are not used as stand-ins."""
        self._controls, self._values = controls, values
        self.letters: dict[str, str] = {}
        self._stand_ins: dict[str, str] = {}
        self._codes = iter(_STAND_INS)
        self._used: set[str] | None = None  # all characters of the values

    def messages(self, messages: Sequence[Json]) -> list[Json]:
        """Messages as a template gets them. Their roles stay, and so does a thought that the template looks for."""
        return [_same(each, {key: self._field(each, key, value) for key, value in each.items()}) for each in messages]

    def value(self, value: Any) -> Any:
        return self._value(value, is_free=False)

    def json(self, text: str) -> str:
        whole, place, pieces = text, 0, []
        for match in _JSON_STRING.finditer(text):  # JSON itself surrounds its strings
            pieces += [text[place : match.start(1)], self._text(match[1], is_free=False)]
            place = match.end(1)
        text = "".join([*pieces, text[place:]])
        found = {match.start() for match in self._controls._find.finditer(text)}
        return self._put(text, found) if found else text if text != whole else whole

    def restored(self, text: str) -> str:
        for stand_in, letter in self.letters.items():
            text = text.replace(stand_in, letter)
        return text

    def free(self) -> str:
        """Returns a character that occurs nowhere."""
        if self._used is None:
            template = self._controls.tokenizer.chat_template
            self._used = set(json.dumps([self._values, template], ensure_ascii=False, default=str))
        letter = next((chr(code) for code in self._codes if chr(code) not in self._used), None)
        if letter is None:
            raise invalid("the text uses every private-use character of Unicode, so its markers cannot be escaped")
        return letter

    def _field(self, message: Json, key: str, value: Any) -> Any:
        if key == "role" and value in ROLES:
            return value
        if key == "tool_calls" and isinstance(value, list):
            return _same(value, [self._call(call) for call in value])
        if key == "content" and isinstance(value, str) and message.get("role") == "assistant":
            return self._reply(value, has_thought=isinstance(message.get("reasoning_content"), str))
        return self._value(value, is_free=key in _FREE)

    def _call(self, call: Any) -> Any:
        if not isinstance(call, dict):
            return self._value(call, is_free=False)
        return _same(call, {key: self._call_field(key, value) for key, value in call.items()})

    def _call_field(self, key: str, value: Any) -> Any:
        if key == "arguments" and isinstance(value, str):
            return self.json(value)
        return self._call(value) if key == "function" else self._value(value, is_free=False)

    def _reply(self, text: str, *, has_thought: bool) -> str:
        """Returns the assistant's content. Leading thoughts remain thoughts if the template supports them."""
        template = str(self._controls.tokenizer.chat_template)
        before, begin, rest = text.partition(THINK)
        thought, end, answer = rest.partition(THINK_END)
        if has_thought or before.strip() or not begin or not end or THINK_END not in template:
            return self._text(text, is_free=True)
        guarded = [self._text(part, is_free=False) for part in (thought, answer)]
        return text if guarded == [thought, answer] else f"{before}{begin}{guarded[0]}{end}{guarded[1]}"

    def _value(self, value: Any, *, is_free: bool) -> Any:
        if isinstance(value, str):
            return self._text(value, is_free=is_free)
        if isinstance(value, list):
            return _same(value, [self._value(item, is_free=is_free) for item in value])
        if isinstance(value, dict):
            guarded = {
                self._key(key): self._value(item, is_free=is_free and key in _FREE) for key, item in value.items()
            }
            return _same(value, guarded)
        return value

    def _key(self, key: Any) -> Any:
        """Templates look up identifiers, such as "type"; others may be text, as a property's name."""
        return self._text(key, is_free=False) if isinstance(key, str) and not key.isidentifier() else key

    def _text(self, text: str, *, is_free: bool) -> str:
        places = self._controls.places(text, is_free=is_free)
        return self._put(text, places) if places else text

    def _put(self, text: str, places: set[int]) -> str:
        letters = list(text)
        for place in places:
            letter = letters[place]
            if letter not in self._stand_ins:
                self._stand_ins[letter] = self.free()
                self.letters[self._stand_ins[letter]] = letter
            letters[place] = self._stand_ins[letter]
        return "".join(letters)


def _same(value: Any, guarded: Any) -> Any:
    """Returns the same object if nothing changed, so the caller can compare by identity."""
    pairs = zip(value, guarded, strict=True)
    if isinstance(value, dict):
        pairs = zip((*value, *value.values()), (*guarded, *guarded.values()), strict=True)
    return value if all(old is new for old, new in pairs) else guarded


def _has(text: str, letters: str) -> bool:
    for letter in letters:  # noqa: SIM110  (this is asked of every text, and any() takes twice as long)
        if letter in text:
            return True
    return False


def _finder(marks: Sequence[str]) -> "re.Pattern[str]":
    """Matches all positions where a mark begins, also inside other marks. The group is the longest mark's rest."""
    by_first: dict[str, list[str]] = {}
    for mark in sorted(marks, key=len, reverse=True):
        by_first.setdefault(mark[0], []).append(re.escape(mark[1:]))
    return re.compile(
        "|".join(f"{re.escape(first)}(?=({'|'.join(rest)}))" for first, rest in by_first.items()) or "(?!)"
    )


def _folded(text: str) -> str:
    """Returns the text without properties that a normalizer may remove: case, accents, width, invisible characters."""
    return text.lower().translate(_CONTROL) if text.isascii() else "".join(map(_folded_letter, text))


@cache
def _folded_letter(letter: str) -> str:
    plain = unicodedata.normalize("NFKD", letter.replace("\u2581", " ")).lower()
    return "".join(
        part for part in plain if part.isspace() or not unicodedata.category(part).startswith(("M", "Cc", "Cf"))
    )
