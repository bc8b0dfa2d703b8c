"""examples/ci is true: the shell lines of its two files run, one by one, in a temporary project.

Only `pip`, `gh` and the time limits are stood in for; actions (`uses`) are not run.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from tests.support.paths import LETTERS, ROOT
from tests.support.processes import forked

PAGE = ROOT / "docs/eval.md"
GITHUB = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c"]  # as its runner starts `run`
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def files() -> dict[str, Any]:
    """The files that docs/eval.md names, by the name in their first line."""
    paths = [ROOT / "examples/ci" / name for name in ("agent.yml", "gitlab-ci.yml")]
    assert all(f"(../{path.relative_to(ROOT)})" in PAGE.read_text() for path in paths)
    return {path.read_text().split()[1]: yaml.safe_load(path.read_text()) for path in paths}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The letters task as a project, with the words that the jobs run on the path."""
    root = tmp_path / "project"
    shutil.copytree(LETTERS, root, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    (root / "requirements.txt").write_text("art-cli[train]\n")
    words = {
        "pip": 'test "$*" = "install -r requirements.txt" && test -f requirements.txt',
        "gh": 'test "$1 $2" = "pr comment" && test "$4" = "--body-file" && cp "$5" comment.md',
    }
    (tmp_path / "bin").mkdir()
    for name, line in words.items():
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    return root


def shell(project: Path, words: list[str], **variables: str) -> int:
    places = project.parent / "bin"
    environment = os.environ | {"PATH": f"{places}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)} | variables
    server = forked.write_art(places / "art")
    done = subprocess.run(
        words, cwd=project, env=environment, pass_fds=[server], capture_output=True, text=True, timeout=300
    )
    assert "Traceback" not in done.stderr, done.stderr
    print(words[-1], done.stdout[-2000:], done.stderr[-2000:])
    return done.returncode


def on_github(project: Path, job: str) -> dict[str, int]:
    """Runs a job as GitHub does: after a failure only steps with `if: always()`. Returns the codes by step."""
    whole = files()[".github/workflows/agent.yml"]
    codes = dict[str, int]()
    for step in whole["jobs"][job]["steps"]:
        if "run" not in step or (any(codes.values()) and step.get("if") != "always()"):
            continue
        assert "${{" not in step["run"], "a shell line with an expression runs what a pull request writes there"
        variables = {
            "GITHUB_STEP_SUMMARY": str(project / "summary"),
            "PAGES": "https://host/runs/7",
            "PULL_REQUEST": "7",
        }
        codes[step.get("name", step["run"].split("\n")[0])] = shell(project, [*GITHUB, step["run"]], **variables)
    return codes


def verdicts(path: Path) -> dict[str | None, bool]:
    return {
        test.get("name"): test.find("failure") is None for test in ElementTree.parse(path).getroot().iter("testcase")
    }


def test_the_jobs_of_github_gate_a_pull_request_train_at_night_and_comment(project: Path) -> None:
    codes = on_github(project, "gate")
    assert len(codes) == 6 and set(codes.values()) == {0}, codes
    comment = (project / "comment.md").read_text()
    assert comment == (project / "eval.md").read_text() == (project / "summary").read_text()
    assert comment.startswith("### art eval: every gate holds\n")
    assert comment.endswith("[The whole page](https://host/runs/7)\n")
    assert set(verdicts(project / "eval.xml").values()) == {True}
    assert "view.html" in {path.name for path in project.iterdir()}

    codes = on_github(project, "nightly")
    assert len(codes) == 5 and set(codes.values()) == {0}, codes
    assert "### art report: step 4 of 4, finished" in (project / "summary").read_text()
    assert verdicts(project / "report.xml") == {"learned": True}


def test_a_missed_gate_fails_the_job_and_is_in_its_comment(project: Path) -> None:
    """A pull request that breaks the agent for half of the scenarios: the page and the comment are still made."""
    code = (project / "rollout.py").read_text()
    late = "    if scenario['id'] in ('letters-2', 'letters-3'):\n        raise KeyError('board')\n    messages = ["
    (project / "rollout.py").write_text(code.replace("    messages = [", late, 1))
    codes = on_github(project, "gate")
    assert (codes.pop("gates"), set(codes.values())) == (1, {0}), codes
    comment = (project / "comment.md").read_text()
    assert "of 2 gates missed" in comment and "| `failed<=0.05` | 0.400" in comment
    assert verdicts(project / "eval.xml")["failed<=0.05"] is False


def test_the_lines_of_gitlab_are_those_of_github(project: Path) -> None:
    """What the tests above ran, with another address and fewer files. What `gate` keeps is made by its lines."""
    gitlab = {name: job for name, job in files()[".gitlab-ci.yml"].items() if "script" in job}
    github = files()[".github/workflows/agent.yml"]["jobs"]
    assert gitlab.keys() == github.keys()
    for name, job in gitlab.items():
        ran = " ".join(step["run"] for step in github[name]["steps"] if "run" in step).replace("\\\n", " ").split()
        for line in [*job["script"], *job.get("after_script", [])]:
            words = line.replace("$CI_JOB_URL/artifacts/browse", "$PAGES").split()
            assert all(word in ran for word in words), line
    for line in [*gitlab["gate"]["script"], *gitlab["gate"]["after_script"]]:
        assert shell(project, ["bash", "-e", "-o", "pipefail", "-c", line], CI_JOB_URL="https://host/7") == 0, line
    for kept in [*gitlab["gate"]["artifacts"]["paths"], gitlab["gate"]["artifacts"]["reports"]["junit"]]:
        assert list(project.glob(kept)), kept
    assert set(verdicts(project / "eval.xml").values()) == {True}


def test_the_page_shows_a_comment_as_it_is_written() -> None:
    """The block was written by `art eval`; its head, rows and link are what the code writes."""
    [block] = re.findall(r"^```markdown\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    assert re.match(r"### art eval: (every gate holds|\d of \d gates missed)\n\n\| gate \|", block)
    assert "| policy | metric | mean [95 %] | scenarios | difference to the first [95 %] |" in block
