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

from pydantic import ValidationError

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import RunConfig
from art_cli.engines.proof import bound_of, mean_gap
from art_cli.learners import Learner
from art_cli.loop.claim_run import RunData
from art_cli.loop.owed_groups import group
from art_cli.loop.record import read_record
from art_cli.loop.scenario_choice import ScenarioChoice
from art_cli.loop.stage_policy import PolicySource, as_trained, open_base, open_learner
from art_cli.loop.warm_up import WarmUp, run_warm_up
from art_cli.runs.chain import Link
from art_cli.runs.manifest import hash_files
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import RunError, UsageError, one_line


class Replayed(NamedTuple):
    """One update, computed again. Example: Replayed(step=3, changed=[], gap=0.0)"""

    step: int  # of the policy that it made
    changed: list[str]  # files of the checkpoint whose bytes are not those of the link
    gap: float  # mean absolute difference in nats between the learner's scores of the probe and the link's
    bound: float  # the largest gap of the same weights in that dtype

    @property
    def is_same(self) -> bool:
        """Whether it is the policy of the link: every byte, or the scores within the bound."""
        return not self.changed or self.gap <= self.bound


def config_of(run: RunDir, config: Path) -> LoadedConfig:
    """Returns the configuration that a run recorded; `config` is the file that trained it, beside which its code is.

    Raises UsageError if there is no such file, RunError if the record is damaged.
    """
    if not config.is_file():
        raise UsageError(f"{config}: no such file; name the one that trained {run.root}")
    record, _ = read_record(run)
    try:
        recorded = RunConfig.model_validate(record | {"name": run.root.name, "runs": run.root.parent.resolve()})
    except ValidationError as error:
        raise RunError(f"{run.config_path}: not a configuration of art: {one_line(error)}") from error
    return LoadedConfig(recorded, config.resolve().parent, config)


def replay(run: RunDir, loaded: LoadedConfig, links: list[Link]) -> Iterator[Replayed]:
    """Yields each update of the run, computed again; before them the warm-up, if the run has one.

    It begins where the run's configuration last changed. Raises CheckpointError if the checkpoint there is gone.
    """
    steps = {link.step: link for link in links if link.files}
    first = max([min(steps), *(change["step"] for change in read_record(run)[1] if "step" in change)])
    data = RunData(loaded.config, loaded.directory)
    if first == 0 and loaded.config.sft is not None:
        yield _warm_up(loaded, data, steps[0])
    choice = ScenarioChoice(loaded.config, run, data.training)
    source = PolicySource(run.checkpoint_path(first), first, run.root, dtype=loaded.config.model.dtype)
    with open_learner(loaded, source) as learner:
        for step in sorted(step for step in steps if step > first):
            own = sorted(group(run.scored(step - 1)).items())
            groups: list[list[ScoredTrajectory]] = [members for _, members in own] + choice.replays(step - 1)
            learner.step(groups)
            yield _compare(learner, steps[step])


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
