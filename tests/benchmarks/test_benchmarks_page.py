"""The page of benchmarks/ lists every command, and no other; and every command that a page names can be run."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "benchmarks" / "README.md"
COMMAND = re.compile(r"\bbenchmarks(?:\.[a-z_0-9]+)+")
NAMED_IN = ("Makefile", ".ci/run", "*.md", "docs/*.md", "recipes/*/*", "configs/**/*.yaml", "benchmarks/**/*.md")


def runnable() -> dict[str, Path]:
    """Returns the file of each module of benchmarks/ that does something when it is run."""
    found = {}
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        if any(ast.unparse(node.test) == "__name__ == '__main__'" for node in _ifs(path)):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")] = path
    return found


def _ifs(path: Path) -> list[ast.If]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]


def listed() -> list[str]:
    """Returns the commands of the page's tables."""
    return re.findall(r"^\| `python -m ([\w.]+)", PAGE.read_text(), flags=re.M)


def named() -> Iterator[tuple[str, str]]:
    """Yields (file, module) of each module of benchmarks/ that a page, a configuration or the Makefile names."""
    for pattern in NAMED_IN:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix in ("", ".md", ".yaml", ".py"):
                for module in COMMAND.findall(path.read_text()):
                    yield str(path.relative_to(ROOT)), module


def test_every_command_has_one_row_and_every_row_is_a_command() -> None:
    assert sorted(listed()) == sorted(runnable())


def test_every_module_that_a_page_names_exists() -> None:
    missing = {(file, module) for file, module in named() if find_spec(module) is None}
    assert not missing
    assert len({module for _, module in named()}) > 50


@pytest.mark.parametrize("name", sorted(runnable()))
def test_a_command_says_what_it_measures(name: str) -> None:
    """Its first line goes into RESULTS.md, and `--help` prints the rest."""
    says = ast.get_docstring(ast.parse(runnable()[name].read_text())) or ""
    assert says.partition("\n")[0].strip(), name


def test_a_path_that_a_page_names_is_a_file_of_benchmarks() -> None:
    paths = {
        (str(file.relative_to(ROOT)), path)
        for pattern in ("*.md", "docs/*.md", "art_cli/**/*.py", "benchmarks/**/*.py", "tests/**/*.py")
        for file in ROOT.glob(pattern)
        for path in re.findall(r"\bbenchmarks/(?:[a-z_]+/)*[a-z_]+\.py\b", file.read_text())
    }
    assert [(file, path) for file, path in sorted(paths) if not (ROOT / path).is_file()] == []
    assert len(paths) > 20


@pytest.mark.slow
def test_every_command_finds_what_it_imports() -> None:
    """In one process of its own. llama_side is for a Python with other packages."""
    modules = [name for name in runnable() if not name.endswith("llama_side")]
    modules = [f"{name}.__main__" if runnable()[name].name == "__main__.py" else name for name in modules]
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
