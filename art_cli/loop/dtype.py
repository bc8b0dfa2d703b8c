"""The dtype of a run's base weights: decided once where `model.dtype` is auto, written down, and followed from then on.

A run's config.json and the manifests of its checkpoints say what was decided. Resuming, evaluating, serving and
exporting read it there, so that a policy keeps its dtype on a machine where auto would be another one.
"""

import logging
from dataclasses import replace

from art_cli.config.compose import LoadedConfig
from art_cli.config.schema import TinkerLearnerConfig
from art_cli.models.loading import resolve_dtype
from art_cli.runs.run_checkpoints import run_config
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DataError

log = logging.getLogger(__name__)


def follow_record(loaded: LoadedConfig, run: RunDir) -> LoadedConfig:
    """The configuration with the dtype that the run was trained in so far, where it says auto and there is a record."""
    if loaded.config.model.dtype != "auto" or not run.checkpoint_steps():
        return loaded
    newest = run.newest_checkpoint()
    try:
        recorded = (newest[1].dtype if newest is not None else "") or recorded_dtype(run)
        reasons = run_config(run).get("auto")
    except DataError:
        return loaded  # record.claim_config refuses the damaged config.json, and says what to do
    reason = reasons.get("dtype") if isinstance(reasons, dict) else None
    return _with_dtype(loaded, recorded, str(reason or f"as in {run.root}")) if recorded else loaded


def recorded_dtype(run: RunDir | None) -> str:
    """The dtype in the run's config.json; "" where it has none, or an older version left it open."""
    dtype = run_config(run).get("model", {}).get("dtype", "auto")
    return "" if dtype == "auto" else str(dtype)


def decide_dtype(loaded: LoadedConfig, base: str, *, recorded: str = "") -> LoadedConfig:
    """The configuration with a dtype in place of auto: the recorded one, else what the learner's device has.

    Raises UsageError: nothing loadable at `base`.
    """
    if loaded.config.model.dtype != "auto" or isinstance(loaded.config.learner, TinkerLearnerConfig):
        return loaded  # a server has the weights, and decides
    if recorded:
        return _with_dtype(loaded, recorded, "as it was trained")
    choice = resolve_dtype(loaded.config.model, base, device=loaded.config.learner.device)
    log.info("model.dtype %s (auto: %s)", choice.name, choice.reason)
    return _with_dtype(loaded, choice.name, choice.reason)


def _with_dtype(loaded: LoadedConfig, dtype: str, reason: str) -> LoadedConfig:
    model = loaded.config.model.model_copy(update={"dtype": dtype})
    config = loaded.config.model_copy(update={"model": model})
    return replace(loaded, config=config, auto={**loaded.auto, "dtype": reason})
