"""Parses a judge's answer: every attempt exactly once, by id, with a finite score in [0, 1]. Rejects everything else.

Pure. Numbers written as text and ids in a different case are accepted, because they are unambiguous. Nothing else is
repaired: a missing score is not 0, a 7 is not 1, and list order has no meaning.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from art_cli.judges.judge_text import clean
from art_cli.judges.providers import MAX_ANSWER

_FENCE = "```"
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)  # reasoning left in the answer by some servers
_NUMBER = re.compile(r"\s*\d{1,9}(\.\d{1,20})?\s*", re.ASCII)
MAX_TOP = 1000  # largest score recognized as a different scale
MAX_STARTS = 500  # opening braces in prose tried as the start of JSON
MAX_READ = 4  # total characters parsed from all braces, relative to the answer's length (plus 10,000)
MAX_PROBLEMS = 20  # maximum reported problems
MAX_EXPLANATION = 2_000  # kept characters of an explanation


class Entry(NamedTuple):
    """The judge's score and explanation for one attempt. Example: Entry(0.8, "reached the goal with one detour")"""

    score: float
    explanation: str | None


class VerdictError(Exception):
    """An unusable answer. `problems` are reasons, worded so they can be sent back to the judge.

    `top` is the largest score if the answer uses a different scale, such as 0 to 100.
    """

    def __init__(self, problems: Sequence[str], top: float | None = None) -> None:
        assert problems
        self.problems, self.top = list(problems), top
        super().__init__("; ".join(problems))


def parse_verdict(text: str, ids: Sequence[str]) -> dict[str, Entry]:
    """Returns an entry per id. Several verdicts, in code fences or prose, must agree. Raises VerdictError."""
    if not text.strip():
        raise VerdictError(["the answer is empty"])
    if len(text) > MAX_ANSWER:
        raise VerdictError([f"the answer is longer than {MAX_ANSWER:,} characters"])
    text = _THINKING.sub("", text)
    # The chat template may have opened the thought, so accept a lone verdict after </think>. A tag quoted in prose has
    # more text after it.
    after = text.rpartition("</think>")[2].strip()
    is_alone = _load(after) is not None or (after.startswith(_FENCE) and after.endswith(_FENCE))
    documents = list(_documents(after if is_alone else text))
    if not documents:
        raise VerdictError(['no JSON object with a list "scores" was found; it may have been cut off'])
    verdicts = [check_document(document, ids) for document in documents]
    if any(_scores(verdict) != _scores(verdicts[0]) for verdict in verdicts[1:]):
        raise VerdictError(["the answer holds several verdicts that differ"])
    return verdicts[0]


def check_document(document: Any, ids: Sequence[str]) -> dict[str, Entry]:
    """Validates a parsed verdict. Raises VerdictError listing all problems."""
    entries = document.get("scores") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise VerdictError(['"scores" is not a list'])
    problems: list[str] = []
    found: dict[str, Entry] = {}
    given: list[float] = []
    spelled = {each.casefold(): each for each in ids}
    for number, entry in enumerate(entries, 1):
        if len(problems) >= MAX_PROBLEMS:
            raise VerdictError(problems, _top(given))
        name = entry.get("id") if isinstance(entry, dict) else None
        name = spelled.get(name.strip().casefold(), name) if isinstance(name, str) else None
        if not isinstance(name, str):
            problems.append(f"entry {number} has no id")
        elif name not in ids:
            problems.append(f"attempt {clean(name[:20])!r} does not exist")
        elif name in found:
            problems.append(f"{name} is scored twice")
        else:
            score, explanation = _read_score(entry.get("score")), entry.get("explanation")
            given += [score] if isinstance(score, int | float) else []
            if problem := _check_score(score):
                problems.append(f"the score of {name} {problem}")
                score = math.nan
            is_text = isinstance(explanation, str) and explanation
            found[name] = Entry(float(score), clean(explanation[:MAX_EXPLANATION]) if is_text else None)
    problems += [f"{name} is missing" for name in ids if name not in found]
    if problems:
        raise VerdictError(problems, _top(given))
    return found


def _top(scores: Sequence[float]) -> float | None:
    """Returns the largest score if all scores are 0 or at least 1, as on a scale to 10 or 100."""
    top = max(scores, default=0.0)
    return top if 1 < top <= MAX_TOP and all(score == 0 or score >= 1 for score in scores) else None


def _read_score(score: Any) -> Any:
    """Converts numeric text, such as "0.8", to a number; returns other values unchanged."""
    return float(score) if isinstance(score, str) and _NUMBER.fullmatch(score) else score


def _check_score(score: Any) -> str | None:
    """Returns the problem with a score, if any."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return f"is not a number: {_shown(score)!r}"
    if not 0 <= score <= 1:  # NaN fails this, too
        return f"is {_shown(score)}, not between 0 and 1"
    return None


def _shown(value: Any) -> str:
    """Returns the start of a value; only the type for lists and objects, which may be deep."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return clean(str(value)[:20])


def _scores(verdict: dict[str, Entry]) -> dict[str, float]:
    return {name: entry.score for name, entry in verdict.items()}


def _documents(text: str) -> Iterator[Any]:
    """Yields JSON objects with "scores": the whole text, or those in or after code fences, or in prose."""
    if (whole := _load(text)) is not None:
        yield whole
        return
    fenced = [found for block in _fenced(text) if (found := _load(block)) is not None]
    yield from fenced
    yield from _in_prose(text[text.rfind(_FENCE) + len(_FENCE) :] if fenced else text)


def _in_prose(text: str) -> Iterator[Any]:
    decoder = _decoder()
    start = text.find("{")
    num_read = 0
    for _ in range(MAX_STARTS):
        if start < 0:
            return
        if num_read > MAX_READ * len(text) + 10_000:
            break
        try:
            document, end = decoder.raw_decode(text, start)
        except RecursionError:
            raise VerdictError(["the answer is nested deeper than any verdict"]) from None
        except ValueError as error:
            num_read += (error.pos if isinstance(error, json.JSONDecodeError) else len(text)) - start
            start = text.find("{", start + 1)
            continue
        if isinstance(document, dict) and "scores" in document:
            yield document
        start = text.find("{", end)
    if start >= 0:  # the unread part may contain another verdict
        raise VerdictError(["the answer contains too many braces that are not JSON"])


def _fenced(text: str) -> Iterator[str]:
    """Yields the contents of code fences with any language tag."""
    start = text.find(_FENCE)
    while start >= 0 and (end := text.find(_FENCE, start + len(_FENCE))) >= 0:
        line, newline, block = text[start + len(_FENCE) : end].partition("\n")
        is_opening = bool(newline) and (not line.strip() or line.strip().isalpha())
        if is_opening:
            yield block
        start = text.find(_FENCE, end + len(_FENCE)) if is_opening else end


def _load(text: str) -> Any:
    """Parses the whole text; returns None unless it is a JSON object with "scores"."""
    try:
        document = _decoder().decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "scores" in document else None


def _decoder() -> json.JSONDecoder:
    """Returns a JSON decoder that rejects duplicate keys. NaN and Infinity are accepted here and rejected as scores."""
    return json.JSONDecoder(object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise VerdictError(["a JSON object has the same key twice"])
    return document
