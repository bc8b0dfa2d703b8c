"""The `stop` section: each rule on the metrics of a real tiny run, which continues afterwards."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.cli.app import run as art
from art_cli.config.compose import load_config
from art_cli.config.metric_names import ALWAYS, FAMILIES, NEEDS
from art_cli.config.sections.train_config import StopRule
from art_cli.learners import StepMetrics
from art_cli.loop.stop_rules import StopRules, spent_before
from art_cli.loop.train import TrainResult, train
from art_cli.runs.history import Evaluated, History, UpdateNumbers
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ConfigError, Paused
from tests.judges.test_ruler_train import share_of_letters
from tests.support.judges.judge_server import Conduct, serving
from tests.support.paths import LETTERS

ROLLOUT = """
from pathlib import Path
from art_cli import Outcome

async def rollout(policy, scenario):
    reply = await policy.client.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": scenario["ask"]}])
    level, spread = map(float, Path(__file__).with_name("level.txt").read_text().split())
    said = sum(map(ord, reply.choices[0].message.content))
    return Outcome(reward=level + spread * (said % 2), metrics={"level": level})
"""
SMALL = ["train.steps=30", "rollout.group_size=4", "rollout.groups_per_step=2", "rollout.sampling.max_tokens=2"]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A run whose rewards are what level.txt says: a level, and a spread that gives groups signal."""
    shutil.copytree(LETTERS, tmp_path / "project")
    (tmp_path / "project/rollout.py").write_text(ROLLOUT)
    return tmp_path / "project"


def start(project: Path, rules: list[dict[str, Any]], *more: str, level: str = "0.5 0.1") -> TrainResult:
    (project / "level.txt").write_text(level)
    settings = [f"runs={project}/runs", *SMALL, written(rules), *more]
    return asyncio.run(train(load_config(project / "config.yaml", settings)))


def written(rules: list[dict[str, Any]]) -> str:
    """The rules as an override on the command line."""
    texts = [", ".join(f"{key}: {value!r}" for key, value in rule.items()) for rule in rules]
    return f"stop=[{', '.join(f'{{{text}}}' for text in texts)}]"


def paused_at(project: Path, rules: list[dict[str, Any]], *more: str, level: str = "0.5 0.1") -> tuple[int, str]:
    """The step at which the run pauses, and its message."""
    with pytest.raises(Paused) as found:
        start(project, rules, *more, level=level)
    assert "continue with: art train" in str(found.value)
    run = RunDir(project / "runs/letters")
    step = run.checkpoint_steps()[-1]
    assert str(run.checkpoint_path(step)) in str(found.value)
    return step, str(found.value)


@pytest.mark.slow
def test_each_rule_pauses_a_real_run_which_then_goes_on(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run paused by several rules in turn. After a pause, the rule waits for a full window of new steps."""
    rule: dict[str, Any] = {"metric": "no_signal_share", "above": 0.9, "for_steps": 2}
    step, said = paused_at(project, [rule], "eval=null", level="0.5 0")
    assert step == 2 and "paused at step 2 of 30: no_signal_share of steps 1 to 2 was above 0.9, at last 1" in said
    assert "stop rule: no_signal_share above 0.9 for 2 steps; it fires again after 2 more steps at the earliest" in said
    assert paused_at(project, [rule], "eval=null", level="0.5 0")[0] == 4
    # signal again; the rewards fall by 0.3 in the mean of two steps
    rule = {"metric": "reward_mean", "below_best_by": 0.3, "for_steps": 2}
    step, said = paused_at(project, [rule], "eval=null", level="0.1 0.1")
    assert step == 6 and "below its best of 0.5 at 4" in said
    assert paused_at(project, [{"metric": "truncated_share", "above": 0.5}], "eval=null")[0] == 7
    assert paused_at(project, [{"metric": "logprob_gap", "above": 1e-12}], "eval=null")[0] == 8
    assert paused_at(project, [{"metric": "entropy", "below": 50.0, "for_steps": 2}], "eval=null")[0] == 9
    assert paused_at(project, [{"metric": "metrics.level", "above": 0.0}], "eval=null")[0] == 10
    step, said = paused_at(project, [{"hours": 1e-6}], "eval=null")
    assert step == 11 and re.search(r"the run has taken 0\.\d\d hours .*again after another 1e-06 hours", said)
    step, said = paused_at(project, [{"usd": 1.0, "usd_per_hour": 1e9}], "eval=null")
    assert step == 12 and "(stop rule: $1 at $1e+09 an hour; it fires again after another $1)" in said
    # the rule's window spans two starts of a single step
    rule = {"metric": "metrics.level", "above": 0.6, "for_steps": 3}
    for steps in (13, 14):
        assert start(project, [rule], "eval=null", f"train.steps={steps}", level="0.7 0.1").step == steps
    assert paused_at(project, [rule], "eval=null", level="0.7 0.1")[0] == 15
    # a warning once, when it begins; a pause that comes with the last step only warns
    caplog.clear()
    rules = [{"metric": "entropy", "above": 0.0, "then": "warn"}, {"metric": "logprob_gap", "above": 1e-12}]
    assert paused_at(project, rules, "eval=null")[0] == 16
    assert start(project, rules, "eval=null", "train.steps=17").step == 17
    assert [each.getMessage() for each in caplog.records if "logprob_gap above" in each.getMessage()][-1].startswith(
        "stop rule (logprob_gap above 1e-12): logprob_gap of step 17"
    )
    assert not any("entropy above" in each.getMessage() for each in caplog.records)  # it has held since the first step


@pytest.mark.slow
def test_a_rule_on_an_evaluation_pauses_after_it(project: Path) -> None:
    rule = {"metric": "eval.reward", "below": 0.4}
    step, said = paused_at(project, [rule], "eval.every=2", level="0.1 0.1")
    assert step == 0 and "eval.reward of evaluation 0 was below 0.4, at last 0." in said
    assert paused_at(project, [rule], "eval.every=2", level="0.1 0.1")[0] == 2
    assert start(project, [rule], "eval.every=2", "train.steps=4", level="0.7 0.1").evaluations.keys() == {0, 2, 4}


@pytest.mark.slow
def test_dollars_of_a_judge_count_over_all_starts(project: Path) -> None:
    """Each step asks for two groups at a known price. A rule with the cost of 1.5 steps fires in step 2."""
    shutil.copy(LETTERS / "rollout.py", project / "rollout.py")
    with serving(Conduct(rule=share_of_letters)) as server:
        judge = ["eval=null", "judge=ruler", f"judge.api_base={server.api_base}", "judge.model=rule"]
        unpriced = [*judge, f"judge.cache={project}/cache.sqlite"]
        with pytest.raises(ConfigError, match=r"stop\.0\.usd: no price is known for rule"):
            start(project, [{"usd": 1.0}], *unpriced)
        priced = [*unpriced, "judge.price={input: 1000000.0, output: 1000000.0}"]
        start(project, [], *priced, "train.steps=1")
        [line] = RunDir(project / "runs/letters").metrics()
        usd = line.metrics["run_usd"]
        assert usd == pytest.approx(line.metrics["judge_usd"]) and usd > 1
        step, said = paused_at(project, [{"usd": 1.5 * usd}], *priced)
    assert step == 2 and "the run has cost $" in said
    lines = RunDir(project / "runs/letters").metrics()
    spent = sum(line.metrics.get("judge_usd", 0.0) for line in lines)
    assert [line.metrics["run_usd"] for line in lines if line.split == "train"][-1] == pytest.approx(spent)


@pytest.mark.slow
def test_the_command_ends_with_exit_code_1_and_says_how_to_go_on(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "level.txt").write_text("0.5 0.1")
    command = ["train", str(project / "config.yaml"), f"runs={project}/runs", *SMALL, "eval=null"]
    assert art([*command, "stop=[{metric: loss, below: 1000}]"]) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert shown.startswith("paused at step 1 of 30: loss of step 1 was below 1000")
    assert "continue with: art train" in shown
    assert art([*command, "train.steps=2"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"metric": "no_signl_share", "above": 1}, r"stop\.0\.metric: .*did you mean 'no_signal_share'"),
        ({"metric": "reward", "below": 1}, "of a step: reward_mean; of an evaluation: eval.reward"),
        ({"metric": "kl", "above": 1}, "needs loss.kl above 0"),
        ({"metric": "entropy"}, "exactly one of 'above', 'below' and 'below_best_by'"),
        ({}, "exactly one of 'metric', 'hours', 'usd' and 'parts_from'"),
        ({"hours": 1, "for_steps": 2}, r"stop\.0\.for_steps: used with 'metric' only"),
        ({"hours": 1, "usd_per_hour": 2}, "used with 'usd' only"),
        ({"usd": 1}, "costs nothing; set usd_per_hour"),
        ({"parts_from": "win"}, r"stop\.0\.parts_from: 'win': needs a shadow section"),
        ({"parts_from": "win", "above": 1}, r"stop\.0\.above: used with 'metric' only"),
        ({"hours": 0}, "greater than 0|above 0"),
        ({"hours": 1, "then": "halt"}, "pause"),
        ({"metric": "x\u202ey", "above": 0}, r"x\\u202ey"),
    ],
)
def test_a_rule_that_can_never_fire_is_refused(rule: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(LETTERS / "config.yaml", [written([rule])])
    if "eval.reward" in words:
        with pytest.raises(ConfigError, match="needs an eval section"):
            load_config(LETTERS / "config.yaml", ["eval=null", "stop=[{metric: eval.reward, above: 1}]"])


@pytest.mark.slow
def test_the_names_that_are_known_are_those_that_steps_have(tmp_path: Path) -> None:
    """Every metric of learners and real steps has a known name, so rules can be checked by name."""
    known = ALWAYS | NEEDS.keys()
    assert set(msgspec.structs.asdict(StepMetrics(**dict.fromkeys(StepMetrics.__struct_fields__, 0)))) <= known
    settings = ["train.steps=1", "eval=null", "rollout.groups_per_step=1", f"runs={tmp_path}"]
    root = asyncio.run(train(load_config(LETTERS / "config.yaml", settings))).root
    [line] = RunDir(root).metrics()
    assert not [name for name in line.metrics if name not in known and not name.startswith(FAMILIES)]
    learners = set(StepMetrics.__struct_fields__)
    missing = {name for name in ALWAYS - line.metrics.keys() if name not in learners}
    assert not missing


def test_a_metric_that_nothing_reports_is_a_warning_with_the_near_name() -> None:
    rules = StopRules([StopRule(metric="metrics.lenght", above=1), StopRule(metric="eval.wins", above=1)], {})
    history = History([UpdateNumbers(1, {"metrics.length": 2.0})], [Evaluated(1, {"reward": 1.0})])
    [line] = rules.unreported(history, of_evaluations=False)
    assert "'metrics.lenght'" in line and "did you mean 'metrics.length'" in line
    assert "there are eval.reward" in rules.unreported(history, of_evaluations=True)[0]
    assert rules.unreported(history, of_evaluations=True) == []  # once


@pytest.mark.slow
@given(
    values=st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=12),
    width=st.integers(1, 3),
    since=st.integers(0, 12),
)
def test_a_rule_fires_exactly_where_its_last_values_say_so(values: list[float], width: int, since: int) -> None:
    """Compared with the definition: the last `width` steps since the pause are all above 0.5."""
    rule = StopRule(metric="loss", above=0.5, for_steps=width)
    rules = StopRules([rule], {str(rule): (since, 0.0)})
    for step in range(1, len(values) + 1):
        history = History([UpdateNumbers(n, {"loss": value}) for n, value in enumerate(values, 1)], [])
        window = [values[n - 1] for n in range(step - width + 1, step + 1) if n > since and n >= 1]
        expected = len(window) == width and all(value > 0.5 for value in window)
        assert bool(rules.after(history, step)) == expected


def test_a_fork_counts_from_its_beginning() -> None:
    rules = [StopRule(hours=2), StopRule(metric="entropy", below=0.1), StopRule(usd=5)]
    before = [UpdateNumbers(n, {"run_s": n * 7000.0, "run_usd": 4.0 * n, "entropy": 0.01}) for n in range(1, 4)]
    later = [UpdateNumbers(4, {"run_s": 21_600.0, "run_usd": 12.5, "entropy": 0.3})]
    history, spent = History([*before, *later], []), spent_before(rules, History(before, []))
    assert len(StopRules(rules, {}).after(history, 4)) == 2
    assert StopRules(rules, {rule: (3, value) for rule, value in spent.items()}).after(history, 4) == []


def test_hours_begin_anew_after_a_pause_and_a_warning_comes_once() -> None:
    rule, warning = StopRule(hours=2), StopRule(hours=2, then="warn")
    hours = [1.0, 1.9, 2.1, 3.0, 4.0, 4.2]
    history = History([UpdateNumbers(n, {"run_s": h * 3600}) for n, h in enumerate(hours, 1)], [])
    first, again = StopRules([rule, warning], {}), StopRules([rule, warning], {"2 hours": (3, 2.1)})
    firing = [[each.rule.then for each in first.after(history, n)] for n in range(1, 7)]
    assert firing == [[], [], ["pause", "warn"], ["pause"], ["pause"], ["pause"]]
    assert [n for n in range(1, 7) if any(each.rule is rule for each in again.after(history, n))] == [6]
