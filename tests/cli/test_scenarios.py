"""`art scenarios`: a scripted model writes tasks for a real MCP server, with everything that a model does wrong."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli import app as cli
from art_cli.config.compose import load_config
from art_cli.rollouts.scenario_files import RunScenarios
from tests.rollouts.environments.test_mcp import SERVER
from tests.support.servers.chat_server import ChatServer, chatting

PLACE = SERVER.removeprefix("mcp/")
WORDS = [f"w{number}" for number in range(2000)]


def asked_for(body: dict[str, Any]) -> list[tuple[str, int]]:
    """The (tool, difficulty) of each place that a request asks for."""
    lines = body["messages"][1]["content"].splitlines()
    wanted = [
        line.removeprefix("- difficulty ").split(", with the tool ")
        for line in lines
        if line.startswith("- difficulty ")
    ]
    return [(tool, int(level)) for level, tool in wanted]


class Writer:
    """Writes what it is asked for, each task of four words that no other has."""

    def __init__(self) -> None:
        self.words: Iterator[str] = iter(WORDS)

    def __call__(self, body: dict[str, Any], number: int) -> str:
        return json.dumps({"tasks": [self.task(*place) for place in asked_for(body)]})

    def task(self, tool: str, difficulty: int) -> dict[str, Any]:
        return {"task": " ".join(next(self.words) for _ in range(4)), "tools": [tool], "difficulty": difficulty}


def run(server: ChatServer, output: Path, *more: str) -> int:
    common = ["--model", "writer", f"judge.api_base={server.api_base}", "judge.retries=1"]
    return cli.run(["scenarios", "mcp", PLACE, "-o", str(output), *common, *more])


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k-1")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_tasks_are_spread_and_the_file_trains_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty tasks for four tools: ten each, two of each difficulty, in four calls; the price is the configured one."""
    output = tmp_path / "tasks.jsonl"
    with chatting(ChatServer(Writer())) as server:
        price = "judge.price={input: 1000000, output: 2000000}"
        assert run(server, output, "--num", "40", "--json", price) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], told["calls"], told["tokens"]) == (40, 4, 600)
    assert told["cost_usd"] == 4 * (100 + 2 * 50)
    tasks = read(output)
    assert Counter((task["tools"][0], task["difficulty"]) for task in tasks) == {
        (tool, level): 2 for tool in ("add", "count", "fail", "end") for level in range(1, 6)
    }
    assert server.asked[0]["response_format"]["type"] == "json_schema"
    config = tmp_path / "config.yaml"
    rollout = json.dumps({"environment": SERVER, "scenarios": "tasks.jsonl"})
    config.write_text(
        f'model: {{base: "builtin:tiny"}}\nrollout: {rollout}\njudge: {{name: ruler, model: openai/gpt-6.1-sol}}\n'
    )
    assert len(RunScenarios(load_config(config).config, tmp_path).training) == 40


@pytest.mark.slow
def test_a_configuration_gives_the_model_and_the_settings_of_the_environment(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    with chatting(ChatServer(Writer())) as server:
        rollout = json.dumps({"environment": {"name": SERVER, "args": {"tools": ["add"]}}, "scenarios": "tasks.jsonl"})
        judge = json.dumps({"name": "ruler", "model": "m", "api_base": server.api_base})
        config.write_text(f'model: {{base: "builtin:tiny"}}\nrollout: {rollout}\njudge: {judge}\n')
        output = str(tmp_path / "tasks.jsonl")
        assert cli.run(["scenarios", "mcp", PLACE, "-o", output, "--num", "5", "--config", str(config)]) == 0
    assert [task["tools"] for task in read(tmp_path / "tasks.jsonl")] == [["add"]] * 5
    assert server.asked[0]["model"] == "m"


@pytest.mark.slow
def test_malformed_repeated_and_refused_answers_cost_calls_and_never_get_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer()
    good = writer.task("add", 1)
    shouted = {**good, "task": good["task"].upper() + "!"}
    answers = [
        "I am sorry, but I cannot write tasks.",  # sent back, and then it is
        json.dumps({"tasks": [good, shouted, {**good, "tools": ["rm"]}, {**good, "difficulty": 9}]}),
        (500, {"error": {"message": "busy"}}),  # tried again
        json.dumps({"tasks": [shouted]}),
        json.dumps({"tasks": [{**good, "tools": []}]}),  # none usable: sent back
        "{",
        json.dumps({"tasks": [writer.task("count", 2), writer.task("add", 3)]}),
    ]
    with chatting(ChatServer(lambda body, number: answers[number - 1])) as server:  # type: ignore[arg-type, return-value]
        assert run(server, tmp_path / "tasks.jsonl", "--num", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], told["near_duplicates"], told["unusable"], told["problem"]) == (3, 2, 2, "")
    complaint = server.asked[1]["messages"]
    assert complaint[2]["content"] == answers[0] and "no JSON object" in complaint[3]["content"]
    assert len({task["id"] for task in read(tmp_path / "tasks.jsonl")}) == 3


@pytest.mark.slow
def test_a_model_that_repeats_itself_ends_the_command_with_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = json.dumps({"tasks": [Writer().task("add", 1)]})
    with chatting(ChatServer(lambda body, number: same)) as server:
        assert run(server, tmp_path / "tasks.jsonl", "--num", "5") == 1
        assert "1 tasks of 5, because 3 rounds of calls brought nothing new" in capsys.readouterr().out
        assert len(server.asked) == 4
        assert run(server, tmp_path / "tasks.jsonl", "--num", "5") == 2
        assert "--append adds to it" in capsys.readouterr().err
        assert run(server, tmp_path / "tasks.jsonl", "--num", "5", "--append") == 1  # nothing was added


@pytest.mark.slow
def test_append_goes_on_from_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with tasks of the user's own, which are kept as they are."""
    output = tmp_path / "tasks.jsonl"
    own = {"id": 1, "task": "w0 w1 w2 w3", "answer": "42"}
    output.write_text(json.dumps(own) + "\n")
    with chatting(ChatServer(Writer())) as server:
        assert run(server, output, "--num", "12", "--append", "--json") == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["tasks"], told["before"], told["near_duplicates"]) == (12, 1, 1)
        assert read(output)[0] == own
        assert "w0 w1 w2 w3" in server.asked[0]["messages"][1]["content"]
        num_asked = len(server.asked)
        assert run(server, output, "--num", "12", "--append") == 0
        assert len(server.asked) == num_asked


@pytest.mark.slow
def test_what_stops_the_model_stops_the_command_and_keeps_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget of 2,500 tokens, of which a call takes 150; a key that is refused in the second round."""
    with chatting(ChatServer(Writer())) as server:
        assert run(server, tmp_path / "budget.jsonl", "--num", "200", "judge.budget_tokens=2500") == 1
    assert "judge.budget_tokens 2,500" in capsys.readouterr().out
    assert 0 < len(read(tmp_path / "budget.jsonl")) < 200

    writer = Writer()
    refusal = (401, {"error": {"message": "no such key"}})
    with chatting(ChatServer(lambda body, number: writer(body, number) if number < 5 else refusal)) as server:
        assert run(server, tmp_path / "key.jsonl", "--num", "60") == 1
        assert "40 tasks of 60, because" in capsys.readouterr().out
        assert run(server, tmp_path / "none.jsonl", "--num", "60") == 1
    assert "no task was written" in capsys.readouterr().err and not (tmp_path / "none.jsonl").exists()


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = Writer()

    def answer(body: dict[str, Any], number: int) -> str:
        if number == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return writer(body, number)

    with chatting(ChatServer(answer)) as server:
        assert run(server, tmp_path / "tasks.jsonl", "--num", "100") == 130
    assert "the same command with --append continues" in capsys.readouterr().err
    assert len(read(tmp_path / "tasks.jsonl")) == 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["textarena", "x"], "tasks are written for mcp"),
        (["mcp", "no-such-program-at-all"], "no-such-program-at-all"),
        (["mcp", PLACE, "judge=rollout"], "a judge that is a language model"),
        (["mcp", PLACE, "--num", "0"], "--num"),
        (["mcp", PLACE, "judge=ruler", "judge.panel=[{model: openai/gpt-6.1-sol}]"], "one model writes the tasks"),
    ],
)
def test_a_mistake_is_refused_in_words(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["scenarios", *arguments, "-o", str(tmp_path / "x.jsonl")]) == 2
    assert words in capsys.readouterr().err
