"""`art reward`: trains a reward model on preferences, measures it, and writes it as a directory."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from art_cli.config.sections.reward_config import RewardRunConfig
from art_cli.judges.agreement import Measure
from art_cli.learners.reward.preferences import data_files, divide, read_preferences
from art_cli.learners.reward.reward_report import ComparedPair, compare, measure
from art_cli.models.base_files import base_digest
from art_cli.models.base_source import find_base
from art_cli.models.loading import load_weights
from art_cli.runs.durable import new_directory
from art_cli.runs.manifest import hash_file
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from art_cli.runtime.log import shown_bar
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

REPORT = "reward.json"
Measures = dict[str, dict[str, Measure]]  # "agreement" or "present" -> part -> measure


class RewardResult(NamedTuple):
    measures: Measures
    facts: dict[str, Any]  # contents of reward.json
    closest: list[ComparedPair]  # pairs of the present policy with the smallest margin


def check_output(output: Path) -> None:
    """Raises UsageError if there is something at `output`."""
    if os.path.lexists(output):
        raise UsageError(f"{output}: there is something already; name another directory with -o")


def base_settings(files: Sequence[Path], base: str | None, settings: Sequence[str]) -> list[str]:
    """Returns the setting for `model.base`: the named base, or the base of the run that holds the data.

    A run's record is data, so code that it names as its base is not run. Raises UsageError if no base is found.
    """
    if any(setting.lstrip("+").startswith("model.base=") for setting in settings):
        if base is not None:
            raise UsageError("--base and model.base=: one at a time")
        return []
    roots = (file.resolve() if file.is_dir() else file.resolve().parent.parent for file in files)
    for run in map(RunDir, dict.fromkeys(roots)) if base is None else ():
        recorded = str((run_config(run).get("model") or {}).get("base") or "")
        base = base or (str(run.base) if run.base.is_dir() else recorded if ":" not in recorded else None) or None
    if base is None:
        raise UsageError("the data are in no run with a base model; name a small model with --base, or model.base=")
    return [f"model.base={json.dumps(base, ensure_ascii=False)}"]


def train_reward(
    config: RewardRunConfig, files: Sequence[Path], output: Path, *, present: Path | None = None, num_next: int = 0
) -> RewardResult:
    """Trains, measures and writes a reward model. Raises DataError if nothing teaches, and RewardTrainer's errors."""
    from art_cli.learners.reward.reward_trainer import RewardTrainer

    if config.model.quantize is not None:
        raise UsageError("model.quantize: the adapter is merged into the written model; remove it")
    now = [] if present is None else [file.resolve() for file in data_files(present)]
    files = [file for path in files for file in data_files(path) if file.resolve() not in now]
    if not files:
        raise UsageError(f"{present}: the only data, and what is measured is not trained on; name other files too")
    found = read_preferences(files)
    trained, held_out = divide(found.groups, config.reward.held_out, config.reward.seed)
    measured = {"agreement": held_out} | ({} if present is None else {"present": read_preferences([present]).groups})
    num_groups = {"trained": len(trained)} | {name: len(groups) for name, groups in measured.items()}
    log.info("reward model: %d groups to train on, %d held out", len(trained), len(held_out))
    with scratch("base") as temporary, shown_bar("reward model") as bar:
        base = find_base(config.model.base, directory=Path.cwd(), built=temporary / "base")
        weights = load_weights(config.model, base, device=config.learner.device, seed=config.reward.seed)
        trainer = RewardTrainer(weights, config.model, config.learner, config.reward)
        loss = trainer.train(trained, progress=bar)
        pairs = {name: compare(groups, trainer.score(groups)) for name, groups in measured.items()}
        measures = {name: measure(each) for name, each in pairs.items()}
        facts = {
            "base": config.model.base,
            "base_digest": base_digest(base),
            "data": {str(file): hash_file(file) for file in files},
            "present": {str(file): hash_file(file) for file in now},
            "counts": found.counts,
            "groups": num_groups,
            "measures": msgspec.to_builtins(measures),
            "loss": loss,
            "max_length": trainer.max_length,
            "settings": config.reward.model_dump() | {"learning_rate": trainer.rate},
        }
        with new_directory(output) as new:
            trainer.save(new)
            (new / REPORT).write_text(json.dumps(facts, indent=2))
    closest = sorted(pairs.get("present", []), key=lambda pair: abs(pair.margin))[:num_next]
    return RewardResult(measures, facts, closest)
