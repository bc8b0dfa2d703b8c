"""The docstring of runtime/errors.py is the tree of the exceptions, with exit codes and the rooms that raise them."""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from typing import NamedTuple

from art_cli.runtime import errors
from art_cli.runtime.errors import ArtError
from tests.support.paths import ROOT

LINE = re.compile(r"^( *)([A-Z]\w+) +(\d+)    ([^:\n]*)", re.MULTILINE)
EVERYWHERE = 8  # number of rooms from which the docstring says "everywhere"


class _Listed(NamedTuple):
    base: str
    exit_code: int
    rooms: frozenset[str]


def _listed() -> dict[str, _Listed]:
    """Returns the exceptions of the docstring, by name."""
    listed, path = {}, list[str]()
    for indent, name, code, rooms in LINE.findall(errors.__doc__ or ""):
        depth = len(indent) // 2
        path = [*path[:depth], name]
        listed[name] = _Listed(path[depth - 1] if depth else "", int(code), frozenset(rooms.split(", ")))
    return listed


def _kinds() -> list[type[ArtError]]:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ArtError)]
    assert len(kinds) > 20
    return kinds


def _rooms() -> dict[str, set[str]]:
    """Returns the rooms that make each exception."""
    rooms, names = defaultdict[str, set[str]](set), {kind.__name__ for kind in _kinds()}
    for path in (ROOT / "art_cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                rooms[node.func.id].add(path.relative_to(ROOT / "art_cli").parts[0])
    return rooms


def test_the_docstring_has_each_exception_with_its_base_and_its_exit_code() -> None:
    expected = {
        kind.__name__: ("" if kind is ArtError else kind.__mro__[1].__name__, kind.exit_code) for kind in _kinds()
    }
    assert {name: (each.base, each.exit_code) for name, each in _listed().items()} == expected


def test_the_docstring_has_the_rooms_that_raise_each_exception() -> None:
    rooms = _rooms()
    everywhere = {name for name, its in rooms.items() if len(its) >= EVERYWHERE}
    assert everywhere == {name for name, each in _listed().items() if each.rooms == {"everywhere"}}
    others = {name: each.rooms for name, each in _listed().items() if name not in everywhere and name != "ArtError"}
    assert others == {name: rooms[name] for name in others}


def test_a_line_that_only_announces_the_next_one_is_returned_with_it() -> None:
    told = "Error(s) in loading state_dict for Model:\n\tsize mismatch for a.weight: 4 and 16\n\tsize mismatch for b"
    assert errors.one_line(ValueError(told)).endswith("for Model: size mismatch for a.weight: 4 and 16")
    assert errors.one_line(ValueError("first\nsecond")) == "first"
    assert errors.one_line(ValueError(":")) == ":" and errors.one_line(ValueError()) == "ValueError"


def test_text_is_escaped_when_no_file_can_be_opened() -> None:
    program = (
        "import resource\n"
        "from art_cli.runtime.errors import printable\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        r"print(printable('a\x1b[31m\n\udcff'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a\\x1b[31m\\n\\udcff\n", "")
