"""AnthropicEngine: any endpoint of Anthropic's Messages, for `art gateway`, `art generate` and `art eval`."""

from typing import Any, Self

from art_cli.chat.anthropic_client import AnthropicBackend
from art_cli.config.sections.engine_config import AnthropicEngineConfig
from art_cli.engines import EngineSetup
from art_cli.engines.openai_endpoint import HostedEngine


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
