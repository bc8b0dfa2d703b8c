"""Reads a judge's answer: every attempt exactly once, by id, a finite number in [0, 1]. Anything else is refused.

Pure. A number written as text and an id in another case are read, because they mean one thing. Nothing else is
repaired: a missing score is not a zero, a 7 is not a 1, and order means nothing.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from art_cli.judges.judge_text import clean
from art_cli.judges.providers import MAX_ANSWER

_FENCE = "```"
_THINKING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)  # reasoning that some servers leave in the answer
_NUMBER = re.compile(r"\s*\d{1,9}(\.\d{1,20})?\s*", re.ASCII)
MAX_TOP = 1000  # largest score of a scale that is not from 0 to 1
MAX_STARTS = 500  # number of opening braces in prose at which a JSON object is looked for
MAX_READ = 4  # longest text read from all braces together, in lengths of the answer, plus 10,000 characters
MAX_PROBLEMS = 20  # most faults of an answer that are reported
MAX_EXPLANATION = 2_000  # characters of an explanation that are kept


class Entry(NamedTuple):
    """The judge's word on one attempt. Example: Entry(0.8, "reached the goal with one detour")"""

    score: float
    explanation: str | None


class VerdictError(Exception):
    """The answer cannot be used. Each of `problems` is a reason in words that can be sent back to the judge.

    `top` is the largest score of an answer on another scale, such as 0 to 100, or None if it is on no such scale.
    """

    def __init__(self, problems: Sequence[str], top: float | None = None) -> None:
        assert problems
        self.problems, self.top = list(problems), top
        super().__init__("; ".join(problems))


class _Unusable(ValueError):
    """A JSON document that has a key twice, with perhaps two different values."""


def parse_verdict(text: str, ids: Sequence[str]) -> dict[str, Entry]:
    """Returns the entry of each id. The verdict may stand in a code fence or in prose; several must agree.

    Raises VerdictError.
    """
    if not text.strip():
        raise VerdictError(["the answer is empty"])
    if len(text) > MAX_ANSWER:
        raise VerdictError([f"the answer is longer than {MAX_ANSWER:,} characters"])
    text = _THINKING.sub("", text)
    # A template may begin the thought itself. A verdict alone after it counts; a quoted end has the rest of its quote.
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
    """Returns the entries of a verdict's JSON. Raises VerdictError naming everything that is wrong with it."""
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
            problems.append(f"there is no attempt {clean(name[:20])!r}")
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
    """Returns the largest score if all are 0, or 1 and more, as on a scale to 10 or 100; None if they are not."""
    top = max(scores, default=0.0)
    return top if 1 < top <= MAX_TOP and all(score == 0 or score >= 1 for score in scores) else None


def _read_score(score: Any) -> Any:
    """Returns the number that a text is, such as "0.8", or the value as it is."""
    return float(score) if isinstance(score, str) and _NUMBER.fullmatch(score) else score


def _check_score(score: Any) -> str | None:
    """Returns what is wrong with a score, or None if nothing is."""
    if isinstance(score, bool) or not isinstance(score, int | float):
        return f"is not a number: {_shown(score)!r}"
    if not 0 <= score <= 1:  # NaN fails this, too
        return f"is {_shown(score)}, not between 0 and 1"
    return None


def _shown(value: Any) -> str:
    """Returns the start of a value; for a list or an object, which may be deep, only its type."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return clean(str(value)[:20])


def _scores(verdict: dict[str, Entry]) -> dict[str, float]:
    return {name: entry.score for name, entry in verdict.items()}


def _documents(text: str) -> Iterator[Any]:
    """Yields the JSON objects with "scores": the whole text, or those in code fences and after them, or in prose."""
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
            _refuse_twofold(error)
            num_read += (error.pos if isinstance(error, json.JSONDecodeError) else len(text)) - start
            start = text.find("{", start + 1)
            continue
        if isinstance(document, dict) and "scores" in document:
            yield document
        start = text.find("{", end)
    if start >= 0:  # the part of the answer that was not read may hold another verdict
        raise VerdictError(["the answer holds too many braces that are no JSON"])


def _fenced(text: str) -> Iterator[str]:
    """Yields the texts in code fences: from the line after an opening fence, with any language, to the next."""
    start = text.find(_FENCE)
    while start >= 0 and (end := text.find(_FENCE, start + len(_FENCE))) >= 0:
        line, newline, block = text[start + len(_FENCE) : end].partition("\n")
        is_opening = bool(newline) and (not line.strip() or line.strip().isalpha())
        if is_opening:
            yield block
        start = text.find(_FENCE, end + len(_FENCE)) if is_opening else end


def _load(text: str) -> Any:
    """Returns the JSON object with "scores" that the whole text is; None when it is something else."""
    try:
        document = _decoder().decode(text.strip())
    except (ValueError, RecursionError) as error:
        _refuse_twofold(error)
        return None
    return document if isinstance(document, dict) and "scores" in document else None


def _refuse_twofold(error: Exception) -> None:
    if isinstance(error, _Unusable):
        raise VerdictError([str(error)]) from None


def _decoder() -> json.JSONDecoder:
    """Python's decoder, which reads NaN and Infinity as numbers (refused later, as scores); a key twice is an error."""
    return json.JSONDecoder(object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _Unusable("a JSON object has the same key twice")
    return document
