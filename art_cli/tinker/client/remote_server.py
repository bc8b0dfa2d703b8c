"""RemoteServer: address and capabilities of a Tinker server, through plain HTTP without the SDK.

RemoteSession: a session of the official SDK with a deadline for every wait. After a lost reply, the SDK resends the
request under the same number, so the server runs it once. The SDK retries for minutes or forever. Here, waiting stops
at the deadline, or earlier if the server does not respond at all for GONE_S. The SDK keeps an event loop thread alive
as long as the process.
"""

import asyncio
import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from art_cli.chat.client import LOCAL
from art_cli.config.schema import TinkerEngineConfig
from art_cli.runtime.errors import RemoteError, describe, one_line, printable
from art_cli.runtime.secrets import find_secrets
from art_cli.runtime.threads import start_in_thread

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

ASK_S = 15.0  # timeout for requests without computation
ALIVE_S = 5.0
AGAIN_S = 10.0  # retry period for servers that are starting and for broken connections
PAUSE_S = 0.5
PASSING = (408, 429, 500, 502, 503, 504)  # transient statuses, from a starting server's proxy or a full server
MAX_ANSWER = 2**20  # maximum bytes of a capabilities answer
NO_SERVER = "no server of the Tinker protocol answers there"
ANY_KEY = "tml-any"  # the SDK requires a key even for local servers that need none
OLDEST = (0, 24, 1)  # oldest SDK version with all features used here
PROBE_S = 10.0  # interval between checks whether a silent server still responds
GONE_S = 60.0  # a server counts as lost after this much silence
# the server's message inside the SDK's report of a failed request
_WRAPPED = re.compile(r"Request failed: (.*) for self\.request_id=.*", re.DOTALL)
EXTRA = "pip install 'art-cli[tinker]'"


class SupportedModel(msgspec.Struct):
    """A server's base model. Only `art backend` sends the last two fields."""

    model_name: str
    max_context_length: int | None = None  # prompt and reply tokens together; None if not reported
    loss_fn_inputs: list[str] = []  # optional inputs of a datum apart from the loss inputs (tinker/server/passes.py)
    is_lora: bool = True  # False: trains all weights, with a separate copy per client


class _Capabilities(msgspec.Struct):
    supported_models: list[SupportedModel]


@dataclass(frozen=True)
class RemoteServer:
    """A server's address and key. Example: RemoteServer("http://gpu:8100", "tml-...", "TINKER_API_KEY")"""

    url: str
    key: str = field(repr=False)
    key_name: str  # name of the key's environment variable, for messages

    def capabilities(self) -> list[SupportedModel]:
        """Returns the server's base models. Retries broken connections and full servers. Raises RemoteError."""
        import httpx

        hopeless = (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol)  # retrying hides a wrong address
        end = time.monotonic() + AGAIN_S
        while True:
            try:
                status, body = self._get("/api/v1/get_server_capabilities")
            except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                if time.monotonic() >= end or isinstance(error, hopeless):
                    reason = one_line(error, limit=120)
                    raise RemoteError(
                        f"{self.url}: nothing answers ({reason}); start it, or mend engine.base_url"
                    ) from None
            else:
                if status not in PASSING or time.monotonic() >= end:
                    break
            time.sleep(PAUSE_S)
        if status in (401, 403):
            raise RemoteError(self.refused_key())
        if status != 200:
            raise RemoteError(f"{self.url}: {NO_SERVER}: status {status}")
        try:
            return msgspec.json.decode(body, type=_Capabilities).supported_models
        except (ValueError, RecursionError) as error:
            raise RemoteError(f"{self.url}: {NO_SERVER}: {one_line(error)}") from None

    def _get(self, path: str) -> tuple[int, bytes]:
        """Returns status and body. Raises RemoteError for oversized answers, and httpx errors."""
        with self._client(ASK_S) as client, client.stream("GET", path) as answer:
            body = b""
            for part in answer.iter_bytes():
                body += part
                if len(body) > MAX_ANSWER:
                    raise RemoteError(f"{self.url}: {NO_SERVER}: its answer is longer than {MAX_ANSWER} bytes")
        return answer.status_code, body

    def find_model(self, name: str) -> SupportedModel:
        """Returns the base model with this name. Raises RemoteError if the server lacks it or is unreachable."""
        models = self.capabilities()
        for model in models:
            if model.model_name == name:
                return model
        there = ", ".join(repr(printable(model.model_name, limit=200)) for model in models[:10]) or "none"
        raise RemoteError(
            f"{self.url}: it has no base model {name!r}; it has: {there}. engine.base_model names one where it is "
            "called otherwise than in model.base"
        )

    def is_alive(self) -> bool:
        return 0 < self._status("GET", "healthz") < 500

    def tell(self, path: str, fields: dict[str, object]) -> bool:
        """Sends a request whose answer does not matter. Returns True if the server accepted it."""
        return self._status("POST", path, fields) == 200

    def _status(self, method: str, path: str, fields: dict[str, object] | None = None) -> int:
        """Returns the answer's status; 0 if the connection fails."""
        import httpx

        try:
            with self._client(ALIVE_S) as client:
                return client.request(method, f"/api/v1/{path}", json=fields).status_code
        except (httpx.HTTPError, OSError):
            return 0

    def refused_key(self) -> str:
        return f"{self.url}: it refused the key; set the environment variable {self.key_name} to the server's"

    def _client(self, timeout_s: float) -> "httpx.Client":
        import httpx

        return httpx.Client(
            base_url=self.url,
            headers={"X-API-Key": self.key},
            timeout=timeout_s,
            trust_env=not is_local(self.url),  # network proxies cannot reach this machine's ports
        )


def find_server(config: TinkerEngineConfig) -> RemoteServer:
    """Returns the configured server. Raises RemoteError if the key is missing or the SDK rejects its format."""
    return server_at(config.base_url, config.api_key_env)


def server_at(url: str, key_name: str) -> RemoteServer:
    key = os.environ.get(key_name, "")
    if not key and not is_local(url):
        raise RemoteError(f"the environment variable {key_name} is not set, which holds the key of {url}")
    if key and not key.startswith(("tml-", "eyJ")):
        raise RemoteError(
            f"{key_name}: the SDK tinker takes only keys that begin with tml-; give the server such a key"
        )
    return RemoteServer(url.rstrip("/"), key or ANY_KEY, key_name)


def is_local(url: str) -> bool:
    return urlsplit(url).hostname in LOCAL


class RemoteSession:
    """A session. `types` is the SDK's types module. Failures raise RemoteError without revealing the key."""

    def __init__(self, server: RemoteServer, *, timeout_s: float) -> None:
        self.server, self._timeout_s = server, timeout_s
        self._sdk = load_sdk()
        self.types = self._sdk.types
        self._secrets = find_secrets({}, values=[server.key], urls=[server.url])
        server.capabilities()  # the SDK would retry a wrong address for minutes
        self._service: Any = self._sdk.ServiceClient(base_url=server.url, api_key=server.key)
        self.session = str(self.call("a session", lambda: self._service.holder.get_session_id()))

    # --- clients ------------------------------------------------------------------------------------------------------

    def new_trainer(self, base: str, *, rank: int, seed: int, attention: bool, mlp: bool) -> Any:
        return self.call(
            "a new adapter",
            lambda: self._service.create_lora_training_client(
                base_model=base, rank=rank, seed=seed, train_attn=attention, train_mlp=mlp, train_unembed=False
            ),
        )

    def saved_trainer(self, path: str, *, optimizer: bool = True) -> Any:
        """Returns a training client that continues from a saved state."""
        service = self._service
        make = service.create_training_client_from_state
        if optimizer:
            make = service.create_training_client_from_state_with_optimizer
        return self.call(f"the saved state {path}", lambda: make(path))

    def sampler(self, *, path: str | None = None, base: str | None = None) -> Any:
        """Returns a sampling client for saved weights or the base model."""
        what = f"the saved weights {path}" if path else f"the base model {base}"
        make = self._service.create_sampling_client
        return self.call(what, lambda: make(model_path=path) if path else make(base_model=base))

    # --- waiting ------------------------------------------------------------------------------------------------------

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Runs the function in a thread and returns its result. If the result is a future, waits for it."""

        def run() -> Any:
            result = function()
            return result.result() if hasattr(type(result), "result") else result

        return self.wait(start_in_thread(run), what)

    def wait(self, future: Any, what: str) -> Any:
        plain, waiting = _plain(future), _Waiting(self.server, what, self._timeout_s)
        while True:
            try:
                return plain.result(timeout=waiting.next_s())
            except TimeoutError as error:
                if plain.done():
                    raise self._told(error, what) from None
                waiting.check()
            except Exception as error:  # the boundary to the SDK
                raise self._told(error, what) from None

    async def wait_async(self, future: Any, what: str) -> Any:
        """Async version of `wait`. Cancellation abandons the request."""
        wrapped, waiting = asyncio.wrap_future(_plain(future)), _Waiting(self.server, what, self._timeout_s)
        try:
            while not wrapped.done():
                await asyncio.wait({wrapped}, timeout=waiting.next_s())
                if not wrapped.done():
                    await asyncio.to_thread(waiting.check)
            return wrapped.result()
        except RemoteError:
            raise
        except Exception as error:  # the boundary to the SDK
            raise self._told(error, what) from None
        finally:
            wrapped.cancel()

    def close(self) -> None:
        """Ends the session, so the server unloads its adapters. Saved weights remain."""
        if hasattr(self._service, "close"):
            try:
                self.call("the end of the session", lambda: self._service.close("success"))
            except RemoteError as error:
                log.debug("%s", error)
        else:  # SDK 0.24.1
            self.server.tell(f"sessions/{self.session}/finish", {"reason": {"type": "success"}})

    def _told(self, error: Exception, what: str) -> RemoteError:
        sdk, url = self._sdk, self.server.url
        if isinstance(error, RemoteError):
            return error
        if isinstance(error, sdk.AuthenticationError | sdk.PermissionDeniedError):
            return RemoteError(self.server.refused_key())
        cause = error
        while isinstance(cause.__cause__, Exception):  # the SDK's "a previous request failed" hides the reason
            cause = cause.__cause__
        if isinstance(cause, sdk.APIConnectionError):
            return RemoteError(f"{url}: the connection was lost ({what}); start it again, and continue")
        if _is_other_version(cause):
            return RemoteError(
                f"{url}: its protocol version differs from tinker {_version(sdk)} here ({what}); "
                "docs/backend.md lists versions that work together"
            )
        if isinstance(cause, sdk.NotFoundError) or "was never sent" in str(cause):
            return RemoteError(
                f"{url}: it no longer has this run's session ({what}), as after a restart; run the same command "
                "again, and the run continues from its last checkpoint"
            )
        message = _WRAPPED.sub(r"\1", str(getattr(cause, "message", "")) or describe(cause))
        message = printable(self._secrets.redact(message), limit=600)
        is_users = isinstance(cause, sdk.BadRequestError | sdk.RequestFailedError | sdk.UnprocessableEntityError)
        return RemoteError(f"{url}: {what}: {' '.join(message.split())}", is_final=not is_users)


class _Waiting:
    """Deadline and server silence of a single wait."""

    def __init__(self, server: RemoteServer, what: str, timeout_s: float) -> None:
        self._server, self._what, self._timeout_s = server, what, timeout_s
        self._end = time.monotonic() + timeout_s
        self._silent_since: float | None = None

    def next_s(self) -> float:
        return max(0.0, min(PROBE_S, self._end - time.monotonic()))

    def check(self) -> None:
        """Raises RemoteError on timeout or if the server is lost."""
        now = time.monotonic()
        if self._server.is_alive():
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= GONE_S:
            raise RemoteError(f"{self._server.url}: it has not answered for {GONE_S:.0f} s ({self._what}); is it gone?")
        if now >= self._end:
            raise RemoteError(
                f"{self._server.url}: {self._what} was not there within {self._timeout_s:g} s (engine.timeout_s); the "
                "server is slow, or full"
            )


def load_sdk() -> Any:
    """Imports the SDK and turns its telemetry off. Raises RemoteError if it is not installed or too old."""
    os.environ["TINKER_TELEMETRY"] = "0"
    # The SDK keeps warning about missed heartbeats. Our waits already raise when a server stops responding.
    logging.getLogger("tinker.lib.internal_client_holder").setLevel(logging.ERROR)
    try:
        sdk = import_module("tinker")
    except ImportError:
        raise RemoteError(f"the package tinker is not installed: {EXTRA}") from None
    with contextlib.suppress(ImportError):
        states: Any = import_module("tinker.lib.queue_state_logger")
        if hasattr(states, "PAUSE_GRACE_PERIOD"):
            states.PAUSE_GRACE_PERIOD = 0  # otherwise the SDK prints, after 15 minutes, why a full server lets it wait
    found = _version(sdk)
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        raise RemoteError(f"tinker {found} is too old, 0.24.1 is needed: {EXTRA}")
    return sdk


def _version(sdk: Any) -> str:
    return str(sdk.__version__) if hasattr(sdk, "__version__") else version("tinker")


def _is_other_version(error: Exception) -> bool:
    """Returns True if SDK and server cannot read each other's messages."""
    said = str(error)
    return (
        getattr(error, "status_code", None) in (415, 422)  # SkyRL's answers for JSON and for unknown requests
        or "which this SDK version only supports as proto" in said
        or "always carry sample_sequence_ids" in said  # SDKs since 0.26 need fields that older servers omit
    )


def _plain(future: Any) -> Future[Any]:
    """Returns the concurrent.futures.Future behind an SDK future."""
    plain = future.future() if hasattr(future, "future") else future
    assert isinstance(plain, Future), type(plain)
    return plain
