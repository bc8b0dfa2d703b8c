"""Reads one YAML file within bounds: returns its mapping, or raises what is wrong with it.

A configuration is a small text of keys and plain values. A file that is anything else (binary, a pipe, a bomb of
aliases, tags that construct objects) is refused while its parse events are read, before a node of it is built.
"""

import codecs
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse as parse_interpolation

from art_cli.config.key_locations import join, show
from art_cli.runtime.errors import ConfigError, Problem

MAX_BYTES = 256 * 1024  # largest size of a file; the largest recipe has 2 KiB
MAX_NODES = 10_000  # largest number of values and keys in a file, with every alias expanded
MAX_DEPTH = 40  # levels of nesting; Hydra and OmegaConf take about ten Python frames for each level
MAX_DIGITS = 300  # digits of a whole number; Python itself refuses more than 4300
MAX_INTERPOLATED = 10_000  # characters of a value with `${...}`, which a slow parser in Python reads
PLAIN_TAGS = (None, "!", *(f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")))

MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, or in the encoding of its byte order mark. Raises ConfigError."""
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
    """The file's mapping with unresolved interpolations; an empty file is an empty mapping. Raises ConfigError."""
    text = read_text(path)
    try:
        if problems := list(_Scan(show(path)).problems_in(text)):
            raise ConfigError(problems)
        body = OmegaConf.create(text)
    except yaml.YAMLError as error:
        raise ConfigError([bad_yaml(error, path)]) from error
    except (OmegaConfBaseException, ValueError, RecursionError) as error:
        raise _refused(path, " ".join(str(error).split())) from error
    assert isinstance(body, DictConfig), body
    return body


def bad_yaml(error: yaml.YAMLError, path: Path) -> Problem:
    """The parser's error as a problem with file and line."""
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
    found = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
    return "a directory; name the file in it" + (f", for example {show(found[0])}" if found else "")


# --- what a file may hold ---------------------------------------------------------------------------------------------


@dataclass
class _Open:
    """A list or mapping whose end has not been read yet."""

    key: str  # dotted key
    anchor: str | None
    is_mapping: bool
    num_children: int = 0  # number of keys and values
    num_nodes: int = 1  # number of nodes, with aliases expanded
    name: str = ""  # the key to which the next value belongs


@dataclass
class _Scan:
    """Reads the events of one file. It stops at the first bound that is passed; other problems are collected."""

    shown: str
    num_nodes: int = 0
    open: list[_Open] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)  # anchor -> number of nodes, with aliases expanded

    def problems_in(self, text: str) -> Iterator[Problem]:
        """Raises yaml.YAMLError: the text is no YAML; ConfigError: it exceeds a bound."""
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.NodeEvent):
                yield from self._node(event)
            elif isinstance(event, yaml.CollectionEndEvent):
                ended = self.open.pop()
                self.sizes[ended.anchor or ""] = ended.num_nodes
                if self.open:
                    self.open[-1].num_nodes += ended.num_nodes

    def _node(self, event: yaml.NodeEvent) -> Iterator[Problem]:
        within = self.open[-1] if self.open else None
        is_key = within is not None and within.is_mapping and within.num_children % 2 == 0
        key = self._key(within, event, is_key=is_key)
        place = f"{self.shown}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if within is None and not isinstance(event, yaml.MappingStartEvent):
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"
            if getattr(event, "value", None) != "":  # a file with only comments has one empty scalar
                raise ConfigError([Problem("", place, f"expected 'key: value' lines, not {kind}")])
        self._count(event, key, place, within)
        if isinstance(event, yaml.ScalarEvent):
            yield from _problems_of_scalar(event, key, place, is_key=is_key)
        elif isinstance(event, yaml.CollectionStartEvent):
            if is_key:
                yield Problem(key, place, "a key is plain text, not a list or a mapping")
            if event.tag not in PLAIN_TAGS:
                yield _tagged(event.tag, key, place)
            self.open.append(_Open(key, event.anchor, isinstance(event, yaml.MappingStartEvent)))

    def _key(self, within: _Open | None, event: yaml.NodeEvent, *, is_key: bool) -> str:
        """The dotted key of the node that begins; the node is counted as the next child of `within`."""
        if within is None:
            return ""
        place = within.num_children
        within.num_children += 1
        if is_key:
            within.name = getattr(event, "value", None) or "?"
        return join(within.key, within.name if within.is_mapping else str(place))

    def _count(self, event: yaml.NodeEvent, key: str, place: str, within: _Open | None) -> None:
        size = 1
        if isinstance(event, yaml.AliasEvent):
            if any(each.anchor == event.anchor for each in self.open):
                raise ConfigError([Problem(key, place, f"the anchor &{_short(event.anchor or '')} contains itself")])
            size = self.sizes.get(event.anchor or "", 1)
        elif isinstance(event, yaml.ScalarEvent) and event.anchor:
            self.sizes[event.anchor] = 1
        if within is not None and not isinstance(event, yaml.CollectionStartEvent):
            within.num_nodes += size
        self.num_nodes += size
        if self.num_nodes > MAX_NODES:
            message = f"more than {MAX_NODES} values, aliases written out; a configuration has fewer"
            raise ConfigError([Problem(key, place, message)])
        if len(self.open) > MAX_DEPTH:
            raise ConfigError([Problem("", place, f"nested deeper than {MAX_DEPTH} levels")])


def _problems_of_scalar(event: yaml.ScalarEvent, key: str, place: str, *, is_key: bool) -> Iterator[Problem]:
    value, is_plain = event.value, event.implicit[0]
    if event.tag not in PLAIN_TAGS:
        yield _tagged(event.tag, key, place)
    elif is_key and is_plain and (kind := _kind(value)):
        yield Problem(key, place, f"the key {_short(value)!r} is {kind} in YAML, and a key is text; put it in quotes")
    elif is_plain and len(value) > MAX_DIGITS and re.fullmatch(r"[-+]?[0-9][0-9A-Fa-fx_:]*", value):
        yield Problem(key, place, f"a number of {len(value)} digits; at most {MAX_DIGITS} are read")
    elif "${" in value and (what := bad_interpolation(value)):
        yield Problem(key, place, what)


def bad_interpolation(value: str) -> str | None:
    r"""Why OmegaConf's grammar cannot read the text; None: it can. A plain dollar sign before a brace is `\${`."""
    if len(value) > MAX_INTERPOLATED:
        return f"a value with ${{...}} in it has at most {MAX_INTERPOLATED} characters, not {len(value)}"
    try:
        parse_interpolation(value)
    except (GrammarParseError, RecursionError):
        return rf"cannot read the interpolation in {_short(value)!r}; write \${{ for a plain ${{"
    return None


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _tagged(tag: object, key: str, place: str) -> Problem:
    shown = _short(str(tag).replace("tag:yaml.org,2002:", "!!"))
    return Problem(key, place, f"the tag {shown} is not read in a configuration; write the value plainly")


def _kind(value: str) -> str | None:
    """The type that YAML gives to a bare key; None: text."""
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers.get(value[:1], [])
    tag = str(next((tag for tag, pattern in resolvers if pattern.match(value)), "")).rpartition(":")[2]
    return {"null": "null", "bool": "true or false", "int": "a number", "float": "a number"}.get(tag)
