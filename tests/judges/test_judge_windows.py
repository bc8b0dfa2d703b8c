"""Judge results by step window, and the metric judge, computed only from files."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from art_cli.config.compose import load_config
from art_cli.config.schema import MetricJudgeConfig
from art_cli.judges import make_judge
from art_cli.judges.judge_report import MAX_WINDOWS, WINDOW_FILES, judge_windows, make_report
from art_cli.reports.pages.report_page import report_page
from art_cli.reports.pages.report_text import report_text
from art_cli.reports.run_report import read_report
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, ScoredTrajectory, Trajectory, score_trajectory
from art_cli.runtime.errors import ConfigError, JudgeError
from tests.support.paths import LETTERS
from tests.support.records.runs import write_run

STEPS = 24


def group(step: int, name: str, draw: random.Random, *, num_votes: int = 2) -> list[ScoredTrajectory]:
    """Four attempts whose votes repeat in the first half of the run, and are noise with an order bias in the second."""
    rows = []
    orders = [draw.sample(range(4), 4) for _ in range(num_votes)]
    for index in range(4):
        positions = [order.index(index) for order in orders]
        votes = [index / 4 + draw.gauss(0, 0.01) if step < STEPS // 2 else 1 - at / 4 + draw.gauss(0, 0.2)
                 for at in positions]  # fmt: skip
        score = Score(
            judge="ruler", model="m", score=sum(votes) / num_votes, votes=votes, positions=positions, spread=0.1
        )
        attempt = Trajectory(id=f"{name}-{index}", group_id=name, group_size=4, index=index)
        rows.append(score_trajectory(attempt, score.score, [score]))
    return rows


def judged_run(root: Path) -> RunDir:
    run, draw = write_run(root, judge_usd=0.01), random.Random(0)
    for step in range(STEPS):
        groups = [group(step, f"s{step}-{number}", draw) for number in range(6)]
        run.scored_path(step).parent.mkdir(exist_ok=True)
        write_lines(run.scored_path(step), [row for rows in groups for row in rows])
    return run


def test_a_window_has_the_figures_of_its_files_together(tmp_path: Path) -> None:
    run = judged_run(tmp_path / "run")
    paths = {step + 1: run.scored_path(step) for step in range(STEPS)}
    windows = judge_windows(paths)
    assert [(each.first, each.last) for each in windows] == [(1, 5), (6, 10), (11, 15), (16, 20), (21, 24)]
    both = tmp_path / "both.jsonl"
    both.write_bytes(
        b"".join(paths[step].read_bytes() for step in (1, 3, 5))
    )  # every second file: at most WINDOW_FILES
    assert windows[0].judge == make_report(both)[0].judges[0]
    first, last = windows[0].judge, windows[-1].judge
    assert first.reliability is not None and first.reliability.all_votes.value > 0.95
    assert last.reliability is not None and last.reliability.all_votes.value < 0.5
    assert last.order_bias is not None and last.order_bias.low > 0.3
    assert len(judge_windows(paths)) <= MAX_WINDOWS and WINDOW_FILES == 4
    assert judge_windows({}) == []


def test_a_file_that_cannot_be_read_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = judged_run(tmp_path / "run")
    run.scored_path(0).write_text('{"group_id": "x", "scores": [{"judge": 3}]}\n{}\n')
    run.scored_path(2).write_text("\x1b[2J not JSON\n{}\n")
    windows = judge_windows({step + 1: run.scored_path(step) for step in range(STEPS)})
    assert len(windows) == 5 and "it is left out" in caplog.text


def test_the_report_has_a_row_for_each_window_and_none_without_a_judge_that_makes_calls(tmp_path: Path) -> None:
    run = judged_run(tmp_path / "run")
    plain: dict[str, Any] = msgspec.to_builtins(read_report(run))
    text = report_text(plain)
    assert "the judge by steps" in text and "\n  1 to 5    ruler m  0.100             " in text
    assert "<td>21 to 24</td><td>ruler m</td>" in report_page(plain)
    quiet = msgspec.to_builtins(read_report(write_run(tmp_path / "other")))
    assert quiet["judge_windows"] == [] and "the judge by steps" not in report_text(quiet)


def test_a_metric_of_the_rollout_is_a_judge(tmp_path: Path) -> None:
    judge = make_judge(MetricJudgeConfig(name="metric", metric="win"), tmp_path)
    rows = [Trajectory(id=str(n), group_id="g", group_size=2, index=n, metrics={"win": float(n)}) for n in range(2)]
    verdicts = asyncio.run(judge.judge(rows))
    assert [verdicts[row.id].reward for row in rows] == [0.0, 1.0] and judge.settings == "metric win"
    rows[1].metrics = {"moves": 3.0}
    with pytest.raises(JudgeError, match="trajectory 1: no metric 'win'; it reports moves"):
        asyncio.run(judge.judge(rows))


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("+shadow.win={judge: {name: metric}}", r"shadow\.win\.judge\.metric: .*required|metric"),
        ("judge={name: metric, metric: win, noise: votes}", "one score, which shows no error"),
        ("judge={name: metric, metric: win, metrc: x}", "metrc"),
        (
            "judge={name: blend, noise: votes, blend: {a: 1, b: 1}, judges: {"
            "a: {name: ruler, model: m, votes: 4}, b: {name: ruler, model: m, votes: 1}}}",
            "one score, which shows no error",
        ),
    ],
)
def test_a_section_that_cannot_work_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(LETTERS / "config.yaml", [setting])
