"""The run's record, config.json: its configuration and later changes, compared with a new configuration.

A run can continue with other values for some keys only (config/config_identity.py). Any other difference requires a new
run.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import MAY_CHANGE_FIRST, Change, config_changes, general
from art_cli.config.schema import RunConfig
from art_cli.runs.durable import read_object, write_file
from art_cli.runs.manifest import hash_file
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DataError, RunError
from art_cli.runtime.secrets import without_secrets

log = logging.getLogger(__name__)

OLDER_RATE = 1e-5  # learning rate of runs whose record lacks one
MAX_DRAWING = 256 * 2**10  # maximum size of a drawing, in bytes
# keys that may stay `auto` until the base model is known
OPEN = ("model.dtype", "train.learning_rate", "train.max_kl", "loss.baseline")
# a run keeps its values when the defaults change
KEPT = ("train.max_kl", "loss.scale_advantages", "loss.baseline", "rollout.group_size", "rollout.groups_per_step")
OLDER = {"loss.baseline": "group"}  # values of runs whose record lacks the key
# keys of older versions in losses, rollouts and judges -> their defaults, which changed nothing
GONE = {
    **dict.fromkeys(("clip_cov", "kl_cov", "replay", "entropy_floor")),
    **{"kl_cov_weight": 1.0, "entropy_step": 0.005, "prefix_weight": 0.0, "ask_again": 0, "aggregate": "mean"},
}
MEND_RECORD = "restore it, or remove it to continue with the present configuration"


def follow(loaded: LoadedConfig, run: RunDir) -> LoadedConfig:
    """Fills open values with the run's dtype, context, learning rate and earlier defaults.

    A run without a checkpoint fixes nothing yet. The context is filled only if art chose it, because a user's value
    belongs to the configuration.
    """
    if not run.checkpoint_steps():
        return loaded
    try:
        record = run_config(run)
    except DataError:
        return loaded  # check_record reports the damaged config.json
    model, length = loaded.config.model, record.get("model", {}).get("max_length")
    reasons = auto if isinstance(auto := record.get("auto"), dict) else {}
    past: dict[str, Any] = {}
    if model.dtype == "auto":
        newest = run.newest_checkpoint()
        past["model.dtype"] = (newest[1].dtype if newest is not None else "") or recorded_dtype(record)
    if model.max_length is None and reasons.get("max_length") is not None and isinstance(length, int):
        past["model.max_length"] = length
    if loaded.config.train.learning_rate == "auto" and record and isinstance(rate := _rate(record), float):
        past["train.learning_rate"] = rate
    for key, value in past.items():
        if value:
            reason = reasons.get(key.partition(".")[2]) or f"as in {run.root}"
            loaded = loaded.with_value(key, value, str(reason))
    for key in KEPT:
        section, _, name = key.partition(".")
        now, then = getattr(loaded.config, section), record.get(section)
        if key in OLDER and isinstance(then, Mapping):
            then = {name: OLDER[key], **then}
        if isinstance(then, Mapping) and name in then and hasattr(now, name) and name not in now.model_fields_set:
            with contextlib.suppress(ValidationError):  # check_record reports a record without meaning
                value = getattr(type(now).model_validate({**now.model_dump(), name: then[name]}), name)
                if value != getattr(now, name):
                    loaded = loaded.with_value(key, value, str(reasons.get(name) or f"as in {run.root}"))
    return loaded


def recorded_dtype(record: Mapping[str, Any]) -> str:
    """Returns the dtype in a run's config.json; "" if missing, or left open by an older version."""
    dtype = record.get("model", {}).get("dtype", "auto")
    return "" if dtype == "auto" else str(dtype)


def _rate(record: Mapping[str, Any]) -> Any:
    """Returns a record's learning rate, with the default of older versions if it is missing."""
    train = record.get("train")
    return (train if isinstance(train, Mapping) else {}).get("learning_rate", OLDER_RATE)


def check_record(run: RunDir, loaded: LoadedConfig) -> None:
    """Raises RunError with all differences if another configuration made the run.

    Without a checkpoint, a run accepts any configuration, and an earlier configuration's built base model is removed.
    Otherwise only the keys in identity.MAY_CHANGE may differ.
    """
    changes = differences(run, loaded)
    if run.checkpoint_steps():
        if refusal := _refusal(run, changes):
            raise RunError(refusal)
    elif changes or not os.path.lexists(run.config_path):
        shutil.rmtree(run.base, ignore_errors=True)


def claim_config(run: RunDir, loaded: LoadedConfig) -> None:
    """Writes config.json. Raises RunError like `check_record`.

    `changes` lists keys whose values changed, and the step of each change. `auto` lists the reasons for automatic
    values of engine, learner, dtype and learning rate. `rollouts` has digests of the rollouts' files.
    """
    new = without_secrets(loaded.config.model_dump(mode="json"))
    changes: list[dict[str, Any]] = []
    rollouts = _rollout_digests(loaded)
    if os.path.lexists(run.config_path):
        old, changes, known = read_record(run)
        if changed := [name for name, digest in rollouts.items() if known.get(name, digest) != digest]:
            log.warning("%s changed; attempts that this run has played keep the rewards they got", ", ".join(changed))
        if (differences := _changes(old, new)) and run.checkpoint_steps():
            if refusal := _refusal(run, differences):
                raise RunError(refusal)
            newest = run.newest_checkpoint()
            step = newest[1].step if newest is not None else 0
            log.info("%s: from step %d on: %s", run.root, step + 1, "; ".join(map(str, differences)))
            changes += [{"step": step} | change._asdict() for change in differences]
    record = new | {"auto": dict(loaded.auto), "changes": changes, "rollouts": rollouts}
    write_file(run.config_path, json.dumps(record, indent=2).encode() + b"\n")
    _copy_drawing(run, loaded.directory / run.drawing_path.name)


def _rollout_digests(loaded: LoadedConfig) -> dict[str, str]:
    """Returns the SHA-256 of each Python file that an entry of the configuration's rollouts names."""
    entries = {part.rollout.entry or "" for part in loaded.config.by_source.values()}
    names = sorted(name for entry in entries if (name := entry.partition(":")[0]).endswith(".py"))
    files = {name: loaded.directory / name for name in names}
    return {name: hash_file(file) for name, file in files.items() if file.is_file()}


def _copy_drawing(run: RunDir, source: Path) -> None:
    """Copies the recipe's drawing of its states, which `art view` shows, into the run directory."""
    if source.is_file() and source.stat().st_size <= MAX_DRAWING:
        write_file(run.drawing_path, source.read_bytes())


def find_clash(run: RunDir, loaded: LoadedConfig) -> str:
    """Compares the run's configuration with this one; returns the differences as a line, or ""."""
    return _refusal(run, differences(run, follow(loaded, run)))


def differences(run: RunDir, loaded: LoadedConfig) -> list[Change]:
    """Returns the keys whose values in the run's record would train differently."""
    if not os.path.lexists(run.config_path):
        return []
    return _changes(read_record(run).config, loaded.config.model_dump(mode="json"))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Returns the keys whose values train differently. Open values and API keys are not compared."""
    changes = config_changes(without_secrets(old), without_secrets(new))
    return [change for change in changes if change.key not in OPEN or "auto" not in (change.old, change.new)]


def _refusal(run: RunDir, changes: Sequence[Change]) -> str:
    first = MAY_CHANGE_FIRST if run.checkpoint_steps() == [0] else frozenset()
    refused = [str(change) for change in changes if not change.is_allowed and general(change.key) not in first]
    if not refused:
        return ""
    return (
        f"{run.root}: made by another configuration: {'; '.join(refused)}; "
        "change it back, give the run another name (name=...), or start a new run with art train --fresh"
    )


class Record(NamedTuple):
    """The parts of config.json, as `claim_config` writes them."""

    config: dict[str, Any]
    changes: list[dict[str, Any]]
    rollouts: dict[str, Any]  # file name -> digest


def read_record(run: RunDir) -> Record:
    """Returns the run's record. Raises RunError if config.json is damaged.

    Keys missing in an older version's record get their defaults; its keys without effect that are gone are left out.
    """
    try:
        record = read_object(run.config_path, within=run.root)
        changes = record.pop("changes", [])
        if not isinstance(changes, list):
            raise DataError("'changes' is not a list", run.config_path)
    except DataError as error:
        raise RunError(f"{error}; {MEND_RECORD}") from error
    record.pop("auto", None)
    rollouts = record.pop("rollouts", None)
    if isinstance(train := record.get("train", {}), dict):
        record["train"] = train | {"learning_rate": _rate(record)}
    for key in ("loss", "algorithm", "rollout", "judge", "shadow"):
        record |= {key: _without_gone(record[key])} if key in record else {}
    with contextlib.suppress(ValidationError):  # invalid values show up as differences
        record = RunConfig.model_validate(record).model_dump(mode="json")
    return Record(record, changes, rollouts if isinstance(rollouts, dict) else {})


def _without_gone(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    kept = {name: value for name, value in section.items() if GONE.get(name, ...) != value}
    return {name: value if name in ("args", "options") else _without_gone(value) for name, value in kept.items()}
