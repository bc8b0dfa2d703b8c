"""Engines at a foreign address: OpenAIEngine, any OpenAI-compatible endpoint, and AnthropicEngine, any of Messages.

They serve `art gateway`, `art generate` and `art eval`. They cannot be trained, but have a prompt. HostedEngine is what
both share. The key is read from the environment variable that the configuration names, and stays in memory.
"""

import asyncio
import os
from collections.abc import Callable
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
    """A foreign model at its own address; its step is always 0."""

    def __init__(self, config: HostedEngineConfig, connect: Callable[[str], HttpBackend]) -> None:
        """`connect` makes the backend for a key.

        Raises EngineError if the endpoint is not on this machine, and the environment has no key for it.
        """
        key = os.environ.get(config.api_key_env, "")
        if not key and urlsplit(config.base_url).hostname not in LOCAL:
            raise EngineError(f"engine.api_key_env: the environment variable {config.api_key_env} is not set")
        self._name = config.name
        self._http = connect(key or "none")
        self.endpoint = Endpoint(base_url=config.base_url, api_key=key or "none", model=config.model, step=0)

    @property
    def backend(self) -> Backend:
        return self._http

    async def start(self) -> None:
        """Raises EngineError: nothing listens there. Only this machine is tried; other hosts may need a proxy."""
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
        """Unknown, because the tokenizer is the server's."""

    async def sleep(self) -> None:
        """Does nothing, because the endpoint's memory is not ours."""

    async def wake(self) -> None:
        """Does nothing, because it never sleeps."""

    async def watch(self) -> NoReturn:
        """Raises nothing, because each call raises its failure."""
        await asyncio.Event().wait()
        raise AssertionError("this event is never set")

    async def close(self) -> None:
        await self._http.close()


class OpenAIEngine(HostedEngine):
    """An OpenAI-compatible endpoint."""

    def __init__(self, config: OpenAIEngineConfig) -> None:
        super().__init__(
            config, lambda key: HttpBackend(config.base_url, key, config.model, timeout_s=config.timeout_s)
        )

    @classmethod
    def of(cls, config: OpenAIEngineConfig, setup: EngineSetup) -> Self:
        return cls(config)


class AnthropicEngine(HostedEngine):
    """A foreign model at its own address; its step is always 0."""

    def __init__(self, config: AnthropicEngineConfig) -> None:
        """Raises EngineError if the endpoint is not on this machine, and the environment has no key for it."""

        def connect(key: str) -> AnthropicBackend:
            limits: Any = {"max_tokens": config.max_tokens, "timeout_s": config.timeout_s}
            return AnthropicBackend(config.base_url, key, config.model, **limits)

        super().__init__(config, connect)

    @classmethod
    def of(cls, config: AnthropicEngineConfig, setup: EngineSetup) -> Self:
        return cls(config)
