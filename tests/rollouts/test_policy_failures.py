"""An exception that follows from what the policy wrote is its failure: scored, trained on, and never paid."""

import json
from pathlib import Path

import msgspec
import pytest

from art_cli.config.schema import RolloutJudgeConfig
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.rollout_judge import RolloutJudge
from art_cli.rollouts.attacks import BROKEN, Attack, Seen, first_attacks
from art_cli.rollouts.attempt_errors import AttemptError, read_report, report
from art_cli.runs.trajectory import Trajectory
from tests.support.processes.stage import ASK, Stage

OWN = """
import asyncio, json, socket

class NoSuchMove(Exception): pass

class ServiceDown(Exception): pass

def wrap(error):
    try:
        raise error
    except Exception as cause:
        raise ServiceDown from cause

def hide(error):
    try:
        raise error
    except Exception:
        raise ServiceDown("no from")
"""
# what an attempt raises after a reply -> whether it is the policy's failure
RAISED = {
    "json.loads('{')": True,
    "{}['move']": True,
    "None.strip()": True,
    "int('seven')": True,
    "raise_(NoSuchMove('z9'))": True,
    "raise_(ExceptionGroup('two', [KeyError(1), RuntimeError(2)]))": True,
    "raise_(ExceptionGroup('two', [KeyError(1), TimeoutError(2)]))": False,
    "raise_(RuntimeError('the database is down'))": False,
    "raise_(ConnectionError('refused'))": False,
    "wrap(TimeoutError('late'))": False,
    "wrap(socket.gaierror(1, 'no such host'))": False,
    "hide(TimeoutError('late'))": False,
    "hide(KeyError('move'))": True,
    "open('/no/such/file')": False,
    "import_()": False,
    "raise_(SystemExit(3))": False,
}


def source(statements: list[str]) -> str:
    branches = "".join(f"    if scenario['index'] == {at}: {what}\n" for at, what in enumerate(statements))
    raising = "def raise_(error): raise error\ndef import_(): import no_such_module\n"
    return (
        f"{ASK}{OWN}{raising}\nasync def rollout(policy, scenario):\n    await ask(policy)\n{branches}    return -1\n"
    )


@pytest.mark.parametrize("processes", [0, 1])
async def test_what_follows_from_a_reply_is_scored_and_what_does_not_is_left_out(
    tmp_path: Path, processes: int
) -> None:
    statements = list(RAISED)
    played = await Stage(tmp_path).play(
        source(statements), num=len(statements) + 1, processes=processes, retries=0, limit_reward=-0.5
    )
    *raised, whole = played
    assert [bool(each.failure) for each in raised] == list(RAISED.values())
    assert [each.returned_reward for each in raised if each.failure] == [-0.5] * sum(RAISED.values())
    assert all((each.error is None) == bool(each.failure) for each in raised)
    assert str(raised[1].failure).startswith("KeyError: 'move' (rollout.py:")
    scored = await judge_group(RolloutJudge(RolloutJudgeConfig(), tmp_path), played)
    assert whole.returned_reward == -1
    assert {each.reward for each in scored if each.failure} == {-1.0}  # not -0.5: to fail pays no more than to try


async def test_an_error_before_the_first_reply_is_the_agents(tmp_path: Path) -> None:
    early = "async def rollout(policy, scenario):\n    {}['config']\n"
    [attempt] = await Stage(tmp_path).play(early)
    assert attempt.error is not None and not attempt.failure


async def test_the_list_of_classes_decides(tmp_path: Path) -> None:
    [attempt] = await Stage(tmp_path).play(source(["raise_(RuntimeError('no move'))"]), failures=["RuntimeError"])
    assert attempt.failure is not None and attempt.error is None
    [attempt] = await Stage(tmp_path).play(source(["{}['move']"]), failures=[])
    assert attempt.error is not None and not attempt.failure


def test_a_process_may_report_any_classes_and_no_other_kind() -> None:
    error = read_report(json.loads(json.dumps(report(AttemptError("KeyError", "'x'", classes=["KeyError", "own"])))))
    assert isinstance(error, AttemptError) and error.classes == ("KeyError", "own")
    for classes in (None, ["own"], 1, {"own": 1}):
        with pytest.raises(ValueError):
            read_report({"failed": {"kind": "a", "message": "b", "is_transport": False, "classes": classes}})


def test_a_written_failure_is_read_again_and_absent_otherwise() -> None:
    whole = Trajectory(id="a", group_id="g", group_size=1, index=0)
    assert b"failure" not in msgspec.json.encode(whole)
    failed = msgspec.structs.replace(whole, failure="KeyError: 'x'", returned_reward=0.0)
    again = msgspec.json.decode(msgspec.json.encode(failed), type=Trajectory)
    assert again.failure == again.ended_by == "KeyError: 'x'" and again.reported("right") == 0.0


def test_the_hunt_breaks_calls_and_asks_instead_of_working() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"id": {"type": "string"}}}}}
    attacks = first_attacks(seen := Seen([{"role": "user", "content": "look 7"}], [tool]))
    [broken] = [attack for attack in attacks if attack.form == BROKEN]
    arguments = broken.reply(seen)["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert Attack(("a question",)) in attacks
