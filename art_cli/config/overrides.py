"""The command line's `key=value` arguments in Hydra's grammar, sweeps, and a schema's sections, variants and keys."""

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from art_cli.config.key_locations import COMMAND_LINE, join
from art_cli.config.schema import RunConfig
from art_cli.config.sections.base_config import ImportedVariants
from art_cli.runtime.errors import ConfigError, Problem

Schema = type[BaseModel]

MAX_LENGTH = 4_000  # characters per argument; Hydra parses this many in half a second
MAX_ALL = 10_000  # characters in all arguments
MAX_NESTING = 40  # nested brackets in a value, dots in a key
MAX_RUNS = 1_000  # runs in a sweep
MAX_SUFFIX = 80  # characters in a sweep's suffix; a file name has 255, and the run's name needs the rest


def sections(field: FieldInfo) -> list[Schema]:
    """Returns the possible section classes of a field; [] for a plain value."""
    imported = [mark.section_of(name) for mark in _imported(field) for name in mark.names]
    return [*_schemas(field.annotation), *imported]


def _imported(field: FieldInfo) -> list[ImportedVariants]:
    return [mark for mark in field.metadata if isinstance(mark, ImportedVariants)]


def _schemas(annotation: Any) -> Iterator[Schema]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _schemas(argument)


def variants(schema: Schema, section: str) -> dict[str, Schema]:
    """Returns a root section's variants by name, default first; {} for a section without variants."""
    field = schema.model_fields.get(section)
    if field is None or get_origin(field.annotation) is list:
        return {}
    by_name = {name: variant for variant in sections(field) if (name := variant_name(variant))}
    default = getattr(field.default, "name", None) if by_name else None
    return dict(sorted(by_name.items(), key=lambda item: item[0] != default))


def variant_names(schema: Schema, section: str) -> list[str]:
    """Returns the sorted names of `variants`, without importing them."""
    field = schema.model_fields.get(section)
    if field is None or get_origin(field.annotation) is list:
        return []
    known = [name for variant in _schemas(field.annotation) if (name := variant_name(variant))]
    return sorted(known + [name for mark in _imported(field) for name in mark.names])


def variant_name(schema: Schema) -> str | None:
    """Returns the variant's name ("grpo" for GrpoConfig); None for a section without variants."""
    field = schema.model_fields.get("name")
    return get_args(field.annotation)[0] if field and get_origin(field.annotation) is Literal else None


def groups(schema: Schema) -> list[str]:
    """Returns the sections that are chosen by name: engine, judge, loss, learner, tracker."""
    return [section for section in schema.model_fields if variant_names(schema, section)]


def section_at(schema: Schema, key: str, data: Any) -> Schema | None:
    """Returns the section class at a dotted key, in the variant that `data` names."""
    parts = iter(key.split(".") if key else [])
    for part in parts:
        field = schema.model_fields.get(part)
        options = list(_schemas(field.annotation)) if field else []
        if field is None or not options:
            return None
        data = _item(data, part)
        if get_origin(field.annotation) in (list, dict):  # the next part is an index or a name
            data = _item(data, next(parts, ""))
        name = _item(data, "name")
        options += [mark.section_of(name) for mark in _imported(field) if name in mark.names]
        schema = next((each for each in options if variant_name(each) == name), options[0])
    return schema


def _item(data: Any, part: str) -> Any:
    if isinstance(data, list):
        return data[int(part)] if part.isdigit() and int(part) < len(data) else None
    return data.get(part) if isinstance(data, dict) else None


def all_keys(schema: Schema, prefix: str = "") -> list[str]:
    """Returns the dotted keys of all variants, without repetitions, in schema order."""
    keys: dict[str, None] = {}
    for name, field in schema.model_fields.items():
        keys[join(prefix, name)] = None
        for section in sections(field):
            keys.update(dict.fromkeys(all_keys(section, join(prefix, name))))
    return list(keys)


def parse(arguments: Sequence[str]) -> list[Override]:
    """Parses the arguments with Hydra. Raises ConfigError with all unreadable arguments."""
    parser, overrides, problems = OverridesParser.create(), [], []
    if sum(map(len, arguments)) > MAX_ALL:
        raise ConfigError([Problem("", COMMAND_LINE, f"more than {MAX_ALL} characters; write them into a file")])
    for argument in arguments:
        if message := _too_large(argument):
            problems.append(Problem(argument.partition("=")[0], COMMAND_LINE, message))
            continue
        try:
            override = parser.parse_override(argument)
            override.value()
        except Exception:  # the boundary to Hydra's grammar, whose numbers, casts and functions may raise anything
            problems.append(Problem(argument.partition("=")[0], COMMAND_LINE, _advice(argument)))
            continue
        if not override.key_or_group:
            problems.append(Problem("", COMMAND_LINE, _advice(argument)))
        elif override.is_hydra_override() or override.package is not None:
            message = "Hydra's own settings and packages have no effect here"
            problems.append(Problem(argument.partition("=")[0], COMMAND_LINE, message))
        overrides.append(override)
    if problems:
        raise ConfigError(problems)
    return overrides


def refuse_sweeps(overrides: Sequence[Override]) -> list[Problem]:
    """Returns a problem for each override with several values, because a single run takes one value."""
    message = "several values: add --multirun for a run of each, or write one list as [a,b]"
    return [Problem(each.key_or_group, COMMAND_LINE, message) for each in overrides if each.is_sweep_override()]


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Returns the arguments for each run of a sweep, in Hydra's order (last key fastest).

    Example: ["a=1,2", "b=x", "c=range(0,2)"] -> [["a=1", "b=x", "c=0"], ["a=1", "b=x", "c=1"], ["a=2", ...], ...].
    Raises ConfigError for unreadable arguments and for intervals, which cannot be enumerated.
    """
    overrides = parse(arguments)
    message = "an interval has no list of values; write range(start,stop,step) or choice(a,b)"
    intervals = [Problem(each.key_or_group, COMMAND_LINE, message) for each in overrides if each.is_interval_sweep()]
    if intervals:
        raise ConfigError(intervals)
    values = [_first_values(override) for override in overrides]
    if (num_runs := math.prod(map(len, values))) > MAX_RUNS:
        several = [each.key_or_group for each in overrides if each.is_sweep_override()]
        message = f"a sweep of {MAX_RUNS} runs at most" + (f", not {num_runs}" if num_runs < 10 * MAX_RUNS else "")
        raise ConfigError([Problem(several[-1], COMMAND_LINE, message)])
    if empty := [each for each, found in zip(overrides, values, strict=True) if not found]:
        raise ConfigError([Problem(each.key_or_group, COMMAND_LINE, "no value to run with") for each in empty])
    return [list(run) for run in itertools.product(*values)]


def suffixes(arguments: Sequence[str]) -> list[str]:
    """Returns unique name suffixes for the runs, in the order of `expand`.

    Example: ["train.learning_rate=1e-5,1e-4", "train.steps=3"] -> ["learning_rate-1e-05", "learning_rate-0.0001"].
    A single run has the suffix "".
    """
    swept = [index for index, override in enumerate(parse(arguments)) if override.is_sweep_override()]
    runs = [[run[index] for index in swept] for run in expand(arguments)]
    names = ["-".join(map(_as_name, run)) for run in runs]
    return [
        name if names.count(name) == 1 and len(name) <= MAX_SUFFIX else f"{name[:MAX_SUFFIX]}-{_digest(run)}"
        for name, run in zip(names, runs, strict=True)
    ]


def _first_values(override: Override) -> list[str]:
    """Returns at most MAX_RUNS + 1 values of the override. Raises ConfigError if they cannot be expanded."""
    try:
        return list(itertools.islice(_values(override), MAX_RUNS + 1))
    except Exception as error:  # the boundary to Hydra's sweeps: a step of 0, values that cannot be sorted
        raise ConfigError([Problem(override.key_or_group, COMMAND_LINE, f"cannot be swept: {error}")]) from error


def _values(override: Override) -> Iterator[str]:
    assert override.input_line is not None, override
    value = override.value()
    if not override.is_sweep_override():
        yield override.input_line
        return
    matches = value.filter(variant_names(RunConfig, override.key_or_group)) if isinstance(value, Glob) else None
    for each in matches if matches is not None else override.sweep_string_iterator():
        yield f"{override.get_key_element()}={each}"


def _as_name(argument: str) -> str:
    """Example: "train.learning_rate=1e-05" -> "learning_rate-1e-05"."""
    key, _, value = argument.partition("=")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{key.rpartition('.')[2]}-{value}".strip("+~'\"[]{}"))


def _too_large(argument: str) -> str | None:
    """Returns an error message if the argument is too large for Hydra's parser."""
    if len(argument) > MAX_LENGTH:
        return f"{len(argument)} characters; write what is longer than {MAX_LENGTH} into a file"
    deepest = depth = 0
    for letter in argument:
        depth += (letter in "[{(") - (letter in "]})")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING or argument.partition("=")[0].count(".") > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING} levels"
    return None


def _digest(run: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(run).encode()).hexdigest()[:8]


def _advice(argument: str) -> str:
    key, separator, value = argument.partition("=")
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@:$-]*", key) or not separator:
        return "expected key=value, for example train.steps=10"
    if len(value) > 100:
        return f"cannot read the value, which begins with {value[:60]!r}; quote it for the shell and for Hydra"
    closing = {"{": "}", "[": "]"}.get(value[:1], "")
    if closing and value.count(value[0]) > value.count(closing):
        return f"cannot read the value {value!r}, which lacks its closing {closing}"
    bare = re.sub(r"""["']([\w.-]+)["'] *: *""", r"\1: ", value)
    if value.startswith("{") and bare != value:
        return f"cannot read the value {value!r}; a mapping's keys need no quotes: {key}='{bare}'"
    return f"cannot read the value {value!r}; quote it for the shell and for Hydra: {key}='\"{value}\"'"
