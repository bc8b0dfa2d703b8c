"""yes-no-maybe: the prompts, what a reply earns, and a small run as docs/coming-from.md has it."""

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
SMALL = [
    "model.base=builtin:tiny",
    "train.steps=1",
    "rollout.groups_per_step=2",
    "rollout.group_size=8",
    "eval=null",
    "rollout.processes=0",
]


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
    assert [message["role"] for message in policy.seen[0]] == ["system", *["user", "assistant"] * 2, "user"]


@pytest.mark.slow
def test_the_pages_commands_play_and_score_the_prompts(tmp_path: Path) -> None:
    """With a small random model, which says none of the words, so that each attempt earns 0 and nothing is learned."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    init, train = re.findall(r"^art (?:init|train) maybe.*$", page, flags=re.M)
    assert forked.run(shlex.split(init)[1:], cwd=tmp_path, timeout=60).returncode == 0
    done = forked.run([*shlex.split(train)[1:], *SMALL], cwd=tmp_path, timeout=200)
    assert done.returncode == 0 or "no signal" in done.stderr, done.stderr[-3000:]
    rows = RunDir(tmp_path / "maybe" / "runs" / "maybe").scored(0)
    assert len(rows) == 16 and len({row.scenario["prompt"] for row in rows}) == 2
    assert all(row.reward == 0.0 and row.metrics["maybe"] == 0.0 for row in rows)
