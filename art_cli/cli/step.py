"""`art step`: one policy update from scored trajectories."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from art_cli.cli import Checkpoint, Config, Json, NewCheckpoint, Overrides, print_result
from art_cli.runtime.errors import DataError, UsageError, printable

if TYPE_CHECKING:
    from art_cli.runs.trajectory import ScoredTrajectory


def run(
    config: Config,
    scored: Annotated[Path, Argument(metavar="SCORED", help="Scored trajectories.", show_default=False)],
    output: NewCheckpoint,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    as_json: Json = False,
) -> None:
    """Take one policy update from a file.

    Writes the same checkpoint as `art train` after these trajectories. If --checkpoint is a run, starts from the
    checkpoint that sampled the attempts. Exit code 1, without a checkpoint, if no attempt has tokens, all failed, or no
    group has signal.

    \b
    art step config.yaml scored.jsonl -o step_0001
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.owed_groups import group
    from art_cli.loop.stages import take_step

    loaded = load_config(config, overrides or [])
    trajectories = _read(scored)
    taken = take_step(loaded, trajectories, output, checkpoint=checkpoint)
    lines = [f"{output}: step {taken.step} from {len(group(trajectories))} groups"]
    lines += [f"  {printable(name)} {value:.6g}" for name, value in taken.metrics.items()]
    result = {"checkpoint": str(output), "step": taken.step, "metrics": taken.metrics}
    print_result(result, "\n".join(lines), as_json)


def _read(path: Path) -> "list[ScoredTrajectory]":
    from art_cli.runs.durable import read_lines
    from art_cli.runs.trajectory import ScoredTrajectory

    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    scored = list(read_lines(path, ScoredTrajectory))
    if not scored:
        raise DataError("no scored trajectories: nothing to learn from", path)
    return scored
