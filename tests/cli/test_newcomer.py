"""What a newcomer stumbled over: small things, a test for each. What is larger has tests in its own room."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli import NAMES, Finding, print_findings
from art_cli.cli.preflight.rollout_checks import _is_odd
from art_cli.config.packaged import packaged
from tests.support.paths import LETTERS
from tests.support.servers.served import make_run

Art = Callable[..., tuple[int, str, str]]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The letters task, in the working directory."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_rollout_without_a_call_may_have_swallowed_the_error_of_its_call(art: Art, project: Path) -> None:
    (project / "rollout.py").write_text("""
async def rollout(policy, scenario):
    try:
        await policy.client.chat.completions.make(model=policy.model)
    except Exception:
        return 0.0
""")
    code, out, _ = art("check", "config.yaml")
    assert code == 1 and "or a `try` of the agent hides why its call failed" in out


@pytest.mark.parametrize(
    ("function", "is_odd"),
    [
        ({"name": "look_up-2", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}}, False),
        ({"name": "any", "parameters": {"properties": {"x": {"anyOf": []}, "y": {"type": ["null", "string"]}}}}, False),
        ({"name": "none"}, False),
        ({"name": "none", "parameters": None}, False),
        ({"name": "look up"}, True),
        ({"name": "größe"}, True),
        ({"name": "x" * 65}, True),
        ({}, True),
        ({"name": "a", "parameters": {"properties": {"word": {"type": "strng"}}}}, True),
        ({"name": "a", "parameters": {"properties": ["word"]}}, True),
        ({"name": "a", "parameters": {"properties": {"word": "string"}}}, True),
        ({"name": "a", "parameters": "object"}, True),
    ],
)
def test_a_tool_that_openai_would_refuse_is_known(function: dict[str, Any], is_odd: bool) -> None:
    assert _is_odd({"type": "function", "function": function}) == is_odd


def test_garbage_in_a_runs_metrics_is_named_with_its_line_and_the_cure(art: Art, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", (1,), rewards={1: 0.5})
    with run.metrics_path.open("a") as file:
        file.write('garbage\n{"step": 2, "split": "train", "metrics": {}}\n')
    for command in ("report", "checkpoints"):
        code, _, err = art(command, run.root)
        assert code == 1 and ":2: JSON is malformed" in err and err.endswith("; mend the line, or remove it\n")


def test_no_summary_of_the_help_is_cut_at_80_columns(art: Art, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = art("--help")
    rows = out.partition("Commands:\n")[2].splitlines()
    assert code == 0 and [row.split()[0] for row in rows if row] == list(NAMES)
    assert not [row for row in rows if row.rstrip().endswith("...") or len(row) > 80]


def test_a_finding_with_a_cure_is_a_doubt_and_not_ok(capsys: pytest.CaptureFixture[str]) -> None:
    """As that of a judge that prefers no right answer to two plus two."""
    print_findings([
        Finding("judge", True, "gave a right answer 0.1 and a wrong one 0.9", "look at judge.rubric"),
        Finding("disk", True, "free"),
        Finding("run", False, "made by another", "change it back"),
        Finding("vllm", True, "not installed", "pip install it", is_missing=True),
    ])  # fmt: skip
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "->" not in line]
    assert words == ["!", "ok", "FAIL", "missing"]


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "empty"])
def test_an_init_that_fails_leaves_nothing_and_runs_again(
    art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """As on a full disk: the error says to run the same command again, and half a project would be refused."""
    project = tmp_path / "mine"
    if not is_new:
        project.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(
            "art_cli.cli.init.packaged", lambda name: packaged(name) if name == "recipes" else tmp_path / "no"
        )
        assert art("init", project, "--recipe", "blank")[0] == 1
    assert project.exists() != is_new and not [*tmp_path.glob("mine/*")]
    assert art("init", project, "--recipe", "blank")[0] == 0
    assert art("init", project, "--recipe", "blank")[0] == 2 and (project / "rollout.py").is_file()
