"""Loader: makes the engine of a source. A base model is loaded once, however many policies stand on it.

Memory of the embedded engine: one base per (base, dtype, context, quantization); per policy an adapter and a cache of
keys and values, twice while the policy changes to another checkpoint. vLLM has its memory in another process.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic
import yaml

from art_cli.config.knobs import variants
from art_cli.config.schema import (
    AutoEngineConfig,
    EngineConfig,
    EngineSection,
    OwnEngineConfig,
    RunConfig,
    TinkerEngineConfig,
)
from art_cli.engines import Engine, make_engine
from art_cli.models import loading
from art_cli.models.policy_spec import PolicySpec, read_spec
from art_cli.runtime.errors import UsageError
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.served_model import Source, base_config

log = logging.getLogger(__name__)

# A user's own engine has no name to give on the command line; weights on another machine are downloaded to be served.
NOT_SERVED = (AutoEngineConfig, OwnEngineConfig, TinkerEngineConfig)
# Engines that load a checkpoint, by name.
ENGINES: dict[str, type[EngineSection]] = {
    kind: section
    for kind, section in variants(RunConfig, "engine").items()
    if issubclass(section, EngineSection) and section.can_train and section not in NOT_SERVED
}
# Settings of a run that would send prompts and a key to another server; `url` is the old name of `base_url`.
NEVER_TAKEN = ("url", "base_url", "api_key_env")
PROGRAMS = ("python", "args", "env")  # settings of a run's vLLM that decide which code runs
MAX_SHOWN = 160  # characters of those settings that an error quotes


@dataclass
class Loader:
    """Makes engines by one configuration. Example: Loader(EmbeddedEngineConfig(max_batch=256), logs=Path("logs"))"""

    config: EngineConfig
    logs: Path  # directory for the log of an engine's own process
    _bases: dict[tuple[str, str, int | None, str | None], loading.Weights] = field(default_factory=dict)

    @property
    def swaps_adapters(self) -> bool:
        """Whether its engines load another adapter while they answer requests with the old one."""
        return self.config.swaps_adapters

    async def make(self, source: Source) -> Engine:
        """Returns an engine that samples from the source. Raises ArtError if it cannot be loaded or run here."""
        read = self._weights if self.config.weights == "here" else _spec
        policy: loading.Weights | PolicySpec = await call_in_thread(read, source)
        engine = make_engine(self.config, policy, name=source.name, step=source.step, logs=self.logs)
        await engine.start()
        try:
            if self.config.weights != "here" and source.adapter is not None:
                await engine.load(source.adapter.resolve(), source.step)
        except BaseException:
            await engine.close()
            raise
        return engine

    def _weights(self, source: Source) -> loading.Weights:
        if (
            source.adapter is None and source.run is not None
        ):  # a checkpoint of all weights, which no other policy shares
            return self._load(source)
        key = (source.base, source.dtype, source.max_length, source.quantize)
        if key not in self._bases:
            self._bases[key] = self._load(source)
        return loading.on_base(self._bases[key], source.adapter)

    def _load(self, source: Source) -> loading.Weights:
        return loading.load_weights(base_config(source), source.base, named=source.named)


def _spec(source: Source) -> PolicySpec:
    return read_spec(base_config(source), source.base, adapter=source.adapter, named=source.named)


def check_trust(trained: Mapping[str, Any], knobs: Mapping[str, Any], *, place: Path) -> None:
    """Raises UsageError: the run's configuration, the file `place`, decides which code runs, and no knob overrides it.

    A run directory may be a stranger's, and its configuration is data. So its `engine.python`, `engine.args` and
    `engine.env` are used only if the user trusts the run.
    """
    if trained.get("name") != "vllm":
        return
    programs = {f"engine.{key}": trained[key] for key in PROGRAMS if trained.get(key) and key not in knobs}
    if programs:
        shown = ", ".join(f"{key}={json.dumps(value)}" for key, value in programs.items())
        shown = shown if len(shown) <= MAX_SHOWN else shown[:MAX_SHOWN] + "..."
        raise UsageError(
            f"{place}: would run vLLM with {shown}; add --trust if this run is yours, or leave its settings with "
            "--engine embedded or --set KEY=VALUE for each of these"
        )


def engine_config(name: str, knobs: Mapping[str, Any], trained: Mapping[str, Any]) -> EngineConfig:
    """Returns the engine's configuration: the one of its training run, if the engine is the same, with `knobs` over it.

    Raises UsageError: no such engine or knob, or an invalid value.
    """
    if name not in ENGINES:
        raise UsageError(f"--engine {name}: one of auto, {', '.join(ENGINES)}")
    settings = dict(trained) if trained.get("name") == name else {}
    settings = {key: value for key, value in settings.items() if key not in NEVER_TAKEN} | {"name": name}
    try:
        config: Any = ENGINES[name].model_validate({**settings, **knobs})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--set {'.'.join(map(str, first['loc']))}: {first['msg']} (engine {name})") from None
    engine: EngineConfig = config
    return engine


def read_knobs(knobs: Sequence[str]) -> dict[str, Any]:
    """{"max_batch": 256} for ["max_batch=256"]; values are YAML. Raises UsageError: no KEY=VALUE."""
    settings = {}
    for knob in knobs:
        key, separator, value = knob.partition("=")
        if not separator:
            raise UsageError(f"--set {knob}: expected KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings
