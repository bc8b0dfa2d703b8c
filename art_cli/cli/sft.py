"""`art sft`: trains a checkpoint on chat transcripts, or on the best scored attempts."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand

from art_cli.cli import Checkpoint, Config, Json, Last, NewCheckpoint, Overrides, print_result, which_checkpoint
from art_cli.runtime.errors import ConfigError, Problem, UsageError, printable

if TYPE_CHECKING:
    from art_cli.config.compose import LoadedConfig
    from art_cli.loop.warm_up import WarmUp


class Command(TyperCommand):
    """The command `sft` with an optional value for --best-of, which Typer does not support."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        following = [*args, ""][1:]
        is_bare = [word == "--best-of" and not after.isdecimal() for word, after in zip(args, following, strict=True)]
        words = ["--best-of=1" if bare else word for word, bare in zip(args, is_bare, strict=True)]
        return super().parse_args(ctx, words)


def run(
    config: Config,
    demos: Annotated[Path, Argument(metavar="DEMOS...", help="Chats or scored trajectories.", show_default=False)],
    output: NewCheckpoint,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    is_last: Last = False,
    best_of: Annotated[
        int | None, Option("--best-of", metavar="[N]", min=1, help="Learn from the best N (default: 1) of each group.")
    ] = None,
    min_reward: Annotated[
        float | None, Option("--min-reward", metavar="R", help="With --best-of: lowest reward.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Warm-start from chats, or from the best attempts.

    Trains the base model, or --checkpoint, on the assistant's tokens, with the settings in `sft`. Writes a checkpoint.
    --best-of trains on the best scored attempts per group, from a file or run, with the sampled tokens. Attempts must
    beat the worst in the group, or reach --min-reward.

    \b
    art sft config.yaml demos.jsonl -o warm
    art sft config.yaml demos.jsonl more.jsonl -o warm sft.epochs=3 sft.batch_tokens=4096
    art sft config.yaml demos.jsonl -o warm sft.held_out=0.1 sft.patience=3 sft.epochs=20
    art sft config.yaml scored.jsonl --best-of -o warm
    art sft config.yaml runs/mine --best-of 2 --min-reward 0.8 -o warm --checkpoint runs/mine
    """
    from art_cli.config.compose import load_config
    from art_cli.learners.sft.examples import load_examples
    from art_cli.loop import stage_policy
    from art_cli.loop.references import check_ready
    from art_cli.loop.warm_up import WarmUp
    from art_cli.runs.run_checkpoints import log_policy
    from art_cli.runtime import threads

    stage_policy.check_output(output)
    files, settings = files_and_settings(demos, overrides or [])
    loaded = load_config(config, [*settings, *_own_section(config, files, settings)])
    loaded = _with_options(loaded, files, best_of=best_of, min_reward=min_reward)
    check_ready(loaded, ("model", "algorithm"))
    assert loaded.config.sft is not None
    examples = load_examples(loaded.config.sft, loaded.directory, [str(file.resolve()) for file in files])
    if checkpoint is None and is_last:
        raise UsageError("--last picks among a run's checkpoints; name --checkpoint RUN")
    if checkpoint is None:
        source = stage_policy.PolicySource(None, 0)
        log_policy(loaded.config.model.title, "the base model, because no --checkpoint is named")
    else:
        source = stage_policy.find_policy(loaded, checkpoint, which=which_checkpoint(False, is_last))
    with stage_policy.open_base(loaded, source) as base:
        loaded = stage_policy.as_trained(loaded, source, base)
        with stage_policy.open_learner(loaded, source, base=base) as learner:
            warm_up = WarmUp(learner, loaded, examples, base=base, start=source.checkpoint)
            metrics = threads.run(_make(warm_up))
            step = source.step
            stage_policy.save_learner(learner, output, loaded, base=base, step=step, metrics=metrics, source=source)
    counts = {"trained": len(examples.trained), "evaluated": len(examples.evaluated)}
    result = {"checkpoint": str(output), **counts, "metrics": metrics}
    what = "attempts" if "turns" in examples.trained[0] else "transcripts"
    held_out = f", {len(examples.evaluated)} to evaluate on" if examples.evaluated else ""
    lines = [f"{output}: sft on {len(examples.trained)} {what}{held_out}"]
    lines += [f"  {printable(name)} {value:.6g}" for name, value in metrics.items()]
    print_result(result, "\n".join(lines), as_json)


def files_and_settings(demos: Path, words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Separates files from settings. Raises UsageError for a missing file."""
    settings = [word for word in words if ("=" in word or word.startswith("~")) and not os.path.exists(word)]
    files = [demos, *(Path(word) for word in words if word not in settings)]
    for file in files:
        if not file.exists() and ":" not in file.name:  # file.py:function
            raise UsageError(f"{file}: no such file")
    return files, settings


def _own_section(config: Path, files: Sequence[Path], settings: Sequence[str]) -> list[str]:
    """Returns a setting for `sft.demos` from the files. Raises ConfigError if the command line names other files."""
    values = {key.lstrip("+"): value for key, _, value in (setting.partition("=") for setting in settings)}
    from art_cli.config.key_locations import COMMAND_LINE

    said = values.get("sft.demos")
    if said is not None and [(config.parent / said.strip("'\"")).resolve()] != [file.resolve() for file in files]:
        message = f"the transcripts are {' '.join(map(str, files))}, not {said}; leave one out"
        raise ConfigError([Problem("sft.demos", COMMAND_LINE, message)])
    if said is not None:
        return []
    quoted = str(files[0].resolve()).replace("\\", "\\\\").replace("'", "\\'")
    return [f"sft.demos='{quoted}'"]


def _with_options(
    loaded: "LoadedConfig", files: Sequence[Path], *, best_of: int | None, min_reward: float | None
) -> "LoadedConfig":
    """Copies the command's options to `sft`. Raises UsageError for a directory or --min-reward without --best-of."""
    section = loaded.config.sft
    assert section is not None, "the command names its transcripts"
    given = {"best_of": best_of, "min_reward": min_reward}
    section = section.model_copy(update={name: value for name, value in given.items() if value is not None})
    if section.best_of is None:
        if min_reward is not None:
            raise UsageError("--min-reward: used with --best-of only")
        if directory := next((file for file in files if file.is_dir()), None):
            raise UsageError(f"{directory}: a directory; a run's scored attempts are learned from with --best-of")
    return replace(loaded, config=loaded.config.model_copy(update={"sft": section}))


async def _make(warm_up: "WarmUp") -> dict[str, float]:
    from art_cli.loop.interrupts import Interrupts
    from art_cli.loop.warm_up import make_warm_up

    interrupts = Interrupts(f"interrupted; finished work is in {warm_up.run.root}; the same command continues there")
    with interrupts.handled():
        return await make_warm_up(warm_up, interrupts)
