"""What an attempt reads where a key was set in the environment: its own.

The attempts of one process run at once and share its environment. Where a rollout sets OPENAI_API_KEY to its
`policy.api_key`, the last attempt to do so would get the calls of all others into its trajectory. So a variable that
was set to an attempt's key reads as the key of the attempt whose code reads it.

Code outside every attempt's context, such as a thread of a pool, may belong to any of them. While several attempts are
under way it reads SHARED_KEY, which the gateway refuses and says what to do. A child process that is given no `env`
inherits the variable as it was set last.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator

SHARED_KEY = "the-key-of-one-of-several-attempts"  # no gateway's

_own: contextvars.ContextVar[str | None] = contextvars.ContextVar("own_key", default=None)
_playing: set[str] = set()  # keys of the attempts under way in this process
_holding: set[str] = set()  # names of the variables that were set to an attempt's key last


class _Environment(os._Environ[str]):
    """`os.environ`, in a process that plays attempts."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        if name not in _holding:
            return value
        return _own.get() or (SHARED_KEY if len(_playing) > 1 else value)

    def __setitem__(self, name: str, value: str) -> None:
        super().__setitem__(name, value)
        if value in _playing:
            _holding.add(name)
        else:
            _holding.discard(name)


@contextlib.contextmanager
def reading_own(key: str) -> Iterator[None]:
    """The code inside is that of the attempt with this key, and so are the tasks and threads that get its context.

    The caller's context is the attempt's alone: that of a task or a thread of its own.
    """
    os.environ.__class__ = _Environment
    _own.set(key)
    _playing.add(key)
    try:
        yield
    finally:
        _playing.discard(key)
