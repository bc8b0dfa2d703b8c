"""`art sft`: warm-starts a policy from chat transcripts, assistant tokens only; writes a checkpoint."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from art_cli.config.compose import load_config
from art_cli.config.places import COMMAND_LINE
from art_cli.config.references import check_ready
from art_cli.config.schema import SftConfig
from art_cli.errors import ConfigError, Problem, UsageError, printable
from art_cli.learners.demos import load_demos
from art_cli.loop.choice import settle
from art_cli.loop.policy import PolicySource, find_policy, open_learner, save_learner


def run(*, config: Path, overrides: Sequence[str], demos: Path, checkpoint: Path | None, output: Path) -> None:
    """Trains on `demos` with the config's `sft` section (its defaults where there is none)."""
    loaded = load_config(config, overrides)
    check_ready(loaded, ("model",))
    if loaded.places.of("sft.demos") == COMMAND_LINE and any("demos" in override for override in loaded.overrides):
        raise ConfigError([Problem("sft.demos", COMMAND_LINE, f"the transcripts are {demos}; leave one of them out")])
    if not demos.is_file() and ":" not in demos.name:  # file.py:function
        raise UsageError(f"{demos}: no such file")
    transcripts = load_demos(str(demos.resolve()), loaded.directory)
    if loaded.config.sft is None:
        section = SftConfig(demos=str(demos))
        loaded = replace(loaded, config=loaded.config.model_copy(update={"sft": section}))
    source = find_policy(loaded, checkpoint) if checkpoint else PolicySource(None, 0)
    loaded = settle(loaded, "learner")
    with open_learner(loaded, source) as learner:
        metrics = learner.sft(transcripts)
        save_learner(learner, output, loaded, step=source.step, metrics=metrics)
    sys.stdout.write(f"{output}: sft on {len(transcripts)} transcripts\n")
    sys.stdout.writelines(f"  {printable(name)} {value:.6g}\n" for name, value in metrics.items())
