"""Lists environment libraries and their environments as plain data, also from another Python.

    [{"library": "mcp", "about": ..., "problem": "", "environments": [{"name": ..., "about": ..., "problem": ""}]}]

Needs only the standard library, because the other Python may lack our packages.
"""

import io
import json
import subprocess
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from art_cli.rollouts.environments import Json, Library, Listing, cure, libraries, library_named, not_installed
from art_cli.runtime.errors import UsageError, describe
from art_cli.runtime.processes.child import child_environment

TIMEOUT_S = 300.0  # longest wait for another Python, which imports the listed packages
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import bootstrap
sys.path.pop(0)
bootstrap.load_package()
from art_cli.rollouts.environments.listing import look
print("\\n" + json.dumps(look(json.loads(sys.argv[2]))))
"""


def look(name: str | None) -> list[Json]:
    """Returns all libraries, or the named library. Raises UsageError for an unknown name."""
    with redirect_stdout(io.StringIO()):  # some games print during construction
        return [_look(name, library_named(name))] if name is not None else [*map(_look_safely, libraries())]


def _look_safely(name: str) -> Json:
    try:
        return _look(name, library_named(name))
    except UsageError as error:  # a broken package does not affect other libraries
        return {"library": name, "about": "", "problem": str(error), "environments": []}


def _look(name: str, library: Library) -> Json:
    found: Json = {"library": name, "about": library.about, "problem": not_installed(library)}
    listed: list[Listing] = []
    if not found["problem"]:
        try:
            listed = list(library.listed())
        except Exception as error:  # the boundary to the library
            found["problem"] = f"{describe(error)}; {cure(library)}"
    named = [{"name": f"{name}/{each.name}", "about": each.about, "problem": each.problem} for each in listed]
    return found | {"environments": named}


def look_with(python: Path, name: str | None) -> list[Json]:
    """Runs `look` in another Python (a program or the directory of an environment). Raises UsageError."""
    program = python / "bin" / "python" if python.is_dir() else python
    command = [str(program.absolute()), "-c", PROGRAM, str(Path(__file__).parent.parent), json.dumps(name)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=child_environment())
        lines: Sequence[str] = done.stdout.splitlines()
        found: list[Json] = json.loads(lines[-1] if lines else "")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        said = done.stderr.strip().splitlines()[-1:] if isinstance(error, ValueError) else [describe(error)]
        raise UsageError(f"--python {python}: it cannot list its environments: {' '.join(said)}") from error
    return found
