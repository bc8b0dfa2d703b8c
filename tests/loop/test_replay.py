"""`art replay`: a real run of the smallest size replays bit for bit, and one changed number is found and named."""

import asyncio
import json
import shutil
from pathlib import Path

import msgspec
import pytest

from art_cli.cli.app import run as art
from art_cli.config.compose import load_config
from art_cli.config.schema import RulerJudgeConfig
from art_cli.loop.comparison import Compared
from art_cli.loop.recompute import Replayed, replay, rewards_of_votes
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, Trajectory, score_trajectory
from art_cli.runtime.errors import DataError, RunError, UsageError
from tests.support.paths import LETTERS

STEP = 1
JUDGE = """
def letters(group):
    return [sum(map(str.isalpha, str(t.messages[-1]["content"]))) / 100 + t.index / 10 for t in group]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("replay") / "project"
    shutil.copytree(LETTERS, project)
    (project / "judge.py").write_text(JUDGE)
    return project


def trained(project: Path, *overrides: str) -> RunDir:
    settings = [f"runs={project}/runs", "train.steps=3", "train.keep_checkpoints=9", "eval=null", *overrides]
    return RunDir(asyncio.run(train(load_config(project / "config.yaml", settings))).root)


@pytest.fixture(scope="module")
def plain(project: Path) -> RunDir:
    return trained(project)


@pytest.fixture(scope="module")
def rich(project: Path) -> RunDir:
    """With a reference policy, weights for off-policy tokens, several updates and epochs, and a function as judge."""
    more = ["loss.kl=0.1", "loss.off_policy.name=truncate", "loss.clip_cov=0.1", "train.updates_per_step=2"]
    return trained(project, "name=rich", *more, "train.epochs_per_step=2", "judge={entry: 'judge.py:letters'}")


@pytest.fixture
def copied(plain: RunDir, tmp_path: Path) -> RunDir:
    shutil.copytree(plain.root, tmp_path / "run")
    return RunDir(tmp_path / "run")


def by_name(found: Replayed) -> dict[str, Compared]:
    return {row.name: row for row in found.rows}


@pytest.mark.parametrize("sample", [0, 5, 11])
def test_a_real_run_replays_bit_for_bit(plain: RunDir, sample: int) -> None:
    found = replay(plain, step=STEP, sample=sample)
    rows, line = by_name(found), plain.learned(STEP)[sample]
    assert not found.differs and {row.verdict for row in found.rows} == {"same"}
    assert rows.keys() >= {"trajectory", "reward", "advantages", "logprobs", "loss"}
    assert [rows[name].difference for name in ("reward", "advantages", "logprobs", "loss")] == [0, 0, 0, 0]
    assert (found.id, found.old_logprobs) == (line.id, line.logprobs)
    assert found.engine_gap is not None and found.engine_gap < 1e-5
    assert found.change is not None and abs(found.change) > 1e-4


def test_with_everything_on_it_replays_as_well(rich: RunDir, project: Path) -> None:
    """The second update of the step began at weights that no file holds, so of its samples only that is compared which
    does not depend on them."""
    lines = rich.learned(STEP)
    first = next(place for place, line in enumerate(lines) if line.left_out is None and line.update == 0)
    second = next(place for place, line in enumerate(lines) if line.update == 1)
    rows = by_name(replay(rich, step=STEP, sample=first, directory=project))
    assert {row.verdict for row in rows.values()} == {"same"}
    assert [rows[name].difference for name in ("reward", "logprobs", "reference", "importance", "loss")] == [0] * 5
    later = by_name(replay(rich, step=STEP, sample=second, directory=project))
    assert {name for name, row in later.items() if row.verdict == "not computed"} == {"logprobs", "importance", "loss"}
    assert "had taken 1 of its updates" in later["logprobs"].why
    assert {later[name].verdict for name in ("reward", "advantages", "reference", "update")} == {"same"}


def test_code_beside_the_configuration_runs_only_if_it_is_named(rich: RunDir) -> None:
    row = by_name(replay(rich, step=STEP))["reward"]
    assert row.verdict == "not computed" and "--config" in row.why


def change(path: Path, number: int, edit: str, value: object) -> None:
    """Sets one value in one line of a JSON-lines file; `edit` is where, as "turns.0.logprobs.2"."""
    lines = path.read_text().splitlines()
    record = json.loads(lines[number])
    *way, last = [int(part) if part.isdigit() else part for part in edit.split(".")]
    inner = record
    for part in way:
        inner = inner[part]
    inner[last] = value
    lines[number] = json.dumps(record)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize(
    ("file", "edit", "value", "named", "at"),
    [
        ("learned", "advantages.1", 0.123, "advantages", "turn 1, token 0"),
        ("learned", "logprobs.0.2", -9.0, "logprobs", "turn 0, token 2"),
        ("learned", "logprobs.0.2", None, "logprobs", "turn 0, token 2"),
        ("learned", "loss", 0.5, "loss", ""),
        ("learned", "masked", {"abandoned": 1}, "masked", ""),
        ("scored", "reward", 0.999, "reward", ""),
        ("scored", "reward", 0.999, "advantages", "turn 0, token 0"),
        ("scored", "turns.1.logprobs.3", -9.0, "trajectory.turns", "[1].logprobs[3]"),
        ("trajectories", "messages.0.content", "x", "trajectory.messages", "scored.jsonl and trajectories.jsonl, [0]"),
    ],
)
def test_one_changed_number_in_a_file_is_found_and_named(
    copied: RunDir, file: str, edit: str, value: object, named: str, at: str
) -> None:
    line = copied.learned(STEP)[5]
    path = getattr(copied, f"{file}_path")(STEP)
    number = next(n for n, text in enumerate(path.read_text().splitlines()) if json.loads(text)["id"] == line.id)
    change(path, number, edit, value)
    rows = by_name(replay(copied, step=STEP, id=line.id))
    assert rows[named].verdict == "differs" and rows[named].at.endswith(at)
    alone = {"scored": {"reward", "advantages", "loss"}, "learned": {named}}.get(file, {named})
    assert {name for name, row in rows.items() if row.verdict == "differs"} <= alone | {named}


def test_what_cannot_be_computed_is_said_with_the_reason(copied: RunDir) -> None:
    shutil.rmtree(copied.checkpoint_path(STEP + 1))
    found = replay(copied, step=STEP)
    rows = by_name(found)
    assert not found.differs and rows["logprobs"].verdict == "same"
    assert "no checkpoint of step 2: there are 0, 1, 3" in rows["logprobs after the step"].why
    (copied.checkpoint_path(STEP) / "adapter_model.safetensors").write_bytes(b"x")
    rows = by_name(replay(copied, step=STEP))
    assert rows["advantages"].verdict == "same" and rows["loss"].verdict == "not computed"
    assert "adapter_model.safetensors" in rows["loss"].why
    copied.trajectories_path(STEP).unlink()
    assert by_name(replay(copied, step=STEP))["trajectory"].verdict == "not computed"


def test_the_command_says_it_as_a_table_or_as_json(copied: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["replay", str(copied.root), "--step", str(STEP)]
    assert art([*command, "--sample", "3"]) == 0
    assert "all that was computed is as recorded" in capsys.readouterr().out
    id = copied.learned(STEP)[3].id
    change(copied.learned_path(STEP), 3, "loss", 7.5)
    assert art(["replay", str(copied.root), "--id", id, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"] if row["verdict"] == "differs"] == ["loss"]
    assert (found["id"], found["step"], found["sample"]) == (id, STEP, 3)
    for wrong in (
        ["--sample", "99"],
        ["--id", "s0001-g0009-a00"],
        ["--id", "x\x1b[2J"],
        ["--sample", "1", "--id", "x"],
    ):
        assert art([*command, *wrong]) == 2
        assert "\x1b" not in capsys.readouterr().err
    assert art(["replay", str(copied.root)]) == 2 and art(["replay", str(copied.root), "--step", "77"]) == 2
    assert art(["replay", str(copied.root / "gone"), "--step", "0"]) != 0


def test_damaged_files_are_refused_by_name(copied: RunDir) -> None:
    good = copied.config_path.read_text()
    copied.config_path.write_text(json.dumps({"name": "x"}))
    with pytest.raises(DataError, match=r"config\.json"):
        replay(copied, step=STEP)
    copied.config_path.unlink()
    with pytest.raises(RunError, match="no config.json"):
        replay(copied, step=STEP)
    copied.config_path.write_text(good)
    with copied.learned_path(STEP).open("ab") as file:
        file.write(b'{"id": "half')  # a torn last line is left out
    assert not replay(copied, step=STEP).differs
    lines = copied.scored_path(STEP).read_text().splitlines()
    copied.scored_path(STEP).write_text("".join(f"{line}\n" for line in lines[1:]))
    with pytest.raises(UsageError, match=r"scored\.jsonl: lacks s0001"):
        replay(copied, step=STEP)
    copied.learned_path(STEP).write_text('{"id": 7}\n')
    with pytest.raises(DataError, match=r"learned\.jsonl:1"):
        replay(copied, step=STEP)


def test_a_reward_of_ruler_follows_from_its_recorded_votes() -> None:
    """Two models of weights 3 and 1: (3 * mean(0.2, 0.4) + 0.8) / 4 = 0.425."""
    panel = [{"model": "a", "weight": 3}, {"model": "b"}]
    judge = RulerJudgeConfig(name="ruler", panel=panel, votes=2)
    scores = [Score(judge="ruler", model="a", score=0.3, votes=[0.2, 0.4]), Score(judge="ruler", model="b", score=0.8)]
    trajectory = Trajectory(id="t", group_id="g", group_size=1, index=0)
    rows = list(rewards_of_votes(score_trajectory(trajectory, 0.425, scores), judge))
    assert {row.verdict for row in rows} == {"same"} and rows[-1].computed == pytest.approx(0.425)
    changed = [msgspec.structs.replace(scores[0], votes=[0.2, 0.5]), scores[1]]
    rows = list(rewards_of_votes(score_trajectory(trajectory, 0.425, changed), judge))
    assert [row.name for row in rows if row.verdict == "differs"] == ["score of a"]
    rows = list(rewards_of_votes(score_trajectory(trajectory, 0.5, scores), judge))
    assert [row.name for row in rows if row.verdict == "differs"] == ["reward"]
