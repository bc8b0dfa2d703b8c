"""Reads the command line's `key=value` arguments with Hydra's own grammar, and spreads sweeps out.

It does not know which keys exist; composing and pydantic find that out.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from art_cli.config.packaged import options, packaged
from art_cli.config.places import COMMAND_LINE
from art_cli.errors import ConfigError, Problem

MAX_SUFFIX = 80  # characters; the rest of a file name's 255 is left to the run's own name and the files in it


def parse(arguments: Sequence[str]) -> list[Override]:
    """The arguments as Hydra reads them. Raises ConfigError with every one that it cannot read."""
    parser, overrides, problems = OverridesParser.create(), [], []
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException:
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
    """A problem for each override with several values, which a single run cannot have."""
    message = "several values: add --multirun for a run of each, or write one list as [a,b]"
    return [Problem(each.key_or_group, COMMAND_LINE, message) for each in overrides if each.is_sweep_override()]


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """The arguments of each run of a sweep, in Hydra's order: the last key changes fastest.

    Example: ["a=1,2", "b=x", "c=range(0,2)"] -> [["a=1", "b=x", "c=0"], ["a=1", "b=x", "c=1"], ["a=2", ...], ...].
    Raises ConfigError: unreadable, or an interval, which has no list of values.
    """
    overrides = parse(arguments)
    message = "an interval has no list of values; write range(start,stop,step) or choice(a,b)"
    intervals = [Problem(each.key_or_group, COMMAND_LINE, message) for each in overrides if each.is_interval_sweep()]
    if intervals:
        raise ConfigError(intervals)
    return [list(run) for run in itertools.product(*map(_values, overrides))]


def suffixes(arguments: Sequence[str]) -> list[str]:
    """What tells the runs of a sweep apart in their names, one for each of `expand`'s; no two are the same.

    Example: ["train.learning_rate=1e-5,1e-4", "train.steps=3"] -> ["learning_rate-1e-05", "learning_rate-0.0001"].
    A single run, which sweeps over nothing, has the suffix "".
    """
    swept = [place for place, override in enumerate(parse(arguments)) if override.is_sweep_override()]
    runs = [[run[place] for place in swept] for run in expand(arguments)]
    names = ["-".join(map(_as_name, run)) for run in runs]
    return [
        name if names.count(name) == 1 and len(name) <= MAX_SUFFIX else f"{name[:MAX_SUFFIX]}-{_digest(run)}"
        for name, run in zip(names, runs, strict=True)
    ]


def _values(override: Override) -> Iterator[str]:
    """One argument for each value."""
    assert override.input_line is not None, override
    value = override.value()
    if not override.is_sweep_override():
        yield override.input_line
        return
    found = value.filter(options(override.key_or_group, [packaged("configs")])) if isinstance(value, Glob) else None
    for each in found if found is not None else override.sweep_string_iterator():
        yield f"{override.get_key_element()}={each}"


def _as_name(argument: str) -> str:
    """Example: "train.learning_rate=1e-05" -> "learning_rate-1e-05"."""
    key, _, value = argument.partition("=")
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"{key.rpartition('.')[2]}-{value}".strip("+~'\"[]{}"))


def _digest(run: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(run).encode()).hexdigest()[:8]


def _advice(argument: str) -> str:
    key, separator, value = argument.partition("=")
    if not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w./@:$-]*", key) or not separator:
        return "expected key=value, for example train.steps=10"
    return f"cannot read the value {value!r}; quote it for the shell and for Hydra: {key}='\"{value}\"'"
