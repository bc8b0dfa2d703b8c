"""A run that gets worse warns during training, and records the data for a report."""

import asyncio
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.loop.evaluate import values_by_scenario
from art_cli.loop.train import train
from art_cli.reports.run_report import read_report
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import Evaluation, RunDir
from art_cli.runs.trajectory import Trajectory
from tests.support.paths import LETTERS


def run_letters(runs: Path, steps: int) -> RunDir:
    settings = [f"runs={runs}", f"train.steps={steps}", "eval.every=1", "rollout.groups_per_step=1"]
    return RunDir(asyncio.run(train(load_config(LETTERS / "config.yaml", settings))).root)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of what goes wrong."""
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [message for message in messages if "; try: " in message]


@pytest.mark.slow
def test_a_fall_is_a_warning_once_and_the_evaluations_are_kept_by_scenario(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 1's evaluation is set to a perfect score, so the untrained letters of step 2 (about 0.24) are a fall.

    A resumed run does not repeat the warning.
    """
    run = run_letters(tmp_path, 1)
    for step in (0, 1):
        kept = run.evaluation(step)
        assert kept is not None and kept.seconds > 0
        assert kept.values == values_by_scenario(list(read_lines(run.eval_path(step), Trajectory)))
    report = read_report(run)
    assert (report.num_steps, report.rollouts.num, report.findings) == (1, 4, [])
    assert report.last is not None and report.last.checkpoint == str(run.checkpoint_path(1))
    assert report.seconds.sampling > 0 and report.seconds.training > 0 and report.seconds.evaluating > 0
    scenarios = run.evaluation(1)
    assert scenarios is not None and told(caplog) == []
    perfect = dict.fromkeys(scenarios.values["reward"], 1.0)
    run.write_evaluation(1, Evaluation(seconds=1.0, values={"reward": perfect}))
    run.append_metrics(1, "eval", {"reward": 1.0})
    run_letters(tmp_path, 2)
    said = told(caplog)
    assert len(said) == 1 and said[0].startswith("the evaluation at step 2 is 0.")
    assert "below 1.000 at step 1; difference -0." in said[0] and "try: " in said[0]
    found = read_report(run)
    assert [str(finding) for finding in found.findings] == said
    assert found.best is not None and found.best.step == 1 and found.offered.startswith("step 1, the best evaluated")
    caplog.clear()
    run_letters(tmp_path, 3)
    assert told(caplog) == []
