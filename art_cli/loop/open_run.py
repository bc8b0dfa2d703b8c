"""Opens a claimed run: judges, model, learner, first policy, engine and agent become a frozen Run.

    Claim -> judges -> decide -> weights -> learner -> newest checkpoint, or step 0 after the warm-up -> sampler -> Run

The newest valid checkpoint decides the next step. The step's own files decide what is still owed. Nothing else is
stored.
"""

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import GrpoConfig, RunConfig
from art_cli.engines import EngineTraits
from art_cli.judges import Judge
from art_cli.judges.costs import Payer
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.judges.source_judges import make_judges
from art_cli.learners import Learner, describe_processes, has_own_weights, load_policy, make_learner
from art_cli.loop.batches import Batches
from art_cli.loop.claim_run import Claim, RunData
from art_cli.loop.decide import Decided, computes_here, decide, describe
from art_cli.loop.interrupts import Interrupts, resume_command
from art_cli.loop.policy_sampler import Sampler, open_sampler, read_origin
from art_cli.loop.run_writer import RunWriter, find_start
from art_cli.loop.running_learner import running_learner
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.stop_rules import RunMeter, StopRules
from art_cli.models.policy_spec import PolicySpec, read_spec, spec_of
from art_cli.models.weights import Weights, clone_trainable, count_parameters
from art_cli.reports.findings import RunWatch
from art_cli.reports.pages.panel import RunPanel
from art_cli.reports.trackers.tracker_dispatch import Trackers, open_trackers
from art_cli.rollouts.rollout_runner import begin_rollouts
from art_cli.rollouts.scenario_files import find_overlap
from art_cli.runs.history import is_comparable, read_history
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import Mirror, NoMirror
from art_cli.runtime import log as logs
from art_cli.runtime.errors import ConfigError, Problem
from art_cli.runtime.terminal import can_draw, drawn

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """All parts of an open run. Engine and learner in the same process share one copy of the weights."""

    loaded: LoadedConfig  # decided: no `auto` is left
    files: RunDir
    data: RunData
    first: int  # the policy step that the run continues from
    policy: PolicySpec | None  # unless the engine brings its model
    learner: Learner
    sampler: Sampler
    judge: Judge
    batches: Batches
    writer: RunWriter
    trackers: Trackers
    mirror: Mirror | NoMirror
    meter: RunMeter
    watch: RunWatch
    stop_rules: StopRules
    panel: RunPanel
    interrupts: Interrupts

    @property
    def config(self) -> RunConfig:
        return self.loaded.config

    @property
    def is_on_policy(self) -> bool:
        return self.config.train.max_staleness == 0

    def steps_left(self) -> range:
        return range(self.first, self.config.train.steps)


@contextlib.asynccontextmanager
async def open_run(claim: Claim, *, resume_hint: str | None = None) -> AsyncIterator[Run]:
    """Yields the run, ready for its next step, and closes all parts at the end. Raises the errors of all parts.

    An interrupt prints `resume_hint`, by default the `art train` command.
    """
    files, startup, data = claim.files, claim.startup, claim.data
    async with contextlib.AsyncExitStack() as stack:
        begun = await stack.enter_async_context(begin_rollouts(claim.loaded.config.rollout, claim.loaded.directory))
        _warn_of_overlap(claim.loaded, data)
        judge = make_judges(claim.loaded.config, claim.loaded.directory, job=claim.job)
        shadows = ShadowJudges(claim.loaded.config.shadow, claim.loaded.directory, job=claim.job)
        payers: list[Payer] = [judge, *shadows.judges.values()]
        _check_prices(claim.loaded, payers)
        begin = time.monotonic()
        startup.reached("data")
        decided = decide(claim.loaded, files, startup)
        loaded, config = decided.loaded, decided.loaded.config
        policy, weights = read_policy(decided)
        startup.reached("model")
        learner = make_learner(config, weights or policy, directory=loaded.directory, logs=files.logs)
        if learner.payer is not None:
            payers.append(learner.payer)
            _check_prices(loaded, [learner.payer])
        startup.reached("learner")
        log.info("%s", _described(loaded, policy, weights))
        trackers = open_trackers(config, files.root, loaded.directory)
        panel = RunPanel(config.name, num_steps=config.train.steps)
        hint = resume_hint or f"continue with: {resume_command(loaded, files)}"
        interrupts = Interrupts(f"interrupted; what is complete is in {files.root}; {hint}")
        stack.enter_context(_shown(panel))
        stack.enter_context(interrupts.handled())
        for part in (trackers, shadows, judge):
            stack.push_async_callback(part.close)
        for each in (shadows, judge):  # after the learner's import of Unsloth, before its rehearsal and vLLM's start
            await each.open()
        await stack.enter_async_context(running_learner(learner, config, policy, interrupts))
        origin = await read_origin(policy) if policy is not None and config.learner.trains_weights else None
        writer = RunWriter(config, files, policy, origin, learner, trackers, claim.mirror, interrupts)
        first = await find_start(writer, loaded, data)
        interrupts.stop_if_any()
        startup.reached("first checkpoint and warm-up")
        opening = open_sampler(
            loaded,
            _engine_weights(config, decided.traits, weights) or policy,
            checkpoint=files.checkpoint_path(first),
            step=first,
            origin=origin,
            logs=files.logs,
            shares_weights=_shares_weights(config),
            begun=begun,
            on_first_reply=partial(startup.end, "first reply"),
        )
        sampler = await stack.enter_async_context(opening)
        startup.reached("engine and agent")
        mix = SourceMix(config, files, data.training_by_source)
        batches = Batches(config, files, sampler, judge, mix, shadows=shadows, arrange=learner.arrange)
        stack.push_async_callback(batches.close)
        history = read_history(files)
        meter = RunMeter(payers, begin=begin, history=history)
        history = history.until(first)  # a run that lost its newest checkpoint repeats the lost steps
        panel.follow(history)
        yield Run(
            loaded=loaded,
            files=files,
            data=data,
            first=first,
            policy=policy,
            learner=learner,
            sampler=sampler,
            judge=judge,
            batches=batches,
            writer=writer,
            trackers=trackers,
            mirror=claim.mirror,
            meter=meter,
            watch=RunWatch(history, is_comparable=is_comparable(config.model_dump(mode="json"))),
            stop_rules=StopRules(config.stop, files.pauses()),
            panel=panel,
            interrupts=interrupts,
        )


@contextlib.contextmanager
def _shown(panel: RunPanel) -> Iterator[None]:
    """Shows the panel on a terminal while the block runs."""
    if not can_draw():
        yield
        return
    with drawn(panel.render), logs.showing_stages(panel.stage):
        yield


def _warn_of_overlap(loaded: LoadedConfig, data: RunData) -> None:
    if loaded.config.eval is None or loaded.config.eval.held_out is not None:  # a held-out share is disjoint
        return
    for name, part in data.by_source.items():
        if overlap := str(find_overlap(part.training, part.evaluation)):
            whose = f"rollout.sources.{name}: " if name else ""
            log.warning("%s%s; eval.held_out splits one set into two without overlap", whose, overlap)


def _check_prices(loaded: LoadedConfig, payers: Sequence[Payer]) -> None:
    """Raises ConfigError if a stop rule counts dollars and a payer's price is unknown."""
    unpriced = [payer.title for payer in payers if not payer.is_priced]
    for number, rule in enumerate(loaded.config.stop):
        if rule.usd is not None and unpriced:
            key, cure = f"stop.{number}.usd", "set its price, or take the rule out"
            raise ConfigError([Problem(key, loaded.places.of(key), f"no price is known for {unpriced[0]}; {cure}")])


# --- the policy -------------------------------------------------------------------------------------------------------


def read_policy(decided: Decided) -> tuple[PolicySpec | None, Weights | None]:
    """Returns the policy's spec, and its weights if this process needs them; (None, None) if the engine brings its
    model."""
    config, base = decided.loaded.config, decided.base
    if base is None:
        return None, None
    if computes_here(config, decided.traits):
        weights = load_policy(config, base)
        return spec_of(weights), weights
    learner, is_remote = config.learner, config.learner.weights == "server"
    spec = read_spec(config.model, base, device=None if is_remote else learner.device, is_remote=is_remote)
    return msgspec.structs.replace(spec, learner_gpus=learner.processes), None


def _shares_weights(config: RunConfig) -> bool:
    """Returns True if engine and learner take turns with one copy of the weights (on-policy)."""
    return config.train.max_staleness == 0 and not has_own_weights(config)


def _engine_weights(config: RunConfig, traits: EngineTraits, weights: Weights | None) -> Weights | None:
    """Returns the engine's copy of the weights, if the engine computes in this process."""
    if weights is None or traits.weights != "here":
        return None
    return weights if has_own_weights(config) or _shares_weights(config) else clone_trainable(weights)


def _described(loaded: LoadedConfig, policy: PolicySpec | None, weights: Weights | None) -> str:
    config = loaded.config
    if policy is None or not config.learner.trains_weights:
        return f"{config.name}: {config.model.title} with a prompt; {describe(loaded)}"
    why = {name: f" (auto: {reason})" for name, reason in loaded.auto.items()}
    rate = f"learning rate {config.train.rate:g}{why.get('learning_rate', '')}"
    if config.train.kl_bound is not None:
        rate += f"; a step's KL at most {config.train.kl_bound:g}{why.get('max_kl', '')}"
    if isinstance(config.learns_by, GrpoConfig) and config.learns_by.baseline == "shrunk":
        rate += f"; baseline shrunk{why.get('baseline', '')}"
    what = config.model.title
    if weights is not None:
        what += f", {count_parameters(weights.model)}"
    engine, learner = config.engine, config.learner.name
    names = f"engine {engine.title}, learner {learner} on {policy.learner_device}"
    if engine.server is not None:
        names = f"engine {engine.title}, learner {learner} at {engine.server[0]}"
    elif has_own_weights(config):
        names += f" in {describe_processes(config)}"
    return f"{config.name}: {what}; {names}; {rate}"
