"""Composition: one configuration file and the command line's overrides, composed to a plain dict.

    the file and the options in its `defaults`  <  options chosen on the command line  <  values given there

An option chosen on the command line (`judge=rollout`) replaces the file's whole section. In the file, a plain name
(`engine: embedded`) does the same. When files name different variants of a section, the last file's section replaces
the others. pydantic checks the values later.
"""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from art_cli.config.config_file import read_document, read_text
from art_cli.config.defaults_list import DefaultsError, DefaultsList, DefaultsPart, Options
from art_cli.config.key_locations import COMMAND_LINE, Places, join
from art_cli.config.overrides import Schema, groups, parse, refuse_sweeps, section_at
from art_cli.config.packaged import packaged
from art_cli.config.sections.base_config import OLD_NAMES
from art_cli.runtime.errors import ConfigError, Problem, no_such_option

MAX_RESOLVED = 4 << 20  # characters of a configuration with its interpolations written out
# The dots and the name in ${name}, ${..name} and ${oc.select:name}. Environment variables hold no interpolations.
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*)([^{}:]+)\}")
GROUP = re.compile(r"[\w-]{1,64}(/[\w-]{1,64}){0,3}")
# Sections with a short form: the value of this key alone.
BY_NAME = {"rollout.environment": "name", "rollout.scenarios": "source", "eval.scenarios": "source"}


class Setting(NamedTuple):
    """A value from the command line. Example: Setting("train.steps", 3), or Setting("eval", None, is_removed=True)."""

    key: str
    value: Any
    is_removed: bool = False


class Composition:
    """One file with overrides. `compose` fills `places` with key locations and `problems` with all mistakes."""

    def __init__(self, path: Path | None, schema: Schema) -> None:
        self.path, self.schema, self.groups = path, schema, groups(schema)
        # Path.resolve raises for a link to itself; os.path.realpath does not
        self.directory = Path(os.path.realpath(path)).parent if path else Path.cwd()
        self.options = Options(self.directory, schema)
        self.places = Places()
        self.problems: list[Problem] = []

    def compose(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns the plain dict with interpolations resolved. Raises ConfigError for unreadable input."""
        overrides = parse(arguments)
        body = self._read()
        self.problems += refuse_sweeps(overrides)
        chosen, settings = self._split([override for override in overrides if not override.is_sweep_override()])
        config = self._merge_defaults(body, chosen, file=self.path)
        self._replace_sections(config, self._named_in(config), place=None)
        self._replace_sections(config, chosen, place=COMMAND_LINE)
        if self.places.has("hydra"):
            self.problems.append(Problem("hydra", self.places.of("hydra"), "Hydra's own settings have no effect here"))
        for setting in settings:
            self._set(config, setting)
        return self._resolve(config)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _read(self) -> DictConfig:
        if self.path is None:
            return OmegaConf.create({})
        body = read_document(self.path)
        self.places.add_file(self.path, read_text(self.path))
        body.pop("hydra", None)  # `compose` reports it
        return body

    def _merge_defaults(
        self, body: DictConfig, chosen: Mapping[str, str] | None = None, *, file: Path | None = None
    ) -> DictConfig:
        """Merges, in this order: options in the defaults list, `body`, options in `chosen`."""
        chosen = chosen or {}
        config = OmegaConf.create()
        try:
            parts = DefaultsList(self.options, chosen).expand(body, file)
            for part in sorted(parts, key=lambda each: each.group in chosen):
                self._merge(config, self._used(part))
                if part.file is not None:
                    self.places.add_file(part.file, read_text(part.file), package=part.package)
        except (DefaultsError, OmegaConfBaseException, OSError, TypeError, ValueError, RecursionError) as error:
            message = " ".join(str(error).split())
            raise ConfigError([Problem("defaults", self.places.of("defaults"), message)]) from error
        return config

    def _used(self, part: DefaultsPart) -> DictConfig:
        """Drops a packaged part's unknown sections; `art backend`, for example, ignores `train`."""
        used = [key for key in part.body if key in self.schema.model_fields]
        is_packaged = part.file is not None and part.file.is_relative_to(packaged("configs"))
        return OmegaConf.masked_copy(part.body, used) if is_packaged and used else part.body

    def _merge(self, config: DictConfig, part: DictConfig) -> None:
        """Merges `part` over `config`. A section for another variant is replaced."""
        here, there = _variants(config), _variants(part)
        for group in self.groups:
            if group in here and group in there and here[group] != there[group]:
                config.pop(group)
        config.merge_with(part)

    # --- groups -------------------------------------------------------------------------------------------------------

    def _split(self, overrides: Sequence[Override]) -> tuple[dict[str, str], list[Setting]]:
        """Returns {group: option} and the values. `judge.name=ruler` and `judge={name: ruler}` also choose options."""
        chosen: dict[str, str] = {}
        settings: list[Setting] = []
        for override in overrides:
            key, value = override.key_or_group, override.value()
            group = key.removesuffix(".name")
            has_files = group == key and GROUP.fullmatch(key) is not None and bool(self.options.files(key))
            is_group = group in self.groups or has_files  # a folder with options, such as `hardware`
            if is_group and group == key and isinstance(value, dict) and "name" in value:
                chosen[group] = str(value.pop("name"))
                settings.append(Setting(key, value))
            elif is_group and value is not None and not isinstance(value, dict) and not override.is_delete():
                chosen[group] = str(value)
            else:
                settings.append(Setting(key, value, is_removed=override.is_delete()))
        known = {group: option for group, option in chosen.items() if self._exists(group, option, COMMAND_LINE)}
        return known, settings

    def _named_in(self, config: DictConfig) -> dict[str, str]:
        """Removes plain names (`engine: embedded`) from `config`, and returns them as {group: option}."""
        named = {}
        for group in self.groups:
            # _resolve reports `???` and failed interpolations
            with contextlib.suppress(OmegaConfBaseException, RecursionError):
                if isinstance(config.get(group), str):
                    named[group] = config.pop(group)
        return {group: option for group, option in named.items() if self._exists(group, option, self.places.of(group))}

    def _exists(self, group: str, option: str, place: str) -> bool:
        there_are = self.options.names(group)
        if option not in there_are:
            self.problems.append(Problem(group, place, no_such_option(group, option, there_are)))
        return option in there_are

    def _replace_sections(self, config: DictConfig, chosen: Mapping[str, str], *, place: str | None) -> None:
        """Replaces whole sections by chosen options. `place` defaults to each section's location."""
        sections = {group: option for group, option in chosen.items() if group in self.schema.model_fields}
        if not sections:
            return
        for group in sections:
            config.pop(group, None)
            self.places.put(group, place or self.places.of(group))
        defaults: list[Any] = [{group: option} for group, option in sections.items()]
        options = self._merge_defaults(OmegaConf.create({"defaults": defaults}))
        for group in _variants(options):  # `algorithm=gspo` chooses a loss
            config.pop(group, None)
        config.merge_with(options)

    # --- values -------------------------------------------------------------------------------------------------------

    def _set(self, config: DictConfig, setting: Setting) -> None:
        key, value = setting.key, setting.value
        try:
            if setting.is_removed:
                section, _, name = key.rpartition(".")
                if value is not None and (there := OmegaConf.select(config, key)) != value:
                    self.problems.append(Problem(key, COMMAND_LINE, f"not removed: it is {there}, not {value}"))
                del (OmegaConf.select(config, section) if section else config)[name]
            else:
                for section, name in BY_NAME.items():
                    if key.startswith(f"{section}.") and isinstance(alone := OmegaConf.select(config, section), str):
                        OmegaConf.update(config, section, {name: alone}, merge=False)
                for below in [join(key, name) for name in value] if isinstance(value, dict) else [key]:
                    self._drop_other_names(config, below)
                OmegaConf.update(config, key, value, merge=True, force_add=True)
        except Exception as error:  # OmegaConf may raise anything for an odd key
            message = "nothing there to remove" if setting.is_removed else " ".join(str(error).split())
            self.problems.append(Problem(key, COMMAND_LINE, message))
            return
        for below in [join(key, name) for name in value] if isinstance(value, dict) else [key]:
            self.places.put(below, COMMAND_LINE)

    def _drop_other_names(self, config: DictConfig, key: str) -> None:
        """Removes a file's value under an old name of the key, because the command line wins."""
        section, _, name = key.rpartition(".")
        names = {"base_url", *OLD_NAMES}
        if name not in names or not isinstance(there := OmegaConf.select(config, section), DictConfig):
            return
        schema = section_at(self.schema, section, OmegaConf.to_container(config))
        for other in names - {name}:
            is_from_file = other in there and self.places.of(join(section, other)) != COMMAND_LINE
            if is_from_file and schema is not None and "base_url" in schema.model_fields:
                del there[other]

    def _resolve(self, config: DictConfig) -> dict[str, Any]:
        """Returns the plain dict. `???` and failed interpolations become null and are added to `problems`."""
        voided: set[str] = set()
        while True:
            try:
                if _resolved_size(OmegaConf.to_container(config, resolve=False)) > MAX_RESOLVED:
                    message = f"its interpolations write more than {MAX_RESOLVED >> 20} MiB; use fewer"
                    raise ConfigError([*self.problems, self._problem("", message)])
                for key in sorted(OmegaConf.missing_keys(config)):
                    self._void(config, key, "'???' is a place for a value; give one here or on the command line")
                data: Any = OmegaConf.to_container(config, resolve=True)
                assert isinstance(data, dict), data
                return dict(data)
            except InterpolationResolutionError as error:
                key = error.full_key or ""
                if key in voided or not key:
                    raise ConfigError([*self.problems, self._problem(key, _why(error))]) from error
                voided.add(key)
                self._void(config, key, _why(error))
            except (OmegaConfBaseException, RecursionError) as error:
                raise ConfigError([*self.problems, self._problem("", " ".join(str(error).split()))]) from error

    def _void(self, config: DictConfig, key: str, message: str) -> None:
        OmegaConf.update(config, key, None)
        self.problems.append(self._problem(key, message))

    def _problem(self, key: str, message: str) -> Problem:
        """Converts OmegaConf's list indices in brackets to dots."""
        dotted = key.replace("[", ".").replace("]", "")
        return Problem(dotted, self.places.of(dotted), message)


def _resolved_size(plain: Any) -> int:
    """Returns the number of characters of all keys and values, with each interpolation of a key written out."""
    sizes: dict[tuple[str, ...], int] = {}

    def size(path: tuple[str, ...]) -> int:
        if path not in sizes:
            sizes[path] = 0  # for a reference that leads back to here
            sizes[path] = measured(_value_at(plain, path), path)
        return sizes[path]

    def measured(value: Any, path: tuple[str, ...]) -> int:
        if isinstance(value, dict | list):
            names = value if isinstance(value, dict) else range(len(value))
            return sum(len(str(name)) + 1 + size((*path, str(name))) for name in names)
        targets = [_target(dots, name, path) for dots, name in _REFERENCE.findall(str(value))]
        return len(str(value)) + sum(map(size, targets))

    return size(())


def _target(dots: str, name: str, path: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the path that an interpolation at `path` names. One dot is the section around it, two the one above."""
    return (*(path[: max(len(path) - len(dots), 0)] if dots else ()), *filter(None, re.split(r"[.\[\]]+", name)))


def _value_at(plain: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if isinstance(plain, list) and name.isdigit() and int(name) < len(plain):
            plain = plain[int(name)]
        else:
            plain = plain.get(name, "") if isinstance(plain, dict) else ""
    return plain


def _variants(config: DictConfig) -> dict[str, str]:
    plain: Any = OmegaConf.to_container(config, resolve=False)
    named = {group: section.get("name") for group, section in plain.items() if isinstance(section, dict)}
    return {group: name for group, name in named.items() if isinstance(name, str)}


def _why(error: InterpolationResolutionError) -> str:
    """Extracts the reason from OmegaConf's message. Example: "Environment variable 'HOST' not found"."""
    if str(error).startswith("RecursionError"):
        return "this interpolation leads back to itself"
    why = re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", str(error).splitlines()[0])
    missing = re.fullmatch(r"Interpolation key '([A-Z0-9_]+)' not found", why)
    return f"{why}; for an environment variable write ${{oc.env:{missing[1]}}}" if missing else why
