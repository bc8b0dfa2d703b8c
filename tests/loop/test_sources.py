"""Several sources in a run: each step's mix, and the sources' separate settings."""

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from art_cli.chat.requests import Sampling
from art_cli.config.checks import reflecting_model
from art_cli.config.compose import load_config
from art_cli.config.config_identity import config_changes
from art_cli.config.schema import PromptLearnerConfig, RunConfig
from art_cli.config.sections.rollout_config import RolloutConfig, SourceConfig
from art_cli.loop.batches import StepGroups
from art_cli.loop.claim_run import RunData
from art_cli.loop.evaluate import values_of_sources
from art_cli.loop.source_mix import SourceMix, places
from art_cli.loop.train import train
from art_cli.reports.run_report import read_report
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, Trajectory, score_trajectory
from art_cli.runtime.errors import ConfigError, DataError, UsageError
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS
from tests.support.processes.stage import Engine, ScriptedBackend

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 9), min_size=1)

# The source `other` is independent of letters: its judge likes long replies, and its rollout makes up to five calls.
OTHER = """
async def rollout(policy, scenario):
    for _ in range(5):
        messages = [{"role": "user", "content": scenario["ask"]}]
        await policy.client.chat.completions.create(model=policy.model, messages=messages)


def lengths(group):
    return [float(each.index) for each in group]
"""


def write_project(root: Path, **rollout: Any) -> Path:
    """Writes a project with the sources `letters` and `other`, 2 to 1, whose scenarios have the same ids."""
    for name in ("build.py", "rollout.py", "scenarios.jsonl"):
        shutil.copy(LETTERS / name, root)
    (root / "other.py").write_text(OTHER)
    config = yaml.safe_load((LETTERS / "config.yaml").read_text())
    files = {"scenarios": "scenarios.jsonl", "eval_scenarios": "scenarios.jsonl"}
    sources = {
        "letters": {"entry": "rollout.py:rollout", "weight": 2, **files},
        "other": {"entry": "other.py:rollout", "judge": {"entry": "other.py:lengths"}, "max_turns": 2, "max_tokens": 3},
    }
    sources["other"] |= files
    kept = {key: value for key, value in config["rollout"].items() if key not in ("entry", "scenarios")}
    config |= {"rollout": kept | {"concurrency": 1, "sources": sources} | rollout, "eval": {"every": 2}}
    (path := root / "config.yaml").write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("own", "num"), [(None, 1), ({"name": "ruler", "model": "other"}, 2)])
def test_a_judge_that_sources_share_is_asked_once(
    own: dict[str, str] | None, num: int, tmp_path: Path, art: Callable[..., tuple[int, str, str]]
) -> None:
    config = write_project(tmp_path)
    with serving(Conduct(rule=lambda conversations: 0.5)) as server:
        written = yaml.safe_load(config.read_text())
        written["rollout"]["sources"]["other"]["judge"] = own and own | {"base_url": server.api_base}
        config.write_text(yaml.safe_dump(written))
        _, out, err = art("check", config, "judge=ruler", "judge.model=m", f"judge.base_url={server.api_base}")
        assert "judge letters" in out and "judge other" in out, err
        assert len(server.asked) == num


# --- the mix ----------------------------------------------------------------------------------------------------------


@given(WEIGHTS, st.integers(1, 200))
def test_the_shares_are_exact_after_each_period_and_no_source_is_a_whole_group_ahead(
    weights: dict[str, int], num: int
) -> None:
    """A period's length is the sum of the weights; within a period, each source gets its weight in places."""
    total = sum(weights.values())
    assert Counter(islice(places(weights), 3 * total)) == {name: 3 * weight for name, weight in weights.items()}
    counts = Counter(islice(places(weights), num))
    assert all(counts[name] < num * weight / total + 1 for name, weight in weights.items())


def test_weights_are_taken_as_they_are_written() -> None:
    """0.1 and 0.2 are no sums of powers of 2; their ratio is 1 to 2 all the same."""
    assert "".join(islice(places({"a": 0.2, "b": 0.1}), 12)) == "abaabaabaaba"


def mixed(root: Path, *overrides: str) -> tuple[RunConfig, SourceMix]:
    config = load_config(write_project(root), overrides).config
    known: dict[str, list[Json]] = {
        name: [{"id": str(number)} for number in range(num)] for name, num in (("letters", 5), ("other", 7))
    }
    return config, SourceMix(config, RunDir(root / "runs"), known)


def test_a_step_has_the_same_places_after_a_restart_and_an_epoch_plays_each_scenario_once(tmp_path: Path) -> None:
    """Weights 2 to 1 and 4 groups per step. Without refills 5 and 7 scenarios are whole epochs of the two sources."""
    _, mix = mixed(tmp_path, "rollout.groups_per_step=4")
    steps = [mix.places(step)[0] for step in range(21)]
    for step in (0, 7, 20):
        assert mixed(tmp_path, "rollout.groups_per_step=4")[1].places(step) == (steps[step], [])
    assert {len(step) for step in steps} == {4}
    played = [place for step in steps for place in step]
    assert Counter(place.source for place in played) == {"letters": 56, "other": 28}
    for source, num in (("letters", 5), ("other", 7)):
        ids = [place.scenario["id"] for place in played if place.source == source]
        for first in range(0, len(ids) - num, num):
            assert len(set(ids[first : first + num])) == num


def play(plan: RolloutPlan, *, tells: bool) -> Trajectory:
    fields = {name: getattr(plan, name) for name in ("group_id", "group_size", "index", "scenario", "source")}
    return Trajectory(id=plan.trajectory_id, returned_reward=float(plan.index % 2) if tells else 0.5, **fields)


def test_a_group_without_signal_is_refilled_from_its_own_source(tmp_path: Path) -> None:
    """Only `letters` has signal: its 2 groups suffice, and the one of `other` is refilled until its budget is spent."""
    config, mix = mixed(tmp_path, "rollout.refill=2.0", "rollout.groups_per_step=3")
    own, spare = mix.places(0)
    assert Counter(place.source for place in spare) == {"letters": 4, "other": 2}
    groups, waves = StepGroups(config.rollout, 0, own, spare, []), []

    def scored() -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for each in groups.done:
            found.setdefault(each.group_id, []).append(score_trajectory(each, each.returned_reward))
        return found

    while plans := groups.next(scored()):
        waves.append([plan.source for plan in plans[:: config.rollout.group_size]])
        groups.done += [play(plan, tells=plan.source == "letters") for plan in plans]
    assert waves == [["letters", "other", "letters"], ["other"], ["other"]]
    numbers = groups.numbers(scored())
    assert numbers["num_refilled"] == 2
    assert (numbers["no_signal_share.letters"], numbers["no_signal_share.other"]) == (0.0, 1.0)


def test_a_begun_group_keeps_its_source(tmp_path: Path) -> None:
    """Group 0 was begun for `letters`, but its place now belongs to `other`: each source gets its share."""
    config, mix = mixed(tmp_path, "rollout.refill=2.0", "rollout.groups_per_step=3")
    own, spare = mix.places(0)
    done = [play(plan, tells=True) for plan in StepGroups(config.rollout, 0, own, spare, []).next({})[:1]]
    wave = StepGroups(config.rollout, 0, [*own[1:], own[0]], spare, done).next({})[:: config.rollout.group_size]
    assert [plan.source for plan in wave] == ["letters", "letters", "other"]
    assert (wave[0].group_id, wave[0].scenario) == (done[0].group_id, done[0].scenario)


def test_adaptive_choice_sees_the_past_of_its_own_source_alone(tmp_path: Path) -> None:
    """Both sources have a scenario "0"; only the scenario in `letters` has signal."""
    _, mix = mixed(tmp_path, "rollout.choose=adaptive")
    groups: Sequence[Any] = [
        [
            score_trajectory(play(plan, tells=source == "letters"), float(plan.index % 2) if source == "letters" else 0)
            for plan in [plan_of(source, index) for index in range(4)]
        ]
        for source in ("letters", "other")
    ]
    mix.note(0, groups)
    assert [each.source for each in RunDir(tmp_path / "runs").group_rewards(0)] == ["letters", "other"]
    histories = {name: choice.history(1)[0] for name, choice in mix._choices.items()}
    assert {name: [each.rewards for each in found] for name, found in histories.items()} == {
        "letters": [[0, 1, 0, 1]],
        "other": [[0, 0, 0, 0]],
    }


def plan_of(source: str, index: int) -> RolloutPlan:
    group = f"s0000-g000{source == 'other':d}"
    return RolloutPlan(
        trajectory_id=f"{group}-{index}",
        group_id=group,
        group_size=4,
        index=index,
        scenario={"id": "0"},
        step=0,
        source=source,
    )


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_source_has_its_judge_its_limits_and_its_numbers(tmp_path: Path) -> None:
    """Steps of 3 groups, 2 of `letters`. The judge of `other` gives each attempt its place in the group: mean 1.5."""
    loaded = load_config(write_project(tmp_path), ["train.steps=2"])
    run = RunDir(asyncio.run(train(loaded)).root)
    for step in range(2):
        scored = run.scored(step)
        assert Counter(each.source for each in scored) == {"letters": 8, "other": 4}
        for each in scored:
            turns = [len(turn.sampled_ids) for turn in each.turns]
            if each.source == "other":
                assert each.reward == each.index and each.scores[0].judge == "function"
                assert len(turns) == 2 and max(turns) <= 3 and each.limit == "turn_limit"
            else:
                assert each.reward == each.returned_reward and len(turns) == 2 and max(turns) == 6
    for line in run.metrics():
        numbers = line.metrics
        if line.split == "train":
            assert (numbers["reward.other"], numbers["num_groups.letters"], numbers["num_groups.other"]) == (1.5, 2, 1)
            mean = (8 * numbers["reward.letters"] + 4 * 1.5) / 12
            assert numbers["reward_mean"] == pytest.approx(mean)
        else:  # what `other` returns at its limit is 0
            assert numbers["reward"] == pytest.approx((numbers["reward.letters"] + numbers["reward.other"]) / 2)
    report = read_report(run)
    assert [step for step, _ in report.series["reward.other"]] == [1, 2]
    assert "reward.letters" in report.evaluations[-1].metrics
    played = list(read_lines(run.eval_path(0), Trajectory))
    assert Counter(each.source for each in played) == {"letters": 5, "other": 5}


@pytest.mark.slow
def test_a_run_in_two_starts_takes_the_same_steps_as_in_one(tmp_path: Path) -> None:
    """With refills and adaptive choice, which go by the past. The adapters are equal bit for bit."""
    settings = ["rollout.refill=0.5", "rollout.choose=adaptive", "eval=null", "train.keep_checkpoints=9"]
    settings += [f"~rollout.sources.{name}.eval_scenarios" for name in ("letters", "other")]
    config = write_project(tmp_path)

    def start(name: str, steps: int) -> RunDir:
        return RunDir(asyncio.run(train(load_config(config, [f"name={name}", f"train.steps={steps}", *settings]))).root)

    whole = RunDir(start("run", 4).root.rename(tmp_path / "whole"))
    start("run", 2)
    parts = start("run", 4)
    for step in range(4):
        ours, theirs = (
            [(each.id, each.source, each.scenario, each.messages, each.reward) for each in run.scored(step)]
            for run in (whole, parts)
        )
        assert sorted(ours, key=lambda each: each[0]) == sorted(theirs, key=lambda each: each[0])
        adapters = [run.checkpoint_path(step + 1) / "adapter_model.safetensors" for run in (whole, parts)]
        assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.slow
def test_a_run_without_sources_writes_nothing_of_them(tmp_path: Path) -> None:
    loaded = load_config(LETTERS / "config.yaml", [f"runs={tmp_path}", "train.steps=1", "rollout.choose=adaptive"])
    run = RunDir(asyncio.run(train(loaded)).root)
    assert "sources" not in json.loads(run.config_path.read_text())["rollout"]
    for path in run.root.rglob("*.jsonl"):
        assert b'"source"' not in path.read_bytes(), path


@pytest.mark.slow
def test_the_other_commands_work_with_sources(tmp_path: Path, art: Callable[..., tuple[int, str, str]]) -> None:
    config = write_project(tmp_path)
    code, out, err = art("check", config)
    assert code == 0, err
    for line in ("scenarios letters", "scenarios other", "rollout other", "judge other"):
        assert line in out
    code, _, err = art("generate", config, "-o", tmp_path / "played.jsonl")
    assert code == 0, err
    played = list(read_lines(tmp_path / "played.jsonl", Trajectory))
    assert Counter(each.source for each in played) == {"letters": 8, "other": 4}
    code, out, err = art("eval", config, "--checkpoint", "base", "--gate", "reward.letters>=0", "--json")
    assert code == 0, err
    assert {"reward.letters", "failed.other"} <= {row["metric"] for row in json.loads(out)["metrics"]}
    code, _, err = art("eval", config, "--checkpoint", "base", "--gate", "reward.letters>=2")
    assert code == 1 and "reward.letters is" in err
    code, _, err = art("eval", config, "--checkpoint", "base", "--gate", "reward.leters>=0")
    assert code == 2 and "no source 'leters'; did you mean reward.letters?" in err
    code, _, err = art("plan", config)
    assert code == 0, err
    code, _, err = art("hunt", config)
    assert code == 2 and "rollout.sources: a hunt needs a single task" in err
    code, _, err = art("judge", tmp_path / "played.jsonl", config)
    assert code == 2


def gateway() -> Gateway:
    return Gateway(Engine(ScriptedBackend()), defaults=Sampling(), seed=0, max_turns=9)


async def test_each_source_has_its_time_and_what_its_limit_is_worth(tmp_path: Path) -> None:
    """`letters` asks for ever: its second call is refused, which is worth 0.25. `other` sleeps, for 0.2 s at most."""
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "async def ask(policy, scenario):\n"
        "    while True:\n"
        "        messages = [{'role': 'user', 'content': 'more'}]\n"
        "        await policy.client.chat.completions.create(model=policy.model, messages=messages)\n"
        "async def sleep(policy, scenario):\n"
        "    await asyncio.sleep(60)\n"
    )
    sources = {
        "letters": SourceConfig(entry="slow.py:ask", scenarios="none", max_turns=1, limit_reward=0.25),
        "other": SourceConfig(entry="slow.py:sleep", scenarios="none", timeout_s=0.2, retries=0),
    }
    config, played = RolloutConfig(sources=sources, processes=0), list[Trajectory]()
    async with (door := gateway()).serve(), Runner(config, tmp_path, door) as runner:
        await runner.run([plan_of("letters", 0), plan_of("other", 0)], played.append)
    found = {each.source: each for each in played}
    assert (found["letters"].limit, found["letters"].returned_reward) == ("turn_limit", 0.25)
    assert len(found["letters"].turns) == 1
    assert found["other"].error is not None and found["other"].error.startswith("timeout: not finished after 0.2 s")


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.sources.other.weight=0", r"rollout\.sources\.other\.weight: expected a number greater than 0"),
        ("rollout.sources.other.judge={name: rules}", r"rollout\.sources\.other\.judge\.name: no judge 'rules'"),
        ("~rollout.sources.other.entry", r"rollout\.sources\.other: set exactly one of 'entry'"),
        ("rollout.entry=rollout.py:rollout", r"rollout: with 'sources' each source has its own 'entry'"),
        (
            "rollout.sources.other.max_turn=1",
            r"rollout\.sources\.other\.max_turn: no such key; did you mean 'max_turns'",
        ),
        ("rollout.sources.other.env=[KEY]", r"rollout\.sources\.other\.env: only the program"),
        (
            "rollout.sources.letters.judge={name: metric, metric: win, noise: votes}",
            r"rollout\.sources\.letters\.judge\.noise: judge 'metric' gives each attempt one score",
        ),
        ("~rollout.sources.other.eval_scenarios", r"rollout\.sources\.other\.eval_scenarios: missing"),
        ("eval=null", r"rollout\.sources\.letters\.eval_scenarios: used with an eval section only"),
        ("eval.scenarios=scenarios.jsonl", r"eval\.scenarios: with rollout\.sources each source has its own"),
        ("rollout.cluster=ray", r"rollout\.cluster: a cluster plays one agent"),
        ("stop=[{metric: eval.failed.othr, below: 0.1}]", r"no source 'othr'; did you mean failed\.other\?"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_source(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(write_project(tmp_path), [override])


def test_what_one_source_has_a_use_for_may_stand_for_all(tmp_path: Path) -> None:
    """Processes are for functions and the environment is for programs: unused settings are refused."""
    config = write_project(tmp_path)
    program = ["~rollout.sources.other.entry", "rollout.sources.other.command=[python, other.py]"]
    load_config(config, [*program, "rollout.processes=2", "rollout.env=[KEY]"])
    with pytest.raises(ConfigError, match=r"rollout\.env: only the program"):
        load_config(config, ["rollout.env=[KEY]"])
    with pytest.raises(ConfigError, match=r"rollout\.sources\.other\.processes: each attempt"):
        load_config(config, [*program, "rollout.sources.other.processes=2"])


def test_a_stop_rule_may_name_a_number_of_a_source(tmp_path: Path) -> None:
    rules = "stop=[{metric: reward.other, above: 0.9}, {metric: eval.reward.letters, above: 0.9}]"
    assert len(load_config(write_project(tmp_path), [rules]).config.stop) == 2


def test_the_judge_of_a_source_may_write_prompts(tmp_path: Path) -> None:
    """The first source's judge is a model, and the other one's a function."""
    prompt = ["~model.lora", "~train", "learner={name: prompt}", "train={steps: 2}"]
    with pytest.raises(ConfigError, match="judge 'rollout' and 'function' cannot reflect"):
        load_config(write_project(tmp_path), prompt)
    config = load_config(
        tmp_path / "config.yaml", [*prompt, "rollout.sources.letters.judge={name: ruler, model: m/x}"]
    ).config
    assert isinstance(config.learner, PromptLearnerConfig)
    found = reflecting_model(config, config.learner)
    assert found is not None and found.model == "m/x"


def test_a_source_without_rewards_has_no_mean(tmp_path: Path) -> None:
    config = load_config(write_project(tmp_path), []).config
    found = values_of_sources({"reward": {"letters/a": 1.0}, "failed": {"letters/a": 0.0, "other/a": 1.0}}, config)
    assert found == {
        "reward.letters": {"letters/a": 1.0},
        "failed.letters": {"letters/a": 0.0},
        "failed.other": {"other/a": 1.0},
    }


def test_a_judge_that_no_source_uses_is_refused(tmp_path: Path) -> None:
    overrides = ["judge=rollout", "rollout.sources.letters.judge={name: rollout}"]
    with pytest.raises(ConfigError, match="judge: every source of rollout.sources has its own judge"):
        load_config(write_project(tmp_path), overrides)


def test_limits_of_a_source_may_change_in_a_run_and_its_weight_may_not(tmp_path: Path) -> None:
    config = write_project(tmp_path)
    old, new = (
        load_config(config, [f"rollout.sources.other.{each}" for each in settings]).config.model_dump(mode="json")
        for settings in ((), ("timeout_s=5", "weight=3", "judge.timeout_s=3"))
    )
    changes = {change.key: change.is_allowed for change in config_changes(old, new)}
    assert changes == {"rollout.sources.other.timeout_s": True, "rollout.sources.other.weight": False}


async def test_what_cannot_be_loaded_names_its_source(tmp_path: Path) -> None:
    loaded = load_config(write_project(tmp_path), ["rollout.sources.other.pool=colour"])
    with pytest.raises(DataError, match=r"^rollout\.sources\.other: pool: scenario 'letters-1': 'colour'"):
        RunData(loaded.config, tmp_path).check()
    (tmp_path / "other.py").write_text("raise KeyError('gone')")
    with pytest.raises(UsageError, match=r"^rollout\.sources\.other: .*other\.py:1.*gone"):
        async with Runner(loaded.config.rollout, tmp_path, gateway()):
            pass
