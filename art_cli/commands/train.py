"""`art train`: one run, or a sweep of them one after the other."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from art_cli import threads
from art_cli.config.compose import load_config, load_sweep
from art_cli.config.references import check_ready
from art_cli.errors import printable_lines
from art_cli.loop.train import TrainResult, train


def run(*, config: Path, overrides: Sequence[str], is_fresh: bool, is_multirun: bool, as_json: bool) -> None:
    """Trains and reports where each run stands."""
    runs = load_sweep(config, overrides) if is_multirun else [load_config(config, overrides)]
    if is_multirun:
        for loaded in runs:  # what is wrong with the last run is known before the first one begins
            check_ready(loaded, is_training=True)
    for loaded in runs:
        result = threads.run(train(loaded, is_fresh=is_fresh))
        sys.stdout.write(_as_json(result) if as_json else printable_lines(_as_text(result, config)))


def _as_json(result: TrainResult) -> str:
    return json.dumps({**asdict(result), "root": str(result.root)}) + "\n"


def _as_text(result: TrainResult, config: Path) -> str:
    lines = [f"{result.root}: finished, {result.step} steps"]
    if result.was_finished:
        lines[0] += "; nothing left to do (more train.steps go on from here, --fresh starts anew beside it)"
    for step, metrics in sorted(result.evaluations.items()):
        lines.append(f"  eval at step {step}: " + _shown(metrics))
    lines.append(f"  newest checkpoint: {result.root}/checkpoints/step_{result.step:04d}")
    return "\n".join(lines) + "\n"


def _shown(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()) if not name.startswith("num_"))
