"""An engine becomes part of art by three files, as CONTRIBUTING.md lists them, and no other file asks for its class."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from art_cli.runs.run_dir import RunDir
from tests.support.paths import LETTERS, ROOT

SECTION = '''
class PlainEngineConfig(EngineSection):
    """Samples without a cache."""

    enforces_formats = False
    weights = "here"

    name: Literal["plain"]
    max_tokens: PositiveInt = 16
    """The largest number of tokens of a reply to a call that sets none."""
'''
OWNERS = ("config/", "engines/", "learners/", "tinker/")
COMMANDS = ("cli/preflight/", "cli/backend.py")  # settings of vLLM and of a Tinker server that only these two check


def insert(path: Path, before: str, text: str) -> None:
    content = path.read_text()
    assert content.count(before) == 1, (path, before)
    path.write_text(content.replace(before, text + before))


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the engine of tests/support/standins/plain_engine.py in it, under the name `plain`."""
    root = tmp_path_factory.mktemp("copy")
    package = root / "art_cli"
    shutil.copytree(ROOT / "art_cli", package, ignore=shutil.ignore_patterns("*.pyc.*", "app_src"))
    for name in ("docs", "configs", "pyproject.toml"):
        (root / name).symlink_to(ROOT / name)
    engine = (ROOT / "tests" / "support" / "standins" / "plain_engine.py").read_text()
    (package / "engines" / "plain_engine.py").write_text(engine)
    make = "    @classmethod\n    def of(cls, config, setup):\n        return cls(setup)\n\n"
    insert(package / "engines" / "plain_engine.py", "    async def start(self)", make)
    insert(
        package / "engines" / "__init__.py",
        '    "tinker":',
        '    "plain": "art_cli.engines.plain_engine:PlainEngine",\n',
    )
    sections = package / "config" / "sections" / "engine_config.py"
    insert(sections, "\nEngineConfig = Annotated[", SECTION + "\n")
    insert(sections, "    | OwnEngineConfig,", "    | PlainEngineConfig\n")
    return root


def test_no_number_is_float64_on_the_learners_device() -> None:
    """MPS has no float64, so tensors are copied to the CPU first, and arrays become float32 first."""
    for path in [*(ROOT / "art_cli" / "learners").rglob("*.py"), *(ROOT / "art_cli" / "tinker").rglob("*.py")]:
        wrong = re.findall(r".*(?<!\.cpu\(\))\.double\(\).*|.*device\)\.float\(\).*", path.read_text())
        assert not wrong, (path, wrong)


def art(copy: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "art_cli", *map(str, arguments)]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_a_run_is_trained_and_played_with_an_engine_that_three_files_added(copy: Path) -> None:
    """The proof of every load compares the engine's scores with the learner's, so that the engine follows the steps.

    It has weights of its own, which follow one step later.
    """
    settings = ["engine=plain", f"runs={copy / 'runs'}", "train.max_staleness=1", "loss.off_policy.name=truncate"]
    settings += ["train.steps=2", "rollout.group_size=2", "rollout.groups_per_step=2", "eval=null"]
    done = art(copy, "train", LETTERS / "config.yaml", *settings)
    assert done.returncode == 0, done.stderr
    files = RunDir(copy / "runs" / "letters")
    assert json.loads(files.config_path.read_text())["engine"] == {"name": "plain", "max_tokens": 16}
    lines = [line for line in files.metrics() if line.split == "train"]
    assert len(lines) == 2 and all(line.metrics["probe_gap"] < 1e-4 for line in lines)
    output = copy / "played.jsonl"
    done = art(copy, "generate", LETTERS / "config.yaml", *settings, "-o", output)
    assert done.returncode == 0, done.stderr
    played = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(played) == 4 and all(turn["step"] == 2 for each in played for turn in each["turns"])


def test_no_other_room_asks_for_the_class_of_an_engine_or_a_learner() -> None:
    asked = [
        f"{path.relative_to(ROOT / 'art_cli')}: {line.strip()}"
        for path in (ROOT / "art_cli").rglob("*.py")
        if not str(path.relative_to(ROOT / "art_cli")).startswith((*OWNERS, *COMMANDS))
        for line in path.read_text().splitlines()
        if re.search(r"isinstance\(.*(Engine|Learner)Config|(engine|learner)\.name [!=]= \"(?!auto)", line)
    ]
    assert not asked
