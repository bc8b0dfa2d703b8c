"""Text and tokens: Detokenizer makes text of sampled tokens by pieces, StopWatch ends it; TextEncoder is the reverse.

The text of streamed and of whole replies comes from here, so that the streamed pieces joined are the whole reply. It
knows neither messages (chat_prompts.py) nor torch.

TextEncoder remembers tokens, because most of a text was tokenized before: a conversation that goes on sends its earlier
messages again, and the attempts of a group send the same first ones. Chat templates write each message behind a special
token, such as <|im_start|>, and a tokenizer cuts a text at its special tokens before it does anything else. So the part
from one special token up to the next has the same tokens in any text. A tokenizer in which a part's tokens could depend
on what stands before it is used on whole texts, and so is every tokenizer where the caller wants its extra tokens.

ChatTemplate is the model's own template: the variables it reads, and its text of a conversation, up to a length.
transformers compiles it, in its sandbox. It is the only template that ever runs: a client may set variables that it
reads, and nothing else. The text is made piece by piece, so that one that is too long is refused before it is whole.
"""

import json
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any

from jinja2 import meta
from transformers.utils import chat_template_utils as compiling

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.control_tokens import ControlTokens, Guard
from art_cli.chat.requests import RENDERERS_OWN, Json

_ALIASED = getattr(compiling, "_alias_reasoning_fields", list)  # transformers 5.17 gives templates messages as they are


class TooLong(Exception):
    """The text is longer than the caller allows."""


class ChatTemplate:
    """One tokenizer's template. Some tokenizers have a second one for conversations with tools."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, frozenset[str]] = {}  # template -> the variables that a client may set

    def render(
        self, messages: list[Json], tools: list[Json], variables: Json, *, most: int, wishes: Json | None = None
    ) -> str:
        """Returns the prompt's text, `most` characters at most. Raises TooLong; ChatError 400 if the template refuses
        it.

        `wishes` are variables that are set where the template reads them and `variables` does not set them.
        The same text as `tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)`.
        """
        try:
            source = self._tokenizer.get_chat_template(None, tools or None)
            self._check(source, variables)
            wished = {name: value for name, value in (wishes or {}).items() if name in self._read_by(source)}
            pieces = compiling._compile_jinja_template(source).generate(
                messages=_ALIASED(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
                **self._tokenizer.special_tokens_map,
                **wished | variables,
            )
            return _joined(pieces, most)
        except (ChatError, TooLong):
            raise
        except Exception as error:  # a template is a program of its own and fails in any way
            summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise invalid(f"messages: the chat template refused them: {summary}", "messages") from error

    def _check(self, source: str, variables: Json) -> None:
        for name in sorted(variables.keys() - self._read_by(source)):
            param = f"chat_template_kwargs.{name[:80]}"
            reads = ", ".join(sorted(self._read_by(source))) or "no variables"
            raise invalid(f"{param}: this model's chat template does not read it; it reads {reads}", param)

    def _read_by(self, source: str) -> frozenset[str]:
        """Returns the variables that a template reads and that only a client sets."""
        if source not in self._variables:
            environment = compiling._compile_jinja_template(source).environment
            read = meta.find_undeclared_variables(environment.parse(source))
            self._variables[source] = frozenset(read - RENDERERS_OWN - self._tokenizer.special_tokens_map.keys())
        return self._variables[source]


def _joined(pieces: Any, most: int) -> str:
    texts, length = [], 0
    for piece in pieces:
        texts.append(piece)
        length += len(piece)
        if length > most:
            raise TooLong
    return "".join(texts)


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


UNKNOWN = "\ufffd"  # the replacement character: bytes that are no character are decoded to it
MAX_WAITING = 16  # most tokens that wait for the end of a character; its bytes are in 4, the others have no text
FEW = 12  # most tokens whose text is remembered; the ends of prompts, and short replies, come again and again
MAX_KNOWN = 4096  # number of texts that are remembered
MAX_UNKNOWN = 3  # most U+FFFD that the beginning of a character is decoded to, one for each byte
SURE = 8  # characters per token; a text with more is tokenized in parts first; English has 4 to 5
SMALLEST_PART = 4096  # characters
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Markers that stay in the text even where they are special tokens, because messages are read from them.
SHOWN = (*MARKERS, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>")


class Vocabulary:
    """A tokenizer as the engine uses it: tokens of text, text of tokens, and which tokens are never shown."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self.controls = ControlTokens(tokenizer)
        self._encoder = TextEncoder(tokenizer)
        shown = {tokenizer.convert_tokens_to_ids(marker) for marker in SHOWN} - {tokenizer.unk_token_id}
        special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.hidden = frozenset(special | set(tokenizer.all_special_ids)) - shown
        self._size = 1 + max(tokenizer.get_vocab().values())
        self._texts: dict[int, str] = {}
        self._decode_few = lru_cache(MAX_KNOWN)(self._decode)

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token. A text of more than n times as many has more than n tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str, *, most: int, adds_special: bool) -> list[int] | None:
        """Returns the tokens of a text, or None for more than `most`. A far longer text is not tokenized as a whole."""
        if len(text) > most * self.longest or (len(text) > SURE * most and self._is_too_long(text, most)):
            return None
        ids = self._encoder.encode(text, adds_special=adds_special)
        return ids if len(ids) <= most else None

    def encode_chat(self, text: str, guard: Guard, *, most: int) -> list[int] | None:
        """Returns the same of a text that the chat template made of guarded values. Raises as ControlTokens does."""
        whole = guard.restored(text)
        if len(whole) > most * self.longest or (len(whole) > SURE * most and self._is_too_long(whole, most)):
            return None
        ids = self._encoder.encode_chat(text, guard, self.controls)
        return ids if len(ids) <= most else None

    def _is_too_long(self, text: str, most: int) -> bool:
        """Returns whether the parts of a text have more tokens than `most`, with room for extra tokens at the cuts."""
        num_tokens = 0
        for number, start in enumerate(range(0, len(text), size := max(most, SMALLEST_PART)), 1):
            num_tokens += len(self.tokenizer.encode(text[start : start + size], add_special_tokens=False))
            if num_tokens > most + most // 8 + 8 * number:
                return True
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of these tokens without the hidden ones."""
        shown = tuple(self.shown(ids))
        return self._decode_few(shown) if len(shown) <= FEW else self._decode(shown)

    def _decode(self, shown: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(shown), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def shown(self, ids: Iterable[int]) -> list[int]:
        """Returns the tokens that have text. A model may have rows beyond its tokenizer's last token."""
        return [id for id in ids if id < self._size and id not in self.hidden]

    def text_of(self, id: int) -> str:
        """Returns one token as text; "" for a hidden one. Parts of characters become lone surrogates (PEP 383)."""
        if id not in self._texts:
            text = self.decode([id])
            data = _bytes_of(self.tokenizer.convert_ids_to_tokens(id)) if UNKNOWN in text else None
            self._texts[id] = text if data is None else data.decode(errors="surrogateescape")
        return self._texts[id]


def _bytes_of(token: str | None) -> bytes | None:
    """Returns the bytes of a byte-level token or of a byte token such as <0xE4>, or None for others."""
    if token is None:
        return None
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Returns the byte of each letter in a byte-level vocabulary: `bytes_to_unicode` of GPT-2's encoder.py."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


class Detokenizer:
    """Text that grows by tokens and never shows a part of a character.

    In some tokenizers a token's text depends on the token before it (a leading space dropped at the start). So each
    piece is the end of a decoding that begins where the text was whole. At most MAX_WAITING tokens wait for the end of
    a character, so that each token is decoded a bounded number of times.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: the last tokens of the prompt."""
        self._vocabulary = vocabulary
        self._ids = vocabulary.shown(context)  # tokens that the next decoding begins with
        self._num_shown = len(self._ids)  # how many of them have been shown, apart from held characters
        self._length = len(vocabulary.decode(self._ids))  # characters of the decoding that have been shown

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text that these tokens add. An unfinished character waits for the next call."""
        self._ids.extend(self._vocabulary.shown(ids))
        text = self._new_text()
        if not text.endswith(UNKNOWN):
            return self._show(text, 0)
        if len(self._ids) - self._num_shown <= MAX_WAITING:
            return ""
        return self._show(text, min(MAX_UNKNOWN, len(text) - len(text.rstrip(UNKNOWN))))

    def flush(self) -> str:
        """Returns the text that still waits, with U+FFFD for an unfinished character."""
        return self._show(self._new_text(), 0)

    def _new_text(self) -> str:
        return self._vocabulary.decode(self._ids)[self._length :]

    def _show(self, text: str, num_held: int) -> str:
        """Returns the text without its last `num_held` characters, which may change. The next decoding begins later."""
        if text and not num_held:
            self._begin(self._ids[self._num_shown :], 0)
        elif len(self._ids) - self._num_shown > MAX_WAITING:
            self._begin(self._ids[-MAX_WAITING:], num_held)
        return text[: len(text) - num_held]

    def _begin(self, ids: list[int], num_held: int) -> None:
        self._ids, self._num_shown = ids, len(ids)
        self._length = len(self._vocabulary.decode(ids)) - num_held


class StopWatch:
    """Cuts a growing text before the first stop string. Holds back an end that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the stop string that the text was cut before

    @property
    def is_stopped(self) -> bool:
        return self.found is not None

    def push(self, text: str) -> str:
        """Returns the text that may be shown now; "" after a stop string was found."""
        if self.is_stopped:
            return ""
        text = self._held + text
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            start, self.found = min(found)
            self._held = ""
            return text[:start]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`. overlap("a <to", "<tool>") is 3.

    A whole `marker` does not count.
    """
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
