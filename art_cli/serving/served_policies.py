"""ServedPolicy: a model name, its engine and checkpoint changes. Policies: all served policies. Loader: creates
engines.

A checkpoint change drops no requests, and no reply mixes two checkpoints: running requests finish on the old
checkpoint, and later requests use the new checkpoint. vLLM supports this directly, because each step's adapter has a
separate name. Other engines exist twice during a change. The new engine is ready before it receives requests, and the
old engine is closed after its last request. If a checkpoint cannot be loaded, nothing changes. A policy that follows a
run changes when the run's preferred checkpoint changes.

Loader creates the engine for a source. Memory of embedded engines: a base model per (base, dtype, context,
quantization), shared by its policies; and per policy an adapter and a KV cache, doubled during a checkpoint change.
vLLM uses memory in a separate process. Policies on one base share its vLLM server.
"""

import asyncio
import contextlib
import json
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pydantic
import yaml

from art_cli.chat import Backend
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.requests import Request, with_defaults
from art_cli.config.overrides import variants
from art_cli.config.schema import (
    AutoEngineConfig,
    EngineConfig,
    EngineSection,
    OwnEngineConfig,
    RunConfig,
    TinkerEngineConfig,
)
from art_cli.config.sections.engine_config import HOSTED
from art_cli.engines import Engine, make_engine
from art_cli.engines.proof import WeightProof
from art_cli.models.adapters import on_base
from art_cli.models.base_files import base_digest
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import PolicySpec, origin_of, rank_of, read_spec
from art_cli.models.tokenizer import templated_tokenizer
from art_cli.models.weights import Weights
from art_cli.runs import run_checkpoints
from art_cli.runs.manifest import read_manifest
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.run_dir import RunDir
from art_cli.runs.served import read_served
from art_cli.runtime.errors import ArtError, UsageError, describe
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.middleware import Meter
from art_cli.serving.served_model import Source, base_config, of_checkpoint

log = logging.getLogger(__name__)

# The command line cannot name a user's own engine. Weights on another machine are downloaded for serving.
NOT_SERVED = (AutoEngineConfig, OwnEngineConfig, TinkerEngineConfig)
# Engines that load checkpoints, by name.
ENGINES: dict[str, type[EngineSection]] = {
    kind: section
    for kind, section in variants(RunConfig, "engine").items()
    if issubclass(section, EngineSection) and section.can_train and section not in NOT_SERVED
}
# Run settings that would send prompts and keys to another server. `url` is the old name of `base_url`.
NEVER_TAKEN = ("url", "base_url", "api_key_env")
PROGRAMS = ("python", "args", "env")  # vLLM settings that decide which code runs
MAX_SHOWN = 160  # maximum characters of these settings quoted in errors
POLL_S = 1.0


@dataclass
class Loader:
    """Creates engines from a configuration. Example: Loader(EmbeddedEngineConfig(max_batch=256), logs=Path("logs"))"""

    config: EngineConfig
    logs: Path  # log directory for separate engine processes
    num_policies: int = 1  # served at the same time, apart from checkpoint changes
    _bases: dict[tuple[str, str, int | None, str | None], Weights] = field(default_factory=dict)
    _engines: weakref.WeakSet[Engine] = field(default_factory=weakref.WeakSet)

    @property
    def swaps_adapters(self) -> bool:
        """True if the engines can load another adapter while serving the old one."""
        return self.config.swaps_adapters

    async def make(self, source: Source) -> Engine:
        """Returns a started engine for the source. Raises ArtError if it cannot be loaded or run on this machine."""
        policy: Weights | PolicySpec | None = None
        if self.config.can_train:
            policy = await call_in_thread(self._weights if self.config.weights == "here" else _spec, source)
        engine = self._beside_others(policy, source)
        if engine is None:
            engine = make_engine(
                self.config,
                policy,
                name=source.name,
                step=source.step,
                logs=self.logs,
                num_policies=self.num_policies,
            )
        await engine.start()
        self._engines.add(engine)
        try:
            if self.config.weights != "here" and source.adapter is not None:
                await engine.load(source.adapter.resolve(), source.step)
        except BaseException:
            await engine.close()
            raise
        return engine

    def _beside_others(self, policy: Weights | PolicySpec | None, source: Source) -> Engine | None:
        """Returns an engine in the server of an earlier engine, if that server has room."""
        for engine in self._engines if isinstance(policy, PolicySpec) and source.adapter is not None else ():
            beside = getattr(engine, "beside", None)
            made: Engine | None = beside and beside(policy, name=source.name, step=source.step)
            if made is not None:
                return made
        return None

    def _weights(self, source: Source) -> Weights:
        if source.adapter is None and source.prompt is None and source.run is not None:  # full weights are never shared
            return self._load(source)
        key = (source.base, source.dtype, source.max_length, source.quantize)
        if key not in self._bases:
            self._bases[key] = self._load(source)
            return on_base(self._bases[key], source.adapter)
        base = self._bases[key]
        weights = on_base(base, source.adapter)
        if weights.tokenizer is not base.tokenizer:
            return weights
        # The base tokenizer uses the chat template of the source that loaded the base.
        tokenizer = templated_tokenizer(base_config(source), source.base, named=source.named)
        return replace(weights, tokenizer=tokenizer)

    def _load(self, source: Source) -> Weights:
        return load_weights(base_config(source), source.base, named=source.named)


def _spec(source: Source) -> PolicySpec:
    return read_spec(base_config(source), source.base, adapter=source.adapter, named=source.named)


def check_trust(trained: Mapping[str, Any], knobs: Mapping[str, Any], *, place: Path) -> None:
    """Raises UsageError if the run configuration `place` decides which code runs and `knobs` do not override this.

    A run directory may come from a stranger, and its configuration is only data. `engine.python`, `engine.args` and
    `engine.env` are therefore used only if the user trusts the run.
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


def engine_config(
    name: str,
    knobs: Mapping[str, Any],
    trained: Mapping[str, Any],
    *,
    has_prompts: bool = False,
    is_trusted: bool = False,
) -> EngineConfig:
    """Returns the engine's configuration: `knobs` over the training run's settings for the same engine.

    `has_prompts` also allows endpoints; a trusted run may set their address. Raises UsageError for unknown engines and
    knobs, and invalid values.
    """
    engines = ENGINES | HOSTED if has_prompts else ENGINES
    if name not in engines:
        raise UsageError(f"--engine {name}: one of auto, {', '.join(engines)}")
    settings = dict(trained) if trained.get("name") == name else {}
    never = () if is_trusted and name in HOSTED else NEVER_TAKEN
    settings = {key: value for key, value in settings.items() if key not in never} | {"name": name}
    try:
        config: Any = engines[name].model_validate({**settings, **knobs})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--set {'.'.join(map(str, first['loc']))}: {first['msg']} (engine {name})") from None
    engine: EngineConfig = config
    return engine


def read_knobs(knobs: Sequence[str]) -> dict[str, Any]:
    """Parses ["max_batch=256"] into {"max_batch": 256}; values are YAML. Raises UsageError for other formats."""
    settings = {}
    for knob in knobs:
        key, separator, value = knob.partition("=")
        if not separator:
            raise UsageError(f"--set {knob}: expected KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings


class _Generation:
    """A policy's engine, and its number of running requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.proof = engine, WeightProof()
        self.num_requests = 0
        self.is_idle = asyncio.Event()
        self.is_idle.set()

    @contextlib.contextmanager
    def lease(self) -> Iterator[Backend]:
        self.num_requests += 1
        self.is_idle.clear()
        try:
            yield self.engine.backend
        finally:
            self.num_requests -= 1
            if self.num_requests == 0:
                self.is_idle.set()

    async def retire(self) -> None:
        """Closes the replaced engine after its last request, or immediately on cancellation."""
        try:
            await self.is_idle.wait()
        finally:
            try:
                await self.engine.close()
            except ArtError as error:
                log.warning("an engine that was replaced did not close: %s", error)


class ServedPolicy:
    def __init__(self, source: Source, loader: Loader) -> None:
        self.source = source
        self.proven = ProvenSteps()
        self._loader = loader
        self._digests: dict[str, str] = {}  # base -> digest; identical for all checkpoints in a run
        self._generation: _Generation | None = None
        self._retiring: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises ArtError if the source cannot be loaded or run on this machine."""
        assert self._generation is None, "started twice"
        self._generation = await self._make(self.source)

    async def change(self, source: Source) -> None:
        """Switches new requests to `source`. On ArtError, nothing changes."""
        if source.prompt is not None:  # the engine keeps its model
            self.source = source
            return
        old = self._current()
        if self._loader.swaps_adapters:
            if source.adapter is None:
                raise UsageError(f"{source}: vLLM changes adapters; weights as a whole need --engine embedded")
            await self._swap(old, source)
        else:
            self._generation = await self._make(source)
            retiring = asyncio.create_task(old.retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        self.source = source

    async def _make(self, source: Source) -> _Generation:
        made = _Generation(await self._loader.make(source))
        try:
            self.proven.add(source.step, await self._prove(made, source))
        except BaseException:
            await made.engine.close()
            raise
        return made

    async def _prove(self, of: _Generation, source: Source) -> str:
        """Proves that the engine samples from the source. Returns its digest, "" without a proof. Raises ArtError."""
        manifest = source.manifest
        if manifest is None or manifest.origin is None:
            log.info("%s: no learner left a proof in it, so its replies carry no digest", source)
            return ""
        base = manifest.origin.base  # correct for full checkpoints
        if source.adapter is not None:
            if source.base not in self._digests:
                self._digests[source.base] = await call_in_thread(base_digest, source.base)
            base = self._digests[source.base]
        origin = origin_of(await call_in_thread(_spec, source), base)
        proven = await of.proof.prove(of.engine, manifest, origin)
        return proven.digest if proven is not None else ""

    async def _swap(self, of: _Generation, source: Source) -> None:
        """Loads and proves another adapter. On failure the previous adapter is restored."""
        assert source.adapter is not None, source
        engine = of.engine
        try:
            async with self.proven.proving(source.step):
                await engine.load(source.adapter.resolve(), source.step)
                self.proven.add(source.step, await self._prove(of, source))
        except ArtError:
            if engine.endpoint.step == source.step and self.source.adapter is not None:
                await engine.load(self.source.adapter.resolve(), self.source.step)
            raise

    def fill(self, request: Request) -> Request:
        """Adds the policy's prompt, and the policy's sampling settings where the client set none."""
        prompted = request if self.source.prompt is None else self.source.prompt.apply(request)
        return with_defaults(prompted, self.source.defaults)

    def lease(self) -> contextlib.AbstractContextManager[Backend]:
        """Returns the current backend. Its engine stays open until the lease ends, even after a checkpoint change."""
        return self._current().lease()

    def longest_prompt(self) -> int | None:
        """Returns the maximum characters of a prompt; None if unknown."""
        return None if self._generation is None else self._generation.engine.longest_prompt()

    async def watch(self) -> NoReturn:
        """Runs forever; raises EngineError when the engine fails."""
        while True:
            current = self._current()
            watching = asyncio.create_task(current.engine.watch())
            try:
                while not watching.done() and current is self._generation:
                    await asyncio.wait((watching,), timeout=1.0)
                if watching.done() and current is self._generation:
                    watching.result()
            finally:
                watching.cancel()

    async def retire(self) -> None:
        """Closes after the last request, or immediately on cancellation."""
        await self._current().retire()

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        if self._generation is not None:
            await self._generation.engine.close()

    def _current(self) -> _Generation:
        assert self._generation is not None, "not started"
        return self._generation


class Policies:
    """All policies of a service, by name. Loading is sequential."""

    def __init__(self, served: Sequence[ServedPolicy]) -> None:
        names = [policy.source.name for policy in served]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"{', '.join(doubled)}: served twice; give names: a={doubled[0]} b=...")
        self.served = {policy.source.name: policy for policy in served}

    async def start(self) -> None:
        # the first policy starts a vLLM server, which serves adapters up to the policy's rank
        for policy in sorted(self.served.values(), key=_rank, reverse=True):
            await policy.start()
            log.info("loaded %s", policy.source)

    async def watch(self) -> NoReturn:
        """Runs forever; raises an ExceptionGroup of EngineErrors when an engine fails."""
        async with asyncio.TaskGroup() as group:
            for policy in self.served.values():
                group.create_task(policy.watch())
        raise AssertionError("watching never ends")

    async def close(self) -> None:
        for policy in self.served.values():
            await policy.close()


def _rank(policy: ServedPolicy) -> int:
    return 0 if policy.source.adapter is None else rank_of(policy.source.adapter)


async def follow(policy: ServedPolicy, run: RunDir, meter: Meter, *, which: Which) -> None:
    """Runs forever. Failures are logged once; a checkpoint that cannot be loaded is skipped, others are retried."""
    skipped: set[tuple[int, int]] = set()
    problem = ""
    while True:
        await asyncio.sleep(POLL_S)
        try:
            wanted = await call_in_thread(_wanted, run, which)
            if wanted is not None and wanted[0] != policy.source.step and wanted not in skipped:
                await _try_change(policy, run, meter, which)
                if policy.source.step != wanted[0]:
                    skipped.add(wanted)
            problem = ""
        except Exception as error:  # boundary to the run's files and the engine
            if (message := describe(error)) != problem:
                log.warning(
                    "%s: stays at step %d, and tries again: %s", policy.source.name, policy.source.step, message
                )
            problem = message


async def _try_change(policy: ServedPolicy, run: RunDir, meter: Meter, which: Which) -> None:
    """Changes to the run's preferred checkpoint unless already serving it."""
    try:
        found = await call_in_thread(lambda: run_checkpoints.choose(run, which))
        if found.step != policy.source.step:
            run_checkpoints.log_policy(found.path, found.why)
            old = policy.source
            keeps_base = old.adapter is not None or (old.prompt is not None and not old.is_hosted)
            base = old.base if keeps_base else None
            await policy.change(of_checkpoint(found, name=old.name, base=base, dtype=old.dtype))
        meter.changes.labels(policy.source.name).inc()
        log.info("%s: answers from step %d now", policy.source.name, policy.source.step)
    except ArtError as error:
        log.warning("%s: stays at step %d: %s", policy.source.name, policy.source.step, error)


def _wanted(run: RunDir, which: Which) -> tuple[int, int] | None:
    """Returns the preferred step (based only on directory names and metrics) and its modification time."""
    if which == "offered" and (served := read_served(run.root)) is not None:
        promoted = run.root / served.checkpoint
        return read_manifest(promoted).step, promoted.stat().st_mtime_ns
    step = next(iter(run_checkpoints.wanted_steps(run, which)), None)
    return None if step is None else (step, run.checkpoint_path(step).stat().st_mtime_ns)
