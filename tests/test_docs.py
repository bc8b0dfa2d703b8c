"""The skill for coding agents and the pages for newcomers: each command in them parses, each YAML composes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from art_cli.cli import app as cli
from art_cli.config.compose import load_config
from tests.support.paths import ROOT

SKILL = ROOT / "art_cli/.agents/skills/art/SKILL.md"
JUDGES = ROOT / "docs/judges.md"
CHANGES = re.compile(
    r"\.mallopt\(|gc\.freeze\(|setswitchinterval\(|field_size_limit\(|sys\.path\.(insert|append)\(|signal\.signal\("
    r"|add_signal_handler\(|os\.environ(\[[^\]]+\] = |\.setdefault\(|\.update\(|\.__class__ = )|os\.dup2\("
)
# Their changes end with a process of ours that runs nothing of the user's.
OWN_PROCESS = {"supervisor.py", "listing.py", "worker.py", "ray_driver.py"}


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def commands() -> list[list[str]]:
    """The words of each command in the skill, in its blocks and in its sentences."""
    text = SKILL.read_text()
    lines = [line for block in fenced(SKILL, "sh") for line in block.splitlines()]
    lines += re.findall(r"`(art [a-z]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return [shlex.split(line, comments=True) for line in lines if line]


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_command_of_the_skill_parses_and_its_options_are_in_its_help(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program, name, *arguments = words
    assert program == "art"
    assert cli.run([name, "--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(word in help_text for word in arguments if word.startswith("-"))
    command: Any = get_command(cli.app).commands[name]  # type: ignore[attr-defined]
    if arguments:
        given = command.make_context(name, arguments).params  # refuses an unknown option and a missing argument
        load_config(write_config(tmp_path, [full_config()]), given.get("overrides") or [])


def full_config() -> str:
    return fenced(SKILL, "yaml")[0]


def write_config(directory: Path, parts: list[str]) -> Path:
    """A config.yaml in which each part's sections replace those of the parts before it."""
    sections: dict[str, Any] = {}
    for part in parts:
        sections |= yaml.safe_load(part)
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("part", [*fenced(SKILL, "yaml"), *fenced(JUDGES, "yaml")])
def test_every_yaml_of_the_skill_and_of_the_judges_page_is_a_configuration(part: str, tmp_path: Path) -> None:
    assert load_config(write_config(tmp_path, [full_config(), part])).config.name == "mine"


def test_every_key_that_the_skill_names_is_in_the_reference() -> None:
    """The reference is made from the schema."""
    named = set(re.findall(r"`((?:rollout|train|model|loss|sft)\.[a-z_.]+)`", SKILL.read_text()))
    assert len(named) > 8
    reference = (ROOT / "docs/config.md").read_text()
    assert not [key for key in named if f"`{key}`" not in reference]


def test_the_skill_is_one_screen_with_a_name_and_a_description() -> None:
    _, front, body = SKILL.read_text().split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["name"] == SKILL.parent.name == "art"
    assert 0 < len(facts["description"]) <= 1024
    assert len(body.splitlines()) <= 80


def test_each_change_for_the_whole_process_is_on_the_page_that_lists_them() -> None:
    page = (ROOT / "docs/how-it-works.md").read_text()
    package = ROOT / "art_cli"
    changing = {str(path.relative_to(package)) for path in package.rglob("*.py") if CHANGES.search(path.read_text())}
    shared = {name for name in changing if Path(name).name not in OWN_PROCESS}
    assert len(shared) > 10
    assert not [name for name in shared if f"](../art_cli/{name})" not in page]
