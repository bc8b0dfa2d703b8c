"""A run whose reward parts from its anchor: finding, pause, the checkpoint before the onset, and going on."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.compose import load_config
from art_cli.config.sections.train_config import StopRule
from art_cli.loop.stop_rules import StopRules
from art_cli.loop.train import TrainResult, train
from art_cli.reports.findings import find
from art_cli.reports.pages.report_text import report_text
from art_cli.reports.run_report import read_report
from art_cli.runs.history import History, read_history
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import Paused
from tests.loop.test_stop_rules import SMALL, project

__all__ = ["project"]

ANCHOR = """
from hashlib import sha256
from pathlib import Path

def score(group):
    if Path(__file__).with_name("level.txt").read_text().split()[1] == "0.1":
        return [trajectory.returned_reward for trajectory in group]
    return [sha256(trajectory.id.encode()).digest()[0] % 2 for trajectory in group]
"""
RULE: dict[str, Any] = {"parts_from": "truth"}
ONSET = 13


def start(project: Path, *more: str, level: str, name: str = "letters") -> TrainResult:
    (project / "level.txt").write_text(level)
    (project / "anchor.py").write_text(ANCHOR)
    anchor = "+shadow.truth={judge: {entry: 'anchor.py:score'}}"
    settings = [f"runs={project}/runs", *SMALL, "rollout.groups_per_step=8", "eval=null", anchor, f"name={name}", *more]
    return asyncio.run(train(load_config(project / "config.yaml", settings)))


def fired(rule: dict[str, Any], history: History, pauses: dict[str, tuple[int, float]]) -> list[int]:
    """The steps at which the rule fires, asked after each step."""
    steps = [each.number for each in history.updates]
    rules = StopRules([StopRule(**rule)], pauses)
    return [n for n in steps if rules.after(history._replace(updates=history.updates[:n]), n)]


@pytest.fixture
def parted(project: Path) -> tuple[Path, str]:
    """The project of a paused run, and its output. From step 13 on the anchor is noise."""
    start(project, f"train.steps={ONSET - 1}", level="0.5 0.1")
    with pytest.raises(Paused) as found:
        start(project, "stop=[{parts_from: truth}]", level="0.5 0.2")
    return project, str(found.value)


@pytest.mark.slow
def test_a_run_pauses_with_the_onset_and_the_checkpoint_before_it_and_goes_on(parted: tuple[Path, str]) -> None:
    project, said = parted
    run = RunDir(project / "runs/letters")
    history, alarm = read_history(run), run.checkpoint_steps()[-1]
    assert ONSET + 3 <= alarm <= ONSET + 20
    assert (
        f"paused at step {alarm} of 30: reward and shadow truth part since step {ONSET} (certain at step {alarm}"
        in said
    )
    assert f"; the checkpoint before that: {run.checkpoint_path(ONSET - 1)} (stop rule: " in said
    assert run.checkpoint_path(ONSET - 1).is_dir() and run.checkpoint_steps() == [0, 12, alarm - 2, alarm - 1, alarm]
    assert "it fires again when later steps show it too" in said and "continue with: art train" in said
    # the report from the files equals the log, because all numbers are in the files
    [finding] = [each for each in find(history) if each.kind == "parted"]
    assert (
        (finding.step, finding.until) == (ONSET, alarm)
        and finding.text in said
        and finding.text in run.log_path.read_text()
    )
    assert f"step {ONSET} to {alarm}: reward and anchor parted: " in report_text_of(run)
    assert fired(RULE, history, {}) == [alarm] and fired(RULE | {"then": "warn"}, history, {}) == [alarm]
    # the same command continues; the rule starts over
    with pytest.raises(Paused, match=f"paused at step .*part since step {ONSET} .*{run.checkpoint_path(ONSET - 1)}"):
        start(project, "stop=[{parts_from: truth}]", level="0.5 0.2")
    assert run.checkpoint_steps()[-1] >= alarm + 4
    again = read_history(run)
    assert fired(RULE, again, {str(StopRule(**RULE)): (alarm, 0.0)})[:1] == [run.checkpoint_steps()[-1]]
    assert [each for each in find(again) if each.kind == "parted"] == [finding]


def report_text_of(run: RunDir) -> str:
    import msgspec

    return report_text(msgspec.to_builtins(read_report(run)))
