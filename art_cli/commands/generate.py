"""`art generate`: plays one step's scenarios with a checkpoint and writes the trajectories.

Each trajectory is appended when its rollout finishes. Run again, the command plays only the missing ones. --format
writes them as another tool's traces at the end.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_cli.commands import Checkpoint, Config, Json, Overrides
from art_cli.errors import RolloutError, UsageError, no_such_option

if TYPE_CHECKING:
    from art_cli.failures import Failures


def run(
    config: Config,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="It is appended to.", show_default=False)
    ],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Play this step's scenarios, not the checkpoint's own.")
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="openai (messages) or openenv (TrainingTrace), not our own."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Play scenarios, write trajectories.

    Plays the scenarios of one step. Run again, it goes on with what is missing. Exit code 1 if every attempt failed.
    With --format FILE is written whole at the end, for another tool; what it is made of is kept beside it, in
    NAME.art.jsonl, and run again it goes on from there.

    \b
    art generate config.yaml -o trajectories.jsonl
    art generate config.yaml -o trajectories.jsonl --checkpoint runs/mine/checkpoints/step_0004
    art generate config.yaml -o traces.jsonl --format openenv
    """
    from art_cli.config.compose import load_config
    from art_cli.failures import count_failures
    from art_cli.interchange import WRITERS
    from art_cli.interchange.exporting import write_traces
    from art_cli.loop.stages import generate

    if form is not None and form not in WRITERS:
        raise UsageError(f"--format: {no_such_option('format', form, list(WRITERS))}")
    own = output if form is None else output.with_name(f"{output.stem}.art.jsonl")
    played = generate(load_config(config, overrides or []), own, checkpoint=checkpoint, step=step)
    if form is not None:
        write_traces(played, output, form)
    failures = count_failures(played)
    sys.stdout.write(_as_json(output, failures) if as_json else _as_text(output, failures))
    if failures.is_all:
        raise RolloutError(f"{output}: every attempt failed: {failures}")


def _as_json(output: Path, failures: "Failures") -> str:
    row = {"output": str(output), "trajectories": failures.num_played, "failed": failures.num}
    return json.dumps({**row, "commonest_cause": failures.cause or None, "num_alike": failures.num_alike}) + "\n"


def _as_text(output: Path, failures: "Failures") -> str:
    return f"{output}: {failures.num_played} trajectories" + (f"; {failures}" if failures.num else "") + "\n"
