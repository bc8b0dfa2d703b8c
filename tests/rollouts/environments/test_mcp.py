"""An MCP server as an environment: the agent gets its tools, and each attempt starts a separate server."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_cli.rollouts.environments import Settings, open_environment
from art_cli.rollouts.environments.mcp import has_answer
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import UsageError
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import Answer, ScriptedBackend, tool_call

UNSEEN = "[image, which is not shown]"
SERVER = f"mcp/{sys.executable} {Path(__file__).with_name('mcp_server.py')}"


async def played(stage: Stage, *tasks: dict[str, Any], **options: Any) -> list[Trajectory]:
    common: dict[str, Any] = {"group_id": "g", "group_size": 1, "index": 0, "step": 0}
    plans = [
        RolloutPlan(trajectory_id=f"t{index}", scenario={"id": str(index), **task}, **common)
        for index, task in enumerate(tasks)
    ]
    environment = {"name": SERVER, **options}
    async with stage.open(entry=None, environment=environment, processes=0, concurrency=1) as runner:
        await runner.run(plans, stage.finished.append)
    return stage.finished


def scripted(*answers: Answer) -> ScriptedBackend:
    said: Iterator[Answer] = iter(answers)
    return ScriptedBackend(lambda request: next(said))


async def test_the_servers_tools_are_called_until_the_policy_answers(tmp_path: Path) -> None:
    """Wrong calls get an error message. `count` is 1 in each attempt, because servers are not shared."""
    broken = tool_call("add")
    broken["tool_calls"][0]["function"]["arguments"] = "{"
    calls = [tool_call("add", a=17, b=25), broken, tool_call("add", a="x"), tool_call("sub"), tool_call("fail")]
    calls += [tool_call("add", a="\ud800", b=1), tool_call("add", a=float("nan"), b=1)]
    stage = Stage(tmp_path, scripted(*calls, tool_call("count"), "It is 42.", tool_call("count"), "It is 421."))
    task = {"task": "What is 17 + 25?", "answer": "42"}
    right, wrong = await played(stage, task, task)
    assert (right.error, right.returned_reward) == (None, 1.0)
    assert right.metrics.items() >= {"tool_calls": 8, "tool_errors": 6, "solved": 1.0}.items()
    told = [str(message["content"]) for message in right.messages if message["role"] == "tool"]
    assert [each.splitlines() for each in (told[0], told[7])] == [["42", UNSEEN], ["1", UNSEEN]]
    assert "not JSON" in told[1] and "add" in told[2] and "unknown tool 'sub'" in told[3]
    assert "it is broken" in told[4] and all("not JSON" in each for each in told[5:7])
    assert [tool["function"]["name"] for tool in right.tools] == ["add", "count", "fail", "end"]
    assert right.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert (wrong.returned_reward, str(wrong.messages[2]["content"]).splitlines()[0]) == (0.0, "1")


async def test_a_server_that_ends_fails_the_attempt_and_a_task_without_an_answer_has_no_reward(tmp_path: Path) -> None:
    stage = Stage(tmp_path, scripted(tool_call("end"), "I say nothing."))
    failed, unjudged = await played(stage, {"task": "End."}, {"task": "Speak."}, args={"tools": ["end"]})
    assert failed.error is not None and failed.error.startswith("EnvironmentFault: mcp/")
    assert (unjudged.error, unjudged.returned_reward) == (None, None)
    assert [tool["function"]["name"] for tool in unjudged.tools] == ["end"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings("mcp/no-such-program-at-all"), "no-such-program-at-all"),
        (Settings(SERVER, {"tools": ["sub"]}), "has no 'sub'"),
        (Settings(SERVER, {"variables": ["NOT_SET_AT_ALL"]}), "NOT_SET_AT_ALL is not set"),
        (Settings(SERVER, {"timeout": 3}), "did you mean 'timeout_s'?"),
        (Settings("mcp/'open"), "not a command line"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_in_words(settings: Settings, words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        open_environment(settings)
    assert words in str(refusal.value)


NOISE = r"""
import runpy, sys
for line in (b"starting up", b"[1, 2", b'{"jsonrpc": "2.0", "id": [1], "result": {}}', b'"\ud800"'):
    sys.stdout.buffer.write(line + b"\n")
sys.stdout.flush()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


async def test_lines_of_a_server_that_are_no_messages_are_one_line_each_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "noisy.py").write_text(NOISE)
    name = f"mcp/{sys.executable} {tmp_path / 'noisy.py'} {Path(__file__).with_name('mcp_server.py')}"
    (played_,) = await played(Stage(tmp_path, scripted(tool_call("count"), "done")), {"task": "Count."}, name=name)
    assert played_.error is None
    formatted = [logging.Formatter().format(record) for record in caplog.records if record.name.startswith("mcp")]
    assert len(formatted) >= 4
    assert all(line.startswith("MCP: ") and "Traceback" not in line and "\n" not in line for line in formatted)


@pytest.mark.parametrize(
    ("reply", "answer", "is_there"),
    [
        ("It is  New\nYork.", "new york", True),
        ("421", "42", False),
        ("<think>42</think> no", "42", False),
        ("x", "", False),
        ("It is 42.", "42", True),
        ("4.5", "4", False),
        ("1,400 in all", "400", False),
        ("it is -5", "5", False),
        ("3.14", "14", False),
        ("4, or 5", "4", True),
        ("(-5)", "-5", True),
    ],
)
def test_an_answer_is_found_as_words(reply: str, answer: str, is_there: bool) -> None:
    assert has_answer(reply, answer) is is_there
