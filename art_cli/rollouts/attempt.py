"""What can go wrong in one attempt at a rollout, and how it is told from what stops a run.

`AttemptError` becomes the `error` of a trajectory: the rollout is kept and counted. A RolloutError stops the run: every
rollout would fail with it. Only failures of transport are tried again.
"""

from pathlib import Path

from art_cli.plugins import place_of

MAX_ERROR_LENGTH = 2000  # characters of an error kept in a trajectory

# By name, over an error's base classes: the packages need not be there, and are not imported for it.
_TRANSPORT = frozenset(
    {
        "builtins.ConnectionError",
        "openai.APIConnectionError",
        "openai.InternalServerError",  # any status from 500 up
        "httpx.TransportError",
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
        super().__init__(kind, message)
        self.kind = kind
        self.message = message
        self.is_transport = is_transport

    def __str__(self) -> str:
        text = f"{self.kind}: {self.message}" if self.message else self.kind
        return text[:MAX_ERROR_LENGTH].encode(errors="replace").decode()  # a lone surrogate cannot go to disk


def from_exception(error: BaseException, root: Path) -> AttemptError:
    """What a user's code raised, with the line of it: the innermost frame of a file under `root`."""
    place = place_of(error, root)
    message = f"{error} ({place})" if place else str(error)
    return AttemptError(type(error).__name__, message.strip(), is_transport=is_transport_error(error))


def is_transport_error(error: BaseException) -> bool:
    """Whether a connection failed or the other side did, rather than the code that used it."""
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    return bool(names & _TRANSPORT)


def describe_exit(status: int) -> str:
    """How a process ended, from its exit status; negative for the signal that ended it. Example: "signal 9"."""
    return f"signal {-status}" if status < 0 else f"status {status}"
