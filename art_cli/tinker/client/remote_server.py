"""RemoteServer: the address of a server of the Tinker protocol, and its capabilities. Plain HTTP, no SDK."""

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from art_cli.chat.client import LOCAL
from art_cli.config.schema import TinkerEngineConfig
from art_cli.runtime.errors import RemoteError, one_line, printable

if TYPE_CHECKING:
    import httpx

ASK_S = 15.0  # longest wait for an answer that needs no computing
ALIVE_S = 5.0
AGAIN_S = 10.0  # how long a server that is just starting, or whose connection breaks, is asked again
PAUSE_S = 0.5
PASSING = (408, 429, 500, 502, 503, 504)  # statuses that may pass: a proxy's while its server starts, a full server's
MAX_ANSWER = 2**20  # bytes of such an answer
NO_SERVER = "no server of the Tinker protocol answers there"
ANY_KEY = "tml-any"  # the SDK wants a key, also for a server on this machine that asks for none


class SupportedModel(msgspec.Struct):
    """One base model of a server. Only `art backend` sends the last two."""

    model_name: str
    max_context_length: int | None = (
        None  # tokens of prompt and reply together, or None if the server does not report it
    )
    loss_fn_inputs: list[str] = []  # numbers that a datum may bring beside those of its loss (tinker/server/passes.py)
    is_lora: bool = True  # False: all weights are trained, a copy for each client


class _Capabilities(msgspec.Struct):
    supported_models: list[SupportedModel]


@dataclass(frozen=True)
class RemoteServer:
    """The address of a server, and the key for it.

    Example: RemoteServer("http://gpu:8100", "tml-...", "TINKER_API_KEY")
    """

    url: str
    key: str = field(repr=False)
    key_name: str  # the environment variable that holds the key, for messages

    def capabilities(self) -> list[SupportedModel]:
        """Returns the base models that it trains. After a broken connection or a full server's refusal it asks again.

        Raises RemoteError if it cannot be asked.
        """
        end = time.monotonic() + AGAIN_S
        while True:
            try:
                status, body = self._get("/api/v1/get_server_capabilities")
            except _transport_errors() as error:
                if time.monotonic() >= end or _is_refused(error):
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
        """Returns status and body of an answer. Raises RemoteError if it is too long, and httpx's errors."""
        with self._client(ASK_S) as client, client.stream("GET", path) as answer:
            body = b""
            for part in answer.iter_bytes():
                body += part
                if len(body) > MAX_ANSWER:
                    raise RemoteError(f"{self.url}: {NO_SERVER}: its answer is longer than {MAX_ANSWER} bytes")
        return answer.status_code, body

    def find_model(self, name: str) -> SupportedModel:
        """Returns the base model of that name. Raises RemoteError if it has none or cannot be asked."""
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
        """Returns whether it answers at all."""
        import httpx

        try:
            with self._client(ALIVE_S) as client:
                return client.get("/api/v1/healthz").status_code < 500
        except (httpx.HTTPError, OSError):
            return False

    def tell(self, path: str, fields: dict[str, object]) -> bool:
        """Sends what needs no answer. Whether the server took it."""
        import httpx

        try:
            with self._client(ALIVE_S) as client:
                return client.post(f"/api/v1/{path}", json=fields).status_code == 200
        except (httpx.HTTPError, OSError):
            return False

    def refused_key(self) -> str:
        return f"{self.url}: it refused the key; set the environment variable {self.key_name} to the server's"

    def _client(self, timeout_s: float) -> "httpx.Client":
        import httpx

        return httpx.Client(
            base_url=self.url,
            headers={"X-API-Key": self.key},
            timeout=timeout_s,
            trust_env=not is_local(self.url),  # a proxy of the network does not know this machine's ports
        )


def find_server(config: TinkerEngineConfig) -> RemoteServer:
    """Returns the configured server. Raises RemoteError if there is no key for it, or none that the SDK takes."""
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


def _transport_errors() -> tuple[type[Exception], ...]:
    import httpx

    return httpx.HTTPError, httpx.InvalidURL, OSError


def _is_refused(error: Exception) -> bool:
    """Returns whether nothing listens or the address cannot be, so that asking again would hide a wrong address."""
    import httpx

    return isinstance(error, httpx.ConnectError | httpx.InvalidURL | httpx.UnsupportedProtocol)
