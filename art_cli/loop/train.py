"""TrainingRun: one run from its first policy to its last, resumed from whatever its directory holds.

    step N:  batch (batches.py) -> learner.step -> checkpoint N + 1 -> engine loads it -> proof -> eval

The newest checkpoint that verifies says which step is next; the step's own files say what of it is owed. Nothing else
is remembered. A checkpoint carries its step's metrics, so that a kill between the two loses no line of metrics.jsonl.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from pydantic import ValidationError

from art_cli import log as logs
from art_cli import threads
from art_cli.checkpoints import prune_trained
from art_cli.config.compose import LoadedConfig, config_changes, config_hash
from art_cli.config.identity import Change
from art_cli.config.references import check_ready, missing_targets
from art_cli.config.schema import RunConfig
from art_cli.errors import ConfigError, DataError, Interrupted, Problem, RunError, UsageError
from art_cli.judges import Judge, make_judge
from art_cli.judges.trial import require_keys
from art_cli.learners import Learner, StepMetrics, has_own_weights, load_policy, make_learner
from art_cli.learners.demos import load_demos
from art_cli.loop import proof
from art_cli.loop.bar import shown_updates
from art_cli.loop.batches import Batch, Batches
from art_cli.loop.choice import describe, settle
from art_cli.loop.contest import is_judged, judge_contest
from art_cli.loop.dtype import decide_dtype, follow_record
from art_cli.loop.evaluate import play_evaluation, values_by_scenario
from art_cli.loop.sampler import Sampler, open_sampler
from art_cli.loop.warm_up import WAIT_S, WarmUp
from art_cli.model import Weights, count_parameters, find_base, twin
from art_cli.rollouts.scenarios import load_scenarios
from art_cli.run_dir import Manifest, MetricsLine, RunDir, new_checkpoint, read_lines, read_object, write_file
from art_cli.secrets import find_secrets
from art_cli.trackers.dispatch import Trackers, open_trackers
from art_cli.trajectory import Trajectory
from art_cli.views.curve import curve, run_series

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MEND_RECORD = "restore it, or remove it to go on with the configuration as it is now"
WATCH_EVERY_S = 1.0  # the learner's processes


@dataclass(frozen=True)
class TrainResult:
    """Where a run stands when `train` returns."""

    root: Path
    step: int
    was_finished: bool  # nothing was left to do
    evaluations: dict[int, dict[str, float]]  # step -> metrics


async def train(loaded: LoadedConfig, *, is_fresh: bool = False) -> TrainResult:
    """Trains until `train.steps` are done; a run that exists is resumed, or with `is_fresh` left beside a new one.

    Raises RunError (in use, or made by another configuration), ConfigError, and what its parts raise.
    """
    check_ready(loaded, is_training=True)
    _read_data(loaded)
    loaded = settle(loaded, "engine", "learner")
    await asyncio.to_thread(require_keys, loaded.config.judge, loaded.directory)
    root = loaded.config.runs / loaded.config.name
    run = RunDir(_beside(root) if is_fresh else root)
    with _unless_wrong(run), run.lock(), logs.kept(run.log_path, find_secrets(os.environ).redact):
        log.info("art train %s: %s", loaded.path, describe(loaded, "engine", "learner"))
        loaded = follow_record(loaded, run)
        claim_config(run, loaded)
        run.clean()
        if (step := _finished_step(run, loaded)) is not None:
            return TrainResult(run.root, step, True, _evaluations(run))
        return await TrainingRun(loaded, run).train()


def _beside(root: Path) -> Path:
    """The first of root, root-2, root-3, ... that is not there."""
    paths = [root, *(root.with_name(f"{root.name}-{number}") for number in range(2, 10_000))]
    return next(path for path in paths if not path.exists())


def _read_data(loaded: LoadedConfig) -> None:
    """Reads every data file that the run will need at some time. Raises DataError now for what is wrong in one.

    What functions make is left to the time when it is needed, since they are the user's code.
    """
    config, directory = loaded.config, loaded.directory
    for scenarios in [config.rollout.scenarios, *([config.eval.scenarios] if config.eval else [])]:
        if (directory / scenarios).is_file():
            load_scenarios(scenarios, directory)
    if config.sft is not None and (directory / config.sft.demos).is_file():
        load_demos(config.sft.demos, directory)


@contextlib.contextmanager
def _unless_wrong(run: RunDir) -> Iterator[None]:
    """Takes a run directory away that was made inside for a configuration that turned out to be wrong.

    Some mistakes are known only when the base model is there, such as a LoRA target that it does not have. A directory
    that was there before, or that has a checkpoint, stays.
    """
    made = [path for path in (run.root, *run.root.parents) if not path.exists()]
    try:
        yield
    except UsageError:
        if made and not run.checkpoint_steps():
            shutil.rmtree(run.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run lies there by now
                for path in made[1:]:
                    path.rmdir()
        raise


def claim_config(run: RunDir, loaded: LoadedConfig) -> None:
    """Writes config.json, or holds it against the one that is there. Raises RunError naming each difference.

    A run that never came to its first checkpoint is nobody's yet: it takes the new one. A run goes on with other values
    of the keys in identity.MAY_CHANGE; `changes` says which and from which step on. `auto` says why the engine and the
    learner are what they are, where the configuration left it to the machine.
    """
    new = loaded.config.model_dump(mode="json")
    changes: list[dict[str, Any]] = []
    if os.path.lexists(run.config_path):
        old, changes = _read_record(run)
        found = _changes(old, new)
        if found and not run.checkpoint_steps():
            shutil.rmtree(run.base, ignore_errors=True)  # built as the old one said
        elif refusal := _refusal(run, found):
            raise RunError(refusal)
        elif found:
            newest = run.newest_checkpoint()
            step = newest[1].step if newest is not None else 0
            log.info("%s: from step %d on: %s", run.root, step + 1, "; ".join(map(str, found)))
            changes += [{"step": step} | change._asdict() for change in found]
    record = new | {"auto": dict(loaded.auto), "changes": changes}
    write_file(run.config_path, json.dumps(record, indent=2).encode() + b"\n")


def find_clash(run: RunDir, loaded: LoadedConfig) -> str:
    """Why the run that is there is another one than the configuration describes, as a line; "": it is not."""
    if not os.path.lexists(run.config_path):
        return ""
    return _refusal(run, _changes(_read_record(run)[0], loaded.config.model_dump(mode="json")))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """How two configurations train differently. A dtype that one of them leaves open is no difference."""
    changes = config_changes(old, new)
    return [change for change in changes if change.key != "model.dtype" or "auto" not in (change.old, change.new)]


def _refusal(run: RunDir, changes: Sequence[Change]) -> str:
    refused = [str(change) for change in changes if not change.is_allowed]
    if not refused:
        return ""
    return (
        f"{run.root}: made by another configuration: {'; '.join(refused)}; "
        "change it back, give the run another name, or start anew beside it with --fresh"
    )


def _read_record(run: RunDir) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the run was made with, and what was changed since. Raises RunError: config.json is not as it was written.

    A key that the record lacks, since an older version wrote it, has its default.
    """
    try:
        record = read_object(run.config_path)
        changes = record.pop("changes", [])
        if not isinstance(changes, list):
            raise DataError("'changes' is not a list", run.config_path)
    except DataError as error:
        raise RunError(f"{error}; {MEND_RECORD}") from error
    record.pop("auto", None)
    with contextlib.suppress(ValidationError):  # what does not fit the schema is told as a difference
        record = RunConfig.model_validate(record).model_dump(mode="json")
    return record, changes


def _finished_step(run: RunDir, loaded: LoadedConfig) -> int | None:
    """The step of the newest checkpoint where nothing is left to do; else None."""
    newest = run.newest_checkpoint()
    if newest is None or newest[1].step < loaded.config.train.steps:
        return None
    is_evaluated = loaded.config.eval is None or newest[1].step in _evaluations(run)
    return newest[1].step if is_evaluated else None


def _evaluations(run: RunDir) -> dict[int, dict[str, float]]:
    return {line.step: line.metrics for line in run.metrics() if line.split == "eval"}


class TrainingRun:
    """One process's work on a run. Holds the weights once, for learner and engine both, where both are in it."""

    def __init__(self, loaded: LoadedConfig, run: RunDir) -> None:
        self.scenarios = load_scenarios(loaded.config.rollout.scenarios, loaded.directory)
        self.judge: Judge = make_judge(loaded.config.judge, loaded.directory, job=str(run.root))
        base = find_base(loaded.config.model.base, directory=loaded.directory, built=run.base)
        _check_targets(loaded, Path(base))
        decided = decide_dtype(loaded, base)
        if decided is not loaded:
            claim_config(run, decided)
        self.loaded, self.config, self.run = decided, decided.config, run
        self.weights: Weights = load_policy(self.config, base)
        self.learner: Learner = make_learner(self.config, self.weights, directory=loaded.directory, logs=run.logs)
        self.trackers: Trackers = open_trackers(self.config, run.root, loaded.directory)
        self.interrupts = 0

    async def train(self) -> TrainResult:
        log.info("%s", self._describe())
        with self._interruptible():
            try:
                await asyncio.sleep(0)  # an interrupt while the model was loaded ends the run here, before any thread
                async with self._watching_learner():
                    step = await self._find_start()
                    async with self._open_sampler(step) as sampler:
                        step = await self._take_steps(sampler, step)
            except asyncio.CancelledError:
                raise self._interruption() from None
            finally:
                self.learner.close()
                await self.judge.close()
                await self.trackers.close()
        self._draw()
        return TrainResult(self.run.root, step, False, _evaluations(self.run))

    def _draw(self) -> None:
        """The learning curve, for people: reward, and what the rollouts themselves measured in evaluations."""
        lines = self.run.metrics()
        names = {name for line in lines if line.split == "eval" for name in line.metrics}
        own = sorted(name for name in names if name not in ("reward", "failed") and not name.startswith("num_"))
        shares = [n for n in own if all(0 <= line.metrics.get(n, 0) <= 1 for line in lines if line.split == "eval")]
        picture = curve(self.config.name, run_series(lines, metrics=["reward", *shares][:4]))
        write_file(self.run.curve_path, picture.encode())

    def _describe(self) -> str:
        size = count_parameters(self.weights.model)
        sizes = f"{size.whole / 1e6:.3g}M parameters, {size.trained / 1e6:.3g}M trained"
        names = f"engine {self.config.engine.name}, learner {self.config.learner.name} on {self.weights.device}"
        if has_own_weights(self.config):
            names += " in processes of its own"
        return f"{self.config.name}: {self.config.model.base}, {sizes}; {names}"

    # --- where to begin -----------------------------------------------------------------------------------------------

    async def _find_start(self) -> int:
        """The step of the newest valid checkpoint, loaded; without one, step 0 is made (and warmed up by sft)."""
        newest = self.run.newest_checkpoint()
        if newest is not None:
            path, manifest = newest
            self.learner.load(path)
            self._backfill(manifest)
            log.info("%s: goes on from step %d of %d", self.run.root, manifest.step, self.config.train.steps)
            return manifest.step
        metrics = await self._warm_up() if self.config.sft is not None else {}
        self._save(0, metrics)
        if metrics:
            self._record(0, "sft", metrics)
        return 0

    async def _warm_up(self) -> dict[str, float]:
        """Its numbers. An interrupt ends it after the update that is being computed; what was done is saved."""
        assert self.config.sft is not None
        demos = await threads.call_in_thread(load_demos, self.config.sft.demos, self.loaded.directory)
        make = partial(WarmUp, self.learner, self.loaded, demos, base=self.weights.base, start=None)
        warm_up = await threads.call_in_thread(make)
        await self._wait_for(warm_up)
        try:
            await self._off_loop(warm_up.begin)
            with shown_updates("sft: updates") as progress:
                while not warm_up.is_done:
                    if self.interrupts:
                        await self._off_loop(warm_up.save)
                    self._stop_if_interrupted()
                    await self._off_loop(warm_up.take, progress)
            return warm_up.finish()
        finally:
            warm_up.release()

    async def _wait_for(self, warm_up: WarmUp) -> None:
        """Until no other process makes the same one."""
        is_told = False
        while not warm_up.acquire():
            if not is_told:
                log.info("sft: another process makes the same warm-up; its result is taken when it is done")
                is_told = True
            await asyncio.sleep(WAIT_S)

    def _backfill(self, manifest: Manifest) -> None:
        """Writes the metrics line that a kill right after the checkpoint left out."""
        split, step = ("sft", 0) if manifest.step == 0 else ("train", manifest.step - 1)
        if manifest.metrics and not any((line.step, line.split) == (step, split) for line in self.run.metrics()):
            self._record(step, split, manifest.metrics)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _open_sampler(self, step: int) -> contextlib.AbstractAsyncContextManager[Sampler]:
        """On-policy, engine and learner take turns with one copy of the weights; otherwise each has its own.

        A learner in processes of its own leaves the copy here to the engine.
        """
        is_apart = has_own_weights(self.config)
        is_shared = self.config.train.max_staleness == 0 and not is_apart
        return open_sampler(
            self.loaded,
            self.weights if is_shared or is_apart else twin(self.weights),
            checkpoint=self.run.checkpoint_path(step),
            step=step,
            logs=self.run.logs,
            shares_weights=is_shared,
        )

    async def _take_steps(self, sampler: Sampler, first: int) -> int:
        """All steps from `first` on; the one that the policy stands at then.

        While the engine samples from step s, batches up to s + max_staleness may be played.
        """
        ahead = self.config.train.max_staleness
        await self._prove(sampler, first)
        await self._evaluate(sampler, first)
        batches = Batches(self.config, self.run, sampler, self.judge, self.scenarios)
        try:
            for step in range(first, first + ahead):
                batches.allow(step)
            for step in range(first, self.config.train.steps):
                batches.allow(step + ahead)
                await self._take_step(sampler, await batches.take(step), step)
                self._stop_if_interrupted()
                await self._evaluate(sampler, step + 1)
                prune_trained(self.run, keep=self.config.train.keep_checkpoints)
        finally:
            await batches.close()
        return max(first, self.config.train.steps)

    async def _take_step(self, sampler: Sampler, batch: Batch, step: int) -> None:
        self.trackers.log_trajectories(step, batch.groups)
        trained = await self._update(sampler, batch, step)
        metrics = batch.metrics | _numbers(trained)
        if trained.num_updates == 0:
            total = self.config.train.steps
            log.warning("step %d/%d: no signal: all groups' rewards are equal; no weight changed", step + 1, total)
        metrics["probe_gap"] = await self._hand_over(sampler, step + 1, metrics)
        self._record(step, "train", metrics)
        _announce(step, self.config.train.steps, metrics)

    async def _update(self, sampler: Sampler, batch: Batch, step: int) -> StepMetrics:
        """The learner's step. On-policy there is nothing to sample meanwhile: the engine lets go of its memory."""
        is_resting = self.config.train.max_staleness == 0
        if is_resting:
            await sampler.engine.rest()
        with shown_updates(f"step {step + 1}/{self.config.train.steps}: packs") as progress:
            trained = await self._off_loop(self.learner.step, batch.groups, progress=progress)
        if is_resting:
            await sampler.engine.wake()
        return trained

    async def _hand_over(self, sampler: Sampler, step: int, metrics: dict[str, float]) -> float:
        """Checkpoints the learner's weights as `step` and has the engine sample from them; the proof's gap in nats."""
        checkpoint = self._save(step, metrics)
        await sampler.engine.load(checkpoint, step)
        return await self._prove(sampler, step)

    async def _prove(self, sampler: Sampler, step: int) -> float:
        """Contract 5: engine and learner score the same probe. Returns the gap in nats; raises DriftError."""
        probe = proof.make_probe(self.weights.model.config.vocab_size)
        engine = await sampler.engine.score(probe)
        learner = await self._off_loop(self.learner.score, probe)
        return proof.compare(engine, learner, dtype=self.weights.dtype_name, step=step)

    @contextlib.asynccontextmanager
    async def _watching_learner(self) -> AsyncIterator[None]:
        """What is inside ends with the learner's LearnerError as soon as a process of its own is dead."""
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch_learner())
                yield
                watch.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _watch_learner(self) -> NoReturn:
        while True:
            await asyncio.to_thread(self.learner.check)
            await asyncio.sleep(WATCH_EVERY_S)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    async def _evaluate(self, sampler: Sampler, step: int) -> None:
        """Evaluates the policy at `step` when it is due and not yet done."""
        config = self.config.eval
        if (
            config is None
            or (step % config.every and step != self.config.train.steps)
            or step in _evaluations(self.run)
        ):
            return
        trajectories = await play_evaluation(
            sampler, self.loaded, step=step, path=self.run.eval_path(step), title=f"eval at step {step}"
        )
        values = values_by_scenario(trajectories)
        if is_judged(self.config, trajectories):
            values["reward"] = await judge_contest(self.judge, trajectories, self._references(trajectories))
        means = {name: sum(v.values()) / len(v) for name, v in values.items() if v}
        self._record(step, "eval", means)
        shown = sorted(name for name in means if not name.startswith("num_"))
        log.info("eval at step %d: %s", step, "  ".join(f"{name} {means[name]:.3f}" for name in shown))

    def _references(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The attempts of this run's first evaluation, which may be the one that was just played."""
        path = self.run.first_eval_path()
        return trajectories if path is None else list(read_lines(path, Trajectory))

    # --- what stays ---------------------------------------------------------------------------------------------------

    def _save(self, step: int, metrics: dict[str, float]) -> Path:
        path = self.run.checkpoint_path(step)
        manifest = Manifest(
            step=step,
            base="../../base" if self.weights.base == str(self.run.base) else self.weights.base,
            config_hash=config_hash(self.config),
            dtype=self.weights.dtype_name,
            metrics=metrics,
        )
        with new_checkpoint(path, manifest) as directory:
            self.learner.save(directory)
        return path

    def _record(self, step: int, split: str, metrics: dict[str, float]) -> None:
        self.run.append_metrics(step, split, metrics)
        self.trackers.log(MetricsLine(step=step, split=split, metrics=metrics, time=time.time()))

    # --- Ctrl-C -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """The first SIGINT or SIGTERM ends the run after what is complete is written; a second one ends it at once."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        self._is_updating = False

        def interrupt() -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                signal.raise_signal(signal.SIGINT)
            elif self._is_updating:
                log.warning("interrupted: finishing this update first; once more to stop at once (nothing is lost)")
            else:
                main.cancel()

        # a notebook trains in another thread than the main one, which alone has signals, and cancels this task itself
        has_signals = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if has_signals else ()
        for number in signals:
            loop.add_signal_handler(number, interrupt)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    async def _off_loop(self, function: Callable[..., Result], *arguments: Any, **knobs: Any) -> Result:
        """`function` in a thread. An interrupt waits for it, since a thread cannot be stopped halfway."""
        self._is_updating = True
        try:
            return await threads.compute(function, *arguments, **knobs)
        finally:
            self._is_updating = False

    def _stop_if_interrupted(self) -> None:
        if self.interrupts:
            raise self._interruption()

    def _interruption(self) -> Interrupted:
        command = going_on(self.loaded, self.run)
        return Interrupted(f"interrupted; what is complete is in {self.run.root}; go on with: {command}")


def going_on(loaded: LoadedConfig, run: RunDir) -> str:
    """The command that goes on with `run`, or with the sweep that it is one of, as a shell reads it."""
    words = ["-m", *loaded.sweep] if loaded.sweep else [*loaded.overrides]
    if run.root.name != loaded.config.name:  # made by --fresh, which would begin once more
        words = [*loaded.overrides, f"name={run.root.name}"]
    return shlex.join(["art", "train", str(loaded.path), *words])


def _check_targets(loaded: LoadedConfig, base: Path) -> None:
    """Raises ConfigError: LoRA targets that no module of the base has, which is known only once it was built."""
    if wrong := list(missing_targets(loaded.config.model, base)):
        raise ConfigError([Problem(key, loaded.places.of(key), message) for key, message in wrong])


def _numbers(metrics: StepMetrics) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(metrics).items() if not math.isnan(value)}


def _announce(step: int, steps: int, metrics: dict[str, float]) -> None:
    shown = ["reward_mean", "loss", "kl", "grad_norm", "logprob_gap", "sample_s", "train_s"]
    numbers = "  ".join(f"{n} {metrics[n]:.3g}" for n in shown if n in metrics)
    log.info("step %d/%d: %s  %s", step + 1, steps, numbers, _describe_failures(metrics))
    if metrics.get("packed") == 0:
        log.warning("step %d: packs did not hold (packed 0), so the learner ran one sample at a time, slower", step + 1)


def _describe_failures(metrics: dict[str, float]) -> str:
    """Example: "failed 3 (mostly timeout)  limited 2"."""
    kinds = {name.removeprefix("failed."): num for name, num in metrics.items() if name.startswith("failed.")}
    mostly = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
    return f"failed {metrics['num_failed']:.0f}{mostly}  limited {metrics['num_limited']:.0f}"
