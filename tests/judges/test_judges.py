"""The simple judges: the rollout's own reward, and a user's function over a group."""

from pathlib import Path
from typing import Any

import pytest

from art_cli.config.schema import FunctionJudgeConfig, RolloutJudgeConfig
from art_cli.errors import JudgeError, UsageError
from art_cli.judges import Verdict, make_judge
from art_cli.trajectory import Score, Trajectory


def group(*rewards: float | None) -> list[Trajectory]:
    return [
        Trajectory(id=f"t{index}", group_id="g", group_size=len(rewards), index=index, returned_reward=reward)
        for index, reward in enumerate(rewards)
    ]


async def ask_function(tmp_path: Path, source: str, *, timeout_s: float = 10.0) -> Any:
    """The verdicts of a judge function over three trajectories with rewards 1, 2, 3."""
    (tmp_path / "judging.py").write_text(source)
    judge = make_judge(FunctionJudgeConfig(name="function", entry="judging.py:judge", timeout_s=timeout_s), tmp_path)
    try:
        return await judge.judge(group(1, 2, 3))
    finally:
        await judge.close()


async def test_the_rollout_judge_takes_the_reward_as_it_is(tmp_path: Path) -> None:
    judge = make_judge(RolloutJudgeConfig(), tmp_path)
    assert await judge.judge(group(0.5, -3.0)) == {"t0": Verdict(reward=0.5), "t1": Verdict(reward=-3.0)}
    assert await judge.judge([]) == {}


async def test_a_missing_reward_is_an_error_and_no_zero(tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match=r"t1: the rollout returned no reward; .*judge=ruler"):
        await make_judge(RolloutJudgeConfig(), tmp_path).judge(group(0.5, None))


@pytest.mark.parametrize(
    "source",
    [
        "def judge(group): return [2 * t.returned_reward for t in group]",
        "async def judge(group): return [2 * t.returned_reward for t in group]",
        "def judge(group): return {t.id: 2 * t.returned_reward for t in reversed(group)}",
        "import numpy\ndef judge(group): return numpy.array([2.0, 4.0, 6.0])",
        "def judge(group):\n    rewards = [2, 4, 6]\n    group.clear()\n    return rewards",
    ],
    ids=["list", "async", "dict", "array", "changes its argument"],
)
async def test_a_function_scores_a_group(tmp_path: Path, source: str) -> None:
    assert await ask_function(tmp_path, source) == {
        f"t{index}": Verdict(reward=reward, scores=[Score(judge="function", score=reward)])
        for index, reward in enumerate((2.0, 4.0, 6.0))
    }


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[1, 2]", "returned 2 rewards for 3 trajectories"),
        ("{'t0': 1, 't2': 1}", r"no reward for t1 \(1 of 3 missing\)"),
        ("{'t0': 1, 't1': 1, 't2': 1, 't9': 1}", "a reward for 't9', which is not in the group"),
        ("[1, 2, float('nan')]", "the reward of t2 is nan, not a finite number"),
        ("[1, 2, '3']", "the reward of t2 is '3'"),
        ("[1, None, 3]", "the reward of t1 is None"),
        ("None", "not None"),
        ("'123'", "not str"),
        ("[1 / 0]", r"ZeroDivisionError: division by zero \(judging\.py:2\)"),
        ("exit(3)", "SystemExit: 3"),
        ("next(iter([]))", "StopIteration"),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_an_answer_that_is_not_one_finite_number_each_is_refused(
    tmp_path: Path, keyword: str, answer: str, message: str
) -> None:
    with pytest.raises(JudgeError, match=message) as caught:
        await ask_function(tmp_path, f"{keyword} judge(group):\n    return {answer}\n")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["async def judge(group): await asyncio.Event().wait()", "def judge(group): gate.wait()"]
)
async def test_a_function_that_does_not_end_is_an_error(tmp_path: Path, source: str) -> None:
    with pytest.raises(JudgeError, match=r"no answer within 0\.1 s"):
        await ask_function(tmp_path, f"import asyncio, threading\ngate = threading.Event()\n{source}", timeout_s=0.1)


async def test_what_cannot_be_loaded_is_said_when_the_judge_is_made(tmp_path: Path) -> None:
    (tmp_path / "judging.py").write_text("def jugde(group): ...\nnumber = 5")
    with pytest.raises(UsageError, match="did you mean 'jugde'"):
        make_judge(FunctionJudgeConfig(name="function", entry="judging.py:judge"), tmp_path)
    with pytest.raises(UsageError, match="not a function but int"):
        make_judge(FunctionJudgeConfig(name="function", entry="judging.py:number"), tmp_path)
