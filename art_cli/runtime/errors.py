"""The package's exceptions as a tree, with exit codes and the rooms that raise them.

ArtError                      1    a failure that the user can fix; a single line
  UsageError                  2    everywhere: wrong command line, or a named file is missing
    ConfigError               2    config, loop, cli: all configuration mistakes, with line numbers
  DataError                   1    everywhere: wrong file content; names file:line
  RolloutError                1    rollouts, loop, cli: every attempt fails because the agent cannot be loaded
  EngineError                 1    engines, tinker, chat, loop: an engine or port cannot start, died, or does not answer
  JudgeError                  1    judges, loop, cli: a group could not be scored; it remains pending
    JudgeStopped              1    judges: scoring is impossible until the user acts (refused key, spent budget)
  LearnerError                1    learners, tinker, loop: a step cannot be computed
    OutOfMemory               1    learners, tinker: a step needs more memory than available
    ProcessDied               1    learners: a learner process died
    PeersLost                 1    learners: this machine's processes lost contact with another machine's
  RemoteError                 1    tinker: the Tinker server is lost, refuses, or is late
  DriftError                  1    engines, learners, loop, serving: engine and learner have different weights
  CheckpointError             1    runs, models, learners, tinker, engines, loop, serving: no valid or suitable
                                   checkpoint
    UncertainCheckpoint       1    runs: a checkpoint that may be intact, for example from a newer art
  RunError                    1    runs, loop, cli, judges, models, reports: a run or output is locked, or belongs to
                                   a different configuration
  GateError                   1    cli, loop: a measured value misses its gate
  DeliveryError               1    formats: a trace receiver does not accept traces
  StorageError                1    runs: an object store is unreachable, refuses, or is late
  Paused                      1    loop: a stop rule paused the run; all finished work is saved
  Interrupted               130    loop, learners, cli: Ctrl-C or SIGTERM; all finished work is saved

How an error reaches the user:

    failed rollout attempt            rollouts/attempt_errors.AttemptError; recorded, counted, and the run continues
    invalid request to a server       chat/chat_errors.ChatError; an answer with status 4xx or 5xx
    ArtError                          cli/app.report prints "error: ..." and exits with its code
    OSError, missing package          cli/app.report explains it; exit code 1
    anything else                     a bug: one line that says so, and the traceback with --verbose; exit code 1

A message is a single line: what, where, what to do. Engines and learners may append the last lines of a log.
Programming mistakes are assertions, not ArtErrors. Code that calls user code or other packages names this boundary in
its `except` and keeps the cause (`raise ... from`).
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

MAX_MESSAGE = 1500  # characters kept of an exception's message
FILES = "Too many open files"  # appears in OSErrors, and in library errors caused by them
FILES_CURE = "; raise the limit (ulimit -n), or lower rollout.concurrency"

# C0 and C1 controls, line and paragraph separators, text direction marks, lone surrogates
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_UNPRINTABLE_IN_LINES = re.compile(_UNPRINTABLE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))


class ArtError(Exception):
    """A mistake or failure the user can act on; `str()` is the line to show."""

    exit_code = 1


class UsageError(ArtError):
    exit_code = 2


class Problem(NamedTuple):
    """A mistake in a configuration.

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
    """All mistakes in a configuration, one per line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a ConfigError needs at least one problem"
        self.problems = list(problems)
        super().__init__("\n".join(map(str, problems)))


class DataError(ArtError):
    """A file has invalid content. `DataError("bad id", path, 3)` reads `path:3: bad id`."""

    def __init__(self, message: str, path: object, line: int | None = None) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")


class RolloutError(ArtError):
    """The user's rollout cannot be loaded or run."""


class EngineError(ArtError):
    """The engine did not start, died, or did not answer in time."""


class JudgeError(ArtError):
    """A group could not be scored and remains pending."""


class JudgeStopped(JudgeError):
    """Scoring is impossible until the user acts, because a key is refused or a budget is spent."""


class LearnerError(ArtError):
    """A step cannot be computed, for example because the loss is not finite."""


class OutOfMemory(LearnerError):
    """A step needs more memory than available."""


class ProcessDied(LearnerError):
    """A process of a multi-process learner died, so the other processes were stopped."""


class PeersLost(LearnerError):
    """This machine's learner processes lost contact with another machine's. The cause is on the other machine."""


class RemoteError(ArtError):
    """A remote training and sampling server is lost, refuses a request, or does not answer in time."""

    def __init__(self, message: str, *, is_final: bool = True) -> None:
        """`is_final`: further requests would also fail, because the server is lost or refuses the key."""
        super().__init__(message)
        self.is_final = is_final


class DriftError(ArtError):
    """Engine and learner have different weights."""


class CheckpointError(ArtError):
    """No checkpoint verifies, or it does not fit the model."""


class UncertainCheckpoint(CheckpointError):
    """A checkpoint that may be intact: currently unreadable, written by a newer art, or with an added file."""


class RunError(ArtError):
    """The run directory is locked, finished, or belongs to a different configuration."""


class GateError(ArtError):
    """A measured value misses its gate."""


class DeliveryError(ArtError):
    """A trace receiver is unreachable, hangs, or refuses the traces."""


class StorageError(ArtError):
    """An object store is unreachable, refuses, or does not answer in time."""


class Paused(ArtError):
    """A configured stop rule paused the run after saving all finished work."""


class Interrupted(ArtError):
    exit_code = 130


@contextlib.contextmanager
def naming_source(source: str) -> Iterator[None]:
    """Prefixes ArtErrors inside the block with their group source; "" changes nothing."""
    try:
        yield
    except ArtError as error:
        if source and not isinstance(error, ConfigError):
            error.args = (f"rollout.sources.{source}: {error}",)
        raise


def printable(text: object, *, limit: int | None = None) -> str:
    """Returns the text on one line, control characters escaped ("\\x1b"), cut after `limit` characters."""
    whole = str(text)
    return _UNPRINTABLE.sub(_escape, whole if limit is None or len(whole) <= limit else f"{whole[:limit]}...")


def brief(value: object) -> str:
    """Returns a short printable form of a value for error messages."""
    return printable(repr(value), limit=80)


def printable_lines(text: str) -> str:
    """Like `printable`, but keeps newlines and tabs."""
    return _UNPRINTABLE_IN_LINES.sub(_escape, text)


def _escape(found: "re.Match[str]") -> str:
    return ascii(found[0])[1:-1]  # without a codec, whose module a process without free file descriptors cannot import


def no_such_option(group: str, name: object, there_are: Sequence[str]) -> str:
    """Example: "no engine 'vlm'; did you mean 'vllm'? There are: embedded, openai, vllm"."""
    near = get_close_matches(str(name), there_are, n=1)
    hint = f"did you mean {near[0]!r}? There are: " if near else "there are: "
    return f"no {group} {name!r}; {hint}{', '.join(there_are)}"


def message_of(error: BaseException) -> str:
    """Returns the first MAX_MESSAGE characters of an exception's message, in writable form.

    The exception may come from user or library code. If its `__str__` raises, the returned text says so. Errors of API
    clients have the server's message in `body`; it is returned without the surrounding JSON.
    """
    try:
        body = getattr(error, "body", None)
        if isinstance(body, dict) and isinstance(body.get("error"), dict):  # Anthropic's format
            body = body["error"]
        words = body.get("message") if isinstance(body, dict) else None
        text = (words if isinstance(words, str) else str(error))[:MAX_MESSAGE]
    except BaseException as raised:  # boundary to other people's code; includes SystemExit
        text = f"its text cannot be had: {type(raised).__name__} in __str__"
    if FILES in text:
        text += FILES_CURE
    return text.encode(errors="replace").decode()  # lone surrogates cannot be written


def describe(error: BaseException) -> str:
    """Returns a foreign exception as a printable line. Example: KeyError("x") -> "KeyError: 'x'"."""
    return printable(f"{type(error).__name__}: {' '.join(message_of(error).split())}", limit=1000)


def one_line(error: BaseException, *, limit: int = 200) -> str:
    """Returns a message's first line (and the next behind a colon), cut; the type name for empty messages."""
    lines = message_of(error).strip().splitlines() or [type(error).__name__]
    return printable(" ".join(map(str.strip, lines[: 2 if lines[0].endswith(":") else 1])), limit=limit)


def first_sentence(text: str) -> str:
    """Returns a description's first sentence on one line, or the full paragraph without sentence ends."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?])(?<! al\.)\s+(?=[^a-z])", paragraph, maxsplit=1)[0]


def is_full_disk(error: BaseException) -> bool:
    """Returns True if a disk or a quota was full; some libraries say so only in the message."""
    full = (errno.ENOSPC, errno.EDQUOT)
    said = [text for number in full for text in (f"(os error {number})", f"[Errno {number}]")]
    return getattr(error, "errno", None) in full or any(each in str(error) for each in said)


@contextlib.contextmanager
def first_of_group() -> Iterator[None]:
    """Raises the first error of an ExceptionGroup instead of the group, because the tasks fail for the same reason."""
    try:
        yield
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


def first_error(error: BaseException) -> BaseException:
    """Returns the first leaf error of nested ExceptionGroups; other errors unchanged."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
