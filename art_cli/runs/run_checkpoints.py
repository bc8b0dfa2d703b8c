"""The checkpoints of a run: finding, listing, pruning, forking and importing them. Files only; no model is loaded.

find              resolves a user's path: a checkpoint, one of a run, a plain adapter, a base model
choose            the checkpoint of a run that is meant: the one it offers (train.keep_best), the best, the newest
log_policy        logs which policy a command takes, and why, in the same words for all commands
listed, prune     lists a run's checkpoints with their metrics; removes those that training would not keep
fork              makes a new run that begins at one checkpoint
import_start      makes a new run that begins with a foreign PEFT adapter, or with any checkpoint

A checkpoint has a manifest with a hash of every file, written by `run_dir`. A plain adapter is a PEFT directory without
a manifest. Importing makes it step 0 of a run; serving uses it as it is.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from art_cli.config.key_locations import show
from art_cli.runs.durable import new_directory, read_object, remove, write_lines
from art_cli.runs.history import read_updates
from art_cli.runs.json_lines import is_inside
from art_cli.runs.manifest import Manifest, digest_of, is_built, new_checkpoint, read_manifest, verify_checkpoint
from art_cli.runs.parting import anchors, onsets, read_beside
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runtime.errors import CheckpointError, DataError, RunError, UncertainCheckpoint, UsageError, one_line

ADAPTER_CONFIG, ADAPTER_FILE, TEMPLATE_FILE = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
REMOTE_FILE = "remote.json"  # in a checkpoint whose weights are on a server
Which = Literal["offered", "best", "newest"]  # the checkpoint of a run that is meant
log = logging.getLogger(__name__)
NOT_IMPORTED = ("manifest", "optimizer", "rng")  # stems of a checkpoint's files that are not of its weights
KEEP = 3  # number of newest checkpoints kept by a run whose configuration has no number


class Found(NamedTuple):
    """The checkpoint or base model that a user's path resolves to.

    Example: Found(Path("runs/ttt/checkpoints/step_0040"), Manifest(step=40, ...), RunDir(...), True)
    """

    path: Path
    manifest: Manifest | None  # or None for a plain adapter or a base model
    run: RunDir | None  # the run it lies in
    is_adapter: bool
    why: str = ""  # the reason for this one, for the log. Example: "step 40, the newest (--last)"

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0


def fetched(checkpoint: Path) -> Path:
    """Returns the checkpoint, or the directory that its weights were downloaded to if they are on a server."""
    if not (checkpoint / REMOTE_FILE).is_file():
        return checkpoint
    path: Path = resolve_name("art_cli.tinker.client.remote_checkpoint:fetched")(checkpoint)
    return path


class _Model(msgspec.Struct):
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_length: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None
    quantize: Literal["4bit"] | None = None
    base: str = ""


class _Sampling(msgspec.Struct):
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31)] | None = None


class _Rollout(msgspec.Struct):
    sampling: _Sampling = msgspec.field(default_factory=_Sampling)


class _Train(msgspec.Struct):
    keep_checkpoints: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = KEEP
    keep_best: bool = True


class _Settings(msgspec.Struct):
    """The part of a run's config.json that is read outside training. Other keys may be another version's."""

    model: _Model = msgspec.field(default_factory=_Model)
    rollout: _Rollout = msgspec.field(default_factory=_Rollout)
    train: _Train = msgspec.field(default_factory=_Train)
    engine: dict[str, Any] = {}


class Listed(NamedTuple):
    """One checkpoint of a run."""

    step: int
    path: Path
    problem: str | None  # reason why it cannot be used, or None if it verifies
    evaluation: dict[str, float]  # the means of the evaluation at this step; empty: not evaluated
    metrics: dict[str, float]  # metrics of the step that made it
    num_bytes: int
    policy: str = ""  # digest of the policy; "" if it is not valid, or no learner left a proof in it
    is_best: bool = False
    may_be_whole: bool = False  # whether the problem may be no damage: a file that was added, or cannot be read now


def find(path: Path, *, which: Which = "offered") -> Found | None:
    """Returns the checkpoint or base at `path`, or None if there is no such directory (it may be a hub id).

    RUN/step_4 is a run's checkpoint. `which` is the checkpoint of a run that is meant. Raises CheckpointError: nothing
    usable there, or a checkpoint that does not verify; UsageError: `which` is not the default, and the path is no run.
    """
    path = in_run(path)
    if not path.is_dir():
        return None
    run = RunDir(path)
    if run.checkpoints.is_dir():
        return choose(run, which)
    if which != "offered":
        raise UsageError(f"{path}: not a run; {option(which)} picks among the checkpoints of one")
    if (path / "manifest.json").exists():
        return _found(path, run_of(path))
    if (path / ADAPTER_CONFIG).exists():
        return Found(path, None, None, True, "a PEFT adapter, as named")
    if is_base(path):
        return Found(path, None, None, False, "a base model, as named")
    raise CheckpointError(
        f"{path}: no checkpoint (manifest.json), run (checkpoints/), PEFT adapter ({ADAPTER_CONFIG}) or model "
        "(config.json) there"
    )


def in_run(path: Path) -> Path:
    """Returns RUN/checkpoints/step_0004 for RUN/step_4, and any other path as it is."""
    named, run = re.fullmatch("step_([0-9]{1,18})", path.name, re.ASCII), RunDir(path.parent)
    return run.checkpoint_path(int(named[1])) if named is not None and run.checkpoints.is_dir() else path


def log_policy(place: Path | str, why: str) -> None:
    """Logs the policy that a command takes, and why. All commands use the same words."""
    log.info("policy: %s: %s", show(Path(place)), why)


def run_of(checkpoint: Path) -> RunDir | None:
    """Returns the run that a checkpoint directory lies in, or None."""
    home = checkpoint.resolve().parent
    return RunDir(home.parent) if home.name == "checkpoints" else None


def option(which: Which) -> str:
    """Returns the option of the command line that asks for it."""
    return {"offered": "", "best": "--best", "newest": "--last"}[which]


def choose(run: RunDir, which: Which) -> Found:
    """Returns the checkpoint of a run that is meant; those that do not verify are skipped.

    Raises CheckpointError: there is none; UsageError: no evaluation has a reward, so that none is the best.
    """
    found = run.newest_checkpoint(wanted_steps(run, which))
    if found is not None:
        step = found[1].step
        why = f"step {step}, the newest (--last)" if which == "newest" else explain(run, step)
        return Found(*found, run, (found[0] / ADAPTER_CONFIG).exists(), why)
    best = which == "best"
    if best and run.evaluations() and not _rewards(run.metrics()):
        raise UsageError(
            f"{run.root}: --best: its evaluations have no reward, since the rollout returns none and eval.judge was "
            "off; compare checkpoints with art eval --checkpoint A --checkpoint B, and name one"
        )
    if best:
        raise CheckpointError(f"{run.root}: no checkpoint here was evaluated; leave out --best, or name one")
    raise CheckpointError(f"{run.root}: a run without a valid checkpoint")


def wanted_steps(run: RunDir, which: Which, steps: Iterable[int] | None = None) -> list[int]:
    """The steps that have a checkpoint, by name alone, the one that is meant first; `steps`: those that a store has.

    A run offers its best evaluated checkpoint, unless `train.keep_best` is false or nothing was evaluated after step 0;
    then it offers its newest. "best" names evaluated steps alone.
    """
    newest_first = sorted(run.checkpoint_steps() if steps is None else steps, reverse=True)
    if which == "newest" or (which == "offered" and not _keeps_best(run)):
        return newest_first
    best_first = _best_first(newest_first, _rewards(run.metrics()))
    if which == "best":
        return best_first
    if not any(best_first):
        return newest_first
    return [*best_first, *(step for step in newest_first if step not in best_first)]


def explain(run: RunDir, step: int) -> str:
    """Returns the reason why the run offers the checkpoint of `step`.

    Example: "step 36, the best evaluated: reward 0.810; the newest, step 48, has 0.740 (--last takes it)"
    """
    rewards, newest = _rewards(run.metrics()), max(run.checkpoint_steps(), default=step)
    if not _keeps_best(run):
        return f"step {step}, the newest (train.keep_best is false)"
    if step not in rewards:
        return f"step {step}, the newest; no policy after step 0 was evaluated"
    what = f"step {step}, the best evaluated: reward {rewards[step]:.3f}"
    if step == newest:
        return f"{what}; it is the newest"
    last = f"has {rewards[newest]:.3f}" if newest in rewards else "is not evaluated"
    return f"{what}; the newest, step {newest}, {last} (--last takes it)"


def _keeps_best(run: RunDir) -> bool:
    return bool(run_config(run).get("train", {}).get("keep_best", True))


def _found(path: Path, run: RunDir | None) -> Found:
    """Returns the verified checkpoint at `path`. Raises CheckpointError: it does not verify."""
    manifest = verify_checkpoint(path)
    return Found(path, manifest, run, (path / ADAPTER_CONFIG).exists(), f"step {manifest.step}, as named")


def base_of(found: Found) -> str:
    """Returns the hub id or directory of the base model that a checkpoint or adapter belongs to.

    Raises CheckpointError: it names none, or one that is not there.
    """
    name: str = found.manifest.base if found.manifest is not None else ""
    name = name or str(_read_json(found.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(f"{found.path}: it does not say which base model it belongs to; give --base")
    beside = found.path / name
    for place in [beside] if name.startswith(".") else [beside, Path(name)]:  # "../../base" is never that of another
        if place.is_dir():
            return str(place.resolve())
    if ":" in name or name.startswith((".", "/")):
        raise CheckpointError(f"{found.path}: its base model {name} is not there; give --base")
    return name


def is_base(path: Path) -> bool:
    """Returns True if a directory is a base model: a model's config.json, and neither a checkpoint nor an adapter."""
    if (path / "manifest.json").exists() or (path / ADAPTER_CONFIG).exists():
        return False
    return "model_type" in _read_json(path / "config.json")


def run_config(run: RunDir | None) -> dict[str, Any]:
    """Returns a run's resolved configuration; empty if it has none.

    Raises DataError: config.json is not a JSON object, or its values cannot be a configuration's.
    """
    if run is None or not os.path.lexists(run.config_path):
        return {}
    config = read_object(run.config_path, within=run.root)
    try:
        msgspec.convert(config, _Settings)
    except (msgspec.ValidationError, OverflowError) as error:
        message = f"not a configuration of art: {one_line(error)}; put back the file that `art train` wrote"
        raise DataError(message, run.config_path) from None
    return config


# --- listing and pruning ----------------------------------------------------------------------------------------------


def listed(run: RunDir) -> list[Listed]:
    """Returns every checkpoint of the run, oldest first. Raises RunError: no run there."""
    if not run.checkpoints.is_dir():
        raise RunError(f"{run.root}: not a run (no checkpoints/)")
    evaluations = run.evaluations()
    entries = [_entry(run, step, evaluations.get(step, {})) for step in run.checkpoint_steps()]
    best = _best_first((entry.step for entry in entries if entry.problem is None), _rewards(run.metrics()))[:1]
    return [entry._replace(is_best=entry.step in best) for entry in entries]


def _entry(run: RunDir, step: int, evaluation: dict[str, float]) -> Listed:
    path = run.checkpoint_path(step)
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        manifest = verify_checkpoint(path)
    except CheckpointError as error:
        may_be_whole = isinstance(error, UncertainCheckpoint)
        problem = str(error).removeprefix(f"{path}: ")
        return Listed(step, path, problem, evaluation, {}, num_bytes, may_be_whole=may_be_whole)
    return Listed(step, path, None, evaluation, manifest.metrics, num_bytes, digest_of(manifest))


def find_digest(root: Path, digest: str) -> list[tuple[Path, int]]:
    """Returns each run at or directly below `root`, with the step, whose policy's digest begins with `digest`.

    Pruned checkpoints are found as well, by the run's metrics.
    """
    found = []
    for place in [root, *sorted(path for path in root.iterdir() if path.is_dir())]:
        run = RunDir(place)
        kept = {}
        for step in run.checkpoint_steps():
            with contextlib.suppress(CheckpointError):
                kept[step] = digest_of(read_manifest(run.checkpoint_path(step)))
        made = {line.step + (line.split == "train"): line.policy for line in run.metrics()}
        known = kept | {step: policy for step, policy in made.items() if policy}
        found += [(place, step) for step, policy in sorted(known.items()) if policy and policy.startswith(digest)]
    return found


def prune(run: RunDir, *, keep: int | None) -> list[Listed]:
    """Removes, and returns, every checkpoint that is not valid or that `to_remove` names.

    `keep` is by default the number in the run's configuration. Raises RunError: a training process holds the run, or
    none of its checkpoints is valid, and then nothing is removed.
    """
    if keep is None:
        keep = int(run_config(run).get("train", {}).get("keep_checkpoints", KEEP))
    listed(run)  # raises if this is no run, because locking would make one
    with run.lock():
        entries = listed(run)
        valid = {entry.step for entry in entries if entry.problem is None}
        if entries and not valid:
            raise RunError(f"{run.root}: no checkpoint here is valid; none was removed")
        unwanted = superseded(run, valid, keep=keep, keeps_best=_keeps_best(run))
        for entry in (entry for entry in entries if entry.may_be_whole):
            log.warning("%s: %s; it stays", entry.path, entry.problem)
        wanted = valid - unwanted
        removed = [entry for entry in entries if entry.step not in wanted and not entry.may_be_whole]
        for entry in removed:
            remove(entry.path)
    return removed


def prune_trained(run: RunDir, *, keep: int, keeps_best: bool = True) -> None:
    """Removes what `to_remove` names, for the training process that holds the run and wrote its checkpoints."""
    for step in superseded(run, run.checkpoint_steps(), keep=keep, keeps_best=keeps_best):
        remove(run.checkpoint_path(step))


def superseded(run: RunDir, steps: Iterable[int], *, keep: int, keeps_best: bool) -> set[int]:
    """Those of `steps`, which have a checkpoint here or in a store, that `to_remove` names by the run's metrics.

    The newest before reward and anchor part, or may have begun to, is kept too.
    """
    steps, lines = set(steps), run.metrics()
    updates = read_updates(lines)
    found = [onset for anchor in anchors(updates) for onset in onsets(read_beside(updates, anchor))]
    before = {max((step for step in steps if step < onset), default=0) for onset in found}
    return to_remove(steps, _rewards(lines) if keeps_best else {}, keep=keep) - before


def to_remove(steps: Iterable[int], rewards: Mapping[int, float], *, keep: int) -> set[int]:
    """Returns the steps to remove: all but the `keep` newest, the best evaluated one, and step 0.

    Step 0 is the starting policy, with which every later one is compared. `rewards` has the reward of each evaluated
    step; of equal ones the latest is the best.

    Example: to_remove([0, 1, 2, 3, 4], {1: 0.5, 4: 0.2}, keep=2) is {2}.
    """
    there = sorted(steps)
    return set(there[:-keep]) - {0, *_best_first(there, rewards)[:1]}


def _best_first(steps: Iterable[int], rewards: Mapping[int, float]) -> list[int]:
    """Returns the steps that have a reward, the highest reward first, the latest of equals first."""
    return sorted((step for step in steps if step in rewards), key=lambda step: (rewards[step], step), reverse=True)


def _rewards(lines: Iterable[MetricsLine]) -> dict[int, float]:
    """Returns the mean reward of each evaluated step."""
    return {line.step: line.metrics["reward"] for line in lines if line.split == "eval" and "reward" in line.metrics}


# --- new runs from old ------------------------------------------------------------------------------------------------


def fork(run: RunDir, root: Path, *, step: int | None) -> Found:
    """Makes a run at `root` with the checkpoint of `step` alone, by default the newest valid one, optimizer included.

    The metrics up to that step and a built base model are copied. The configuration is not, because the new run takes
    that of its first `art train`. Raises RunError: something is at `root`, or there is no such step; CheckpointError:
    the checkpoint does not verify.
    """
    if root.exists():
        raise RunError(f"{root}: there is something already; choose another name")
    if step is not None and step not in run.checkpoint_steps():
        there = ", ".join(map(str, run.checkpoint_steps())) or "none"
        raise RunError(f"{run.root}: no checkpoint of step {step}; there are: {there}")
    found = choose(run, "newest") if step is None else _found(run.checkpoint_path(step), run)
    log_policy(found.path, found.why if step is not None else f"step {found.step}, the newest (--step takes another)")
    lines = [line for line in run.metrics() if line.step < found.step + (line.split != "train")]
    with new_directory(root) as directory:
        new = RunDir(directory)
        _copy_inside(found.path, new.checkpoint_path(found.step), run.root)
        if run.base.is_dir():
            _copy_inside(run.base, new.base, run.root)
        first = run.first_eval_path()
        if first is not None and is_inside(first, run.root):  # so that a judge keeps comparing with the same attempts
            (directory / first.parent.name).mkdir()
            shutil.copy(first, directory / first.parent.name / first.name)
        write_lines(new.metrics_path, lines)
    return _found(RunDir(root).checkpoint_path(found.step), RunDir(root))


def _copy_inside(source: Path, target: Path, within: Path) -> None:
    """Copies a directory, but no link that leads out of `within`, and nothing that is no file."""

    def left_out(directory: str, names: list[str]) -> list[str]:
        paths = [Path(directory, name) for name in names]
        copied = {path.name for path in paths if is_inside(path, within) or (path.is_dir() and not path.is_symlink())}
        return [name for name in names if name not in copied]

    shutil.copytree(source, target, ignore=left_out)


def import_start(source: Path, root: Path, *, base: Callable[[Path], str] | None = None) -> Found:
    """Makes a run at `root` whose step 0 is a plain PEFT adapter, or the weights of a checkpoint or of a run.

    Training continues it with a new optimizer. `base` makes or finds the base model that the caller names, given where
    in the run one would be built; by default it is the source's base, which is copied if it was built. Raises RunError
    if there are checkpoints at `root`, CheckpointError if the source is neither a LoRA adapter with safetensors nor a
    checkpoint that verifies.
    """
    found = find(source)
    if found is None or found.manifest is None:
        check_adapter(source)
    assert found is not None, source
    log_policy(found.path, found.why)
    with RunDir(root).lock():
        return _import_found(found, RunDir(root), base)


def _import_found(found: Found, run: RunDir, base: Callable[[Path], str] | None) -> Found:
    if run.checkpoint_steps():
        raise RunError(f"{run.root}: a run with checkpoints; an adapter is imported into a new one")
    source = found.path
    if is_built(run.base):
        shutil.rmtree(run.base)  # an earlier start made it; no checkpoint here needs it
    name = base_of(found) if base is None else base(run.base)
    if is_built(Path(name)) and Path(name) != run.base:
        with new_directory(run.base) as directory:
            shutil.copytree(name, directory, dirs_exist_ok=True)
    dtype = found.manifest.dtype if found.manifest is not None else ""
    manifest = Manifest(step=0, base="../../base" if run.base.exists() else name, config_hash="", dtype=dtype)
    with new_checkpoint(run.checkpoint_path(0), manifest) as directory:
        for file in source.iterdir():
            is_wanted = file.suffix in (".json", ".safetensors", ".jinja") and file.stem not in NOT_IMPORTED
            # a link of the hub's cache leads to its blobs
            is_there = is_inside(file, source) or is_inside(file, source.parent.parent / "blobs")
            if is_there and not file.name.startswith(".") and is_wanted:
                shutil.copy(file, directory / file.name)
    return _found(run.checkpoint_path(0), run)


def check_adapter(adapter: Path) -> None:
    """Raises CheckpointError: not a LoRA adapter, or not saved as safetensors."""
    kind = _read_json(adapter / ADAPTER_CONFIG).get("peft_type")
    if kind is None:
        raise CheckpointError(f"{adapter}: no PEFT adapter there ({ADAPTER_CONFIG})")
    if kind != "LORA":
        raise CheckpointError(f"{adapter}: a {kind} adapter; only LoRA is supported")
    if not (adapter / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{adapter}: no {ADAPTER_FILE}; save the adapter as safetensors (pickles are not read)")


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the file's JSON object; empty if there is no such file. Raises DataError: it holds something else."""
    return read_object(path) if os.path.lexists(path) else {}


def as_json(entry: Listed) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry._asdict(), enc_hook=str), "is_valid": entry.problem is None}
