"""One rule decides which checkpoint of a run a command takes, and each command prints its choice in the same words.

Of a run that is its best evaluated checkpoint, else its newest; `--last` takes the newest. Three commands differ and
say so: training and a fork go on from the newest, `art step` from the checkpoint that sampled its attempts.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from art_cli.cli import app as cli
from art_cli.runs.durable import read_lines
from art_cli.runs.manifest import digest_of, read_manifest
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from tests.support.paths import LETTERS
from tests.support.processes import forked

Art = Callable[..., tuple[int, str, str]]

ADAPTER = "adapter_model.safetensors"
RUN = RunDir(Path("runs/mine"))
SMALL = ["rollout.groups_per_step=1", "rollout.group_size=2"]
BEST = "the best evaluated: reward 0.900; the newest, step 3, has 0.100 (--last takes it)"
LAST = "the newest (--last)"
NAMED = "as you asked"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The letters task with a run `mine` of three steps; its step 1 has the highest evaluated reward."""
    project, before = tmp_path_factory.mktemp("which") / "project", Path.cwd()
    shutil.copytree(LETTERS, project, ignore=shutil.ignore_patterns("runs"))
    (project / "demos.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "a"}]}) + "\n"
    )
    (project / "config.yaml").write_text((project / "config.yaml").read_text().replace("name: letters", "name: mine"))
    settings = ["train.steps=3", "train.learning_rate=0.1", "eval.every=1", "train.keep_checkpoints=9"]
    settings += ["train.max_kl=null", "loss.scale_advantages=true"]  # large steps, so that policies answer differently
    os.chdir(project)
    try:
        assert cli.run(["train", "config.yaml", *settings]) == 0
    finally:
        os.chdir(before)
    metrics = project / RUN.metrics_path
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["split"] == "eval":
            line["metrics"]["reward"] = 0.9 if line["step"] == 1 else 0.1
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return project


@pytest.fixture
def here(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project, in which a command may write."""
    copy = tmp_path / "project"
    shutil.copytree(project, copy)
    monkeypatch.chdir(copy)
    return copy


class Case(NamedTuple):
    words: list[str]
    taken: Callable[[str], int]  # the step that the command took, by what it wrote or printed
    step: int = 1
    why: str = BEST


def played(path: str) -> Callable[[str], int]:
    return lambda out: next(turn.step for each in read_lines(Path(path), Trajectory) for turn in each.turns)


def written(path: str, more: int = 0) -> Callable[[str], int]:
    return lambda out: read_manifest(Path(path)).step - more


def with_adapter(path: str) -> int:
    """The step of the run whose adapter the checkpoint has."""
    adapters = {(RUN.checkpoint_path(step) / ADAPTER).read_bytes(): step for step in RUN.checkpoint_steps()}
    return adapters[(Path(path) / ADAPTER).read_bytes()]


def certified(out: str) -> int:
    policy = json.loads(Path("merged/certificate.json").read_text())["policy"]
    return {digest_of(read_manifest(RUN.checkpoint_path(step))): step for step in RUN.checkpoint_steps()}[policy]


def served(out: str) -> int:
    return int(json.loads(out.splitlines()[0])["models"][0]["step"])


def evaluated(out: str) -> int:
    return played(str(next(Path("kept").glob("*.jsonl"))))(out)


def unseen(out: str) -> int:
    """For a command that writes nothing of its policy: its line alone is held."""
    return -1


GENERATE = ["generate", "config.yaml", *SMALL, "-o", "out.jsonl"]
EVAL = ["eval", "config.yaml", *SMALL, "-o", "kept"]
HUNT = ["hunt", "config.yaml", "--minutes", "0", "--scenarios", "1"]
SFT = ["sft", "config.yaml", "demos.jsonl", "-o", "warm", "--checkpoint", "runs/mine"]
STEP = ["step", "config.yaml", "runs/mine/step_0002/scored.jsonl", "-o", "next"]
EXPORT = ["export", "-o", "merged"]
SERVE = ["serve", "--port", "0", "--json"]
GATEWAY = ["gateway", "config.yaml", "--port", "0", "--json"]
CASES = {
    "generate": Case(GENERATE, played("out.jsonl")),
    "generate-last": Case([*GENERATE, "--last"], played("out.jsonl"), 3, LAST),
    "generate-a-step": Case([*GENERATE, "--checkpoint", "runs/mine/step_2"], played("out.jsonl"), 2, NAMED),
    "eval": Case([*EVAL, "--checkpoint", "runs/mine"], evaluated),
    "eval-last": Case([*EVAL, "--last"], evaluated, 3, LAST),
    "hunt": Case(HUNT, unseen),
    "hunt-last": Case([*HUNT, "--last"], unseen, 3, LAST),
    "sft": Case(SFT, written("warm")),
    "sft-last": Case([*SFT, "--last"], written("warm"), 3, LAST),
    "step": Case(STEP, written("next", 1), 2, "which sampled the attempts"),
    "step-a-step": Case([*STEP, "--checkpoint", "runs/mine/step_2"], written("next", 1), 2, NAMED),
    "export": Case([*EXPORT, "runs/mine"], certified),
    "export-last": Case([*EXPORT, "runs/mine", "--last"], certified, 3, LAST),
    "serve": Case([*SERVE, "runs/mine"], served),
    "serve-last": Case([*SERVE, "runs/mine", "--last"], served, 3, LAST),
    "gateway": Case(GATEWAY, unseen),
    "gateway-last": Case([*GATEWAY, "--last"], unseen, 3, LAST),
    "import": Case(["checkpoints", "runs/new", "--import", "runs/mine"],
                   lambda out: with_adapter("runs/new/checkpoints/step_0000")),
    "fork": Case(["checkpoints", "runs/mine", "--fork", "runs/new", "--json"],
                 lambda out: int(json.loads(out)["step"]), 3, "the newest (--step takes another)"),
    "train": Case(["train", "config.yaml", "train.steps=4", "train.learning_rate=0.1", "eval.every=1"],
                  lambda out: max(step for step in range(9) if RUN.scored_path(step).exists()), 3,
                  "the newest; training continues from it to 4"),
}  # fmt: skip


def run(art: Art, words: list[str]) -> tuple[str, str]:
    """Returns what the command printed. One that serves is ended, as by Ctrl-C, once it does."""
    if words[0] not in ("serve", "gateway"):
        code, out, err = art(*words)
        assert code == (1 if words[0] == "hunt" and "attacks score" in err else 0), err
        return out, err
    process = forked.Forked(words, stdout=forked.PIPE, stderr=forked.PIPE)
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        return first, err
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_command_takes_the_checkpoint_by_the_rule_and_prints_it(art: Art, here: Path, name: str) -> None:
    case = CASES[name]
    out, err = run(art, case.words)
    lines = [line.partition("policy: ")[2] for line in err.splitlines() if "policy: " in line]
    assert lines == [f"{RUN.checkpoint_path(case.step)}: step {case.step}, {case.why}"], err
    assert case.taken is unseen or case.taken(out) == case.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([*GENERATE, "--checkpoint", "base"], "build.py:build: the base model, as you asked"),
        ([*GENERATE, "--checkpoint", "runs/mine/base"], "runs/mine/base: the base model, as you asked"),
        ([*GENERATE, "name=other"], "runs/other: the starting policy, because the run has no checkpoint"),
        (SFT[:-2], "build.py:build: the base model, because no --checkpoint is named"),
        ([*SERVE, "runs/mine/base"], "runs/mine/base: the base model, as you asked"),
    ],
    ids=" ".join,
)
def test_a_command_that_takes_no_checkpoint_says_so_in_the_same_words(
    art: Art, here: Path, words: list[str], line: str
) -> None:
    err = run(art, words)[1]
    assert [each.partition("policy: ")[2] for each in err.splitlines() if "policy: " in each] == [line], err


@pytest.fixture
def damaged(here: Path) -> Iterator[None]:
    """The run, none of whose checkpoints verifies."""
    for step in RUN.checkpoint_steps():
        (RUN.checkpoint_path(step) / ADAPTER).write_bytes(b"")
    yield


@pytest.mark.slow
@pytest.mark.usefixtures("damaged")
@pytest.mark.parametrize("words", [GENERATE, [*EXPORT, "runs/mine"], [*SERVE, "runs/mine"]], ids=" ".join)
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_not_replaced_by_its_start(
    art: Art, words: list[str]
) -> None:
    where = RUN.root.resolve() if "config.yaml" in words else RUN.root
    code, _, err = art(*words)
    assert (code, err.splitlines()[-1]) == (1, f"error: {where}: a run without a valid checkpoint")
    warned = [line for line in err.splitlines() if "passed over a checkpoint" in line]
    assert len(warned) == len(set(warned)) and (len(warned) == 4 or where == RUN.root)  # once each in a process
