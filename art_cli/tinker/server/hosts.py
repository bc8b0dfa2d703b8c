"""Hosts: what opens a policy for sampling: an embedded engine for each, or one vLLM server for all.

    copy of a learner's weights, or a saved adapter -> SampledPolicy -> host.open -> OpenPolicy: scores, replies

A policy that vLLM samples from is a directory, because the server is another process.
"""

import asyncio
import itertools
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request
from art_cli.config.schema import EmbeddedEngineConfig, EngineConfig, VllmEngineConfig
from art_cli.engines import Engine, make_engine
from art_cli.engines.proof import WeightProof
from art_cli.engines.vllm.vllm_policies import VllmPolicies
from art_cli.learners.probe import measure_probe
from art_cli.models.policy_spec import PolicySpec, spec_of
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runs.manifest import Probe, verify_checkpoint
from art_cli.runtime.scratch import make_directory
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base, ClientLearner


class OpenPolicy(Protocol):
    """Samples from one policy."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats of each token after the first, at temperature 1."""

    async def reply(self, request: Request) -> Reply: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class SampledPolicy:
    """Weights to sample from, and what samples from them while it is open. Without adapter and weights: the base."""

    key: str
    adapter: Path | None = None  # the directory of a saved one
    weights: Weights | None = None  # a copy in memory
    probe: Probe | None = None  # or None if the files of a saved one are scored when it is opened
    is_temporary: bool = False  # True: the directory is this policy's own, and goes with it
    opened: OpenPolicy | None = None
    num_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_base(self) -> bool:
        return self.adapter is None and self.weights is None

    def forget(self) -> None:
        """Removes what is only this policy's own."""
        if self.is_temporary and self.adapter is not None:
            shutil.rmtree(self.adapter, ignore_errors=True)


class PolicyHost(Protocol):
    """Opens policies. Failures raise EngineError, DriftError or CheckpointError."""

    num_open: int  # adapters that may be open at once

    async def start(self) -> None: ...

    async def open(self, policy: SampledPolicy) -> OpenPolicy: ...

    def copy(self, key: str, learner: ClientLearner) -> SampledPolicy:
        """Returns the learner's weights as they are now. It computes; call it in a thread."""

    async def watch(self) -> NoReturn:
        """Never returns; raises EngineError once nothing can be sampled any more."""

    async def close(self) -> None: ...


class EmbeddedHost:
    """An engine in this process for each policy. All share the base's tensors."""

    def __init__(self, base: Base, config: EmbeddedEngineConfig, limits: BackendLimits, logs: Path) -> None:
        self.num_open = limits.samplers
        self._base, self._config, self._logs = base, config, logs

    async def start(self) -> None:
        pass

    async def open(self, policy: SampledPolicy) -> OpenPolicy:
        if (weights := policy.weights) is None:
            weights = await call_in_thread(_load, self._base, policy.adapter)
        engine = make_engine(self._config, weights, name="policy", logs=self._logs, shares_weights=False)
        await engine.start()
        try:
            if (probe := policy.probe) is not None:
                WeightProof().check([await engine.score(probe.tokens)], probe, dtype=weights.dtype_name)
        except BaseException:
            await engine.close()
            raise
        return _EmbeddedPolicy(engine)

    def copy(self, key: str, learner: ClientLearner) -> SampledPolicy:
        return SampledPolicy(key, weights=learner.copy_weights(), probe=learner.measure(self._base.probe()))

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("the event was set")

    async def close(self) -> None:
        pass


class _EmbeddedPolicy:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def score(self, token_ids: list[int]) -> list[float]:
        return await self._engine.score(token_ids)

    async def reply(self, request: Request) -> Reply:
        return await self._engine.backend.reply(request)

    async def close(self) -> None:
        await self._engine.close()


class VllmHost:
    """One vLLM server, which art starts or which runs at a URL, and an adapter in it for each policy."""

    def __init__(self, base: Base, config: VllmEngineConfig, limits: BackendLimits, logs: Path) -> None:
        """Raises EngineError if there is no such Python, or this machine cannot have a setting."""
        spec = _spec(base, limits)
        if config.base_url is None:
            config = _with_room(config, limits)
        self.num_open = int(str(config.args.get("max-loras") or limits.samplers))
        self._base, self._copies, self._numbers = base, logs / "copies", itertools.count(1)
        self._server = VllmPolicies(config, spec, logs=logs)

    async def start(self) -> None:
        """Returns when the server answers with the base's weights."""
        await self._server.start()
        base = await self.open(SampledPolicy("base"))
        await base.close()

    async def open(self, policy: SampledPolicy) -> OpenPolicy:
        if (probe := policy.probe) is None:
            probe = await call_in_thread(self._score, policy.adapter)
        return await self._server.open(policy.adapter, probe)

    def _score(self, adapter: Path | None) -> Probe:
        """Returns a probe of the base with a saved adapter, or without one."""
        if adapter is None:
            return self._base.probe()
        weights = _load(self._base, adapter)
        return measure_probe(weights, partial(token_logprobs, weights), self._base.probe())

    def copy(self, key: str, learner: ClientLearner) -> SampledPolicy:
        directory = self._copies / str(next(self._numbers))
        make_directory(directory)
        learner.save(directory, optimizer=False)
        return SampledPolicy(key, adapter=directory, probe=learner.measure(self._base.probe()), is_temporary=True)

    async def watch(self) -> NoReturn:
        await self._server.watch()

    async def close(self) -> None:
        await self._server.close()


def _load(base: Base, adapter: Path | None) -> Weights:
    """Returns the base with a saved adapter, or without one. Raises CheckpointError if its files are damaged."""
    if adapter is not None:
        verify_checkpoint(adapter)
    return base.policy(adapter)


def _spec(base: Base, limits: BackendLimits) -> PolicySpec:
    """Returns the served model: the base with adapters of any rank that clients may ask for."""
    processes = 1 if base.replicas is None else base.replicas.job.learner.processes
    return msgspec.structs.replace(spec_of(base.weights), lora_rank=limits.rank, learner_gpus=processes)


def _with_room(config: VllmEngineConfig, limits: BackendLimits) -> VllmEngineConfig:
    """Returns the configuration with room for the samplers' adapters. vLLM never sleeps."""
    args = {"max-loras": limits.samplers, **{name.replace("_", "-"): value for name, value in config.args.items()}}
    return config.model_copy(update={"args": args, "sleep": 0})


def make_host(base: Base, engine: EngineConfig, limits: BackendLimits, logs: Path) -> PolicyHost:
    """Raises EngineError if it cannot be made here."""
    if isinstance(engine, VllmEngineConfig):
        return VllmHost(base, engine, limits, logs)
    assert isinstance(engine, EmbeddedEngineConfig), engine
    return EmbeddedHost(base, engine, limits, logs)
