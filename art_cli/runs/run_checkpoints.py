"""A run's checkpoints: finding, listing, pruning, forking and importing them. Files only; no model is loaded.

find              resolves a user's path: a checkpoint, a run, a plain adapter or a base model
choose            selects a run's checkpoint: the offered (train.keep_best), best or newest checkpoint
log_policy        logs the policy that a command uses, and why, with the same wording in all commands
listed, prune     lists a run's checkpoints with their metrics; removes checkpoints that training would not keep
fork              creates a new run that starts at a checkpoint
import_start      creates a new run that starts with an external PEFT adapter or any checkpoint

A checkpoint has a manifest, written by `run_dir`, with a hash of every file. A plain adapter is a PEFT directory
without a manifest. Importing turns it into step 0 of a run; serving uses it directly.
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
from art_cli.runs.durable import link_or_copy, new_directory, read_object, remove, write_lines
from art_cli.runs.history import read_updates
from art_cli.runs.json_lines import is_inside
from art_cli.runs.manifest import Manifest, digest_of, is_built, new_checkpoint, read_manifest, verify_checkpoint
from art_cli.runs.parting import anchors, onsets, read_beside
from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.served import read_served
from art_cli.runtime.errors import CheckpointError, DataError, RunError, UncertainCheckpoint, UsageError, one_line

ADAPTER_CONFIG, ADAPTER_FILE, TEMPLATE_FILE = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
REMOTE_FILE = "remote.json"  # file name in a checkpoint whose weights are on a server
Which = Literal["offered", "best", "newest"]  # selects a checkpoint of a run
log = logging.getLogger(__name__)
NOT_IMPORTED = ("manifest", "optimizer", "rng")  # stems of checkpoint files that hold no weights
KEEP = 3  # default number of newest checkpoints to keep


class Found(NamedTuple):
    """The checkpoint or base model that a user's path resolves to.

    Example: Found(Path("runs/ttt/checkpoints/step_0040"), Manifest(step=40, ...), RunDir(...), True)
    """

    path: Path
    manifest: Manifest | None  # None for plain adapters and base models
    run: RunDir | None  # the run that contains it
    is_adapter: bool
    why: str = ""  # why this checkpoint was selected, for the log. Example: "step 40, the newest (--last)"

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0


def fetched(checkpoint: Path) -> Path:
    """Returns the checkpoint, or for remote weights the directory they were downloaded to."""
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
    """The parts of a run's config.json that are read outside training. Unknown keys may come from other versions."""

    model: _Model = msgspec.field(default_factory=_Model)
    rollout: _Rollout = msgspec.field(default_factory=_Rollout)
    train: _Train = msgspec.field(default_factory=_Train)
    engine: dict[str, Any] = {}


class Listed(NamedTuple):
    step: int
    path: Path
    problem: str | None  # reason why the checkpoint is unusable; None for valid checkpoints
    evaluation: dict[str, float]  # means of the evaluation at this step; empty if not evaluated
    metrics: dict[str, float]  # metrics of the checkpoint's step
    num_bytes: int
    policy: str = ""  # policy digest; "" if the checkpoint is invalid or has no proof
    is_best: bool = False
    # True if `problem` may not be damage: an added file, or a file that is currently unreadable
    may_be_whole: bool = False


def find(path: Path, *, which: Which = "offered") -> Found | None:
    """Returns the checkpoint or base model at `path`. A missing directory gives None; it may be a hub id.

    RUN/step_4 names a checkpoint of a run. `which` selects a run's checkpoint. Raises CheckpointError for unusable or
    invalid checkpoints, and UsageError if `which` is set but the path is not a run.
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
        return Found(path, None, None, True, "a PEFT adapter, as you asked")
    if is_base(path):
        return Found(path, None, None, False, "a base model, as you asked")
    raise CheckpointError(
        f"{path}: no checkpoint (manifest.json), run (checkpoints/), PEFT adapter ({ADAPTER_CONFIG}) or model "
        "(config.json) there"
    )


def in_run(path: Path) -> Path:
    """Returns RUN/checkpoints/step_0004 for RUN/step_4. Other paths stay unchanged."""
    named, run = re.fullmatch("step_([0-9]{1,18})", path.name, re.ASCII), RunDir(path.parent)
    return run.checkpoint_path(int(named[1])) if named is not None and run.checkpoints.is_dir() else path


def log_policy(place: Path | str, why: str) -> None:
    """Logs which policy a command uses and why, with the same wording in all commands."""
    log.info("policy: %s: %s", show(Path(place)), why)


def run_of(checkpoint: Path) -> RunDir | None:
    """Returns the run that contains a checkpoint directory."""
    home = checkpoint.resolve().parent
    return RunDir(home.parent) if home.name == "checkpoints" else None


def option(which: Which) -> str:
    """Returns the command-line option for `which`."""
    return {"offered": "", "best": "--best", "newest": "--last"}[which]


def choose(run: RunDir, which: Which) -> Found:
    """Selects a run's checkpoint, skipping invalid checkpoints.

    A run under `art improve` offers the promoted checkpoint. Raises CheckpointError without valid checkpoints, and
    UsageError for "best" without evaluated rewards.
    """
    if which == "offered" and (served := read_served(run.root)) is not None:
        promoted = _found(run.root / served.checkpoint, run)
        return promoted._replace(why=f"step {promoted.step}, promoted by art improve (--best and --last take others)")
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
    """Returns the steps that have a checkpoint directory, preferred step first. `steps` overrides the local steps.

    A run offers its best evaluated checkpoint. If `train.keep_best` is false, or nothing after step 0 was evaluated, it
    offers the newest. "best" returns evaluated steps only.
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
    """Explains why the run offers the checkpoint of `step`.

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
    """Returns the checkpoint at `path`. Raises CheckpointError if it does not verify."""
    manifest = verify_checkpoint(path)
    return Found(path, manifest, run, (path / ADAPTER_CONFIG).exists(), f"step {manifest.step}, as you asked")


def base_of(found: Found) -> str:
    """Returns the base's hub id or directory. Raises CheckpointError if it is not named or is missing."""
    name: str = found.manifest.base if found.manifest is not None else ""
    name = name or str(_read_json(found.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(f"{found.path}: it does not name its base model; give --base")
    beside = found.path / name
    for place in [beside] if name.startswith(".") else [beside, Path(name)]:  # "../../base" is always relative
        if place.is_dir():
            return str(place.resolve())
    if ":" in name or name.startswith((".", "/")):
        raise CheckpointError(f"{found.path}: its base model {name} is not there; give --base")
    return name


def is_base(path: Path) -> bool:
    """Returns True for a base model directory: it has a model's config.json and is not a checkpoint or adapter."""
    if (path / "manifest.json").exists() or (path / ADAPTER_CONFIG).exists():
        return False
    return "model_type" in _read_json(path / "config.json")


def run_config(run: RunDir | None) -> dict[str, Any]:
    """Returns a run's resolved configuration, or {} without one. Raises DataError if it is invalid."""
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
    """Returns every checkpoint of the run, oldest first. Raises UsageError if the directory is not a run."""
    if not run.checkpoints.is_dir():
        raise UsageError(f"{run.root}: not a run (no checkpoints/)")
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
    """Returns (run, step) of the policies with this digest, at or below `root`; nights count as their run's."""
    found = []
    places = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    for place in [each for outer in places for each in (outer, *sorted(outer.glob("nights/*/run")))]:
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
    """Removes invalid checkpoints and those selected by `to_remove`. Returns the removed checkpoints.

    `keep` defaults to the run's configured number. Raises RunError and removes nothing if a training process holds the
    run's lock or all checkpoints are invalid.
    """
    if keep is None:
        keep = int(run_config(run).get("train", {}).get("keep_checkpoints", KEEP))
    listed(run)  # checks that this is a run, because locking would create one
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
    """Removes the checkpoints selected by `to_remove`. The calling training process holds the run's lock."""
    for step in superseded(run, run.checkpoint_steps(), keep=keep, keeps_best=keeps_best):
        remove(run.checkpoint_path(step))


def superseded(run: RunDir, steps: Iterable[int], *, keep: int, keeps_best: bool) -> set[int]:
    """Returns the `steps` that `to_remove` selects based on the run's metrics. Checkpoints may be local or in a store.

    The newest checkpoint before the (possible) onset of reward and anchor parting is kept too, and so are the ones that
    `art improve` serves or could go back to.
    """
    steps, lines = set(steps), run.metrics()
    updates = read_updates(lines)
    found = [onset for anchor in anchors(updates) for onset in onsets(read_beside(updates, anchor))]
    before = {max((step for step in steps if step < onset), default=0) for onset in found}
    served = read_served(run.root)
    kept = set() if served is None else {Path(each).name for each in (served.checkpoint, *served.previous)}
    before |= {step for step in steps if run.checkpoint_path(step).name in kept}
    return to_remove(steps, _rewards(lines) if keeps_best else {}, keep=keep) - before


def to_remove(steps: Iterable[int], rewards: Mapping[int, float], *, keep: int) -> set[int]:
    """Returns the steps to remove: all except the `keep` newest, the best evaluated step, and step 0.

    Step 0 is the starting policy; all later policies are compared with it. `rewards` maps evaluated steps to rewards.
    In a tie the latest step is best.

    Example: to_remove([0, 1, 2, 3, 4], {1: 0.5, 4: 0.2}, keep=2) is {2}.
    """
    there = sorted(steps)
    return set(there[:-keep]) - {0, *_best_first(there, rewards)[:1]}


def _best_first(steps: Iterable[int], rewards: Mapping[int, float]) -> list[int]:
    """Returns the steps with a reward, highest reward first, later steps first in a tie."""
    return sorted((step for step in steps if step in rewards), key=lambda step: (rewards[step], step), reverse=True)


def _rewards(lines: Iterable[MetricsLine]) -> dict[int, float]:
    return {line.step: line.metrics["reward"] for line in lines if line.split == "eval" and "reward" in line.metrics}


# --- new runs from old ------------------------------------------------------------------------------------------------


def fork(run: RunDir, root: Path, *, step: int | None) -> Found:
    """Creates a run at `root` from a single checkpoint, including its optimizer (by default the newest valid one).

    The metrics up to that step and a built base model are copied. The configuration is not copied, because it comes
    from the new run's first `art train`. Raises UsageError if `root` exists or the step is missing, and CheckpointError
    if the checkpoint does not verify.
    """
    if root.exists():
        raise UsageError(f"{root}: there is something already; choose another name")
    if step is not None and step not in run.checkpoint_steps():
        there = ", ".join(map(str, run.checkpoint_steps())) or "none"
        raise UsageError(f"{run.root}: no checkpoint of step {step}; there are: {there}")
    found = choose(run, "newest") if step is None else _found(run.checkpoint_path(step), run)
    log_policy(found.path, found.why if step is not None else f"step {found.step}, the newest (--step takes another)")
    lines = [line for line in run.metrics() if line.step < found.step + (line.split != "train")]
    with new_directory(root) as directory:
        new = RunDir(directory)
        _copy_inside(found.path, new.checkpoint_path(found.step), run.root)
        if run.base.is_dir():
            _copy_inside(run.base, new.base, run.root, copy=link_or_copy)
        first = run.first_eval_path()
        if first is not None and is_inside(first, run.root):  # the judge keeps comparing with the same attempts
            (directory / first.parent.name).mkdir()
            shutil.copy(first, directory / first.parent.name / first.name)
        write_lines(new.metrics_path, lines)
    return _found(RunDir(root).checkpoint_path(found.step), RunDir(root))


def _copy_inside(source: Path, target: Path, within: Path, copy: Callable[[str, str], object] = shutil.copy2) -> None:
    """Copies a directory. Skips links that lead out of `within` and anything except files and directories."""

    def left_out(directory: str, names: list[str]) -> list[str]:
        paths = [Path(directory, name) for name in names]
        copied = {path.name for path in paths if is_inside(path, within) or (path.is_dir() and not path.is_symlink())}
        return [name for name in names if name not in copied]

    shutil.copytree(source, target, ignore=left_out, copy_function=copy)


def import_start(source: Path, root: Path, *, base: Callable[[Path], str] | None = None) -> Found:
    """Creates a run at `root` whose step 0 is a plain PEFT adapter, or the weights of a checkpoint or run.

    Training continues from these weights with a new optimizer. `base` receives the path for a built base model and
    returns the base model to use. By default this is the source's base model, copied if it was built. Raises UsageError
    if `root` has checkpoints, and CheckpointError if the source is not a LoRA adapter in safetensors format or does not
    verify.
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
        raise UsageError(f"{run.root}: a run with checkpoints; an adapter is imported into a new one")
    source = found.path
    if is_built(run.base):
        shutil.rmtree(run.base)  # left by an earlier start; no checkpoint here needs it
    name = base_of(found) if base is None else base(run.base)
    if is_built(Path(name)) and Path(name) != run.base:
        with new_directory(run.base) as directory:
            shutil.copytree(name, directory, dirs_exist_ok=True)
    dtype = found.manifest.dtype if found.manifest is not None else ""
    manifest = Manifest(step=0, base="../../base" if run.base.exists() else name, config_hash="", dtype=dtype)
    with new_checkpoint(run.checkpoint_path(0), manifest) as directory:
        for file in source.iterdir():
            is_wanted = file.suffix in (".json", ".safetensors", ".jinja") and file.stem not in NOT_IMPORTED
            # links in the hub's cache lead to its blobs
            is_there = is_inside(file, source) or is_inside(file, source.parent.parent / "blobs")
            if is_there and not file.name.startswith(".") and is_wanted:
                shutil.copy(file, directory / file.name)
    return _found(run.checkpoint_path(0), run)


def check_adapter(adapter: Path) -> None:
    """Raises CheckpointError unless this is a LoRA adapter saved as safetensors."""
    kind = _read_json(adapter / ADAPTER_CONFIG).get("peft_type")
    if kind is None:
        raise CheckpointError(f"{adapter}: no PEFT adapter there ({ADAPTER_CONFIG})")
    if kind != "LORA":
        raise CheckpointError(f"{adapter}: a {kind} adapter; only LoRA is supported")
    if not (adapter / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{adapter}: no {ADAPTER_FILE}; save the adapter as safetensors (pickles are not read)")


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the file's JSON object, or {} if the file is missing. Raises DataError for other content."""
    return read_object(path) if os.path.lexists(path) else {}


def as_json(entry: Listed) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry._asdict(), enc_hook=str), "is_valid": entry.problem is None}
