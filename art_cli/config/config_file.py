"""Reads one configuration file as a mapping, within limits of size and depth; mistakes have file and line."""

import codecs
import logging
import re
import stat
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse as parse_interpolation

from art_cli.config.key_locations import join, show
from art_cli.runtime.errors import ConfigError, Problem

log = logging.getLogger(__name__)

MAX_BYTES = 256 * 1024  # the largest recipe has 2 KiB
MAX_DEPTH = 40  # OmegaConf uses about ten Python frames per level
MAX_VALUES = 20_000  # keys and values with every alias written out; a few hundred bytes of aliases can mean billions
MAX_DIGITS = 300  # of a number; larger numbers exceed the float range, and Python reads up to 4300 digits

# Surprising numbers in YAML 1.1: 010 is octal, 1:30 and 12:30:45 are in base 60. As a name, so are 1_000, 0x1F and 1e3.
_OTHER_BASE = re.compile(r"[-+]?(0[0-7_]*[0-7][0-7_]*|[1-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
_OTHER_FORM = re.compile(r"[-+]?([0-9]+_[0-9_]*(\.[0-9_]*)?|0x[0-9a-fA-F_]+|0b[01_]+)")
_EXPONENT = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")
WORDS = ("yes", "no", "on", "off")  # YAML 1.1 reads these as true and false
KINDS = {"null": "null", "bool": "true or false", "int": "a number", "float": "a number"}  # types of unquoted keys
MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def read_text(path: Path) -> str:
    """Reads UTF-8, or the encoding in the byte order mark. Raises ConfigError."""
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
    """Returns the file's mapping with unresolved interpolations. Raises ConfigError."""
    text, shown = read_text(path), show(path)
    try:
        _check_shape(text, shown)
        if problems := list(_problems_below(yaml.compose(text, Loader=yaml.SafeLoader), "", shown)):
            raise ConfigError(problems)
        body = OmegaConf.create(text)
    except yaml.YAMLError as error:
        raise ConfigError([bad_yaml(error, path)]) from error
    except RecursionError as error:
        raise _refused(path, "an anchor in it contains itself, or its aliases nest too deeply") from error
    except (OmegaConfBaseException, ValueError, AssertionError) as error:  # OmegaConf asserts a mapping
        raise _refused(path, " ".join(str(error).split()) or "expected 'key: value' lines") from error
    assert isinstance(body, DictConfig), body
    return body


def bad_yaml(error: yaml.YAMLError, path: Path) -> Problem:
    """Converts the parser's error to a problem with file and line."""
    mark = getattr(error, "problem_mark", None)
    file = Path(mark.name) if mark is not None and Path(mark.name).is_file() else path
    place = f"{show(file)}:{mark.line + 1}" if mark is not None else f"{show(file)}:1"
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    if what == r"found character '\t' that cannot start any token":
        what = "a line begins with a tab, or a value does; use spaces"
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
        return f"no such file: the directory {show(path.parent)} does not exist"
    stems = {file.stem: file for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")}
    near = get_close_matches(path.stem, list(stems), n=1)
    return "no such file" + "".join(f"; did you mean {show(stems[stem])!r}?" for stem in near)


def _a_directory(path: Path) -> str:
    files = sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml"))
    return "a directory; name the file in it" + (f", for example {show(files[0])}" if files else "")


def _check_shape(text: str, shown: str) -> None:
    """Raises ConfigError for too deep or large YAML (aliases written out) or no mapping, and yaml.YAMLError."""
    num_values = 0
    begun: list[tuple[str | None, int]] = []  # anchor and number of values before it, of each open list or mapping
    sizes: dict[str | None, int] = {}  # anchor -> number of values
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        place = f"{shown}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if not begun and isinstance(event, yaml.NodeEvent) and not isinstance(event, yaml.MappingStartEvent):
            kind = "a list" if isinstance(event, yaml.SequenceStartEvent) else "a single value"
            if getattr(event, "value", None) != "":  # comments alone are an empty scalar
                raise ConfigError([Problem("", place, f"expected 'key: value' lines, not {kind}")])
        if isinstance(event, yaml.CollectionStartEvent):
            begun.append((event.anchor, num_values))
        if isinstance(event, yaml.NodeEvent):
            num_values += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            sizes[anchor] = num_values - before
        if len(begun) > MAX_DEPTH:
            raise ConfigError([Problem("", place, f"nested deeper than {MAX_DEPTH} levels")])
        if num_values > MAX_VALUES:
            cure = "write fewer, or use fewer aliases (*NAME)"
            raise ConfigError([Problem("", place, f"more than {MAX_VALUES} keys and values up to here; {cure}")])


def _problems_below(node: yaml.Node | None, key: str, shown: str) -> Iterator[Problem]:
    """Yields problems for keys that are not text, surprising numbers, and unreadable interpolations."""
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
    elif not isinstance(node, yaml.ScalarNode):
        return
    elif node.style is None and len(node.value) > MAX_DIGITS and not node.value.strip("+-.0123456789_:"):
        message = f"a number of {len(node.value)} digits; at most {MAX_DIGITS} are read"
        yield Problem(key, f"{shown}:{node.start_mark.line + 1}", message)
    elif node.style is None and _is_surprising(node.value, key):
        read = float(node.value) if _EXPONENT.fullmatch(node.value) else yaml.safe_load(node.value)
        message = f"YAML reads {_short(node.value)} as the number {read}; write {read}, or put text in quotes"
        yield Problem(key, f"{shown}:{node.start_mark.line + 1}", message)
    elif node.style is None and node.value.lower() in WORDS:
        is_true = yaml.safe_load(node.value)
        read = str(is_true).lower()
        log.warning(
            "%s:%d: %s: YAML reads %s as %s; write %s, or put text in quotes",
            *(shown, node.start_mark.line + 1, key, node.value, read, read),
        )
    elif "${" in node.value:
        try:
            parse_interpolation(node.value)
        except GrammarParseError:
            message = rf"cannot read the interpolation in {_short(node.value)!r}; write \${{ for a plain ${{"
            yield Problem(key, f"{shown}:{node.start_mark.line + 1}", message)


def _is_surprising(text: str, key: str) -> bool:
    """Returns True for a number that YAML does not read as written. In a name, 1_000 and 1e3 are such numbers too."""
    in_names = (_OTHER_FORM, _EXPONENT) if key.rpartition(".")[2] == "name" else ()
    return any(form.fullmatch(text) for form in (_OTHER_BASE, *in_names))


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
