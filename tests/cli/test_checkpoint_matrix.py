"""Every command takes every checkpoint: of `art sft -o` (like that of `art step -o`) and of a run, on a base that a
function built.

The base is built once for each checkpoint. Whoever takes the checkpoint uses that base, because a second build may give
other weights.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from art_cli.cli import app as cli
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.serving.served_model import find_source
from art_cli.serving.served_policies import Loader
from tests.support.paths import LETTERS

Art = Callable[..., tuple[int, str, str]]

BUILD = """
from pathlib import Path
from tests.letters.build import build as build_letters
def build(directory):
    with Path(__file__).with_name("built").open("a") as file:
        file.write("built\\n")
    build_letters(directory)
"""
DEMOS = [
    {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
    for word in ("a", "b")
]
SMALL = ["rollout.groups_per_step=1", "rollout.group_size=4"]
TINY = "model.base=builtin:tiny"
CHECKPOINTS = {"sft": "warm", "step": "stepped", "run": "runs/letters/checkpoints/step_0001", "builtin": "warm-tiny"}
CONFIG = "../project/config.yaml"  # the commands run in another directory than the one that made the checkpoints


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The letters task, with a checkpoint of each kind."""
    project = tmp_path_factory.mktemp("matrix") / "project"
    shutil.copytree(LETTERS, project)
    (project / "build.py").write_text(BUILD)
    (project / "demos.jsonl").write_text("".join(json.dumps(demo) + "\n" for demo in DEMOS))
    config, demos, before = str(project / "config.yaml"), str(project / "demos.jsonl"), Path.cwd()
    os.chdir(project)
    try:
        commands = [
            ["train", config, "train.steps=1", "eval=null"],
            ["step", config, "runs/letters/step_0000/scored.jsonl", "-o", "stepped", "name=none"],
            ["sft", config, demos, "-o", "warm", "name=none"],
            ["sft", config, demos, "-o", "warm-tiny", "name=none", TINY],
        ]
        assert [cli.run(words) for words in commands] == [0, 0, 0, 0]
    finally:
        os.chdir(before)
    return project


@pytest.fixture
def elsewhere(project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another directory beside the project. At the end nothing has built a base there again."""
    place = project.parent / tmp_path_factory.mktemp("at").name
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def command(name: str, checkpoint: Path, scored: Path) -> list[list[object]]:
    """The command lines of each case. Other policies than the checkpoint's sampled what `art step` gets."""
    gap = "train.max_logprob_gap=99"
    return {
        "generate": [["generate", CONFIG, *SMALL, "-o", "out.jsonl", "--checkpoint", checkpoint]],
        "eval": [["eval", CONFIG, *SMALL, "--checkpoint", checkpoint]],
        "step": [["step", CONFIG, scored, "-o", "next", "--checkpoint", checkpoint, gap]],
        "sft": [["sft", CONFIG, "../project/demos.jsonl", "-o", "next", "--checkpoint", checkpoint]],
        "export": [["export", checkpoint, "-o", "merged"]],
        "import": [
            ["checkpoints", "../project/runs/" + Path.cwd().name, "--import", checkpoint],
            ["train", CONFIG, *SMALL, "eval=null", "train.steps=1", f"name={Path.cwd().name}"],
        ],
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "eval", "step", "sft", "export", "import"])
@pytest.mark.parametrize("kind", ["sft", "run", "builtin"])
def test_a_command_takes_a_checkpoint(art: Art, project: Path, elsewhere: Path, kind: str, name: str) -> None:
    checkpoint, built = project / CHECKPOINTS[kind], (project / "built").read_text()
    for words in command(name, checkpoint, project / "runs/letters/step_0000/scored.jsonl"):
        base = [TINY] if kind == "builtin" and words[0] not in ("export", "checkpoints") else []
        code, _, err = art(*words, *base)
        assert code == 0, err
    assert (project / "built").read_text() == built
    if name in ("step", "sft"):
        assert verify_checkpoint(elsewhere / "next").base == "base"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_is_served(project: Path, elsewhere: Path, kind: str) -> None:
    source = find_source(str(project / CHECKPOINTS[kind]))

    async def score() -> list[float]:
        engine = await Loader(EmbeddedEngineConfig(), logs=elsewhere).make(source)
        try:
            return await engine.score([1, 2, 3])
        finally:
            await engine.close()

    assert len(asyncio.run(score())) == 2
    assert Path(source.base).is_relative_to(project)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["builtin:tiny", "build.py:build"])
def test_a_base_that_a_function_builds_can_be_named_to_every_command(
    art: Art, project: Path, elsewhere: Path, base: str
) -> None:
    """A plain adapter, as an older version or another tool left it, does not have its base."""
    source = project / CHECKPOINTS["builtin" if base.startswith("builtin") else "sft"]
    shutil.copytree(source, "adapter", ignore=shutil.ignore_patterns("manifest.json", "base"))
    shutil.copy(project / "build.py", elsewhere)
    code, _, err = art("export", "adapter", "-o", "merged")
    assert code == 1 and "give --base" in err
    assert art("export", "adapter", "-o", "merged", "--base", base)[0] == 0
    assert art("checkpoints", "new", "--import", "adapter", "--base", base)[0] == 0
    assert (RunDir(Path("new")).base / "config.json").exists()
    assert art("export", "new", "-o", "merged-too")[0] == 0
    one, other = ((elsewhere / name / "model.safetensors").read_bytes() for name in ("merged", "merged-too"))
    assert one == other
    code, _, err = art("export", "adapter", "-o", "more", "--base", "builtin:huge")
    assert (code, "--base: no built-in model 'huge'; there are: tiny" in err) == (2, True)


@pytest.mark.slow
def test_the_base_goes_with_the_import_alone(art: Art, project: Path) -> None:
    code, _, err = art("checkpoints", project / "runs/letters", "--base", "builtin:tiny")
    assert (code, "--base goes with --import" in err) == (2, True)


@pytest.mark.slow
def test_an_imported_checkpoint_begins_with_a_new_optimizer(art: Art, project: Path, elsewhere: Path) -> None:
    """That of `art step` has taken a step, which counts for the schedule of the learning rate."""
    assert (project / "stepped" / "optimizer.json").exists()
    assert art("checkpoints", "new", "--import", project / "stepped")[0] == 0
    start = RunDir(Path("new")).checkpoint_path(0)
    assert sorted(path.name for path in start.glob("optimizer*")) == []
    assert (start / "adapter_model.safetensors").read_bytes() == (
        project / "stepped" / "adapter_model.safetensors"
    ).read_bytes()
