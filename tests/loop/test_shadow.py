"""Shadow judges: scores are recorded and compared, and never change or stop training."""

import asyncio
import math
import random
import shutil
from pathlib import Path
from statistics import correlation, fmean

import pytest

from art_cli.cli.preflight.judge_checks import check_shadow
from art_cli.cli.preflight.opened import Opened, SourcePart
from art_cli.config.compose import load_config
from art_cli.judges.shadow_judges import MAX_FAILURES, is_chosen
from art_cli.loop.train import train
from art_cli.reports.findings import find
from art_cli.reports.run_report import read_report
from art_cli.runs.history import History, UpdateNumbers
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import ConfigError, UsageError
from tests.support.paths import LETTERS

ADAPTER = "adapter_model.safetensors"
JUDGES = """
import asyncio
from pathlib import Path

def short(group):
    with Path(__file__).with_name("asked.txt").open("a") as file:
        file.write(group[0].group_id + chr(10))
    return [1 / (1 + len(str(trajectory.messages))) for trajectory in group]

def broken(group):
    raise ValueError("boom [red]\\x1b[2J")

async def hanging(group):
    await asyncio.sleep(3600)

def endless(group):
    return [1e300 for _ in group]
"""
SHADOW = """
shadow:
  own: {judge: {name: rollout}}
  short: {judge: {entry: "judges.py:short"}, share: 0.5}
  broken: {judge: {entry: "judges.py:broken"}}
  hanging: {judge: {entry: "judges.py:hanging"}, timeout_s: 0.05}
  endless: {judge: {entry: "judges.py:endless"}}
"""
STEPS = 3
# one rollout at a time, so that what is sampled does not depend on which others share a forward pass
SETTINGS = [f"train.steps={STEPS}", "train.keep_checkpoints=9", "eval=null", "rollout.concurrency=1"]


def run(project: Path, *overrides: str) -> RunDir:
    settings = [f"runs={project}/runs", *SETTINGS, *overrides]
    return RunDir(asyncio.run(train(load_config(project / "config.yaml", settings))).root)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("shadow") / "project"
    shutil.copytree(LETTERS, project)
    (project / "judges.py").write_text(JUDGES)
    (project / "plain.yaml").write_text((project / "config.yaml").read_text())
    with (project / "config.yaml").open("a") as file:
        file.write(SHADOW)
    return project


@pytest.fixture(scope="module")
def shadowed(project: Path) -> RunDir:
    return run(project)


def scores(trajectory: ScoredTrajectory) -> dict[str, float]:
    return {score.judge: score.score for score in trajectory.shadow}


@pytest.mark.slow
def test_training_is_the_same_bytes_with_shadow_judges_that_fail_and_hang(project: Path, shadowed: RunDir) -> None:
    loaded = load_config(project / "plain.yaml", [f"runs={project}/plain", "name=letters", *SETTINGS])
    plain = RunDir(asyncio.run(train(loaded)).root)
    for step in range(STEPS + 1):
        one, other = (run.checkpoint_path(step) / ADAPTER for run in (plain, shadowed))
        assert one.read_bytes() == other.read_bytes()
    for step in range(STEPS):
        left = {each.id: (each.reward, each.scores) for each in plain.scored(step)}
        assert left == {each.id: (each.reward, each.scores) for each in shadowed.scored(step)}
    assert "shadow" not in "".join(name for line in plain.metrics() for name in line.metrics)


@pytest.mark.slow
def test_the_scored_file_tells_shadow_scores_apart_and_the_metrics_follow_from_it(shadowed: RunDir) -> None:
    chosen = 0
    for step, line in enumerate(line for line in shadowed.metrics() if line.split == "train"):
        rows, numbers = shadowed.scored(step), line.metrics
        for row in rows:
            is_half = is_chosen("short", row, 0.5)
            chosen += is_half
            assert set(scores(row)) == ({"own", "short"} if is_half else {"own"})
            assert scores(row)["own"] == row.reward and not {score.judge for score in row.scores} & {"own", "short"}
        assert numbers["shadow/own.gap"] == 0 and numbers["shadow/own.correlation"] == pytest.approx(1)
        assert numbers["shadow/own"] == pytest.approx(numbers["reward_mean"])
        assert [numbers[f"shadow/{name}.num"] for name in ("broken", "hanging", "endless")] == [0, 0, 0]
        half = [row for row in rows if "short" in scores(row)]
        assert numbers["shadow/short.num"] == len(half)
        if not half:
            continue
        mean, reward = fmean(scores(row)["short"] for row in half), fmean(row.reward or 0.0 for row in half)
        assert numbers["shadow/short"] == pytest.approx(mean)
        assert numbers["shadow/short.gap"] == pytest.approx(reward - mean)
        groups = {row.group_id: [each for each in half if each.group_id == row.group_id] for row in half}
        means = {name: (fmean(r.reward or 0.0 for r in g), fmean(scores(r)["short"] for r in g))
                 for name, g in groups.items()}  # fmt: skip
        x = [(row.reward or 0.0) - means[row.group_id][0] for row in half]
        y = [scores(row)["short"] - means[row.group_id][1] for row in half]
        assert numbers["shadow/short.correlation"] == pytest.approx(correlation(x, y))
    assert 0 < chosen < STEPS * 12
    assert "shadow/short.gap" in read_report(shadowed).series


@pytest.mark.slow
def test_one_that_keeps_failing_is_left_alone_with_two_warnings(project: Path, shadowed: RunDir) -> None:
    log = shadowed.log_path.read_text()
    for name, reason in (
        ("broken", "boom [red]"),
        ("hanging", "no scores within 0.05 s"),
        ("endless", "no sound score"),
    ):
        lines = [line for line in log.splitlines() if f"shadow {name}: " in line]
        assert len(lines) == 2 and reason in lines[0] and f"failed {MAX_FAILURES} times in a row" in lines[1]
    assert "\x1b" not in log


@pytest.mark.slow
def test_a_resumed_step_asks_no_shadow_judge_again(project: Path, shadowed: RunDir) -> None:
    """The newest checkpoint is damaged, so its step is trained again from its scored groups."""
    asked, kept = (project / "asked.txt").read_text(), shadowed.scored_path(STEPS - 1).read_bytes()
    path = shadowed.checkpoint_path(STEPS) / ADAPTER
    good = path.read_bytes()
    path.write_bytes(good[:-3])
    run(project)
    assert path.read_bytes() == good
    assert (project / "asked.txt").read_text() == asked and shadowed.scored_path(STEPS - 1).read_bytes() == kept
    assert len(asked.split()) == len(set(asked.split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("+shadow.x.judge={name: rollout, noise: votes}", r"shadow\.x\.judge\.noise: .*leave it out"),
        ("+shadow.x.judge={entry: 'gone.py:judge'}", r"gone\.py"),
        ("+shadow.x={share: 0.5}", r"shadow\.x\.judge"),
        ("+shadow.x={judge: {name: rollout}, share: 0}", r"shadow\.x\.share"),
        ("+shadow.x={judge: {name: none}}", r"shadow\.x\.judge"),
        ("stop=[{metric: shadow/shrt.gap, above: 1}]", r"unknown shadow judge 'shrt'.*shadow/short"),
        ("stop=[{metric: shadow/short.gop, above: 1}]", r"shadow/short\.gap"),
    ],
)
def test_a_section_that_cannot_work_is_refused_before_the_run(project: Path, setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(project, "name=other", setting)


def test_check_and_train_say_that_a_key_is_missing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    paid = "+shadow.panel={judge: {name: ruler, model: openai/gpt-6.1-sol}, share: 0.1}"
    loaded = load_config(project / "config.yaml", [paid])
    found = check_shadow(Opened(loaded, project), SourcePart("", loaded))
    assert found is not None and not found.is_good and "panel: OPENAI_API_KEY is not set" in found.message
    with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
        run(project, "name=other", paid)
    loaded = load_config(project / "config.yaml")
    found = check_shadow(Opened(loaded, project), SourcePart("", loaded))
    assert found is not None and found.is_good and "short (function, 50% of the groups)" in found.message


# --- findings ---------------------------------------------------------------------------------------------------------


def history(rise: float, follows: float, *, steps: int = 40, seed: int = 0) -> History:
    """The reward rises by `rise` over the run, the shadow score by `follows`; each step has noise of 0.02."""
    draw = random.Random(seed)
    updates = []
    for n in range(1, steps + 1):
        reward, score = (0.3 + part * n / steps + draw.gauss(0, 0.02) for part in (rise, follows))
        agreement = 0.8 if rise == follows else 0.8 - 0.7 * n / steps
        numbers = {"shadow/judge.reward": reward, "shadow/judge": score, "shadow/judge.gap": reward - score,
                   "shadow/judge.correlation": agreement + draw.gauss(0, 0.05),
                   "shadow/judge.std": 0.2, "shadow/judge.reward_std": 0.2, "shadow/judge.num": 64.0}  # fmt: skip
        updates.append(UpdateNumbers(n, numbers))
    return History(updates, [])


def test_a_gap_that_widens_is_a_finding_and_one_that_does_not_is_none() -> None:
    """A single finding, rather than several; false alarms stay below 1 % of stable runs."""
    [found] = find(history(0.5, 0.0))
    assert found.kind == "parted" and "reward and shadow judge part since step " in found.text
    assert "mend the reward" in str(found)
    quiet = [finding for seed in range(20) for finding in find(history(0.5, 0.5, seed=seed))]
    assert len(quiet) <= 1


def test_ruler_has_no_gap_because_its_scores_of_two_groups_cannot_be_compared(project: Path) -> None:
    from art_cli.judges.shadow_judges import shadow_numbers
    from art_cli.runs.trajectory import Score, Trajectory, score_trajectory

    loaded = load_config(project / "plain.yaml", ["+shadow.panel.judge={name: ruler, model: openai/gpt-6.1-sol}"])
    rows = [score_trajectory(Trajectory(id=str(n), group_id="g", group_size=2, index=n), float(n)) for n in range(2)]
    for row in rows:
        row.shadow = [Score(judge="panel", score=row.index / 2)]
    numbers = shadow_numbers([rows], loaded.config)
    assert numbers["shadow/panel.correlation"] == pytest.approx(1) and "shadow/panel.gap" not in numbers
    assert math.isclose(numbers["shadow/panel"], 0.25)
