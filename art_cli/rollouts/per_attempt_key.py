"""A key for each attempt in the environment that the attempts of one process share.

Suppose that a rollout sets OPENAI_API_KEY to its `policy.api_key`. Then the calls of all attempts in the process would
go into the trajectory of the last attempt that did so. Therefore a variable that holds an attempt's key reads as the
key of the attempt whose code reads it.

Code outside every attempt's context, such as a thread of a pool, may belong to any of them. While several attempts run,
it reads SHARED_KEY, which the gateway refuses with the cure. A child process that is given no
`env` inherits the variable as it was set last.
"""

import contextlib
import contextvars
import os
from collections.abc import Iterator

SHARED_KEY = "the-key-of-one-of-several-attempts"  # no gateway gives this key

_own: contextvars.ContextVar[str | None] = contextvars.ContextVar("own_key", default=None)
_playing: set[str] = set()  # keys of the attempts that run in this process
_holding: set[str] = set()  # names of the variables that hold an attempt's key


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
    """Makes the block part of the attempt with this key, with all tasks and threads that get its context.

    The caller must run in a task or thread whose context no other attempt shares.
    """
    os.environ.__class__ = _Environment
    _own.set(key)
    _playing.add(key)
    try:
        yield
    finally:
        _playing.discard(key)
