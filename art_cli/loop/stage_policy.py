"""Opens a policy or learner for a single stage: the configured base model with a checkpoint's weights.

Training opens its policy itself, because it owns the run directory. Here a built base model outside any run is stored
in a temporary directory.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_changes, config_hash
from art_cli.engines import engine_traits
from art_cli.learners import Learner, load_policy, make_learner
from art_cli.loop.decide import decide_by_base
from art_cli.loop.record import recorded_dtype
from art_cli.models.base_files import base_digest
from art_cli.models.base_source import find_base
from art_cli.models.loading import import_libraries, load_weights
from art_cli.models.policy_spec import PolicySpec, origin_of, read_spec
from art_cli.models.saved_weights import load_checkpoint
from art_cli.models.weights import Weights
from art_cli.runs import manifest
from art_cli.runs.run_checkpoints import Which, choose, fetched, find, in_run, log_policy, run_config, run_of
from art_cli.runs.run_dir import RunDir
from art_cli.runs.storage.fetch import NothingThere, fetch
from art_cli.runs.system_prompt import is_prompt
from art_cli.runs.trajectory import Turn
from art_cli.runtime.errors import CheckpointError, ConfigError, Problem, UsageError
from art_cli.runtime.scratch import scratch

BASE = "base"  # user's word for the base model instead of a checkpoint


class PolicySource(NamedTuple):
    """A policy's origin. Example: PolicySource(Path("runs/ttt/checkpoints/step_0040"), 40)."""

    checkpoint: Path | None  # None for the base model alone
    step: int
    run: Path | None = None  # run with the base; by default the checkpoint's run, or the configuration's run
    base: str | None = None  # base model directory named by the user; by default the run's base
    dtype: str = ""  # dtype of the base weights according to the manifest, or ""
    why: str = ""  # reason for this choice, for the log


def find_policy(loaded: LoadedConfig, wanted: Path | None, *, which: Which = "offered") -> PolicySource:
    """Finds the policy that a user names: a checkpoint directory, run directory, base, or nothing (this run).

    `which` selects the run's checkpoint. "base" is the configuration's base model without an adapter, RUN/base a run's
    base model; a base model directory works too. Logs the policy and the reason, once the configuration is accepted.
    Raises UsageError if the policy is missing, ConfigError if it was trained on a different model, CheckpointError if
    it is incomplete.

    For an engine that brings its model, the policy may be a prompt.
    """
    source = _find_policy(loaded, wanted, which)
    _log(loaded, source, wanted)
    return source


def _find_policy(loaded: LoadedConfig, wanted: Path | None, which: Which = "offered") -> PolicySource:
    """Like `find_policy`, without logging."""
    if not engine_traits(loaded.config.engine, loaded.directory).can_train:
        return _find_prompt(loaded, wanted, which)
    source = _find_base(wanted) or _find_trained(loaded, wanted, which)
    _check_model(loaded, source)
    return source


def _log(loaded: LoadedConfig, source: PolicySource, wanted: Path | None) -> None:
    home = RunDir(loaded.config.runs / loaded.config.name).root
    place = source.checkpoint or source.base or (wanted if source.run is not None else None)
    log_policy(place or (home if wanted is None else loaded.config.model.title), source.why)


def find_sampler(loaded: LoadedConfig, wanted: Path | None, turns: Sequence[Turn]) -> PolicySource:
    """Returns and logs the policy that a step on these turns continues from.

    This is the checkpoint the user names; otherwise the checkpoint that sampled the newest turn, in the named run or
    the configuration's run. Turns are matched by digest, or by step without a digest. Raises UsageError if the run has
    only other checkpoints, and the errors of `find_policy`.
    """
    newest, run = max(turns, key=lambda turn: turn.step, default=None), _run(loaded, wanted)
    source = _find_policy(loaded, wanted)
    if newest is not None and (wanted is None or source.checkpoint != wanted) and run.checkpoint_steps():
        found = _sampler_in(run, newest)
        if found is None and newest.policy:
            raise UsageError(f"{sampler_of(newest)}, which {run.root} no longer has; name another with --checkpoint")
        if found is not None:
            source = _find_policy(loaded, found)
            source = source._replace(why=f"step {source.step}, which sampled the attempts")
    _log(loaded, source, wanted)
    return source


def sampler_of(turn: Turn) -> str:
    """Example: "the attempts were sampled by step 1 (b29e3748)"."""
    return f"the attempts were sampled by step {turn.step}" + (f" ({turn.policy[:8]})" if turn.policy else "")


def _sampler_in(run: RunDir, turn: Turn) -> Path | None:
    for step in sorted(run.checkpoint_steps(), key=lambda step: step != turn.step):
        with contextlib.suppress(CheckpointError):
            digest = manifest.digest_of(manifest.verify_checkpoint(run.checkpoint_path(step)))
            if digest == turn.policy if digest and turn.policy else step == turn.step:
                return run.checkpoint_path(step)
    return None


def _run(loaded: LoadedConfig, wanted: Path | None) -> RunDir:
    """Returns the named run; the configuration's run is fetched if it exists only in the store."""
    run, store = RunDir(wanted or loaded.config.runs / loaded.config.name), loaded.config.store
    if wanted is not None or store is None or run.checkpoint_steps():
        return run
    try:
        return RunDir(fetch(f"{store}/{loaded.config.name}", "policy"))
    except NothingThere:
        return run


def _find_base(wanted: Path | None) -> PolicySource | None:
    """Returns the source for "base" or RUN/base, if `wanted` names either."""
    if wanted is None or wanted.name != BASE:
        return None
    if (wanted / manifest.MANIFEST).exists() or RunDir(wanted).checkpoint_steps():
        return None
    if wanted == Path(BASE):
        return PolicySource(None, 0, why="the base model, as you asked")
    is_run = RunDir(wanted.parent).config_path.exists() or bool(RunDir(wanted.parent).checkpoint_steps())
    return PolicySource(None, 0, wanted.parent, why="the base model, as you asked") if is_run else None


def _find_trained(loaded: LoadedConfig, wanted: Path | None, which: Which) -> PolicySource:
    run = _run(loaded, wanted)
    if wanted is None and not run.checkpoint_steps():
        return PolicySource(None, 0, why="the starting policy, because the run has no checkpoint")
    found = choose(run, which) if run.checkpoints.is_dir() else find(run.root)
    if found is None:
        raise UsageError(f"{in_run(run.root)}: no such directory")
    if found.manifest is None and found.is_adapter:
        raise CheckpointError(f"{found.path}: an adapter without a manifest; art checkpoints RUN --import takes it")
    if found.manifest is None:
        return PolicySource(None, 0, base=str(found.path.resolve()), why=found.why)
    return PolicySource(found.path, found.step, dtype=found.manifest.dtype, why=found.why)


def _find_prompt(loaded: LoadedConfig, wanted: Path | None, which: Which) -> PolicySource:
    """Returns the prompt for an engine that brings its model; "base" means the model without a prompt."""
    if wanted == Path(BASE) or (wanted is None and loaded.config.learner.trains_weights):
        return PolicySource(None, 0, why="the engine's own model")
    is_there = wanted is None or in_run(wanted).is_dir()
    source = _find_trained(loaded, wanted, which) if is_there else PolicySource(wanted, 0)
    if source.base is not None or (source.checkpoint is not None and not is_prompt(source.checkpoint)):
        name = loaded.config.engine.name
        raise UsageError(f"--checkpoint {wanted}: engine {name!r} samples from its own model, and no prompt is there")
    return source


def _check_model(loaded: LoadedConfig, source: PolicySource) -> None:
    """Raises ConfigError if the policy's run has a different base model or adapter than the configuration.

    Checkpoints outside of runs cannot be compared and are accepted. Prompts have no adapter.
    """
    run = _run_of(source)
    known = run_config(run).get("model")
    if run is None or not isinstance(known, dict):
        return
    wanted = loaded.config.model.model_dump(mode="json")
    if _is_same_directory(loaded, known.get("base"), wanted["base"]):
        known = known | {"base": wanted["base"]}
    is_text = source.checkpoint is not None and is_prompt(source.checkpoint)
    names = [name for name in (("base",) if is_text else ("base", "lora")) if name in known]
    old, new = ({"model": {name: model[name] for name in names}} for model in (known, wanted))
    cure = "change it back, or name another run (name=...) or --checkpoint"
    if problems := [
        Problem(change.key, loaded.places.of(change.key), f"{run.root} was trained with another: {change}; {cure}")
        for change in config_changes(old, new)
    ]:
        raise ConfigError(problems)


def _is_same_directory(loaded: LoadedConfig, one: object, other: object) -> bool:
    """Returns True if both values of `model.base` name the same directory."""
    if not isinstance(one, str) or not isinstance(other, str) or not (loaded.directory / other).is_dir():
        return False
    return (loaded.directory / one).resolve() == (loaded.directory / other).resolve()


def _run_of(source: PolicySource) -> RunDir | None:
    """Returns the run that the policy names or lies in."""
    if source.run is not None:
        return RunDir(source.run)
    return run_of(source.checkpoint) if source.checkpoint is not None else None


def home_of(loaded: LoadedConfig, source: PolicySource) -> RunDir | None:
    """Returns the run with the policy's base model; None for a checkpoint outside of runs."""
    if source.checkpoint is None and source.run is None:
        return RunDir(loaded.config.runs / loaded.config.name)
    return _run_of(source)


def as_trained(loaded: LoadedConfig, source: PolicySource, base: str) -> LoadedConfig:
    """Fills an open dtype with the dtype the policy was trained in."""
    return decide_by_base(loaded, base, recorded=dtype_of(loaded, source))


def dtype_of(loaded: LoadedConfig, source: PolicySource) -> str:
    """Returns the dtype the policy was trained in; "" if unknown."""
    return "" if source.base is not None else source.dtype or recorded_dtype(run_config(home_of(loaded, source)))


@contextlib.contextmanager
def open_base(loaded: LoadedConfig, source: PolicySource) -> Iterator[str]:
    """Yields the base model's hub id or directory. A built base comes from the checkpoint or run, if possible."""
    if source.base is not None:
        yield source.base
        return
    with scratch("base") as temporary:
        home = home_of(loaded, source)
        bases = [] if source.checkpoint is None else [source.checkpoint / BASE]
        bases += [] if home is None else [home.base]
        built = next((each for each in bases if each.exists()), temporary / BASE)
        yield find_base(loaded.config.model.base, directory=loaded.directory, built=built)


@contextlib.contextmanager
def open_policy(loaded: LoadedConfig, source: PolicySource) -> Iterator[Weights | PolicySpec | None]:
    """Yields what the engine needs: weights in this process, a spec elsewhere, None if it brings its model."""
    traits = engine_traits(loaded.config.engine, loaded.directory)
    if not traits.can_train:
        yield None
        return
    if traits.weights == "here":
        import_libraries(has_adapter=loaded.config.model.lora is not None)
    with open_base(loaded, source) as base:
        config = as_trained(loaded, source, base).config
        if traits.weights != "here":
            yield read_spec(config.model, base, is_remote=traits.weights == "server")
            return
        weights = load_weights(config.model, base, device=config.learner.device, seed=config.train.seed)
        if source.checkpoint is not None and not is_prompt(source.checkpoint):
            load_checkpoint(weights, fetched(source.checkpoint))
        yield weights


@contextlib.contextmanager
def open_learner(loaded: LoadedConfig, source: PolicySource, *, base: str | None = None) -> Iterator[Learner]:
    """Yields a learner that continues from `source`, perhaps on the opened `base`. Raises UsageError for prompts."""
    if source.checkpoint is not None and is_prompt(source.checkpoint):
        raise UsageError(f"{source.checkpoint}: a prompt has no weights to start from; art train continues it")
    with contextlib.nullcontext(base) if base is not None else open_base(loaded, source) as opened:
        config = as_trained(loaded, source, opened).config
        is_remote = config.learner.weights == "server"
        policy = read_spec(config.model, opened, is_remote=True) if is_remote else load_policy(config, opened)
        with contextlib.closing(make_learner(config, policy, directory=loaded.directory)) as learner:
            if source.checkpoint is not None:
                learner.load(source.checkpoint)
            yield learner


def check_output(output: Path) -> None:
    """Raises UsageError if `output` exists and is not a checkpoint that may be replaced."""
    if os.path.lexists(output) and not (output / manifest.MANIFEST).is_file():
        raise UsageError(f"{output}: not a checkpoint, so it is not replaced; name another directory with -o")


def save_learner(
    learner: Learner,
    output: Path,
    loaded: LoadedConfig,
    *,
    base: str,
    step: int,
    metrics: dict[str, float],
    source: PolicySource | None = None,
) -> None:
    """Writes the learner's state as a checkpoint outside of runs; `loaded` names its dtype.

    `base` is the opened base. A built base is copied into the checkpoint. Other directories are recorded with their
    full path, so the checkpoint works from anywhere. The text of the probe in `source` is kept.
    """
    keeps = manifest.is_built(Path(base))
    policy = read_spec(loaded.config.model, base, is_remote=loaded.config.learner.weights == "server")
    origin = origin_of(policy, base_digest(base))
    start = None if source is None else source.checkpoint
    known = None if start is None else manifest.read_manifest(fetched(start))
    before = known.probe if known is not None and known.origin == origin else None
    facts = manifest.Manifest(
        step=step,
        base=BASE if keeps else base,
        config_hash=config_hash(loaded.config),
        dtype=loaded.config.model.dtype,
        origin=origin,
        probe=learner.measure(before),
        metrics=metrics,
    )
    with manifest.new_checkpoint(output, facts) as directory:
        learner.save(directory)
        if keeps:
            shutil.copytree(base, directory / BASE)
