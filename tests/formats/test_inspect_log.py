"""`art log --inspect`: files that our own `art import` reads back, for runs as they may stand."""

import json
import zipfile
from pathlib import Path

import pytest

from art_cli.runs.durable import read_lines, write_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory
from tests.cli.test_cli import Art, art
from tests.support.records.attempts import attempt, write_attempts
from tests.support.servers.receiver import receiving

__all__ = ["art"]


def entries(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_each_step_and_split_has_a_log_which_art_import_reads_back(art: Art, tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "run")
    done = art("log", str(run.root), "--inspect", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    names = ["run-train-0000.eval", "run-eval-0000.eval", "run-train-0001.eval"]
    assert [Path(each).name for each in told["logs"]] == names and told["attempts"] == 7
    assert [path for path in (run.root / "inspect").iterdir() if path.suffix != ".eval"] == []
    assert art("import", told["logs"][0], "-o", "back.jsonl", "--reward", "reward").code == 0
    back = {each.metadata["trajectory"]: each for each in read_lines(tmp_path / "back.jsonl", ScoredTrajectory)}
    for before in run.scored(0):
        after = back[before.id]
        said = [(each["role"], each.get("content") or "") for each in before.messages]
        assert [(each["role"], each.get("content") or "") for each in after.messages] == said
        assert after.reward == before.reward and bool(after.error) == bool(before.error)
        assert after.scenario["id"] == before.scenario["id"] and after.duration_s == before.duration_s
        assert [m["reasoning_content"] for m in after.messages if "reasoning_content" in m] == ["I should look."]
    assert [each.metadata["epoch"] for each in back.values() if each.scenario["id"] == "mail-1"] == [1, 2]


def test_a_step_that_is_being_played_is_told_from_a_whole_one(art: Art, tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "run")
    with run.trajectories_path(1).open("ab") as file:
        file.write(b'{"id": "torn')
    assert art("log", str(run.root), "--inspect", "-o", "logs").code == 0
    headers = {path.name: entries(path)["header.json"] for path in Path("logs").iterdir()}
    assert {name: header["status"] for name, header in headers.items()} == {  # type: ignore[index]
        "run-train-0000.eval": "success", "run-eval-0000.eval": "success", "run-train-0001.eval": "cancelled",
    }  # fmt: skip
    before = {path.name: path.read_bytes() for path in Path("logs").iterdir()}
    assert art("log", str(run.root), "--inspect", "-o", "logs").code == 0
    assert {path.name: path.read_bytes() for path in Path("logs").iterdir()} == before


WRONG_MESSAGES = [
    {"role": "user", "content": [5, None]},
    {"role": "user", "content": 5},
    {"role": "assistant", "content": None, "tool_calls": {"a": 1}},
    {"role": "assistant", "content": [{"type": "text", "text": 5}]},
    {"content": "no role"},
]


@pytest.mark.parametrize("wrong", WRONG_MESSAGES)
@pytest.mark.parametrize("is_otlp", [False, True])
def test_an_attempt_with_wrong_messages_is_skipped_and_named(
    art: Art, tmp_path: Path, wrong: dict[str, object], is_otlp: bool
) -> None:
    run = RunDir(tmp_path / "run")
    (run.root / "step_0000").mkdir(parents=True)
    attempts = [attempt(index=0), attempt(index=1, id="wrong-one", messages=[wrong, wrong]), attempt(index=2)]
    write_lines(run.trajectories_path(0), attempts)
    with receiving() as receiver:
        where = ["--otlp", receiver.url] if is_otlp else ["--inspect"]
        done = art("log", str(run.root), *where, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    num = told["traces"] if is_otlp else told["attempts"]
    assert num == 3 or (num == 2 and "attempt wrong-one is skipped" in done.err), done.err


@pytest.mark.slow
def test_hostile_ids_and_texts_make_files_that_can_be_read(art: Art, tmp_path: Path) -> None:
    ids = ["../../x", "a/b", "a\\b", "a\x00b", "\u202e", "n" * 5_000, "</script>", "", 7]
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "[" * 999}} for n in range(99)]
    messages = [
        {"role": "developer", "content": "</script>" + "y" * 2**20},
        {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": None},
        {"role": "assistant", "content": None},
    ]
    run = RunDir(tmp_path / "run")
    (run.root / "step_0000").mkdir(parents=True)
    attempts = [attempt(f"g{n}", scenario={"id": id_}, messages=messages) for n, id_ in enumerate(ids)]
    attempts.append(attempt("silent", messages=[], turns=[], scenario={}, started_at=1e300, duration_s=-1.0))
    write_lines(run.trajectories_path(0), attempts)
    done = art("log", str(run.root), "--inspect", "-o", "logs", "--json")
    assert done.code == 0, done.err
    found = entries(Path(json.loads(done.out)["logs"][0]))
    samples = {name: each for name, each in found.items() if name.startswith("samples/")}
    assert len(samples) == len(attempts)
    for name, sample in samples.items():
        assert name == f"samples/{sample['id']}_epoch_{sample['epoch']}.json"  # type: ignore[index]
        assert name.count("/") == 1 and name.isprintable() and len(name) < 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--inspect"], "nowhere: no such run or file"),
        (["."], "--inspect writes files for inspect view, --otlp URL sends traces"),
        ([".", "--inspect"], "no config.json and no steps"),
        ([".", "--otlp", "http://h", "-o", "x"], "-o goes with --inspect"),
        (["run", "--inspect"], "no attempts yet"),
        (["run", "--inspect", "--step", "3"], "no attempts of step 3 yet"),
        (["bad.jsonl", "--inspect"], "bad.jsonl:1: "),
        (["run", "--otlp", "nonsense"], "no attempts yet"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, art: Art, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text('{"name": "x"}')
    (tmp_path / "bad.jsonl").write_text('{"messages": 7}\n')
    done = art("log", *arguments)
    assert done.code in (1, 2) and message in done.err and done.err.count("\n") == 1 and done.out == ""
    assert not list(tmp_path.rglob("*.eval")) and not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_leaves_the_old_log(art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_attempts(tmp_path / "run")
    assert art("log", str(run.root), "--inspect", "-o", "logs", "--step", "0").code == 0
    before = {path.name: path.read_bytes() for path in Path("logs").iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    done = art("log", str(run.root), "--inspect", "-o", "logs")
    assert done.code == 1 and "no space left on the disk" in done.err
    assert {path.name: path.read_bytes() for path in Path("logs").iterdir()} == before
