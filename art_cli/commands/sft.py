"""`art sft`: warm-starts a policy from chat transcripts, assistant tokens only; writes a checkpoint."""

import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_cli.commands import Checkpoint, Config, NewCheckpoint, Overrides
from art_cli.errors import ConfigError, Interrupted, Problem, UsageError, printable

if TYPE_CHECKING:
    from art_cli.loop.warm_up import WarmUp

log = logging.getLogger(__name__)


def run(
    config: Config,
    demos: Annotated[Path, typer.Argument(metavar="DEMOS", help="Chat transcripts, JSON lines.", show_default=False)],
    output: NewCheckpoint,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Warm-start from chat transcripts.

    Trains on the assistant's tokens only, with the config's `sft` section or its defaults, and writes a checkpoint.

    \b
    art sft config.yaml demos.jsonl -o warm
    """
    from art_cli.config.compose import load_config
    from art_cli.config.places import COMMAND_LINE
    from art_cli.config.references import check_ready
    from art_cli.config.schema import SftConfig
    from art_cli.learners.demos import load_demos
    from art_cli.loop.auto import resolve_auto
    from art_cli.loop.policy import PolicySource, as_trained, find_policy, open_base, open_learner, save_learner
    from art_cli.loop.warm_up import WarmUp

    loaded = load_config(config, overrides or [])
    check_ready(loaded, ("model", "algorithm"))
    said = loaded.config.sft.demos if loaded.config.sft is not None else str(demos)
    is_on_command_line = loaded.places.of("sft.demos") == COMMAND_LINE
    if is_on_command_line and (loaded.directory / said).resolve() != demos.resolve():
        raise ConfigError(
            [Problem("sft.demos", COMMAND_LINE, f"the transcripts are {demos}, not {said}; leave one out")]
        )
    if not demos.is_file() and ":" not in demos.name:  # file.py:function
        raise UsageError(f"{demos}: no such file")
    transcripts = load_demos(str(demos.resolve()), loaded.directory)
    if loaded.config.sft is None:
        section = SftConfig(demos=str(demos))
        loaded = replace(loaded, config=loaded.config.model_copy(update={"sft": section}))
    source = find_policy(loaded, checkpoint) if checkpoint else PolicySource(None, 0)
    loaded = resolve_auto(loaded, "learner")
    with open_base(loaded, source) as base:
        loaded = as_trained(loaded, source, base)
        with open_learner(loaded, source, base=base) as learner:
            warm_up = WarmUp(learner, loaded, transcripts, base=base, start=source.checkpoint)
            metrics = _run(warm_up)
            if metrics is None:
                raise Interrupted(
                    f"interrupted; what is done is in {warm_up.run.root}; the same command goes on from there"
                )
            save_learner(learner, output, loaded, step=source.step, metrics=metrics)
    sys.stdout.write(f"{output}: sft on {len(transcripts)} transcripts\n")
    sys.stdout.writelines(f"  {printable(name)} {value:.6g}\n" for name, value in metrics.items())


def _run(warm_up: "WarmUp") -> dict[str, float] | None:
    """The metrics. None: SIGINT or SIGTERM came, and the work so far is saved. A second signal ends the process."""
    from art_cli.loop.warm_up import run_warm_up

    signals = (signal.SIGINT, signal.SIGTERM)
    stops: list[int] = []

    def stop(number: int, frame: object) -> None:
        stops.append(number)
        log.warning("interrupted: saving what is done first; once more to stop at once")
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        return run_warm_up(warm_up, lambda: bool(stops))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
