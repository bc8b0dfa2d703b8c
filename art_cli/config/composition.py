"""Composition: one YAML file and the command line's overrides, composed by Hydra to a plain dict.

    the file and the options in its `defaults`  <  options chosen on the command line  <  values given there

An option is a YAML file in a folder beside the file (`judge/mine.yaml`), else one in `configs/` of the package
(`hardware=h100`), else a variant of the schema. An option chosen on the command line (`judge=rollout`) replaces the
whole section of the file. A section that is only a name (`engine: embedded`) is the same choice, made in the file. A
section that names another variant than the one it is merged over replaces it. The values are not checked here; pydantic
checks the dict. Composing writes nothing, and leaves Hydra, logging and the working directory as they were.

A file is read as one mapping, or its mistakes are raised with their lines. Its size and depth are bounded, so that a
wrong path is refused at once. A configuration names code that is run, so that nothing else in it is taken for an
attack.
"""

import codecs
import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException
from omegaconf.grammar_parser import parse as parse_interpolation

from art_cli.config.key_locations import COMMAND_LINE, Places, join, show
from art_cli.config.overrides import Schema, groups, parse, refuse_sweeps, section_at, variant_names
from art_cli.config.packaged import packaged
from art_cli.config.sections.base_config import OLD_NAMES
from art_cli.runtime.errors import ConfigError, Problem, no_such_option

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024  # largest size of a file; the largest recipe has 2 KiB
MAX_DEPTH = 40  # levels of nesting; Hydra and OmegaConf take about ten Python frames for each level

# Numbers that YAML 1.1 reads otherwise than people do: 010 is octal, 1:30 and 12:30:45 are in base 60.
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]*[0-7][0-7_]*|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
WORDS = ("yes", "no", "on", "off")  # YAML 1.1 reads these as true and false
KINDS = {"null": "null", "bool": "true or false", "int": "a number", "float": "a number"}  # types of a bare key
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_text(path: Path) -> str:
    """Returns the text of a file in UTF-8, or in the encoding of its byte order mark. Raises ConfigError."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode) and status.st_size <= MAX_BYTES:
            return _decoded(path.read_bytes(), path)
    except FileNotFoundError:
        raise _refused(path, _no_such_file(path)) from None
    except (OSError, ValueError) as error:
        raise _refused(path, getattr(error, "strerror", None) or str(error)) from None
    if stat.S_ISREG(status.st_mode):
        raise _refused(path, f"{status.st_size} bytes, and a configuration has at most {MAX_BYTES}")
    raise _refused(path, _a_directory(path) if path.is_dir() else "not a file with text (a pipe, a socket or a device)")


def read_document(path: Path) -> DictConfig:
    """Returns the file's mapping with unresolved interpolations, empty for an empty file. Raises ConfigError."""
    text, shown = read_text(path), show(path)
    try:
        _check_shape(text, shown)
        if problems := list(_problems_below(yaml.compose(text, Loader=yaml.SafeLoader), "", shown)):
            raise ConfigError(problems)
        body = OmegaConf.create(text)
    except yaml.YAMLError as error:
        raise ConfigError([bad_yaml(error, path)]) from error
    except RecursionError as error:
        raise _refused(path, "an anchor in it contains itself") from error
    except (
        OmegaConfBaseException,
        ValueError,
        AssertionError,
    ) as error:  # OmegaConf asserts that the root is a mapping
        raise _refused(path, " ".join(str(error).split()) or "expected 'key: value' lines") from error
    assert isinstance(body, DictConfig), body
    return body


def bad_yaml(error: yaml.YAMLError, path: Path) -> Problem:
    """Returns the parser's error as a problem with file and line."""
    mark = getattr(error, "problem_mark", None)
    file = Path(mark.name) if mark is not None and Path(mark.name).is_file() else path
    place = f"{show(file)}:{mark.line + 1}" if mark is not None else f"{show(file)}:1"
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    begin = getattr(error, "context_mark", None)
    if mark is not None and begin is not None and begin.line < mark.line:
        what = f"{error.context} from line {begin.line + 1}: {what}"  # type: ignore[attr-defined]
    return Problem("", place, f"not valid YAML: {what}")


def _refused(path: Path, message: str) -> ConfigError:
    return ConfigError([Problem("", show(path), message)])


def _decoded(data: bytes, path: Path) -> str:
    encoding = next((name for mark, name in MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError([Problem("", f"{show(path)}:{line}", f"not UTF-8 text: {error.reason}")]) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise ConfigError([Problem("", f"{show(path)}:{line}", "not a text: it holds NUL characters")])
    return text


def _no_such_file(path: Path) -> str:
    """Example: "no such file; did you mean 'my/config.yaml'?"."""
    if not path.parent.is_dir():
        return f"no such file; there is no directory {show(path.parent)}"
    stems = {file.stem: file for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    near = get_close_matches(path.stem, list(stems), n=1)
    return "no such file" + "".join(f"; did you mean {show(stems[stem])!r}?" for stem in near)


def _a_directory(path: Path) -> str:
    files = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
    return "a directory; name the file in it" + (f", for example {show(files[0])}" if files else "")


def _check_shape(text: str, shown: str) -> None:
    """Raises ConfigError if the text is nested too deeply or is no mapping, yaml.YAMLError if it is no YAML."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{shown}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if depth == 0 and isinstance(event, yaml.NodeEvent) and not isinstance(event, yaml.MappingStartEvent):
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"
            if getattr(event, "value", None) != "":  # a file with only comments has one empty scalar
                raise ConfigError([Problem("", place, f"expected 'key: value' lines, not {kind}")])
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError([Problem("", place, f"nested deeper than {MAX_DEPTH} levels")])


def _problems_below(node: yaml.Node | None, key: str, shown: str) -> Iterator[Problem]:
    """Yields a problem for each key that is no text, and for each interpolation that OmegaConf cannot read."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            below, place = join(key, str(name.value)), f"{shown}:{name.start_mark.line + 1}"
            if not isinstance(name, yaml.ScalarNode):
                yield Problem(key, place, "a key is plain text, not a list or a mapping")
            elif kind := KINDS.get(name.tag.rpartition(":")[2]):
                message = f"the key {_short(name.value)!r} is {kind} in YAML, and a key is text; put it in quotes"
                yield Problem(below, place, message)
            yield from _problems_below(value, below, shown)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _problems_below(value, join(key, str(index)), shown)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and _OTHER_BASE.fullmatch(node.value):
        read = yaml.safe_load(node.value)
        message = f"YAML reads {_short(node.value)} as the number {read}; write {read}, or put text in quotes"
        yield Problem(key, f"{shown}:{node.start_mark.line + 1}", message)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.value.lower() in WORDS:
        is_true = yaml.safe_load(node.value)
        read = str(is_true).lower()
        log.warning(
            "%s:%d: %s: YAML reads %s as %s; write %s, or put text in quotes",
            *(shown, node.start_mark.line + 1, key, node.value, read, read),
        )
    elif isinstance(node, yaml.ScalarNode) and "${" in node.value:
        try:
            parse_interpolation(node.value)
        except GrammarParseError:
            message = rf"cannot read the interpolation in {_short(node.value)!r}; write \${{ for a plain ${{"
            yield Problem(key, f"{shown}:{node.start_mark.line + 1}", message)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


PRIMARY = "the configuration file"  # name of the file in Hydra's store and in Hydra's error messages

GROUP = re.compile(r"[\w-]{1,64}(/[\w-]{1,64}){0,3}")
BY_NAME = {  # sections that may be written as one of their keys alone, also where another key of them is set
    "rollout.environment": "name",
    "rollout.scenarios": "source",
    "eval.scenarios": "source",
}


class Setting(NamedTuple):
    """A value from the command line. Example: Setting("train.steps", 3), or Setting("eval", None, is_removed=True)."""

    key: str
    value: Any
    is_removed: bool = False


class Composition:
    """One file and its overrides. After `compose`, `places` has the origin of each key and `problems` all mistakes."""

    def __init__(self, path: Path | None, schema: Schema) -> None:
        self.path, self.schema, self.groups = path, schema, groups(schema)
        self.directory = (
            Path(os.path.realpath(path)).parent if path else Path.cwd()
        )  # realpath takes even a link to itself
        self.places = Places()
        self.problems: list[Problem] = []

    def compose(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Returns the plain dict with interpolations resolved. Raises ConfigError if Hydra cannot compose anything."""
        overrides = parse(arguments)
        body = self._read()
        self.problems += refuse_sweeps(overrides)
        chosen, settings = self._split([override for override in overrides if not override.is_sweep_override()])
        with _hydra(self.directory, self.schema):
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
        """Returns the file's content, with `_self_` appended to a defaults list that lacks it; {} if there is no
        file."""
        if self.path is None:
            return OmegaConf.create({})
        body = read_document(self.path)
        self.places.add_file(self.path, read_text(self.path))
        if (defaults := _defaults(body)) and "_self_" not in defaults:
            body.defaults.append("_self_")
        body.pop("hydra", None)  # `compose` reports it; Hydra would follow it
        return body

    def _merge_defaults(
        self, body: DictConfig, chosen: Mapping[str, str] | None = None, *, file: Path | None = None
    ) -> DictConfig:
        """Merges `body`, the content of `file`, over the options in its defaults list, and `chosen` ones over both."""
        primary = body.copy()
        primary.hydra = {"searchpath": [f"file://{packaged('configs')}"]}  # comes after the user's own directory
        ConfigStore.instance().store(name=PRIMARY, node=primary)
        arguments = self._listed(body, chosen or {})
        config = OmegaConf.create()
        try:
            merged = GlobalHydra.instance().config_loader().compute_defaults_list(PRIMARY, arguments, RunMode.RUN)
            defaults = [(str(each.config_path), each.package or "") for each in merged.defaults]
            for name, package in sorted(defaults, key=lambda each: each[0].rpartition("/")[0] in (chosen or {})):
                if not name.startswith("hydra/"):
                    self._merge(config, self._part(name, package, body))
                    self._note_places(name, package, primary=file)
        except ConfigError:
            raise
        except Exception as error:  # the boundary to Hydra, which may raise anything for a wrong defaults list
            raise ConfigError([self._of_hydra(error)]) from error
        return config

    def _part(self, name: str, package: str, body: DictConfig) -> DictConfig:
        """Returns the content of one item of a defaults list, below its package."""
        file = self._file_of(name)
        if name == PRIMARY:
            content = body.copy()
        else:
            content = read_document(file) if file is not None else OmegaConf.create({"name": name.rpartition("/")[2]})
        content.pop("defaults", None)
        if not package:
            part = content
        else:
            part = OmegaConf.create()
            OmegaConf.update(part, package, content, merge=False)
        if file is not None and file.is_relative_to(packaged("configs")):  # `art backend` has no use for `train`
            used = [key for key in part if key in self.schema.model_fields]
            return OmegaConf.masked_copy(part, used) if used else part
        return part

    def _merge(self, config: DictConfig, part: DictConfig) -> None:
        """Merges `part` over `config`. Keys of another variant than the one that `part` names are forgotten."""
        for group in self.groups:
            name = _name_in(part, group)
            if name is not None and _name_in(config, group) not in (None, name):
                config.pop(group)
        config.merge_with(part)

    def _file_of(self, name: str) -> Path | None:
        """Returns the file of an item of a defaults list: beside the user's file, or else packaged; or None."""
        files = (self.directory / f"{name}.yaml", packaged("configs") / f"{name}.yaml")
        return next((file for file in files if file.is_file()), None)

    def _note_places(self, name: str, package: str, primary: Path | None) -> None:
        """Notes the places of the keys of a file that was merged. A variant of the schema has no file."""
        file = primary if name == PRIMARY else self._file_of(name)
        if file is not None and file.is_file():
            self.places.add_file(file, read_text(file), package=package)

    def _of_hydra(self, error: Exception) -> Problem:
        """Returns Hydra's error about the defaults list as one line."""
        if isinstance(error, yaml.MarkedYAMLError):
            return bad_yaml(error, self.path or self.directory)
        if isinstance(error, MissingConfigException) and error.missing_cfg_file:
            group, _, name = str(error.missing_cfg_file).removesuffix(".yaml").rpartition("/")
            there_are = self._options(group)
            message = no_such_option(group, name, there_are) if group else f"no {name}.yaml in {self.directory}"
        elif isinstance(error, RecursionError):
            message = "the list leads back to itself: a file is named by one that it names"
        else:
            message = " ".join(str(error.__cause__ or error).partition("\nConfig search path")[0].split())
            message = message or type(error).__name__
        return Problem("defaults", self.places.of("defaults"), message.removeprefix(f"In '{PRIMARY}': "))

    # --- groups -------------------------------------------------------------------------------------------------------

    def _split(self, overrides: Sequence[Override]) -> tuple[dict[str, str], list[Setting]]:
        """Returns {group: chosen option} and the values. `judge.name=ruler` and `judge={name: ruler}` are choices
        too."""
        chosen: dict[str, str] = {}
        settings: list[Setting] = []
        for override in overrides:
            key, value = override.key_or_group, override.value()
            group = key.removesuffix(".name")
            is_group = group in self.groups or (group == key and self._has_files(key))
            if is_group and group == key and isinstance(value, dict) and "name" in value:
                chosen[group] = str(value.pop("name"))
                settings.append(Setting(key, value))
            elif is_group and value is not None and not isinstance(value, dict) and not override.is_delete():
                chosen[group] = str(value)
            else:
                settings.append(Setting(key, value, is_removed=override.is_delete()))
        known = {group: option for group, option in chosen.items() if self._exists(group, option, COMMAND_LINE)}
        return known, settings

    def _has_files(self, key: str) -> bool:
        """Whether the key is a folder of options, beside the file (`experiment`) or packaged (`hardware`)."""
        return GROUP.fullmatch(key) is not None and bool(self._files(key))

    def _files(self, group: str) -> set[str]:
        """Returns the names of the YAML files in the group's folders: beside the file, and packaged."""
        folders = (self.directory / group, packaged("configs") / group)
        return {file.stem for folder in folders for file in folder.glob("*.yaml")}

    def _options(self, group: str) -> list[str]:
        """Returns the names that `group=NAME` can choose, sorted."""
        return sorted(self._files(group).union(variant_names(self.schema, group)))

    def _named_in(self, config: DictConfig) -> dict[str, str]:
        """Removes each section that is only a name from `config`, and returns these names as {group: option}."""
        named = {}
        for group in self.groups:
            # _resolve reports `???` and what cannot be interpolated
            with contextlib.suppress(OmegaConfBaseException, RecursionError):
                if isinstance(config.get(group), str):
                    named[group] = config.pop(group)
        return {group: option for group, option in named.items() if self._exists(group, option, self.places.of(group))}

    def _exists(self, group: str, option: str, place: str) -> bool:
        there_are = self._options(group)
        if option not in there_are:
            self.problems.append(Problem(group, place, no_such_option(group, option, there_are)))
        return option in there_are

    def _listed(self, body: DictConfig, chosen: Mapping[str, str]) -> list[str]:
        """Returns Hydra's arguments for choices that its defaults list has too, and for groups that are no section."""
        entries = [entry for item in _defaults(body) if isinstance(item, dict) for entry in item]
        listed = {str(entry).rpartition(" ")[2].partition("@")[0].lstrip("/") for entry in entries}
        return [
            f"{'' if group in listed else '+'}{group}={option}"
            for group, option in chosen.items()
            if group in listed or group not in self.schema.model_fields
        ]

    def _replace_sections(self, config: DictConfig, chosen: Mapping[str, str], *, place: str | None) -> None:
        """Replaces whole sections by the chosen options, which were chosen at `place`, or in the sections if None."""
        sections = {group: option for group, option in chosen.items() if group in self.schema.model_fields}
        if not sections:
            return
        for group in sections:
            config.pop(group, None)
            self.places.put(group, place or self.places.of(group))
        defaults: list[Any] = [{group: option} for group, option in sections.items()]
        options = self._merge_defaults(OmegaConf.create({"defaults": [*defaults, "_self_"]}))
        for group in self.groups:
            if _name_in(options, group) is not None:  # `algorithm=gspo` chooses a loss
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
        except Exception as error:  # the boundary to OmegaConf, which may raise anything for a hostile key
            message = "nothing there to remove" if setting.is_removed else " ".join(str(error).split())
            self.problems.append(Problem(key, COMMAND_LINE, message))
            return
        for below in [join(key, name) for name in value] if isinstance(value, dict) else [key]:
            self.places.put(below, COMMAND_LINE)

    def _drop_other_names(self, config: DictConfig, key: str) -> None:
        """Removes the files' values of the key under its other names, because the command line wins."""
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
        """Returns the plain dict. A value that is `???` or cannot be interpolated becomes null, and a problem."""
        voided: set[str] = set()
        while True:
            try:
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
        """Returns the problem at `key`, which OmegaConf writes with brackets around list indices."""
        dotted = key.replace("[", ".").replace("]", "")
        return Problem(dotted, self.places.of(dotted), message)


class _CheckedFiles(FileConfigSource):
    """Hydra's source of files, in which `read_document` reads each file."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path) / self._normalize_file_name(config_path)
        header = ConfigSource._get_header_dict(read_text(path)[:512])
        return ConfigResult(
            config=read_document(path), path=f"{self.scheme()}://{self.path}", provider=self.provider, header=header
        )


@contextlib.contextmanager
def _hydra(directory: Path, schema: Schema) -> Iterator[None]:
    """Opens Hydra over a directory, with an option in Hydra's store for each variant of the schema that has no file.

    An application of Hydra's that this runs inside is left as it was.
    """
    outer = get_gh_backup()
    store = ConfigStore.instance()
    stored = store.repo
    store.repo = {name: node for name, node in stored.items() if name not in groups(schema)}
    for group in groups(schema):
        for name in variant_names(schema, group):
            folders = (directory / group, packaged("configs") / group)
            if not any((folder / f"{name}.yaml").exists() for folder in folders):  # Hydra refuses a name in both
                store.store(group=group, name=name, node={"name": name})
    GlobalHydra.instance().clear()
    Plugins.instance()  # creating it fills the table of sources
    sources = SourcesRegistry.instance().types
    own = sources["file"]
    sources["file"] = _CheckedFiles
    try:
        with initialize_config_dir(str(directory), job_name="art", version_base="1.3"):
            yield
    finally:
        sources["file"] = own
        store.repo = stored
        restore_gh_from_backup(outer)


def _defaults(body: DictConfig) -> list[Any]:
    """Returns the defaults list as it is written, or [] if there is no list."""
    raw = OmegaConf.to_container(body, resolve=False)
    defaults = raw.get("defaults") if isinstance(raw, dict) else None
    return defaults if isinstance(defaults, list) else []


def _name_in(config: DictConfig, group: str) -> str | None:
    """Returns the variant that a section names, or None if there is no such section or it names none."""
    section = config._get_node(group)
    name = section._get_node("name") if isinstance(section, DictConfig) and not section._is_none() else None
    return name._value() if isinstance(name, Node) and isinstance(name._value(), str) else None


def _why(error: InterpolationResolutionError) -> str:
    """Returns the reason without OmegaConf's text around it. Example: "Environment variable 'HOST' not found"."""
    if str(error).startswith("RecursionError"):
        return "this interpolation leads back to itself"
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", str(error).splitlines()[0])
