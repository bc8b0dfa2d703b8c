"""The cascade judge: when it asks the expensive judge, what it records, and the finding about a drift."""

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from art_cli.config.checks import ranks
from art_cli.config.schema import (
    CascadeJudgeConfig,
    FunctionJudgeConfig,
    RewardModelJudgeConfig,
    RulerJudgeConfig,
    RunConfig,
)
from art_cli.judges import Judge, Verdict
from art_cli.judges.agreement import Ratio
from art_cli.judges.cascade import (
    CascadeJudge,
    cascade_numbers,
    is_audit,
    pair_doubt,
    recent_agreement,
    value_doubt,
)
from art_cli.judges.costs import CostEstimate
from art_cli.judges.judge_groups import judge_group
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError
from tests.support.judges.ruler_cases import rated

FAKE = FunctionJudgeConfig(name="function", entry="none.py:none")


class Told(Judge):
    """Rewards each attempt by a number in its metrics, and counts its groups."""

    def __init__(self, metric: str) -> None:
        self.metric, self.asked = metric, list[str]()

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        self.asked.append(group[0].group_id)
        if self.metric not in group[0].metrics:
            raise JudgeError("not told")
        return {each.id: Verdict(reward=each.metrics[self.metric]) for each in group}

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        return CostEstimate(calls=1)


def cascade(unsure: float, audit: float) -> CascadeJudge:
    config = CascadeJudgeConfig(name="cascade", first=FAKE, then=FAKE, unsure=unsure, audit=audit)
    return CascadeJudge(config, Path("."), judges={"first": Told("cheap"), "then": Told("dear")})


def asked(judge: CascadeJudge, name: str = "then") -> list[str]:
    told = judge.judges[name]
    assert isinstance(told, Told)
    return told.asked


def group(number: int, cheap: Sequence[float], dear: Sequence[float] | None = None) -> list[Trajectory]:
    members = rated([0.0] * len(cheap), group=f"g{number}")
    for each, low, high in zip(members, cheap, dear or cheap, strict=True):
        each.metrics = {"cheap": low, "dear": high}
    return members


@pytest.mark.parametrize("spreads", ["random", "falling", "equal"])
async def test_doubt_asks_at_most_its_share_also_when_every_group_is_doubtful(spreads: str) -> None:
    """At every point of the run: falling spreads make each new group the most doubtful so far."""
    draw, judge = random.Random(0), cascade(0.2, 0.0)
    for number in range(1, 201):
        width = {"random": draw.random(), "falling": 5.0 / number, "equal": 1.0}[spreads]
        await judge.judge(group(number, [0.0, width]))
        assert len(asked(judge)) <= 0.2 * number
    assert len(asked(judge)) >= (20 if spreads == "random" else 39)


async def test_the_least_sure_groups_are_asked_about() -> None:
    draw, judge, widths = random.Random(1), cascade(0.2, 0.0), dict[str, float]()
    for number in range(300):
        widths[f"g{number}"] = draw.random()
        await judge.judge(group(number, [0.0, widths[f"g{number}"], 2.0]))
    late = [widths[name] for name in asked(judge)[10:]]
    assert max(late) < 0.3 and len(asked(judge)) > 45


async def test_the_lot_is_the_same_in_every_run_and_keeps_to_its_share() -> None:
    runs = []
    for order in (range(2000), reversed(range(2000))):
        judge = cascade(0.0, 0.05)
        for number in order:
            await judge.judge(group(number, [0.0, 1.0]))
        runs.append(sorted(asked(judge)))
    assert runs[0] == runs[1] and 70 <= len(runs[0]) <= 130
    assert asked(cascade(0.0, 0.05)) == []


async def test_a_groups_rewards_come_from_one_judge_and_both_scores_are_recorded() -> None:
    judge = cascade(0.0, 1.0)
    scored = await judge_group(judge, group(1, [3.0, -1.0], [0.2, 0.9]))
    assert [each.reward for each in scored] == [0.2, 0.9]
    assert [[(score.judge, score.score) for score in each.scores] for each in scored] == [
        [("cascade.first", 3.0), ("cascade.then", 0.2)],
        [("cascade.first", -1.0), ("cascade.then", 0.9)],
    ]
    single = await judge_group(judge, group(2, [3.0]))
    assert [each.reward for each in single] == [3.0] and asked(judge) == ["g1"]


async def test_a_failure_of_the_expensive_judge_leaves_the_group_owed() -> None:
    members = group(1, [0.0, 1.0])
    for each in members:
        del each.metrics["dear"]
    with pytest.raises(JudgeError, match="not told"):
        await cascade(0.0, 1.0).judge(members)


async def test_audited_groups_alone_measure_the_agreement() -> None:
    """Of the audited groups the cheap judge orders 3 pairs of 4; unsure groups outside of the lot do not count."""
    config = CascadeJudgeConfig(name="cascade", first=FAKE, then=FAKE, unsure=1.0, audit=0.5)
    judge = CascadeJudge(config, Path("."), judges={"first": Told("cheap"), "then": Told("dear")})
    names = [number for number in range(40) if is_audit(group(number, [0.0, 1.0]), config)][:4]
    others = [number for number in range(40) if number not in names and not is_audit(group(number, [0, 1.0]), config)]
    scored = [await judge_group(judge, group(n, [0.0, 1.0], [0.0, -1.0 if n == names[0] else 1.0])) for n in names]
    scored += [await judge_group(judge, group(number, [0.0, 1.0], [0.0, -1.0])) for number in others[:3]]
    run = RunConfig.model_validate(
        {"name": "run", "model": {"base": "b"}, "rollout": {"entry": "a.py:b", "scenarios": "s"}, "judge": config}
    )
    assert cascade_numbers(scored, run) == {"cascade_asked": 1.0, "cascade_pairs": 4.0, "cascade_agreement": 0.75}


def test_doubt_is_the_expected_share_of_wrong_pairs() -> None:
    assert pair_doubt([0.0, math.log(3)]) == pytest.approx(0.25)
    assert pair_doubt([1.0, 1.0, 1.0]) == 0.5
    assert pair_doubt([0.0, 1e308, -1e308]) == pytest.approx(0.0)
    assert pair_doubt([1.0]) is None


async def test_expected_values_compare_across_groups_and_sure_groups_are_not_asked_about() -> None:
    """Of groups that are all right, all wrong and undecided, doubt asks about undecided ones alone."""
    assert (
        value_doubt([0.5, 1.0]) == pytest.approx(0.125) and value_doubt([0.0, 1.0]) == 0.0 and value_doubt([]) is None
    )
    first = RewardModelJudgeConfig(name="reward_model", model="own", activation="sigmoid")
    config = CascadeJudgeConfig(name="cascade", first=first, then=FAKE, unsure=0.3, audit=0.0)
    judge = CascadeJudge(config, Path("."), judges={"first": Told("cheap"), "then": Told("dear")})
    for number in range(99):
        await judge.judge(group(number, [[0.99, 0.98], [0.01, 0.02], [0.6, 0.4]][number % 3]))
    assert not judge.compares and len(asked(judge)) > 20
    assert all(int(name[1:]) % 3 == 2 for name in asked(judge)[1:])
    ruler = config.model_copy(update={"then": RulerJudgeConfig(name="ruler")})
    ranking = CascadeJudge(ruler, Path("."), judges={"first": Told("cheap"), "then": Told("dear")})
    for number in range(20):
        await ranking.judge(group(number, [0.5]))
    assert ranking.compares and asked(ranking) == []  # a single attempt cannot be ranked
    assert ranks(ruler) and ranks(config.model_copy(update={"first": FAKE})) and not ranks(config)


def test_the_newest_audited_pairs_count() -> None:
    assert recent_agreement([Ratio(90, 100)]) is None
    assert recent_agreement([Ratio(0, 1000), Ratio(90, 100), Ratio(70, 100)]) == 0.8


def test_the_estimate_is_of_the_share_that_is_asked() -> None:
    judge = cascade(0.2, 0.05)
    calls = sum(found.calls for n in range(2000) if (found := judge.estimate(group(n, [0.0, 1.0]))) is not None)
    assert 430 <= calls <= 570


def test_noise_of_two_judges_is_refused() -> None:
    for key in ("first", "then"):
        noisy = {"name": "function", "entry": "a.py:b", "noise": "votes"}
        with pytest.raises(ValidationError, match="noise"):
            CascadeJudgeConfig.model_validate({"name": "cascade", "first": FAKE, "then": FAKE} | {key: noisy})
