"""train: opens a run and trains it. What is wrong with its configuration or data is said before any work is done.

    configuration -> checks -> lock of the run's directory -> TrainingRun (training_run.py) -> TrainResult

A run directory that a mistake left empty is removed.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import OwnEngineConfig
from art_cli.engines import engine_traits
from art_cli.judges.smoke_test import require_keys
from art_cli.learners.sft.examples import load_examples
from art_cli.loop.auto import describe, resolve_auto
from art_cli.loop.dtype import follow_record
from art_cli.loop.record import claim_config, follow_rate
from art_cli.loop.references import check_ready
from art_cli.loop.startup import Startup
from art_cli.loop.training_run import TrainingRun, TrainResult
from art_cli.rollouts.rollout_runner import begin_rollout
from art_cli.rollouts.scenario_files import is_function, pools_of
from art_cli.rollouts.splits import evaluation_scenarios, training_scenarios
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import mirrored
from art_cli.runs.storage.object_store import ObjectStore
from art_cli.runtime import log as logs
from art_cli.runtime import threads
from art_cli.runtime.errors import ConfigError, Problem, UsageError
from art_cli.runtime.secrets import find_secrets

log = logging.getLogger(__name__)


async def train(loaded: LoadedConfig, *, is_fresh: bool = False, startup: Startup | None = None) -> TrainResult:
    """Trains until `train.steps` are done. An existing run is resumed; `is_fresh` starts a new one beside it.

    `startup` is the clock of the process that was started for this run.
    Raises RunError: the run is in use, or another configuration made it; ConfigError; and every error of the parts.
    """
    startup = startup or Startup()
    startup.reached("python and configuration")
    check_ready(loaded, is_training=True)
    _read_data(loaded)
    loaded = resolve_auto(loaded, "engine", "learner", is_logged=False)  # below, in the run's log too
    _check_engine(loaded)
    for judge in (loaded.config.judge, *(shadow.judge for shadow in loaded.config.shadow.values())):
        await asyncio.to_thread(require_keys, judge, loaded.directory)
    root = loaded.config.runs / loaded.config.name
    run = RunDir(_beside(root, await _kept_names(loaded)) if is_fresh else root)
    with _unless_wrong(run), run.lock(), logs.kept(run.log_path, find_secrets(os.environ).redact):
        log.info("art train %s: %s", loaded.path, describe(loaded, "engine", "learner"))
        keep, keeps_best = loaded.config.train.keep_checkpoints, loaded.config.train.keep_best
        async with mirrored(run, loaded.config.store, keep=keep, keeps_best=keeps_best) as mirror:
            loaded = follow_rate(follow_record(loaded, run), run)
            claim_config(run, loaded)
            run.clean()
            if (step := _finished_step(run, loaded)) is not None:
                return TrainResult(run.root, step, True, run.evaluations())
            startup.reached("data")
            begun = await begin_rollout(loaded.config.rollout, loaded.directory)
            try:
                return await TrainingRun(loaded, run, mirror, begun=begun, startup=startup).train()
            finally:
                if begun is not None:
                    await begun.close()


async def _kept_names(loaded: LoadedConfig) -> Sequence[str]:
    """The names that runs have in the store, where there is one."""
    if loaded.config.store is None:
        return ()
    return await threads.call_in_thread(ObjectStore(loaded.config.store).directories)


def _check_engine(loaded: LoadedConfig) -> None:
    """Raises ConfigError: the user's own engine says that it cannot follow this training."""
    if not isinstance(loaded.config.engine, OwnEngineConfig):
        return
    traits, message = engine_traits(loaded.config.engine, loaded.directory), ""
    if not traits.can_train:
        message = "its class says can_train = False, so that its model cannot be trained"
    elif traits.swaps_adapters and loaded.config.model.lora is None:
        message = "its class says swaps_adapters = True, so that it cannot follow whole weights; set model.lora"
    if message:
        raise ConfigError([Problem("engine", loaded.places.of("engine"), message)])


def _beside(root: Path, kept: Sequence[str]) -> Path:
    """The first of root, root-2, root-3, ... that does not exist, here or in the store."""
    paths = [root, *(root.with_name(f"{root.name}-{number}") for number in range(2, 10_000))]
    return next(path for path in paths if not path.exists() and path.name not in kept)


def _read_data(loaded: LoadedConfig) -> None:
    """Reads every data file that the run will need. Raises DataError before any work is done.

    Data that a function of the user makes is read when it is needed.
    """
    config, directory = loaded.config, loaded.directory
    scenarios = config.rollout.scenarios
    if scenarios is None or not is_function(scenarios, directory):
        pools_of(training_scenarios(config, directory), config.rollout.pool)
    evaluated = scenarios if config.eval is None else config.eval.scenarios or scenarios
    if config.eval is not None and (evaluated is None or not is_function(evaluated, directory)):
        evaluation_scenarios(config, directory)
    if config.sft is not None and all(
        (directory / spec).exists() for spec in (config.sft.demos, config.sft.eval_demos) if spec is not None
    ):
        load_examples(config.sft, directory)


@contextlib.contextmanager
def _unless_wrong(run: RunDir) -> Iterator[None]:
    """Removes a new run directory if the configuration proves to be wrong inside.

    Some mistakes show only once the base model is there, such as a LoRA target that it lacks. A directory that existed
    before, or that has a checkpoint, stays.
    """
    made = [path for path in (run.root, *run.root.parents) if not path.exists()]
    try:
        yield
    except UsageError:
        if made and not run.checkpoint_steps():
            shutil.rmtree(run.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run may lie there by now
                for path in made[1:]:
                    path.rmdir()
        raise


def _finished_step(run: RunDir, loaded: LoadedConfig) -> int | None:
    """The step of the newest checkpoint if nothing is left to do; else None."""
    newest = run.newest_checkpoint()
    if newest is None or newest[1].step < loaded.config.train.steps:
        return None
    is_evaluated = loaded.config.eval is None or newest[1].step in run.evaluations()
    return newest[1].step if is_evaluated else None
