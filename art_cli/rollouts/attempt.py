"""What can go wrong in one attempt at a rollout, and how it is told from what stops a run.

`AttemptError` becomes the `error` of a trajectory: the rollout is kept and counted. A RolloutError stops the run: every
rollout would fail with it. Only failures of transport are tried again.
"""

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from art_cli.errors import message_of
from art_cli.plugins import place_of

MAX_ERROR_LENGTH = 2000  # characters of an error kept in a trajectory
MAX_LEAVES = 100  # errors of an exception group that are looked at
MAX_CAUSES = 5  # errors that one was raised from, looked at

# By name, over an error's base classes: the packages need not be there, and are not imported for it.
_TRANSPORT = frozenset(
    {
        "builtins.ConnectionError",
        "openai.APIConnectionError",
        "openai.InternalServerError",  # any status from 500 up
        "httpx.TransportError",
        "httpx2.TransportError",  # what openai 3 is built on
        "aiohttp.ClientConnectionError",
        "requests.ConnectionError",
        "litellm.APIConnectionError",
        "litellm.InternalServerError",
        "litellm.ServiceUnavailableError",
    }
)


class AttemptError(Exception):
    """One attempt failed. Example: AttemptError("KeyError", "'move' (rollout.py:12)")"""

    def __init__(self, kind: str, message: str, *, is_transport: bool = False) -> None:
        self.kind = _writable(kind)
        self.message = _writable(message)
        self.is_transport = is_transport
        super().__init__(self.kind, self.message)

    def __str__(self) -> str:
        return (f"{self.kind}: {self.message}" if self.message else self.kind)[:MAX_ERROR_LENGTH]


def _writable(text: str) -> str:
    """The text, cut to the length that is kept; a lone surrogate, which cannot be written, becomes a question mark."""
    return text[:MAX_ERROR_LENGTH].encode(errors="replace").decode()


def from_exception(error: BaseException, root: Path) -> AttemptError:
    """What a user's code raised, with the line of it: the innermost frame of a file under `root`.

    An exception group is told by its own text and by the first error in it.
    """
    leaves = list(islice(_leaves(error), MAX_LEAVES))
    cause = leaves[0]
    message = message_of(error)
    if cause is not error:
        message = f"{message}: {type(cause).__name__}: {message_of(cause)}"
    if isinstance(cause, ModuleNotFoundError) and sys.executable not in message:
        message = f"{message} in {sys.executable}"
    if place := place_of(cause, root) or place_of(error, root):
        message = f"{message} ({place})"
    return AttemptError(type(error).__name__, message.strip(), is_transport=all(map(is_transport_error, leaves)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors of a group, those of groups in it included; the error itself where it is no group."""
    waiting = [error]
    while waiting:
        first = waiting.pop()
        if isinstance(first, BaseExceptionGroup):
            waiting += reversed(first.exceptions)
        else:
            yield first


def is_transport_error(error: BaseException) -> bool:
    """Whether a connection failed or the other side did, rather than the code that used it.

    An error that was raised from another one (`raise ... from`), as frameworks do with those of their client, is what
    that one is.
    """
    cause: BaseException | None = error
    for _ in range(MAX_CAUSES):
        if cause is not None:
            if _is_named_transport(cause):
                return True
            cause = cause.__cause__
    return False


def _is_named_transport(error: BaseException) -> bool:
    names = {f"{str(base.__module__).partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    return bool(names & _TRANSPORT)


def describe_exit(status: int) -> str:
    """How a process ended, from its exit status; negative for the signal that ended it. Example: "signal 9"."""
    return f"signal {-status}" if status < 0 else f"status {status}"
