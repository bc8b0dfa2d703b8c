"""RULER under judges that answer hostile things: waits of a day, bombs, absurd numbers, damaged caches, mutations.

Property: a group ends with the judge's scores or owed; nothing crashes, and nothing hangs.
"""

import asyncio
import dataclasses
import gzip
import json
import logging
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from email.utils import formatdate
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.config.schema import PriceConfig, RulerJudgeConfig
from art_cli.judges.judge_groups import judge_groups
from art_cli.judges.providers import MAX_ANSWER, MAX_BYTES, MAX_MARKS, classify
from art_cli.judges.providers.waits import read_wait, retry_after
from art_cli.judges.ruler.ruler_judge import RulerJudge
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError
from tests.support.attacks.hostile import ATOMS, NUM_MUTATIONS, Heartbeat, MemoryBound, mutations
from tests.support.judges.judge_server import Conduct, JudgeServer, serving
from tests.support.judges.ruler_cases import rated
from tests.support.paths import ROOT

QUALITIES = [0.25, 0.875, 0.5]
WANTED = {f"g-{index}": quality for index, quality in enumerate(QUALITIES)}
HELD_S = 0.2  # longest hold of the event loop
pytestmark = pytest.mark.timeout(max(300, NUM_MUTATIONS // 5))


@pytest.fixture
async def server() -> AsyncIterator[JudgeServer]:
    async with JudgeServer() as running:
        yield running


@pytest.fixture
def away() -> Iterator[JudgeServer]:
    """A judge server in a separate thread, so preparing answers does not block the tested event loop."""
    with serving() as running:
        yield running


def make(server: JudgeServer, *, directory: Path = Path("."), job: str = "", **settings: Any) -> RulerJudge:
    given = {"model": "rule", "api_base": server.api_base, "cache": None, "timeout_s": 20.0} | settings
    return RulerJudge(RulerJudgeConfig(name="ruler", **given), directory, job=job, first_delay_s=0.001)


async def score(judge: RulerJudge, group: str = "g") -> dict[str, float] | str:
    """The rewards by id, or why the group is owed."""
    try:
        return {name: verdict.reward for name, verdict in (await judge.judge(rated(QUALITIES, group=group))).items()}
    except JudgeError as owed:
        assert "\n" not in str(owed) and len(str(owed)) < 2000
        return str(owed)
    finally:
        await judge.close()


# --- a quota that is used up ------------------------------------------------------------------------------------------


def loads(groups: list[list[Trajectory]]) -> Iterator[tuple[str, Callable[[], list[Trajectory]]]]:
    """Returns groups in the form expected by `judge_groups`: an id and a loader."""
    return ((group[0].group_id, partial(list, group)) for group in groups)


@pytest.mark.parametrize(
    ("conduct", "says"),
    [
        (Conduct(misbehaviour="429", retry_after="86400"), r"quota is used up until \d{4}-\d\d-\d\d .*\(24 h\)"),
        (Conduct(misbehaviour="429", retry_after="1" + "0" * 30), r"quota is used up for 1e\+30 s"),
        (
            Conduct(misbehaviour="429", retry_after=formatdate(time.time() + 27.2 * 3600, usegmt=True)),
            r"until .*\(27 h\)",
        ),
        (
            Conduct(
                misbehaviour="429",
                retry_after="",
                headers={"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "23h59m59s"},
            ),
            r"until .*\(24 h\)",
        ),
        (Conduct(misbehaviour="429", retry_after="", error="try again in 5h0m12s."), r"until .*\(5 h\)"),
        (Conduct(misbehaviour="429", retry_after="1", error="code: insufficient_quota"), "quota is used up"),
    ],
)
async def test_a_quota_that_is_used_up_stops_every_call_at_once_and_says_until_when(
    server: JudgeServer, conduct: Conduct, says: str
) -> None:
    """Two groups are scored before. Of 20 others, with two calls at once, at most two ask; all are owed in a second."""
    judge = make(server, concurrency=2)
    kept: list[Any] = []
    before = loads([rated(QUALITIES, group=f"a{number}") for number in range(2)])
    assert (await judge_groups(judge, before, kept.append, in_flight=2)).num_scored == 2
    server.conduct = dataclasses.replace(conduct)
    started, asked = time.monotonic(), len(server.asked)
    after = loads([rated(QUALITIES, group=f"b{number}") for number in range(20)])
    tally = await judge_groups(judge, after, kept.append, in_flight=10)
    await judge.close()
    assert time.monotonic() - started < 10 and len(server.asked) - asked <= 2
    assert tally.stopped is not None and len(kept) == 2
    assert "\n" not in tally.stopped and re.search(says, tally.stopped), tally.stopped


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        *(("2", 2.0), ("0.5", 0.5), ("1m3s", 63.0), ("120ms", 0.12), ("1d2h", 93600.0), ("1" + "0" * 30, 1e30)),
        *(
            (value, None)
            for value in ("", "-5", "soon", "nan", "inf", "-inf", "1e999", "0x10", "1_000", "٣", "1m soon")
        ),
        *((value, None) for value in ("9" * 100_000 + "q", "Wed, 99 Foo 99999 99:99:99 GMT", "\x00", "0001-01-01T")),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("0001-01-01T00:00:00+23:59", 0.0),
    ],
)
def test_a_wait_is_read_in_every_form_and_garbage_is_none(value: str, seconds: float | None) -> None:
    started = time.thread_time()
    found = read_wait(value)
    assert found is None or found >= 0
    if not value.startswith("9" * 100):  # cut to its first digits, that one is a number
        assert found == seconds
    assert time.thread_time() - started < 0.2


def test_a_wait_may_be_a_date_a_time_since_1970_or_words() -> None:
    assert read_wait(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=5)
    assert read_wait(f"{time.time() + 100:.0f}") == pytest.approx(100, abs=5)
    assert read_wait(f"{(time.time() + 100) * 1000:.0f}") == pytest.approx(100, abs=5)
    assert retry_after({"retry-after": "-3"}, '{"retryDelay": "34s"}') == 34.0
    assert retry_after({}, "Please retry in 34.07s.") == 34.07
    assert retry_after({}, "try again in " + "9" * 100_000) == pytest.approx(1e41, rel=0.01)


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (429, '{"error": {"code": "insufficient_quota"}}', "used_up"),
        (402, "Insufficient Balance", "used_up"),
        (400, "Your credit balance is too low to access the Anthropic API", "used_up"),
        (500, "insufficient_quota", "retry"),  # a server that repeats the prompt
        (429, "slow down", "retry"),
        (400, "too long", "refused"),
        (401, "who are you", "stopped"),
        (403, "your key may not", "stopped"),
        (403, "openai/x requires moderation and your input was flagged", "refused"),  # this attempt's text, not the key
        (200, "<html>", "retry"),  # a page of something in between
        (308, "", "stopped"),  # every call is sent elsewhere
    ],
)
def test_what_an_error_means_is_read_from_status_and_code(status: int, text: str, kind: str) -> None:
    assert classify(status, text) == kind


@pytest.mark.parametrize("place", ["body", "choice"])
@pytest.mark.parametrize(
    ("error", "calls", "stops"),
    [
        ({"code": 502, "message": "the provider is overloaded"}, 3, False),
        ({"code": 402, "message": "insufficient credits"}, 1, True),
        ({"code": 400, "message": "too long for the model"}, 2, False),  # the second time without a schema
        ("the provider is overloaded", 3, False),
    ],
)
async def test_an_error_in_an_answer_with_status_200_counts_as_its_code(
    server: JudgeServer, place: str, error: Any, calls: int, stops: bool
) -> None:
    """OpenRouter answers so, in either place, when a provider fails after it has taken the call."""

    def fail(body: bytes) -> bytes:
        choice = {"error": error, "finish_reason": "error", "message": {"role": "assistant", "content": ""}}
        return json.dumps({"error": error} if place == "body" else {"choices": [choice]}).encode()

    server.conduct = Conduct(change_body=fail)
    judge = make(server, retries=2)
    with pytest.raises(JudgeError) as owed:
        await judge.judge(rated(QUALITIES))
    await judge.close()
    assert (len(server.asked), isinstance(owed.value, JudgeStopped)) == (calls, stops)
    assert "answered 200: " in str(owed.value)
    assert (error if isinstance(error, str) else error["message"]) in str(owed.value)


async def test_an_address_that_redirects_stops_the_judge_and_says_where_to(server: JudgeServer) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 301 X\r\nLocation: https://api.example/v1\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as here:
        port = here.sockets[0].getsockname()[1]
        judge = make(server, api_base=f"http://127.0.0.1:{port}/v1")
        with pytest.raises(JudgeStopped, match="answered 301: it redirects to https://api.example/v1; .*base_url"):
            await judge.judge(rated(QUALITIES))
        await judge.close()


async def test_a_wait_of_some_seconds_is_shown_once_with_who_asked_and_how_many_calls_are_held(
    server: JudgeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.conduct = Conduct(misbehaviour="429", retry_after="40")
    judge = make(server, concurrency=2)
    with caplog.at_level(logging.INFO, "art_cli"):
        calls = [asyncio.create_task(judge.judge(rated(QUALITIES, group=f"g{number}"))) for number in range(8)]
        while "are held" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        told = [record.getMessage() for record in caplog.records if "are held" in record.getMessage()]
        for call in calls:
            call.cancel()
        async with asyncio.timeout(2):  # a wait can be broken off
            await asyncio.gather(*calls, return_exceptions=True)
    await judge.close()
    assert len(told) == 1 and len(server.asked) <= 2
    assert "rule at http" in told[0] and "429" in told[0] and "waiting until" in told[0]
    assert "(40 s)" in told[0] or "(41 s)" in told[0]


async def test_a_model_that_waits_leaves_the_calls_to_the_panels_other_model(server: JudgeServer) -> None:
    """One place for calls. A model that waits half a minute must not delay the other model's answer."""
    server.conduct = Conduct(misbehaviour="429", times=1, retry_after="30")
    panel = [{"model": name, "api_base": server.api_base} for name in "ab"]
    config = RulerJudgeConfig.model_validate({"name": "ruler", "panel": panel, "cache": None, "concurrency": 1})
    judge = RulerJudge(config, Path("."), first_delay_s=0.001)
    task = asyncio.create_task(judge.judge(rated(QUALITIES)))
    async with asyncio.timeout(20):
        while server.num_answered < 1:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    await judge.close()


@pytest.mark.slow
def test_an_interrupt_ends_a_wait_and_the_wait_was_shown(tmp_path: Path) -> None:
    write_lines(tmp_path / "t.jsonl", rated(QUALITIES))
    with serving(Conduct(misbehaviour="429", retry_after="300")) as server:
        command = [sys.executable, "-m", "art_cli", "judge", "t.jsonl", "--model", "rule"]
        process = subprocess.Popen(
            [*command, f"judge.api_base={server.api_base}", "judge.cache=null"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "calls are held" in line and "(5 min)" in line, line
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        process.communicate(timeout=60)
        assert process.returncode == 130 and time.monotonic() - started < 30


# --- answers of any size ----------------------------------------------------------------------------------------------


def bomb(mib: int) -> bytes:
    """Gzipped spaces (uncompressed size in MiB); compresses about a thousandfold."""
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    piece = b" " * (1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(mib)), packer.flush()])


LISTS = b'{"choices": [' + b"[]," * (MAX_MARKS // 2) + b"0]}"
# (what makes the body, its encoding) of answers that no judge gives
SIZED_ANSWERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "gzip bomb": (lambda: bomb(1000), "gzip"),
    "gzip of gzip": (lambda: gzip.compress(bomb(300)), "gzip, gzip"),
    "members": (lambda: gzip.compress(b"") * 50_000 + bomb(100), "gzip"),
    "plain": (lambda: b" " * (16 << 20), ""),
    "just too large": (lambda: b" " * (MAX_BYTES + 1), ""),
    "lists": (lambda: LISTS, ""),
    "packed lists": (lambda: gzip.compress(LISTS), "gzip"),
    "deep": (lambda: b'{"choices":' + b"[" * 50_000, ""),
    "no gzip": (lambda: b"{" * 100_000, "gzip"),
    "unknown": (lambda: b"abc", "br"),
    "nonsense": (lambda: b"abc", "\x01x" * 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZED_ANSWERS)
async def test_an_answer_too_large_fails_its_own_group_and_takes_no_memory(server: JudgeServer, kind: str) -> None:
    make_body, encoding = SIZED_ANSWERS[kind]
    body = make_body()
    judge = make(server, retries=1, attempts=1)
    server.conduct = Conduct(change_body=lambda data: body, headers={"Content-Encoding": encoding} if encoding else {})
    with MemoryBound(mib=128):
        async with Heartbeat() as heart:
            with pytest.raises(JudgeError) as owed:
                await judge.judge(rated(QUALITIES))
    assert not isinstance(owed.value, JudgeStopped) and heart.longest_s < HELD_S
    server.conduct = Conduct()
    verdicts = await judge.judge(rated(QUALITIES))
    assert {name: verdict.reward for name, verdict in verdicts.items()} == WANTED
    await judge.close()


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda data: zlib.compress(data)[2:-4]])
async def test_a_compressed_answer_of_a_judges_size_is_read(
    server: JudgeServer, pack: Callable[[bytes], bytes]
) -> None:
    encoding = "gzip" if pack is gzip.compress else "deflate"
    server.conduct = Conduct(change_body=pack, headers={"Content-Encoding": encoding})
    assert await score(make(server)) == WANTED


@pytest.mark.parametrize(
    "text",
    [
        "```" + "\n" * 900_000,
        '{"a":' * 500 + "[0," + "0," * 400_000,
        "{" * 900_000,
        '{"scores":' + "[" * 50_000,
        '{"scores":[' + '{"id":"k4b","score":7},' * 38_000 + "{}]}",
        '{"scores":[' + '{"id":1},' * 100_000 + "{}]}",
        "\x01é" * 450_000,
        "x" * (MAX_ANSWER + 1),
        '{"scores":[{"id":"k4b","score":' + "[" * 900 + "]" * 900 + "}]}",
        '{"scores":[{"id":"k4b","score":' + "9" * 4000 + "}]}",
        '{"scores":[{"id":"\\ud800","score":1}]}',
    ],
)
async def test_a_text_made_to_take_long_is_refused_without_holding_the_loop(server: JudgeServer, text: str) -> None:
    server.conduct = Conduct(change_text=lambda _: text)
    async with Heartbeat() as heart:
        owed = await score(make(server, attempts=1))
    assert isinstance(owed, str) and owed.startswith("rule")
    assert heart.longest_s < HELD_S


# --- absurd usage -----------------------------------------------------------------------------------------------------

ODD_COUNTS = [10**30, -5, float("nan"), float("inf"), 1e308, "12", True, None, [], {"a": 1}, 2**63, -(2**63), 12.0]


@pytest.mark.parametrize("count", ODD_COUNTS, ids=repr)
async def test_usage_that_cannot_be_is_estimated_and_spends_no_less_than_nothing(
    server: JudgeServer, count: Any, tmp_path: Path
) -> None:
    server.conduct = Conduct(usage={"prompt_tokens": count, "completion_tokens": count, "prompt_tokens_details": count})
    settings: Any = {"cache": tmp_path / "v.sqlite", "job": "j", "price": PriceConfig(input=1.0, output=1.0)}
    judge = make(server, **settings)
    assert await score(judge) == WANTED
    assert 0 < judge.usage.tokens < 10_000 and 0 < (judge.usage.cost_usd or 0) < 0.01
    again = make(server, **settings)
    assert again.budget.spent.tokens == judge.usage.tokens
    assert await score(again) == WANTED and again.num_cached == 1


async def test_a_ledger_of_garbled_rows_gives_no_money_back(server: JudgeServer, tmp_path: Path) -> None:
    path = tmp_path / "v.sqlite"
    judge = make(server, cache=path, job="j")
    assert await score(judge) == WANTED
    with sqlite3.connect(path) as db:
        for usd, prompt, completion in [
            (-1e9, -(2**62), 5),
            ("abc", "x", b"\xff"),
            (1e999, 2**62, 2**62),
            (None, 0, 0),
        ]:
            db.execute("insert into calls values ('j', 'm', 'g', 'verdict', ?, ?, ?, 0, 0)", (prompt, completion, usd))
    again = make(server, cache=path, job="j")
    assert again.budget.spent.tokens == judge.usage.tokens + 5 and again.budget.spent.usd == 0.0
    await again.close()


# --- damaged caches ---------------------------------------------------------------------------------------------------


async def fill(server: JudgeServer, path: Path) -> None:
    assert await score(make(server, cache=path)) == WANTED


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"\xff", b"garbage" * 10, None, 5, "text", 1.5, b"\x93" * 60_000, b"x" * 11_000_000),
        "flip",
    ],
    ids=lambda value: repr(value)[:20],
)
async def test_a_row_that_cannot_be_read_is_asked_for_again_and_written_over(
    server: JudgeServer, tmp_path: Path, value: Any
) -> None:
    path = tmp_path / "v.sqlite"
    await fill(server, path)
    with sqlite3.connect(path) as db:
        [(good,)] = db.execute("select value from verdicts").fetchall()
        place = good.index(msgspec.msgpack.encode(0.875))
        bad = good[: place + 2] + bytes([good[place + 2] ^ 8]) + good[place + 3 :] if value == "flip" else value
        db.execute("pragma ignore_check_constraints = on")
        try:
            db.execute("update verdicts set value = ?", (bad,))
        except sqlite3.IntegrityError:
            db.execute("update verdicts set value = zeroblob(3)")
    asked = len(server.asked)
    for expected in (asked + 1, asked + 1):  # asked once, then had from the cache again
        assert await score(make(server, cache=path)) == WANTED
        assert len(server.asked) == expected


def make_foreign(path: Path, kind: str) -> None:
    match kind:
        case "text":
            path.write_text("not a database " * 100)
        case "directory":
            path.mkdir()
        case "other tables":
            with sqlite3.connect(path) as db:
                db.execute("create table verdicts (name text)")
        case "read-only":
            path.write_bytes(b"")
            path.with_name(path.name + "-wal").mkdir()
        case "locked":
            holder = sqlite3.connect(path, isolation_level=None)
            holder.execute("begin exclusive")
            make_foreign.holder = holder  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["text", "directory", "other tables", "read-only", "locked"])
async def test_a_file_that_is_no_cache_is_one_line_with_its_name(
    server: JudgeServer, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_cli.judges.ruler.verdict_cache.BUSY_S", 0.1)
    make_foreign(tmp_path / "v.sqlite", kind)
    with pytest.raises((UsageError, JudgeStopped), match=r"judge.cache: .*v\.sqlite: .*name another file") as refused:
        judge = make(server, cache=tmp_path / "v.sqlite")
        await judge.judge(rated(QUALITIES))
    assert "\n" not in str(refused.value)


async def test_a_cache_that_another_process_holds_does_not_hold_the_loop(
    server: JudgeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is held for as long as a writer waits: the call is lost in words, while other tasks run."""
    monkeypatch.setattr("art_cli.judges.ruler.verdict_cache.BUSY_S", 1.0)
    judge = make(server, cache=tmp_path / "v.sqlite")
    holder = sqlite3.connect(tmp_path / "v.sqlite", isolation_level=None)
    holder.execute("begin immediate")
    async with Heartbeat() as heart:
        with pytest.raises(JudgeStopped, match="locked"):
            await judge.judge(rated(QUALITIES))
    holder.close()
    await judge.close()
    assert heart.longest_s < HELD_S


# --- mutations --------------------------------------------------------------------------------------------------------


def assert_scored_or_owed(found: dict[str, float] | str, wanted: dict[str, float] | None) -> bool:
    """Whether it is scored. `wanted` None: the answer was changed, and may say other scores, but in range."""
    if isinstance(found, str):
        return False
    assert set(found) == set(WANTED) and all(0 <= reward <= 1 for reward in found.values())
    assert wanted is None or found == wanted
    return True


async def play(server: JudgeServer, start: Callable[[int], Conduct]) -> int:
    """Returns how many of NUM_MUTATIONS groups were scored, each asked once with a different answer.

    If the loop was blocked, the case is repeated, because the machine may be the cause.
    """
    judge = make(server, retries=0, attempts=1)
    num_scored = 0
    async with Heartbeat() as heart:
        for seed in range(NUM_MUTATIONS):
            server.conduct = start(seed)
            for _ in range(5):
                heart.longest_s = 0.0
                found = await ask_once(judge, f"g{seed}")
                for _ in range(3):
                    await asyncio.sleep(0)  # the heart beats
                if heart.longest_s < HELD_S:
                    break
            else:
                raise AssertionError(f"mutation {seed} holds the loop for {heart.longest_s:.3f} s")
            num_scored += assert_scored_or_owed(found, None)
    await judge.close()
    return num_scored


async def ask_once(judge: RulerJudge, group: str) -> dict[str, float] | str:
    try:
        verdicts = await judge.judge(rated(QUALITIES, group=group))
    except JudgeStopped:
        raise
    except JudgeError as owed:
        return str(owed)
    assert set(verdicts) == {f"{group}-{place}" for place in range(len(QUALITIES))}
    return {name.replace(group, "g", 1): verdict.reward for name, verdict in verdicts.items()}


async def test_mutated_verdicts_end_scored_in_range_or_owed(away: JudgeServer) -> None:
    """Mutates the valid answer to the prompt, including ids."""

    def start(seed: int) -> Conduct:
        def change(text: str) -> str:
            changed = next(mutations(text.encode(), seed=seed, count=1)).decode("utf-8", "surrogateescape")
            return changed[: MAX_ANSWER + 1]  # writing more as JSON holds this process, in the judge's own thread

        return Conduct(change_text=change)

    with MemoryBound(mib=256):
        assert 0 < await play(away, start) < NUM_MUTATIONS


async def test_mutated_bodies_end_scored_in_range_or_owed(away: JudgeServer) -> None:
    """The whole body of the HTTP answer, usage included, compressed for every third."""

    def start(seed: int) -> Conduct:
        def change(body: bytes) -> bytes:
            draw = random.Random(seed)
            if seed % 3 == 2:
                return next(mutations(gzip.compress(body, mtime=0), seed=seed, count=1))
            if seed % 3 == 1:
                atom = draw.choice(ATOMS)
                name = draw.choice([b'"usage": ', b'"content": ', b'"choices": ', b'"message": ', b'"finish_reason": '])
                return body.replace(name, name + atom + b', "x": ', 1)
            return next(mutations(body, seed=seed, count=1))

        return Conduct(change_body=change, headers={"Content-Encoding": "gzip"} if seed % 3 == 2 else {})

    with MemoryBound(mib=256):
        assert 0 < await play(away, start) < NUM_MUTATIONS


@pytest.mark.slow
async def test_mutated_caches_give_the_paid_scores_or_none(away: JudgeServer, tmp_path: Path) -> None:
    """A bit, a page or the whole of the SQLite file, or a row's value. Scores are always the judge's own.

    Uses half the usual number, because each mutation writes and opens a database.
    """
    num = NUM_MUTATIONS // 2
    path = tmp_path / "v.sqlite"
    await fill(away, path)
    with sqlite3.connect(path) as db:
        [(key, value)] = db.execute("select key, value from verdicts").fetchall()
        db.execute("pragma wal_checkpoint(truncate)")
        db.execute("pragma journal_mode = delete")
    db.close()
    good = path.read_bytes()
    outcomes = {"scored": 0, "cached": 0, "refused": 0}
    rows = mutations(value, seed=1, count=num)

    def put_back(data: bytes, row: bytes | None) -> None:
        for file in tmp_path.iterdir():
            file.unlink()
        path.write_bytes(data)
        if row is not None:
            with sqlite3.connect(path) as db:
                db.execute("update verdicts set value = ? where key = ?", (row, key))
            db.close()

    with MemoryBound(mib=256):
        async with Heartbeat() as heart:
            for number, data in enumerate(mutations(good, seed=0, count=num)):
                await asyncio.to_thread(put_back, good if number % 2 else data, next(rows) if number % 2 else None)
                try:
                    judge = make(away, cache=path)
                    found = await score(judge)
                except UsageError as refused:
                    assert "v.sqlite" in str(refused) and "\n" not in str(refused)
                    outcomes["refused"] += 1
                    continue
                is_scored = assert_scored_or_owed(found, WANTED)
                assert is_scored or "judge.cache" in str(found)
                outcomes["scored" if is_scored else "refused"] += 1
                outcomes["cached"] += judge.num_cached
    assert outcomes["scored"] > num / 3 and outcomes["refused"] and outcomes["cached"], outcomes
    assert heart.longest_s < HELD_S
