"""Estimates, differences and gates against closed forms."""

import logging
import math
import random
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from art_cli.chat.proven_steps import ProvenSteps
from art_cli.cli.eval_comparison import DETAILS, as_text, compare, file_names, find_players
from art_cli.config.compose import load_config
from art_cli.config.schema import EvalConfig
from art_cli.judges import Judge, Verdict
from art_cli.loop.evaluate import (
    Gate,
    check_policy,
    contests,
    estimate,
    judged_rewards,
    paired_difference,
    parse_gate,
    play_evaluation,
    values_by_scenario,
)
from art_cli.loop.policy_sampler import Sampler
from art_cli.runs.intervals import mean_interval
from art_cli.runs.manifest import Origin
from art_cli.runs.trajectory import Json, Trajectory, Turn
from art_cli.runtime.errors import GateError, UsageError
from tests.support.paths import LETTERS


def played(scenario: str, own: float | None, error: str | None = None, **metrics: float) -> Trajectory:
    return Trajectory(
        id=f"{scenario}{random.random()}",
        group_id=scenario,
        group_size=1,
        index=0,
        scenario={"id": scenario},
        returned_reward=own,
        error=error,
        metrics=metrics,
    )


async def test_a_file_of_another_step_or_of_other_scenarios_does_not_count(tmp_path: Path) -> None:
    """Attempts at step 4; the same file at step 8, without a scenario, and with different weights."""
    path, rewards = tmp_path / "out.jsonl", {4: 0.0, 8: 1.0}
    others = set[str]()

    class Playing:
        def is_of_another(self, trajectory: Trajectory) -> bool:
            return trajectory.id in others

        async def play_shown(self, plans: Any, keep: Callable[[Trajectory], None], *, title: str) -> None:
            for plan in plans:
                attempt = played(plan.scenario["id"], rewards[plan.step])
                attempt.id, attempt.scenario = plan.trajectory_id, plan.scenario
                keep(attempt)

    async def evaluate(step: int, *ids: str, **changed: str) -> list[float | None]:
        sampler: Any = Playing()
        scenarios: dict[str, list[Json]] = {"": [{"id": id, **changed} for id in ids]}
        config = EvalConfig(held_out=0.5)
        found = await play_evaluation(sampler, config, scenarios, step=step, path=path, title="")
        return [each.returned_reward for each in found]

    assert await evaluate(4, "a", "b") == [0.0, 0.0]
    assert await evaluate(8, "a", "b") == [1.0, 1.0]
    lines = path.read_bytes()
    assert await evaluate(8, "a", "b") == [1.0, 1.0] and path.read_bytes() == lines, "nothing is played again"
    assert await evaluate(8, "b") == [1.0] and path.read_bytes() > lines, "its number is that of `a` before"
    assert await evaluate(8, "b") == [1.0]
    others, rewards[8] = {"e0008-g0000-a00"}, 0.5
    assert await evaluate(8, "b") == [0.5]
    rewards[8] = 0.75
    assert await evaluate(8, "b", question="another") == [0.75], "the scenario of that id is another one"
    assert await evaluate(8, "b", question="another") == [0.75]


def test_attempts_of_other_weights_are_told_by_step_and_digest_where_both_are_known() -> None:
    """The run was trained anew, so that step 4 has other weights than when the file was written."""
    proven = ProvenSteps()
    gateway, origin = SimpleNamespace(step=4, proven=proven), Origin(base="b")
    sampler = Sampler(cast(Any, None), cast(Any, gateway), cast(Any, None), origin)

    def of(step: int, policy: str) -> Trajectory:
        turn = Turn(
            parent=None, kept=0, prompt_ids=[1], sampled_ids=[2], logprobs=[0.0], raw_logprobs=None, step=step,
            temperature=1.0, policy=policy,
        )  # fmt: skip
        return msgspec.structs.replace(played("a", 1.0), turns=[turn])

    attempts = [of(4, "mine"), of(4, "other"), of(4, ""), of(3, "mine"), played("a", 1.0)]
    assert list(map(sampler.is_of_another, attempts)) == [False, False, False, True, False]
    proven.add(4, "mine")
    assert list(map(sampler.is_of_another, attempts)) == [False, True, False, True, False]
    sampler.origin = None
    assert not any(map(sampler.is_of_another, attempts)), "its digests are another server's"


def test_two_endpoints_with_a_model_of_one_name_are_two_policies() -> None:
    loaded = load_config(LETTERS / "config.yaml")
    assert list(find_players(loaded, [], ["m@http://a/v1", "m@http://b/v1"])) == ["m", "m@http://b/v1"]
    files = [
        file_names({name: player.address for name, player in find_players(loaded, [], [f"m@http://{at}/v1"]).items()})
        for at in ("a", "b", "a")
    ]
    assert files[0] == files[2] != files[1], "what one played is not taken for the other's"
    claude = [load_config(LETTERS / "config.yaml", ["engine=anthropic", f"engine.model={model}"]) for model in "ab"]
    names = [file_names({n: p.address for n, p in find_players(each, [], []).items()}) for each in claude]
    assert names[0] != names[1]


def test_policies_whose_names_look_alike_in_a_file_name_have_a_file_each() -> None:
    names = ["runs/a", "runs_a", "runs/b", "/tmp/c/"]
    assert list(file_names(dict.fromkeys(names, "")).values()) == [
        "runs%2Fa.jsonl",
        "runs_a.jsonl",
        "runs_b.jsonl",
        "tmp_c.jsonl",
    ]


def test_the_interval_is_that_of_the_report() -> None:
    """`art eval`, `art report` and `art view` have one function; 2.571 is Student's quantile of 5 degrees."""
    values = [0.0, 1.0, 1.0, 0.0, 0.5, 1.0]
    found, shown = estimate(values), mean_interval(values)
    assert shown is not None and (found.mean, found.low, found.high) == (shown.mean, shown.low, shown.high)
    half = 2.5706 * statistics.stdev(values) / math.sqrt(6)
    assert found.low == pytest.approx(statistics.fmean(values) - half, abs=1e-3)


def test_an_interval_of_t_holds_the_mean_as_often_as_it_claims() -> None:
    """95 % of 2,000 evaluations of 8 scenarios; the bootstrap's held it in about 89 %."""
    draw = random.Random(3)
    found = [estimate([draw.gauss(0.5, 0.2) for _ in range(8)]) for _ in range(2000)]
    held = sum(each.low <= 0.5 <= each.high for each in found if each.low is not None and each.high is not None)
    assert 0.93 < held / 2000 < 0.97


def test_two_scenarios_have_no_interval_and_miss_a_gate_on_its_end() -> None:
    assert estimate([0.0, 1.0]) == (0.5, None, None, 2)
    results = {"mine": {"reward": {"a": 1.0, "b": 1.0}, "failed": {"a": 0.0, "b": 0.0}}}
    assert check_policy(Gate("reward", ">=", 0.9), results, "mine").error is None
    assert "has no interval" in str(check_policy(Gate("reward.low", ">=", 0.9), results, "mine").error)


def test_a_gate_on_an_end_holds_the_end_of_the_mean_or_of_the_paired_difference() -> None:
    old = {str(i): float(i % 2) for i in range(20)}
    new = {name: value + 0.1 + 0.02 * (int(name) % 3) for name, value in old.items()}
    results = {name: {"reward": its, "failed": dict.fromkeys(its, 0.0), "x.low": its} for name, its in
               (("old", old), ("new", new))}  # fmt: skip

    def holds(text: str) -> bool:
        return check_policy(parse_gate(text, ["old", "new"]), results, "new").error is None

    assert estimate(list(new.values())).low == pytest.approx(0.379, abs=1e-3)
    assert holds("reward.low>=0.37") and not holds("reward.low>=0.39") and holds("reward>=0.6")
    assert holds("reward.low>=baseline") and holds("reward.low>=old+0.1") and not holds("reward.low>=old+0.12")
    assert holds("reward.high<=old+0.13") and not holds("reward.high<=old+0.12")
    assert holds("x.low>=0.6"), "a metric of that name is not an end"
    text = "new: reward differs from old by .* its low end not >= .0.12"
    assert re.search(text, str(check_policy(parse_gate("reward.low>=old+0.12", ["old"]), results, "new").error))


@pytest.mark.parametrize("text", ["reward>=0.8", "reward.low>=runs/a", "failed<=runs/a+0.1", "reward>=runs/a-0.02"])
def test_a_gate_is_printed_as_it_is_read(text: str) -> None:
    gate = parse_gate(text, ["runs/a"])
    assert str(gate) == text and parse_gate(str(gate), ["runs/a"]) == gate


def test_a_constant_has_no_width() -> None:
    assert estimate([0.25] * 7) == (0.25, 0.25, 0.25, 7)


def test_pairing_takes_out_what_scenarios_share() -> None:
    """b = a + 0.1 everywhere: the paired interval is exactly 0.1 however much scenarios differ."""
    baseline = {str(i): float(i % 7) for i in range(50)}
    better = {name: value + 0.1 for name, value in baseline.items()}
    difference = paired_difference(better, baseline)
    assert difference is not None
    assert difference.low == pytest.approx(0.1)
    assert difference.high == pytest.approx(0.1)
    assert paired_difference({"x": 1.0}, {"y": 1.0}) is None


def test_attempts_are_averaged_and_failures_count_as_zero_reward() -> None:
    """Scenario a: rewards 1 and 0 -> 0.5; scenario b: one failure -> 0 and failed 1. Own metrics of these names count
    for nothing."""
    values = values_by_scenario(
        [played("a", 1.0, win=1, failed=5), played("a", 0.0, win=0), played("b", None, error="timeout: x", reward=7)]
    )
    assert values["reward"] == {"a": 0.5, "b": 0.0}
    assert values["failed"] == {"a": 0.0, "b": 1.0}
    assert values["win"] == {"a": 0.5}


def test_a_limit_gives_no_reward_where_the_rollouts_return_none() -> None:
    """A judge decides then. The attempt at the limit has `rollout.limit_reward`, which is not the rollout's own."""
    limited = played("a", 0.0)
    limited.limit = "turn_limit"
    silent = [limited, played("a", None), played("b", None)]
    assert "reward" not in values_by_scenario(silent)
    config = load_config(LETTERS / "config.yaml", ["judge={name: function, entry: judging.py:judge}"]).config
    assert contests(config, silent)
    own = [limited, played("a", 1.0), played("b", 1.0)]
    assert values_by_scenario(own)["reward"] == {"a": 0.5, "b": 1.0} and not contests(config, own)
    assert values_by_scenario([limited])["reward"] == {"a": 0.0}


class Scoring(Judge):
    """Returns the metric `score`, either absolute or as a comparison."""

    def __init__(self, *, compares: bool) -> None:
        self.compares = compares

    async def judge(self, group: Sequence[Trajectory]) -> dict[str, Verdict]:
        return {each.id: Verdict(reward=each.metrics["score"]) for each in group}


@pytest.mark.parametrize(
    ("compares", "rewards"), [(False, {"a": 0.5, "b": 0.8}), (True, {"a": 0.5, "b": 1.0})], ids=["one_scale", "ranks"]
)
async def test_a_judge_on_one_scale_gives_rewards_and_one_that_compares_shares_of_wins(
    compares: bool, rewards: dict[str, float]
) -> None:
    """Scenario a: scores 1 and a failure, which counts 0: the mean 0.5. Against 0.3, one win and one loss: 0.5.
    Scenario b: 0.8, which wins against 0.2."""
    config = load_config(LETTERS / "config.yaml", ["judge={name: function, entry: judging.py:judge}"]).config
    ours = [played("a", None, score=1.0), played("a", None, error="x: y"), played("b", None, score=0.8)]
    references = [played("a", None, score=0.3), played("b", None, score=0.2)]
    found = await judged_rewards(config, Scoring(compares=compares), ours, lambda: references)
    assert found == (rewards, compares)
    own = [played("a", 1.0, score=0.3)]
    assert await judged_rewards(config, Scoring(compares=compares), own, lambda: own) == ({}, False)


def test_policies_are_compared_in_the_order_of_the_options() -> None:
    """The gate applies to the last policy; by default the endpoints come last."""
    loaded = load_config(LETTERS / "config.yaml", [])
    given: Any = [Path("base")], ["m@http://a/v1", "n@http://b/v1"]
    order = ["--endpoint", "--checkpoint", "--endpoint"]
    assert list(find_players(loaded, *given, order=order)) == ["m", "base", "n"]
    assert list(find_players(loaded, *given)) == ["base", "m", "n"]


@pytest.mark.parametrize(
    "given", [([Path("base")] * 2, []), ([], ["m@http://a/v1"] * 3)], ids=["checkpoint", "endpoint"]
)
def test_a_policy_that_is_named_twice_is_refused(given: Any) -> None:
    """At any position, the gate might apply to a policy other than the last."""
    with pytest.raises(UsageError, match="is named twice"):
        find_players(load_config(LETTERS / "config.yaml", []), *given)


def test_a_gate_on_the_reward_is_missed_where_scenarios_were_not_judged() -> None:
    failed = dict.fromkeys(("a", "b", "c"), 0.0)
    results = {"whole": {"failed": failed, "reward": dict.fromkeys(failed, 1.0)},
               "part": {"failed": failed, "reward": {"a": 1.0}}}  # fmt: skip
    assert check_policy(Gate("reward", ">=", 0.9), results, "whole").error is None
    for gate, policy in ((Gate("reward", ">=", 0.9), "part"), (Gate("reward", ">=", -0.1, baseline="part"), "whole")):
        error = check_policy(gate, results, policy).error
        assert isinstance(error, GateError) and "part: 2 scenarios have no reward" in str(error)


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("reward>=0.8", Gate("reward", ">=", 0.8)),
        (" metrics.win <= 1e-2 ", Gate("metrics.win", "<=", 0.01)),
        ("failed<=0", Gate("failed", "<=", 0.0)),
    ],
)
def test_gates_are_read(text: str, gate: Gate) -> None:
    assert parse_gate(text) == gate
    assert gate.holds(gate.bound)
    assert not gate.holds(gate.bound - 1 if gate.operator == ">=" else gate.bound + 1)


@pytest.mark.parametrize("text", ["reward", "reward>0.8", "reward>=", ">=0.8", "reward>=high", ""])
def test_a_gate_that_is_none_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="expected METRIC>=NUMBER"):
        parse_gate(text)


def test_counts_of_every_rollout_are_shown_to_those_who_ask(caplog: pytest.LogCaptureFixture) -> None:
    """The reward, the agent's own metrics and the costs stand there without counters, unless a gate names one."""
    values = {name: {"a": 1.0} for name in ("reward", "failed", "win", "num_moves", "seconds", *DETAILS)}
    rows = compare({"mine": values})

    def shown(text: str) -> list[str]:
        return [line.split()[1] for line in text.splitlines()[1:]]

    assert shown(as_text(rows)) == ["reward", "num_moves", "win", "failed", "seconds"]
    assert shown(as_text(rows, gates=[Gate("num_turns", "<=", 4.0)])) == [
        "reward", "num_moves", "win", "failed", "seconds", "num_turns"]  # fmt: skip
    with caplog.at_level(logging.DEBUG, logger="art_cli"):
        assert shown(as_text(rows)) == ["reward", "num_moves", "win", "failed", "seconds", *sorted(DETAILS)]
        still = compare({"mine": values | {"num_turns": {"a": 0.0}}})
        assert shown(as_text(still)) == [row.metric for row in rows if row.metric != "num_turns"]
        assert "num_turns" in shown(as_text(still, gates=[Gate("num_turns", "<=", 4.0)]))
