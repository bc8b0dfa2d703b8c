"""Environments that need no code of the user: libraries of puzzles and games, each behind the same small protocol.

    rollout: {environment: reasoning_gym/countdown}

reasoning_gym.py    reasoning-gym's generators of puzzles, each with its scorer, and the answers that one may evaluate
textarena.py        textarena's games; one policy plays all seats
openenv_servers.py  any OpenEnv server, by its address
verifiers_tasks.py  tasksets of verifiers, played by its harnesses, or by ours where a taskset has none
verifiers_chat.py   ours: a conversation with the task's tools
mcp.py              any MCP server; its tools become the agent's
mcp_connection.py   how an MCP server is reached, and the limits on what it sends
servers.py          the parts that the two behind a server share

A name is LIBRARY/NAME. A package of the user adds a library by an entry point in the group `art_cli.environments`,
which names a class like `Library`. An environment is opened and played in the rollout process, so that neither the
import of its package nor its dependencies reach the command line, and `rollout.python` may name a Python for them.
Standard library only, here and in each file but mcp_connection.py; a library's package is imported when its methods are
called.

A scenario is a seed, {"id": "seed-17", "seed": 17}, unless the library makes others. Texts of a game, of a generator
and of the policy are data, and nothing of them is evaluated as code.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from art_cli.runtime.errors import UsageError, describe, no_such_option, printable

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
GROUP = "art_cli.environments"  # the group of entry points with which other packages add libraries


class EnvironmentFault(Exception):
    """The environment itself failed, so that the attempt is no measure of the policy."""


class Listing(NamedTuple):
    """One environment of a library. Example: Listing("countdown", "Generates Countdown Number Game tasks")."""

    name: str
    about: str
    problem: str = ""  # why it cannot be played here; "": it can


@dataclass(frozen=True)
class Settings:
    """The configuration of an environment, as plain data."""

    name: str  # LIBRARY/NAME, such as "reasoning_gym/countdown"
    args: Json = field(default_factory=dict)
    system: str | None = None  # the system message; None means the library's, "" none
    directory: str = "."  # the configuration's, in which programs are started
    num_seeds: int = 0  # the scenarios' seeds are below this; 0: the scenarios come from a file


class Environment(Protocol):
    """One environment, opened with its settings."""

    async def play(self, policy: "Policy", scenario: Json) -> "Outcome":
        """Plays one attempt, by `policy.client`. What it raises fails the attempt."""


class Library(Protocol):
    """A package of environments, or another source of them."""

    package: str  # the module that is imported, "" where none is needed
    extra: str  # the extra that installs it: pip install 'art-cli[EXTRA]'; "": the package itself is installed
    about: str  # one line
    takes_one_turn: bool  # whether an attempt is one model call
    makes_scenarios: bool  # whether its scenarios are seeds; otherwise `rollout.scenarios` names them

    def listed(self) -> Iterable[Listing]:
        """Returns all its environments, with those that cannot be played here."""

    def defaults(self, name: str) -> Json:
        """Returns the arguments that `rollout.environment.args` may set. Raises UsageError: no such name.

        A default of None takes any value.
        """

    def open(self, name: str, settings: Settings) -> Environment:
        """Opens the environment, tried once. Raises UsageError: no such name, wrong arguments, or not playable."""


def library_names() -> list[str]:
    """Returns the names of all libraries, whether their packages are installed or not."""
    return list(_entries())


def _entries() -> dict[str, EntryPoint]:
    """Returns the entry point of each library by name; none of them is imported."""
    built_in = [EntryPoint(name, place, GROUP) for name, place in BUILT_IN.items()]
    return {entry.name: entry for entry in (*entry_points(group=GROUP), *built_in)}


def _load(entry: EntryPoint) -> Library:
    """Raises UsageError if the package that brings it is broken."""
    try:
        made: Library = entry.load()()
    except Exception as error:  # the boundary to another package
        raise UsageError(f"library {entry.name!r} of environments ({entry.value}): {describe(error)}") from error
    return made


def find_library(name: str) -> tuple[Library, str]:
    """Returns the library of "LIBRARY/NAME", and NAME. Raises UsageError: not of that form, no such library."""
    library, _, rest = name.partition("/")
    found = library_named(library)
    if not rest:
        raise UsageError(f"{name!r}: expected LIBRARY/NAME; `art environments {library}` lists them")
    return found, rest


def library_named(name: str) -> Library:
    """Returns the library, the only one that is imported. Raises UsageError: there is none."""
    known = _entries()
    if name not in known:
        raise UsageError(no_such_option("library of environments", name, sorted(known)))
    return _load(known[name])


def not_installed(library: Library) -> str:
    """Why the library cannot be used by this Python; "": it can, as far as one sees without importing it."""
    if not library.package or find_spec(library.package) is not None:
        return ""
    return f"{library.package} is not installed; {cure(library)}"


def cure(library: Library) -> str:
    """Returns the command that installs the library."""
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
    except Exception as error:  # the boundary to the library, which asserts what it expects of arguments
        raise refused(settings, error) from error


def seeds(first: int, count: int) -> Iterator[Json]:
    """Returns the scenarios of an environment: `count` seeds from `first` on."""
    return ({"id": f"seed-{seed}", "seed": seed} for seed in range(first, first + count))


def seed_of(scenario: Json) -> int:
    """Returns the scenario's seed. Raises EnvironmentFault: it has none."""
    seed = scenario.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise EnvironmentFault('the scenario has no "seed", a whole number from 0 on')
    return seed


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """Returns the refusal of a name. Example: unknown("rollout.environment.args", "min_number", ["min_numbers"])."""
    there_are = sorted(known)
    near = get_close_matches(name, there_are, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(there_are)}" if there_are else ""
    return UsageError(f"{what}: no {name!r}{hint}")


def refused(settings: Settings, error: BaseException) -> UsageError:
    """Returns the error of an environment that cannot be made with these arguments."""
    return UsageError(f"rollout.environment {settings.name}: cannot be played with these args: {describe(error)}")


def check_args(settings: Settings, defaults: Json) -> None:
    """Raises UsageError: an argument that the environment does not take, or of another kind than its default."""
    for name, value in settings.args.items():
        if name not in defaults:
            raise unknown(f"rollout.environment.args of {settings.name}", name, defaults)
        default = defaults[name]
        if default is not None and not _is_of_kind(value, default):
            kind, where = KINDS.get(type(default), "something else"), f"rollout.environment.args.{name}"
            raise UsageError(f"{where}: {settings.name} takes {kind} there, not {printable(repr(value), limit=80)}")


KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
}


def _is_of_kind(value: Any, default: Any) -> bool:
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is type(default)
