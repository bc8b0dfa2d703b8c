"""The checkpoints of a run as things to find, list, prune, fork and bring in. Files only: no model is loaded.

find              what a user means by a path: a checkpoint, a run's newest or best, a plain adapter, a base model
listed, prune     a run's checkpoints with what is known of each; removing those that training would not keep
fork              a new run that begins where one checkpoint stands
import_adapter    a new run that begins with somebody's PEFT adapter

A checkpoint is what `run_dir` wrote: a manifest with a hash for every file. A plain adapter is a PEFT directory without
one; it becomes step 0 of a run when it is imported, and is taken as it is where it is served.
"""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from art_cli.errors import CheckpointError, DataError, RunError, UsageError, one_line
from art_cli.run_dir import (
    Manifest,
    RunDir,
    new_checkpoint,
    new_directory,
    read_object,
    remove,
    verify_checkpoint,
    write_lines,
)

log = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_FILE, TEMPLATE_FILE = "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"
KEEP = 3  # newest ones, for a run that does not say


class Found(NamedTuple):
    """What a path means. Example: Found(Path("runs/ttt/checkpoints/step_0040"), Manifest(step=40, ...), RunDir(...))"""

    path: Path
    manifest: Manifest | None  # None: a plain adapter, or a base model
    run: RunDir | None  # the run it lies in
    is_adapter: bool

    @property
    def step(self) -> int:
        return self.manifest.step if self.manifest is not None else 0


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


class _Settings(msgspec.Struct):
    """What is read of a run's config.json apart from training. Other keys may be those of another version."""

    model: _Model = msgspec.field(default_factory=_Model)
    rollout: _Rollout = msgspec.field(default_factory=_Rollout)
    train: _Train = msgspec.field(default_factory=_Train)
    engine: dict[str, Any] = {}


class Listed(NamedTuple):
    """One checkpoint of a run."""

    step: int
    path: Path
    problem: str | None  # why it cannot be used; None: it verifies
    evaluation: dict[str, float]  # the means of the evaluation at this step; empty: not evaluated
    metrics: dict[str, float]  # of the step that made it
    num_bytes: int
    is_best: bool = False


def find(path: Path, *, best: bool = False) -> Found | None:
    """What `path` means; None: there is no such directory (it may be a hub id).

    `best` picks a run's best evaluated checkpoint instead of its newest. Raises CheckpointError: nothing there that can
    be used, or a checkpoint that does not verify; UsageError: `best` of something that is no run.
    """
    if not path.is_dir():
        return None
    run = RunDir(path)
    if run.checkpoints.is_dir():
        return newest(run, best=best)
    if best:
        raise UsageError(f"{path}: not a run; --best picks among the checkpoints of one")
    if (path / "manifest.json").exists():
        return _found(path, run_of(path))
    if (path / ADAPTER_CONFIG).exists():
        return Found(path, None, None, True)
    if is_base(path):
        return Found(path, None, None, False)
    raise CheckpointError(
        f"{path}: no checkpoint (manifest.json), run (checkpoints/), PEFT adapter ({ADAPTER_CONFIG}) or model "
        "(config.json) there"
    )


def run_of(checkpoint: Path) -> RunDir | None:
    """The run that a checkpoint directory lies in; None: it lies in none."""
    home = checkpoint.resolve().parent
    return RunDir(home.parent) if home.name == "checkpoints" else None


def newest(run: RunDir, *, best: bool) -> Found:
    """The newest checkpoint of a run, or the best evaluated one; those that do not verify are passed over.

    Raises CheckpointError: there is none; UsageError: evaluations without a reward say of none that it is the best.
    """
    there = run.checkpoint_steps()
    for step in _by_reward(run) if best else reversed(there):
        if step not in there:
            continue
        try:
            return _found(run.checkpoint_path(step), run)
        except CheckpointError as error:
            log.warning("passed over a checkpoint: %s", error)
    if best and run.evaluations() and not any(True for _ in _by_reward(run)):
        raise UsageError(
            f"{run.root}: --best: its evaluations have no reward, since the rollout returns none and eval.judge was "
            "off; compare checkpoints with art eval --checkpoint A --checkpoint B, and name one"
        )
    if best:
        raise CheckpointError(f"{run.root}: no checkpoint here was evaluated; leave out --best, or name one")
    raise CheckpointError(f"{run.root}: a run without a valid checkpoint")


def _found(path: Path, run: RunDir | None) -> Found:
    """Raises CheckpointError: it does not verify."""
    return Found(path, verify_checkpoint(path), run, (path / ADAPTER_CONFIG).exists())


def base_of(found: Found) -> str:
    """The hub id or directory of the base model that a checkpoint or adapter belongs to.

    Raises CheckpointError: it does not say, or what it names is not there.
    """
    name: str = found.manifest.base if found.manifest is not None else ""
    name = name or str(_read_json(found.path / ADAPTER_CONFIG).get("base_model_name_or_path") or "")
    if not name:
        raise CheckpointError(f"{found.path}: it does not say which base model it belongs to; give --base")
    for place in (found.path / name, Path(name)):
        if place.is_dir():
            return str(place.resolve())
    if ":" in name or name.startswith((".", "/")):
        raise CheckpointError(f"{found.path}: its base model {name} is not there; give --base")
    return name


def is_base(path: Path) -> bool:
    """Whether a directory is a base model: a model's config.json, and neither a checkpoint nor an adapter."""
    if (path / "manifest.json").exists() or (path / ADAPTER_CONFIG).exists():
        return False
    return "model_type" in _read_json(path / "config.json")


def base_of_run(run: RunDir) -> str:
    """The hub id or directory of the base model that a run's policy stands on, step 0 and all later ones.

    It is the one that the run built, else the one that its newest checkpoint names. Raises CheckpointError: there is
    neither, or what is named is not there.
    """
    if run.base.is_dir():
        return str(run.base)
    return base_of(newest(run, best=False))


def run_config(run: RunDir | None) -> dict[str, Any]:
    """A run's resolved configuration; empty where it has none.

    Raises DataError: not a JSON object, or one whose values cannot be those of a configuration.
    """
    if run is None or not os.path.lexists(run.config_path):
        return {}
    config = read_object(run.config_path)
    try:
        msgspec.convert(config, _Settings)
    except (msgspec.ValidationError, OverflowError) as error:
        message = f"not a configuration of art: {one_line(error)}; put back the file that `art train` wrote"
        raise DataError(message, run.config_path) from None
    return config


# --- listing and pruning ----------------------------------------------------------------------------------------------


def listed(run: RunDir) -> list[Listed]:
    """Every checkpoint of the run, oldest first. Raises RunError: no run there."""
    if not run.checkpoints.is_dir():
        raise RunError(f"{run.root}: not a run (no checkpoints/)")
    evaluations = run.evaluations()
    entries = [_entry(run, step, evaluations.get(step, {})) for step in run.checkpoint_steps()]
    best = _best(entries)
    return [entry._replace(is_best=entry is best) for entry in entries]


def _entry(run: RunDir, step: int, evaluation: dict[str, float]) -> Listed:
    path = run.checkpoint_path(step)
    num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    try:
        manifest = verify_checkpoint(path)
    except CheckpointError as error:
        return Listed(step, path, str(error).removeprefix(f"{path}: "), evaluation, {}, num_bytes)
    return Listed(step, path, None, evaluation, manifest.metrics, num_bytes)


def _best(entries: list[Listed]) -> Listed | None:
    """The valid one with the highest evaluated reward, the latest of equals; None where none was evaluated."""
    evaluated = [entry for entry in entries if entry.problem is None and "reward" in entry.evaluation]
    return max(evaluated, key=lambda entry: (entry.evaluation["reward"], entry.step), default=None)


def prune(run: RunDir, *, keep: int | None) -> list[Listed]:
    """Removes, and returns, every checkpoint that is not valid or that `to_remove` names.

    `keep` None: as many as the run's own configuration keeps. Raises RunError: a training process holds the run, or no
    checkpoint of it is valid (then nothing is removed).
    """
    if keep is None:
        keep = int(run_config(run).get("train", {}).get("keep_checkpoints", KEEP))
    listed(run)  # it is a run: nothing is made by locking
    with run.lock():
        entries = listed(run)
        valid = {entry.step for entry in entries if entry.problem is None}
        if entries and not valid:
            raise RunError(f"{run.root}: no checkpoint here is valid; none was removed")
        unwanted = to_remove(valid, _rewards(run), keep=keep)
        removed = [entry for entry in entries if entry.step not in valid or entry.step in unwanted]
        for entry in removed:
            remove(entry.path)
    return removed


def prune_trained(run: RunDir, *, keep: int) -> None:
    """Removes what `to_remove` names, for the training process that holds the run and wrote its checkpoints."""
    for step in to_remove(run.checkpoint_steps(), _rewards(run), keep=keep):
        remove(run.checkpoint_path(step))


def to_remove(steps: Iterable[int], rewards: Mapping[int, float], *, keep: int) -> set[int]:
    """The rule of pruning: what is neither among the `keep` newest steps, nor the best evaluated one, nor step 0.

    Step 0 is the starting policy, which every later one is compared with. `rewards` are those of evaluated steps; of
    equal ones the latest is the best.

    Example: to_remove([0, 1, 2, 3, 4], {1: 0.5, 4: 0.2}, keep=2) is {2}.
    """
    there = sorted(steps)
    best = max((step for step in there if step in rewards), key=lambda step: (rewards[step], step), default=None)
    return {step for step in there[:-keep] if step not in (0, best)}


def best_step(run: RunDir) -> int | None:
    """The best evaluated step that has a checkpoint, by name alone; None: none was evaluated."""
    there = run.checkpoint_steps()
    return next((step for step in _by_reward(run) if step in there), None)


def _by_reward(run: RunDir) -> Iterator[int]:
    """The steps whose evaluation has a reward, highest first, the latest of equals first."""
    rewards = {step: metrics["reward"] for step, metrics in run.evaluations().items() if "reward" in metrics}
    yield from sorted(rewards, key=lambda step: (rewards[step], step), reverse=True)


def _rewards(run: RunDir) -> dict[int, float]:
    """The mean reward of each evaluated step."""
    return {step: metrics["reward"] for step, metrics in run.evaluations().items() if "reward" in metrics}


# --- new runs from old ------------------------------------------------------------------------------------------------


def fork(run: RunDir, root: Path, *, step: int | None) -> Found:
    """A new run at `root` whose only checkpoint is that of `step` (None: the newest valid one), optimizer and all.

    The metrics up to there and a built base model come along; the configuration does not: the new run takes that of its
    first `art train`. Raises RunError: something is at `root`, or no such step; CheckpointError: it does not verify.
    """
    if root.exists():
        raise RunError(f"{root}: there is something already; choose another name")
    if step is not None and step not in run.checkpoint_steps():
        there = ", ".join(map(str, run.checkpoint_steps())) or "none"
        raise RunError(f"{run.root}: no checkpoint of step {step}; there are: {there}")
    found = newest(run, best=False) if step is None else _found(run.checkpoint_path(step), run)
    lines = [line for line in run.metrics() if line.step < found.step + (line.split != "train")]
    with new_directory(root) as directory:
        new = RunDir(directory)
        shutil.copytree(found.path, new.checkpoint_path(found.step))
        if run.base.is_dir():
            shutil.copytree(run.base, new.base)
        if (first := run.first_eval_path()) is not None:  # a judge goes on comparing with the same attempts
            (directory / first.parent.name).mkdir()
            shutil.copy(first, directory / first.parent.name / first.name)
        write_lines(new.metrics_path, lines)
    return _found(RunDir(root).checkpoint_path(found.step), RunDir(root))


def import_adapter(adapter: Path, root: Path) -> Found:
    """A new run at `root` whose step 0 is a plain PEFT adapter; training goes on from it with a new optimizer.

    Raises RunError: there are checkpoints at `root`; CheckpointError: no LoRA adapter with safetensors there.
    """
    run = RunDir(root)
    if run.checkpoint_steps():
        raise RunError(f"{root}: a run with checkpoints; an adapter is imported into a new one")
    check_adapter(adapter)
    base = base_of(Found(adapter, None, None, True))
    with new_checkpoint(run.checkpoint_path(0), Manifest(step=0, base=base, config_hash="")) as directory:
        for file in adapter.iterdir():
            if file.is_file() and not file.name.startswith(".") and file.suffix in (".json", ".safetensors", ".jinja"):
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
    """A JSON object; empty where there is no such file. Raises DataError: it is none."""
    return read_object(path) if os.path.lexists(path) else {}


def as_json(entry: Listed) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry._asdict(), enc_hook=str), "is_valid": entry.problem is None}
