"""What a machine with a GPU installs: the resolver's answer to each way that we name, and the tests that run there.

`make setup-uv` gets the resolver. uv reads metadata alone, so that nothing large is downloaded.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

UV = Path(os.environ.get("ART_UV") or ROOT / ".venv-uv" / "bin" / "uv")
GPU_FILE = ROOT / "constraints-gpu.txt"
# uv's words where the index cannot be reached, and where it lacks a version that a package asks for
UNREACHABLE = re.compile(r"error sending request|dns error|Failed to fetch|timed out|[Cc]onnect", re.IGNORECASE)
LACKING = re.compile(r"there (?:is|are) no versions? of|(?:is|are) available", re.IGNORECASE)


def variable(name: str) -> list[str]:
    """The words of a variable in the Makefile."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    found = re.search(rf"^{name} := (.*)$", text, flags=re.MULTILINE)
    assert found is not None
    return found.group(1).split()


def resolve(tmp_path: Path, python: str, extras: list[str], packages: list[str], constraints: Path | None) -> str:
    """Returns uv's answer as lines NAME==VERSION, or its refusal as one line that begins with "error"."""
    (tmp_path / "packages.txt").write_text("\n".join(packages) + "\n")
    options = [word for extra in extras for word in ("--extra", extra)]
    options += [] if constraints is None else ["--constraint", str(constraints)]
    done = subprocess.run(
        [
            *(str(UV), "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"),
            *("--python-version", python, "--python-platform", "x86_64-manylinux_2_35", *options),
            *(str(ROOT / "pyproject.toml"), str(tmp_path / "packages.txt")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())
    if UNREACHABLE.search(said) or LACKING.search(said):
        pytest.skip(f"the package index cannot answer: {said[:300]}")
    return f"error {said}"


# Extras, packages, constraints. The first is all that Makefile, README, examples/machines and Dockerfile install
# together: what resolves together resolves in parts.
WAYS = {
    "constraints-gpu.txt": (["train", "vllm", "unsloth", "tinker", "quantize"], variable("GPU_PACKAGES"), GPU_FILE),
    "vLLM 0.33": (["train", "vllm", "tinker"], ["vllm==0.33.0", "vllm-bnb-plugin"], None),
}
needs_uv = pytest.mark.skipif(not UV.exists(), reason="no .venv-uv and no ART_UV: make setup-uv")


@pytest.mark.slow
@needs_uv
@pytest.mark.parametrize(("way", "python"), [*zip(WAYS, ("3.12", "3.11"), strict=True)])
def test_each_way_to_install_on_a_gpu_resolves(tmp_path: Path, way: str, python: str) -> None:
    extras, packages, constraints = WAYS[way]
    found = resolve(tmp_path, python, extras, packages, constraints)
    version, torch = ("0.33.0", "2.14.0") if constraints is None else ("0.32.0", "2.13.0")
    assert f"\nvllm=={version}\n" in found and f"\ntorch=={torch}\n" in found, found


@pytest.mark.slow
@needs_uv
def test_the_versions_of_a_cpu_are_refused_beside_vllm(tmp_path: Path) -> None:
    """constraints.txt has a transformers that no vLLM takes; this is the failure that the other tests look for."""
    found = resolve(tmp_path, "3.11", ["train"], ["vllm==0.32.0"], ROOT / "constraints.txt")
    assert found.startswith("error") and "transformers" in found


def test_the_files_name_what_the_makefile_and_the_image_install() -> None:
    pinned = {line.partition("==")[0].lower() for line in GPU_FILE.read_text().splitlines() if "==" in line}
    assert {*variable("GPU_PACKAGES"), "torch", "transformers", "peft", "triton", "tinker"} <= pinned
    image = (ROOT / "Dockerfile").read_text()
    assert "--constraint constraints-gpu.txt" in image and "vllm-bnb-plugin" in image
    assert "!constraints-gpu.txt" in (ROOT / ".dockerignore").read_text().splitlines()
    for page in ("README.md", "examples/machines/art.sky.yaml"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if "pip install" in line and "vllm" in line]
        assert lines and all("-c constraints-gpu.txt" in line for line in lines), page


# --- make test-gpu ----------------------------------------------------------------------------------------------------


def imports(path: Path) -> Iterator[str]:
    """Yields what a file imports when it is imported itself, but what it can do without."""
    todo: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))
        elif isinstance(node, ast.With | ast.ClassDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
        ):
            todo += node.body


def packages(*paths: Path) -> set[str]:
    """The packages of others that these files need, those of our own that they import included."""
    todo, seen, found = [*paths], set[Path](), set[str]()
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for name in imports(path):
            first, *rest = name.split(".")
            if first in ("art_cli", "benchmarks", "tests"):
                places = [ROOT.joinpath(first, *rest[:depth]) for depth in range(len(rest) + 1)]
                todo += [each for place in places for each in (place / "__init__.py", place.with_suffix(".py"))]
            elif first not in sys.stdlib_module_names:
                found.add(first)
    assert len(seen) > len(paths)
    return found


def test_every_gpu_test_is_in_a_file_that_make_test_gpu_names() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    marked = {str(path.relative_to(ROOT)) for path in files if "mark.gpu" in path.read_text()}
    assert marked == set(variable("GPU_TESTS"))


def test_the_gpu_tests_import_what_setup_gpu_installs() -> None:
    pinned = {canonicalize_name(line.partition("==")[0]) for line in GPU_FILE.read_text().splitlines() if "==" in line}
    there = {
        name for name, of in packages_distributions().items() if any(canonicalize_name(each) in pinned for each in of)
    }
    needed = packages(ROOT / "tests/conftest.py", *(ROOT / name for name in variable("GPU_TESTS")))
    assert {"torch", "pytest"} <= needed <= there, needed - there
    assert packages(ROOT / "tests/view/test_drawing.py") - there == {"playwright"}
