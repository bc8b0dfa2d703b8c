"""Renders a group for the judge: tools once, shared messages once, then the rest of each attempt under a neutral id.

Pure and seeded, except for reading the instructions and rubric files. Every mark line contains a code of digits that
occurs in no text of the group, and texts are always on separate lines, so no text can imitate a mark:

    The record. Lines that start with "<482913 " are its marks.
    <482913 part 1>
    <482913 system>
    You play chess.
    <482913 attempt k4b after part 1>
    <482913 assistant>
    e4
    <482913 end>
    Score each of these 1: k4b
"""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.config.schema import RulerJudgeConfig
from art_cli.judges.judge_text import clean
from art_cli.judges.ruler import attempt_tree
from art_cli.judges.ruler.attempt_tree import Attempt, Message, Segment
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import UsageError

PASSAGE_LENGTH = 200  # characters; a reference costs two marks of about 10 tokens each
RUBRIC = "{rubric}"  # placeholder for the rubric in the instructions
_CONSONANTS = "bcdfghjkmnpqrstvwxz"  # no vowels, so ids are never words and none sounds better


class JudgePrompt(NamedTuple):
    """The messages to send, and the ids and positions of the G attempts in their original order.

    Example: JudgePrompt(messages=[system, user], ids=["k4b", "w9c"], positions=[1, 0]) shows the second attempt first.
    """

    messages: list[Json]
    ids: list[str]  # [G]
    positions: list[int]  # [G] prompt positions, 0 first


def write_prompt(
    attempts: Sequence[Attempt], *, order: Sequence[int], tools: Sequence[Json], instructions: str, seed: str
) -> JudgePrompt:
    """Renders a deterministic prompt that shows `attempts[order[0]]` first.

    `seed` determines ids and mark code. `instructions` is the system prompt including the rubric.
    """
    assert sorted(order) == list(range(len(attempts))), order
    rng = random.Random(seed)
    shown = [attempts[index] for index in order]
    names = choose_ids(len(shown), rng)
    record = _Record(shown, names, [_dump(tool) for tool in tools], rng)
    ids, positions = [""] * len(shown), [0] * len(shown)
    for position, index in enumerate(order):
        ids[index], positions[index] = names[position], position
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": record.write()}]
    return JudgePrompt(messages, ids, positions)


def choose_ids(count: int, rng: random.Random) -> list[str]:
    """Returns distinct ids such as "k4b" that reveal neither order nor quality."""
    ids: dict[str, None] = {}
    while len(ids) < count:
        ids[rng.choice(_CONSONANTS) + rng.choice("23456789") + rng.choice(_CONSONANTS)] = None
    return list(ids)


def choose_code(texts: Sequence[str], rng: random.Random) -> str:
    """Returns digits that occur in none of the texts. The code gets longer if the texts contain many digits."""
    everything = "\n".join(texts)
    for tries in itertools.count():
        code = "".join(rng.choices("0123456789", k=6 + tries // 8))
        if code not in everything:
            return code
    raise AssertionError("unreachable: some code is longer than the texts")


def schema(ids: Sequence[str]) -> Json:
    """Returns the JSON schema for a verdict over these ids."""
    entry = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "enum": list(ids)},
            "explanation": {"type": "string"},
            "score": {"type": "number"},
        },
        "required": ["id", "explanation", "score"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"scores": {"type": "array", "items": entry}},
        "required": ["scores"],
        "additionalProperties": False,
    }


def _dump(tool: Any) -> str:
    """Returns a tool definition as one line, without the function wrapper."""
    inner = tool.get("function", tool) if isinstance(tool, dict) else tool
    return clean(json.dumps(inner, ensure_ascii=False, separators=(",", ":"), default=str))


class _Record:
    """Builds the user message, mark by mark and text by text."""

    def __init__(self, attempts: Sequence[Attempt], ids: Sequence[str], tools: Sequence[str], rng: random.Random):
        self.tree = attempt_tree.build(attempts)
        self.ids, self.tools = ids, tools
        self.parts = self.tree.parts()
        passages = attempt_tree.repeated_texts(self.parts, PASSAGE_LENGTH)
        self.passages = {text: number for number, text in enumerate(passages, 1)}
        self.code = choose_code([*tools, *_texts(self.parts)], rng)
        self.numbers: dict[int, int] = {}  # part id -> number in the record
        self.lines: list[str] = []

    def write(self) -> str:
        self.lines = [f'The record. Lines that start with "<{self.code} " are its marks.']
        if self.tools:
            self.mark("tools")
            self.lines += self.tools
        for text, number in self.passages.items():
            self.mark(f"passage {number}")
            self.lines.append(text)
        for part in self.parts:
            if part.is_shared:
                self.open_part(part)
                self.write_messages(part.messages)
        for index, name in enumerate(self.ids):
            self.write_attempt(index, name)
        self.mark("end")
        self.lines.append(f"Score each of these {len(self.ids)}: {', '.join(self.ids)}")
        return "\n".join(self.lines)

    def mark(self, words: str) -> None:
        self.lines.append(f"<{self.code} {words}>")

    def open_part(self, part: attempt_tree.Part) -> None:
        self.numbers[id(part)] = len(self.numbers) + 1
        self.mark(f"part {self.numbers[id(part)]}{self.after(part)}")

    def after(self, part: attempt_tree.Part) -> str:
        """Returns " after part N", or "" at the start of a conversation."""
        number = self.numbers.get(id(part.parent))
        return f" after part {number}" if number else ""

    def write_attempt(self, index: int, name: str) -> None:
        """Writes the attempt's unshared parts. A single conversation without forks needs one mark."""
        ends = self.tree.ends[index]
        if len(ends) == 1:
            end = ends[0]
            is_own = end is not self.tree.root and end.attempts == {index} and not end.is_shared
            self.mark(f"attempt {name}{self.after(end)}" if is_own else f"attempt {name}{self.ending(end)}")
            if is_own:
                self.write_messages(end.messages)
            return
        self.mark(f"attempt {name}")
        labels = {id(end): "side" for end in ends[:-1]} | {id(ends[-1]): "main"}
        for end in dict.fromkeys(ends):
            if end is self.tree.root or end.is_shared:
                self.mark(f"{labels[id(end)]}{self.ending(end)}")
        for part in self.parts:
            if part.attempts == {index}:
                self.write_own(part, labels.get(id(part)))

    def ending(self, part: attempt_tree.Part) -> str:
        return f" ends with part {self.numbers[id(part)]}" if id(part) in self.numbers else " is empty"

    def write_own(self, part: attempt_tree.Part, label: str | None) -> None:
        """Writes an unshared part: a conversation's last part, or a prefix of several conversations."""
        if part.children:
            self.open_part(part)
            self.write_messages(part.messages)
            if label:
                self.mark(f"{label}{self.ending(part)}")
        else:
            self.mark(f"{label}{self.after(part)}")
            self.write_messages(part.messages)

    def write_messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if message.role == "cut":
                self.mark(f"cut {message.omitted} messages")
                continue
            self.mark(f"{message.role} {message.answers}" if message.answers else message.role)
            for index, segment in enumerate(message.segments):
                self.write_segment(segment, is_first=index == 0)

    def write_segment(self, segment: Segment, *, is_first: bool) -> None:
        kind = "" if segment.kind == "text" and is_first else segment.kind
        if not segment.omitted and (number := self.passages.get(segment.text)):
            self.mark(f"{kind} as passage {number}".lstrip())
            return
        if kind:
            self.mark(kind)
        self.lines.append(segment.text)
        if segment.omitted:
            self.mark(f"cut {segment.omitted} characters")
            self.lines.append(segment.tail)


def _texts(parts: Sequence[attempt_tree.Part]) -> Iterator[str]:
    for part in parts:
        for message in part.messages:
            for segment in message.segments:
                yield segment.text
                yield segment.tail


# --- instructions ----------------------------------------------------------------------------------------------------


def read_instructions(config: RulerJudgeConfig, directory: Path, *, rubric: str | None = None) -> str:
    """Returns the system prompt with the rubric inserted. `rubric` replaces any rubric file.

    Raises UsageError for unreadable or empty files, or if there is a rubric but no placeholder.
    """
    instructions = _read_text("instructions", config.instructions, directory)
    if RUBRIC not in instructions:
        if config.rubric is not None or rubric is not None:
            raise UsageError(f"judge.rubric: {config.instructions} has no {RUBRIC} to put it in; add one")
        return instructions
    return instructions.replace(RUBRIC, rubric or _read_text("rubric", config.rubric, directory))


def _read_text(what: str, path: Path | None, directory: Path) -> str:
    if path is None:
        return (Path(__file__).parent / f"{what}.txt").read_text(encoding="utf-8").strip()
    path = directory / path.expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"judge.{what}: {path}: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise UsageError(f"judge.{what}: {path}: the file is empty")
    return text
