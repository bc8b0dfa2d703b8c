"""Computes the updates of a run again, from its first checkpoint and its saved groups, and compares each with its link.

    checkpoint 0 -> learner.step(the groups of step 0) -> its files, hashed -> Link.files of step 1, and so on

On the build of torch and the processor that trained the run, with as many threads, every byte is the same. Elsewhere
sums are rounded in another order; then the learner's scores of the link's probe have to agree within the bound of the
dtype (engines/proof.py).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import RunConfig
from art_cli.engines.proof import bound_of, mean_gap
from art_cli.learners import Learner
from art_cli.loop.claim_run import RunData
from art_cli.loop.owed_groups import group, plan_places
from art_cli.loop.record import read_record
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.stage_policy import PolicySource, as_trained, open_base, open_learner
from art_cli.loop.warm_up import WarmUp, run_warm_up
from art_cli.runs.chain import Link
from art_cli.runs.manifest import hash_files
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import CheckpointError, RunError, UsageError, one_line


class Replayed(NamedTuple):
    """One update, computed again. Example: Replayed(step=3, changed=[], gap=0.0)"""

    step: int  # the step of the policy that it made
    changed: list[str]  # files of the checkpoint whose bytes are not those of the link
    gap: float  # mean absolute difference in nats between the learner's scores of the probe and the link's
    bound: float  # the largest gap of the same weights in that dtype

    @property
    def is_same(self) -> bool:
        """Whether it is the policy of the link: every byte, or the scores within the bound."""
        return not self.changed or self.gap <= self.bound


def replay(run: RunDir, config: Path, links: list[Link]) -> Iterator[Replayed]:
    """Returns each update of the run, computed again as it is asked for; before them the warm-up, if the run has one.

    It begins where the run's configuration last changed. `config` is the file that trained the run, beside which its
    code is. Raises at once, before anything is computed: UsageError if there is no such file, RunError if the run's
    record is damaged, CheckpointError if the first checkpoint is gone.
    """
    loaded, changes = _recorded(run, config)
    steps = {link.step: link for link in links if link.files}
    first = max([min(steps, default=0), *changes])
    if not run.checkpoint_path(first).is_dir():
        raise CheckpointError(f"{run.checkpoint_path(first)}: gone; the replay of the run has to begin there")
    data = RunData(loaded.config, loaded.directory)
    mix = SourceMix(loaded.config, run, data.training_by_source)
    return _updates(run, loaded, data, mix, steps, first)


def _updates(
    run: RunDir, loaded: LoadedConfig, data: RunData, mix: SourceMix, steps: dict[int, Link], first: int
) -> Iterator[Replayed]:
    if first == 0 and loaded.config.sft is not None and 0 in steps:
        yield _warm_up(loaded, data, steps[0])
    source = PolicySource(run.checkpoint_path(first), first, run.root, dtype=loaded.config.model.dtype)
    with open_learner(loaded, source) as learner:
        for step in sorted(step for step in steps if step > first):
            learner.step(_trained_on(run, mix, step - 1))
            yield _compare(learner, steps[step])


def _trained_on(run: RunDir, mix: SourceMix, step: int) -> list[list[ScoredTrajectory]]:
    """Returns the groups of a step, in the order of its plan, then those that it replayed.

    A plan of more groups (`art plan`) may have played and scored others, which the step did not train on.
    """
    replayed = mix.replays(step)
    own, spare = mix.places(step, {source: len(groups) for source, groups in replayed.items()})
    planned = {plan.group_id for plan in plan_places([*own, *spare], step=step, group_size=1)}
    groups = [members for name, members in sorted(group(run.scored(step)).items()) if name in planned]
    return groups + [members for its in replayed.values() for members in its]


def _recorded(run: RunDir, config: Path) -> tuple[LoadedConfig, list[int]]:
    """Returns the configuration that a run recorded, and the steps at which it changed."""
    if not config.is_file():
        raise UsageError(f"{config}: no such file; name the one that trained {run.root}")
    record, changes = read_record(run)
    try:
        recorded = RunConfig.model_validate(record | {"name": run.root.name, "runs": run.root.parent.resolve()})
        steps = [each.step for each in msgspec.convert(changes, list[_ChangedAt])]
    except ValueError as error:  # pydantic's and msgspec's errors
        raise RunError(f"{run.config_path}: not a configuration of art: {one_line(error)}") from error
    return LoadedConfig(recorded, config.resolve().parent, config), steps


class _ChangedAt(msgspec.Struct):
    step: int = 0


def _warm_up(loaded: LoadedConfig, data: RunData, link: Link) -> Replayed:
    """Returns the warm-up, made again from the base model."""
    source = PolicySource(None, 0, loaded.config.runs / loaded.config.name)
    with tempfile.TemporaryDirectory() as home, open_base(loaded, source) as base:
        elsewhere = loaded.config.model_copy(update={"runs": Path(home)})
        loaded = as_trained(LoadedConfig(elsewhere, loaded.directory, loaded.path), source, base)
        with open_learner(loaded, source, base=base) as learner:
            run_warm_up(WarmUp(learner, loaded, data.examples, base=base, start=None), lambda: False)
            return _compare(learner, link)


def _compare(learner: Learner, link: Link) -> Replayed:
    with tempfile.TemporaryDirectory() as directory:
        learner.save(Path(directory))
        files = hash_files(Path(directory))
    changed = sorted(name for name in files.keys() | link.files if files.get(name) != link.files.get(name))
    gap = float("inf")
    if link.probe is not None:
        gap = mean_gap(learner.score(link.probe.tokens), link.probe.logprobs)
    return Replayed(link.step, changed, gap, bound_of(link.origin.dtype))
