"""The README and docs/tree.md are true: modules, commands and links exist."""

import re
from pathlib import Path

from typer.main import get_command

from art_cli.cli.app import app
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
TREE = (ROOT / "docs/tree.md").read_text()


def listed() -> set[str]:
    """The .py files in docs/tree.md, as paths."""
    tree = TREE.split("```")[1]
    found, folders = set(), list[str]()
    for line in tree.strip("\n").splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], name.rstrip("/")]
        if name.endswith(".py"):
            found.add("/".join(folders))
    return found


def test_the_tree_lists_every_module_once() -> None:
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "art_cli").rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert listed() == modules


def test_every_command_is_in_the_table_and_every_one_there_exists() -> None:
    table = README.split("## Commands")[1].split("##")[0]
    named = set(re.findall(r"^\| `art (\w+)", table, flags=re.MULTILINE))
    assert named == set(get_command(app).commands)  # type: ignore[attr-defined]


def _anchors(page: Path) -> list[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_file_that_a_page_links_to_is_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            if link.startswith("https://"):
                continue
            name, _, heading = link.partition("#")
            there = page.parent / name if name else page
            assert there.exists(), f"{page.name}: {link}"
            assert not heading or heading in _anchors(there), f"{page.name}: {link}"
