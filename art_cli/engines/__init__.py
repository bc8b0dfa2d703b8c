"""Engines, which sample from the policy: the Engine protocol and the table of built-ins.

An engine owns an endpoint (OpenAI-compatible, on loopback unless it is foreign) and knows which step's weights it
samples from. Its interface is plain data (paths, numbers, token ids), so engines can run in separate processes and on
remote machines.

To add an engine, write a module, a section in config/sections/engine_config.py and an entry in BUILT_INS here. Users
can name a class in a file next to the configuration: `engine: {entry: "mine.py:MyEngine", options: {...}}`. It is
constructed as `MyEngine(setup)` and used through the Engine protocol. Its class attributes are its EngineTraits.
"""

import hashlib
import json
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, get_args

import msgspec

from art_cli.chat import Backend
from art_cli.config.schema import EngineConfig, OwnEngineConfig
from art_cli.config.sections.base_config import WeightsAt
from art_cli.models.policy_spec import PolicySpec, spec_of
from art_cli.models.weights import Weights
from art_cli.runtime import plugins
from art_cli.runtime.errors import ArtError, EngineError, one_line

BUILT_INS = {
    "anthropic": "art_cli.engines.openai_endpoint:AnthropicEngine",
    "embedded": "art_cli.engines.embedded.embedded_engine:EmbeddedEngine",
    "openai": "art_cli.engines.openai_endpoint:OpenAIEngine",
    "tinker": "art_cli.tinker.tinker_engine:TinkerEngine",
    "vllm": "art_cli.engines.vllm.vllm_engine:VllmEngine",
}


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a policy, and the step it serves.

    Example: Endpoint(base_url="http://127.0.0.1:41233/v1", api_key="sk-...", model="tictactoe", step=3)
    """

    base_url: str | None  # None when only `Engine.backend` can reach it
    api_key: str
    model: str
    step: int

    def __repr__(self) -> str:  # never the key
        return f"Endpoint({self.base_url}, {self.model}, step {self.step})"


class Engine(Protocol):
    """Samples from one policy at one step at a time. Every wait inside has a deadline; failures raise EngineError.

    Three methods are optional: `async def occupancy(self) -> EngineLoad | None`, used by `rollout.concurrency: auto`;
    `async def score_replicas(self, token_ids) -> list[list[float]]`, which returns scores per replica; and `def
    beside(self, policy: PolicySpec, *, name: str, step: int) -> Engine | None`, which returns an engine for another
    policy in the same server, or None if there is no room.
    """

    endpoint: Endpoint
    backend: Backend  # answers requests in this process; the gateway's upstream

    async def start(self) -> None:
        """Returns once the engine can answer requests."""

    async def load(self, checkpoint: Path, step: int) -> None:
        """Switches to the weights of `step`, drops cached prefixes of older weights and updates `endpoint.step`."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats for every token except the initial one, at temperature 1."""

    def longest_prompt(self) -> int | None:
        """Returns how many characters a prompt can have at most. `art serve` asks for it."""

    async def sleep(self) -> None:
        """Frees memory for a learner on the same device. Sampling pauses until `wake`."""

    async def wake(self) -> None:
        """Resumes sampling."""

    async def watch(self) -> NoReturn:
        """Never returns. Raises EngineError when the engine can no longer answer, so callers do not wait forever."""

    async def close(self) -> None: ...


class EngineTraits(NamedTuple):
    """Engine capabilities, read from attributes on the config section or the user's class."""

    can_train: bool = True  # False: it brings a fixed model and cannot load checkpoints
    swaps_adapters: bool = False  # can load a new adapter while still answering with the previous adapter
    enforces_formats: bool = False  # whether `response_format` and forced tool calls work; if not, they are rejected
    # "here": samples from `EngineSetup.weights` in this process. "process": loads checkpoints from local disk.
    # "server": samples where the learner trains, with every checkpoint's weights already in place.
    weights: WeightsAt = "process"


@dataclass(frozen=True)
class EngineSetup:
    """Constructor argument of an engine: `Class(setup)`."""

    options: Mapping[str, Any]  # the engine's config section; for a user's class, the contents of `options`
    policy: PolicySpec | None  # None when the engine brings a fixed model
    name: str  # the policy's name for clients
    step: int  # the policy's step before `load` is called
    logs: Path  # directory for log files of child processes
    weights: Weights | None = None  # set only if the engine's `weights` trait is "here"
    shares_weights: bool = True  # whether a learner in this process updates these weights; then `load` reads nothing
    num_policies: int = 1  # policies for which `beside` is to have room, this engine's included


def engine_traits(config: EngineConfig, directory: Path) -> EngineTraits:
    """Returns the configured engine's traits. Raises UsageError if the user's class cannot be imported."""
    owner: Any = plugins.resolve(config.entry, base=directory) if isinstance(config, OwnEngineConfig) else config
    defaults = EngineTraits()
    traits: dict[str, Any] = {name: getattr(owner, name, default) for name, default in defaults._asdict().items()}
    if traits["weights"] not in get_args(WeightsAt):  # a user's class may use this attribute name for something else
        traits["weights"] = defaults.weights
    return EngineTraits(**traits)


def own_model(config: EngineConfig, directory: Path) -> str:
    """Returns a digest identifying the fixed model behind an engine; "" if the engine loads checkpoints.

    Such a model has no weight proof, so only this digest distinguishes its attempts from another model's.
    """
    if engine_traits(config, directory).can_train:
        return ""
    named = {"name", "model", "base_url", "entry", "options"}
    text = json.dumps(config.model_dump(mode="json", include=named), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def make_engine(
    config: EngineConfig,
    policy: Weights | PolicySpec | None,
    *,
    name: str,
    step: int = 0,
    logs: Path,
    directory: Path = Path(),
    shares_weights: bool = True,
    num_policies: int = 1,
) -> Engine:
    """Returns the configured engine, not started yet. Raises EngineError if it cannot be constructed here.

    `policy` is the policy's weights in this process or its spec; None if the engine brings a fixed model. A user's
    engine class is resolved relative to `directory`.
    """
    if config.name not in BUILT_INS and not isinstance(config, OwnEngineConfig):
        raise EngineError(f"engine {config.name} is not resolved; call loop.decide.decide_engine first")
    weights = policy if isinstance(policy, Weights) else None
    traits = engine_traits(config, directory)
    assert weights is not None or traits.weights != "here", f"engine {config.name} needs weights in this process"
    setup = EngineSetup(
        options=config.options if isinstance(config, OwnEngineConfig) else dict(config),
        policy=spec_of(policy) if isinstance(policy, Weights) else policy,
        name=name,
        step=step,
        logs=logs,
        weights=weights if traits.weights == "here" else None,
        shares_weights=shares_weights,
        num_policies=num_policies,
    )
    if isinstance(config, OwnEngineConfig):
        return _own_engine(config.entry, setup, directory)
    engine: Engine = pkgutil.resolve_name(BUILT_INS[config.name]).of(config, setup)
    return engine


def _own_engine(entry: str, setup: EngineSetup, directory: Path) -> Engine:
    try:
        engine: Engine = plugins.resolve(entry, base=directory)(setup)
    except ArtError:
        raise
    except Exception as error:  # the boundary to the user's code
        raise EngineError(f"engine.entry: {entry}: {type(error).__name__}: {one_line(error)}") from error
    return engine
