"""yes-no-maybe: the prompts, what a reply earns, and a run of the real model as docs/coming-from.md has it."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest

from art_cli import Outcome
from art_cli.runs.run_dir import RunDir
from tests.support.models.recipes import ScriptedPolicy, load
from tests.support.paths import ROOT
from tests.support.processes import forked

RECIPE = load("yes-no-maybe")
SMALL = ["train.steps=1", "rollout.groups_per_step=2", "train.epochs_per_step=1", "eval=null", "rollout.processes=0"]


def test_each_prompt_asks_for_two_or_three_of_the_words_in_another_way() -> None:
    prompts = {scenario["prompt"] for scenario in RECIPE.scenarios.make()}
    assert len(prompts) == len(list(RECIPE.scenarios.make())) == 2 * 2 * (6 + 6)
    asked = {tuple(re.findall("yes|no|maybe", prompt)) for prompt in prompts}
    assert len(asked) == 12 and all(len(set(words)) == len(words) in (2, 3) for words in asked)


@pytest.mark.parametrize(
    ("reply", "reward"), [("yes", 0.5), ("'No.'", 0.75), (" Maybe\n", 1.0), ("maybe not", 0.0), ("", 0.0)]
)
def test_a_reply_earns_by_its_word_alone(reply: str, reward: float) -> None:
    policy = ScriptedPolicy(lambda messages: reply)
    outcome: Outcome = asyncio.run(RECIPE.rollout.rollout(policy, {"prompt": "Answer with yes or no."}))
    assert outcome == Outcome(reward=reward, metrics={"maybe": reward == 1.0})
    assert [message["role"] for message in policy.seen[0]] == ["system", "user", "assistant", "user"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pages_commands_train_the_real_model(tmp_path: Path) -> None:
    """One step of two groups, whose replies earn what their words earn."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    commands = re.findall(r"^art (?:init|train) maybe.*$", page, flags=re.M)
    assert len(commands) == 2
    for line, settings in zip(commands, ([], SMALL), strict=True):
        done = forked.run([*shlex.split(line)[1:], *settings], cwd=tmp_path, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    rows = RunDir(tmp_path / "maybe" / "runs" / "yes-no-maybe").scored(0)
    assert len(rows) == 16
    rewards = RECIPE.rollout.REWARDS
    words = [row.messages[-1]["content"].strip(" .'\n").lower() for row in rows]
    assert [row.reward for row in rows] == [rewards.get(word, 0.0) for word in words]
    assert any(word in rewards for word in words)
