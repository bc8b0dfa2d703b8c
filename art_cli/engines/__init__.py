"""Engines, which sample from the policy: the Engine protocol and the table of built-ins.

An engine owns an endpoint (OpenAI-compatible, on loopback unless it is foreign) and knows which step's weights it
samples from. It speaks in plain data (paths, numbers, token ids), so that it can be another process or another machine.

A new engine is its own file, a section in config/sections/engine_config.py and a line of BUILT_INS here. A user's
is a class in a file beside the configuration, `engine: {entry: "mine.py:MyEngine", options: {...}}`, made as
`MyEngine(setup)` and used through the Engine protocol; its class attributes are its EngineTraits.
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
from art_cli.models.loading import Weights
from art_cli.models.policy_spec import PolicySpec, spec_of
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
    """The address where a policy answers, and its step.

    Example: Endpoint(base_url="http://127.0.0.1:41233/v1", api_key="sk-...", model="tictactoe", step=3)
    """

    base_url: str | None  # or None if it answers only in this process, by `Engine.backend`
    api_key: str
    model: str
    step: int

    def __repr__(self) -> str:  # never the key
        return f"Endpoint({self.base_url}, {self.model}, step {self.step})"


class Engine(Protocol):
    """Samples from one policy at one step at a time. Every wait inside has a deadline; failures raise EngineError.

    It may have further methods: `async def occupancy(self) -> EngineLoad | None`, that `rollout.concurrency: auto`
    follows, and `async def score_replicas(self, token_ids) -> list[list[float]]`, the scores of each of its replicas.
    """

    endpoint: Endpoint
    backend: Backend  # answers requests in this process; the gateway's upstream

    async def start(self) -> None:
        """Ready to answer when it returns."""

    async def load(self, checkpoint: Path, step: int) -> None:
        """Samples from `step` when it returns: cached prefixes of other weights are gone, `endpoint.step` is `step`."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of the tokens after the first, at temperature 1, as the learner's."""

    def longest_prompt(self) -> int | None:
        """Returns the most characters of a prompt within the context, or None if unknown. `art serve` asks."""

    async def sleep(self) -> None:
        """Frees the memory that a learner on the same device needs; nothing is sampled until `wake`."""

    async def wake(self) -> None:
        """Samples again."""

    async def watch(self) -> NoReturn:
        """Never returns; raises EngineError once the engine can answer no more, so that no caller waits forever."""

    async def close(self) -> None: ...


class EngineTraits(NamedTuple):
    """An engine's abilities, as attributes of a built-in's section or of a user's class."""

    can_train: bool = True  # False: its model is its own, and no checkpoint can be loaded into it
    swaps_adapters: bool = False  # it loads another adapter while it still answers with the one before
    enforces_formats: bool = False  # replies obey `response_format` and forced tool calls; False: those are refused
    # "here": it samples from `EngineSetup.weights` in this process. "process": it loads checkpoints of this machine.
    # "server": it samples where the learner trains, and has the weights of every checkpoint already.
    weights: WeightsAt = "process"


@dataclass(frozen=True)
class EngineSetup:
    """The argument that an engine is made with: `Class(setup)`."""

    options: Mapping[str, Any]  # the engine's own section of the configuration; of a user's, what is below `options`
    policy: PolicySpec | None  # or None if the engine brings its model
    name: str  # the policy's name for clients
    step: int  # where the policy stands before the first `load`
    logs: Path  # directory in which a process of its own writes its log
    weights: Weights | None = None  # only for an engine that needs them
    shares_weights: bool = True  # a learner in this process changes these very weights, so that `load` reads nothing


def engine_traits(config: EngineConfig, directory: Path) -> EngineTraits:
    """Returns the traits of the configured engine. Raises UsageError if the user's class cannot be imported."""
    owner: Any = plugins.resolve(config.entry, base=directory) if isinstance(config, OwnEngineConfig) else config
    defaults = EngineTraits()
    if getattr(owner, "needs_weights", False):  # the name of `weights = "here"` in classes of older projects
        defaults = defaults._replace(weights="here")
    traits: dict[str, Any] = {name: getattr(owner, name, default) for name, default in defaults._asdict().items()}
    if traits["weights"] not in get_args(WeightsAt):  # an attribute of the same name in a user's class
        traits["weights"] = defaults.weights
    return EngineTraits(**traits)


def own_model(config: EngineConfig, directory: Path) -> str:
    """Returns a digest of what an engine that brings its model asks and where, as no proof tells its attempts from
    another's; "" for one that loads checkpoints."""
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
) -> Engine:
    """Returns the engine of a configuration, not started yet. Raises EngineError if it cannot be made here.

    `policy` is the policy's weights in this process, or what is known of it; None for an engine that brings
    its model. A user's own engine is looked up in `directory`.
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
