"""The command line: each command parses its arguments, then imports `commands/<name>` and calls its `run`.

Nothing heavy is imported here, so that help answers at once. What goes wrong ends here as well: a mistake or failure
that a user can act on is its line on standard error and its exit code; anything else is a bug, said in one line, with
the traceback under --verbose.
"""

import atexit
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from art_cli import log
from art_cli.errors import (
    ArtError,
    ConfigError,
    EngineError,
    Interrupted,
    LearnerError,
    UsageError,
    printable,
    printable_lines,
)

# What a module that is not installed belongs to: `pip install 'art-cli[EXTRA]'`.
EXTRAS = {"torch": "train", "transformers": "train", "peft": "train", "safetensors": "train", "numpy": "train"} | {
    name: name for name in ("litellm", "wandb", "vllm", "unsloth")
}

MAX_ERROR = 4_000  # characters of an error's line; file names, ids and providers' words may be of any length

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Wins over the file: train.steps=10, loss=dapo.")
]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON.")]
Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="A checkpoint, a run (its newest one), or base.")
]


def main() -> NoReturn:
    """Runs this process's command line and ends the process."""
    code = run(sys.argv[1:])
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is done: Ctrl-C while Python tidies up ends it at once
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has enough; the interpreter must not flush again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    _exit(code)


def _exit(code: int) -> NoReturn:
    """Ends the process, also under threads that still compute: they may be loading a model that nobody wants any more.

    Daemon threads outlive Python itself by a moment: one that comes back from torch then is an abort of the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line, its failure reported. `--verbose` may stand anywhere in it."""
    is_verbose = "--verbose" in arguments
    rest = [argument for argument in arguments if argument != "--verbose"]
    code: Any
    try:
        log.set_up(verbose=is_verbose)
        code = app(rest or ["--help"], prog_name="art", standalone_mode=False)
    except KeyboardInterrupt:  # outside of what Typer answers for
        code = 130
    except Exception as error:
        if is_verbose:
            sys.stderr.write(printable_lines(traceback.format_exc()))
        lines, failure = report(error)
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return failure
    if code == 130:  # also Typer's answer to Ctrl-C
        sys.stderr.write("interrupted\n")
    return code if isinstance(code, int) else 0


def report(error: Exception) -> tuple[list[str], int]:
    """What to say of a failure, and the exit code. What a file, a model or a provider said in it is no line of ours."""
    lines, code = _lines(error)
    return [printable(line, limit=MAX_ERROR) for line in lines], code


def _lines(error: Exception) -> tuple[list[str], int]:
    match error:
        case Interrupted():
            return [str(error)], error.exit_code
        case ConfigError():
            return [f"error: {problem}" for problem in error.problems], error.exit_code
        case UsageError() | EngineError() | LearnerError():  # several mistakes; the last words of another process
            return [f"error: {line}" for line in str(error).split("\n")], error.exit_code
        case ArtError():
            return [f"error: {error}"], error.exit_code
        case ExceptionGroup():
            return _lines(error.exceptions[0])
        case typer.TyperException():
            path = getattr(getattr(error, "ctx", None), "command_path", "art")
            return [f"error: {error.format_message()} (see {path} --help)"], error.exit_code
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] in EXTRAS:
            package = name.partition(".")[0]
            return [f"error: {package} is not installed; pip install 'art-cli[{EXTRAS[package]}]'"], 1
        case OSError(errno=errno.ENOSPC):
            what = f"{error.filename}: " if error.filename else ""
            return [f"error: {what}no space left on the disk; free some and run the same command again"], 1
        case Exception() if f"(os error {errno.ENOSPC})" in str(error):  # as Rust's libraries say it: safetensors
            return ["error: no space left on the disk; free some and run the same command again"], 1
        case OSError(strerror=str(reason)):
            return [f"error: {error.filename or 'the system says'}: {reason}"], 1
    text = " ".join(str(error).split())
    if "KeyboardInterrupt" in text or isinstance(error.__cause__, KeyboardInterrupt):
        return ["interrupted"], 130  # pydantic's own code, interrupted while a module is imported, makes this of Ctrl-C
    where = traceback.extract_tb(error.__traceback__)[-1]
    bug = f"error: this is a bug in art: {type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
    return [f"{bug}; run it again with --verbose for the traceback"], 1


def _help(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def _version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"art {version('art-cli')}")
        raise typer.Exit


@app.callback(add_help_option=False)  # Typer's own imports pydantic, also for `art train --help`: half of the time
def art(
    verbose: Annotated[bool, typer.Option("--verbose", help="More log lines, and tracebacks; goes anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Which art it is.")
    ] = False,
    help: Annotated[bool, typer.Option("--help", callback=_help, is_eager=True, help="What you see.")] = False,
) -> None:
    """Trains language-model agents by reinforcement learning, from a YAML file and one Python function.

    \b
    art init mine && cd mine          a project to start from
    art check config.yaml             everything a run needs, tried once
    art train config.yaml             train; run again, it resumes
    art eval config.yaml --checkpoint runs/mine --gate 'reward>=0.8'

    Results go to standard output, progress and logs to standard error. Exit code 0: done; 1: failed, or below a gate;
    2: a mistake in the command or the configuration.
    """


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New, or empty.", show_default=False)],
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Which one to copy.")] = "tictactoe",
) -> None:
    """Copy a recipe to a new directory.

    It holds config.yaml, the rollout and what that needs.

    \b
    art init mine
    art init mine --recipe tictactoe
    """
    from art_cli.commands import init as command

    command.run(directory=directory, recipe=recipe)


@app.command()
def check(
    config: Config,
    overrides: Overrides = None,
    judge: Annotated[
        bool, typer.Option("--judge/--no-judge", help="Ask a judge that costs money once, for cents.")
    ] = True,
    json: Json = False,
) -> None:
    """Try everything a run needs, once.

    Composes the configuration, loads the model, plays a rollout twice, takes an update, asks the judge; says of each
    finding what cures it. Changes nothing.

    \b
    art check config.yaml
    art check config.yaml --no-judge        only says what asking the judge would cost
    """
    from art_cli.commands import check as command

    command.run(config=config, overrides=overrides or [], as_json=json, asks_judge=judge)


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="A new run beside an existing one, never over it.")] = False,
    multirun: Annotated[bool, typer.Option("-m", "--multirun", help="A run for each of a=1,2 b=x,y.")] = False,
    json: Json = False,
) -> None:
    """Train; run again, it resumes.

    It stops when train.steps are done. A run that was interrupted at any moment goes on where it stopped.

    \b
    art train config.yaml
    art train config.yaml train.learning_rate=1e-5 judge=rollout
    art train config.yaml -m train.learning_rate=1e-5,1e-4 loss=grpo,dapo
    """
    from art_cli.commands import train as command

    command.run(config=config, overrides=overrides or [], is_fresh=fresh, is_multirun=multirun, as_json=json)


@app.command()
def generate(
    config: Config,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Appended to.", show_default=False)],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Whose scenarios; its own, if not given.")] = None,
    json: Json = False,
) -> None:
    """Play scenarios, write trajectories.

    Those of one step. Run again, it goes on with what is missing. Exit code 1 where every attempt failed.

    \b
    art generate config.yaml -o trajectories.jsonl
    art generate config.yaml -o trajectories.jsonl --checkpoint runs/mine/checkpoints/step_0004
    """
    from art_cli.commands import generate as command

    command.run(config=config, overrides=overrides or [], output=output, checkpoint=checkpoint, step=step, as_json=json)


@app.command()
def judge(
    trajectories: Annotated[Path, typer.Argument(metavar="FILE", help="Trajectories.", show_default=False)],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Of T.jsonl: T.scored.jsonl beside it.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Which model judges: openai/o3.")] = None,
    rubric: Annotated[Path | None, typer.Option("--rubric", metavar="FILE", help="What it judges by.")] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="CONFIG", help="Whose judge to use.")] = None,
    group_by: Annotated[str | None, typer.Option("--group-by", metavar="KEY", help="Of plain conversations.")] = None,
    partial: Annotated[bool, typer.Option("--partial", help="Judge incomplete groups as they are.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin the output anew.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would cost, and do nothing.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Say how far the judge can be trusted.")] = False,
    gold: Annotated[str | None, typer.Option("--gold", metavar="KEY", help="metrics.win or returned_reward.")] = None,
    gate: Annotated[list[str] | None, typer.Option("--gate", metavar="BOUND", help="Exit 1 below it.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="The report as a page.")] = None,
    json: Json = False,
) -> None:
    """Score trajectories, group by group, with RULER or another judge; measure the judge.

    \b
    art judge trajectories.jsonl -o scored.jsonl --model openai/o3
    art judge trajectories.jsonl judge=function judge.entry=judge.py:judge -o scored.jsonl
    art judge scored.jsonl --gold metrics.win --gate 'pairwise_accuracy>=0.8'
    """
    from art_cli.commands import judge as command

    command.run(
        trajectories=trajectories,
        overrides=overrides or [],
        output=output,
        model=model,
        rubric=rubric,
        config=config,
        group_by=group_by,
        is_partial=partial,
        is_fresh=fresh,
        is_dry_run=dry_run,
        is_report=report,
        gold=gold,
        gates=gate or [],
        html=html,
        as_json=json,
    )


@app.command()
def step(
    config: Config,
    scored: Annotated[Path, typer.Argument(metavar="SCORED", help="Scored trajectories.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A checkpoint.", show_default=False)],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Take one policy update from a file.

    Writes the checkpoint that `art train` would have written after the same trajectories.

    \b
    art step config.yaml scored.jsonl -o step_0001
    """
    from art_cli.commands import step as command

    command.run(
        config=config, overrides=overrides or [], scored=scored, checkpoint=checkpoint, output=output, as_json=json
    )


@app.command()
def sft(
    config: Config,
    demos: Annotated[Path, typer.Argument(metavar="DEMOS", help="Chat transcripts, JSON lines.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A checkpoint.", show_default=False)],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
) -> None:
    """Warm-start from chat transcripts.

    Trains on the assistant's tokens only, and writes a checkpoint.

    \b
    art sft config.yaml demos.jsonl -o warm
    """
    from art_cli.commands import sft as command

    command.run(config=config, overrides=overrides or [], demos=demos, checkpoint=checkpoint, output=output)


@app.command(name="eval")
def evaluate(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option("--checkpoint", metavar="DIR", help="A checkpoint, run, directory of runs, or base; repeat."),
    ] = None,
    endpoint: Annotated[
        list[str] | None, typer.Option("--endpoint", metavar="MODEL@URL", help="Any OpenAI-compatible one; repeat.")
    ] = None,
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", metavar="METRIC>=X", help="Exit 1 where the last policy misses it; X: baseline-0.02."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", metavar="DIR", help="Keep the trajectories.")] = None,
    json: Json = False,
) -> None:
    """Compare policies; gate on the result.

    Plays the evaluation scenarios with each and compares it with the first, scenario by scenario.

    \b
    art eval config.yaml --checkpoint runs/mine --gate 'reward>=0.8'
    art eval config.yaml --checkpoint runs/a --checkpoint runs/b --endpoint gpt-5@https://api.openai.com/v1
    art eval config.yaml --checkpoint base --checkpoint runs/mine --gate 'reward>=baseline-0.02'
    art eval config.yaml --checkpoint 'runs/sweep-*'          a table over a sweep, the best run on top
    """
    from art_cli.commands import eval as command

    command.run(
        config=config,
        overrides=overrides or [],
        checkpoints=checkpoint or [],
        endpoints=endpoint or [],
        gates=gate or [],
        output=output,
        as_json=json,
    )


@app.command()
def serve(
    context: typer.Context,
    checkpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]CHECKPOINT...", help="A checkpoint, a run, an adapter, a base model.", show_default=False
        ),
    ],
    best: Annotated[bool, typer.Option("--best", help="A run's best evaluated checkpoint, not its newest.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Change to each new checkpoint of a run.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="Where the base model is, if it was moved.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="auto, embedded or vllm; auto: what the machine has.")
    ] = "auto",
    knobs: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Of the engine: max_batch=256; repeat.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the vLLM that the run's config.json names: python, args, env.")
    ] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the base: float32, bfloat16; its run's.")] = None,
    host: Annotated[str, typer.Option("--host", help="Any but this machine's own needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", envvar="ART_API_KEY", help="Who calls must have it.", show_envvar=True
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="One key a line; any of them will do.")
    ] = None,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests answered at once.")] = 256,
    queue: Annotated[int, typer.Option("--queue", min=0, help="Waiting besides; more get 429.")] = 1024,
    max_body: Annotated[float, typer.Option("--max-body", metavar="MIB", min=0.001, help="Larger get 413.")] = 32.0,
    drain: Annotated[
        float, typer.Option("--drain", metavar="SECONDS", min=0, help="For what runs to end, when told to stop.")
    ] = 30.0,
    log_content: Annotated[bool, typer.Option("--log-content", help="Log what is asked and answered.")] = False,
    json: Json = False,
) -> None:
    """Put checkpoints behind an OpenAI-compatible API.

    \b
    art serve runs/mine                           its newest checkpoint, as model `mine`
    art serve runs/mine --follow                  and each new one as training writes it
    art serve small=runs/a large=runs/b/checkpoints/step_0040
    ART_API_KEY=... art serve runs/mine --host 0.0.0.0

    SIGTERM and Ctrl-C let what runs end, and refuse what is new with 503.
    """
    from art_cli.commands import serve as command

    command.run(
        checkpoints=checkpoints,
        is_best=best,
        is_following=follow,
        base=base,
        engine=engine,
        knobs=knobs or [],
        is_trusted=trust,
        dtype=dtype,
        host=host,
        port=port,
        api_key=api_key,
        is_key_on_line=_is_on_line(context, "api_key"),
        api_key_file=api_key_file,
        concurrency=concurrency,
        queue=queue,
        max_body_mib=max_body,
        drain_s=drain,
        logs_content=log_content,
        as_json=json,
    )


def _is_on_line(context: typer.Context, name: str) -> bool:
    """Whether the parameter was given as an option, and not by its environment variable or default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Or a run.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A new one.", show_default=False)],
    best: Annotated[bool, typer.Option("--best", help="A run's best evaluated checkpoint, not its newest.")] = False,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="Where the base model is, if it was moved.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of the weights: float32, bfloat16.")] = "float32",
    max_gap: Annotated[
        float | None, typer.Option("--max-gap", metavar="NATS", help="Of any token's logprob; by the dtype.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REPO", help="To the hub as well, with the token HF_TOKEN.")
    ] = None,
    json: Json = False,
) -> None:
    """Merge a checkpoint into weights that stand alone.

    Writes what transformers and vLLM load, with a model card, and proves it: the run's saved prompts get the same
    logprobs from the merged weights as from the adapter, or it fails.

    \b
    art export runs/mine -o mine-merged --dtype bfloat16
    """
    from art_cli.commands import export as command

    command.run(
        checkpoint=checkpoint,
        output=output,
        is_best=best,
        base=base,
        dtype=dtype,
        max_gap=max_gap,
        push=push,
        as_json=json,
    )


@app.command()
def checkpoints(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    prune: Annotated[bool, typer.Option("--prune", help="Remove all but the newest ones and the best.")] = False,
    keep: Annotated[int | None, typer.Option("--keep", min=1, help="With --prune: how many newest.")] = None,
    fork: Annotated[
        str | None, typer.Option("--fork", metavar="NEW_RUN", help="A new run that begins at a checkpoint of this one.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="With --fork: which; its newest.")] = None,
    adapter: Annotated[
        Path | None, typer.Option("--import", metavar="DIR", help="Make RUN, with a PEFT adapter as its step 0.")
    ] = None,
    json: Json = False,
) -> None:
    """List a run's checkpoints; prune, fork, import.

    \b
    art checkpoints runs/mine
    art checkpoints runs/mine --prune --keep 2
    art checkpoints runs/mine --fork mine-again --step 40     then: art train config.yaml name=mine-again
    art checkpoints runs/new --import adapter                 then: art train config.yaml name=new
    """
    from art_cli.commands import checkpoints as command

    command.run(run=run, is_pruning=prune, keep=keep, fork=fork, step=step, adapter=adapter, as_json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Say what works here, and what to install."""
    from art_cli.commands import doctor as command

    command.run(as_json=json)
