"""Sampler: engine, gateway and runner, opened together; plays scenarios with one policy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from art_cli.chat.requests import Sampling
from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import with_base_model
from art_cli.engines import Engine, EngineTraits, engine_traits, make_engine
from art_cli.engines.proof import ProvenPolicy, WeightProof
from art_cli.models.base_files import base_digest
from art_cli.models.policy_spec import PolicySpec, origin_of, spec_of
from art_cli.models.weights import Weights
from art_cli.rollouts.cluster.cluster_rollout import ClusterRollout, serve_cluster
from art_cli.rollouts.process import ProcessRollout
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.rollouts.rollout_runner import OnFinished, Progress, RolloutPlan, Runner, shown
from art_cli.runs.manifest import Origin, read_manifest
from art_cli.runs.run_checkpoints import fetched
from art_cli.runs.system_prompt import read_prompt
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import first_of_group
from art_cli.runtime.threads import call_in_thread


@dataclass
class Sampler:
    """Plays rollouts with the policy step loaded in its engine."""

    engine: Engine
    gateway: Gateway
    runner: Runner
    origin: Origin | None  # the policies' origin, unless the engine brings its model
    proof: WeightProof = field(default_factory=WeightProof)

    async def load(self, checkpoint: Path, step: int) -> ProvenPolicy | None:
        """Loads a checkpoint and returns its proof, if any. Replies from this step wait for the proof.

        A prompt checkpoint leaves the engine unchanged. Raises DriftError if the engine samples from other weights.
        """
        if (prompt := read_prompt(checkpoint)) is not None:
            self.gateway.prompt = prompt
            return None
        async with self.gateway.proven.proving(step):
            await self.engine.load(checkpoint, step)
            return await self.prove(checkpoint, step)

    async def prove(self, checkpoint: Path, step: int) -> ProvenPolicy | None:
        """Like `load`, for a checkpoint already in the engine."""
        assert self.origin is not None, "only an engine that trains loads checkpoints"
        proven = await self.proof.prove(self.engine, read_manifest(checkpoint), self.origin)
        self.gateway.proven.add(step, proven.digest if proven is not None else "")
        return proven

    def is_of_another(self, trajectory: Trajectory) -> bool:
        """Returns True if another policy sampled the trajectory: another step, or other proven weights.

        Always False for an engine that brings its model, because steps and digests belong to another server.
        """
        if self.origin is None:
            return False
        step, now = self.gateway.step, self.gateway.proven.newest
        return any(turn.step != step or (now and turn.policy not in ("", now)) for turn in trajectory.turns)

    def is_replaced(self, trajectory: Trajectory) -> bool:
        """Returns True if a later repetition of a step gave different weights."""
        if self.origin is None:
            return False
        known = self.gateway.proven.known
        return any(
            turn.step > self.gateway.step or (turn.policy and known(turn.step) not in ("", turn.policy))
            for turn in trajectory.turns
        )

    async def play(self, plans: Sequence[RolloutPlan], on_finished: OnFinished, progress: Progress) -> None:
        """Plays every plan; `on_finished` receives each finished trajectory.

        Raises EngineError on a permanent engine failure. Unfinished rollouts are dropped and stay owed.
        """
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self.engine.watch())
                await self.runner.run(plans, on_finished, progress)
                watch.cancel()

    async def play_shown(self, plans: Sequence[RolloutPlan], on_finished: OnFinished, *, title: str) -> None:
        """Like `play`, with a progress bar on terminals and log lines elsewhere."""
        async with shown(progress := Progress(title)):
            await self.play(plans, on_finished, progress)


class SharedEngines:
    """The engines of several policies, one after another. A checkpoint joins the vLLM server of the policy before it.

    A server's start takes a minute. It ends with the block, or before the engine of a policy that it cannot serve.
    """

    def __init__(self) -> None:
        self._last: Engine | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._end()

    async def beside(self, policy: Weights | PolicySpec | None, *, name: str, step: int) -> Engine | None:
        """Returns an engine in the last engine's server, or None after this server's end."""
        beside = getattr(self._last, "beside", None)
        made: Engine | None = (
            beside(policy, name=name, step=step) if beside and isinstance(policy, PolicySpec) else None
        )
        if made is None:
            await self._end()
        return made

    async def keep(self, engine: Engine) -> None:
        """Keeps an engine whose server others may join, and closes the one before."""
        await self._end()
        if hasattr(engine, "beside"):
            self._last = engine
        else:
            await engine.close()

    async def _end(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            await last.close()


async def read_origin(policy: Weights | PolicySpec) -> Origin:
    """Returns the policy's origin: everything but its checkpoint. Hashing the base model takes seconds."""
    spec = spec_of(policy) if isinstance(policy, Weights) else policy
    return origin_of(spec, await call_in_thread(base_digest, spec.base))


@contextlib.asynccontextmanager
async def open_sampler(
    loaded: LoadedConfig,
    policy: Weights | PolicySpec | None,
    *,
    checkpoint: Path | None,
    step: int,
    logs: Path,
    origin: Origin | None = None,
    shares_weights: bool = True,
    begun: Mapping[str, ProcessRollout] | None = None,
    on_first_reply: Callable[[], None] | None = None,
    engines: SharedEngines | None = None,
) -> AsyncIterator[Sampler]:
    """Yields a sampler with a running engine and gateway, and closes both.

    `policy` is the policy at `step`; engines that bring a model need none. `checkpoint` is either a prompt, or what an
    engine with separate weights loads and proves; the starting policy has no checkpoint. `origin` is the policy's
    origin, if known. `shares_weights` as in `make_engine`. `begun` are agents that `begin_rollouts` is loading.
    `on_first_reply` is called once. `engines` are those of the policies before it, and get this one.
    """
    config, traits = loaded.config, engine_traits(loaded.config.engine, loaded.directory)
    prompt = read_prompt(checkpoint)
    weights = checkpoint if prompt is None else None
    beside = await engines.beside(policy if weights else None, name=config.name, step=step) if engines else None
    engine = beside or make_engine(
        with_base_model(config),
        policy,
        name=config.name,
        step=step,
        logs=logs,
        directory=loaded.directory,
        shares_weights=shares_weights,
        num_policies=1 if engines is None else 2,
    )
    await engine.start()
    try:
        if weights is not None:
            there = weights if traits.weights == "server" else await call_in_thread(fetched, weights)
            await engine.load(there, step)
        gateway = _gateway(loaded, engine, traits, on_first_reply)
        gateway.prompt = prompt
        if origin is None and policy is not None:
            origin = await read_origin(policy)
        async with (
            _serving(loaded, gateway) as cluster,
            Runner(config.rollout, loaded.directory, gateway, cluster=cluster, begun=begun) as runner,
        ):
            sampler = Sampler(engine, gateway, runner, origin)
            if weights is not None:
                await sampler.prove(weights, step)
            yield sampler
    finally:
        await (engine.close() if engines is None else engines.keep(engine))


@contextlib.asynccontextmanager
async def _serving(loaded: LoadedConfig, gateway: Gateway) -> AsyncIterator[ClusterRollout | None]:
    """Serves the gateway and yields its cluster, if any."""
    config = loaded.config
    if config.rollout.cluster is None:
        async with gateway.serve(config.gateway.host, config.gateway.port):
            yield None
    else:
        async with serve_cluster(config, loaded.directory, gateway) as cluster:
            yield cluster


def _gateway(
    loaded: LoadedConfig, engine: Engine, traits: EngineTraits, on_first_reply: Callable[[], None] | None
) -> Gateway:
    config = loaded.config
    settings = config.rollout.sampling
    defaults = Sampling(
        temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k, max_tokens=settings.max_tokens
    )
    return Gateway(
        engine,
        defaults=defaults,
        seed=config.train.seed,
        max_turns=config.rollout.max_turns,
        is_forced=settings.force,
        enforces_formats=traits.enforces_formats,
        on_first_reply=on_first_reply,
    )
