"""`art replay`: a step's numbers for one trajectory, computed again from the run's files."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from art_cli.cli import Json, everything
from art_cli.runtime.errors import UsageError, printable_lines


def run(
    run: Annotated[Path, typer.Argument(metavar="RUN", parser=everything, help="A run directory.", show_default=False)],
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="The number of its directory, step_NNNN.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="K", min=0, help="Its index in learned.jsonl, from 0.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", metavar="ID", help="The trajectory by its id.")] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="CONFIG", help="The run's YAML file, whose code may then run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compute one trajectory of a step again, and show where it differs from the step's record.

    \b
    Reward, advantages, the learner's logprobs before and after the step, and the trajectory's share of the loss, from
    scored.jsonl, learned.jsonl and the checkpoints. Exit code 1: something differs.

    \b
    art replay runs/mine --step 3                       the first trajectory that the step trained on
    art replay runs/mine --step 3 --sample 7
    art replay runs/mine --id s0003-g0002-a05 --json
    """
    import msgspec

    from art_cli.loop.recompute import replay
    from art_cli.reports.pages.replay_text import replay_text
    from art_cli.runs.run_dir import RunDir

    if sample is not None and id is not None:
        raise UsageError("--sample and --id: one at a time")
    if config is not None and not config.is_file():
        raise UsageError(f"--config {config}: no such file")
    directory = None if config is None else config.resolve().parent
    comparison = replay(RunDir(run), step=step, sample=sample, id=id, directory=directory)
    plain = msgspec.to_builtins(comparison)
    sys.stdout.write(json.dumps(plain) + "\n" if as_json else printable_lines(replay_text(plain)))
    if comparison.differs:
        raise typer.Exit(1)
