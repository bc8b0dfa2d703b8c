"""Text and tokens: Detokenizer turns sampled tokens into text, StopWatch ends it, TextEncoder tokenizes text.

Streamed and whole replies both get their text here, so streamed pieces always join to the whole reply. This module
knows neither messages (chat_prompts.py) nor torch.

TextEncoder caches tokens because most text was tokenized before: a continued conversation resends its earlier messages,
and all attempts in a group send the same opening messages. Chat templates write each message behind a special token,
such as <|im_start|>, and tokenizers split text at special tokens initially. So a part from one special token
to the next has the same tokens in any text. Texts are tokenized whole if a part's tokens could depend on preceding
text, or if the caller wants the tokenizer's extra tokens.

ChatTemplate is the model's own template: it lists the variables and renders conversations up to a length limit.
transformers compiles it, in its sandbox. Clients can never supply a template, only set variables the template reads.
Text is generated piece by piece, so an overlong prompt is rejected before it is complete.
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

_ALIASED = getattr(compiling, "_alias_reasoning_fields", list)  # transformers 5.17 passes messages unchanged

MAX_KEPT = 16 * 2**20  # bytes of all cached parts
PART_BYTES = 400  # memory per cached part in addition to its characters and tokens: 340 measured
MAX_NEW = 64  # new parts tokenized one by one; a text with more is tokenized whole
MAX_PART = 2**16  # characters of the longest cached part
# Tokenizer steps that treat every part separately. Others, such as Metaspace, may treat a text's beginning differently.
SEPARATE = frozenset({"Split", "Digits", "ByteLevel", "Whitespace", "WhitespaceSplit", "Punctuation", "UnicodeScripts"})
NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace", "StripAccents"})
UNKNOWN = "\ufffd"  # the replacement character that invalid bytes decode to
MAX_WAITING = 16  # tokens that may wait for a character to complete; characters have 4 bytes, other tokens no text
FEW = 12  # longest token sequence whose text is cached: prompt ends and short replies recur often
MAX_KNOWN = 4096  # number of cached texts
MAX_UNKNOWN = 3  # U+FFFD count in an incomplete character, at most one for each byte
SURE = 8  # characters per token; longer texts are tokenized in parts as a check; English has 4 to 5
SMALLEST_PART = 4096  # characters
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Markers kept in the text even if they are special tokens, because messages are parsed from them.
SHOWN = (*MARKERS, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|tool_call|>", "<|/tool_call|>")


class TooLong(Exception):
    """The text exceeds the caller's limit."""


class ChatTemplate:
    """A tokenizer's chat template. Some tokenizers have a second template for conversations with tools."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, frozenset[str]] = {}  # template -> variables that clients may set

    def render(
        self, messages: list[Json], tools: list[Json], variables: Json, *, most: int, wishes: Json | None = None
    ) -> str:
        """Returns the prompt text, at most `most` characters. Raises TooLong; ChatError 400 if the template fails.

        `wishes` are default values for variables that the template reads.
        The text equals `tokenizer.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)`.
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
        except Exception as error:  # a template is an arbitrary program and can fail in any way
            summary = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if any(len(message.get("tool_calls") or ()) > 1 for message in messages):  # Llama's takes one
                summary += "; with parallel_tool_calls=false (disable_parallel_tool_use) a reply has one call at most"
            raise invalid(f"messages: the chat template refused them: {summary}", "messages") from error

    def _check(self, source: str, variables: Json) -> None:
        for name in sorted(variables.keys() - self._read_by(source)):
            param = f"chat_template_kwargs.{name[:80]}"
            reads = ", ".join(sorted(self._read_by(source))) or "no variables"
            raise invalid(f"{param}: this model's chat template does not read it; it reads {reads}", param)

    def _read_by(self, source: str) -> frozenset[str]:
        """Returns the template's variables that only clients set."""
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


class TextEncoder:
    """Cached tokenization with a transformers tokenizer. Thread-safe. Tokens added later are not noticed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._marks = _marks(tokenizer)
        self._known: OrderedDict[str, array[int]] = OrderedDict()  # part -> tokens, most recently used last
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, adds_special: bool) -> list[int]:
        """Equals `tokenizer.encode(text, add_special_tokens=adds_special)`."""
        if adds_special or self._marks is None:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special)
            return ids
        parts = _cut(text, self._marks)
        if sum(part not in self._known for part in parts) > MAX_NEW:
            return self._whole(text)
        return [id for part in parts for id in self._of_part(part)]

    def encode_chat(self, text: str, guard: Guard, controls: ControlTokens) -> list[int]:
        """Returns the tokens of text rendered by the chat template from guarded values. Raises like ControlTokens.

        Parts containing would-be control tokens are cached separately from the others.
        """
        whole = guard.restored(text)
        if not controls.differ(text, whole):
            return self.encode(whole, adds_special=False)
        cuts = [] if self._marks is None or controls.folds else _cut(text, self._marks)
        parts = [(part, guard.restored(part)) for part in cuts]
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
        """`apart`: a part that contains markers as text, with stand-ins and without."""
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
    """Splits a text into the part before any mark, and each mark with the text that follows."""
    starts = [found.start() for found in marks.finditer(text)]
    if starts[:1] != [0]:
        starts.insert(0, 0)
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _marks(tokenizer: Any) -> "re.Pattern[str] | None":
    """Returns a pattern for special tokens at which text may be cut; None when none exist or cutting is unsafe."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.encode_special_tokens or getattr(tokenizer, "split_special_tokens", False):
        return None
    if not (_is_separate(backend.pre_tokenizer, SEPARATE) and _is_separate(backend.normalizer, NORMALIZERS)):
        return None
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.content]
    if any(token.lstrip or token.single_word for token in added):  # these look at surrounding text
        return None
    plain = [token.content for token in added if token.special and not token.rstrip and not token.normalized]
    marks = [mark for mark in plain if not any(_overlaps(token.content, mark) for token in added)]
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def _overlaps(other: str, mark: str) -> bool:
    """Returns True if an occurrence of `mark` in a text may lie or begin inside an occurrence of the token `other`."""
    if other == mark:
        return any(mark[-length:] == mark[:length] for length in range(1, len(mark)))
    if mark in other or other in mark:
        return True
    return any(other[-length:] == mark[:length] for length in range(1, min(len(other), len(mark))))


def _is_separate(step: Any, kinds: frozenset[str]) -> bool:
    """Returns True if all parts of the tokenizer step have these kinds."""
    return step is None or _are_kinds(json.loads(step.__getstate__()), kinds)


def _are_kinds(described: dict[str, Any], kinds: frozenset[str]) -> bool:
    steps = described.get("pretokenizers") or described.get("normalizers")
    if described["type"] == "Sequence" and steps is not None:
        return all(_are_kinds(each, kinds) for each in steps)
    return described["type"] in kinds


class Vocabulary:
    """The engine's view of a tokenizer: text to tokens, tokens to text, and which tokens are hidden."""

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
        """Length of the longest token in characters. A text n times as long has at least n tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(
        self, text: str, *, most: int, adds_special: bool = False, guard: Guard | None = None
    ) -> list[int] | None:
        """Returns the tokens; None when they exceed `most`. Overlong texts are rejected without tokenizing them whole.

        `guard`: the chat template has rendered the text from its values. Raises like ControlTokens.
        """
        whole = text if guard is None else guard.restored(text)
        if len(whole) > most * self.longest or (len(whole) > SURE * most and self._is_too_long(whole, most)):
            return None
        if guard is None:
            ids = self._encoder.encode(text, adds_special=adds_special)
        else:
            ids = self._encoder.encode_chat(text, guard, self.controls)
        return ids if len(ids) <= most else None

    def _is_too_long(self, text: str, most: int) -> bool:
        """Returns True if the text's parts have more than `most` tokens, with slack for extra tokens at the cuts."""
        num_tokens = 0
        for number, start in enumerate(range(0, len(text), size := max(most, SMALLEST_PART)), 1):
            num_tokens += len(self.tokenizer.encode(text[start : start + size], add_special_tokens=False))
            if num_tokens > most + most // 8 + 8 * number:
                return True
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the tokens' text without hidden tokens."""
        shown = tuple(self.shown(ids))
        return self._decode_few(shown) if len(shown) <= FEW else self._decode(shown)

    def _decode(self, shown: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(shown), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def shown(self, ids: Iterable[int]) -> list[int]:
        """Returns the tokens with text. A model may have rows beyond its tokenizer's last token."""
        return [id for id in ids if id < self._size and id not in self.hidden]

    def text_of(self, id: int) -> str:
        """Returns a token's text; "" if hidden. Parts of characters become lone surrogates (PEP 383)."""
        if id not in self._texts:
            text = self.decode([id])
            data = _bytes_of(self.tokenizer.convert_ids_to_tokens(id)) if UNKNOWN in text else None
            self._texts[id] = text if data is None else data.decode(errors="surrogateescape")
        return self._texts[id]


def _bytes_of(token: str | None) -> bytes | None:
    """Returns the bytes behind a byte-level token or a byte token such as <0xE4>."""
    if token is None:
        return None
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else None


@cache
def _byte_letters() -> dict[str, int]:
    """Maps letters of byte-level vocabularies to bytes: `bytes_to_unicode` in GPT-2's encoder.py."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}


class Detokenizer:
    """Text that grows by tokens and never shows incomplete characters.

    In some tokenizers a token's text depends on the previous token (a leading space is dropped at the start). So each
    new piece is cut from a decoding that starts at a clean boundary. At most MAX_WAITING tokens wait for a character to
    complete, so each token is decoded a bounded number of times.
    """

    def __init__(self, vocabulary: Vocabulary, context: Sequence[int] = ()) -> None:
        """`context`: the prompt's trailing tokens."""
        self._vocabulary = vocabulary
        self._ids = vocabulary.shown(context)  # tokens that the next decoding starts with
        self._num_shown = len(self._ids)  # how many were already shown, apart from held characters
        self._length = len(vocabulary.decode(self._ids))  # characters of the decoding already shown

    def push(self, ids: Iterable[int]) -> str:
        """Returns the text added by these tokens. An incomplete character waits for the next call."""
        self._ids.extend(self._vocabulary.shown(ids))
        text = self._new_text()
        if not text.endswith(UNKNOWN):
            return self._show(text, 0)
        if len(self._ids) - self._num_shown <= MAX_WAITING:
            return ""
        return self._show(text, min(MAX_UNKNOWN, len(text) - len(text.rstrip(UNKNOWN))))

    def flush(self) -> str:
        """Returns the remaining text, with U+FFFD for an incomplete character."""
        return self._show(self._new_text(), 0)

    def _new_text(self) -> str:
        return self._vocabulary.decode(self._ids)[self._length :]

    def _show(self, text: str, num_held: int) -> str:
        """Returns the text minus `num_held` characters that may still change, and moves the decoding start."""
        if text and not num_held:
            self._begin(self._ids[self._num_shown :], 0)
        elif len(self._ids) - self._num_shown > MAX_WAITING:
            self._begin(self._ids[-MAX_WAITING:], num_held)
        return text[: len(text) - num_held]

    def _begin(self, ids: list[int], num_held: int) -> None:
        self._ids, self._num_shown = ids, len(ids)
        self._length = len(self._vocabulary.decode(ids)) - num_held


class StopWatch:
    """Cuts growing text at the earliest stop string. Holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the matched stop string

    def push(self, text: str) -> str:
        """Returns text that can be shown now; "" after a match."""
        if self.found is not None:
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
    """Returns the length of an incomplete `marker` at the end of `text`, or 0. overlap("a <to", "<tool>") is 3."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
