"""`art judge` as its users run it: files of three kinds, resumed, killed, interrupted, with a key that nobody sees."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.cli import app as cli
from art_cli.runs.durable import read_lines, write_lines
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from tests.support.judges.judge_server import Conduct, JudgeServer, read_record, serving
from tests.support.judges.ruler_cases import attempt, rated
from tests.support.paths import ROOT
from tests.support.processes.waiting import wait_until

CANARY = "sk-canary-4f6b1d9c0e7a"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving() as running:
        yield running


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives each test a separate directory and cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return tmp_path


def groups(count: int, *, size: int = 3, **fields: Any) -> list[Trajectory]:
    named = [rated([i / size for i in range(size)], group=f"g{number}", **fields) for number in range(count)]
    return [trajectory for group in named for trajectory in group]


def judge(server: JudgeServer, *arguments: str, file: str = "t.jsonl") -> int:
    return cli.run(["judge", file, f"judge.api_base={server.api_base}", "judge.model=rule", *arguments])


def scored(path: str = "t.scored.jsonl") -> list[ScoredTrajectory]:
    return list(read_lines(Path(path), ScoredTrajectory))


def rewards(path: str = "t.scored.jsonl") -> dict[str, float | None]:
    return {trajectory.id: trajectory.reward for trajectory in scored(path)}


# --- files ------------------------------------------------------------------------------------------------------------


def test_everything_of_a_trajectory_is_unchanged_and_a_failed_one_is_passed_on(server: JudgeServer) -> None:
    rows = groups(2, metrics={"win": 1.0}, metadata={"a": [1]}, returned_reward=0.25, started_at=3.5)
    rows[1].error = "timeout: 3 s"
    write_lines(Path("t.jsonl"), rows)
    assert judge(server) == 0
    for row, out in zip(rows, sorted(scored(), key=lambda each: (each.group_id, each.index)), strict=True):
        plain = msgspec.to_builtins(out)
        given, reward, settings = (plain.pop(name) for name in ("scores", "reward", "judge_settings"))
        assert plain.pop("noise") is None and plain.pop("shadow") == []
        assert plain == msgspec.to_builtins(row)
        assert (reward is None) == (row.error is not None) == (not given)
        assert settings and all(score["settings"] == settings for score in given)
    shown = [read_record(asked["messages"][1]["content"]) for asked in server.asked]
    assert sorted(len(record.attempts) for record in shown) == [2, 3]  # the judge does not see the failed one


def test_lines_of_groups_may_be_mixed_and_a_scored_file_can_be_judged_again(server: JudgeServer) -> None:
    rows = groups(4)
    write_lines(Path("t.jsonl"), sorted(rows, key=lambda row: (row.index, row.group_id)))
    assert judge(server) == 0
    assert judge(server, "-o", "again.jsonl", file="t.scored.jsonl") == 0
    assert rewards() == rewards("again.jsonl") == {row.id: pytest.approx(row.index / 3) for row in rows}


def test_plain_conversations_are_grouped_by_a_key(server: JudgeServer, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"messages": row.messages, "task": {"name": row.group_id}, "reward": 0.5, "note": "n", "metrics": {"won": True}}
        for row in groups(2)
    ]
    Path("t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert judge(server) == 1
    assert "t.jsonl:1: no 'group_id' to group by; name the key with --group-by" in capsys.readouterr().err
    assert judge(server, "--group-by", "task.name") == 0
    assert rewards() == {f"g{number}/{index}": pytest.approx(index / 3) for number in range(2) for index in range(3)}
    first = scored()[0]
    assert (first.returned_reward, first.metrics, first.metadata["note"]) == (0.5, {"won": 1.0}, "n")
    assert first.metadata["task"] == {"name": first.group_id}


def test_arts_own_lines_keep_their_metadata_and_exceptions(server: JudgeServer) -> None:
    """One line per group; recorded choices become messages; exceptions become failed attempts."""
    [*attempts] = groups(1, size=2)
    lines = {
        "trajectories": [
            {
                "messages_and_choices": [
                    *row.messages[:-1],
                    {"finish_reason": "stop", "index": 0, "message": row.messages[-1]},
                ],
                "tools": None, "reward": 0.75, "metrics": {"won": True}, "metadata": {"id": 7}, "logs": ["a log line"],
                "additional_histories": [{"messages_and_choices": [{"role": "user", "content": "side"}]}],
            }
            for row in attempts
        ],
        "metadata": {"scenario": "s"},
        "exceptions": [{"type": "ValueError", "message": "broke", "traceback": "..."}],
    }  # fmt: skip
    Path("t.jsonl").write_text(json.dumps(lines) + "\n")
    assert judge(server) == 0
    good, better, failed = scored()
    assert (good.reward, better.reward, failed.reward) == (0.0, 0.5, None)
    assert (failed.error, failed.group_size, better.returned_reward) == ("ValueError: broke", 3, 0.75)
    assert better.metadata == {"id": 7, "logs": ["a log line"], "group": {"metadata": {"scenario": "s"}}}
    assert better.branches == [[{"role": "user", "content": "side"}]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"messages": []}\n{"a": 1}\n', "t.jsonl:1: no 'group_id'"),
        ('{"a": 1}\n', 't.jsonl:1: expected a trajectory, an ART group, or {"messages": [...]}'),
        ('{"messages": [], "group_id": 1}\n[]\n', "t.jsonl:2: a JSON array begins here"),
        ('{"messages": [], "group_id": 1}\n{"mess\n', "t.jsonl:2: JSON is malformed"),
        ('{"messages": [3], "group_id": 1}\n' * 2, "t.jsonl:1: Expected `object`, got `int` - at `$.messages[0]`"),
        ('{"messages": [], "group_id": 1, "id": "x"}\n' * 2, "t.jsonl:2: id 'x' is used twice in its group"),
        ('{"id": "a", "group_id": "g", "group_size": 1, "index": 0, "schema_version": 99}\n', "newer art"),
    ],
)
def test_a_broken_line_is_named(server: JudgeServer, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("t.jsonl").write_text(text)
    assert judge(server) == 1
    assert says in capsys.readouterr().err


def test_a_torn_last_line_is_left_out_and_its_group_waits(
    server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(Path("t.jsonl"), groups(2))
    whole = Path("t.jsonl").read_bytes()
    Path("t.jsonl").write_bytes(whole[:-40])
    assert judge(server) == 1
    assert "incomplete: g1: 2 of 3 attempts" in capsys.readouterr().out
    assert len(rewards()) == 3
    Path("t.jsonl").write_bytes(whole)
    assert judge(server) == 0
    assert len(rewards()) == 6


def test_an_incomplete_group_is_judged_as_it_is_when_asked(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), groups(1)[:2])
    assert judge(server, "--partial") == 0
    assert len(rewards()) == 2


# --- going on ---------------------------------------------------------------------------------------------------------


def test_what_is_scored_is_not_judged_again_and_what_is_owed_is(
    server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge cannot answer for group g1 until it can: 3 questions, each sent back once, then the group is owed."""
    write_lines(Path("t.jsonl"), groups(3))
    server.conduct = Conduct(misbehaviour="seven", only="Attempt at g1:")
    assert judge(server) == 1
    shown = capsys.readouterr()
    assert "2 groups scored" in shown.out and "owed: g1: rule: no usable verdict, asked 3 times" in shown.out
    assert "1 group not scored and still owed" in shown.err and len(server.asked) == 2 + 6
    server.conduct = Conduct()
    assert judge(server) == 0
    assert "1 group scored (2 were before)" in capsys.readouterr().out
    assert len(scored()) == len(rewards()) == 9


def test_a_torn_output_is_mended_and_its_group_written_again_whole(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), groups(3))
    assert judge(server) == 0
    out = Path("t.scored.jsonl")
    whole = out.read_bytes()
    for lost in (1, 300, 1000):
        out.write_bytes(whole[:-lost])
        assert judge(server) == 0
        assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert len(server.asked) == 3


def test_an_output_of_another_file_or_another_judge_is_not_mixed_into(
    server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(Path("t.jsonl"), groups(1))
    assert judge(server) == 0
    assert judge(server, "judge.votes=2") == 1
    assert "judged with other settings" in capsys.readouterr().err
    write_lines(Path("other.jsonl"), rated([0.1, 0.2], group="new"))
    assert judge(server, "-o", "t.scored.jsonl", file="other.jsonl") == 1
    assert "holds group 'g0', which other.jsonl does not" in capsys.readouterr().err
    assert judge(server, "judge.votes=2", "--fresh") == 0
    assert judge(server, "-o", "t.scored.jsonl", file="t.scored.jsonl") == 2
    assert "input and output are the same file" in capsys.readouterr().err


def test_a_dry_run_says_what_it_takes_and_asks_and_writes_nothing(
    server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(Path("t.jsonl"), groups(2))
    arguments = ["judge.votes=3", "judge.price={input: 1, output: 1}", "--json"]
    assert judge(server, "--dry-run", *arguments) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["calls"] == 6 and server.asked == [] and not Path("t.scored.jsonl").exists()
    assert judge(server, *arguments) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["calls"] == 6
    assert before["prompt_tokens"] == pytest.approx(after["prompt_tokens"], rel=0.02)
    Path("t.scored.jsonl").unlink()
    assert judge(server, "--dry-run", *arguments) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["calls"], again["cached"], again["usd"]) == (0, 6, 0.0)


def test_a_spent_budget_saves_what_there_is_and_a_larger_one_goes_on(
    server: JudgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(Path("t.jsonl"), groups(10))
    assert judge(server, "judge.budget_tokens=3000") == 1
    shown = capsys.readouterr()
    assert "of judge.budget_tokens 3,000 spent" in shown.err and "raise it" in shown.err
    there = len(rewards())
    assert 0 < there < 30
    assert judge(server, "judge.budget_tokens=3000") == 1  # what the first process spent still counts
    assert len(rewards()) == there
    assert judge(server, "judge.budget_tokens=100000") == 0
    assert len(rewards()) == 30 and len(server.asked) == 10


def test_gates_of_a_file_without_groups_are_missed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.jsonl").touch()
    assert cli.run(["judge", "empty.jsonl", "judge=rollout", "-o", "s.jsonl", "--gate", "pairwise_accuracy>=0.8"]) != 0
    assert "no group in it" in capsys.readouterr().err


def test_a_report_and_its_gate(server: JudgeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Gold is the true quality but for the last group, where it is turned round: 3 of 4 groups agree, 9 of 12 pairs."""
    rows = groups(4)
    for row in rows:
        row.returned_reward = -row.index if row.group_id == "g3" else row.index
    write_lines(Path("t.jsonl"), rows)
    assert judge(server, "--report", "--gold", "returned_reward", "--html", "r.html") == 0
    assert "Kendall" in capsys.readouterr().out
    gold = ["--gold", "returned_reward"]
    assert cli.run(["judge", "t.scored.jsonl", *gold, "--gate", "pairwise_accuracy>=0.75", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)["values"]
    assert values["pairwise_accuracy"] == 0.75 and values["kendall_tau"] == 0.5 and values["best_of_group"] == 0.75
    assert cli.run(["judge", "t.scored.jsonl", *gold, "--gate", "pairwise_accuracy>=0.8"]) == 1
    assert "gate missed: pairwise_accuracy is 0.7500, not >= 0.8" in capsys.readouterr().err
    assert cli.run(["judge", "t.scored.jsonl", *gold, "--gate", "accuracy>=0.8"]) == 2
    assert Path("r.html").read_text().startswith("<!doctype html>")


def test_model_and_rubric_options_choose_ruler_over_a_configurations_judge(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), groups(1))
    Path("rubric.txt").write_text("Shorter is better.")
    Path("config.yaml").write_text(
        "model: {base: b}\nrollout: {entry: 'r.py:r', scenarios: s.jsonl}\njudge: {name: rollout}\n"
    )
    options = ["--config", "config.yaml", "--model", "mine", "--rubric", "rubric.txt"]
    assert cli.run(["judge", "t.jsonl", *options, f"judge.api_base={server.api_base}"]) == 0
    [asked] = server.asked
    assert asked["model"] == "mine" and "Shorter is better." in asked["messages"][0]["content"]
    assert scored()[0].scores[0].model == "mine"


def test_a_configurations_judge_is_used(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), groups(1, returned_reward=0.5))
    ruler = f"{{name: ruler, model: m, api_base: '{server.api_base}'}}"
    blend = f"{{name: blend, blend: {{a: 3, rollout: 1}}, judges: {{a: {ruler}}}}}"
    Path("config.yaml").write_text(
        f"model: {{base: b}}\nrollout: {{entry: 'r.py:r', scenarios: s.jsonl}}\njudge: {blend}\n"
    )
    assert cli.run(["judge", "t.jsonl", "--config", "config.yaml"]) == 0
    assert rewards() == {f"g0-{index}": pytest.approx((3 * index / 3 + 0.5) / 4) for index in range(3)}
    assert [score.judge for score in scored()[0].scores] == ["ruler", "rollout"]


# --- kills, interrupts, two at once -----------------------------------------------------------------------------------


def start(server: JudgeServer, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "art_cli", "judge", "t.jsonl", f"judge.api_base={server.api_base}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, "judge.model=rule", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def paid(place: Path) -> set[str]:
    """The keys in the verdict cache."""
    with contextlib.closing(sqlite3.connect(place / "cache" / "art" / "verdicts.sqlite")) as database:
        return {key for (key,) in database.execute("select key from verdicts")}


def questions(asked: Sequence[dict[str, Any]]) -> list[str]:
    return [body["messages"][1]["content"] for body in asked]


@pytest.mark.slow
def test_killed_every_group_is_scored_once_and_no_finished_verdict_paid_twice(server: JudgeServer, place: Path) -> None:
    """60 groups, 3 kills, 4 calls at once. A verdict is finished when it is in the cache.

    Of the 12 questions before a kill at least 8 are answered and kept. What is asked again was in flight: 4 a kill.
    """
    write_lines(Path("t.jsonl"), groups(60))
    server.conduct = Conduct(delay_s=0.01)
    for kill in range(1, 4):
        process = start(server, "judge.concurrency=4")
        target = len(server.asked) + 12
        wait_until(lambda target=target: len(server.asked) >= target)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        assert len(paid(place)) >= 8 * kill
    assert judge(server) == 0
    assert len(scored()) == len(rewards()) == 180
    asked = questions(server.asked)
    assert len(set(asked)) == len(paid(place)) == 60 and len(asked) <= 60 + 3 * 4


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_scored_and_says_how_to_go_on(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), groups(50))
    server.conduct = Conduct(delay_s=0.02)
    process = start(server, "judge.concurrency=2")
    wait_until(lambda: len(server.asked) >= 8)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "the same command continues with the rest" in err
    assert 0 < len(rewards()) < 150
    assert judge(server) == 0
    assert len(scored()) == len(rewards()) == 150


@pytest.mark.slow
def test_two_at_once_on_one_output_are_refused(server: JudgeServer, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(Path("t.jsonl"), groups(2))
    server.conduct = Conduct(misbehaviour="hang")
    process = start(server)
    wait_until(lambda: len(server.asked) >= 1)
    assert judge(server) == 1
    assert "another process is writing it" in capsys.readouterr().err
    process.kill()
    process.communicate(timeout=10)


# --- the key ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("source", ["environment", "dotenv"])
@pytest.mark.parametrize("is_right", [True, False])
def test_the_key_reaches_the_server_and_nothing_else(
    server: JudgeServer, place: Path, source: str, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server quotes the key it was given, in an error or in every explanation. No file or output may hold it."""
    server.conduct = Conduct(key=CANARY if is_right else "another", says=f"your key is {CANARY}")
    write_lines(Path("t.jsonl"), groups(2))
    if source == "environment":
        monkeypatch.setenv("MY_JUDGE_KEY", CANARY)
    else:
        Path(".env").write_text(f"# keys\nexport MY_JUDGE_KEY='{CANARY}'\n")
    process = start(
        server, "judge.api_key_env=MY_JUDGE_KEY", "--verbose", "--report", "--html", "r.html", "judge.retries=0"
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == (0 if is_right else 1), err
    assert CANARY not in out + err
    assert is_right or "401" in err and "***" in err
    files = [path for path in place.rglob("*") if path.is_file() and path.name != ".env"]
    assert files and not [path for path in files if CANARY.encode() in path.read_bytes()]
    if is_right:
        assert scored()[0].scores[0].explanation == "your key is ***"


def test_attempts_without_an_answer_still_make_a_group(server: JudgeServer) -> None:
    write_lines(Path("t.jsonl"), [attempt(0, [], size=2), attempt(1, [], size=2, error="x: y")])
    assert judge(server) == 0
    assert rewards() == {"g-0": 0.0, "g-1": None}
