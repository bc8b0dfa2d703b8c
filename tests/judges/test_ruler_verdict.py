"""Reading a judge's answer: complete, by id, in range, or refused."""

import json
import math
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.judges.costs import Usage
from art_cli.judges.providers import MAX_ANSWER
from art_cli.judges.ruler.verdict import Entry, VerdictError, check_document, parse_verdict
from art_cli.judges.ruler.verdict_cache import StoredVote, VerdictCache
from tests.support.judges.judge_server import MISBEHAVIOURS, VALID

IDS = ["k4b", "w9c", "t3x"]
SCORES = [0.25, 1.0, 0.0]
ENTRIES = [{"id": name, "explanation": "", "score": score} for name, score in zip(IDS, SCORES, strict=True)]


def scores_of(text: str) -> dict[str, float]:
    return {name: entry.score for name, entry in parse_verdict(text, IDS).items()}


@pytest.mark.parametrize("kind", sorted(VALID))
def test_an_unusual_answer_that_says_what_it_must_is_read(kind: str) -> None:
    assert scores_of(MISBEHAVIOURS[kind](ENTRIES)) == dict(zip(IDS, SCORES, strict=True))


@pytest.mark.parametrize("kind", sorted(MISBEHAVIOURS.keys() - VALID))
def test_an_answer_that_falls_short_is_refused_with_what_is_wrong(kind: str) -> None:
    with pytest.raises(VerdictError) as refused:
        parse_verdict(MISBEHAVIOURS[kind](ENTRIES), IDS)
    assert all(problem and "\n" not in problem for problem in refused.value.problems)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("missing_id", "t3x is missing"),
        ("extra_id", "attempt 'zz9' does not exist"),
        ("duplicate", "k4b is scored twice"),
        ("seven", "the score of k4b is 7, not between 0 and 1"),
        ("nan", "the score of k4b is nan, not between 0 and 1"),
        ("empty", "the answer is empty"),
        ("two_verdicts", "the answer holds several verdicts that differ"),
    ],
)
def test_the_refusal_names_the_attempt_and_the_fault(kind: str, says: str) -> None:
    with pytest.raises(VerdictError) as refused:
        parse_verdict(MISBEHAVIOURS[kind](ENTRIES), IDS)
    assert refused.value.problems == [says]


def test_every_fault_of_an_answer_is_named_at_once() -> None:
    entries = [{"id": "k4b", "score": 2}, {"id": "k4b", "score": 0.1}, {"id": "no", "score": 0.1}, 5]
    with pytest.raises(VerdictError) as refused:
        check_document({"scores": entries}, IDS)
    assert len(refused.value.problems) == 6  # 2, twice, unknown, no id, and two missing


def test_the_same_verdict_said_twice_is_one_verdict() -> None:
    text = json.dumps({"scores": ENTRIES})
    assert scores_of(f"{text}\nSo:\n{text}") == dict(zip(IDS, SCORES, strict=True))


def test_a_thought_whose_beginning_the_template_has_is_no_verdict() -> None:
    """A draft before "</think>" does not count; an end that an explanation quotes ends nothing."""
    final, draft = json.dumps({"scores": ENTRIES}), json.dumps({"scores": [{**each, "score": 0.5} for each in ENTRIES]})
    for text in (f"```json\n{draft}\n```\nBut no.\n</think>\n\n{final}", f"{draft}</think>```json\n{final}\n```"):
        assert scores_of(text) == dict(zip(IDS, SCORES, strict=True))
    quoted = json.dumps({"scores": [{**each, "explanation": f"it said </think>{draft}"} for each in ENTRIES]})
    for text in (quoted, f"```json\n{quoted}\n```"):
        assert scores_of(text) == dict(zip(IDS, SCORES, strict=True))


def test_a_verdict_after_a_fenced_one_must_be_the_same() -> None:
    final, draft = json.dumps({"scores": ENTRIES}), json.dumps({"scores": [{**each, "score": 0.5} for each in ENTRIES]})
    assert scores_of(f"```json\n{final}\n```\nAgain: {final}") == dict(zip(IDS, SCORES, strict=True))
    with pytest.raises(VerdictError):
        parse_verdict(f"```json\n{draft}\n```\nCorrection: {final}", IDS)


def test_explanations_are_kept_and_can_be_written_to_a_file() -> None:
    entries = [{**entry, "explanation": "lone \ud800 surrogate"} for entry in ENTRIES]
    for entry in parse_verdict(json.dumps({"scores": entries}), IDS).values():
        assert entry.explanation == "lone ? surrogate"
        entry.explanation.encode()


@pytest.mark.parametrize(
    "text",
    [
        "{" * 100_000,
        '{"a":' * 50_000,
        "[" * 100_000,
        '{"scores":' * 2000,
        "x" * (MAX_ANSWER + 1),
        '{"scores":[' + "9" * 5000,
    ],
)
def test_monstrous_answers_are_refused_quickly(text: str) -> None:
    with pytest.raises(VerdictError):
        parse_verdict(text, IDS)


# --- mutated verdicts -------------------------------------------------------------------------------------------------

TOKENS = [
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "NaN",
    "-",
    "1e999",
    "7",
    "0.5",
    "null",
    "true",
    "k4b",
    "w9c",
    '"score"',
    '"id"',
]


def mutate(text: str, rng: random.Random) -> str:
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 2, 5, 30]))
        match rng.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + rng.choice(TOKENS) + text[end:]
            case 2:
                text = text[:start] + text[start:end] * 2 + text[end:]
            case _:
                text = text[:start] + chr(rng.choice([0, 10, 32, 48 + rng.randrange(10), 0xD800, 0x1F600])) + text[end:]
    return text


def strictly(text: str) -> dict[str, Any] | None:
    """What the text says, if the whole of it is one verdict; None otherwise."""
    try:
        entries = json.loads(text)["scores"]
        return {entry["id"].strip().lower(): float(entry["score"]) for entry in entries}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_mutated_verdicts_are_refused_or_say_what_they_say(seed: int) -> None:
    """1,000 for each seed. Accepted verdicts are complete, in range, and equal to the text's content."""
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1000):
        entries = rng.sample(ENTRIES, len(ENTRIES))
        text = mutate(MISBEHAVIOURS[rng.choice(sorted(VALID - {"long"}))](entries), rng)
        try:
            scores = scores_of(text)
        except VerdictError:
            continue
        accepted += 1
        assert set(scores) == set(IDS)
        assert all(math.isfinite(score) and 0 <= score <= 1 for score in scores.values())
        if (said := strictly(text)) is not None:
            assert scores == said
    assert 50 < accepted < 900  # the fuzzer reaches both ends


@pytest.mark.slow
@given(
    st.text()
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.sampled_from(["scores", "id", "score", "explanation", *IDS]), inner, max_size=4)
        ),
        max_leaves=12,
    ).map(json.dumps)
)
def test_any_text_is_a_whole_verdict_or_refused(text: str) -> None:  # fmt: skip
    try:
        scores = scores_of(text)
    except VerdictError:
        return
    assert set(scores) == set(IDS) and all(0 <= score <= 1 for score in scores.values())


@pytest.mark.parametrize(
    "change",
    [
        {"entries": [Entry(math.nan, None), Entry(0.5, None)]},
        {"entries": [Entry(7.0, None), Entry(0.5, None)]},
        {"entries": [], "positions": []},
        {"positions": [900, -1]},
        {"usage": Usage(cost_usd=-3.0)},
    ],
    ids=["not a number", "too high", "empty", "no positions", "a refund"],
)
def test_a_stored_vote_out_of_range_is_asked_again(change: dict[str, Any], tmp_path: Path) -> None:
    """Another program may have written the row, with a valid checksum."""
    vote = StoredVote([Entry(0.25, "a"), Entry(0.5, None)], [1, 0], Usage(calls=1))
    with closing(VerdictCache(tmp_path / "v.sqlite")) as cache:
        cache.put("good", vote)
        cache.put("bad", msgspec.structs.replace(vote, **change))
        assert cache.get("good", 2) == vote and cache.get("good", 3) is None
        assert cache.get("bad", 2) is None
