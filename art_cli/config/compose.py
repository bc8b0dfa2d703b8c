"""The loaders: a YAML file and `key=value` arguments become a checked RunConfig, or a ConfigError with all mistakes."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from art_cli.config.checks import conflicts
from art_cli.config.composition import Composition
from art_cli.config.key_locations import COMMAND_LINE, Places
from art_cli.config.overrides import Schema, expand, groups, sections, suffixes, variants
from art_cli.config.problems import explain
from art_cli.config.schema import (
    MAX_NAME,
    AutoEngineConfig,
    EmbeddedEngineConfig,
    EngineConfig,
    GatewayConfig,
    JudgeConfig,
    LearnerConfig,
    ModelConfig,
    RolloutJudgeConfig,
    RunConfig,
    Section,
    TorchLearnerConfig,
    VllmEngineConfig,
)
from art_cli.config.sections.base_config import RunName
from art_cli.config.sections.reward_config import RewardRunConfig
from art_cli.config.store_address import Directory
from art_cli.runtime.errors import ConfigError, Problem

AnySection = TypeVar("AnySection", bound=Section)

TINY, BLANK_ROLLOUT = "builtin:tiny", {"entry": "rollout.py:rollout", "scenarios": "scenarios.jsonl"}  # recipes/blank
ENTRY = "entry"  # the variant of a section for a user's own class


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and its origin. Entries, scenarios, demos and a base stay as written: a project may move."""

    config: RunConfig
    directory: Path  # absolute directory of the file; relative paths in the file are relative to it
    path: Path  # the file as the user named it
    places: Places = field(default_factory=Places, repr=False, compare=False)
    auto: Mapping[str, str] = field(default_factory=dict)  # reason for each value that art chose (loop/decide.py)
    overrides: tuple[str, ...] = ()  # `key=value` arguments of the command line
    sweep: tuple[str, ...] = ()  # arguments of the whole sweep, for a run in a sweep

    @property
    def by_source(self) -> "dict[str, LoadedConfig]":
        return {name: replace(self, config=part) for name, part in self.config.by_source.items()}

    def with_value(self, key: str, value: Any, reason: str = "") -> "LoadedConfig":
        """Replaces the value at `section` or `section.name`, and records the reason in `auto`."""
        section, _, name = key.partition(".")
        value = getattr(self.config, section).model_copy(update={name: value}) if name else value
        auto = {**self.auto} | ({name or section: reason} if reason else {})
        return replace(self, config=self.config.model_copy(update={section: value}), auto=auto)


@dataclass(frozen=True)
class LoadedJudge:
    config: JudgeConfig
    directory: Path


class _JudgeOnly(Section):
    judge: JudgeConfig = RolloutJudgeConfig()


@dataclass(frozen=True)
class LoadedGateway:
    name: str
    engine: EngineConfig
    gateway: GatewayConfig
    trajectories: Path  # absolute output directory
    directory: Path  # absolute directory of the file
    run: LoadedConfig | None  # the whole configuration; None without `model` and `rollout`


@dataclass(frozen=True)
class LoadedBackend:
    model: ModelConfig
    engine: EngineConfig
    learner: LearnerConfig
    directory: Path  # absolute directory of the file


class _BackendOnly(Section):
    model: ModelConfig
    engine: EngineConfig = AutoEngineConfig()
    learner: LearnerConfig = TorchLearnerConfig()


class _GatewayOnly(Section):
    name: RunName
    runs: Directory = Path("runs")
    gateway: GatewayConfig = GatewayConfig()
    engine: EngineConfig = AutoEngineConfig()


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Loads a run's configuration. Raises ConfigError with all mistakes."""
    path = Path(path)
    composition = Composition(path, RunConfig)
    config = _judged(composition, overrides, RunConfig)
    problems = [Problem(key, composition.places.of(key), message) for key, message in conflicts(config)]
    if problems:
        raise ConfigError(problems)
    directory, places = composition.directory, composition.places
    return LoadedConfig(_with_paths(config, composition), directory, path, places, overrides=tuple(overrides))


def compose_new(overrides: Sequence[str]) -> dict[str, Any]:
    """Composes a new configuration file; `model` and `rollout` default to the recipe blank's. Raises ConfigError."""
    composition = Composition(None, RunConfig)
    composed = composition.compose(overrides)
    needed = {"model": {"base": TINY}, "rollout": dict(BLANK_ROLLOUT)}
    if "environment" in (agent := composed.get("rollout", {})):
        needed["rollout"] = {}
    elif "command" in agent:
        del needed["rollout"]["entry"]
    for name, section in needed.items():
        if isinstance(given := composed.setdefault(name, {}), dict):
            composed[name] = section | given
    config = _checked(composition, {"name": "new"} | composed, RunConfig)
    if problems := [Problem(key, composition.places.of(key), message) for key, message in conflicts(config)]:
        raise ConfigError(problems)
    return {name: composed[name] for name in RunConfig.model_fields if name in composed}


def load_sweep(path: Path, overrides: Sequence[str]) -> list[LoadedConfig]:
    """Loads the configurations of a sweep, with the swept values in the runs' names. Raises ConfigError."""
    runs = []
    for arguments, suffix in zip(expand(overrides), suffixes(overrides), strict=True):
        loaded = load_config(path, arguments)
        name = "-".join(filter(None, [loaded.config.name, suffix]))
        if len(name) > MAX_NAME:
            message = f"{name}: {len(name)} characters with what is swept; at most {MAX_NAME}"
            raise ConfigError([Problem("name", loaded.places.of("name"), message)])
        config = loaded.config.model_copy(update={"name": name})
        runs.append(replace(loaded, config=config, sweep=tuple(overrides)))
    return runs


def load_judge(path: Path | None, overrides: Sequence[str] = ()) -> LoadedJudge:
    """Loads the judge from a configuration, or from overrides alone if `path` is None. Raises ConfigError."""
    if path is not None:
        loaded = load_config(path, overrides)
        for name, source in loaded.config.rollout.sources.items():
            if source.judge is not None:
                key = f"rollout.sources.{name}.judge"
                message = "a file is judged by one judge; name it instead of this file, for example judge=ruler"
                raise ConfigError([Problem(key, loaded.places.of(key), message)])
        return LoadedJudge(loaded.config.judge, loaded.directory)
    composition = Composition(None, _JudgeOnly)
    return LoadedJudge(_judged(composition, overrides, _JudgeOnly).judge, composition.directory)


def load_reward(overrides: Sequence[str]) -> RewardRunConfig:
    """Loads a reward model's training from overrides alone. Raises ConfigError."""
    composition = Composition(None, RewardRunConfig)
    loaded = _judged(composition, overrides, RewardRunConfig)
    return loaded.model_copy(update=_placed(loaded.model, AutoEngineConfig(), composition))


def load_gateway(path: Path, overrides: Sequence[str] = ()) -> LoadedGateway:
    """Loads the gateway from a run's configuration, or from a file with only an endpoint. Raises ConfigError."""
    composition = Composition(path, _GatewayOnly)
    composed = composition.compose(overrides)
    run = load_config(path, overrides) if {"model", "rollout"} & composed.keys() else None
    only = _checked(composition, composed, _GatewayOnly) if run is None else run.config
    if run is None and isinstance(only.engine, AutoEngineConfig | EmbeddedEngineConfig | VllmEngineConfig):
        message = (
            f"{only.engine.name!r} samples from a checkpoint, and this file has no model and rollout; name an endpoint "
            "(engine: {name: openai, base_url: https://host/v1, model: NAME}), or take a run's configuration"
        )
        raise ConfigError([Problem("engine", composition.places.of("engine"), message)])
    directory, written = composition.directory, only.gateway.directory
    default = directory / only.runs.expanduser() / only.name / "gateway"
    trajectories = default if written is None else directory / written.expanduser()
    return LoadedGateway(only.name, only.engine, only.gateway, trajectories, directory, run)


def load_backend(path: Path | None, overrides: Sequence[str] = ()) -> LoadedBackend:
    """Loads model, engine and learner from a configuration, a smaller file, or overrides. Raises ConfigError."""
    composition = Composition(path, _BackendOnly)
    composed = composition.compose(overrides)
    if path is not None and "rollout" in composed:
        run = load_config(path, overrides)
        return LoadedBackend(run.config.model, run.config.engine, run.config.learner, run.directory)
    only = _checked(composition, composed, _BackendOnly)
    placed = {"model": only.model, "engine": only.engine} | _placed(only.model, only.engine, composition)
    return LoadedBackend(placed["model"], placed["engine"], only.learner, composition.directory)


def _judged(composition: Composition, overrides: Sequence[str], schema: type[AnySection]) -> AnySection:
    """Composes and validates the configuration. Raises ConfigError with one problem per key."""
    return _checked(composition, composition.compose(overrides), schema)


def _checked(composition: Composition, composed: dict[str, Any], schema: type[AnySection]) -> AnySection:
    problems = list(composition.problems)
    data = _with_defaults(composed, schema, composition.path)
    try:
        judged = schema.model_validate(data)
    except ValidationError as error:
        problems += explain(error, data, schema, composition.places)
    if problems:
        first_of_key = {problem.key: problem for problem in reversed(problems)}
        raise ConfigError(sorted(first_of_key.values(), key=_in_reading_order))
    return judged


def _in_reading_order(problem: Problem) -> tuple[bool, str, int, str]:
    file, _, line = problem.place.rpartition(":")
    return problem.place == COMMAND_LINE, file, int(line) if line.isdigit() else 0, problem.key


def _with_defaults(data: dict[str, Any], schema: Schema, path: Path | None) -> dict[str, Any]:
    """Fills in what a file may omit: the run's name, variant names, empty sections, the home directory."""
    filled = {name: _expanded(value) for name, value in data.items()}
    for name, known in schema.model_fields.items():
        if filled.get(name, known) is None and known.default is not None and sections(known):
            del filled[name]  # the file has `train:` with nothing below it
    for group in groups(schema):
        if isinstance(section := filled.get(group), dict):
            default = schema.model_fields[group].default.name
            filled[group] = {"name": _own_variant(section, schema, group) or default, **section}
    if isinstance(trackers := filled.get("trackers"), list):
        filled["trackers"] = [_named(tracker) for tracker in trackers]
    if path is not None and "name" in schema.model_fields:
        filled.setdefault("name", _default_name(path))
    return filled


def _expanded(value: Any) -> Any:
    """Replaces a leading `~` in paths, at any depth. Texts with spaces stay as they are."""
    if isinstance(value, dict):
        return {key: _expanded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_expanded(each) for each in value]
    is_path = isinstance(value, str) and value.startswith("~/") and not re.search(r"\s", value)
    return os.path.expanduser(value) if is_path else value


def _own_variant(section: dict[str, Any], schema: Schema, group: str) -> str | None:
    """Returns the name of the variant for user code if the section has an `entry`."""
    if ENTRY not in section:
        return None
    return next((name for name, variant in variants(schema, group).items() if ENTRY in variant.model_fields), None)


def _named(item: Any) -> Any:
    """Example: `wandb` -> {name: wandb}; {entry: ...} -> {name: entry, entry: ...}."""
    if isinstance(item, str):
        return {"name": item}
    return {"name": ENTRY, **item} if isinstance(item, dict) and "entry" in item else item


def _default_name(path: Path) -> str:
    """Returns the file's stem; for config.yaml, the directory's name."""
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:MAX_NAME] or "run"


def _with_paths(config: RunConfig, composition: Composition) -> RunConfig:
    """Makes the paths of runs, chat template and Pythons absolute. Raises ConfigError for an unknown `~user`."""
    absolute = partial(_absolute, composition)

    def with_python(section: AnySection | None, key: str) -> AnySection | None:
        if section is None or (python := getattr(section, "python")) is None:  # noqa: B009
            return section
        python = absolute(f"{key}.python", python)
        return section.model_copy(update={"python": python / "bin" / "python" if python.is_dir() else python})

    rollout = config.rollout
    sources = {name: with_python(source, f"rollout.sources.{name}") for name, source in rollout.sources.items()}
    inner = {"sources": sources, "cluster": with_python(rollout.cluster, "rollout.cluster")}
    changed = {name: section for name, section in inner.items() if section}
    rollout = (with_python(rollout, "rollout") or rollout).model_copy(update=changed)
    placed = _placed(config.model, config.engine, composition)
    return config.model_copy(update={"runs": absolute("runs", config.runs), "rollout": rollout, **placed})


def _placed(model: ModelConfig, engine: EngineConfig, composition: Composition) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if model.chat_template is not None:
        template = _absolute(composition, "model.chat_template", model.chat_template)
        changed["model"] = model.model_copy(update={"chat_template": template})
    if isinstance(engine, VllmEngineConfig) and engine.python is not None:
        python = _absolute(composition, "engine.python", engine.python)  # a venv's python is a link, which is kept
        changed["engine"] = engine.model_copy(update={"python": python})
    return changed


def _absolute(composition: Composition, key: str, path: Path) -> Path:
    try:
        return composition.directory / path.expanduser()
    except RuntimeError as error:
        raise ConfigError([Problem(key, composition.places.of(key), f"{path}: {error}")]) from error
