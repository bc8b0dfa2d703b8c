"""`art environments`: lists ready-made environments and their packages."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from art_cli.cli import Json, print_result
from art_cli.runtime.errors import printable

WIDTH = 160  # characters per line; --json prints full texts


def run(
    library: Annotated[
        str | None, Argument(metavar="LIBRARY", help="Only this library's environments.", show_default=False)
    ] = None,
    python: Annotated[Path | None, Option("--python", metavar="DIR", help="A Python, as rollout.python.")] = None,
    as_json: Json = False,
) -> None:
    """List ready-made environments.

    Prints names for rollout.environment with descriptions or problems, and commands for installing missing libraries.
    Games are started once, which takes some seconds.

    \b
    art environments
    art environments textarena
    art environments verifiers --python verifiers/.venv
    art init mine --environment reasoning_gym/countdown
    """
    from art_cli.rollouts.environments.listing import look, look_with

    listings = look(library) if python is None else look_with(python, library)
    lines = (printable(line, limit=WIDTH) for each in listings for line in _lines(each))
    print_result(listings, "\n".join(lines), as_json)


def _lines(look: dict[str, Any]) -> list[str]:
    if look["problem"]:
        return [f"{look['library']}: {look['about']}; {look['problem']}"]
    playable = sum(not each["problem"] for each in look["environments"])
    count = f"{playable} of {len(look['environments'])} can be played here" if look["environments"] else ""
    lines = [f"{look['library']}: {'; '.join(filter(None, [look['about'], count]))}"]
    for each in look["environments"]:
        about = f"not here: {each['problem']}" if each["problem"] else each["about"]
        lines.append(f"  {each['name']:42s} {about}")
    return lines
