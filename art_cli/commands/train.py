"""`art train`: one run, or a sweep of them one after the other."""

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_cli.commands import Config, Json, Overrides
from art_cli.errors import printable_lines

if TYPE_CHECKING:
    from art_cli.loop.train import TrainResult


def run(
    config: Config,
    overrides: Overrides = None,
    is_fresh: Annotated[bool, typer.Option("--fresh", help="A new run beside an existing one, never over it.")] = False,
    is_multirun: Annotated[bool, typer.Option("-m", "--multirun", help="A run for each of a=1,2 b=x,y.")] = False,
    as_json: Json = False,
) -> None:
    """Train; run again, it resumes.

    It stops when train.steps are done. A run that was interrupted at any moment goes on where it stopped.

    \b
    art train config.yaml
    art train config.yaml train.learning_rate=1e-5 judge=rollout
    art train config.yaml -m train.learning_rate=1e-5,1e-4 loss=grpo,dapo
    """
    from art_cli import threads
    from art_cli.config.compose import load_config, load_sweep
    from art_cli.config.references import check_ready
    from art_cli.loop.train import train

    runs = load_sweep(config, overrides or []) if is_multirun else [load_config(config, overrides or [])]
    if is_multirun:
        for loaded in runs:  # a mistake in the last run is reported before the first one begins
            check_ready(loaded, is_training=True)
    for loaded in runs:
        result = threads.run(train(loaded, is_fresh=is_fresh))
        sys.stdout.write(_as_json(result) if as_json else printable_lines(_as_text(result, config)))


def _as_json(result: "TrainResult") -> str:
    return json.dumps({**asdict(result), "root": str(result.root)}) + "\n"


def _as_text(result: "TrainResult", config: Path) -> str:
    lines = [f"{result.root}: finished, {result.step} steps"]
    if result.was_finished:
        lines[0] += "; nothing left to do (more train.steps go on from here, --fresh starts anew beside it)"
    for step, metrics in sorted(result.evaluations.items()):
        lines.append(f"  eval at step {step}: " + _shown(metrics))
    lines += [f"  {line}" for line in _checkpoints(result)]
    lines.append(f"  what happened, and what to try: art report {shlex.quote(str(result.root))}")
    return "\n".join(lines) + "\n"


def _checkpoints(result: "TrainResult") -> list[str]:
    """The newest checkpoint, and the best evaluated one with what `art serve RUN` would take."""
    from art_cli.checkpoints import explain, wanted_steps
    from art_cli.run_dir import RunDir

    run = RunDir(result.root)
    lines = [f"newest checkpoint: {run.checkpoint_path(result.step)}"]
    best, offered = (next(iter(wanted_steps(run, which)), None) for which in ("best", "offered"))
    if best is not None:
        lines.insert(0, f"best checkpoint: {run.checkpoint_path(best)}")
    return [*lines, f"served and exported: {explain(run, offered)}"] if offered is not None else lines


def _shown(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items()) if not name.startswith("num_"))
