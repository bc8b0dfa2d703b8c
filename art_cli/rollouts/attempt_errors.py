"""Errors of an attempt, which errors are retried, and the attempt's result as plain data.

An `AttemptError` becomes the `error` of a trajectory and is counted. A RolloutError stops the run, because every
rollout would fail. Only transport failures are retried.

Worker processes report results, an Outcome or an AttemptError, as plain JSON. They also run the user's code, so the
reports are fully validated. This module needs only the standard library, because a worker's Python may lack our
dependencies (bootstrap.py).
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from art_cli.runs.outcome import MAX_NUMBER, Outcome
from art_cli.runtime.errors import message_of
from art_cli.runtime.plugins import place_of
from art_cli.runtime.processes.plain_json import is_deep
from art_cli.runtime.processes.process_calls import checked

Json = dict[str, Any]

MAX_ERROR_LENGTH = 2000  # maximum characters of a trajectory's error
NODE = "node"  # error kind after a lost machine, which is not the attempt's fault
MAX_LEAVES = 100  # number of errors looked at in an exception group
MAX_CAUSES = 5  # number of errors looked at along a chain of `raise ... from`
OWN = "own"  # means every exception class that the user's own files define

# Class names; an error matches if any of its base classes does. The packages need not be installed.
_TRANSPORT = frozenset(
    {
        "builtins.ConnectionError",
        "openai.APIConnectionError",
        "openai.InternalServerError",  # every status from 500 up
        "httpx.TransportError",
        "httpx2.TransportError",  # openai 3 is built on it
        "aiohttp.ClientConnectionError",
        "requests.ConnectionError",
        "litellm.APIConnectionError",
        "litellm.InternalServerError",
        "litellm.ServiceUnavailableError",
    }
)


class AttemptError(Exception):
    """One attempt failed. Example: AttemptError("KeyError", "'move' (rollout.py:12)")"""

    def __init__(self, kind: str, message: str, *, is_transport: bool = False, classes: Sequence[str] = ()) -> None:
        """`classes` names the exception's class and its bases; empty if the policy cannot be the cause."""
        self.kind = _writable(kind)
        self.message = _writable(message)
        self.is_transport = is_transport
        self.classes = tuple(map(_writable, classes))
        super().__init__(self.kind, self.message)

    def __str__(self) -> str:
        return (f"{self.kind}: {self.message}" if self.message else self.kind)[:MAX_ERROR_LENGTH]


def _writable(text: str) -> str:
    """Truncates the text to MAX_ERROR_LENGTH, and replaces lone surrogates by question marks."""
    return text[:MAX_ERROR_LENGTH].encode(errors="replace").decode()


def from_exception(error: BaseException, root: Path) -> AttemptError:
    """Converts an exception from the user's code. The message names the innermost line in a file under `root`."""
    leaves = list(islice(_leaves(error), MAX_LEAVES))
    cause = leaves[0]
    message = message_of(error)
    if cause is not error:
        message = f"{message}: {type(cause).__name__}: {message_of(cause)}"
    if isinstance(cause, ModuleNotFoundError) and sys.executable not in message:
        message = f"{message} in {sys.executable}"
    if isinstance(cause, AttributeError | TypeError) and "'coroutine' object" in message:
        message = f"{message}; is an `await` missing? (a plain `def` calls policy.sync_client)"
    if place := place_of(cause, root) or place_of(error, root):
        message = f"{message} ({place})"
    named = [_classes(leaf, root) for leaf in leaves]
    classes = set().union(*named) if all(named) else set()
    is_transport = all(map(is_transport_error, leaves))
    return AttemptError(type(error).__name__, message.strip(), is_transport=is_transport, classes=sorted(classes))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yields the errors of a group, including nested groups; a plain error yields itself."""
    waiting = [error]
    while waiting:
        first = waiting.pop()
        if isinstance(first, BaseExceptionGroup):
            waiting += reversed(first.exceptions)
        else:
            yield first


def _classes(error: BaseException, root: Path) -> set[str]:
    """Returns the names of the error's class and bases; none if a system's or server's error is in its context."""
    causes = list(_causes(error, with_context=True))
    if any(isinstance(cause, (OSError, MemoryError, ImportError)) or _is_named_transport(cause) for cause in causes):
        return set()
    file = Path(getattr(sys.modules.get(str(type(error).__module__)), "__file__", None) or "")
    is_own = file.is_relative_to(root) and "site-packages" not in file.parts
    return {base.__name__ for base in type(error).__mro__} | ({OWN} if is_own else set())


def is_transport_error(error: BaseException) -> bool:
    """Returns whether the connection or server failed; frameworks wrap such errors, so the causes count."""
    return any(map(_is_named_transport, _causes(error)))


def _causes(error: BaseException, *, with_context: bool = False) -> Iterator[BaseException]:
    """Yields the error and the errors that it was raised from, or `with_context` while they were handled."""
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is not None:
            yield cause
            context = cause.__context__ if with_context and not cause.__suppress_context__ else None
            cause = cause.__cause__ or context


def _is_named_transport(error: BaseException) -> bool:
    names = {f"{str(base.__module__).partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    return bool(names & _TRANSPORT)


def describe_exit(status: int) -> str:
    """Describes an exit status. Examples: -9 is "signal 9", 3 is "status 3"."""
    return f"signal {-status}" if status < 0 else f"status {status}"


@dataclass(frozen=True)
class Done:
    """The fields of an Outcome. Raises ValueError if a record cannot hold a number or the metadata."""

    reward: float | None
    metrics: dict[str, float]
    metadata: Json

    def __post_init__(self) -> None:
        numbers = [*self.metrics.values(), *([] if self.reward is None else [self.reward])]
        if not all(isinstance(number, float) and abs(number) <= MAX_NUMBER for number in numbers):
            raise ValueError("a reward or metric that is not a finite number")
        if is_deep(self.metadata):
            raise ValueError("metadata that are nested too deeply")


@dataclass(frozen=True)
class Failed:
    kind: str
    message: str
    is_transport: bool
    classes: str  # separated by spaces


def report(ending: Outcome | AttemptError) -> Json:
    """Example: {"done": {"reward": 1.0, "metrics": {}, "metadata": {}}}"""
    if isinstance(ending, Outcome):
        return {"done": vars(ending)}
    named = {"kind": ending.kind, "message": ending.message, "classes": " ".join(ending.classes)}
    return {"failed": {**named, "is_transport": ending.is_transport}}


def read_report(value: object) -> Outcome | AttemptError:
    """Parses a report. Raises ValueError for an invalid report."""
    match value:
        case {"done": fields, **more} if not more:
            return Outcome(**vars(checked(Done, fields)))
        case {"failed": fields, **more} if not more:
            failed: Failed = checked(Failed, fields)
            return AttemptError(**{**vars(failed), "classes": failed.classes.split()})
    raise ValueError("it reports neither an outcome nor an error")
