"""`art step`: one policy update from a file of scored trajectories; writes a checkpoint."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from art_cli.config.compose import load_config
from art_cli.config.references import check_ready
from art_cli.errors import DataError, UsageError, printable
from art_cli.loop.choice import settle
from art_cli.loop.generate import group
from art_cli.loop.policy import find_policy, open_learner, save_learner
from art_cli.run_dir import read_lines
from art_cli.trajectory import ScoredTrajectory


def run(
    *, config: Path, overrides: Sequence[str], scored: Path, checkpoint: Path | None, output: Path, as_json: bool
) -> None:
    """The step that `art train` would have taken from `checkpoint` on these trajectories, bit for bit."""
    loaded = load_config(config, overrides)
    check_ready(loaded, ("model",))
    groups = group(_read(scored))
    source = find_policy(loaded, checkpoint)
    loaded = settle(loaded, "learner")
    with open_learner(loaded, source) as learner:
        metrics = learner.step(list(groups.values()))
        numbers = {name: value for name, value in msgspec.structs.asdict(metrics).items() if not math.isnan(value)}
        save_learner(learner, output, loaded, step=source.step + 1, metrics=numbers)
    if as_json:
        sys.stdout.write(json.dumps({"checkpoint": str(output), "step": source.step + 1, "metrics": numbers}) + "\n")
    else:
        sys.stdout.write(f"{output}: step {source.step + 1} from {len(groups)} groups\n")
        sys.stdout.writelines(f"  {printable(name)} {value:.6g}\n" for name, value in numbers.items())


def _read(path: Path) -> list[ScoredTrajectory]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    scored = list(read_lines(path, ScoredTrajectory))
    if not scored:
        raise DataError("no scored trajectories: nothing to learn from", path)
    return scored
