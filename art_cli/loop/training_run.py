"""TrainingRun: one run from its first policy to its last, resumed from whatever its directory holds.

    step N:  batch (batches.py) -> learner.step -> checkpoint N + 1 -> engine loads it -> proof -> eval

The newest checkpoint that verifies says which step is next, and the step's own files say what it still owes. There is
no other state. A checkpoint holds its step's metrics, so that a kill before they are written loses no line of
metrics.jsonl.
"""

import asyncio
import contextlib
import logging
import shlex
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash
from art_cli.config.schema import RunConfig, TinkerEngineConfig, TinkerLearnerConfig
from art_cli.engines import engine_traits, proof
from art_cli.judges import Judge, make_judge
from art_cli.judges.shadow_judges import ShadowJudges
from art_cli.learners import Learner, StepMetrics, describe_processes, has_own_weights, load_policy, make_learner
from art_cli.learners.sft.examples import load_examples
from art_cli.loop.auto import engine_name
from art_cli.loop.batches import Batch, Batches
from art_cli.loop.dtype import decide_dtype
from art_cli.loop.evaluate import play_evaluation, values_by_scenario
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.owed_groups import group
from art_cli.loop.pairwise_eval import is_judged, judge_contest
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.loop.record import claim_config
from art_cli.loop.references import missing_targets
from art_cli.loop.run_meter import RunMeter
from art_cli.loop.startup import Startup, import_libraries
from art_cli.loop.stop_rules import Firing, StopRules
from art_cli.loop.warm_up import WarmUp, make_warm_up
from art_cli.models.loading import clone_trainable, count_parameters, find_base
from art_cli.models.policy_spec import read_spec, spec_of
from art_cli.reports.findings import RunWatch
from art_cli.reports.pages.curve import curve, run_series
from art_cli.reports.pages.panel import RunPanel
from art_cli.reports.run_report import read_report, reward_names
from art_cli.reports.trackers.tracker_dispatch import Trackers, open_trackers
from art_cli.rollouts.process import ProcessRollout
from art_cli.rollouts.splits import evaluation_scenarios, find_overlap, training_scenarios
from art_cli.runs.durable import write_file
from art_cli.runs.failures import count_failures, find_fault
from art_cli.runs.history import Evaluated, UpdateNumbers, is_comparable, read_history
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_checkpoints import prune_trained
from art_cli.runs.run_dir import PAUSE, Evaluation, MetricsLine, RunDir
from art_cli.runs.storage.mirror import Mirror, NoMirror
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime import log as logs
from art_cli.runtime import threads
from art_cli.runtime.errors import ConfigError, Paused, Problem, first_of_group
from art_cli.runtime.terminal import can_draw, drawn

log = logging.getLogger(__name__)
WATCH_EVERY_S = 1.0  # interval between checks that the learner's processes live


@dataclass(frozen=True)
class TrainResult:
    """The state of a run when `train` returns."""

    root: Path
    step: int
    was_finished: bool  # True: nothing was left to do
    evaluations: dict[int, dict[str, float]]  # step -> metrics


class TrainingRun:
    """One process's work on a run. Engine and learner share one copy of the weights if both are in this process."""

    def __init__(
        self,
        loaded: LoadedConfig,
        run: RunDir,
        mirror: Mirror | NoMirror | None = None,
        *,
        begun: ProcessRollout | None = None,
        startup: Startup | None = None,
    ) -> None:
        self.mirror = mirror or NoMirror()
        self.begun, self.startup = begun, startup or Startup()
        self.scenarios = training_scenarios(loaded.config, loaded.directory)
        _warn_of_overlap(loaded, self.scenarios)
        self.judge: Judge = make_judge(loaded.config.judge, loaded.directory, job=str(run.root))
        self.shadows = ShadowJudges(loaded.config.shadow, loaded.directory, job=str(run.root))
        self.meter = RunMeter([self.judge, *self.shadows.judges.values()])
        _check_prices(loaded, [self.judge, *self.shadows.judges.values()])
        self.panel = RunPanel(loaded.config.name, num_steps=loaded.config.train.steps)
        self.startup.reached("data")
        self.engine_traits = engine_traits(loaded.config.engine, loaded.directory)
        if (
            self._needs_weights(loaded.config) and loaded.config.learner.name != "unsloth"
        ):  # Unsloth's import comes first
            import_libraries(has_adapter=loaded.config.model.lora is not None)
            self.startup.reached("torch and transformers")
        base = find_base(loaded.config.model.base, directory=loaded.directory, built=run.base)
        _check_targets(loaded, Path(base))
        decided = decide_dtype(loaded, base)
        if decided is not loaded:
            claim_config(run, decided)
        self.loaded, self.config, self.run = decided, decided.config, run
        self.weights = load_policy(self.config, base) if self._needs_weights(self.config) else None
        if self.weights is not None:
            self.policy = spec_of(self.weights)
        else:
            is_remote = isinstance(self.config.learner, TinkerLearnerConfig)
            device = None if is_remote else self.config.learner.device
            self.policy = read_spec(self.config.model, base, device=device, is_remote=is_remote)
        self.startup.reached("model")
        self.learner: Learner = make_learner(
            self.config, self.weights or self.policy, directory=loaded.directory, logs=run.logs
        )
        self.startup.reached("learner")
        self.trackers: Trackers = open_trackers(self.config, run.root, loaded.directory)
        command = going_on(self.loaded, run)
        self.interrupts = Interrupts(f"interrupted; what is complete is in {run.root}; go on with: {command}")

    def _needs_weights(self, config: RunConfig) -> bool:
        """Whether the engine or the learner computes with the policy's weights in this process."""
        return self.engine_traits.needs_weights or not has_own_weights(config)

    async def train(self) -> TrainResult:
        log.info("%s", self._describe())
        with self._shown(), self.interrupts.handled():
            try:
                await asyncio.sleep(0)  # an interrupt during loading ends the run here, before any thread starts
                await threads.call_in_thread(self.learner.start)  # an interrupt ends the wait for other nodes
                async with self._watching_learner():
                    step = await self._find_start()
                    self.startup.reached("first checkpoint and warm-up")
                    async with self._open_sampler(step) as sampler:
                        self.startup.reached("engine and agent")
                        sampler.gateway.on_first_reply = partial(self.startup.end, "first reply")
                        step = await self._take_steps(sampler, step)
            finally:
                self.learner.close()
                await self.judge.close()
                await self.shadows.close()
                await self.trackers.close()
        self._draw()
        return TrainResult(self.run.root, step, False, self.run.evaluations())

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """Shows the panel while the block runs, if there is a terminal."""
        if not can_draw():
            yield
            return
        with drawn(self.panel.render), logs.showing_stages(self.panel):
            yield

    def _draw(self) -> None:
        """Draws the learning curve: the reward, and the rollouts' own metrics in evaluations."""
        lines = self.run.metrics()
        names = {name for line in lines if line.split == "eval" for name in line.metrics}
        own = sorted(name for name in names if name not in ("reward", "failed") and not name.startswith("num_"))
        shares = [n for n in own if all(0 <= line.metrics.get(n, 0) <= 1 for line in lines if line.split == "eval")]
        rewards = read_report(self.run).reward_names
        picture = curve(self.config.name, run_series(lines, metrics=["reward", *shares][:4], rewards=rewards))
        write_file(self.run.curve_path, picture.encode())

    def _describe(self) -> str:
        what = self.config.model.base
        if self.weights is not None:
            size = count_parameters(self.weights.model)
            what += f", {size.whole / 1e6:.3g}M parameters, {size.trained / 1e6:.3g}M trained"
        engine, learner = self.config.engine, self.config.learner.name
        names = f"engine {engine_name(engine)}, learner {learner} on {self.policy.learner_device}"
        if isinstance(engine, TinkerEngineConfig):
            names = f"engine {engine.name}, learner {learner} at {engine.base_url}"
        elif has_own_weights(self.config):
            names += f" in {describe_processes(self.config)}"
        return f"{self.config.name}: {what}; {names}; learning rate {self.config.train.learning_rate:g}"

    # --- where to begin -----------------------------------------------------------------------------------------------

    async def _find_start(self) -> int:
        """The step of the newest valid checkpoint, now loaded. Without one, step 0 is made and warmed up by sft."""
        newest = self.run.newest_checkpoint()
        if newest is not None:
            path, manifest = newest
            self.learner.load(path)
            self._backfill(manifest)
            log.info("%s: goes on from step %d of %d", self.run.root, manifest.step, self.config.train.steps)
            return manifest.step
        metrics = await self._warm_up() if self.config.sft is not None else {}
        await self._save(0, metrics)
        if metrics:
            self._record(0, "sft", metrics)
        return 0

    async def _warm_up(self) -> dict[str, float]:
        """The warm-up's metrics. An interrupt ends it after the current update, and saves its state."""
        assert self.config.sft is not None
        examples = await threads.call_in_thread(load_examples, self.config.sft, self.loaded.directory)
        make = partial(WarmUp, self.learner, self.loaded, examples, base=self.policy.base, start=None)
        return await make_warm_up(await threads.call_in_thread(make), self.interrupts)

    def _backfill(self, manifest: Manifest) -> None:
        """Writes the metrics line that is missing if a kill came right after the checkpoint."""
        split, step = ("sft", 0) if manifest.step == 0 else ("train", manifest.step - 1)
        if manifest.metrics and not any((line.step, line.split) == (step, split) for line in self.run.metrics()):
            self._record(step, split, manifest.metrics)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _open_sampler(self, step: int) -> contextlib.AbstractAsyncContextManager[Sampler]:
        """The sampler at `step`. On-policy, engine and learner take turns with one copy of the weights.

        Otherwise each has its own. If the learner has processes of its own, the copy here is the engine's alone.
        """
        is_apart = has_own_weights(self.config)
        is_shared = self.config.train.max_staleness == 0 and not is_apart
        weights = self.weights if self.engine_traits.needs_weights else None
        if weights is not None and not is_shared and not is_apart:
            weights = clone_trainable(weights)
        return open_sampler(
            self.loaded,
            weights or self.policy,
            checkpoint=self.run.checkpoint_path(step),
            step=step,
            logs=self.run.logs,
            shares_weights=is_shared,
            begun=self.begun,
        )

    async def _take_steps(self, sampler: Sampler, first: int) -> int:
        """Takes all steps from `first` on; returns the policy's step afterwards.

        While the engine samples from step s, batches up to s + max_staleness may be played.
        """
        ahead = self.config.train.max_staleness
        history = read_history(self.run)
        self.watch = RunWatch(history, is_comparable=is_comparable(self.config.model_dump(mode="json")))
        self.stop_rules = StopRules(self.config.stop, self.run.pauses())
        self.meter.follow(history)
        self.panel.history = history
        await self._prove(sampler, first)
        await self._evaluate(sampler, first)
        batches = Batches(self.config, self.run, sampler, self.judge, self.scenarios, shadows=self.shadows)
        try:
            for step in range(first, first + ahead):
                batches.allow(step)
            for step in range(first, self.config.train.steps):
                self.mirror.check()
                batches.allow(step + ahead)
                await self._take_step(sampler, await batches.take(step), step)
                self.interrupts.stop_if_any()
                await self._evaluate(sampler, step + 1)
                self._prune()
        finally:
            await batches.close()
        return max(first, self.config.train.steps)

    async def _take_step(self, sampler: Sampler, batch: Batch, step: int) -> None:
        self.trackers.log_trajectories(step, batch.groups)
        self.panel.failures = count_failures(trajectory for group in batch.groups for trajectory in group)
        trained = await self._update(sampler, batch, step)
        metrics = trained.known() | batch.metrics  # the batch has, with refilled groups, other means of the rewards
        if trained.num_updates == 0:
            is_called = not all(trajectory.is_silent for group in batch.groups for trajectory in group)
            fault = find_fault(self.panel.failures, is_called=is_called, num_without_signal=len(batch.groups))
            total, why = self.config.train.steps, "no group could be judged" if fault is None else fault.text
            log.warning("step %d/%d: %s; no weight changed", step + 1, total, why)
        metrics |= self.meter.numbers()
        metrics["probe_gap"] = await self._hand_over(sampler, step + 1, metrics)
        self._record(step, "train", metrics)
        _announce(step, self.config.train.steps, metrics)
        self._note(UpdateNumbers(step + 1, metrics))

    def _note(self, record: UpdateNumbers | Evaluated) -> None:
        """Warns of what goes wrong from this record on. Raises Paused: a stop rule says so."""
        self.panel.add(record)
        for finding in self.watch.add(record):
            log.warning("%s", finding)
        history, is_evaluation = self.watch.history, isinstance(record, Evaluated)
        step = record.step if isinstance(record, Evaluated) else record.number
        for line in self.stop_rules.unreported(history, of_evaluations=is_evaluation):
            log.warning("%s", line)
        check = self.stop_rules.after_evaluation if is_evaluation else self.stop_rules.after_step
        self._stop(check(history, step), step)

    def _stop(self, firing: Sequence[Firing], step: int) -> None:
        """Warns of the rules that fire at a step. Raises Paused if one pauses the run and there is more to do."""
        is_done = step >= self.config.train.steps
        pausing = [each for each in firing if each.rule.then == "pause" and not is_done]
        for each in firing:
            if each not in pausing:
                log.warning("stop rule (%s): %s", each.rule, each.text)
        if not pausing:
            return
        self.run.append_metrics(step, PAUSE, {str(each.rule): each.value for each in pausing})
        self._prune()
        texts = "; ".join(f"{each.text} (stop rule: {each.rule}; it fires again {each.anew})" for each in pausing)
        kept, command = self.run.checkpoint_path(step), going_on(self.loaded, self.run)
        raise Paused(
            f"paused at step {step} of {self.config.train.steps}: {texts}; checkpoint: {kept}; go on with: {command}"
        )

    async def _update(self, sampler: Sampler, batch: Batch, step: int) -> StepMetrics:
        """The learner's step. On-policy nothing is sampled meanwhile, so that the engine sleeps."""
        is_on_policy = self.config.train.max_staleness == 0
        if is_on_policy:
            await sampler.engine.sleep()
        with logs.shown_bar(f"step {step + 1}/{self.config.train.steps}: packs") as progress:
            trained = await self.interrupts.off_loop(self.learner.step, batch.groups, progress=progress)
        if self.config.train.record_learned:  # before the checkpoint, so that each step that is done has the file
            await self.interrupts.off_loop(self.learner.write_learned, self.run.learned_path(step))
        if is_on_policy:
            await sampler.engine.wake()
        return trained

    async def _hand_over(self, sampler: Sampler, step: int, metrics: dict[str, float]) -> float:
        """Saves the learner's weights as `step` and loads them into the engine. Returns the proof's gap in nats."""
        checkpoint = await self._save(step, metrics)
        await sampler.engine.load(checkpoint, step)
        return await self._prove(sampler, step)

    async def _prove(self, sampler: Sampler, step: int) -> float:
        """The gap in nats between the engine's and the learner's scores of one probe. Raises DriftError: too large."""
        probe = proof.make_probe(self.policy.vocabulary)
        engine = await sampler.engine.score(probe)
        learner = await self.interrupts.off_loop(self.learner.score, probe)
        return proof.compare(engine, learner, dtype=self.policy.dtype, step=step)

    @contextlib.asynccontextmanager
    async def _watching_learner(self) -> AsyncIterator[None]:
        """Ends the code inside with a LearnerError as soon as one of the learner's processes is dead."""
        with first_of_group():
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_learner())
                yield
                watch.cancel()

    async def _watch_learner(self) -> NoReturn:
        while True:
            await asyncio.to_thread(self.learner.check)
            await asyncio.sleep(WATCH_EVERY_S)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    async def _evaluate(self, sampler: Sampler, step: int) -> None:
        """Evaluates the policy at `step` if an evaluation is due and not done yet."""
        config = self.config.eval
        if (
            config is None
            or (step % config.every and step != self.config.train.steps)
            or step in self.run.evaluations()
        ):
            return
        begin = time.perf_counter()
        trajectories = await play_evaluation(
            sampler, self.loaded, step=step, path=self.run.eval_path(step), title=f"eval at step {step}"
        )
        self.trackers.log_evaluation(step, [*group(trajectories).values()])
        values = values_by_scenario(trajectories)
        if has_contest := is_judged(self.config, trajectories):
            values["reward"] = await judge_contest(self.judge, trajectories, self._references(trajectories))
        means = {name: sum(v.values()) / len(v) for name, v in values.items() if v}
        seconds, reward_is = time.perf_counter() - begin, "wins" if has_contest else "own"
        evaluation = Evaluation(seconds=seconds, values=values, reward_is=reward_is, attempts=len(trajectories))
        self.run.write_evaluation(step, evaluation)
        self._record(step, "eval", means)
        shown = sorted(name for name in means if not name.startswith("num_"))
        own = {"reward": reward_names(self.config.model_dump(mode="json"), reward_is)["eval"]}
        log.info("eval at step %d: %s", step, "  ".join(f"{own.get(name, name)} {means[name]:.3f}" for name in shown))
        self._note(Evaluated(step, means, values.get("reward", {})))

    def _references(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The attempts of this run's first evaluation, possibly the one just played."""
        path = self.run.first_eval_path()
        return trajectories if path is None else list(self.run.lines(path, Trajectory))

    # --- what stays ---------------------------------------------------------------------------------------------------

    def _prune(self) -> None:
        train = self.config.train
        prune_trained(self.run, keep=train.keep_checkpoints, keeps_best=train.keep_best)

    async def _save(self, step: int, metrics: dict[str, float]) -> Path:
        """Writes the checkpoint of `step` in a thread, because rollouts of later steps may be under way meanwhile."""
        path = self.run.checkpoint_path(step)
        manifest = Manifest(
            step=step,
            base="../../base" if self.policy.base == str(self.run.base) else self.policy.base,
            config_hash=config_hash(self.config),
            dtype=self.policy.dtype,
            metrics=metrics,
        )

        def write() -> None:
            with new_checkpoint(path, manifest) as directory:
                self.learner.save(directory)

        await self.interrupts.off_loop(write)
        self.trackers.log_checkpoint(step, path)
        self.mirror.nudge()
        return path

    def _record(self, step: int, split: str, metrics: dict[str, float]) -> None:
        self.run.append_metrics(step, split, metrics)
        self.trackers.log(MetricsLine(step=step, split=split, metrics=metrics, time=time.time()))


def _warn_of_overlap(loaded: LoadedConfig, training: Sequence[Json]) -> None:
    if loaded.config.eval is None or loaded.config.eval.scenarios is None:  # a held-out share is disjoint
        return
    if overlap := str(find_overlap(training, evaluation_scenarios(loaded.config, loaded.directory))):
        log.warning("%s; eval.held_out splits one set so that none is", overlap)


def _check_prices(loaded: LoadedConfig, judges: Sequence[Judge]) -> None:
    """Raises ConfigError: a stop rule counts dollars, and what a judge's calls cost is not known."""
    unpriced = [judge.title for judge in judges if not judge.is_priced]
    for number, rule in enumerate(loaded.config.stop):
        if rule.usd is not None and unpriced:
            key, cure = f"stop.{number}.usd", "set the judge's price, or take the rule out"
            raise ConfigError([Problem(key, loaded.places.of(key), f"no price is known for {unpriced[0]}; {cure}")])


def _check_targets(loaded: LoadedConfig, base: Path) -> None:
    """Raises ConfigError: no module of the base is a LoRA target's, which shows only once the base is built."""
    if wrong := list(missing_targets(loaded.config.model, base)):
        raise ConfigError([Problem(key, loaded.places.of(key), message) for key, message in wrong])


def going_on(loaded: LoadedConfig, run: RunDir) -> str:
    """The shell command that continues `run`, or the sweep that it belongs to."""
    words = ["-m", *loaded.sweep] if loaded.sweep else [*loaded.overrides]
    if run.root.name != loaded.config.name:  # --fresh made it, and would start yet another run
        words = [*loaded.overrides, f"name={run.root.name}"]
    return shlex.join(["art", "train", str(loaded.path), *words])


def _announce(step: int, steps: int, metrics: dict[str, float]) -> None:
    shown = ["reward_mean", "loss", "teacher_kl", "kl", "grad_norm", "logprob_gap", "sample_s", "train_s"]
    numbers = "  ".join(f"{n} {metrics[n]:.3g}" for n in shown if n in metrics)
    log.info("step %d/%d: %s  %s", step + 1, steps, numbers, _describe_failures(metrics))
    if metrics.get("packed") == 0:
        log.warning("step %d: packs did not hold (packed 0), so the learner ran one sample at a time, slower", step + 1)


def _describe_failures(metrics: dict[str, float]) -> str:
    """Example: "failed 3 (mostly timeout)  limited 2"."""
    kinds = {name.removeprefix("failed."): num for name, num in metrics.items() if name.startswith("failed.")}
    mostly = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
    return f"failed {metrics['num_failed']:.0f}{mostly}  limited {metrics['num_limited']:.0f}"
