"""One YAML file and the command line's overrides, put together by Hydra to a plain dict.

    file (and what its `defaults` name)  <  groups chosen on the command line  <  values given there

A group chosen on the command line (`judge=rollout`) replaces the file's section whole, whatever that section held. A
section that is only a name (`engine: embedded`) is the same choice made in the file. Groups are looked for beside the
file, then among the packaged ones. It does not know what the values should be: pydantic judges the dict. Writes
nothing, and leaves Hydra, logging and the working directory as they were.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from art_cli.config.knobs import Schema, groups
from art_cli.config.overrides import parse, refuse_sweeps
from art_cli.config.packaged import options, packaged
from art_cli.config.places import COMMAND_LINE, Places, join, show
from art_cli.config.problems import no_such_option
from art_cli.errors import ConfigError, Problem

PRIMARY = "the configuration file"  # what Hydra knows it as, and calls it when it complains


class Setting(NamedTuple):
    """A value from the command line. Example: Setting("train.steps", 3), or Setting("eval", None, is_removed=True)."""

    key: str
    value: Any
    is_removed: bool = False


class Composition:
    """`compose` once, then read `places` (where each key came from) and `problems` (what could not be used)."""

    def __init__(self, path: Path | None, schema: Schema) -> None:
        """Without a file there are only overrides."""
        self.path, self.schema, self.groups = path, schema, groups(schema)
        self.directory = path.resolve().parent if path else Path.cwd()
        self.sources = [self.directory, packaged("configs")]
        self.places = Places()
        self.problems: list[Problem] = []

    def compose(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The plain dict, interpolations resolved. Raises ConfigError where nothing can be put together at all."""
        overrides = parse(arguments)
        body = self._read()
        self.problems += refuse_sweeps(overrides)
        chosen, settings = self._split([override for override in overrides if not override.is_sweep_override()])
        with _hydra(self.directory):
            config = self._merge_defaults(body, self._listed(body, chosen), file=self.path)
            self._replace_sections(config, self._named_in(config), place=None)
            self._replace_sections(config, chosen, place=COMMAND_LINE)
        if self.places.has("hydra"):
            self.problems.append(Problem("hydra", self.places.of("hydra"), "Hydra's own settings have no effect here"))
        for setting in settings:
            self._set(config, setting)
        return self._resolve(config)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _read(self) -> DictConfig:
        """The file as it stands, `_self_` last in its defaults list where it has one without."""
        if self.path is None:
            return OmegaConf.create({})
        if not self.path.is_file():
            raise ConfigError([Problem("", show(self.path), _no_such_file(self.path))])
        try:
            body = OmegaConf.create(self.path.read_text(encoding="utf-8"))
            self.places.add_file(self.path)
        except yaml.YAMLError as error:
            raise ConfigError([_bad_yaml(error, self.path)]) from error
        except UnicodeDecodeError as error:
            raise ConfigError([Problem("", show(self.path), f"not UTF-8 text: {error.reason}")]) from error
        if not isinstance(body, DictConfig):
            raise ConfigError([Problem("", f"{show(self.path)}:1", "expected 'key: value' lines, not a list")])
        if isinstance(body.get("defaults"), ListConfig) and "_self_" not in body.defaults:
            body.defaults.append("_self_")
        body.pop("hydra", None)  # refused in `compose`; Hydra itself would obey it
        return body

    def _merge_defaults(
        self, body: DictConfig, arguments: Sequence[str] = (), *, file: Path | None = None
    ) -> DictConfig:
        """`body`, which `file` holds, over what its defaults list names, by Hydra; the places of all are noted."""
        arguments = [*arguments, f"hydra.searchpath=[{_quote(packaged('configs'))}]"]
        store = ConfigStore.instance()
        store.store(name=PRIMARY, node=body)
        try:
            config = compose(PRIMARY, overrides=arguments)
            merged = GlobalHydra.instance().config_loader().compute_defaults_list(PRIMARY, arguments, RunMode.RUN)
        except (HydraException, OmegaConfBaseException, ValueError, yaml.YAMLError) as error:
            raise ConfigError([self._of_hydra(error)]) from error
        finally:
            del store.repo[f"{PRIMARY}.yaml"]
        for default in merged.defaults:
            self._note_places(default.config_path, default.package or "", primary=file)
        OmegaConf.set_struct(config, False)
        return config

    def _note_places(self, name: str, package: str, primary: Path | None) -> None:
        """Of a file that Hydra merged. The packaged ones are right and hold nothing to point at."""
        file = primary if name == PRIMARY else self.directory / f"{name}.yaml"
        if file is not None and file.is_file():
            self.places.add_file(file, package=package)

    def _of_hydra(self, error: Exception) -> Problem:
        """Hydra's complaint about the defaults list, on one line."""
        if isinstance(error, yaml.MarkedYAMLError):
            return _bad_yaml(error, self.path or self.directory)
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
            there_are = options(group, self.sources)
            message = no_such_option(group, name, there_are) if group else f"no {name}.yaml in {self.directory}"
        else:
            message = " ".join(str(error.__cause__ or error).partition("\nConfig search path")[0].split())
        return Problem("defaults", self.places.of("defaults"), message.removeprefix(f"In '{PRIMARY}': "))

    # --- groups -------------------------------------------------------------------------------------------------------

    def _split(self, overrides: Sequence[Override]) -> tuple[dict[str, str], list[Setting]]:
        """Choices of groups, by group, and values. `judge.name=ruler` and `judge={name: ruler, ...}` choose as well."""
        chosen: dict[str, str] = {}
        settings: list[Setting] = []
        for override in overrides:
            key, value = override.key_or_group, override.value()
            group = key.removesuffix(".name")
            is_group = group in self.groups or (group == key and bool(options(key, [self.directory])))
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
        """The groups whose section in the files is only a name."""
        named = {}
        for group in self.groups:
            with contextlib.suppress(OmegaConfBaseException):  # ??? and what cannot be interpolated: see _resolve
                if isinstance(config.get(group), str):
                    named[group] = config.pop(group)
        return {group: option for group, option in named.items() if self._exists(group, option, self.places.of(group))}

    def _exists(self, group: str, option: str, place: str) -> bool:
        there_are = options(group, self.sources)
        if option not in there_are:
            self.problems.append(Problem(group, place, no_such_option(group, option, there_are)))
        return option in there_are

    def _listed(self, body: DictConfig, chosen: Mapping[str, str]) -> list[str]:
        """The choices that Hydra's defaults list must hear of: what it names itself, and groups that are no section."""
        entries = [entry for item in (body.get("defaults") or []) if isinstance(item, Mapping) for entry in item]
        listed = {str(entry).split()[-1].partition("@")[0].lstrip("/") for entry in entries}
        return [
            f"{'' if group in listed else '+'}{group}={option}"
            for group, option in chosen.items()
            if group in listed or group not in self.schema.model_fields
        ]

    def _replace_sections(self, config: DictConfig, chosen: Mapping[str, str], *, place: str | None) -> None:
        """Puts the chosen options in the place of whole sections; `place` is where they were chosen, None: there."""
        sections = {group: option for group, option in chosen.items() if group in self.schema.model_fields}
        for group in sections:
            config.pop(group, None)
            self.places.put(group, place or self.places.of(group))
        if sections:
            defaults = [{group: option} for group, option in sections.items()]
            config.merge_with(self._merge_defaults(OmegaConf.create({"defaults": defaults})))

    # --- values -------------------------------------------------------------------------------------------------------

    def _set(self, config: DictConfig, setting: Setting) -> None:
        key, value = setting.key, setting.value
        try:
            if setting.is_removed:
                section, _, name = key.rpartition(".")
                del (OmegaConf.select(config, section) if section else config)[name]
            else:
                OmegaConf.update(config, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, KeyError, TypeError) as error:
            message = "nothing there to remove" if setting.is_removed else " ".join(str(error).split())
            self.problems.append(Problem(key, COMMAND_LINE, message))
            return
        for below in [join(key, name) for name in value] if isinstance(value, dict) else [key]:
            self.places.put(below, COMMAND_LINE)

    def _resolve(self, config: DictConfig) -> dict[str, Any]:
        """The plain dict; what is `???` or cannot be interpolated is a problem, and null in it."""
        while True:
            try:
                for key in sorted(OmegaConf.missing_keys(config)):
                    self._void(config, key, "'???' is a place for a value; give one here or on the command line")
                data = OmegaConf.to_container(config, resolve=True)
            except InterpolationResolutionError as error:
                assert error.full_key, error
                self._void(config, error.full_key, _why(error))
            else:
                assert isinstance(data, dict), data
                return {str(name): value for name, value in data.items()}

    def _void(self, config: DictConfig, key: str, message: str) -> None:
        OmegaConf.update(config, key, None)
        dotted = key.replace("[", ".").replace("]", "")
        self.problems.append(Problem(dotted, self.places.of(dotted), message))


@contextlib.contextmanager
def _hydra(directory: Path) -> Iterator[None]:
    """Hydra's compose API over a directory; an application of Hydra's that this runs inside is left as it was."""
    outer = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(directory), job_name="art", version_base="1.3"):
            yield
    finally:
        restore_gh_from_backup(outer)


def _why(error: InterpolationResolutionError) -> str:
    """Example: "Environment variable 'HOST' not found", out of what OmegaConf wraps around it."""
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", str(error).splitlines()[0])


def _no_such_file(path: Path) -> str:
    """Example: "no such file; did you mean 'my/config.yaml'?"."""
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
        return "a directory; name the file in it" + (f", for example {show(found[0])}" if found else "")
    if not path.parent.is_dir():
        return f"no such file; there is no directory {show(path.parent)}"
    stems = {file.stem: file for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    near = get_close_matches(path.stem, list(stems), n=1)
    return "no such file" + "".join(f"; did you mean {show(stems[stem])!r}?" for stem in near)


def _bad_yaml(error: yaml.YAMLError, path: Path) -> Problem:
    """What the parser saw, with the file and line it saw it in."""
    mark = getattr(error, "problem_mark", None)
    file = Path(mark.name) if mark is not None and Path(mark.name).is_file() else path
    place = f"{show(file)}:{mark.line + 1}" if mark is not None else show(file)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    begin = getattr(error, "context_mark", None)
    if mark is not None and begin is not None and begin.line < mark.line:
        what = f"{error.context} from line {begin.line + 1}: {what}"  # type: ignore[attr-defined]
    return Problem("", place, f"not valid YAML: {what}")


def _quote(path: Path) -> str:
    """The directory as a quoted string of Hydra's override grammar."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'file://{text}'"
