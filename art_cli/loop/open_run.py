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

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import RunConfig
from art_cli.judges import Judge
from art_cli.judges.costs import Payer
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.judges.source_judges import make_judges
from art_cli.learners import Learner, make_learner
from art_cli.loop.batches import Batches
from art_cli.loop.claim_run import Claim, RunData
from art_cli.loop.decide import decide
from art_cli.loop.interrupts import Interrupts, resume_command
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.loop.run_policy import describe_run, engine_weights, find_origin, load_run_policy, shares_weights
from art_cli.loop.run_writer import RunWriter, find_start
from art_cli.loop.running_learner import running_learner
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.stop_rules import RunMeter, StopRules
from art_cli.models.policy_spec import PolicySpec
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
        policy, weights = load_run_policy(decided)
        startup.reached("model")
        learner = make_learner(config, weights or policy, directory=loaded.directory, logs=files.logs)
        if learner.payer is not None:
            payers.append(learner.payer)
            _check_prices(loaded, [learner.payer])
        startup.reached("learner")
        log.info("%s", describe_run(loaded, policy, weights))
        trackers = open_trackers(config, files.root, loaded.directory)
        panel = RunPanel(config.name, num_steps=config.train.steps)
        hint = resume_hint or f"continue with: {resume_command(loaded, files)}"
        interrupts = Interrupts(f"interrupted; what is complete is in {files.root}; {hint}")
        stack.enter_context(_shown(panel))
        stack.enter_context(interrupts.handled())
        for part in (trackers, shadows, judge):
            stack.push_async_callback(part.close)
        await stack.enter_async_context(running_learner(learner, config, policy, interrupts))
        origin = await find_origin(config, policy)
        writer = RunWriter(config, files, policy, origin, learner, trackers, claim.mirror, interrupts)
        first = await find_start(writer, loaded, data)
        interrupts.stop_if_any()
        startup.reached("first checkpoint and warm-up")
        opening = open_sampler(
            loaded,
            engine_weights(config, decided.traits, weights) or policy,
            checkpoint=files.checkpoint_path(first),
            step=first,
            origin=origin,
            logs=files.logs,
            shares_weights=shares_weights(config),
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
    with drawn(panel.render), logs.showing_stages(panel):
        yield


def _warn_of_overlap(loaded: LoadedConfig, data: RunData) -> None:
    if loaded.config.eval is None or loaded.config.eval.held_out is not None:  # a held-out share is disjoint
        return
    for name, part in data.by_source.items():
        if overlap := str(find_overlap(part.training, part.evaluation)):
            whose = f"rollout.sources.{name}: " if name else ""
            log.warning("%s%s; eval.held_out splits one set so that none is", whose, overlap)


def _check_prices(loaded: LoadedConfig, payers: Sequence[Payer]) -> None:
    """Raises ConfigError if a stop rule counts dollars and a payer's price is unknown."""
    unpriced = [payer.title for payer in payers if not payer.is_priced]
    for number, rule in enumerate(loaded.config.stop):
        if rule.usd is not None and unpriced:
            key, cure = f"stop.{number}.usd", "set its price, or take the rule out"
            raise ConfigError([Problem(key, loaded.places.of(key), f"no price is known for {unpriced[0]}; {cure}")])
