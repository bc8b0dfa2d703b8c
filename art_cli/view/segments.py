"""A turn as segments: tokens from earlier turns, the chat template, messages, tool results, sampled tokens.

    context    tokens from an earlier turn at the start of the prompt
    template   prompt tokens outside of messages: roles, separators, tool definitions
    message    the text of a system or user message
    tool       the text of a tool result
    sampled    the model's output in this turn

Messages are located in a prompt by their text, in conversation order. Text modified by the template is not found and
counts as template.

TokenTexts converts tokens to text with the run's tokenizer. Its tokenizer.json is searched in the newest checkpoint,
the run's base, the base named in config.json, and the Hugging Face hub cache. No torch, no network.
"""

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from art_cli.runs.durable import read_object
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, Trajectory, Turn, sequence
from art_cli.runtime.errors import ArtError
from art_cli.view.rows import text_of

FILE = "tokenizer.json"
MAX_FILE = 256 * 2**20  # maximum bytes of a tokenizer; 262,000 tokens take 33 MB
MAX_OTHER_TOKENS = 300_000  # tokens from earlier turns that are decoded again, in 2 s or less
MAX_CONVERSATIONS = 64  # number of conversations searched for a prompt's messages
SegmentKind = Literal["template", "context", "message", "tool", "sampled"]
Learned = Mapping[str, Any]  # the trajectory's line in learned.jsonl


class TokenTexts:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream: Any = importlib.import_module("tokenizers.decoders").DecodeStream

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns each token's text. Of a character that spans several tokens, the last token has the text."""
        found: list[str] = []
        stream = self._stream(skip_special_tokens=False)
        for id in ids:
            try:
                is_known = self._tokenizer.id_to_token(id) is not None
                piece = stream.step(self._tokenizer, id) if is_known else f"<{id}>"
            except Exception:  # boundary to the tokenizer: invalid ids, or bytes that are not text
                stream = self._stream(skip_special_tokens=False)
                piece = f"<{id}>"
            found.append(piece or "")
        return found


def find_tokenizer(run: RunDir | None) -> TokenTexts | None:
    """Returns the run's tokenizer, if it is readable and `tokenizers` is installed."""
    if run is None:
        return None
    for path in _places(run):
        if path.is_file() and path.stat().st_size <= MAX_FILE and (texts := _load(path)) is not None:
            return texts
    return None


def _load(path: Path) -> TokenTexts | None:
    try:
        tokenizers = importlib.import_module("tokenizers")
        return TokenTexts(tokenizers.Tokenizer.from_file(str(path)))
    except Exception:  # not installed, or the boundary to tokenizers, which raises plain Exceptions
        return None


def _places(run: RunDir) -> Iterator[Path]:
    for step in reversed(run.checkpoint_steps()):
        yield run.checkpoint_path(step) / FILE
    yield run.base / FILE
    base = _base(run)
    if not base:
        return
    yield Path(base).expanduser() / FILE
    yield from _cached(base)


def _base(run: RunDir) -> str:
    try:
        section = read_object(run.config_path, within=run.root).get("model")
    except ArtError:
        return ""
    base = section.get("base") if isinstance(section, Mapping) else None
    return base if isinstance(base, str) else ""


def _cached(base: str) -> Iterator[Path]:
    """Yields a hub model's files in the local cache, following huggingface_hub's layout."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    if base.count("/") == 1 and ".." not in base:
        yield from sorted((cache / f"models--{base.replace('/', '--')}" / "snapshots").glob(f"*/{FILE}"))


class TurnSegment(msgspec.Struct):
    """Tokens of the same kind. [N] marks lists with a value per token.

    Example: TurnSegment("sampled", "right", 2, ["right", "<|end|>"], [284, 2], [-1.63, -0.0])
    """

    kind: SegmentKind
    text: str
    num_tokens: int
    tokens: list[str] | None = None  # [N] texts; missing for context, or without a tokenizer
    ids: list[int] = []  # [N]; empty for context
    logprobs: list[float] | None = None  # [N] engine logprobs in nats, if sampled here
    learner_logprobs: list[float | None] | None = None  # [N] learner logprobs before the update
    advantages: list[float | None] | None = None  # [N]


class ShownTurn(msgspec.Struct):
    index: int
    parent: int | None
    kept: int
    step: int
    temperature: float
    finish_reason: str
    is_abandoned: bool
    segments: list[TurnSegment]
    conversation: int | None = None  # 0: `messages`, 1 and up: `branches`
    message: int | None = None  # position of the reply in the conversation


class _Place(NamedTuple):
    """The messages of a conversation shown after a turn."""

    conversation: int
    num_messages: int


class _Budget:
    """Limits the number of decoded tokens in addition to each turn's new tokens, which are always decoded."""

    def __init__(self, num: int) -> None:
        self._num = num

    def takes(self, num: int) -> bool:
        is_enough = num <= self._num
        self._num -= num if is_enough else 0
        return is_enough


def show_turns(trajectory: Trajectory, texts: TokenTexts | None, learned: Learned | None) -> list[ShownTurn]:
    """Returns the trajectory's turns; texts require a tokenizer."""
    shown, places, lengths = [], list[_Place](), list[int]()
    budget = _Budget(MAX_OTHER_TOKENS if texts is not None else 0)
    for index, turn in enumerate(trajectory.turns):
        goes_on = turn.parent is not None and turn.kept == lengths[turn.parent]
        segments, place = _prompt_segments(trajectory, index, places, texts, budget, goes_on=goes_on)
        places.append(place)
        kept = min(turn.kept, lengths[turn.parent]) if turn.parent is not None else 0
        lengths.append(kept + len(turn.prompt_ids) + len(turn.sampled_ids))
        if turn.parent is not None and kept:
            context = sequence(trajectory.turns, turn.parent)[:kept] if budget.takes(kept) else []
            text = "" if texts is None else "".join(texts.pieces(context))
            segments.insert(0, TurnSegment("context", text, kept))
        segments.append(_sampled(turn, index, texts, learned))
        conversation, message = _reply_of(trajectory, place)
        shown.append(
            ShownTurn(
                index=index,
                parent=turn.parent,
                kept=turn.kept,
                step=turn.step,
                temperature=turn.temperature,
                finish_reason=turn.finish_reason,
                is_abandoned=turn.is_abandoned,
                segments=segments,
                conversation=conversation,
                message=message,
            )
        )
    return shown


def _reply_of(trajectory: Trajectory, place: _Place) -> tuple[int | None, int | None]:
    """Returns the turn's last message as (conversation, position)."""
    conversation = [trajectory.messages, *trajectory.branches][place.conversation]
    is_reply = 0 < place.num_messages <= len(conversation)
    if is_reply and conversation[place.num_messages - 1].get("role") == "assistant":
        return place.conversation, place.num_messages - 1
    return None, None


def _sampled(turn: Turn, index: int, texts: TokenTexts | None, learned: Learned | None) -> TurnSegment:
    tokens = texts.pieces(turn.sampled_ids) if texts is not None else None
    num = len(turn.sampled_ids)
    return TurnSegment(
        "sampled",
        "".join(tokens or ()),
        num,
        tokens,
        turn.sampled_ids,
        turn.logprobs,
        learner_logprobs=_of_turn(learned, "logprobs", index, num),
        advantages=_of_turn(learned, "advantages", index, num),
    )


def _of_turn(learned: Learned | None, name: str, index: int, num: int) -> list[float | None] | None:
    """Returns a turn's numbers: one per token, or a single value for all; None for a wrong length."""
    turns = (learned or {}).get(name)
    numbers = turns[index] if isinstance(turns, list) and index < len(turns) else None
    if isinstance(numbers, int | float):
        return [float(numbers)] * num
    if not isinstance(numbers, list) or len(numbers) != num:
        return None
    return [float(each) if isinstance(each, int | float) else None for each in numbers]


# --- the prompt -------------------------------------------------------------------------------------------------------


def _prompt_segments(
    trajectory: Trajectory,
    index: int,
    places: Sequence[_Place],
    texts: TokenTexts | None,
    budget: _Budget,
    *,
    goes_on: bool,
) -> tuple[list[TurnSegment], _Place]:
    """Returns the segments of the prompt's new tokens, and the conversation position after the reply.

    If `goes_on`, the prompt starts with all the parent's tokens, so only messages after the parent's reply are
    searched. Otherwise, messages of the whole prompt are searched.
    """
    turn = trajectory.turns[index]
    if texts is None:
        return [TurnSegment("template", "", len(turn.prompt_ids), None, turn.prompt_ids)], _Place(0, 0)
    begun, kept = _Place(0, 0), list[int]()
    if turn.parent is not None and goes_on:
        begun = places[turn.parent]
    elif turn.parent is not None and budget.takes(turn.kept):
        kept = sequence(trajectory.turns, turn.parent)[: turn.kept]
    ids = [*kept, *turn.prompt_ids]
    pieces = texts.pieces(ids)
    kinds, place = _kinds(pieces, trajectory, begun)
    new = range(len(kept), len(ids))
    segments = [_segment(kind, list(run), pieces, ids) for kind, run in groupby(new, key=kinds.__getitem__)]
    return segments, place


def _segment(kind: SegmentKind, places: Sequence[int], pieces: Sequence[str], ids: Sequence[int]) -> TurnSegment:
    tokens = [pieces[place] for place in places]
    return TurnSegment(kind, "".join(tokens), len(tokens), tokens, [ids[place] for place in places])


def _kinds(pieces: Sequence[str], trajectory: Trajectory, begun: _Place) -> tuple[list[SegmentKind], _Place]:
    """Returns the kind of each piece, using the conversation that covers the largest part of the text."""
    text = "".join(pieces)
    conversations = [trajectory.messages, *trajectory.branches][:MAX_CONVERSATIONS]
    told = conversations[begun.conversation][: begun.num_messages]
    best: list[tuple[int, int, SegmentKind]] = []
    place, most = begun, -1
    for number, conversation in enumerate(conversations):
        if conversation[: len(told)] != told:
            continue
        spans, end = _spans(text, conversation, len(told))
        covered = sum(stop - start for start, stop, _ in spans)
        if covered > most:
            best, place, most = spans, _Place(number, end), covered
    return _label(pieces, best), place


def _spans(text: str, conversation: Sequence[Json], start: int) -> tuple[list[tuple[int, int, SegmentKind]], int]:
    """Returns (begin, end, kind) of the located messages from `start` on, and the position after the reply."""
    spans: list[tuple[int, int, SegmentKind]] = []
    cursor, end = 0, start
    for number, message in enumerate(conversation[start:], start):
        content = text_of(message.get("content")).strip()
        role = message.get("role")
        found = text.find(content, cursor) if content else -1
        if found < 0:
            if role == "assistant":  # the reply of this turn, or a text modified by the template
                continue
            if content:
                break
        else:
            cursor = found + len(content)
            if role != "assistant":
                spans.append((found, cursor, "tool" if role == "tool" else "message"))
        end = number + 1
    if end < len(conversation) and conversation[end].get("role") == "assistant":
        end += 1
    return spans, end


def _label(pieces: Sequence[str], spans: Sequence[tuple[int, int, SegmentKind]]) -> list[SegmentKind]:
    """Returns each piece's kind, of the span in which it begins; without text, the previous piece's."""
    kinds: list[SegmentKind] = []
    waiting = list(reversed(spans))
    for start, piece in zip(accumulate(map(len, pieces), initial=0), pieces, strict=False):
        while waiting and waiting[-1][1] <= start:
            waiting.pop()
        inside = bool(waiting) and start + len(piece) > waiting[-1][0]
        kind: SegmentKind = waiting[-1][2] if inside else "template"
        kinds.append(kinds[-1] if not piece and kinds else kind)
    return kinds
