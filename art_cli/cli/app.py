"""The command line: imports the module of the called command, and reports every failure as one line.

Each command is defined in `cli/<name>.py`. This module imports nothing heavy, so help is fast. A user's mistake becomes
a line on standard error and an exit code. A bug also becomes one line; --verbose adds the traceback.
"""

import atexit
import contextlib
import errno
import io
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer import Option
from typer.core import TyperGroup
from typer.main import get_command

from art_cli import cli
from art_cli.config.packaged import packaged, with_documents
from art_cli.runtime import errors, log

MAX_ERROR = 4_000  # characters in an error line; file names and provider messages can be longer

MAX_FILES = 65_536  # highest soft limit on open files; child programs that close every descriptor stay fast

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}


class LazyCommands(Mapping[str, Any]):
    """Typer's commands by name, created on lookup so that other commands' modules are not imported."""

    def __getitem__(self, name: str) -> Any:
        if name not in cli.NAMES:
            raise KeyError(name)
        single, module = typer.Typer(**PLAIN), import_module(f"art_cli.cli.{cli.MODULES.get(name, name)}")
        single.command(name, cls=getattr(module, "Command", None))(module.run)
        command: Any = get_command(single)
        for part in command.params:
            if part.name == "overrides":
                part.help += f": {cli.EXAMPLES.get(name, 'train.steps=10, loss=dapo')}"
        if any("docs/" in (getattr(part, "help", None) or "") for part in (command, *command.params)):
            command.epilog = f"\b\ndocs/ is {packaged('docs')}"
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(cli.NAMES)

    def __len__(self) -> int:
        return len(cli.NAMES)


class LazyGroup(TyperGroup):
    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs | {"commands": LazyCommands()})


app = typer.Typer(cls=LazyGroup, **PLAIN)


def main() -> NoReturn:
    """Runs this process's command line, and exits with the command's code."""
    for name in ("stdout", "stderr"):  # None if the caller closed the stream
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # unencodable letters become question marks
        with contextlib.suppress(OSError):  # an inherited stream may refuse
            sys.stdout.reconfigure(errors="replace")
    _raise_file_limit()
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = run(sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)  # all work is done; a signal may end the clean-up
    try:
        sys.stdout.flush()
    except OSError as error:  # the interpreter must not flush again at exit
        if not isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            sys.stderr.writelines(f"{line}\n" for line in report(error)[0])
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    _exit(code)


def _raise_file_limit() -> None:
    """Raises the soft limit on open files (macOS: 256, Debian: 1,024). An attempt may need several files."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # not available on Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _exit(code: int) -> NoReturn:
    """Ends the process, even if threads are busy, for example with loading an unneeded model.

    Exits directly if daemon threads are running, because a thread that returns from torch during interpreter shutdown
    aborts the process.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command line, reports failures, and returns the exit code. `--verbose` may be anywhere."""
    is_verbose = "--verbose" in arguments
    rest = [argument for argument in arguments if argument != "--verbose"]
    code: Any
    try:
        log.set_up(verbose=is_verbose)
        if sys.flags.optimize > 1:
            raise errors.UsageError("transformers needs docstrings: unset PYTHONOPTIMIZE, or drop -OO")
        code = app(rest or ["--help"], prog_name="art", standalone_mode=False)
    except KeyboardInterrupt:  # Typer handles Ctrl-C only during a command
        code = 130
    except Exception as error:
        if is_verbose:
            sys.stderr.write(errors.printable_lines(traceback.format_exc()))
        lines, failure = report(error)
        sys.stderr.writelines(f"{line}\n" for line in lines)
        return failure
    if code == 130:  # Typer's code for Ctrl-C
        sys.stderr.write("interrupted\n")
    return code if isinstance(code, int) else 0


def report(error: Exception) -> tuple[list[str], int]:
    """Returns printable lines for a failure, and the exit code."""
    lines, code = _lines(error)
    return [errors.printable(with_documents(line), limit=MAX_ERROR) for line in lines], code


def _lines(error: Exception) -> tuple[list[str], int]:
    match error:
        case errors.Interrupted() | errors.Paused():
            return [str(error)], error.exit_code
        case errors.ConfigError():
            return [f"error: {problem}" for problem in error.problems], error.exit_code
        case errors.UsageError() | errors.EngineError() | errors.LearnerError():
            # may include a process's last log lines
            return [f"error: {line}" for line in str(error).split("\n")], error.exit_code
        case errors.ArtError():
            return [f"error: {error}"], error.exit_code
        case ExceptionGroup():
            return _lines(error.exceptions[0])
        case typer.TyperException():
            path = getattr(getattr(error, "ctx", None), "command_path", "art")
            return [f"error: {error.format_message()} (see {path} --help)"], error.exit_code
        case ModuleNotFoundError(name=str(name)) if name.startswith("art_cli."):
            return [f"error: {name} is not installed here; install art-cli whole"], 1
        case ModuleNotFoundError(name=str(name)) if extra := _extra_of(package := name.partition(".")[0]):
            return [f"error: {package} is not installed; pip install 'art-cli[{extra}]'"], 1
        case Exception() if errors.is_full_disk(error):
            full = getattr(error, "filename", None)
            what = f"{full}: " if full else ""
            return [f"error: {what}no space left on the disk; free some and run the same command again"], 1
        case shutil.Error(args=[[(_, to, reason), *_]]):
            return [f"error: {to}: {reason}"], 1
        case OSError(strerror=str(reason)):
            reason += errors.FILES_CURE if error.errno == errno.EMFILE else ""
            return [f"error: {error.filename or 'operating system'}: {reason}"], 1
    text = " ".join(str(error).split())
    if "KeyboardInterrupt" in text or isinstance(error.__cause__, KeyboardInterrupt):
        return ["interrupted"], 130  # pydantic converts a Ctrl-C during imports
    where = traceback.extract_tb(error.__traceback__)[-1]
    bug = f"error: this is a bug in art: {type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
    return [f"{bug}; run it again with --verbose for the traceback"], 1


def _extra_of(package: str) -> str | None:
    from art_cli.cli.doctor import EXTRAS

    return next((extra for extra, (packages, _) in EXTRAS.items() if package in packages), None)


def _help(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(context.get_help())
        raise typer.Exit


def _version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"art {version('art-cli')}")
        raise typer.Exit


@app.callback(add_help_option=False)  # Typer's help option imports pydantic, which doubles the time for help
def art(
    verbose: Annotated[bool, Option("--verbose", help="More log lines, and tracebacks; goes anywhere.")] = False,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
    help: Annotated[bool, Option("--help", callback=_help, is_eager=True, help="Show this text.")] = False,
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
