"""Recomputes a run's updates from base model, seed and saved groups, and compares each policy.

    base, seed (and demos) -> checkpoint 0 -> learner.step(the groups of step 0) -> checkpoint 1 -> ... -> the last

No weights of the run are loaded. With the same build of torch, processor and number of threads, every byte is equal.
Otherwise sums are rounded differently; then all tensors must be within a bound, and all other files equal.

Configuration and code are the reader's own. The run's record is data and must agree with them.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import LoadedConfig
from art_cli.judges.reliability import with_reliability
from art_cli.learners import Learner
from art_cli.loop.claim_run import RunData
from art_cli.loop.owed_groups import group, plan_places
from art_cli.loop.record import differences, follow, read_record
from art_cli.loop.source_mix import SourceMix
from art_cli.loop.stage_policy import PolicySource, as_trained, open_base, open_learner
from art_cli.loop.warm_up import WarmUp, run_warm_up
from art_cli.models.tensor_gap import tensor_gap
from art_cli.runs.chain import Link, made_by
from art_cli.runs.manifest import hash_files
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import RunError, UsageError

# largest gap of the same policy between two machines; other micro-batches give up to 2e-5 in float32, 7e-2 in bfloat16
BOUNDS = {"float32": 1e-2, "bfloat16": 0.2}

UNDECIDING = ("README", "base/", "rng", "optimizer.json")  # prefixes of files that affect neither policy nor updates


class Replayed(NamedTuple):
    """A recomputed policy. Example: Replayed(step=3, changed=[], gap=0.0, bound=0.01)"""

    step: int
    changed: list[str]  # files that differ from the link's files
    gap: float  # largest `tensor_gap`; NaN if the checkpoint was pruned; infinite if other files differ
    bound: float  # largest gap of equal policies

    @property
    def is_same(self) -> bool:
        """True if the policy equals the link's policy."""
        return self.gap <= self.bound


def replay(run: RunDir, loaded: LoadedConfig, links: list[Link]) -> Iterator[Replayed]:
    """Recomputes and yields each policy of the run, including the first.

    `loaded` is the configuration that trained the run. Before computing anything, raises UsageError if it differs from
    the run's configuration or the run had several configurations, and RunError if the run's record is damaged.
    """
    loaded = follow(loaded, run)
    if changes := differences(run, loaded):
        said = "; ".join(map(str, changes))
        raise UsageError(f"{run.config_path}: has other settings than {loaded.path}: {said}; use the run's settings")
    if '"train.' in json.dumps(read_record(run).changes):
        raise UsageError(f"{run.config_path}: train's settings changed during the run, and --replay knows one set")
    if loaded.config.learner.weights == "server":
        raise UsageError(f"{run.root}: its weights are on a server, which --replay cannot compare")
    data = RunData(loaded.config, loaded.directory)
    mix = SourceMix(loaded.config, run, data.training_by_source)
    return _policies(run, loaded, data, mix, made_by(links))


def _policies(
    run: RunDir, loaded: LoadedConfig, data: RunData, mix: SourceMix, links: dict[int, Link]
) -> Iterator[Replayed]:
    source = PolicySource(None, 0, run.root)
    with tempfile.TemporaryDirectory() as home, open_base(loaded, source) as base:
        loaded = as_trained(loaded, source, base)
        start, policy = Path(home, "start"), Path(home, "policy")
        with open_learner(loaded, source, base=base) as learner:
            _save(learner, start)
            if loaded.config.sft is not None:  # repeated in a directory without earlier results
                elsewhere = replace(loaded, config=loaded.config.model_copy(update={"runs": Path(home)}))
                run_warm_up(WarmUp(learner, elsewhere, data.examples, base=base, start=None), lambda: False)
            for step in range(max(links, default=0) + 1):
                if step > 0 and not run.scored_path(step - 1).is_file():
                    raise RunError(f"{run.scored_path(step - 1)}: gone; step {step} was made from it")
                if step > 0:
                    learner.step(with_reliability(_trained_on(run, mix, step - 1)))
                _save(learner, policy)
                yield _compare(run, loaded, links.get(step), start, policy, step=step)


def _trained_on(run: RunDir, mix: SourceMix, step: int) -> list[list[ScoredTrajectory]]:
    """Returns a step's groups in planned order, without the additional groups that `art plan` played."""
    own, spare = mix.places(step)
    planned = {plan.group_id for plan in plan_places([*own, *spare], step=step, group_size=1)}
    return [members for name, members in sorted(group(run.scored(step)).items()) if name in planned]


def _save(learner: Learner, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    learner.save(directory)


def _compare(run: RunDir, loaded: LoadedConfig, link: Link | None, start: Path, policy: Path, *, step: int) -> Replayed:
    compared = Replayed(step, [], math.nan, BOUNDS.get(loaded.config.model.dtype, max(BOUNDS.values())))
    if link is None:
        return compared
    files, found = hash_files(policy), run.checkpoint_path(step)
    changed = sorted(name for name in files.keys() | link.files if files.get(name) != link.files.get(name))
    decisive = [name for name in changed if not name.startswith(UNDECIDING)]
    if decisive and not found.is_dir():
        return compared._replace(changed=changed)
    gaps = [tensor_gap(found / name, policy / name, start / name) for name in decisive if name.endswith(".safetensors")]
    gap = max(gaps, default=0.0) if len(gaps) == len(decisive) else math.inf
    return compared._replace(changed=changed, gap=gap)
