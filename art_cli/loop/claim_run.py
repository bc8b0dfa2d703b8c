"""Claims a run for this process, after all checks that need no loading.

    configuration -> checks -> lock of the run's directory -> mirror -> comparison with the run's record -> Claim

If a mistake leaves a new run directory empty, the directory is removed.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from art_cli.config.compose import LoadedConfig
from art_cli.engines import engine_traits
from art_cli.judges.source_judges import require_all_keys
from art_cli.judges.trial import require_keys
from art_cli.learners.sft.examples import Examples, load_examples
from art_cli.loop.record import check_record, follow
from art_cli.loop.references import check_ready
from art_cli.loop.startup import Startup
from art_cli.rollouts.scenario_files import RunScenarios, is_function, pools_of
from art_cli.runs.chain import is_evaluated
from art_cli.runs.manifest import digest_of
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.mirror import Mirror, NoMirror, mirrored
from art_cli.runs.storage.object_store import ObjectStore
from art_cli.runtime import log as logs
from art_cli.runtime import threads
from art_cli.runtime.errors import ConfigError, Problem, UsageError, naming_source
from art_cli.runtime.scratch import make_directory
from art_cli.runtime.secrets import find_secrets

log = logging.getLogger(__name__)


class RunData(RunScenarios):
    """The run's scenarios and warm-up examples, each read once on first use."""

    @cached_property
    def examples(self) -> Examples:
        assert self.config.sft is not None, "no sft section"
        return load_examples(self.config.sft, self.directory)

    def check(self) -> None:
        """Reads the run's data files, but not yet the user's functions. Raises DataError before any work is done."""
        config, directory = self.config, self.directory
        for name, part in self.by_source.items():
            scenarios, evaluation = part.config.rollout.scenarios, part.config.eval
            evaluated = scenarios if evaluation is None else evaluation.scenarios or scenarios
            with naming_source(name):
                if scenarios is None or not is_function(scenarios, directory):
                    pools_of(part.training, part.config.rollout.pool)
                if evaluation is not None and (evaluated is None or not is_function(evaluated, directory)):
                    _ = part.evaluation
        if config.sft is not None and all(
            (directory / spec).exists() for spec in (config.sft.demos, config.sft.eval_demos) if spec is not None
        ):
            _ = self.examples


@dataclass(frozen=True)
class Claim:
    """A run locked by this process. Its configuration includes the decisions of earlier starts (record.follow)."""

    loaded: LoadedConfig
    files: RunDir
    data: RunData
    mirror: Mirror | NoMirror
    startup: Startup
    job: str  # the run's path and id; judges count their spending under this key

    @property
    def finished_step(self) -> int | None:
        """The newest checkpoint's step if the run is finished."""
        newest, config = self.files.newest_checkpoint(), self.loaded.config
        if newest is None or newest[1].step < config.train.steps:
            return None
        step = newest[1].step
        is_done = config.eval is None or is_evaluated(self.files, step, digest_of(newest[1]))
        return step if is_done else None


@contextlib.asynccontextmanager
async def claim_run(loaded: LoadedConfig, *, is_fresh: bool, startup: Startup) -> AsyncIterator[Claim]:
    """Yields the run of the configuration, locked; with `is_fresh`, a new run with a numbered name.

    Raises RunError for a run in use or with a different configuration, ConfigError, and the parts' errors.
    """
    startup.reached("python and configuration")
    check_ready(loaded, is_training=True)
    data = RunData(loaded.config, loaded.directory)
    data.check()
    _check_engine(loaded)
    await asyncio.to_thread(require_all_keys, loaded.config, loaded.directory)
    for shadow in loaded.config.shadow.values():
        await asyncio.to_thread(require_keys, shadow.judge, loaded.directory)
    files = RunDir(await _unused(loaded) if is_fresh else loaded.config.runs / loaded.config.name)
    with (
        _unless_wrong(files),
        _made(files.root, loaded),
        files.lock(),
        logs.kept(files.log_path, find_secrets(os.environ).redact),
    ):
        log.info("art train %s", loaded.path)
        files.clean()  # before the mirror writes files there
        keep, keeps_best = loaded.config.train.keep_checkpoints, loaded.config.train.keep_best
        async with mirrored(files, loaded.config.store, keep=keep, keeps_best=keeps_best) as mirror:
            loaded = follow(loaded, files)
            check_record(files, loaded)
            startup.reached("data")
            yield Claim(loaded, files, data, mirror, startup, job=f"{files.root}{files.claim_id()}")


@contextlib.contextmanager
def _made(root: Path, loaded: LoadedConfig) -> Iterator[None]:
    """Creates the run directory. Raises ConfigError if nothing can be written there."""
    try:
        make_directory(root)
    except OSError as error:
        message = f"{loaded.config.runs} cannot be written: {error.strerror}; name another directory"
        raise ConfigError([Problem("runs", loaded.places.of("runs"), message)]) from error
    yield


def _check_engine(loaded: LoadedConfig) -> None:
    """Raises ConfigError if the user's own engine class declares that it cannot follow this training."""
    traits, message = engine_traits(loaded.config.engine, loaded.directory), ""
    if not loaded.config.learner.trains_weights:
        return
    if not traits.can_train:
        message = "its class has can_train = False, so its model cannot be trained"
    elif traits.swaps_adapters and loaded.config.model.lora is None:
        message = "its class has swaps_adapters = True, so it cannot load full weights; set model.lora"
    if message:
        raise ConfigError([Problem("engine", loaded.places.of("engine"), message)])


async def _unused(loaded: LoadedConfig) -> Path:
    """Returns root, root-2, root-3, ...: the first name unused both locally and in the store."""
    root, store = loaded.config.runs / loaded.config.name, loaded.config.store
    kept = () if store is None else await threads.call_in_thread(ObjectStore(store).directories)
    paths = [root, *(root.with_name(f"{root.name}-{number}") for number in range(2, 10_000))]
    return next(path for path in paths if not path.exists() and path.name not in kept)


@contextlib.contextmanager
def _unless_wrong(files: RunDir) -> Iterator[None]:
    """Removes a new run directory if the configuration turns out to be wrong.

    Some mistakes, such as an unknown LoRA target, show only after the base model is loaded. Older directories and
    directories with a checkpoint are kept.
    """
    made = [path for path in (files.root, *files.root.parents) if not path.exists()]
    try:
        yield
    except UsageError:
        if made and not files.checkpoint_steps():
            shutil.rmtree(files.root, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run may use the directory by now
                for path in made[1:]:
                    path.rmdir()
        raise
