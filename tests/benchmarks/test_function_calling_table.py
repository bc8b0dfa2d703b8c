"""The function-calling benchmark: its table, and that TRL gets as many attempts as ours."""

from pathlib import Path

import pytest

from art_cli.runs.run_dir import RunDir
from benchmarks.learning import function_calling
from benchmarks.learning.function_calling import METRICS, Trained, Values, table, train_trl


def values(mean: float, rise: float | None = None) -> Values:
    difference = None if rise is None else {"mean": rise, "low": rise - 0.1, "high": rise + 0.1, "num": 20}
    found = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "num": 20, "difference": difference}
    return dict.fromkeys(METRICS, found)


def test_a_model_s_line_has_its_shares_its_rise_and_its_minutes() -> None:
    lines = table([Trained("art, seed 0", RunDir(Path("x")), 5.04, 9.96)], [values(0.2), values(0.5, 0.3)]).splitlines()
    shares = " | ".join(["0.50 [0.40, 0.60]"] * len(METRICS))
    assert lines[0].startswith("| model | right (20) | simple_python (20) | live_simple (20) |")
    assert lines[2].startswith("| base | 0.20 [0.10, 0.30] |")
    assert lines[3] == f"| art, seed 0 | {shares} | +0.30 [+0.20, +0.40] | 5.0 | 10.0 |"


def test_trl_makes_as_many_updates_as_its_steps_have_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's max_steps counts updates. With 5 steps of 2 epochs it is 10, and num_iterations 2 makes that 5 batches."""
    seen: list[str] = []

    def keep(name: str, run: Path, arguments: list[str]) -> Trained:
        seen.extend(arguments)
        return Trained(name, RunDir(run), 0.0, 0.0)

    monkeypatch.setattr(function_calling, "_timed", keep)
    train_trl(0, Path("runs"), ["train.steps=5", "train.epochs_per_step=2"])
    assert seen[seen.index("--steps") + 1] == seen[seen.index("--every") + 1] == "10"
    assert "num_iterations=2" in seen
