"""The Claude Agent SDK, whose command line is Claude Code, is recorded and trained as it comes, without a network."""

import json
import shutil
from pathlib import Path

import pytest

from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import prompt, sequence
from tests.support.others.real_agents import MARKS, PYTHON
from tests.support.paths import CLIENTS
from tests.support.processes import forked
from tests.support.processes.stage import Stage
from tests.support.standins.template_backend import THINKS, TemplateBackend, scripted

PLACE = CLIENTS / "agents"
IS_THERE = any(PYTHON.parent.parent.glob("lib/*/site-packages/claude_agent_sdk"))

pytestmark = [*MARKS, pytest.mark.skipif(not IS_THERE, reason="no claude-agent-sdk in .venv-agents: make test-agents")]

CALL = '<tool_call>\n{"name": "mcp__adder__add", "arguments": {"b":3,"a":  2}}\n</tool_call>'
REPLIES = (f"<think>\nI add.\n</think>\n\n{CALL}", f"Once more. \n{CALL}", f" \n{CALL}", "The sum is 5.")


async def test_an_episode_of_the_claude_agent_sdk_is_one_sequence(tmp_path: Path) -> None:
    """Four turns with thoughts, a tool, and text of a single space: each prompt continues all previous tokens."""
    backend = TemplateBackend(scripted(*REPLIES), template=THINKS)
    shutil.copytree(PLACE, tmp_path / "place")
    source = (PLACE / "claude_sdk.py").read_text()
    (trajectory,) = await Stage(tmp_path / "place", backend).play(source, python=PYTHON, timeout_s=180)
    assert trajectory.error is None
    assert trajectory.metadata["called"] == [["add", {"a": 2, "b": 3}]] * 3
    assert (trajectory.metadata["text"], trajectory.returned_reward) == ("The sum is 5.", 1.0)
    assert [turn.sampled_ids for turn in trajectory.turns] == [backend.encode(f"{text}<|im_end|>") for text in REPLIES]
    for index in range(1, len(REPLIES)):
        before = sequence(trajectory.turns, index - 1)
        assert prompt(trajectory.turns, index)[: len(before)] == before
    assert trajectory.metrics["num_branches"] == 0 and trajectory.branches == []
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["mcp__adder__add"]


async def test_claude_code_as_a_command_finds_the_gateway_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rollout: {command: [claude, -p, ...]}`: what it prints, the policy's reply, is the outcome."""
    (program,) = PYTHON.parent.parent.glob("lib/*/site-packages/claude_agent_sdk/_bundled/claude")
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))
    monkeypatch.setenv("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
    backend = TemplateBackend(scripted("0.5"))
    command = [str(program), "-p", "Say a number.", "--tools", ""]
    (trajectory,) = await Stage(tmp_path, backend).play(entry=None, command=command, timeout_s=180)
    assert (trajectory.error, trajectory.returned_reward) == (None, 0.5)
    (turn,) = trajectory.turns
    assert turn.sampled_ids == backend.encode("0.5<|im_end|>")


@pytest.mark.slow
def test_the_claude_agent_sdk_is_trained(tmp_path: Path) -> None:
    """Two steps on the embedded engine. The model is random, and its nonsense is recorded."""
    (tmp_path / "scenarios.jsonl").write_text('{"id": "one"}\n')
    config = tmp_path / "config.yaml"
    config.write_text(
        "name: claude\nmodel: {base: 'builtin:tiny'}\nengine: {name: embedded}\nlearner: {name: torch, device: cpu}\n"
        f"runs: {tmp_path}\ntrain: {{steps: 2}}\n"
        f"rollout: {{entry: '{PLACE}/claude_sdk.py:rollout', python: '{PYTHON}', scenarios: scenarios.jsonl,\n"
        "          group_size: 2, groups_per_step: 1, sampling: {max_tokens: 20}, concurrency: 1}\n"
    )
    done = forked.run(["train", config], timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    run = RunDir(tmp_path / "claude")
    assert run.checkpoint_steps()[-1] == 2
    paths = sorted(run.root.glob("step_*/trajectories.jsonl"))
    played = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    assert len(played) == 4
    for each in played:
        assert each.get("error") is None
        assert all(0 < len(turn["sampled_ids"]) <= 20 for turn in each["turns"])
        assert each["turns"][0]["asked"] == {"max_tokens": 32_000}
