"""Policy, the argument of a rollout function, and how its return value becomes an Outcome.

Needs only the standard library, because the Python that runs rollouts may have no other packages (bootstrap.py).
"""

import contextlib
import math
import os
import sys
import threading
from importlib import import_module
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from art_cli.rollouts.attempt_errors import AttemptError, Json
from art_cli.runs.outcome import MAX_NUMBER, Outcome
from art_cli.runtime.errors import RolloutError
from art_cli.runtime.processes.plain_json import MAX_DEPTH, dump, is_deep, load
from art_cli.runtime.state_key import STATE_HEADER, UNRECORDED, write_header

if TYPE_CHECKING:
    import openai

MAX_METADATA_BYTES = 16 * 2**20  # maximum size of an outcome's metadata as JSON


def past_proxies(base_url: str) -> dict[str, str]:
    """Returns the variables that keep calls to the gateway away from a proxy; clients read either spelling."""
    host = urlsplit(base_url).hostname or ""
    hosts = [host for name in ("no_proxy", "NO_PROXY") for host in os.environ.get(name, "").split(",") if host.strip()]
    direct = ",".join(dict.fromkeys([*hosts, host]))
    return {"NO_PROXY": direct, "no_proxy": direct}


class Connections:
    """HTTP clients shared by rollouts to reuse connections. Clients are created on first use.

    An async client belongs to one event loop. It is shared if all rollouts run in the same loop (`has_one_loop`);
    otherwise each policy creates a client. The client class depends on the installed openai package: httpx for openai 2
    and older, httpx2 for openai 3.
    """

    def __init__(self, *, has_one_loop: bool) -> None:
        self._has_one_loop = has_one_loop
        self._lock = threading.Lock()
        self._async_client: Any = None
        self._client: Any = None

    def async_client(self) -> Any:
        with self._lock:
            if self._has_one_loop and self._async_client is None:
                self._async_client = _make_client("DefaultAioHttpClient", "DefaultAsyncHttpxClient")
            return self._async_client

    def client(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = _make_client("DefaultHttpxClient")
            return self._client

    async def close(self) -> None:
        """Closes them. To be awaited in the loop of the async client."""
        if self._async_client is not None:
            await self._async_client.aclose()
        if self._client is not None:
            self._client.close()


def _make_client(*names: str) -> Any:
    """Returns the first available openai HTTP client class from `names`, created without proxy settings.

    The gateway is reached directly, from this machine and from cluster nodes. The aiohttp client comes first because
    128 concurrent calls take 1.2 ms of CPU time per call, compared with 5.8 ms for httpx. It is an optional extra of
    openai and missing in older versions.
    """
    openai = _import_openai()
    for name in names:
        with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: the extra is not installed
            return getattr(openai, name)(trust_env=False)
    return None


def import_client() -> None:
    """Imports the modules for `policy.client` early; the attempt that asks for a client reports errors."""
    with contextlib.suppress(Exception):
        _import_openai()
        import_module("openai.resources.chat.completions")


def _import_openai() -> ModuleType:
    """Returns the openai package. Raises ModuleNotFoundError with the cure."""
    try:
        import openai
    except ModuleNotFoundError as error:
        if error.name != "openai":
            raise
        cure = "install it there, or give policy.base_url and policy.api_key to another client"
        message = f"policy.client needs the package openai, which {sys.executable} does not have; {cure}"
        raise ModuleNotFoundError(message, name="openai") from None
    return openai


class Policy:
    """The policy in training, from the view of a single attempt.

    `client` is a standard `openai.AsyncOpenAI` and `sync_client` a standard `openai.OpenAI`, both pointed at the
    gateway. Other frameworks use `base_url` and `api_key`, and Anthropic clients use `anthropic_base_url`. The key
    belongs to this attempt, and calls with the key are recorded. `headers` carry the current `state`; pass them to
    other clients (`default_headers=policy.headers`). Calls with `extra_headers=policy.unrecorded` are answered but not
    recorded or trained on, for example when the policy also plays an opponent.
    """

    def __init__(self, *, base_url: str, api_key: str, model: str, step: int) -> None:
        self.base_url = base_url
        self.api_key = api_key
        self.model = model
        self.step = step
        self.headers = {STATE_HEADER: ""}
        self.unrecorded = dict(UNRECORDED)
        self._connections = Connections(has_one_loop=False)
        self._client: openai.AsyncOpenAI | None = None
        self._sync_client: openai.OpenAI | None = None

    @property
    def anthropic_base_url(self) -> str:
        """`base_url` without /v1, because Anthropic clients add /v1 themselves."""
        return self.base_url.removesuffix("/v1")

    def state(self, key: str | None) -> None:
        """Names the environment's state for the next calls, until the next call of this method. None removes the name.

        Example: policy.state(board). Algorithms with step-level credit (gigpo) compare a group's replies in
        equal states. Without names, states are equal if the prompt tokens are equal.
        """
        if key is not None and not isinstance(key, str):
            raise TypeError(f"policy.state takes text, such as a board or a page's address, not {type(key).__name__}")
        self.headers[STATE_HEADER] = write_header(key or "")

    def share(self, connections: Connections) -> None:
        """Makes the clients use these connections. Called by FunctionRollout."""
        self._connections = connections

    @property
    def client(self) -> "openai.AsyncOpenAI":
        """For `async def rollout`."""
        if self._client is None:
            self._client = self._made("AsyncOpenAI", self._connections.async_client())
        return self._client

    @property
    def sync_client(self) -> "openai.OpenAI":
        """For `def rollout`."""
        if self._sync_client is None:
            self._sync_client = self._made("OpenAI", self._connections.client())
        return self._sync_client

    def _made(self, kind: str, http_client: Any) -> Any:
        """Returns a client of openai's class `kind`. It keeps the dict `headers`, so later states are sent too."""
        return getattr(_import_openai(), kind)(
            base_url=self.base_url, api_key=self.api_key, default_headers=self.headers, http_client=http_client
        )

    def __repr__(self) -> str:  # must not show the key
        return f"Policy({self.base_url}, {self.model}, step {self.step})"


def read_outcome(value: Any, *, entry: str) -> Outcome:
    """Converts a rollout's return value (None, a number, a bool, or an Outcome) to an Outcome of plain data.

    Raises RolloutError for other types, because every rollout would fail. Raises AttemptError for values that may
    affect only this rollout: numbers that are not finite or exceed MAX_NUMBER, and metadata that JSON cannot represent.
    The conversion runs user code, which may raise anything.
    """
    outcome = value if isinstance(value, Outcome) else Outcome(reward=value)
    if not isinstance(outcome.metrics, dict) or not isinstance(outcome.metadata, dict):
        raise RolloutError(f"{entry}: metrics and metadata of an Outcome must be dicts")
    reward = None if outcome.reward is None else _number("reward", outcome.reward, entry)
    metrics = {
        str(name).encode(errors="replace").decode(): _number(f"metric {name!r}", number, entry)
        for name, number in outcome.metrics.items()
    }
    return Outcome(reward=reward, metrics=metrics, metadata=_plain(outcome.metadata, entry))


def _plain(metadata: Json, entry: str) -> Json:
    """Returns the metadata as a reader will load them from disk."""
    try:
        written = dump(metadata)
        plain: Json = load(written)
    except TypeError as error:
        raise RolloutError(f"{entry}: metadata must be plain JSON data: {error}") from error
    except ValueError as error:  # a lone surrogate, a circular dict, or a number with a thousand digits
        raise AttemptError("metadata", f"it cannot be written as JSON: {error}") from error
    if len(written) > MAX_METADATA_BYTES:
        size, limit = len(written) / 2**20, MAX_METADATA_BYTES / 2**20
        raise AttemptError(
            "metadata", f"it is {size:.1f} MiB as JSON; at most {limit:.0f} are kept: write it to a file"
        )
    if is_deep(plain):
        raise AttemptError("metadata", f"it cannot be written as JSON: it is nested more than {MAX_DEPTH} deep")
    return plain


def _number(name: str, value: Any, entry: str) -> float:
    if not isinstance(value, Real) and not hasattr(type(value), "__float__"):  # tensors and Decimals have `__float__`
        what = f"{entry}: {name} is {type(value).__name__} {value!r:.60}"
        raise RolloutError(f"{what}; a rollout returns a number, None or Outcome(reward=...)")
    try:
        number = float(value)
    except OverflowError:  # 10**400
        number = math.inf
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:  # a tensor of several elements
        raise AttemptError("reward", f"{name} is {type(value).__name__}, not a number: {error}") from error
    if not math.isfinite(number):
        raise AttemptError("reward", f"{name} is {number}, not a finite number")
    if abs(number) > MAX_NUMBER:
        raise AttemptError("reward", f"{name} is {number:g}; at most {MAX_NUMBER:g} can be averaged: scale it")
    return number
