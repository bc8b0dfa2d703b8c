"""builtin:rule, a deterministic substitute for a judge model. It scores attempts with rules from the rubric.

Needs no key and no network. It receives RULER's regular prompt, parses rules from the system message and attempts from
the record, and answers with text like a model. A rule is a line of the rubric. An attempt's score is the sum of the
points for all matching rules, clipped to [0, 1]:

    rule: +0.4 if user -1 has "Result: order {number}:"
    rule: +0.6 if user 1 has "arrive" and user -1 has "arrives on {day}" and assistant -1 has "{day}"

A condition selects a message of the attempt's main conversation by role and number (from 1, or backwards from -1), and
requires that the message has, lacks, or (ignoring outer whitespace) is the quoted text. A missing message has nothing.
"{day}" matches a word: any word at this place in the first condition with that name (the first match), and the same
word in later conditions. A word starts and ends with a letter, digit or _, and may contain .,:/@+'- inside: 14:30, 3.5.

See docs/judges.md for the grammar. Rules that never matched are logged on close.
"""

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage
from art_cli.judges.providers import Answer, CallFailed, Provider
from art_cli.runs.trajectory import Json
from art_cli.runtime.secrets import Secrets

log = logging.getLogger(__name__)

SAYS = "a rule, no model"  # part of every explanation
ROLES = ("system", "developer", "user", "assistant", "tool", "message")
MIN_ATTEMPTS = 4  # minimum attempts for reporting unused rules; `art check` uses 2
MAX_WORD = 100  # characters matched by a word in braces; bounds the search time
_PREFIX = "rule:"
_RULE = re.compile(r"\s*([+-]?\d{1,3}(?:\.\d{1,6})?) if (.+)")
_CONDITION = re.compile(
    rf"""\s*({"|".join(ROLES)}) (-?[1-9]\d{{0,3}}) (has|lacks|is) (?:"([^"]+)"|'([^']+)')\s*(?:and(?=\s)|$)"""
)
_WORD = re.compile(r"\{([a-z_]+)\}")
_FIRST_LINE = re.compile(r'The record\. Lines that start with "<(\d+) " are its marks\.')

Message = tuple[str, str]  # role and text


class Condition(NamedTuple):
    """Example: Condition("user", -1, "has", "arrives on {day}")"""

    role: str
    number: int
    verb: str  # has, lacks, is
    text: str


class Rule(NamedTuple):
    """Example: Rule(0.6, (Condition("assistant", -1, "is", "Friday"),))"""

    points: float
    conditions: tuple[Condition, ...]


class RuleError(ValueError):
    """The rubric has no rules or an invalid rule line. The message is a single line."""


class RuleProvider(Provider):
    def __init__(self, member: JudgeModelConfig, secrets: Secrets, name: str) -> None:
        super().__init__(member, secrets, name)
        self._held = Counter[int]()  # rule number -> matching attempts; 0 counts all attempts
        self._num_rules = 0

    async def close(self) -> None:
        never = [str(number) for number in range(1, self._num_rules + 1) if not self._held[number]]
        if never and self._held[0] >= MIN_ATTEMPTS:
            which = f"{'rule' if len(never) == 1 else 'rules'} {', '.join(never)} of {self._num_rules}"
            log.warning("%s: %s never held in %d attempts", self.name, which, self._held[0])

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        started = time.monotonic()
        try:
            text, met = await asyncio.to_thread(answer, messages)
        except RuleError as error:
            raise CallFailed(f"{self.name}: {error}", "stopped") from error
        self._held.update(met)
        self._num_rules = len(read_rules(messages[0]["content"]))
        prompt, completion, _ = self.read_tokens((None, None), messages, text)
        usage = Usage(1, prompt, completion, 0.0, time.monotonic() - started)
        return Answer(text=self.read_text(text), finish_reason="stop", usage=usage)


def answer(messages: Sequence[Json]) -> tuple[str, list[int]]:
    """Returns the verdict as JSON, and per attempt a 0 and the numbers of the matching rules. Raises RuleError."""
    rules = read_rules(messages[0]["content"])
    scores, held = [], list[int]()
    for name, conversation in read_attempts(messages[1]["content"]).items():
        met = [number for number, rule in enumerate(rules, 1) if holds(rule, conversation)]
        held += [0, *met]
        score = round(min(1.0, max(0.0, sum(rules[number - 1].points for number in met))), 6)
        which = f"rules met: {', '.join(map(str, met)) or 'none'} of {len(rules)}"
        scores.append({"id": name, "explanation": f"{SAYS}: {which}", "score": score})
    return json.dumps({"scores": scores}), held


def read_rules(text: str) -> list[Rule]:
    """Parses the rules in a rubric, or in instructions that include a rubric. Raises RuleError."""
    lines = [line.strip().removeprefix(_PREFIX) for line in text.split("\n") if line.strip().startswith(_PREFIX)]
    if not lines:
        raise RuleError(f'no line of the rubric begins with "{_PREFIX}"')
    return [_read_rule(line) for line in lines]


def _read_rule(line: str) -> Rule:
    example = 'rule: +0.5 if assistant -1 has "{answer}" and user 1 lacks "{answer}"'
    found = _RULE.fullmatch(line)
    rest, conditions = found[2] if found else "", []
    while (part := _CONDITION.match(rest)) is not None:
        conditions.append(Condition(part[1], int(part[2]), part[3], part[4] or part[5]))
        rest = rest[part.end() :]
        if not rest and not part[0].endswith("and"):
            assert found is not None
            return Rule(float(found[1]), tuple(conditions))
    raise RuleError(f"no rule: {(_PREFIX + line)[:120]!r}; an example is {example}")


def holds(rule: Rule, conversation: Sequence[Message]) -> bool:
    """Returns whether all conditions hold in a conversation of (role, text)."""
    words: dict[str, str] = {}
    for role, number, verb, text in rule.conditions:
        said = [content for each, content in conversation if each == role]
        place = number - 1 if number > 0 else number
        is_there = -len(said) <= place < len(said)
        search = re.fullmatch if verb == "is" else re.search
        found = search(_pattern(text, words), said[place].strip()) if is_there else None
        if (found is not None) != (verb != "lacks"):
            return False
        if found is not None:
            words |= found.groupdict()
    return True


def _pattern(text: str, words: Mapping[str, str]) -> str:
    """Compiles a condition's text: known words become literals, new words become named groups."""
    pattern, end, named = "", 0, set[str]()
    for word in _WORD.finditer(text):
        pattern += re.escape(text[end : word.start()])
        value = rf"(?P={word[1]})" if word[1] in named else rf"(?P<{word[1]}>\w(?:[\w.,:/@+'-]{{0,{MAX_WORD - 2}}}\w)?)"
        named.add(word[1])
        pattern += rf"(?<!\w){re.escape(words[word[1]]) if word[1] in words else value}(?!\w)"
        end = word.end()
    return pattern + re.escape(text[end:])


def read_attempts(record: str) -> dict[str, list[Message]]:
    """Parses a RULER record to id -> messages of the main conversation."""
    passages: dict[str, str] = {}
    parts: dict[str, list[Message]] = {}
    attempts: dict[str, list[Message]] = {}
    current: list[Message] = []
    name = ""
    for mark, text in _split(record):
        words = mark.split(" ")
        before = list(parts[words[-1]]) if "part" in words[1:-1] else []
        match words:
            case ["tools"] | ["end"] | ["cut", _, "messages"]:
                pass
            case ["passage", number]:
                passages[number] = text
            case ["part", number, *_]:
                current = parts[number] = before
            case ["attempt", name, *_]:
                current = attempts[name] = before
            case ["main", *_]:
                current = attempts[name] = before
            case ["side", *_]:
                current = before
            case [role, *_] if role in ROLES:
                current.append((role, text))
            case _:  # another piece of the previous message
                role, said = current.pop() if current else ("message", "")
                piece = passages[words[-1]] if "passage" in words else text
                current.append((role, f"{said}\n{piece}".lstrip("\n")))
    return attempts


def _split(record: str) -> Iterator[tuple[str, str]]:
    """Yields (mark, text) pairs. The first line of a record defines the mark code."""
    first, *lines = record.split("\n")
    found = _FIRST_LINE.fullmatch(first)
    assert found is not None, f"no record: {first[:100]}"
    mark, texts = "", list[str]()
    for line in [*lines, f"<{found[1]} end>"]:
        if not line.startswith(f"<{found[1]} "):
            texts.append(line)
            continue
        if mark:
            yield mark, "\n".join(texts)
        mark, texts = line[len(found[1]) + 2 : -1], []
