"""Environments without user code: libraries of puzzles and games, all with the same small protocol.

    rollout: {environment: reasoning_gym/countdown}

Names have the form LIBRARY/NAME. Other packages can add a library with an entry point in the group
`art_cli.environments` that names a class like `Library`. Environments are opened and played in the rollout process, so
the command line never imports their packages, and `rollout.python` can choose another Python for them. All modules
except mcp_connection.py need only the standard library; a library's package is imported when its methods are called.

A scenario is a seed, {"id": "seed-17", "seed": 17}, unless the library defines others. Texts from games, generators,
and the policy are data and are never evaluated as code.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from art_cli.runtime.errors import UsageError, brief, describe, no_such_option

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy
    from art_cli.runs.outcome import Outcome

Json = dict[str, Any]

BUILT_IN = {
    "mcp": "art_cli.rollouts.environments.mcp:McpServers",
    "openenv": "art_cli.rollouts.environments.openenv_servers:OpenEnvServers",
    "reasoning_gym": "art_cli.rollouts.environments.reasoning_gym:ReasoningGym",
    "textarena": "art_cli.rollouts.environments.textarena:TextArena",
    "verifiers": "art_cli.rollouts.environments.verifiers_tasks:Verifiers",
}
PLAIN = (bool, int, float, str, list, type(None))
KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
}
GROUP = "art_cli.environments"  # entry point group for libraries from other packages


class EnvironmentFault(Exception):
    """The environment failed, so the attempt does not measure the policy."""


class Listing(NamedTuple):
    """An environment in a library. Example: Listing("countdown", "Generates Countdown Number Game tasks")."""

    name: str
    about: str
    problem: str = ""  # why it cannot be played here; "": it can


@dataclass(frozen=True)
class Settings:
    """An environment's configuration as plain data."""

    name: str  # LIBRARY/NAME, such as "reasoning_gym/countdown"
    args: Json = field(default_factory=dict)
    system: str | None = None  # the system message; None means the library's, "" none
    directory: str = "."  # the configuration's, in which programs are started
    num_seeds: int = 0  # upper bound of the scenarios' seeds; 0 if scenarios come from a file


class Environment(Protocol):
    """An environment with its settings."""

    async def play(self, policy: "Policy", scenario: Json) -> "Outcome":
        """Plays one attempt with `policy.client`. Any exception fails the attempt."""


class Library(Protocol):
    """A package of environments, or another source."""

    package: str  # module to import; "" if it needs none
    extra: str  # the extra that installs it: pip install 'art-cli[EXTRA]'; "": the package itself is installed
    about: str  # one line
    takes_one_turn: bool  # whether an attempt is a single model call
    makes_scenarios: bool  # whether its scenarios are seeds; otherwise `rollout.scenarios` names them

    def listed(self) -> Iterable[Listing]:
        """Returns all environments, including environments that cannot be played here."""

    def defaults(self, name: str) -> Json:
        """Returns the arguments for `rollout.environment.args`; None accepts any value. Raises UsageError."""

    def open(self, name: str, settings: Settings) -> Environment:
        """Opens and tests the environment. Raises UsageError for an unknown name, wrong arguments, or a failed test."""


def libraries() -> dict[str, EntryPoint]:
    built_in = [EntryPoint(name, place, GROUP) for name, place in BUILT_IN.items()]
    return {entry.name: entry for entry in (*entry_points(group=GROUP), *built_in)}


def find_library(name: str) -> tuple[Library, str]:
    """Splits "LIBRARY/NAME" into the library and NAME. Raises UsageError for another form or an unknown library."""
    library, _, rest = name.partition("/")
    found = library_named(library)
    if not rest:
        raise UsageError(f"{name!r}: expected LIBRARY/NAME; `art environments {library}` lists them")
    return found, rest


def library_named(name: str) -> Library:
    """Imports and returns the library. Raises UsageError for an unknown library."""
    known = libraries()
    if name not in known:
        raise UsageError(no_such_option("library of environments", name, sorted(known)))
    try:
        made: Library = known[name].load()()
    except Exception as error:  # the boundary to another package
        raise UsageError(f"library {name!r} of environments ({known[name].value}): {describe(error)}") from error
    return made


def not_installed(library: Library) -> str:
    """Returns why this Python cannot use the library, checked without importing it; empty if usable."""
    if not library.package or find_spec(library.package) is not None:
        return ""
    return f"{library.package} is not installed; {cure(library)}"


def cure(library: Library) -> str:
    return f"pip install 'art-cli[{library.extra}]'" if library.extra else f"pip install {library.package}"


def open_environment(settings: Settings) -> Environment:
    """Returns the environment that the settings name. Raises UsageError."""
    library, name = find_library(settings.name)
    if problem := not_installed(library):
        raise UsageError(f"rollout.environment {settings.name}: {problem}")
    try:
        return library.open(name, settings)
    except UsageError:
        raise
    except Exception as error:  # the boundary to the library, which may assert on arguments
        raise refused(settings, error) from error


def seeds(first: int, count: int) -> Iterator[Json]:
    """Returns an environment's scenarios: `count` seeds starting with `first`."""
    return ({"id": f"seed-{seed}", "seed": seed} for seed in range(first, first + count))


def seed_of(scenario: Json) -> int:
    """Returns the scenario's seed. Raises EnvironmentFault if the seed is missing."""
    seed = scenario.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFault('the scenario has no "seed", a whole number from 0 on')
    return seed


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Returns the error for an unknown name. Example: unknown("rollout.environment.args", "min_number", [...])."""
    there_are = sorted(known)
    near = get_close_matches(name, there_are, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(there_are)}" if there_are else ""
    return UsageError(f"{what}: no {name!r}{hint}")


def refused(settings: Settings, error: BaseException) -> UsageError:
    """Returns the error for arguments that the environment rejects."""
    return UsageError(f"rollout.environment {settings.name}: cannot be played with these args: {describe(error)}")


def check_args(settings: Settings, defaults: Json) -> None:
    """Raises UsageError for an unknown argument, or an argument whose type differs from its default."""
    for name, value in settings.args.items():
        if name not in defaults:
            raise unknown(f"rollout.environment.args of {settings.name}", name, defaults)
        default = defaults[name]
        is_whole = type(default) is float and type(value) is int  # a whole number for a number
        if default is not None and type(value) is not type(default) and not is_whole:
            kind, where = KINDS.get(type(default), "something else"), f"rollout.environment.args.{name}"
            raise UsageError(f"{where}: {settings.name} takes {kind} there, not {brief(value)}")


def plain_defaults(values: Json) -> Json:
    """Returns the defaults that a configuration can set. Tuples are lists there."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if isinstance(value, PLAIN)}


def with_tuples(args: Json, defaults: Json) -> Json:
    """Returns the arguments with tuples where the library's defaults are tuples."""
    return {name: tuple(value) if isinstance(defaults.get(name), tuple) else value for name, value in args.items()}


def finite(number: float, what: str) -> float:
    """Raises ValueError for infinity and NaN."""
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}")
    return number
