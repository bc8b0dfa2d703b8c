"""Opens a claimed run: judges, model, learner, first policy, engine and agent become a frozen Run.

    Claim -> judges -> decide -> weights -> learner -> newest checkpoint, or step 0 after the warm-up -> sampler -> Run

The newest checkpoint that verifies decides which step is next, and the step's own files what it still owes. There is
no other state.
"""

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash
from art_cli.config.schema import RunConfig
from art_cli.engines import EngineTraits
from art_cli.judges import Judge
from art_cli.judges.costs import Payer
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.judges.source_judges import make_judges
from art_cli.learners import Learner, describe_processes, has_own_weights, load_policy, make_learner
from art_cli.loop.batches import Batches
from art_cli.loop.claim_run import Claim, RunData
from art_cli.loop.decide import Decided, computes_here, decide, describe
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.policy_sampler import Sampler, open_sampler, read_origin
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.startup import Startup
from art_cli.loop.stop_rules import RunMeter, StopRules
from art_cli.loop.warm_up import WarmUp, make_warm_up
from art_cli.models.loading import Weights, clone_trainable, count_parameters
from art_cli.models.policy_spec import PolicySpec, read_spec, spec_of
from art_cli.reports.findings import RunWatch
from art_cli.reports.pages.panel import RunPanel
from art_cli.reports.trackers.tracker_dispatch import Trackers, open_trackers
from art_cli.rollouts.process import ProcessRollout
from art_cli.rollouts.rollout_runner import begin_rollouts
from art_cli.rollouts.scenario_files import find_overlap
from art_cli.runs.chain import add_link
from art_cli.runs.history import is_comparable, read_history
from art_cli.runs.manifest import Manifest, Origin, Probe, digest_of, new_checkpoint, read_manifest
from art_cli.runs.run_checkpoints import log_policy
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import Mirror, NoMirror
from art_cli.runtime import log as logs
from art_cli.runtime import threads
from art_cli.runtime.errors import ConfigError, Problem, first_of_group
from art_cli.runtime.terminal import can_draw, drawn

log = logging.getLogger(__name__)
REHEARSING = ("cuda",)  # devices whose memory ends at a bound; a CPU would take minutes for the longest row
WATCH_EVERY_S = 1.0  # interval between checks that the learner's processes live


@dataclass(frozen=True)
class RunWriter:
    """Writes what a run keeps: its checkpoints and the lines of metrics.jsonl. Trackers and mirror learn of both."""

    config: RunConfig
    files: RunDir
    policy: PolicySpec | None  # or None if the engine brings its model
    origin: Origin | None  # the same at every step, or None if the policy is a prompt
    learner: Learner
    trackers: Trackers
    mirror: Mirror | NoMirror
    interrupts: Interrupts

    async def save(self, step: int, metrics: dict[str, float]) -> Path:
        """Writes the checkpoint of `step` in a thread, because rollouts of later steps may be under way meanwhile.

        It holds its step's metrics, so that a kill before they are recorded loses no line of metrics.jsonl.
        """
        path = self.files.checkpoint_path(step)
        base, dtype = (self.config.model.base, "") if self.policy is None else (self.policy.base, self.policy.dtype)
        manifest = Manifest(
            step=step,
            base="../../base" if base == str(self.files.base) else base,
            config_hash=config_hash(self.config),
            dtype=dtype,
            origin=self.origin,
            metrics=metrics,
        )

        def write() -> None:
            if self.policy is not None and self.origin is not None:
                manifest.probe = self.learner.measure(self._probe_before())
            with new_checkpoint(path, manifest) as directory:
                self.learner.save(directory)
            add_link(self.files, manifest)

        await self.interrupts.off_loop(write)
        self.trackers.log_checkpoint(step, path)
        self.mirror.nudge()
        return path

    def _probe_before(self) -> Probe | None:
        """Returns the newest checkpoint's probe, whose text the run keeps, or None if it has none in this dtype."""
        steps = self.files.checkpoint_steps()
        manifest = read_manifest(self.files.checkpoint_path(steps[-1])) if steps else None
        return None if manifest is None or manifest.origin != self.origin else manifest.probe

    def record(self, step: int, split: str, metrics: dict[str, float], policy: str = "") -> None:
        self.trackers.log(self.files.append_metrics(step, split, metrics, policy))


@dataclass(frozen=True)
class Run:
    """The parts of an open run. Engine and learner share one copy of the weights if both are in this process."""

    loaded: LoadedConfig  # decided: no `auto` is left
    files: RunDir
    data: RunData
    first: int  # step of the policy that the run goes on from
    policy: PolicySpec | None  # or None if the engine brings its model
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

    def steps_left(self) -> range:
        return range(self.first, self.config.train.steps)


@contextlib.asynccontextmanager
async def open_run(claim: Claim, *, go_on: str | None = None) -> AsyncIterator[Run]:
    """Yields the run, ready for its first step, and closes everything at the end. Raises the errors of all parts.

    `go_on` is the hint that an interrupt prints, by default the `art train` command.
    """
    files, startup = claim.files, claim.startup
    async with contextlib.AsyncExitStack() as stack:
        begun = await stack.enter_async_context(begin_rollouts(claim.loaded.config.rollout, claim.loaded.directory))
        _warn_of_overlap(claim.loaded, claim.data)
        judges = _make_judges(claim)
        begin = time.monotonic()
        startup.reached("data")
        decided = decide(claim.loaded, files, startup)
        loaded, config = decided.loaded, decided.loaded.config
        policy, weights = _load_policy(decided)
        startup.reached("model")
        learner = make_learner(config, weights or policy, directory=loaded.directory, logs=files.logs)
        payers = [*judges.payers, *filter(None, [learner.payer])]
        _check_prices(loaded, payers)
        meter = RunMeter(payers, begin=begin)
        startup.reached("learner")
        log.info("%s", _describe(loaded, policy, weights))
        trackers = open_trackers(config, files.root, loaded.directory)
        panel, interrupts = RunPanel(config.name, num_steps=config.train.steps), _interrupts(loaded, files, go_on)
        stack.enter_context(_shown(panel))
        stack.enter_context(interrupts.handled())
        for part in (trackers, judges.shadows, judges.judge):
            stack.push_async_callback(part.close)
        await stack.enter_async_context(_started(learner, config, policy, interrupts))
        origin = await _find_origin(config, policy)
        writer = RunWriter(config, files, policy, origin, learner, trackers, claim.mirror, interrupts)
        first = await _find_start(writer, loaded, claim.data)
        interrupts.stop_if_any()
        startup.reached("first checkpoint and warm-up")
        sampler = await stack.enter_async_context(_sampler(decided, writer, weights, first, begun, startup))
        startup.reached("engine and agent")
        batches = _make_batches(writer, sampler, judges, claim.data)
        stack.push_async_callback(batches.close)
        history = read_history(files)
        meter.follow(history)
        history = history.until(first)  # a run whose newest checkpoint is lost does its steps again
        panel.follow(history)
        yield Run(
            loaded=loaded,
            files=files,
            data=claim.data,
            first=first,
            policy=policy,
            learner=learner,
            sampler=sampler,
            judge=judges.judge,
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


# --- the judges -------------------------------------------------------------------------------------------------------


class _Judges(NamedTuple):
    """The judge whose scores are trained on, and the shadow judges."""

    judge: Judge
    shadows: ShadowJudges

    @property
    def payers(self) -> list[Payer]:
        return [self.judge, *self.shadows.judges.values()]


def _make_judges(claim: Claim) -> _Judges:
    """Raises ConfigError if a stop rule counts dollars and a judge's price is unknown."""
    config, directory = claim.loaded.config, claim.loaded.directory
    shadows = ShadowJudges(config.shadow, directory, job=claim.job)
    judges = _Judges(make_judges(config, directory, job=claim.job), shadows)
    _check_prices(claim.loaded, judges.payers)
    return judges


# --- the model --------------------------------------------------------------------------------------------------------


def _load_policy(decided: Decided) -> tuple[PolicySpec | None, Weights | None]:
    """Returns the policy, and the weights if this process computes with them. An engine with its model has neither."""
    config, base = decided.loaded.config, decided.base
    if base is None:
        return None, None
    if computes_here(config, decided.traits):
        weights = load_policy(config, base)
        return spec_of(weights), weights
    learner, is_remote = config.learner, config.learner.weights == "server"
    spec = read_spec(config.model, base, device=None if is_remote else learner.device, is_remote=is_remote)
    return msgspec.structs.replace(spec, learner_gpus=learner.processes), None


async def _find_origin(config: RunConfig, policy: PolicySpec | None) -> Origin | None:
    """Returns the origin for all policies of the run; a prompt has none."""
    if policy is None or not config.learner.trains_weights:
        return None
    return await read_origin(policy)


def _shares_weights(config: RunConfig) -> bool:
    """Returns True if engine and learner take turns with one copy of the weights, as they do on-policy."""
    return config.train.max_staleness == 0 and not has_own_weights(config)


def _engine_weights(config: RunConfig, traits: EngineTraits, weights: Weights | None) -> Weights | None:
    """Returns the engine's copy of the weights, or None if it has them elsewhere."""
    if weights is None or traits.weights != "here":
        return None
    return weights if has_own_weights(config) or _shares_weights(config) else clone_trainable(weights)


def _describe(loaded: LoadedConfig, policy: PolicySpec | None, weights: Weights | None) -> str:
    config, reason = loaded.config, loaded.auto.get("learning_rate")
    if policy is None or not config.learner.trains_weights:
        return f"{config.name}: {config.model.base} with a prompt; {describe(loaded)}"
    rate = f"learning rate {config.train.rate:g}" + (f" (auto: {reason})" if reason else "")
    what = config.model.base
    if weights is not None:
        size = count_parameters(weights.model)
        what += f", {size.whole / 1e6:.3g}M parameters, {size.trained / 1e6:.3g}M trained"
    engine, learner = config.engine, config.learner.name
    names = f"engine {engine.title}, learner {learner} on {policy.learner_device}"
    if engine.server is not None:
        names = f"engine {engine.title}, learner {learner} at {engine.server[0]}"
    elif has_own_weights(config):
        names += f" in {describe_processes(config)}"
    return f"{config.name}: {what}; {names}; {rate}"


# --- the learner ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _started(
    learner: Learner, config: RunConfig, policy: PolicySpec | None, interrupts: Interrupts
) -> AsyncIterator[None]:
    """Starts the learner for the block, and ends the block if one of the learner's processes is dead."""
    with contextlib.closing(learner):
        await asyncio.sleep(0)  # an interrupt during loading ends the run here, before any thread starts
        await threads.call_in_thread(learner.start)  # an interrupt ends the wait for other nodes
        async with _watched(learner):
            if policy is not None and config.learner.trains_weights:
                await _rehearse(learner, config, policy, interrupts)
            yield


@contextlib.asynccontextmanager
async def _watched(learner: Learner) -> AsyncIterator[None]:
    """Ends the block with a LearnerError as soon as one of the learner's processes is dead."""

    async def watch() -> NoReturn:
        while True:
            await asyncio.to_thread(learner.check)
            await asyncio.sleep(WATCH_EVERY_S)

    with first_of_group():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch())
            yield
            task.cancel()


async def _rehearse(learner: Learner, config: RunConfig, policy: PolicySpec, interrupts: Interrupts) -> None:
    """Tries the longest row that the limits allow on a GPU, so that its memory ends now and not after hours.

    Raises OutOfMemory. Without `model.max_length`, the prompts of attempts are not counted.
    """
    if (policy.learner_device or "").partition(":")[0] not in REHEARSING:
        return
    longest = policy.max_length
    if config.model.max_length is None:
        longest = min(longest, config.rollout.longest_answer)
    gigabytes = await interrupts.off_loop(learner.rehearse, longest)
    interrupts.stop_if_any()
    took = "" if gigabytes is None else f", {gigabytes:.1f} GB at its peak"
    log.info("learner: a row of %d tokens fits, as long as the limits allow%s", longest, took)


# --- where to begin ---------------------------------------------------------------------------------------------------


async def _find_start(writer: RunWriter, loaded: LoadedConfig, data: RunData) -> int:
    """Returns the step of the newest valid checkpoint, now loaded. Without one, step 0 is made and warmed up by sft."""
    files, newest = writer.files, writer.files.newest_checkpoint()
    files.set_aside(above=-1 if newest is None else newest[1].step)
    if newest is not None:
        path, manifest = newest
        writer.learner.load(path)
        _backfill(writer, manifest)
        add_link(files, manifest, rest=manifest.step)
        log_policy(path, f"step {manifest.step}, the newest; training goes on from it to {loaded.config.train.steps}")
        return manifest.step
    metrics = await _warm_up(writer, loaded, data) if loaded.config.sft is not None else {}
    await writer.save(0, metrics)
    if metrics:
        writer.record(0, "sft", metrics, digest_of(read_manifest(files.checkpoint_path(0))))
    return 0


async def _warm_up(writer: RunWriter, loaded: LoadedConfig, data: RunData) -> dict[str, float]:
    """Returns the warm-up's metrics. An interrupt ends it after the current update, and saves its state."""
    examples = await threads.call_in_thread(lambda: data.examples)
    assert writer.policy is not None, "a prompt has no warm-up"
    make = partial(WarmUp, writer.learner, loaded, examples, base=writer.policy.base, start=None)
    return await make_warm_up(await threads.call_in_thread(make), writer.interrupts)


def _backfill(writer: RunWriter, manifest: Manifest) -> None:
    """Writes the metrics line that is missing if a kill came right after the checkpoint."""
    split, step = ("sft", 0) if manifest.step == 0 else ("train", manifest.step - 1)
    lines = writer.files.metrics()
    if manifest.metrics and not any((line.step, line.split) == (step, split) for line in lines):
        writer.record(step, split, manifest.metrics, digest_of(manifest))


def _sampler(
    decided: Decided,
    writer: RunWriter,
    weights: Weights | None,
    first: int,
    begun: Mapping[str, ProcessRollout],
    startup: Startup,
) -> contextlib.AbstractAsyncContextManager[Sampler]:
    """Returns the sampler of the policy at step `first`, not opened yet."""
    config, files = writer.config, writer.files
    return open_sampler(
        decided.loaded,
        _engine_weights(config, decided.traits, weights) or writer.policy,
        checkpoint=files.checkpoint_path(first),
        step=first,
        origin=writer.origin,
        logs=files.logs,
        shares_weights=_shares_weights(config),
        begun=begun,
        on_first_reply=partial(startup.end, "first reply"),
    )


def _make_batches(writer: RunWriter, sampler: Sampler, judges: _Judges, data: RunData) -> Batches:
    config, files = writer.config, writer.files
    mix, arrange = SourceMix(config, files, data.training_by_source), writer.learner.arrange
    return Batches(config, files, sampler, judges.judge, mix, shadows=judges.shadows, arrange=arrange)


def _interrupts(loaded: LoadedConfig, files: RunDir, go_on: str | None) -> Interrupts:
    hint = go_on or f"go on with: {resume_command(loaded, files)}"
    return Interrupts(f"interrupted; what is complete is in {files.root}; {hint}")


def resume_command(loaded: LoadedConfig, files: RunDir) -> str:
    """Returns the shell command that continues the run, or the sweep that it belongs to."""
    words = ["-m", *loaded.sweep] if loaded.sweep else [*loaded.overrides]
    if files.root.name != loaded.config.name:  # --fresh made it, and would start yet another run
        words = [*loaded.overrides, f"name={files.root.name}"]
    return shlex.join(["art", "train", str(loaded.path), *words])


# --- what runs beside the loop ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown(panel: RunPanel) -> Iterator[None]:
    """Shows the panel while the block runs, if there is a terminal."""
    if not can_draw():
        yield
        return
    with drawn(panel.render), logs.showing_stages(panel):
        yield


# --- checks of the opened parts ---------------------------------------------------------------------------------------


def _warn_of_overlap(loaded: LoadedConfig, data: RunData) -> None:
    if loaded.config.eval is None or loaded.config.eval.held_out is not None:  # a held-out share is disjoint
        return
    for name, part in data.by_source.items():
        if overlap := str(find_overlap(part.training, part.evaluation)):
            whose = f"rollout.sources.{name}: " if name else ""
            log.warning("%s%s; eval.held_out splits one set so that none is", whose, overlap)


def _check_prices(loaded: LoadedConfig, payers: Sequence[Payer]) -> None:
    """Raises ConfigError if a stop rule counts dollars and the cost of someone's calls is unknown."""
    unpriced = [payer.title for payer in payers if not payer.is_priced]
    for number, rule in enumerate(loaded.config.stop):
        if rule.usd is not None and unpriced:
            key, cure = f"stop.{number}.usd", "set its price, or take the rule out"
            raise ConfigError([Problem(key, loaded.places.of(key), f"no price is known for {unpriced[0]}; {cure}")])
