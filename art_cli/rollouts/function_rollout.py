"""FunctionRollout: the user's Python function as a rollout; and per-attempt keys in the shared process environment.

The function is `async def rollout(policy, scenario)` or a plain `def`. Ready-made environments have the same form.
Neither form runs in the event loop of the gateway and the engine: async functions share a loop in a separate thread,
and each plain function call gets a thread. A blocking function therefore only delays its own process's rollouts, and
its timeout still works.

If a rollout sets OPENAI_API_KEY to `policy.api_key`, other attempts in the same process would make their calls with
this key. Therefore reading a variable that holds an attempt's key returns the key of the attempt that reads it.

Code outside an attempt's context, such as a thread pool, could belong to any attempt. While several attempts run, such
code reads SHARED_KEY, and the gateway refuses it with a message that explains the fix. A child process without an
explicit `env` inherits the last value that was set.
"""

import asyncio
import contextlib
import contextvars
import copy
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.rollouts.attempt_errors import AttemptError, Json, from_exception
from art_cli.rollouts.environments import Settings, open_environment
from art_cli.rollouts.policy import Connections, Policy, past_proxies, read_outcome
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import RolloutError
from art_cli.runtime.plugins import resolve
from art_cli.runtime.threads import LoopThread, call_in_thread, is_being_cancelled

if TYPE_CHECKING:
    from art_cli.config.schema import RolloutConfig

SHARED_KEY = "the-key-of-one-of-several-attempts"  # no gateway gives this key

_own: contextvars.ContextVar[str | None] = contextvars.ContextVar("own_key", default=None)
_playing: set[str] = set()  # keys of the attempts that run in this process
_holding: set[str] = set()  # names of the variables that hold an attempt's key
CURE = "await what waits, or make it a plain `def`"
CLOSE_TIMEOUT_S = 5.0  # longest wait for cancelled rollouts to finish
Ending = Outcome | AttemptError | RolloutError  # result of a rollout
PING_TIMEOUT_S = 2.0  # an event loop that runs nothing for this long is blocked
TICK_S = 0.05  # interval between two checks of the event loop
MIN_STILL_S = 0.1  # shorter pauses are normal
MIN_PLAYED_S = 1.0  # shorter attempts show nothing


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
    """Runs the block as part of the attempt with this key. The caller's context belongs to this attempt only."""
    os.environ.__class__ = _Environment
    _own.set(key)
    _playing.add(key)
    try:
        yield
    finally:
        _playing.discard(key)


class FunctionRollout:
    """Calls one function. Messages name it `entry`; `root` is the directory of the user's files."""

    def __init__(self, function: Callable[[Policy, Json], Any], *, entry: str, root: Path) -> None:
        _check_signature(function, entry)
        self._function = function
        self._entry = entry
        self._root = root.resolve()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
        )
        self._loop = LoopThread("rollouts")
        self._num_playing = 0
        self._played_s = self._still_s = 0.0  # total time of all attempts, and the part in which the loop was blocked
        self._watching: asyncio.Task[None] | None = None
        self._connections = Connections(has_one_loop=self._is_async)

    async def play(self, policy: Policy, scenario: Json, *, is_alone: bool = False) -> Outcome:
        """Raises AttemptError if the function failed, and RolloutError for a wrong type of result."""
        os.environ.update(past_proxies(policy.base_url))
        ending = await self._run(policy, copy.deepcopy(scenario))  # the function may modify its copy
        if isinstance(ending, Outcome):
            return ending
        raise ending

    async def _run(self, policy: Policy, scenario: Json) -> Ending:
        try:
            if self._is_async:
                return await self._loop.run(self._call_async(policy, scenario))
            return await call_in_thread(self._call, policy, scenario)
        except asyncio.CancelledError as error:
            if is_being_cancelled():
                raise
            raise AttemptError("CancelledError", "the rollout cancelled itself") from error
        except Exception as error:  # a GeneratorExit in an awaited task also closes the coroutine around it
            raise from_exception(error.__cause__ or error, self._root) from error

    async def explain_timeout(self) -> str:
        if self._is_async and await self._loop.is_blocked(PING_TIMEOUT_S):
            return f"; it blocks the event loop: {CURE}"
        if self._played_s < MIN_PLAYED_S or self._still_s < self._played_s / 2:
            return ""
        return f"; its event loop was blocked for {self._still_s:.1f} of {self._played_s:.1f} s: {CURE}"

    async def close(self) -> None:
        if self._is_async:
            await self._loop.close(CLOSE_TIMEOUT_S, last=self._connections.close)
        else:
            await self._connections.close()

    # These run in the user's loop or thread, because inspecting returned values and exceptions can run user code.

    async def _call_async(self, policy: Policy, scenario: Json) -> Ending:
        policy.share(self._connections)
        self._num_playing += 1
        try:
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())
                await asyncio.sleep(0)  # it looks at the loop before the user's code may block it
            with reading_own(policy.api_key):
                value = await self._function(policy, scenario)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the boundary to the user's code; also SystemExit and GeneratorExit
            return from_exception(error, self._root)
        finally:
            self._num_playing -= 1
        return self._read(value)

    async def _watch(self) -> None:
        """Measures how long attempts run, and how long the loop waits without computing."""
        while self._num_playing:
            begin, worked = time.monotonic(), _worked_s()
            await asyncio.sleep(TICK_S)
            took = time.monotonic() - begin
            still = took - TICK_S - (_worked_s() - worked)
            self._played_s += took
            self._still_s += still if still > MIN_STILL_S else 0.0

    def _call(self, policy: Policy, scenario: Json) -> Ending:
        policy.share(self._connections)
        try:
            with reading_own(policy.api_key):
                value = self._function(policy, scenario)
                value = asyncio.run(_await(value)) if inspect.isawaitable(value) else value
        except BaseException as error:  # the boundary to the user's code
            return from_exception(error, self._root)
        return self._read(value)

    def _read(self, value: Any) -> Ending:
        try:
            return read_outcome(value, entry=self._entry)
        except (AttemptError, RolloutError) as error:
            return error
        except BaseException as error:  # the boundary to the user's code, such as `__float__` or `__repr__`
            return from_exception(error, self._root)


def _worked_s() -> float:
    """Returns this thread's CPU seconds; on Linux including the time it waited for a core."""
    try:
        computed, waited = Path("/proc/thread-self/schedstat").read_bytes().split()[:2]
        return (int(computed) + int(waited)) / 1e9
    except (OSError, ValueError):
        return time.thread_time()


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _check_signature(function: object, entry: str) -> None:
    if not callable(function):
        raise RolloutError(f"{entry}: not a function but {type(function).__name__}")
    if inspect.isclass(function):
        raise RolloutError(
            f"{entry}: a class; write `async def rollout(policy, scenario)`, or if its objects have such a __call__, "
            f"`rollout = {function.__name__}()` below the class, and name that in rollout.entry"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise RolloutError(f"{entry}: must take (policy, scenario): {error}") from error
    except ValueError:  # no signature to be had: a builtin
        return


def what_to_load(config: "RolloutConfig") -> tuple[str, Json | None]:
    """Returns `entry` and `environment` for load_function. The configuration must not have a command."""
    if config.environment is not None:
        chosen = config.environment
        environment = chosen.model_dump(include={"name", "args", "system"})
        environment["num_seeds"] = chosen.seed + chosen.size if config.scenarios is None else 0
        return chosen.name, environment
    assert config.entry is not None, "a config has an entry, a command or an environment"
    return config.entry, None


def load_function(entry: str, directory: Path, environment: Json | None = None) -> FunctionRollout:
    """Loads the function. Raises UsageError if loading fails, and RolloutError for other parameters than (policy,
    scenario).

    With `environment`, the fields of `environments.Settings`, the environment is loaded and `entry` is its name.
    """
    if environment is not None:
        settings = Settings(**environment, directory=str(directory))
        return FunctionRollout(open_environment(settings).play, entry=entry, root=directory)
    return FunctionRollout(resolve(entry, base=directory), entry=entry, root=directory)
