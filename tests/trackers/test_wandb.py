"""What Weights & Biases is sent, seen by a stand-in for its package."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from art_cli.config.schema import WandbTrackerConfig
from art_cli.errors import UsageError
from art_cli.run_dir import MetricsLine
from art_cli.trackers import TrackedRun, make_tracker
from art_cli.trackers.wandb import COLUMNS, MAX_ROWS, MAX_TEXT
from art_cli.trajectory import ScoredTrajectory


class Table(NamedTuple):
    columns: list[str]
    data: list[list[Any]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of init, then everything logged, then "finish"."""
    sent: list[Any] = []

    def init(**arguments: Any) -> SimpleNamespace:
        sent.append(arguments)
        return SimpleNamespace(log=sent.append, finish=lambda: sent.append("finish"))

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Table=Table))
    return sent


def attempt(group: int, index: int, reward: float | None) -> ScoredTrajectory:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "x" * 10_000},
    ]
    return ScoredTrajectory(
        id=f"g{group}-{index}", group_id=f"g{group}", group_size=3, index=index, messages=messages, reward=reward
    )


def test_it_gets_every_number_and_a_bounded_table_of_the_best_and_the_worst(sent: list[Any], tmp_path: Path) -> None:
    config = WandbTrackerConfig(name="wandb", project="p", mode="offline")
    tracker = make_tracker(config, TrackedRun("mine", tmp_path, {"seed": 1}), tmp_path)
    tracker.log(MetricsLine(step=3, split="eval", metrics={"reward": 0.5}, time=1.0))
    tracker.log_trajectories(3, [[attempt(g, 0, 0.2), attempt(g, 1, None), attempt(g, 2, 0.9)] for g in range(100)])
    tracker.log_trajectories(4, [[attempt(0, 0, 0.2)], []])
    tracker.close()

    begun, numbers, table, small, end = sent
    assert (begun["project"], begun["mode"], begun["name"], begun["config"]) == ("p", "offline", "mine", {"seed": 1})
    assert numbers == {"eval/reward": 0.5, "step": 3}
    assert table["step"] == 3 and table["train/samples"].columns == COLUMNS
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in table["train/samples"].data]
    assert len(rows) == MAX_ROWS
    assert [row["trajectory"] for row in rows[:4]] == ["g0-2", "g0-1", "g1-2", "g1-1"]
    assert rows[0]["prompt"] == "what?" and len(rows[0]["reply"]) == MAX_TEXT
    assert len(small["train/samples"].data) == 1
    assert end == "finish"


def test_one_that_is_not_installed_is_told_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"wandb is not installed; pip install 'art-cli\[wandb\]'"):
        make_tracker(WandbTrackerConfig(name="wandb"), TrackedRun("x", tmp_path, {}), tmp_path)
