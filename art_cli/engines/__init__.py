"""What samples from the policy: the Engine protocol and the table of built-ins.

An engine owns an endpoint (OpenAI-compatible, loopback unless it is somebody else's) and knows which step's weights it
samples from. It speaks in plain data (paths, numbers, token ids), so that it can be another process or another machine.
"""

import pkgutil
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from art_cli.chat import Backend
from art_cli.config.schema import EmbeddedEngineConfig, EngineConfig, VllmEngineConfig
from art_cli.engines.vllm.arguments import ServedModel, served_model
from art_cli.errors import EngineError
from art_cli.model import Weights

BUILT_INS = {
    "embedded": "art_cli.engines.embedded.engine:EmbeddedEngine",
    "openai": "art_cli.engines.openai:OpenAIEngine",
    "vllm": "art_cli.engines.vllm.engine:VllmEngine",
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

    def longest_prompt(self) -> int | None:
        """The number of characters that no prompt within the context exceeds; None: this engine cannot tell."""
        ...

    async def rest(self) -> None:
        """Lets go of the memory that a learner on the same device needs; nothing is sampled until `wake`."""
        ...

    async def wake(self) -> None:
        """Samples again."""
        ...

    async def watch(self) -> NoReturn:
        """Returns never: raises EngineError once the engine can answer no more. For whoever waits for answers."""
        ...

    async def close(self) -> None: ...


def make_engine(
    config: EngineConfig,
    weights: Weights | ServedModel | None,
    *,
    name: str,
    step: int = 0,
    logs: Path,
    shares_weights: bool = True,
) -> Engine:
    """The engine of a configuration, not started yet. Raises EngineError: it cannot be made here.

    `weights` are those that an engine inside this process samples from, and a learner there may change; vLLM serves
    their base model and the adapters it is told to load, and needs no weights here where it is told what to serve.
    None: for an engine that brings its own. `shares_weights`: a learner here moves these very weights, so that a load
    has nothing to read. `name` is what its policy is called, `logs` where a process of its own
    writes.
    """
    if config.name not in BUILT_INS:
        raise EngineError(f"engine {config.name} is not settled; loop.choice.settle says which engine that is here")
    make = pkgutil.resolve_name(BUILT_INS[config.name])
    if isinstance(config, EmbeddedEngineConfig):
        assert isinstance(weights, Weights), "the embedded engine samples from weights in this process"
        engine: Engine = make(weights, name=name, config=config, step=step, shares_weights=shares_weights)
    elif isinstance(config, VllmEngineConfig):
        assert weights is not None, "vLLM serves the base model of weights in this process, or what it is told to"
        model = weights if isinstance(weights, ServedModel) else served_model(weights)
        engine = make(config, model, name=name, step=step, logs=logs)
    else:
        engine = make(config)
    return engine
