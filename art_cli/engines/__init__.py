"""What samples from the policy: the Engine protocol and the table of built-ins.

An engine owns an endpoint (OpenAI-compatible, loopback unless it is somebody else's) and knows which step's weights it
samples from. It speaks in plain data (paths, numbers, token ids), so that it can be another process or another machine.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from art_cli.chat import Backend

BUILT_INS = {
    "embedded": "art_cli.engines.embedded.engine:EmbeddedEngine",
    "openai": "art_cli.engines.openai:OpenAIEngine",
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a policy answers, and as which step.

    Example: Endpoint(base_url="http://127.0.0.1:41233/v1", api_key="sk-...", model="tictactoe", step=3)
    """

    base_url: str | None  # None: only inside this process, through `Engine.backend`
    api_key: str
    model: str
    step: int

    def __repr__(self) -> str:  # never the key
        return f"Endpoint({self.base_url}, {self.model}, step {self.step})"


class Engine(Protocol):
    """Samples from one policy at one step at a time. Every wait inside has a deadline; failures raise EngineError."""

    endpoint: Endpoint
    backend: Backend  # answers requests in this process; the gateway's upstream

    async def start(self) -> None:
        """Ready to answer when it returns."""
        ...

    async def load(self, checkpoint: Path, step: int) -> None:
        """Samples from `step` when it returns: cached prefixes of other weights are gone, `endpoint.step` is `step`."""
        ...

    async def score(self, token_ids: list[int]) -> list[float]:
        """[L - 1] logprobs in nats of each token after the first, temperature 1: the probe of contract 5."""
        ...

    async def close(self) -> None: ...
