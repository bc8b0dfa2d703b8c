"""Opens a policy or a learner for a stage run alone: the config's base model with a checkpoint's weights in it.

Training keeps its own way of opening one (it owns the run directory); here a builder's output that belongs to no run
lies in a temporary directory.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import LoadedConfig, config_hash
from art_cli.errors import CheckpointError, UsageError
from art_cli.learners import Learner, load_policy, make_learner
from art_cli.model import Weights, find_base, load_checkpoint, load_weights
from art_cli.run_dir import Manifest, RunDir, new_checkpoint, verify_checkpoint
from art_cli.scratch import scratch


class PolicySource(NamedTuple):
    """Where a policy comes from. Example: PolicySource(Path("runs/ttt/checkpoints/step_0040"), 40)."""

    checkpoint: Path | None  # None: the starting policy, without any checkpoint
    step: int


def find_policy(loaded: LoadedConfig, wanted: Path | None) -> PolicySource:
    """The policy a user means: a checkpoint directory, a run directory (its newest), or nothing (this config's run).

    Raises UsageError: named, and not there; CheckpointError: not whole.
    """
    if wanted is not None and not wanted.is_dir():
        raise UsageError(f"{wanted}: no such directory")
    if wanted is not None and (wanted / "manifest.json").exists():
        return PolicySource(wanted, verify_checkpoint(wanted).step)
    run = RunDir(wanted or loaded.config.runs / loaded.config.name)
    newest = run.newest_checkpoint()
    if newest is not None:
        return PolicySource(newest[0], newest[1].step)
    if wanted is not None:
        raise CheckpointError(f"{wanted}: neither a checkpoint (no manifest.json) nor a run with a valid one")
    return PolicySource(None, 0)


@contextlib.contextmanager
def open_base(loaded: LoadedConfig, source: PolicySource) -> Iterator[str]:
    """The hub id or directory of the base model; built ones are taken from the run they belong to, where they do."""
    run = source.checkpoint.parent.parent if source.checkpoint else loaded.config.runs / loaded.config.name
    with scratch("base") as temporary:
        built = RunDir(run).base
        place = built if built.exists() else temporary / "base"
        yield find_base(loaded.config.model.base, directory=loaded.directory, built=place)


@contextlib.contextmanager
def open_policy(loaded: LoadedConfig, source: PolicySource) -> Iterator[Weights]:
    """The weights of `source`, ready to sample or to train."""
    config = loaded.config
    with open_base(loaded, source) as base:
        weights = load_weights(config.model, base, device=config.learner.device, seed=config.train.seed)
        if source.checkpoint is not None:
            load_checkpoint(weights, source.checkpoint)
        yield weights


@contextlib.contextmanager
def open_learner(loaded: LoadedConfig, source: PolicySource) -> Iterator[Learner]:
    """A learner that goes on from `source`, optimizer and RNG included."""
    config = loaded.config
    with open_base(loaded, source) as base:
        weights = load_policy(config, base)
        with contextlib.closing(make_learner(config, weights)) as learner:
            if source.checkpoint is not None:
                learner.load(source.checkpoint)
            yield learner


def save_learner(learner: Learner, output: Path, loaded: LoadedConfig, *, step: int, metrics: dict[str, float]) -> None:
    """Writes the learner's state as a checkpoint of its own, outside of any run.

    A base that is a directory beside the config is named in full, so that the checkpoint is found usable from anywhere.
    """
    base = loaded.config.model.base
    if (loaded.directory / base).is_dir():
        base = str((loaded.directory / base).resolve())
    manifest = Manifest(step=step, base=base, config_hash=config_hash(loaded.config), metrics=metrics)
    with new_checkpoint(output, manifest) as directory:
        learner.save(directory)
