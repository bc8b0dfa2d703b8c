"""`art init`: copies a packaged recipe to a new directory and says what to do there."""

import shlex
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from art_cli.errors import UsageError

NOT_COPIED = shutil.ignore_patterns("__pycache__", "runs", "*.pyc")  # files that the use of a recipe leaves in it


def run(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty directory.", show_default=False)],
    recipe: Annotated[str, typer.Option("--recipe", metavar="NAME", help="Which one to copy.")] = "tictactoe",
) -> None:
    """Copy a recipe to a new directory.

    The recipe holds config.yaml, the rollout and the files that the rollout needs.

    \b
    art init mine
    art init mine --recipe tictactoe
    """
    from art_cli.config.packaged import packaged

    copy_recipe(packaged("recipes"), recipe, directory)
    sys.stdout.write(
        f"{directory}: the recipe {recipe!r}; next:\n"
        f"  cd {shlex.quote(str(directory))}\n"
        "  art check config.yaml     # everything a run needs, tried once\n"
        "  art train config.yaml     # run again, it resumes\n"
    )


def copy_recipe(recipes: Path, name: str, directory: Path) -> None:
    """Copies the recipe's files to `directory`, which is new or empty. Raises UsageError."""
    there_are = sorted(config.parent.name for config in recipes.glob("*/config.yaml"))
    if name not in there_are:
        near = get_close_matches(name, there_are, n=1)
        hint = f"did you mean {near[0]!r}? There are: " if near else "there are: "
        raise UsageError(f"no recipe {name!r}; {hint}{', '.join(there_are)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: not empty; name a new directory, nothing is written over")
    shutil.copytree(recipes / name, directory, ignore=NOT_COPIED, dirs_exist_ok=True)
