"""Expands a configuration file's defaults list, in Hydra's syntax, with OmegaConf.

List items are files (`base`), options (`loss: dapo`), and `_self_` for the values in the listing file. An option is a
user's YAML file (`loss/mine.yaml`), a packaged file (`configs/hardware/h100.yaml`), or a schema variant. Its values
belong to the group's section, unless the file starts with `# @package SECTION`; `_global_` is the root. Files can have
defaults lists, too.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from art_cli.config.config_file import read_document, read_text
from art_cli.config.overrides import Schema, variant_names
from art_cli.config.packaged import packaged
from art_cli.runtime.errors import no_such_option

SELF = "_self_"
ITEM = re.compile(r"(?P<optional>optional )?(?P<override>override )?(?P<group>[^@\s]+)(?:@(?P<package>\S*))?")
HEADER = re.compile(r"(?:\s*#\s*@(?!package\b).*\n|\s*\n)*\s*#\s*@package\s+(?P<package>\S+)\s*(?:\n|$)")


class DefaultsError(Exception):
    """A mistake in a defaults list."""


class Options:
    """The available options: files in the user's directory, packaged files, and schema variants."""

    def __init__(self, directory: Path, schema: Schema) -> None:
        self.directory, self.schema = directory, schema
        self._folders = (directory, packaged("configs"))

    def file(self, name: str) -> Path | None:
        """Returns the path of "GROUP/OPTION". The user's files hide packaged files."""
        files = (folder / f"{name.removesuffix('.yaml')}.yaml" for folder in self._folders)
        return next((file for file in files if file.exists()), None)

    def files(self, group: str) -> set[str]:
        return {file.stem for folder in self._folders for file in (folder / group).glob("*.yaml")}

    def names(self, group: str) -> list[str]:
        """Returns the names that `group=NAME` can choose, sorted."""
        return sorted(self.files(group).union(variant_names(self.schema, group)))


class DefaultsPart(NamedTuple):
    """A mapping to merge. Example: DefaultsPart("loss", {"loss": {"name": "gspo"}}, "loss", Path("loss/mine.yaml"))."""

    group: str  # the file's folder, or the variant's group; "" is the user's directory
    body: DictConfig  # already below the package
    package: str  # dotted key; "" is the root
    file: Path | None  # None for schema variants


class _Item(NamedTuple):
    group: str  # relative to the folder of the file with the list, or absolute with a leading "/"
    options: list[str] | None  # None for a file
    package: str | None
    is_optional: bool = False
    is_override: bool = False


class DefaultsList:
    """Expands one list. `chosen`, from the command line, replaces listed options."""

    def __init__(self, options: Options, chosen: Mapping[str, str]) -> None:
        self.options = options
        self._chosen = {group: [option] for group, option in chosen.items()}
        self._appended = [group for group in chosen if group not in options.schema.model_fields]
        self._overrides: set[str] = set()  # groups in `override` items
        self._seen: set[str] = set()  # groups in the expanded lists

    def expand(self, body: DictConfig, file: Path | None) -> list[DefaultsPart]:
        """Returns the parts in merge order; chosen groups not listed come last. Raises DefaultsError, ConfigError."""
        known: dict[str, list[str]] | None = None
        while known != self._chosen:  # an `override` also changes earlier items
            known = self._chosen
            self._seen.clear()
            parts = self._expand(body, file, "", "", ())
            for group in self._appended:
                if group not in self._seen:
                    parts += self._of(_Item(group, [], None), "", "", (), {})
        if unused := self._overrides - self._seen:
            raise DefaultsError(f"'override {min(unused)}' has nothing to override: no list names {min(unused)}")
        return parts

    def _expand(
        self, body: DictConfig, file: Path | None, folder: str, package: str, trail: tuple[Path, ...]
    ) -> list[DefaultsPart]:
        if file is not None and file in trail:
            raise DefaultsError("the list leads back to itself: a file is named by one that it names")
        trail = (*trail, file) if file is not None else trail
        items = _items(body)
        listed = {item.group: item.options[0] for item in items if item.options and not item.is_override}
        overrides = {_key(item, folder): item.options or [] for item in items if item.is_override}
        self._overrides |= {key for key in overrides if key.partition("/")[0] != "hydra"}
        self._chosen = overrides | self._chosen
        parts: list[DefaultsPart] = []
        for item in reversed(items):  # the last `override` wins
            if item.group == SELF:
                parts.insert(0, DefaultsPart(folder, _below(package, body), package, file))
            elif not item.is_override:
                parts[:0] = self._of(item, folder, package, trail, listed)
        return parts

    def _of(
        self, item: _Item, folder: str, above: str, trail: tuple[Path, ...], listed: Mapping[str, str]
    ) -> list[DefaultsPart]:
        """Expands one item; `folder` and `above` are the listing file's folder and package."""
        key = _key(item, folder)
        group = key.partition("@")[0]
        if group.partition("/")[0] == "hydra":
            return []
        if item.options is None:
            if (file := self.options.file(group)) is None:
                raise DefaultsError(f"no {group}.yaml in {self.options.directory}")
            return self._file(file, read_document(file), item, above, trail, folder=group.rpartition("/")[0])
        if key in self._seen:
            raise DefaultsError(f"{key} is in the list twice")
        self._seen.add(key)
        parts: list[DefaultsPart] = []
        choices = {**listed, **{name: chosen[0] for name, chosen in self._chosen.items() if chosen}}
        for written in self._chosen.get(key, item.options):
            option = str(OmegaConf.create({**choices, SELF: written})[SELF]) if "${" in written else written
            names = self.options.names(group)
            if option == "???":
                raise DefaultsError(f"choose one: {group}=<OPTION>; there are: {', '.join(names)}")
            file = self.options.file(f"{group}/{option}")
            if file is not None:
                parts += self._file(file, read_document(file), item, above, trail, folder=group)
            elif option in variant_names(self.options.schema, group):
                parts += self._file(None, OmegaConf.create({"name": option}), item, above, trail, folder=group)
            elif not item.is_optional:
                raise DefaultsError(no_such_option(group, option, names))
        return parts

    def _file(
        self, file: Path | None, body: DictConfig, item: _Item, above: str, trail: tuple[Path, ...], *, folder: str
    ) -> list[DefaultsPart]:
        relative = item.group.lstrip("/")
        place = relative.rpartition("/")[0] if item.options is None else relative
        given = item.package if item.package is not None else _header(file)
        package = _join_packages(above, place.replace("/", ".") if given is None else given)
        return self._expand(body, file, folder, package, trail)


def _items(body: DictConfig) -> list[_Item]:
    """Returns the list's items; `_self_` is last by default. Raises DefaultsError."""
    plain: Any = OmegaConf.to_container(body, resolve=False)
    listed = plain.get("defaults", [])
    if not isinstance(listed, list):
        raise DefaultsError("expected a list, such as [base, {loss: dapo}]")
    items = [_item(item) for item in listed]
    if (num_self := sum(item.group == SELF for item in items)) > 1:
        raise DefaultsError("_self_ is in the list twice")
    return items if num_self else [*items, _Item(SELF, [], None)]


def _item(item: object) -> _Item:
    group, option, options = item, None, None
    if isinstance(item, dict) and len(item) == 1:
        [(group, option)] = item.items()
        options = option if isinstance(option, list) else [] if option is None else [option]
    matched = ITEM.fullmatch(group) if isinstance(group, str) else None
    if matched is None or not all(isinstance(each, str) for each in options or []):
        raise DefaultsError(f"expected the name of a file or {{GROUP: OPTION}}, not {item}")
    return _Item(matched["group"], options, matched["package"], bool(matched["optional"]), bool(matched["override"]))


def _key(item: _Item, folder: str) -> str:
    """Returns the item's group below the root, with the package if it names one. Example: "loss@other"."""
    is_absolute = item.group.startswith("/") or not folder
    group = item.group.removeprefix("/") if is_absolute else f"{folder}/{item.group}"
    return group if item.package is None else f"{group}@{item.package}"


def _header(file: Path | None) -> str | None:
    """Returns the absolute package from the file's header."""
    matched = None if file is None else HEADER.match(read_text(file))
    return None if matched is None or matched["package"] == "_group_" else f"_global_.{matched['package']}"


def _below(package: str, body: DictConfig) -> DictConfig:
    """Nests a file's values, except the defaults list, below a dotted key."""
    content = body.copy()
    content.pop("defaults", None)
    if not package:
        return content
    below = OmegaConf.create()
    OmegaConf.update(below, package, content, merge=False)
    return below


def _join_packages(above: str, package: str) -> str:
    """Joins dotted keys; `_global_` starts from the root."""
    joined = f"{above}.{package}".rpartition("_global_")[2]
    return ".".join(filter(None, joined.replace("_here_", "").split(".")))
