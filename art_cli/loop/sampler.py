"""Sampler: an engine, the gateway in front of it and the runner, opened together; plays scenarios with one policy."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_cli.chat.requests import Sampling
from art_cli.config.compose import LoadedConfig
from art_cli.engines import Engine, engine_traits, make_engine
from art_cli.errors import first_of_group
from art_cli.model import Weights
from art_cli.policy_spec import PolicySpec
from art_cli.rollouts.gateway import Gateway
from art_cli.rollouts.progress import Progress, shown
from art_cli.rollouts.runner import OnFinished, RolloutPlan, Runner


@dataclass
class Sampler:
    """Plays rollouts with the step that its engine holds."""

    engine: Engine
    gateway: Gateway
    runner: Runner

    async def play(
        self,
        plans: Sequence[RolloutPlan],
        on_finished: OnFinished,
        progress: Progress,
    ) -> None:
        """Plays every plan; `on_finished` gets each trajectory as it finishes.

        Raises EngineError: the engine has failed for good. Unfinished rollouts are dropped and stay owed.
        """
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self.engine.watch())
                await self.runner.run(plans, on_finished, progress)
                watch.cancel()

    async def play_shown(self, plans: Sequence[RolloutPlan], on_finished: OnFinished, *, title: str) -> None:
        """As `play`, with a bar on a terminal and lines elsewhere."""
        async with shown(progress := Progress(title)):
            await self.play(plans, on_finished, progress)


@contextlib.asynccontextmanager
async def open_sampler(
    loaded: LoadedConfig,
    policy: Weights | PolicySpec | None,
    *,
    checkpoint: Path | None,
    step: int,
    logs: Path,
    shares_weights: bool = True,
) -> AsyncIterator[Sampler]:
    """Engine started, gateway listening; all of it closed on the way out.

    `policy` is the policy at `step`, or None for an engine that brings a model of its own. `checkpoint` is what an
    engine with its own weights loads; None for the starting policy. `shares_weights` as in `make_engine`.
    """
    config = loaded.config
    engine = make_engine(
        config.engine,
        policy,
        name=config.name,
        step=step,
        logs=logs,
        directory=loaded.directory,
        shares_weights=shares_weights,
    )
    await engine.start()
    try:
        if checkpoint is not None:
            await engine.load(checkpoint, step)
        gateway = _gateway(loaded, engine)
        async with (
            gateway.serve(config.gateway.host, config.gateway.port),
            Runner(config.rollout, loaded.directory, gateway) as runner,
        ):
            yield Sampler(engine, gateway, runner)
    finally:
        await engine.close()


def _gateway(loaded: LoadedConfig, engine: Engine) -> Gateway:
    config = loaded.config
    settings = config.rollout.sampling
    defaults = Sampling(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        max_tokens=settings.max_tokens,
    )
    return Gateway(
        engine,
        defaults=defaults,
        seed=config.train.seed,
        max_turns=config.rollout.max_turns,
        is_forced=settings.force,
        enforces_formats=engine_traits(config.engine, loaded.directory).enforces_formats,
    )
