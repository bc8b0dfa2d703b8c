"""Hosts open policies for sampling: an embedded engine per policy, or a shared vLLM server.

    copy of a learner's weights, or a saved adapter -> SampledPolicy -> host.open -> OpenPolicy: scores, replies

vLLM is a separate process, so its policies are directories.
"""

import asyncio
import itertools
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request
from art_cli.config.schema import EmbeddedEngineConfig, EngineConfig, VllmEngineConfig
from art_cli.engines import make_engine
from art_cli.engines.proof import WeightProof
from art_cli.engines.vllm.arguments import user_args
from art_cli.engines.vllm.vllm_policies import VllmPolicies
from art_cli.learners.probe import measure_probe
from art_cli.models.policy_spec import linear_targets, spec_of
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runs.manifest import Probe, verify_checkpoint
from art_cli.runtime.scratch import make_directory
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base, ClientLearner


class OpenPolicy(Protocol):
    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats at temperature 1, for every token after the initial one."""

    async def reply(self, request: Request) -> Reply: ...

    async def close(self) -> None: ...


@dataclass(eq=False)
class SampledPolicy:
    """Weights for sampling, with an engine while open. Without adapter and weights, this is the base model."""

    key: str
    adapter: Path | None = None  # directory of a saved adapter
    weights: Weights | None = None  # copy in memory
    probe: Probe | None = None  # None: computed from a saved adapter's files when opened
    is_temporary: bool = False  # the directory belongs to this policy and is removed with it
    opened: OpenPolicy | None = None
    num_users: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_base(self) -> bool:
        return self.adapter is None and self.weights is None

    def forget(self) -> None:
        if self.is_temporary and self.adapter is not None:
            shutil.rmtree(self.adapter, ignore_errors=True)


class PolicyHost(Protocol):
    """Opens policies. Failures raise EngineError, DriftError or CheckpointError."""

    num_open: int  # maximum number of open adapters

    async def start(self) -> None: ...

    async def open(self, policy: SampledPolicy) -> OpenPolicy: ...

    def copy(self, key: str, learner: ClientLearner) -> SampledPolicy:
        """Copies the learner's current weights. Blocks; call it in a thread."""

    async def watch(self) -> NoReturn:
        """Runs forever; raises EngineError when sampling becomes impossible."""

    async def close(self) -> None: ...


class EmbeddedHost:
    """An engine per policy in this process. All engines share the base tensors."""

    def __init__(self, base: Base, config: EmbeddedEngineConfig, limits: BackendLimits, logs: Path) -> None:
        self.num_open = limits.samplers
        self._base, self._config, self._logs = base, config, logs

    async def start(self) -> None:
        pass

    async def open(self, policy: SampledPolicy) -> OpenPolicy:
        if (weights := policy.weights) is None:
            weights = await call_in_thread(_load, self._base, policy.adapter)
        engine: Any = make_engine(self._config, weights, name="policy", logs=self._logs, shares_weights=False)
        await engine.start()
        try:
            if (probe := policy.probe) is not None:
                WeightProof().check([await engine.score(probe.tokens)], probe, dtype=weights.dtype_name)
        except BaseException:
            await engine.close()
            raise
        opened: OpenPolicy = engine  # an embedded engine is a Backend itself
        return opened

    def copy(self, key: str, learner: ClientLearner) -> SampledPolicy:
        return SampledPolicy(key, weights=learner.copy_weights(), probe=learner.measure(self._base.probe()))

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("the event was set")

    async def close(self) -> None:
        pass


class VllmHost:
    """A vLLM server, started by art or already running at a URL, with an adapter per policy."""

    def __init__(self, base: Base, config: VllmEngineConfig, limits: BackendLimits, logs: Path) -> None:
        """Raises EngineError if the configured Python is missing or this machine lacks support for a setting."""
        processes = 1 if base.replicas is None else base.replicas.job.learner.processes
        targets = linear_targets(base.weights.model.config)
        spec = msgspec.structs.replace(
            spec_of(base.weights), lora_rank=limits.rank, learner_gpus=processes, lora_targets=targets
        )
        if config.base_url is None:  # room for all adapters; vLLM never sleeps here
            args = {"max-loras": limits.samplers} | user_args(config)
            config = config.model_copy(update={"args": args, "sleep": 0})
        self.num_open = int(str(config.args.get("max-loras") or limits.samplers))
        self._base, self._copies, self._numbers = base, logs / "copies", itertools.count(1)
        self._server = VllmPolicies(config, spec, logs=logs)

    async def start(self) -> None:
        """Returns when the server answers with the base weights."""
        await self._server.start()
        base = await self.open(SampledPolicy("base"))
        await base.close()

    async def open(self, policy: SampledPolicy) -> OpenPolicy:
        if (probe := policy.probe) is None:
            probe = await call_in_thread(self._score, policy.adapter)
        return await self._server.open(policy.adapter, probe)

    def _score(self, adapter: Path | None) -> Probe:
        """Returns a probe of the base model, optionally with a saved adapter."""
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
    """Returns the base model, optionally with a saved adapter. Raises CheckpointError for damaged files."""
    if adapter is not None:
        verify_checkpoint(adapter)
    return base.policy(adapter)


def make_host(base: Base, engine: EngineConfig, limits: BackendLimits, logs: Path) -> PolicyHost:
    """Raises EngineError if this machine lacks support for the engine."""
    if isinstance(engine, VllmEngineConfig):
        return VllmHost(base, engine, limits, logs)
    assert isinstance(engine, EmbeddedEngineConfig), engine
    return EmbeddedHost(base, engine, limits, logs)
