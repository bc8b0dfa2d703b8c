"""docs/coming-from.md is true: its files are written, its commands run, its tables compose."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from art_cli.config.compose import load_config
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import CLIENTS, ROOT
from tests.support.processes import forked

PAGE = (ROOT / "docs" / "coming-from.md").read_text()
PARTS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.M)[1:])
SMALL = ["model.base=builtin:tiny", "train.steps=1", "rollout.groups_per_step=2", "rollout.group_size=4"]
SMALL += ["rollout.sampling.max_tokens=4", "rollout.processes=0", "train.epochs_per_step=1"]


def blocks(part: str, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", PARTS[part], flags=re.M | re.S)
    return [text for name, text in found if name == language]


def write_files(part: str, place: Path) -> None:
    """Writes the files of a part: those whose first line has their name, and the lines of its .jsonl."""
    for text in [*blocks(part, "python"), *blocks(part, "yaml")]:
        path = place / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    for text in blocks(part, "json"):
        name = re.search(r"\b(?:questions|train|log)\.jsonl", PARTS[part])
        assert name
        (place / name[0]).write_text(text)


def commands(part: str) -> list[str]:
    return [line for block in blocks(part, "") for line in block.splitlines()]


def run(line: str, place: Path, *settings: str) -> None:
    """Runs a command of the page."""
    if line.startswith("python "):
        subprocess.run(["bash", "-c", line.replace("python", sys.executable, 1)], cwd=place, check=True, timeout=60)
        return
    program, *words = shlex.split(line, comments=True)
    assert program == "art"
    done = forked.run([*words, *settings], cwd=place, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def scored(run_directory: Path) -> Sequence[ScoredTrajectory]:
    return RunDir(run_directory).scored(0)


def shortness(conversations: Sequence[Sequence[tuple[str, str]]]) -> float:
    """0.71 for Rome, and 0.42 for a reply of 14 letters."""
    length = sum(len(text) for conversation in conversations for role, text in conversation if role == "assistant")
    return 10 / (10 + length)


@pytest.fixture
def judge_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """RULER's default model, played by a server for which a short reply is a good one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with serving(Conduct(rule=shortness)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.api_base)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
        yield server


def test_the_agents_of_the_page_are_those_that_other_tests_play(tmp_path: Path) -> None:
    """recipes/yes-no-maybe, and the LangGraph agent of tests/rollouts/test_agents.py, which trains it."""
    write_files("OpenPipe's ART", tmp_path)
    recipe = (ROOT / "recipes" / "yes-no-maybe" / "rollout.py").read_text()
    assert (tmp_path / "maybe" / "rollout.py").read_text() == f"# maybe/rollout.py\n{recipe}"
    write_files("A LangGraph agent", tmp_path)
    agent = (CLIENTS / "agents" / "langgraph_agent.py").read_text()
    assert (tmp_path / "agent.py").read_text() == f"# agent.py\n{agent}"
    (tmp_path / "questions.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    assert load_config(tmp_path / "config.yaml", []).config.rollout.entry == "agent.py:rollout"


@pytest.mark.parametrize("part", PARTS)
def test_each_setting_in_a_table_composes(part: str, tmp_path: Path) -> None:
    rows = "\n".join(line for line in PARTS[part].splitlines() if line.startswith("| "))
    found = re.findall(r"`((?:model|rollout|train|judge|eval|loss): \{.*?\})`", rows)
    base = {"model": {"base": "builtin:tiny"}, "rollout": {"entry": "a.py:b", "scenarios": "s.jsonl"}}
    for text in found:
        [(section, values)] = yaml.safe_load(text).items()
        (tmp_path / "config.yaml").write_text(json.dumps(base | {section: base.get(section, {}) | values}))
        assert load_config(tmp_path / "config.yaml", []).config.model.base


@pytest.mark.slow
def test_reward_functions_of_trl_train(tmp_path: Path) -> None:
    write_files("TRL", tmp_path)
    check, train = commands("TRL")
    run(check, tmp_path, *SMALL, "--no-judge")
    run(train, tmp_path, *SMALL, "name=mine")
    rows = scored(tmp_path / "runs" / "mine")
    assert len(rows) == 8
    for row in rows:
        reply = row.messages[-1]["content"]
        right, brief = float(row.scenario["answer"] in reply), -len(reply) / 100
        assert row.reward == pytest.approx(right + 0.2 * brief)
        assert [(score.judge, score.score) for score in row.scores] == [("right", right), ("brief", brief)]


@pytest.mark.slow
@pytest.mark.usefixtures("judge_server")
def test_a_log_is_imported_judged_and_learned_from(tmp_path: Path) -> None:
    part = "A log of OpenAI calls"
    write_files(part, tmp_path)
    import_, judge, choose, sft = commands(part)
    for line in (import_, judge, choose):
        run(line, tmp_path)
    kept = [json.loads(line) for line in (tmp_path / "good.jsonl").read_text().splitlines()]
    assert [row["messages"][-1]["content"] for row in kept] == ["Rome"]
    assert len(list(read_lines(tmp_path / "scored.jsonl", ScoredTrajectory))) == 2
    run(sft, tmp_path, "model.base=builtin:tiny")
    assert (tmp_path / "start" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.usefixtures("judge_server")
def test_a_grader_of_openai_trains_alone_and_beside_ruler(tmp_path: Path) -> None:
    part = "OpenAI's reinforcement fine-tuning"
    write_files(part, tmp_path)
    train, train_ruler = commands(part)
    run(train, tmp_path, *SMALL, "name=mine")
    for row in scored(tmp_path / "runs" / "mine"):
        reply = row.messages[-1]["content"]
        grades = {"exact": float(reply == row.scenario["reference_answer"]), "brief": 1 / (1 + len(reply))}
        assert {score.judge: score.score for score in row.scores} == grades
        assert row.reward == pytest.approx(0.8 * grades["exact"] + 0.2 * grades["brief"])
    run(train_ruler, tmp_path, *SMALL, "name=both")
    for row in scored(tmp_path / "runs" / "both"):
        assert [score.judge for score in row.scores] == ["grade", "ruler"]
