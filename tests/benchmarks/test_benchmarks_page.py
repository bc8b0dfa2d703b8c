"""The page of benchmarks/ lists every command, and no other; and every command that a page names can be run."""

import ast
import re
import symtable
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import art_cli
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


def bound(module: str) -> set[str]:
    """Returns the names that a module of ours can be asked for, those of its submodules included."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    symbols = symtable.symtable(file.read_text() if file.exists() else "", str(file), "exec").get_symbols()
    below = {each.stem for each in place.glob("*")} | set(art_cli.__all__ if module == "art_cli" else ())
    return below | {each.get_name() for each in symbols if each.is_assigned() or each.is_imported()}


def test_every_module_finds_what_it_imports_of_ours() -> None:
    """Also what a function imports."""
    missing = {
        (str(path.relative_to(ROOT)), f"{node.module}.{name.name}")
        for path in (ROOT / "benchmarks").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("art_cli", "benchmarks", "tests"))
        for name in node.names
        if name.name not in bound(str(node.module))
    }
    assert not missing
    assert "WorkerPool" in bound("art_cli.runtime.worker_pool") and "Pool" not in bound("art_cli.runtime.worker_pool")
