"""The simple judges: the rollout's own reward, and a user's function over a group or class."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import FunctionJudgeConfig, MetricJudgeConfig, RolloutJudgeConfig
from art_cli.judges import Verdict, make_judge
from art_cli.judges.costs import CostEstimate
from art_cli.loop.train import train
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, Trajectory
from art_cli.runtime.errors import JudgeError, UsageError
from tests.support.paths import LETTERS


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


async def test_a_metric_that_a_limit_kept_from_being_reported_is_the_limits_reward(tmp_path: Path) -> None:
    won, limited = group(0.5, -1.0)
    won.metrics, limited.limit = {"win": 1.0}, "turn_limit"
    judge = make_judge(MetricJudgeConfig(name="metric", metric="win"), tmp_path)
    assert await judge.judge([won, limited]) == {"t0": Verdict(reward=1.0), "t1": Verdict(reward=-1.0)}
    limited.limit = None
    with pytest.raises(JudgeError, match="no metric 'win'"):
        await judge.judge([won, limited])


# --- a user's class ---------------------------------------------------------------------------------------------------

OWN = """
from art_cli import Judge, Verdict
from art_cli.runs.trajectory import Score
from art_cli.runtime.errors import JudgeError
from art_cli.judges.costs import CostEstimate, Usage

class Scaled(Judge):
    in_flight = 3

    def __init__(self, factor=1):
        self.factor, self.num_calls = factor, 0

    {keyword} judge(self, group):
        self.num_calls += 1
        return {{t.id: Verdict(reward=self.factor * t.returned_reward) for t in group}}

    @property
    def usage(self):
        return Usage(calls=self.num_calls, cost_usd=0.5 * self.num_calls)

    def estimate(self, group):
        return CostEstimate(calls=1, usd=0.5)

    async def close(self):
        print("closed")
"""


def own_config(tmp_path: Path, source: str, **options: Any) -> FunctionJudgeConfig:
    (tmp_path / "own.py").write_text(source)
    return FunctionJudgeConfig(name="function", entry="own.py:Scaled", options=options)


@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_a_users_class_judges_and_says_what_it_costs(
    tmp_path: Path, keyword: str, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = make_judge(own_config(tmp_path, OWN.format(keyword=keyword), factor=3), tmp_path)
    assert await judge.judge(group(1, 2)) == {"t0": Verdict(reward=3.0), "t1": Verdict(reward=6.0)}
    assert (judge.in_flight, judge.usage.calls, judge.usage.cost_usd) == (3, 1, 0.5)
    assert judge.estimate(group(1)) == CostEstimate(calls=1, usd=0.5)
    await judge.close()
    assert capsys.readouterr().out == "closed\n"


@pytest.mark.parametrize(
    "scores", ["[Score(judge='m', score=1.0, explanation=['a'])]", "None", "[{'judge': 'm'}]",
               "[Score(judge='m', score=1.0, latency_s=1j)]", r"[Score(judge='\ud800', score=1.0)]"]
)  # fmt: skip
async def test_scores_that_no_file_could_hold_are_an_error_of_their_group(tmp_path: Path, scores: str) -> None:
    """A line that cannot be read again would end every later start of the run."""
    source = OWN.replace("from art_cli import", "from art_cli.runs.trajectory import Score\nfrom art_cli import")
    source = source.format(keyword="def").replace("Verdict(reward=", f"Verdict(scores={scores}, reward=")
    judge = make_judge(own_config(tmp_path, source, factor=3), tmp_path)
    with pytest.raises(JudgeError, match="the scores of t0 are not a list of Score"):
        await judge.judge(group(1, 2))
    await judge.close()


async def test_a_function_that_cancels_itself_is_an_error_and_ends_nothing_else(tmp_path: Path) -> None:
    source = """
import asyncio
async def judge(group):
    waiting = asyncio.create_task(asyncio.sleep(60))
    waiting.cancel()
    await waiting
"""
    with pytest.raises(JudgeError, match="it cancelled itself"):
        await ask_function(tmp_path, source)


ONE_AT_A_TIME = """
import asyncio
from art_cli import Judge, Verdict

class Scaled(Judge):
    in_flight = 1
    num_running = 0

    async def judge(self, group):
        self.num_running += 1
        assert self.num_running == 1
        await asyncio.sleep(0.01)
        self.num_running -= 1
        return {t.id: Verdict(reward=1.0) for t in group}
"""


async def test_a_users_class_judges_no_more_groups_at_once_than_it_says(tmp_path: Path) -> None:
    judge = make_judge(own_config(tmp_path, ONE_AT_A_TIME), tmp_path)
    await asyncio.gather(*(judge.judge(group(1)) for _ in range(4)))
    await judge.close()


def test_files_scored_by_a_class_are_told_apart_by_its_options(tmp_path: Path) -> None:
    source = OWN.format(keyword="def")
    digests = {
        make_judge(own_config(tmp_path, source, **options), tmp_path).settings for options in ({}, {"factor": 3})
    }
    assert len(digests) == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {'t0': Verdict(reward=1.0)}", "no reward for t1"),
        ("return {t.id: Verdict(reward=float('inf')) for t in group}", "the reward of t0 is inf"),
        (
            "nan = Score(judge='j', score=float('nan')); return {t.id: Verdict(reward=1, scores=[nan]) for t in group}",
            "the reward of t0 is nan",
        ),
        ("raise JudgeError('not today')", "^not today$"),
        ("return 1 / 0", r"ZeroDivisionError: division by zero \(own\.py:\d+\)"),
    ],
)
async def test_what_a_class_answers_is_checked(tmp_path: Path, body: str, message: str) -> None:
    source = OWN.format(keyword="async def").replace("self.num_calls += 1", body)
    judge = make_judge(own_config(tmp_path, source), tmp_path)
    with pytest.raises(JudgeError, match=message):
        await judge.judge(group(1, 2))
    await judge.close()


async def test_a_verdict_of_other_kinds_of_numbers_can_be_written_and_read(tmp_path: Path) -> None:
    body = "import numpy; return {t.id: Verdict(reward=numpy.float32(0.5), variance=True) for t in group}"
    judge = make_judge(
        own_config(tmp_path, OWN.format(keyword="async def").replace("self.num_calls += 1", body)), tmp_path
    )
    found = (await judge.judge(group(1, 2)))["t0"]
    await judge.close()
    assert msgspec.json.decode(msgspec.json.encode(found), type=Verdict) == Verdict(reward=0.5, variance=1.0)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("class Scaled: ...", {}, "the class is not a subclass of art_cli.Judge"),
        (OWN.format(keyword="def"), {"faktor": 1}, "own.py:Scaled: TypeError: .*'faktor'"),
        ("def Scaled(group): return group", {"factor": 1}, "judge.options: .* is a function"),
    ],
)
def test_a_class_that_cannot_be_made_is_told_in_words(
    tmp_path: Path, source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        make_judge(own_config(tmp_path, source, **options), tmp_path)


@pytest.mark.slow
def test_a_users_judge_beside_a_config_judges_a_file_and_trains(
    tmp_path: Path, art: Callable[..., tuple[int, str, str]]
) -> None:
    """No file of ours changes: `judge: {entry: ...}`, without a name, in the configuration."""
    for name in ("build.py", "config.yaml", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, tmp_path)
    (tmp_path / "own.py").write_text(OWN.format(keyword="async def"))
    config = tmp_path / "config.yaml"
    config.write_text(config.read_text() + '\njudge: {entry: "own.py:Scaled", options: {factor: 10}}\n')
    settings = [f"runs={tmp_path / 'runs'}", "train.steps=1", "eval=null"]
    run = RunDir(asyncio.run(train(load_config(config, settings))).root)
    rows = run.scored(0)
    assert rows and [row.reward for row in rows] == [10 * (row.returned_reward or 0) for row in rows]
    played = tmp_path / "played.jsonl"
    write_lines(played, run.trajectories(0))
    code, out, err = art("judge", played, "--config", config, "--json")
    assert code == 0, err
    summary = json.loads(out)  # what the judge prints goes to standard error
    assert summary["groups"] == summary["calls"] == 3 and summary["cost_usd"] == 1.5
    code, out, _ = art("judge", played, "--config", config, "--dry-run", "--fresh")
    assert code == 0 and "3 groups to judge: 3 calls" in out and "about $1.5000" in out
