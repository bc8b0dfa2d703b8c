"""`art plan`: planted doubts, an unchanged run afterwards, and the promise compared with the outcome."""

import asyncio
import json
import math
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request
from art_cli.config.compose import load_config
from art_cli.engines import Endpoint
from art_cli.loop.pilot import Pilots, noise_scale
from art_cli.loop.run_plan import (
    LEAST_KL,
    MOST_KL,
    advise,
    before_calls,
    busy,
    choose_rate,
    plan,
    shared_prompt_s,
)
from art_cli.loop.train import train
from art_cli.reports.doubts import correlate
from art_cli.reports.pages.report_text import report_text
from art_cli.reports.run_report import read_report
from art_cli.runs.promise import Measured, MemoryNeed, NoiseScale, Pilot, Promise, forecast, steps_for
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory
from art_cli.runtime.errors import Interrupted, RunError, UsageError
from tests.judges.test_ruler_train import share_of_letters
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS, TESTS
from tests.support.records.attempts import attempt, scored

Art = Callable[..., tuple[int, str, str]]
PLANNED = TESTS / "planned"
RATE = "train.learning_rate=1e-2"


def planned(runs: Path, *settings: str, project: Path = PLANNED) -> Promise:
    return asyncio.run(plan(load_config(project / "config.yaml", [f"runs={runs}", *settings])))


def trained(runs: Path, *settings: str, project: Path = PLANNED) -> RunDir:
    return RunDir(asyncio.run(train(load_config(project / "config.yaml", [f"runs={runs}", *settings]))).root)


# --- doubts -----------------------------------------------------------------------------------------------------------


PLANTED = {
    **{name: [f"rollout.entry=rollout.py:{name}"] for name in (
        "too_hard", "too_easy", "constant", "temperature", "limit", "length", "leak")},
    **{name: ["rollout.entry=rollout.py:judged", f"judge={{entry: 'rollout.py:{name}'}}"] for name in (
        "noise", "position")},
    "twice": ["rollout.scenarios=twice.jsonl"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_named_with_a_cure_and_nothing_else_is(name: str, tmp_path: Path) -> None:
    [doubt] = planned(tmp_path, RATE, *PLANTED[name]).doubts
    assert doubt.kind == name and doubt.cure


@pytest.mark.slow
@pytest.mark.parametrize(("conduct", "kind"), [({"bias": 0.8}, "position"), ({"noise": 0.3}, "noise"), ({}, "")])
def test_a_language_model_that_judges_by_position_or_by_chance_is_named(
    conduct: dict[str, float], kind: str, tmp_path: Path
) -> None:
    """RULER over HTTP, asked for two rounds of votes. Without a fault it scores the share of letters."""
    rule = share_of_letters if not conduct else lambda conversations: 0.5
    entry = ("rollout.entry=rollout.py:judged", "judge=ruler", "judge.model=rule", "judge.cache=null")
    in_turn = ("rollout.concurrency=1", "judge.concurrency=1")  # the server draws its noise as the calls come
    with serving(Conduct(rule=rule, **conduct)) as server:
        settings = [f"runs={tmp_path}", RATE, *entry, *in_turn, f"judge.api_base={server.api_base}"]
        found = asyncio.run(plan(load_config(PLANNED / "config.yaml", settings), repeats=2))
        again = asyncio.run(plan(load_config(PLANNED / "config.yaml", settings), repeats=3)) if not kind else found
    kinds = [doubt.kind for doubt in found.doubts]
    assert kind in kinds if kind else kinds == []
    assert found.measured.judge_usd is None and "usd" not in found.expected, "no price is known"
    assert again.measured.verdicts == (2 if kind else 3), "who asks for more verdicts gets them"


@pytest.mark.slow
def test_a_plan_whose_pilots_all_fail_is_written_and_says_so(
    tmp_path: Path, art: Art, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pilots: Pilots, rate: float) -> Pilot:
        return Pilot(rate, None, None, 9.0, is_failed=True)

    monkeypatch.setattr(Pilots, "take", fail)
    code, out, _ = art("plan", PLANNED / "config.yaml", f"runs={tmp_path}", RATE)
    assert code == 0 and "0.01 failed" in out and "training could not be measured" in out


@pytest.mark.slow
def test_a_healthy_reward_raises_no_doubt(tmp_path: Path) -> None:
    found = planned(tmp_path, RATE)
    assert found.doubts == []
    assert re.fullmatch(
        r"\d+ of \d+ attempts got more than 0, 95 % interval over the groups \d+% to \d+%", found.measured.facts["base"]
    )
    assert [round(pilot.rate, 6) for pilot in found.measured.pilots] == [0.0025, 0.005, 0.01, 0.02, 0.04]
    moves = [pilot.kl or 0.0 for pilot in found.measured.pilots]
    assert moves == sorted(moves) and moves[0] > 0, "a larger rate moves the policy further"
    assert found.measured.memory is not None and 0.1 < found.measured.memory.gigabytes < 8


def test_a_correlation_within_groups_ignores_differences_between_them() -> None:
    """Within each group x and y fall and rise; between groups both rise. All ranks agree on -1."""
    groups = [[(10.0 * g + i, 10.0 * g - i) for i in range(4)] for g in range(5)]
    found = correlate(groups)
    assert found is not None and found.value == pytest.approx(-1) and found.p <= 0.01
    assert correlate([[(1.0, 2.0), (1.0, 3.0)]]) is None


def test_a_correlation_of_chance_is_significant_as_often_as_its_p_value_says() -> None:
    draw = torch.Generator().manual_seed(0)
    ps = []
    for _ in range(100):
        found = correlate([torch.rand(6, 2, generator=draw).tolist() for _ in range(3)])
        assert found is not None
        ps.append(found.p)
    assert 3 <= sum(p <= 0.1 for p in ps) <= 20


# --- the run after it -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_after_a_plan_is_the_run_without_one_bit_for_bit(tmp_path: Path) -> None:
    """One attempt at a time and no initial evaluation, because batching and cached prompts change the last bits of
    logprobs."""
    alone = (RATE, "rollout.concurrency=1", "eval=null", "train.steps=3")
    plain = trained(tmp_path / "plain", *alone, project=LETTERS)
    promise = planned(tmp_path / "planned", *alone, project=LETTERS)
    files = RunDir(tmp_path / "planned" / "letters")
    assert files.checkpoint_steps() == [0]
    assert sorted(path.name for path in (files.root / "step_0000").iterdir()) == ["scored.jsonl", "trajectories.jsonl"]
    played, log = files.trajectories_path(0).read_bytes(), files.log_path.read_text()
    assert planned(tmp_path / "planned", *alone, project=LETTERS) == promise
    assert "first reply" not in files.log_path.read_text()[len(log) :], "the second plan opened an engine"
    assert trained(tmp_path / "planned", *alone, project=LETTERS).trajectories_path(0).read_bytes() == played
    starts = [line for line in files.log_path.read_text().splitlines() if " s: python and configuration" in line]
    assert "first groups after" in starts[-1], "training is no part of the wait for a reply"
    for step in (1, 3):
        for name in ("adapter_model.safetensors", "optimizer.safetensors", "rng.safetensors"):
            one, other = (run.checkpoint_path(step) / name for run in (plain, files))
            assert one.read_bytes() == other.read_bytes(), f"step {step}: {name}"
    with pytest.raises(UsageError, match="trained to step 3"):
        planned(tmp_path / "planned", *alone, "train.learning_rate=2e-2", project=LETTERS)


@pytest.mark.slow
def test_auto_takes_the_plans_rate_and_the_report_sets_the_promise_beside_the_run(tmp_path: Path) -> None:
    auto = ("train.learning_rate=auto", "model.lora.alpha=2", "train.steps=2", "eval.every=1")
    rate = float(planned(tmp_path, *auto, project=LETTERS).settings["train.learning_rate"])
    files = trained(tmp_path, *auto, project=LETTERS)
    record = json.loads(files.config_path.read_text())
    assert record["train"]["learning_rate"] == rate and record["auto"]["learning_rate"].startswith("art plan:")
    assert [line.metrics["learning_rate"] for line in files.metrics() if line.split == "train"] == [rate, rate]

    report = read_report(files)
    rows = {row.name: row for row in report.promised}
    assert rows.keys() >= {"sampling", "training", "evaluating", "whole", "tokens"}
    sampled = sum(each.num_sampled for step in range(2) for each in files.trajectories(step))
    assert rows["tokens"].happened == sampled and rows["tokens"].is_inside
    assert rows["whole"].happened > rows["sampling"].happened > 0
    text = report_text(msgspec.to_builtins(report))
    assert "what art plan promised" in text and f"{sampled:,}" in text


@pytest.mark.slow
def test_an_interrupted_plan_goes_on_and_more_groups_may_follow(tmp_path: Path) -> None:
    """One attempt at a time, and an interrupt after attempt 3: saved attempts stay and are not replayed."""
    loaded = load_config(PLANNED / "config.yaml", [f"runs={tmp_path}", RATE, "rollout.concurrency=1"])
    path = RunDir(tmp_path / "planned").trajectories_path(0)

    async def interrupted() -> None:
        task = asyncio.create_task(plan(loaded))
        while not path.exists() or path.read_bytes().count(b"\n") < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(Interrupted, match="art plan continues"):
        asyncio.run(interrupted())
    before = path.read_bytes()
    assert before.count(b"\n") < 32
    planned(tmp_path, RATE)
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 32
    planned(tmp_path, RATE, "rollout.groups_per_step=10")
    assert path.read_bytes().startswith(before) and path.read_bytes().count(b"\n") == 40
    ten, again = RunDir(tmp_path / "planned").promise(), path.read_bytes()
    assert ten is not None and len(ten.measured.group_tokens) == 10
    fewer = planned(tmp_path, RATE, "rollout.groups_per_step=4").measured
    assert (len(fewer.group_tokens), fewer.num_attempts) == (4, 16), (
        "the groups of the earlier plan are not of this one"
    )
    slower = planned(tmp_path, RATE, "rollout.groups_per_step=10", "learner.gradient_checkpointing=true").measured
    assert slower.pilots != ten.measured.pilots, "measured anew"
    assert slower.judging_s == pytest.approx(2.5 * fewer.judging_s), "not judged anew"
    assert "earlier settings" in slower.facts["played"]
    assert path.read_bytes() == again
    with pytest.raises(RunError, match="group_size"):
        planned(tmp_path, RATE, "rollout.group_size=2")


@pytest.mark.slow
def test_the_screen_answers_four_questions(art: Art, tmp_path: Path) -> None:
    arguments = ("plan", PLANNED / "config.yaml", f"runs={tmp_path}", RATE)
    code, out, _ = art(*arguments, "--goal", "reward>=0.99", "--budget-usd", "5")
    assert code == 0 and len(out.splitlines()) < 40
    for question in ("can this reward be learned?", "with which settings?", "does it fit?", "how long, how much?"):
        assert question in out
    assert "0.99 is more than the best attempts get now" in out and "nothing here costs money; 'stop=[" in out
    code, out, _ = art(*arguments, "--json", "--goal", "reward>=0.99", "--budget-usd", "5")
    found = json.loads(out)
    assert code == 0 and (found["schema_version"], found["goal"], found["steps_for_budget"]) == (1, 0.99, None)


@pytest.mark.slow
def test_a_budget_becomes_a_number_of_steps_that_holds_it(art: Art, tmp_path: Path) -> None:
    """RULER over HTTP, whose price is set after the first plan. It also decides the evaluations, which cost as much."""
    with serving(Conduct(rule=share_of_letters)) as server:
        entry = ["rollout.entry=rollout.py:judged", "judge=ruler", "judge.model=rule", "judge.cache=null"]
        entry += [f"judge.base_url={server.api_base}", "eval.held_out=0.3", "eval.every=1", "train.steps=4"]
        arguments = ["plan", PLANNED / "config.yaml", f"runs={tmp_path}", RATE, *entry]
        assert "set judge.price={input: X, output: Y}" in art(*arguments, "--budget-usd", "5")[1]
        num_calls = len(server.asked)
        arguments.append("judge.price={input: 1000, output: 4000}")
        code, out, _ = art(*arguments, "--budget-usd", "5")
        assert code == 0 and "$5 does not pay one step" in out and "art train" not in out
        assert "$900 pays the whole run" in art(*arguments, "--budget-usd", "900")[1]
        out = art(*arguments, "--budget-usd", "35")[1]
        assert len(server.asked) == num_calls, "a plan that is asked again pays nothing"
        assert "$35 buys 2 of 4 steps" in out
        command = shlex.split(out.splitlines()[-1].partition(": art ")[2])
        assert command[-1] == "train.steps=2" and "train.steps=4" not in command
        assert art(*command)[0] == 0
    files = RunDir(tmp_path / "planned")
    assert [line.step for line in files.metrics() if line.split == "train"] == [0, 1]
    step, later = (
        math.fsum(s.cost_usd or 0 for each in files.scored(number) for s in each.scores) for number in (0, 1)
    )
    run = max(line.metrics.get("run_usd", 0.0) for line in files.metrics())
    assert run > later, "the evaluation after the first step was judged, too"
    assert step + run + (run - later) < 35, "with the plan's step, and the last evaluation, which no step counts"


@pytest.mark.parametrize("goal", ["win>=0.5", "reward<=0.5", "reward>=nan", "reward>=much", "reward"])
def test_a_goal_that_is_no_reward_to_reach_is_refused(art: Art, goal: str) -> None:
    code, out, err = art("plan", PLANNED / "config.yaml", "--goal", goal)
    assert (code, out) == (2, "") and f"--goal '{goal}': expected reward>=NUMBER" in err and err.count("\n") == 1


# --- the mathematics --------------------------------------------------------------------------------------------------


def test_the_noise_scale_is_that_of_known_gradients() -> None:
    """x_i = g + e_i with |g|^2 = 1 and tr(Sigma) = 8: the scale is 8 groups.

    The interval from 200 groups includes it.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 32, generator=draw, dtype=torch.float64) * (8 / 32) ** 0.5
    x[:, 0] += 1
    found = noise_scale(x @ x.T / 200**2, 200)
    assert found.groups is not None and found.groups == pytest.approx(8, rel=0.3)
    assert found.low < 8 and found.high is not None and found.high > 8


def test_groups_of_noise_alone_have_a_scale_above_their_number() -> None:
    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = noise_scale(x @ x.T / 64, 8)
    assert found.high is None and found.low > 8


def test_equal_gradients_have_no_noise() -> None:
    products = torch.ones(4, 4, dtype=torch.float64) / 16
    assert noise_scale(products, 4).groups == pytest.approx(0)


@pytest.mark.parametrize(
    ("moves", "chosen"),
    [((1e-5, 1e-2, 1.0), 2.0), ((1e-5, 5e-5, 1e-2), 4.0), ((1e-9, 1e-8, 1e-7), 4.0), ((1.0, 2.0, 3.0), 1.0)],
)
def test_the_rate_is_the_nearest_that_moves_the_policy_within_bounds(moves: Sequence[float], chosen: float) -> None:
    advice = choose_rate([Pilot(rate, kl, None, 1.0) for rate, kl in zip((1.0, 2.0, 4.0), moves, strict=True)], 2.0)
    assert advice is not None and float(advice.value) == chosen
    assert ("outside" in advice.reason) == (not LEAST_KL <= moves[1] <= MOST_KL)


def test_a_rate_is_not_advised_where_none_was_measured() -> None:
    assert choose_rate([Pilot(1.0, None, None, 1.0)], 1.0) is None


def test_a_rate_whose_own_pilot_failed_is_given_up_for_one_within_bounds() -> None:
    failed = Pilot(1.0, None, None, 1.0, is_failed=True)
    advice = choose_rate([Pilot(0.25, 0.01, None, 1.0), Pilot(0.5, 0.05, None, 1.0), failed], 1.0)
    assert advice is not None and advice.value == "0.5" and "at 1 the step failed" in advice.reason


def test_what_is_advised_is_a_configuration_that_can_be_trained() -> None:
    """Fewer groups than updates in a step are none, and the longest row is what does not fit."""
    scale, much = NoiseScale(1.0, 0.5, 1.6), MemoryNeed(tokens=8192, gigabytes=99.0, there=10.0)
    config = load_config(
        PLANNED / "config.yaml", [RATE, "train.updates_per_step=4", "learner.gradient_checkpointing=true"]
    )
    found = {each.key: each.value for each in advise(measured(noise_scale=scale, memory=much), config.config)}
    assert found == {"rollout.groups_per_step": "4", "model.max_length": "4096"}
    packed = msgspec.structs.replace(much, is_packed=True)  # several rows side by side do not fit
    assert [each.key for each in advise(measured(memory=packed), config.config)] == ["learner.micro_batch_tokens"]
    config = load_config(PLANNED / "config.yaml", [RATE, "train.updates_per_step=8"])
    assert not list(advise(measured(noise_scale=scale), config.config)), "all eight groups are needed"


def test_sampling_beside_training_takes_between_the_longer_one_and_both() -> None:
    counts = {"steps": 10, "evaluations": 0, "eval_attempts": 0, "usd_per_hour": 0.0}
    beside = forecast(measured(training_s=8.0, judging_s=0.0), is_ahead=True, **counts)["whole"]
    assert 80 < beside.value < 160 and beside.low < 0.8 * beside.value


def measured(**given: Any) -> Measured:
    numbers: dict[str, Any] = {"group_tokens": [100] * 8, "num_attempts": 32, "sampling_s": 8.0}
    return Measured(**(numbers | {"judging_s": 1.0, "training_s": 4.0, "judge_usd": 0.1} | given))


def test_a_forecast_adds_up() -> None:
    """10 steps of 8 + 1 + 4 s, 2 evaluations of 64 attempts (twice a step's 32) of 16 s each: 162 s in the median."""
    found = forecast(measured(), steps=10, evaluations=2, eval_attempts=64, usd_per_hour=0.0)
    assert found["whole"].value == pytest.approx(162, rel=0.05) and found["tokens"].value == pytest.approx(
        8000, rel=0.05
    )
    assert found["usd"].value == pytest.approx(1.0, rel=0.05)
    assert found["whole"].high / found["whole"].value == pytest.approx(1.5, rel=0.08), "the drift of lengths alone"


def test_prompts_that_an_evaluation_does_not_share_add_to_it_whatever_the_lengths_of_replies() -> None:
    counts = {"steps": 10, "evaluations": 3, "eval_attempts": 32, "usd_per_hour": 0.0}
    alone, shared = forecast(measured(pace=1e-9), eval_prompts_s=200.0, **counts), forecast(measured(), **counts)
    assert alone["evaluating"].value - shared["evaluating"].value == pytest.approx(600, rel=0.05)
    assert alone["sampling"] == shared["sampling"]


class Answering:
    """An engine that takes a fifth of a second for all prompts together, or never answers."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.asked, self.failure = list[Any](), failure
        self.endpoint, self.backend = Endpoint(base_url=None, api_key="", model="planned", step=0), self

    async def reply(self, request: Request) -> None:
        self.asked.append(request.prompt)
        await asyncio.sleep(0.2)
        if self.failure is not None:
            raise self.failure


def asked_groups(*prompts: list[int]) -> list[list[ScoredTrajectory]]:
    """Groups of two attempts, whose first prompts are equal within the group."""
    groups = list[list[ScoredTrajectory]]()
    for number, tokens in enumerate(prompts):
        turns = [msgspec.structs.replace(attempt().turns[0], prompt_ids=tokens)]
        groups.append([scored(f"s0000-g{number:04}", index, turns=turns) for index in range(2)])
    return groups


async def test_the_part_of_a_prompt_that_a_group_shares_takes_its_share_of_the_time() -> None:
    """4 prompts of 8 tokens with a common prefix of 2: 0.2 s times 1/4 times 3/4."""
    engine: Any = Answering()
    assert 0.037 < await shared_prompt_s(engine, asked_groups(*([7, 7, *[n] * 6] for n in range(4)))) < 0.2
    assert engine.asked == [[*[n] * 6, 7, 7] for n in range(4)], "no prompt is one that the engine has had"


async def test_nothing_is_added_where_no_prompt_is_shared_or_the_engine_does_not_answer() -> None:
    engine: Any = Answering(ChatError(503, "it cannot"))
    assert await shared_prompt_s(engine, asked_groups([1, 2, 3])) == 0 == len(engine.asked)  # a group alone
    assert await shared_prompt_s(engine, asked_groups([1, 2], [1, 2])) == 0 == len(engine.asked)  # one prompt for all
    assert await shared_prompt_s(engine, asked_groups([1, 2], [3, 4])) == 0 and len(engine.asked) == 2


async def test_an_attempt_that_called_no_model_stands_for_no_prompt() -> None:
    engine: Any = Answering()
    groups = [[scored(each.group_id, 2, turns=[]), *members] for members in asked_groups([1] * 8, [2] * 8)
              for each in members[:1]]  # fmt: skip
    assert await shared_prompt_s(engine, groups) > 0 and engine.asked == [[1] * 8, [2] * 8]


def test_what_a_judge_takes_for_evaluations_is_paid_as_its_groups_are() -> None:
    """10 steps for 0.1 dollars each, and contests of 20 steps' worth."""
    counts = {"steps": 10, "evaluations": 0, "eval_attempts": 0, "usd_per_hour": 0.0}
    found = forecast(measured(), contested=20.0, **counts)
    assert found["usd"].value == pytest.approx(3.0, rel=0.05) and found["evaluating"].value == pytest.approx(
        20, rel=0.05
    )


@pytest.mark.parametrize("usd", ["nan", "inf", "-1", "much"])
def test_a_budget_that_is_no_sum_is_refused(art: Art, usd: str) -> None:
    code, out, err = art("plan", PLANNED / "config.yaml", "--budget-usd", usd)
    assert (code, out) == (2, "") and "--budget-usd" in err and err.count("\n") == 1


def test_unequal_groups_make_a_wider_interval() -> None:
    wide = forecast(measured(group_tokens=[10, 10, 10, 770]), steps=1, evaluations=0, eval_attempts=0, usd_per_hour=0)
    even = forecast(measured(), steps=1, evaluations=0, eval_attempts=0, usd_per_hour=0)
    assert wide["sampling"].high - wide["sampling"].low > 1.5 * (even["sampling"].high - even["sampling"].low)


def test_a_budget_buys_steps_at_the_upper_end_and_nothing_without_a_price() -> None:
    def promised(usd: float | None) -> Promise:
        found = measured(judge_usd=usd)
        expected = forecast(found, steps=10, evaluations=0, eval_attempts=0, usd_per_hour=0.0)
        return Promise(config_hash="", measured=found, doubts=[], settings={}, reasons={}, steps=10, evaluations=0,
                       expected=expected)  # fmt: skip

    assert steps_for(1.5, promised(0.1)) in (9, 10) and (steps_for(1e308, promised(0.1)) or 0) > 10**9
    assert steps_for(1.5, promised(0.0)) is None and steps_for(1.5, promised(None)) is None


def test_loading_before_the_first_call_is_no_part_of_sampling_and_an_agents_own_work_is() -> None:
    """Three attempts wait 4 s for loading; attempt 4 starts later and works for 1 s before its call."""
    times = [(0.0, 4.0), (0.0, 4.1), (1.0, 3.2), (6.0, 1.0)]
    played = [
        Trajectory(id=str(i), group_id="g", group_size=4, index=i, started_at=begin, spans=[(wait, wait + 1), (9, 10)])
        for i, (begin, wait) in enumerate(times)
    ]
    assert before_calls(played) == 3.0 and before_calls(played[:3]) == 4.0 and before_calls([]) == 0.0


def test_time_between_two_starts_is_not_sampling() -> None:
    times = [(0.0, 2.0), (1.0, 3.0), (100.0, 1.0)]
    played = [
        Trajectory(id=str(i), group_id="g", group_size=3, index=i, started_at=begin, duration_s=took)
        for i, (begin, took) in enumerate(times)
    ]
    assert busy(played) == 5.0
