"""No room of the package has a circle among its files and folders: what a file imports never imports the file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PACKAGE = ROOT / "art_cli"
ROOMS = sorted(path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.py") if "app" not in path.parts)


def imported(path: Path) -> Iterator[Path]:
    """The files of the package that a file imports, inside functions and for annotations, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                yield from files_of(f"{node.module}.{name.name}") or files_of(node.module)
        elif isinstance(node, ast.Import):
            for name in node.names:
                yield from files_of(name.name)


def files_of(module: str) -> list[Path]:
    place = ROOT / module.replace(".", "/")
    return [path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()]


def boxes_in_circles(room: Path) -> set[str]:
    """The files and folders of a room from which imports lead back to themselves."""
    above: dict[str, set[str]] = {}
    for path in room.rglob("*.py"):
        box = path.relative_to(room).parts[0]
        inside = {other.relative_to(room).parts[0] for other in imported(path) if other.is_relative_to(room)}
        above.setdefault(box, set()).update(inside - {box})
    reached = {box: set(others) for box, others in above.items()}
    for _ in above:
        for others in reached.values():
            others.update(*(reached.get(other, set()) for other in set(others)))
    return {box for box, others in reached.items() if box in others}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_room_has_no_circle_among_its_files_and_folders(room: Path) -> None:
    assert not boxes_in_circles(ROOT / room)
