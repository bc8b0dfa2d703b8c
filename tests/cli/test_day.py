"""A new user's first day, as real commands from an empty directory: each with the answer it has to give.

What each command does in detail has tests of its own; this is the day in one piece, from four files.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.processes import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = """\
name: first
model: {base: "builtin:tiny"}
rollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl, group_size: 4, groups_per_step: 2, max_turns: 2}
sft: {demos: demos.jsonl, learning_rate: 0.003, epochs: 6}
train: {steps: 2, learning_rate: 0.001}
eval: {scenarios: held_out.jsonl, every: 1}
"""
ROLLOUT = """\
async def rollout(policy, scenario):
    messages, text = [{"role": "user", "content": scenario["question"]}], ""
    for _ in range(3):  # one call more than max_turns allows
        try:
            reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, max_tokens=6)
        except Exception:
            return text.count("n") / 100  # the agent looped; attempts still differ, so that a step learns
        text = reply.choices[0].message.content or ""
        if "yes" in text:
            return 1.0
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "again"}]
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def project(tmp_path: Path) -> Path:
    def lines(name: str, rows: list[object]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "rollout.py").write_text(ROLLOUT)
    questions = [{"id": name, "question": f"is {name} a word?"} for name in ("water", "house", "mother", "tree")]
    lines("scenarios.jsonl", questions[:2])
    lines("held_out.jsonl", questions[2:])
    answers = ["yes", "no", "tree"]
    lines(
        "demos.jsonl",
        [
            {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]}
            for row in questions
            for answer in answers
        ],
    )
    return tmp_path


def art(project: Path, *words: object) -> Done:
    done = forked.run(words, cwd=project, timeout=300, env=environment())
    assert "Traceback" not in done.stderr and "bug in art" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}


def test_the_first_day_of_a_new_user(project: Path) -> None:
    """Mistakes, check, an interrupted warm-up, training, going on otherwise, comparing with the base, exporting."""
    # A misspelt key, and a model that is not built in: one line each, and nothing is made.
    assert "did you mean 'learning_rate'" in art(project, "train", "config.yaml", "train.lr=1").err
    assert "there are: tiny" in art(project, "train", "config.yaml", "model.base=builtin:huge").err
    assert not (project / "runs").exists()

    # Check knows without a call that the judge has no key.
    done = art(project, "check", "config.yaml", "judge=ruler", "judge.model=openai/gpt-6.1-sol")
    assert done.code != 0 and "OPENAI_API_KEY" in done.out + done.err
    assert art(project, "check", "config.yaml").code == 0

    # Every attempt of a rollout that fails is a failure of the command.
    (project / "broken.py").write_text("def rollout(policy, scenario):\n    raise KeyError('board')\n")
    done = art(project, "generate", "config.yaml", "rollout.entry=broken.py:rollout", "-o", "broken.jsonl")
    assert done.code == 1 and "8 failed" in done.out and "KeyError" in done.out + done.err

    interrupt_warm_up(project)
    done = art(project, "train", "config.yaml", "--json")
    assert done.code == 0, done.err
    steps = metrics(project, "train")
    assert len(steps) == 2 and all("num_limited" in step and step["num_failed"] == 0 for step in steps)

    # A run goes on with another learning rate, and not with another loss or base.
    assert art(project, "train", "config.yaml", "train.steps=3", "train.learning_rate=0.0005").code == 0
    [change] = json.loads((project / "runs/first/config.json").read_text())["changes"]
    assert change == {"step": 2, "key": "train.learning_rate", "old": 0.001, "new": 0.0005}
    assert "loss: grpo -> dapo" in art(project, "train", "config.yaml", "train.steps=4", "loss=dapo").err

    # The start can be compared with, by a gate on the paired difference; a misspelt metric is told before any game.
    compared = ["eval", "config.yaml", "--checkpoint", "base", "--checkpoint", "runs/first"]
    done = art(project, *compared, "--gate", "reward>=baseline-0.5")
    assert done.code == 0 and "tokens_out" in done.out, done.err
    assert art(project, *compared, "--gate", "rewrad>=0").code == 2

    # Step 0 stays, and the best checkpoint is exported and named.
    assert (project / "runs/first/checkpoints/step_0000").is_dir()
    done = art(project, "export", "runs/first", "--best", "-o", "best")
    assert done.code == 0 and (project / "best/model.safetensors").is_file(), done.err
    assert (project / "runs/first/logs/train.log").stat().st_mode & 0o077 == 0


def interrupt_warm_up(project: Path) -> None:
    """Ctrl-C as soon as the warm-up has begun: the command ends within seconds and says how to go on."""
    words = ["train", "config.yaml", "sft.epochs=400", "name=long"]
    process = forked.Forked(words, cwd=project, stderr=forked.PIPE, env=environment())
    assert process.stderr is not None
    said = ""
    while "sft" not in said and (line := process.stderr.readline()):
        said += line
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130 and "continue with" in rest, said + rest
    assert time.monotonic() - begun < 60


def metrics(project: Path, split: str) -> list[dict[str, float]]:
    lines = (project / "runs/first/metrics.jsonl").read_text().splitlines()
    return [line["metrics"] for line in map(json.loads, lines) if line["split"] == split]
