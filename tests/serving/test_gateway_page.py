"""The loop from production, run as docs/gateway.md has it: gateway in front of a checkpoint, judge, step."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from art_cli.runs.durable import read_lines
from art_cli.runs.manifest import policy_digest, read_manifest
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS, ROOT
from tests.support.processes import forked

PAGE = (ROOT / "docs" / "gateway.md").read_text()


def shell_lines(beginning: str) -> list[str]:
    """Returns the commands of the page's first block that has this beginning of a line, without their comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    block = next(block for block in blocks if f"\n{beginning}" in block)
    return [line.partition("   #")[0].strip() for line in block.splitlines() if line.strip()]


def share_of_vowels(conversations: Sequence[Sequence[tuple[str, str]]]) -> float:
    text = "".join(text for conversation in conversations for role, text in conversation if role == "assistant")
    return sum(letter in "aeiou" for letter in text) / max(len(text), 1)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a run `mine` whose best checkpoint is its step 1, and whose newest is its step 3."""
    copy = tmp_path / "project"
    shutil.copytree(LETTERS, copy, ignore=shutil.ignore_patterns("runs"))
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text().replace("name: letters", "name: mine"))
    settings = ["train.steps=3", "train.learning_rate=0.3", "eval.every=1", "train.keep_checkpoints=9"]
    settings.append("train.max_kl=null")  # large steps, so that each policy answers differently
    done = forked.run(["train", "config.yaml", *settings], cwd=copy, timeout=300)
    assert done.returncode == 0, done.stderr
    metrics = copy / "runs" / "mine" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["split"] == "eval":
            line["metrics"]["reward"] = 0.9 if line["step"] == 1 else 0.1
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


@contextlib.contextmanager
def started(command: str, project: Path) -> Iterator[dict[str, str]]:
    """Yields what `art gateway` prints of itself with these words, and ends it as Ctrl-C does."""
    words = [*command.split()[1:], "--port", "0", "--json"]
    process = forked.Forked(words, cwd=project, stdout=forked.PIPE, stderr=forked.DEVNULL)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=30)
        process.stdout.close()


@pytest.mark.slow
def test_the_pages_commands_continue_from_the_checkpoint_that_answered(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving_line, collecting, judging, stepping = shell_lines("art gateway config.yaml --checkpoint runs/mine")[1:]
    with started(serving_line, project) as gateway:
        for number in range(4):
            body = {
                "model": gateway["model"],
                "max_tokens": 6,
                "messages": [{"role": "user", "content": "letters"}],
                "seed": number,
            }
            asked = urllib.request.Request(
                f"{gateway['url']}/chat/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json", "Authorization": "Bearer any", "X-Art-Scenario": "one",
                 "X-Art-Conversation": f"c{number}"},
            )  # fmt: skip
            with urllib.request.urlopen(asked, timeout=60) as answer:
                digest = answer.headers["x-art-policy"]
    subprocess.run(["bash", "-c", collecting], cwd=project, check=True)
    run = RunDir(project / "runs" / "mine")
    manifest = read_manifest(run.checkpoint_path(1))
    assert manifest.origin is not None
    assert digest == policy_digest(manifest.origin, manifest.files)
    seen = list(read_lines(project / "seen.jsonl", Trajectory))
    assert len(seen) == 4
    assert {(turn.step, turn.policy) for each in seen for turn in each.turns} == {(1, digest)}
    with serving(Conduct(rule=share_of_vowels)) as judge:
        monkeypatch.setenv("OPENAI_BASE_URL", judge.api_base)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")
        done = forked.run(judging.split()[1:], cwd=project, timeout=120)
        assert done.returncode == 0, done.stderr
    done = forked.run([*stepping.split()[1:], "train.learning_rate=0.3"], cwd=project, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "policy: " in done.stderr and "step_0001" in done.stderr
    assert read_manifest(project / "checkpoints" / "next").step == 2
