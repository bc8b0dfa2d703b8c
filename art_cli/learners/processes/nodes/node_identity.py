"""Identity: settings and files that must match on all nodes for identical steps; and how two nodes differ.

A node sends digests of its settings, so that the first node can name differing settings without seeing their values.
Paths may differ, but the files behind them may not.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from art_cli.config.schema import AlgorithmConfig, DistillConfig
from art_cli.learners.processes.job import Job
from art_cli.models.base_files import BASE_FILES, TEMPLATE, find_files
from art_cli.runs.manifest import hash_file
from art_cli.runtime.errors import UsageError, printable

Identity = dict[str, str]  # part name -> version or digest

# Settings that may differ between nodes: paths, connections, and settings only used by the first node.
FREE = frozenset(
    {
        *("base", "directory", "model.base", "model.dtype", "model.chat_template"),
        *("learner.device", "learner.rendezvous", "learner.join_timeout_s"),
        *("train.steps", "train.keep_checkpoints", "train.keep_best"),
        *("loss.teacher.base_url", "loss.teacher.api_key_env", "loss.teacher.timeout_s", "loss.teacher.retries"),
        "loss.teacher.concurrency",
        "learner.gradient_checkpointing",  # each machine's memory decides; the gradient is the same
    }
)
RATE = "setting train.learning_rate"  # omitted by a node with rate auto, because it takes the first node's rate
KINDS = {"package": "other versions", "setting": "other settings", "model": "another base model"}
KINDS |= {"teacher": "another teacher", "code": "another algorithm", "device": "another kind of device"}
MAX_NAMED = 6  # maximum number of parts named in a message


def identity_of(job: Job) -> Identity:
    """Returns this machine's identity as a node with this job. Raises UsageError if a file cannot be read."""
    try:
        files = dict(_files(job))
        with ThreadPoolExecutor(4) as pool:
            digests = dict(zip(files, pool.map(hash_file, files.values()), strict=True))
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    settings = {f"setting {key}": _digest(value) for key, value in _flat("", job.model_dump(mode="json"))}
    if job.train.learning_rate == "auto":
        del settings[RATE]
    if job.train.decay != "none":  # the learning rate depends on the number of steps
        settings["setting train.steps"] = _digest(job.train.steps)
    versions = {"package art": version("art-cli"), "package torch": version("torch")}
    return versions | {"device": _device(job.learner.device)} | settings | digests


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Describes in one line how another node differs from this node; "" without differences.

    Example: "other settings (train.learning_rate), other versions (torch 2.12.0 there, 2.13.0 here)".
    """
    found: dict[str, list[str]] = {}
    for part in sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)):
        kind, _, name = part.partition(" ")
        if kind in ("package", "device"):
            there, here = theirs.get(part, "none"), ours.get(part, "none")
            name = f"{name} {there} there, {here} here".strip()
        found.setdefault(KINDS.get(kind, "another node"), []).append(printable(name, limit=80))
    return ", ".join(f"{kind} ({_named(names)})" for kind, names in found.items())


def _device(name: str) -> str:
    import torch

    return "cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda"


def _named(names: list[str]) -> str:
    rest = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _files(job: Job) -> Iterator[tuple[str, Path]]:
    """Yields the files whose content affects the step's computation."""
    yield from ((f"model {name}", path) for name, path in _model_files(find_files(job.base)))
    if job.model.chat_template is not None:
        yield "model chat_template", job.model.chat_template
    if isinstance(job.loss, AlgorithmConfig) and (file := job.directory / job.loss.entry.partition(":")[0]).is_file():
        yield f"code {file.name}", file
    if isinstance(job.loss, DistillConfig) and job.loss.teacher.base_url is None:
        teacher = job.directory / job.loss.teacher.model
        yield from ((f"teacher {name}", path) for name, path in _model_files(teacher) if teacher.is_dir())


def _model_files(directory: Path) -> list[tuple[str, Path]]:
    weights = [path.name for path in directory.glob("*.safetensors")]
    names = sorted(name for name in (*BASE_FILES, TEMPLATE, *weights) if (directory / name).is_file())
    return [(name, directory / name) for name in names]


def _flat(prefix: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every setting that must match."""
    for name, value in section.items():
        key = f"{prefix}.{name}" if prefix else name
        if key in FREE:
            continue
        if isinstance(value, Mapping) and value:
            yield from _flat(key, value)
        else:
            yield key, value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
