"""`art train`: trains one run, or a sweep of runs."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Option

from art_cli.cli import Config, Json, Overrides, print_result
from art_cli.runtime.errors import Paused, RunError

if TYPE_CHECKING:
    from art_cli.loop.train import TrainResult


def run(
    config: Config,
    overrides: Overrides = None,
    is_fresh: Annotated[bool, Option("--fresh", help="Start a new run; keep the existing one.")] = False,
    is_multirun: Annotated[bool, Option("-m", "--multirun", help="A run for each of a=1,2 b=x,y.")] = False,
    as_json: Json = False,
) -> None:
    """Train, or resume a run.

    Trains for train.steps steps. The same command resumes an interrupted run. Exit code 1 if the run learned nothing:
    every attempt failed, no attempt called the model, or no group had signal.

    \b
    art train config.yaml
    art train config.yaml train.learning_rate=1e-4 judge=rollout
    art train config.yaml hardware=h100 algorithm=gspo    (see docs/config.md)
    art train config.yaml -m train.learning_rate=1e-4,5e-4 loss=grpo,dapo
    """
    from art_cli.config.compose import load_config, load_sweep
    from art_cli.loop.references import check_ready
    from art_cli.loop.startup import Startup, process_begin
    from art_cli.loop.train import train
    from art_cli.runtime import threads

    runs = load_sweep(config, overrides or []) if is_multirun else [load_config(config, overrides or [])]
    if is_multirun:
        for loaded in runs:  # report all mistakes before training
            check_ready(loaded, is_training=True)
    faults = []
    for number, loaded in enumerate(runs):
        startup = Startup(process_begin() if number == 0 else None)
        try:
            result = threads.run(train(loaded, is_fresh=is_fresh, startup=startup))
        except Paused as error:
            if not is_multirun:
                raise
            faults.append(str(error))  # continue the sweep
            continue
        fault = result.closing["fault"] or None
        fields = {name: value for name, value in asdict(result).items() if name != "closing"}
        print_result(fields | {"root": str(result.root), "fault": fault}, _as_text(result), as_json)
        faults += [f"{result.root}: {fault}"] if fault else []
    if faults:
        raise RunError(" | ".join(faults))


def _as_text(result: "TrainResult") -> str:
    """Returns the outcome: first, best and last evaluation, and the checkpoint to serve."""
    from art_cli.reports.pages.report_text import closing_text

    line = f"{result.root}: finished, {result.step} step{'s' * (result.step != 1)}"
    if result.was_finished:
        line += "; nothing left to do (more train.steps continue from here, --fresh starts a new run)"
    return f"{line}\n{closing_text(result.closing)}"
