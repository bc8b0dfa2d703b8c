"""The package's exceptions as a tree, with exit codes and the rooms that raise them.

ArtError                      1    a failure that the user can act on, as one line
  UsageError                  2    everywhere: a mistake in the command line, or a file that it names is missing
    ConfigError               2    config, loop, cli: all mistakes of a configuration, each with its line
  DataError                   1    everywhere: the content of a file is wrong; names file:line
  RolloutError                1    rollouts, loop, cli: every attempt fails, as the agent cannot be loaded
  EngineError                 1    engines, tinker, chat, loop: an engine or port cannot start, died, or does not answer
  JudgeError                  1    judges, loop, cli: a group could not be scored; it stays owed
    JudgeStopped              1    judges: no group can be scored until the user acts: a refused key, a spent budget
  LearnerError                1    learners, tinker, loop: a step cannot be computed
    OutOfMemory               1    learners, tinker: it takes more memory than there is
    ProcessDied               1    learners: one of the learner's processes ended by itself
    PeersLost                 1    learners: the processes on this machine lost the processes on another
  RemoteError                 1    tinker: the server of the Tinker protocol is gone, refuses, or is late
  DriftError                  1    engines, learners, loop, serving: engine and learner have different weights
  CheckpointError             1    runs, models, learners, tinker, engines, loop: no checkpoint is whole, or none fits
    UncertainCheckpoint       1    runs: a checkpoint that may be whole, such as one of a newer art
  RunError                    1    runs, loop, cli, judges, models, reports, serving: a run or output refuses, as it is
                                   locked, or made by another configuration
  GateError                   1    cli, loop: a measured value misses its gate
  DeliveryError               1    formats: a receiver of traces does not take them
  StorageError                1    runs: an object store cannot be reached, refuses, or is late
  Paused                      1    loop: a stop rule paused the run; everything complete is written
  Interrupted               130    loop, learners, cli: Ctrl-C or SIGTERM; everything complete is written

How an error reaches the user:

    an attempt at a rollout fails     rollouts/attempt_errors.AttemptError; recorded, counted, and the run continues
    a request to a server is wrong    chat/chat_errors.ChatError; an answer with status 4xx or 5xx
    an ArtError                       cli/app.report prints "error: ..." and exits with its code
    an OSError, a missing package     cli/app.report explains it; exit code 1
    anything else                     a bug: one line that says so, and the traceback with --verbose; exit code 1

A message is one line: what, where, what to do. An engine or a learner may add the last lines of a log. A programmer's
mistake is an assertion, not an ArtError. Code that calls a user's or another package's code names the boundary in its
`except`, and keeps the cause (`raise ... from`).
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple


class ArtError(Exception):
    """A mistake or failure the user can act on; `str()` is the line to show."""

    exit_code = 1


class UsageError(ArtError):
    exit_code = 2


class Problem(NamedTuple):
    """One mistake in a configuration.

    Example: Problem("train.learning_rat", "config.yaml:7", "no such key; did you mean 'learning_rate'?")
    """

    key: str  # dotted; "" for the whole file
    place: str  # "file:line", or "command line"
    message: str

    def __str__(self) -> str:
        key = self.key if len(self.key) <= 200 else f"{self.key[:197]}..."
        message = self.message if len(self.message) <= 800 else f"{self.message[:797]}..."
        place = self.place if len(self.place) <= 300 else f"...{self.place[-297:]}"
        return printable(f"{place}: {key}: {message}" if key else f"{place}: {message}")


class ConfigError(UsageError):
    """All mistakes of a configuration at once, a line each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = list(problems)
        super().__init__("\n".join(map(str, problems)))


class DataError(ArtError):
    """A file's content is not what it must be. `DataError("bad id", path, 3)` reads `path:3: bad id`."""

    def __init__(self, message: str, path: object, line: int | None = None) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")


class RolloutError(ArtError):
    """The user's rollout cannot be loaded or run at all."""


class EngineError(ArtError):
    """The engine did not start, died, or did not answer in time."""


class JudgeError(ArtError):
    """A group could not be scored; it stays owed."""


class JudgeStopped(JudgeError):
    """No group can be scored until the user acts, because a key is refused or a budget is spent."""


class LearnerError(ArtError):
    """A step cannot be computed: out of memory, or a loss that is not finite."""


class OutOfMemory(LearnerError):
    """A step takes more memory than there is."""


class ProcessDied(LearnerError):
    """A process of a learner that has several ended by itself, so that the others had to end."""


class PeersLost(LearnerError):
    """The processes of a learner on one machine lost those on another, where the cause is."""


class RemoteError(ArtError):
    """A server that trains and samples for us is gone, refuses a request, or does not answer in time."""

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        """`is_final`: the next request would fail as well, because the server is gone or refuses the key."""
        super().__init__(message)
        self.is_final = is_final


class DriftError(ArtError):
    """Engine and learner do not hold the same weights."""


class CheckpointError(ArtError):
    """No checkpoint verifies, or one does not fit the model."""


class UncertainCheckpoint(CheckpointError):
    """A checkpoint that may be whole: it cannot be read now, a newer art wrote it, or a file was added to it."""


class RunError(ArtError):
    """The run directory refuses: it is locked, finished, or another configuration made it."""


class GateError(ArtError):
    """A measured value is below its gate."""


class DeliveryError(ArtError):
    """A receiver of traces cannot be reached, hangs, or refuses what it is sent."""


class StorageError(ArtError):
    """An object store cannot be reached, refuses, or does not answer in time."""


class Paused(ArtError):
    """A stop rule of the configuration paused the run, after everything complete was written."""


class Interrupted(ArtError):
    exit_code = 130


@contextlib.contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Begins the line of an error of the block with the source of groups that it is of; "" changes nothing."""
    try:
        yield
    except ArtError as error:
        if source and not isinstance(error, ConfigError):
            error.args = (f"rollout.sources.{source}: {error}",)
        raise


MAX_MESSAGE = 1500  # characters that are kept of an exception's message

# Controls of C0 and C1, line and paragraph separators, marks that turn the writing direction, lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_UNPRINTABLE_IN_LINES = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


def printable(text: object, *, limit: int | None = None) -> str:
    """Returns the text on one line. Characters that control a terminal are escaped: "\\x1b", "\\n", "\\u202e".

    A text of more than `limit` characters is cut there.
    """
    whole = str(text)
    return _UNPRINTABLE.sub(_escape, whole if limit is None or len(whole) <= limit else f"{whole[:limit]}...")


def printable_lines(text: str) -> str:
    """Returns the text as `printable` shows it, but with its newlines and tabs, which are ours."""
    return _UNPRINTABLE_IN_LINES.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return found[0].encode("unicode_escape").decode()


def no_such_option(group: str, name: object, there_are: Sequence[str]) -> str:
    """Example: "no engine 'vlm'; did you mean 'vllm'? There are: embedded, openai, vllm"."""
    near = get_close_matches(str(name), there_are, n=1)
    hint = f"did you mean {near[0]!r}? There are: " if near else "there are: "
    return f"no {group} {name!r}; {hint}{', '.join(there_are)}"


FILES = "Too many open files"  # in the message of an OSError, and of what a library raises for it
FILES_CURE = "; raise the limit (ulimit -n), or lower rollout.concurrency"


def message_of(error: BaseException) -> str:
    """Returns the first MAX_MESSAGE characters of an exception's message, as text that can be written anywhere.

    The exception may come from a user's or a library's code. If its `__str__` raises, the text is that. The error of an
    API's client has the server's own words in its `body`, without the JSON around them.
    """
    try:
        body = getattr(error, "body", None)
        if isinstance(body, dict) and isinstance(body.get("error"), dict):  # Anthropic's
            body = body["error"]
        words = body.get("message") if isinstance(body, dict) else None
        text = (words if isinstance(words, str) else str(error))[:MAX_MESSAGE]
    except BaseException as raised:  # the boundary to other people's code; also a SystemExit
        text = f"its text cannot be had: {type(raised).__name__} in __str__"
    if FILES in text:
        text += FILES_CURE
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be written


def describe(error: BaseException) -> str:
    """Returns a foreign exception as one printable line. Example: KeyError("x") -> "KeyError: 'x'"."""
    return printable(f"{type(error).__name__}: {' '.join(message_of(error).split())}", limit=1000)


def one_line(error: BaseException, *, limit: int = 200) -> str:
    """Returns the first line of a foreign exception's message, at most `limit` characters, or its type without one."""
    lines = message_of(error).strip().splitlines()
    return printable(lines[0] if lines else type(error).__name__, limit=limit)


def first_sentence(text: str) -> str:
    """Returns the first sentence of a description on one line, or the whole paragraph of a title without an end."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<! al\.)\s+(?=[^a-z])", paragraph, maxsplit=1)[0]


def is_full_disk(error: BaseException) -> bool:
    """Returns whether the disk had no room left. Libraries in Rust, such as safetensors, put it in the message, as does
    the copy of a tree."""
    said = (f"(os error {errno.ENOSPC})", f"[Errno {errno.ENOSPC}]")
    return getattr(error, "errno", None) == errno.ENOSPC or any(each in str(error) for each in said)


@contextlib.contextmanager
def first_of_group() -> Iterator[None]:
    """Raises the first error of an ExceptionGroup in place of the group, since its tasks fail for one reason."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(error: BaseException) -> BaseException:
    """Returns the first error of an ExceptionGroup, however deep; any other error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
