"""Engines at a foreign address: OpenAIEngine for OpenAI-compatible endpoints, AnthropicEngine for Messages endpoints.

They serve `art gateway`, `art generate` and `art eval`. They cannot be trained, but prompts can be optimized.
HostedEngine is their base class. The API key is read from the environment variable named in the configuration, and
stays in memory.
"""

import asyncio
import os
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import urlsplit

from art_cli.chat import Backend
from art_cli.chat.anthropic_client import AnthropicBackend
from art_cli.chat.client import LOCAL, HttpBackend
from art_cli.config.sections.engine_config import AnthropicEngineConfig, HostedEngineConfig, OpenAIEngineConfig
from art_cli.engines import Endpoint, EngineSetup
from art_cli.runtime.errors import EngineError

CONNECT_DEADLINE_S = 10.0


class HostedEngine:
    """A foreign model at a foreign address; its step is always 0."""

    def __init__(self, config: Any) -> None:
        """Raises EngineError if a remote endpoint's key is missing in the environment."""
        key = os.environ.get(config.api_key_env, "")
        if not key and urlsplit(config.base_url).hostname not in LOCAL:
            raise EngineError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set")
        self._name = config.name
        self._http = self._connect(config, key or "none")
        self.endpoint = Endpoint(base_url=config.base_url, api_key=key or "none", model=config.model, step=0)

    @classmethod
    def of(cls, config: HostedEngineConfig, setup: EngineSetup) -> Self:
        return cls(config)

    @staticmethod
    def _connect(config: Any, key: str) -> HttpBackend:
        raise NotImplementedError

    @property
    def backend(self) -> Backend:
        return self._http

    async def start(self) -> None:
        """Raises EngineError if nothing listens locally. Remote hosts are not tried, because they may need a proxy."""
        url = urlsplit(self.endpoint.base_url or "")
        if url.hostname not in LOCAL:
            return
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            async with asyncio.timeout(CONNECT_DEADLINE_S):
                _, writer = await asyncio.open_connection(url.hostname, port)
        except (OSError, TimeoutError) as error:
            raise EngineError(f"engine.base_url: nothing answers at {url.hostname}:{port}; start it") from error
        writer.close()
        await writer.wait_closed()

    async def load(self, checkpoint: Path, step: int) -> None:
        raise EngineError(
            f"{self.endpoint.model}: an endpoint of engine {self._name!r} cannot be trained; use 'embedded'"
        )

    async def score(self, token_ids: list[int]) -> list[float]:
        raise EngineError(f"{self.endpoint.model}: an endpoint of engine {self._name!r} cannot score given tokens")

    def longest_prompt(self) -> None:
        """Returns None, because only the server knows its tokenizer."""

    async def sleep(self) -> None:
        """Does nothing, because the endpoint's memory is not ours."""

    async def wake(self) -> None:
        """Does nothing, because the engine never sleeps."""

    async def watch(self) -> NoReturn:
        """Raises nothing, because each call raises its failure."""
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    async def close(self) -> None:
        await self._http.close()


class OpenAIEngine(HostedEngine):
    """An OpenAI-compatible endpoint."""

    @staticmethod
    def _connect(config: OpenAIEngineConfig, key: str) -> HttpBackend:
        return HttpBackend(config.base_url, key, config.model, timeout_s=config.timeout_s)


class AnthropicEngine(HostedEngine):
    """An Anthropic Messages endpoint."""

    @staticmethod
    def _connect(config: AnthropicEngineConfig, key: str) -> AnthropicBackend:
        limits: Any = {"max_tokens": config.max_tokens, "timeout_s": config.timeout_s}
        return AnthropicBackend(config.base_url, key, config.model, **limits)
