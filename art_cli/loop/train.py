"""The training loop: play and judge, update, publish, evaluate. It resumes from the run's directory."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.loop.batches import Batch
from art_cli.loop.claim_run import claim_run
from art_cli.loop.decide import decide_engine
from art_cli.loop.evaluate import judged_rewards, play_evaluation, values_by_scenario, values_of_sources
from art_cli.loop.interrupts import resume_command
from art_cli.loop.open_run import Run, open_run
from art_cli.loop.owed_groups import group
from art_cli.loop.record import claim_config
from art_cli.loop.startup import Startup
from art_cli.loop.stop_rules import Firing
from art_cli.reports.pages.conversation_text import last_reply
from art_cli.reports.pages.curve import curve, run_series
from art_cli.reports.run_report import closing, find_run_fault, reward_names
from art_cli.runs.chain import add_link, is_evaluated
from art_cli.runs.durable import write_file
from art_cli.runs.history import Evaluated, History, UpdateNumbers, count_failures, find_fault, read_history, sound
from art_cli.runs.manifest import read_manifest
from art_cli.runs.run_checkpoints import prune_trained, run_config
from art_cli.runs.run_dir import PAUSE, Evaluation, RunDir
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import log as logs
from art_cli.runtime.errors import LearnerError, Paused, printable

log = logging.getLogger(__name__)

# metrics in a step's log line
SHOWN = ("reward_mean", "is_accepted", "loss", "teacher_kl", "kl", "grad_norm", "logprob_gap", "sample_s", "train_s")


@dataclass(frozen=True)
class TrainResult:
    """A run's state when `train` returns."""

    root: Path
    step: int
    was_finished: bool  # True if the run was already complete
    evaluations: dict[int, dict[str, float]]  # step -> metrics
    closing: dict[str, Any]  # the report fields that `art train` prints at the end, as plain data


async def train(loaded: LoadedConfig, *, is_fresh: bool = False, startup: Startup | None = None) -> TrainResult:
    """Trains until `train.steps` are done. Resumes an existing run; `is_fresh` starts a new run instead.

    `startup` is this run's start-up clock. Raises RunError for a run in use or with a different configuration,
    ConfigError, and the parts' errors.
    """
    async with claim_run(loaded, is_fresh=is_fresh, startup=startup or Startup()) as claim:
        files, finished = claim.files, claim.finished_step
        if finished is not None:
            claim_config(files, decide_engine(claim.loaded))
            add_link(files, read_manifest(files.checkpoint_path(finished)), rest=finished + 1)
            return _result(files, finished, run_config(files), read_history(files), was_finished=True)
        async with open_run(claim) as run:
            await evaluate_if_due(run, run.first)
            for step in run.steps_left():
                batch = await take_groups(run, step)
                claim.startup.end("first groups")  # unless a reply came earlier
                metrics = await update(run, batch, step)
                await publish(run, step + 1, metrics)
                await evaluate_if_due(run, step + 1)
                prune(run)
        last = max(run.first, run.config.train.steps)
        add_link(files, read_manifest(files.checkpoint_path(last)), rest=last + 1)
        result = _result(files, last, run.config.model_dump(mode="json"), run.watch.history, was_finished=False)
        _draw_curve(run, result.closing["reward_names"])
        return result


def _result(
    files: RunDir, step: int, config: Mapping[str, Any], history: History, *, was_finished: bool
) -> TrainResult:
    means = {each.step: each.metrics for each in history.evaluations}
    last_words = msgspec.to_builtins(closing(files, config, history, find_run_fault(files, history)))
    return TrainResult(files.root, step, was_finished, means, last_words)


# --- a step -----------------------------------------------------------------------------------------------------------


async def take_groups(run: Run, step: int) -> Batch:
    """Returns the step's groups, played and judged. Allows batches up to `train.max_staleness` steps ahead to start."""
    run.mirror.check()
    for allowed in range(step, step + run.config.train.max_staleness + 1):
        run.batches.allow(allowed)
    batch = await run.batches.take(step)
    run.trackers.log_trajectories(step, batch.groups)
    run.panel.show_failures(count_failures(trajectory for members in batch.groups for trajectory in members))
    return batch


async def update(run: Run, batch: Batch, step: int) -> dict[str, float]:
    """Runs the learner's step and returns its metrics. On-policy, the engine sleeps from here until `publish`."""
    if run.is_on_policy:
        await run.sampler.engine.sleep()
    with logs.shown_bar(f"step {step + 1}/{run.config.train.steps}: packs") as progress:
        try:
            trained = await run.interrupts.off_loop(run.learner.step, batch.groups, progress=progress)
        except LearnerError as error:
            error.args = (f"step {step + 1}/{run.config.train.steps}: {error}",)
            raise
    if run.config.train.record_learned:  # before the checkpoint, so every finished step has the file
        await run.interrupts.off_loop(run.learner.write_learned, run.files.learned_path(step))
    if trained.num_updates == 0:
        _warn_of_no_update(run, batch, step)
    # the batch's reward means exclude refilled groups
    return trained.known() | batch.metrics | run.meter.numbers()


async def publish(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Saves the learner's weights as `step`, wakes the engine, loads them there, and records the step's metrics.

    Raises DriftError if engine and learner disagree, and Paused if a stop rule fires.
    """
    checkpoint = await run.writer.save(step, metrics)
    if run.is_on_policy:  # not earlier, because the learner scores the checkpoint's probe
        await run.sampler.engine.wake()
    proven = await run.sampler.load(checkpoint, step)
    assert proven is not None or not run.config.learner.trains_weights, "it was just written, with its proof"
    metrics = metrics if proven is None else metrics | proven.numbers
    run.writer.record(step - 1, "train", metrics, "" if proven is None else proven.digest)
    _announce(step, run.config.train.steps, metrics)
    _note(run, UpdateNumbers(step, sound(metrics)))
    run.interrupts.stop_if_any()


async def evaluate_if_due(run: Run, step: int) -> None:
    """Evaluates the policy at `step` if an evaluation is due and not yet done."""
    config, files = run.config.eval, run.files
    if config is None or (step % config.every and step != run.config.train.steps):
        return
    digest = await run.sampler.gateway.proven.digest(step)
    if is_evaluated(files, step, digest):
        return
    begin, path = time.perf_counter(), files.eval_path(step)
    title = f"eval at step {step}"
    scenarios = run.data.evaluation_by_source
    trajectories = await play_evaluation(run.sampler, config, scenarios, step=step, path=path, title=title)
    run.trackers.log_evaluation(step, [*group(trajectories).values()])
    values = values_by_scenario(trajectories)
    judged = await judged_rewards(run.config, run.judge, trajectories, lambda: _references(run, step, trajectories))
    if judged.by_scenario:
        values["reward"] = values.get("reward", {}) | judged.by_scenario
    values = values_of_sources(values, run.config) | values
    means = {name: sum(v.values()) / len(v) for name, v in values.items() if v}
    seconds = time.perf_counter() - begin
    reward_is = "wins" if judged.is_contest else "judge" if judged.by_scenario else "own"
    evaluation = Evaluation(seconds=seconds, values=values, reward_is=reward_is, attempts=len(trajectories))
    files.write_evaluation(step, evaluation)
    run.writer.record(step, "eval", means, digest)
    shown = sorted(name for name in means if not name.startswith("num_"))
    titles = {"reward": reward_names(run.config.model_dump(mode="json"), reward_is)["eval"]}
    log.info("%s: %s", title, "  ".join(f"{titles.get(name, name)} {means[name]:.3f}" for name in shown))
    if path == files.first_eval_path():
        _show_worst(title, trajectories)
    _note(run, Evaluated(step, sound(means), sound(values.get("reward", {}))))


def _references(run: Run, step: int, trajectories: list[Trajectory]) -> list[Trajectory]:
    """Returns the attempts of this run's first evaluation, or `trajectories` in that evaluation itself."""
    path = run.files.first_eval_path()
    if path is None or path == run.files.eval_path(step):
        return trajectories
    return list(run.files.lines(path, Trajectory))


def _show_worst(title: str, trajectories: list[Trajectory]) -> None:
    """Logs the last reply of the attempt with the lowest reward, as an example."""
    rewarded = [each for each in trajectories if each.error is None and each.returned_reward is not None]
    if worst := min(rewarded, key=lambda each: each.returned_reward or 0.0, default=None):
        lowest, name = f"reward {worst.returned_reward:g}", printable(worst.scenario_id, limit=80)
        log.info('%s: the lowest is %s, of %s, with the last reply "%s"', title, lowest, name, last_reply(worst))


def prune(run: Run) -> None:
    prune_trained(run.files, keep=run.config.train.keep_checkpoints, keeps_best=run.config.train.keep_best)


# --- reports ----------------------------------------------------------------------------------------------------------


def _note(run: Run, record: UpdateNumbers | Evaluated) -> None:
    """Warns about problems that begin with this record. Raises Paused if a stop rule pauses the run."""
    run.panel.add(record)
    for finding in run.watch.add(record):
        log.warning("%s", finding)
    history, is_evaluation = run.watch.history, isinstance(record, Evaluated)
    step = record.step if isinstance(record, Evaluated) else record.number
    for line in run.stop_rules.unreported(history, of_evaluations=is_evaluation):
        log.warning("%s", line)
    _stop(run, run.stop_rules.after(history, step, of_evaluations=is_evaluation), step)


def _stop(run: Run, firing: Sequence[Firing], step: int) -> None:
    """Warns about the stop rules that fire. Raises Paused if a rule pauses an unfinished run."""
    is_done = step >= run.config.train.steps
    pausing = [each for each in firing if each.rule.then == "pause" and not is_done]
    for each in firing:
        if each not in pausing:
            log.warning("stop rule (%s): %s", each.rule, each.text)
    if not pausing:
        return
    run.files.append_metrics(step, PAUSE, {str(each.rule): each.value for each in pausing})
    prune(run)
    texts = "; ".join(
        f"{each.text}{_before(run, each)} (stop rule: {each.rule}; it fires again {each.anew})" for each in pausing
    )
    kept, command = run.files.checkpoint_path(step), resume_command(run.loaded, run.files)
    raise Paused(
        f"paused at step {step} of {run.config.train.steps}: {texts}; checkpoint: {kept}; continue with: {command}"
    )


def _before(run: Run, firing: Firing) -> str:
    """Names the newest checkpoint from before the rule's finding, if the rule dates its finding."""
    kept = [step for step in run.files.checkpoint_steps() if firing.before is not None and step <= firing.before]
    return f"; the checkpoint before that: {run.files.checkpoint_path(kept[-1])}" if kept else ""


def _warn_of_no_update(run: Run, batch: Batch, step: int) -> None:
    trajectories = [trajectory for members in batch.groups for trajectory in members]
    is_called = not all(trajectory.is_silent for trajectory in trajectories)
    fault = find_fault(count_failures(trajectories), is_called=is_called, num_without_signal=len(batch.groups))
    why = "no group could be judged" if fault is None else fault.text
    log.warning("step %d/%d: %s; no weight changed", step + 1, run.config.train.steps, why)


def _announce(step: int, steps: int, metrics: dict[str, float]) -> None:
    numbers = "  ".join(f"{name} {metrics[name]:.3g}" for name in SHOWN if name in metrics)
    kinds = {name.removeprefix("failed."): num for name, num in metrics.items() if name.startswith("failed.")}
    mostly = f" (mostly {max(kinds, key=lambda kind: kinds[kind])})" if kinds else ""
    num_failed = metrics["num_failed"] + metrics.get("num_policy_failed", 0)
    failed = f"failed {num_failed:.0f}{mostly}  limited {metrics['num_limited']:.0f}"
    log.info("step %d/%d: %s  %s", step, steps, numbers, failed)
    if metrics.get("packed") == 0:
        log.warning("step %d: packs did not hold (packed 0), so the learner ran one sample at a time, slower", step)


def _draw_curve(run: Run, rewards: Mapping[str, str]) -> None:
    """Draws the learning curve: the reward, and the rollouts' metrics in evaluations."""
    history = run.watch.history
    done = [each.metrics for each in history.evaluations]
    own = sorted({n for each in done for n in each if n not in ("reward", "failed") and not n.startswith("num_")})
    shares = [name for name in own if all(0 <= each.get(name, 0) <= 1 for each in done)]
    picture = curve(run.config.name, run_series(history, metrics=["reward", *shares][:4], rewards=rewards))
    write_file(run.files.curve_path, picture.encode())
