"""`art step`: one policy update from a file of scored trajectories; writes a checkpoint."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from art_cli.config.compose import load_config
from art_cli.errors import DataError, UsageError, printable
from art_cli.loop.generate import group
from art_cli.loop.stages import take_step
from art_cli.run_dir import read_lines
from art_cli.trajectory import ScoredTrajectory


def run(
    *, config: Path, overrides: Sequence[str], scored: Path, checkpoint: Path | None, output: Path, as_json: bool
) -> None:
    """The step that `art train` would have taken from `checkpoint` on these trajectories, bit for bit."""
    loaded = load_config(config, overrides)
    trajectories = _read(scored)
    taken = take_step(loaded, trajectories, output, checkpoint=checkpoint)
    if as_json:
        result = {"checkpoint": str(output), "step": taken.step, "metrics": taken.metrics}
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(f"{output}: step {taken.step} from {len(group(trajectories))} groups\n")
        sys.stdout.writelines(f"  {printable(name)} {value:.6g}\n" for name, value in taken.metrics.items())


def _read(path: Path) -> list[ScoredTrajectory]:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    scored = list(read_lines(path, ScoredTrajectory))
    if not scored:
        raise DataError("no scored trajectories: nothing to learn from", path)
    return scored
