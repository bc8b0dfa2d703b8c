"""The table of samples: each group's best and worst attempts, bounded; and each tracker's required packages."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from art_cli.config.compose import load_config
from art_cli.config.schema import TrackerConfig
from art_cli.reports.trackers import (
    BUILT_INS,
    COLUMNS,
    MAX_ROWS,
    MAX_TEXT,
    TrackedRun,
    make_tracker,
    rewards,
    rows,
    trackers_of,
)
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import UsageError
from tests.support.paths import LETTERS
from tests.support.records.attempts import attempt, scored


def scored_with(group: int, index: int, reward: float | None) -> ScoredTrajectory:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "what?"}]},
        {"role": "assistant", "content": "x" * 10_000},
    ]
    return ScoredTrajectory(
        id=f"g{group}-{index}", group_id=f"g{group}", group_size=3, index=index, messages=messages, reward=reward
    )


def test_a_step_has_the_best_and_the_worst_attempt_of_each_group_within_bounds() -> None:
    groups = [[scored_with(g, 0, 0.2), scored_with(g, 1, None), scored_with(g, 2, 0.9)] for g in range(100)]
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows(3, groups)]
    assert len(table) == MAX_ROWS and {row["step"] for row in table} == {3}
    assert [row["trajectory"] for row in table[:4]] == ["g0-2", "g0-1", "g1-2", "g1-1"]
    assert table[0]["prompt"] == "what?" and len(table[0]["reply"]) == MAX_TEXT
    assert rewards(groups) == [0.2, 0.9] * 100
    assert len(rows(4, [[scored_with(0, 0, 0.2)], []])) == 1


def test_an_evaluation_is_shown_by_the_rewards_that_its_rollouts_returned() -> None:
    assert rewards([[attempt(returned_reward=0.25)], [attempt(returned_reward=None)], [scored(reward=1.0)]]) == [
        0.25,
        1.0,
    ]


@pytest.mark.parametrize("name", BUILT_INS)
def test_one_that_is_not_installed_is_told_with_its_cure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = BUILT_INS[name][1][0].partition(".")[0]
    find = importlib.util.find_spec
    for module in [each for each in sys.modules if each.partition(".")[0] == top]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(
        "art_cli.reports.trackers.find_spec", lambda module: None if module.startswith(top) else find(module)
    )
    config: Any = TypeAdapter(TrackerConfig).validate_python({"name": name})
    with pytest.raises(UsageError, match=rf"tracker {name}: [\w-]+ is not installed; pip install 'art-cli\[{name}\]'"):
        make_tracker(config, TrackedRun("x", tmp_path, {}), tmp_path)


@pytest.mark.slow
def test_art_check_names_the_missing_package_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from art_cli.cli.preflight.opened import Opened, SourcePart
    from art_cli.cli.preflight.setup_checks import check_trackers

    monkeypatch.setattr("art_cli.reports.trackers.find_spec", lambda module: None if module == "trackio" else object())
    monkeypatch.delenv("LANGFUSE_SECRET_KEY", raising=False)

    def finding(listed: str) -> Any:
        loaded = load_config(LETTERS / "config.yaml", [f"trackers={listed}"])
        return check_trackers(Opened(loaded, tmp_path), SourcePart("", loaded))

    assert finding("[]") is None
    assert finding("[tensorboard, otel]")[1:3] == (True, "tensorboard, otel")
    missing = finding("[otel, trackio]")
    assert missing[1:4] == (False, "tracker trackio: trackio is not installed", "pip install 'art-cli[trackio]'")
    assert not finding("[langfuse]").is_good and "LANGFUSE_SECRET_KEY not set" in finding("[langfuse]").message


def test_plain_names_are_trackers_beside_sections_with_knobs() -> None:
    listed = "trackers=[tensorboard, mlflow, trackio, langfuse, {name: otel, max_groups: 2}, wandb]"
    config = load_config(LETTERS / "config.yaml", [listed, "tracker=wandb"]).config
    names = ["wandb", "tensorboard", "mlflow", "trackio", "langfuse", "otel", "wandb"]
    assert [each.name for each in trackers_of(config)] == names
    assert {*names} == {*BUILT_INS}
