"""`art environments`: the environments that need no code, and what is to be installed for them."""

import io
import json
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_cli.commands import Json
from art_cli.errors import describe, printable

if TYPE_CHECKING:
    from art_cli.environments import Library, Listing

WIDTH = 160  # characters of a line; --json has all of them


def run(
    library: Annotated[
        str | None, typer.Argument(metavar="LIBRARY", help="Only this library's environments.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """List the environments that need no code.

    Each line is a name for rollout.environment and what it is, or why it cannot be played here. A library that is not
    installed is one line with the command that installs it. Games are tried out, which takes some seconds.

    \b
    art environments
    art environments textarena
    art init mine --environment reasoning_gym/countdown
    """
    from art_cli import environments

    chosen = environments.libraries() if library is None else {library: environments.library_named(library)}
    found = [_look(name, each) for name, each in chosen.items()]
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    for each in found:
        sys.stdout.writelines(f"{printable(line, limit=WIDTH)}\n" for line in _lines(each))


def _look(name: str, library: "Library") -> dict[str, Any]:
    """A library and what it has, as plain data."""
    from art_cli.environments import cure, not_installed

    look: dict[str, Any] = {"library": name, "about": library.about, "problem": not_installed(library)}
    listed: list[Listing] = []
    if not look["problem"]:
        try:
            with redirect_stdout(io.StringIO()):  # some games print while they are made
                listed = list(library.listed())
        except Exception as error:  # the boundary to the library
            look["problem"] = f"{describe(error)}; {cure(library)}"
    named = [{"name": f"{name}/{each.name}", "about": each.about, "problem": each.problem} for each in listed]
    return look | {"environments": named}


def _lines(look: dict[str, Any]) -> list[str]:
    """One line for the library, one for each environment."""
    if look["problem"]:
        return [f"{look['library']}: {look['about']}; {look['problem']}"]
    playable = sum(not each["problem"] for each in look["environments"])
    count = f"{playable} of {len(look['environments'])} can be played here" if look["environments"] else ""
    lines = [f"{look['library']}: {'; '.join(filter(None, [look['about'], count]))}"]
    for each in look["environments"]:
        about = f"not here: {each['problem']}" if each["problem"] else each["about"]
        lines.append(f"  {each['name']:42s} {about}")
    return lines
