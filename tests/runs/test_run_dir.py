"""Files survive kills: torn lines, half-written directories, flipped bytes, full disks, second writers."""

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from art_cli.runs.durable import LineWriter, new_directory, new_file, read_lines, write_file
from art_cli.runs.json_lines import is_torn
from art_cli.runs.manifest import Manifest, new_checkpoint, verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Score, ScoredTrajectory, Trajectory, Turn, prompt, score_trajectory, sequence
from art_cli.runtime.errors import CheckpointError, DataError, RunError


def make_trajectory(index: int = 0, **fields: object) -> Trajectory:
    turn = Turn(
        parent=None,
        kept=0,
        prompt_ids=[1, 2],
        sampled_ids=[3],
        logprobs=[-0.1],
        raw_logprobs=None,
        step=0,
        temperature=1.0,
    )
    return Trajectory(id=f"g-a{index}", group_id="g", group_size=4, index=index, turns=[turn], **fields)  # type: ignore[arg-type]


def test_thousands_of_turns_that_continue_each_other_are_one_sequence() -> None:
    first = make_trajectory().turns[0]
    turns = [first, *(replace(first, parent=n, kept=n + 2, prompt_ids=[9]) for n in range(5_000))]
    assert sequence(turns, 5_000) == [1, 2, *[9] * 5_000, 3]
    assert prompt(turns, 5_000) == [1, 2, *[9] * 5_000]


def make_checkpoint(path: Path, step: int) -> None:
    with new_checkpoint(path, Manifest(step=step, base="b", config_hash="h")) as directory:
        (directory / "adapter_model.safetensors").write_bytes(bytes(range(200)))
        (directory / "optimizer.safetensors").write_bytes(b"state")


def test_a_directory_stays_whole_until_the_new_one_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rename = tmp_path / "step_0001", Path.rename
    make_checkpoint(path, 1)

    def interrupted(source: Path, target: Path) -> Path:
        if source.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(path, 1)
    assert verify_checkpoint(path).step == 1 and [each.name for each in tmp_path.iterdir()] == ["step_0001"]
    monkeypatch.undo()
    make_checkpoint(path, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["step_0001"]


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    scored = score_trajectory(make_trajectory(metrics={"win": 1.0}), 0.5, [Score(judge="rollout", score=0.5)])
    with LineWriter(path) as writer:
        writer.append(scored)
    assert list(read_lines(path, ScoredTrajectory)) == [scored]


@settings(max_examples=60)
@given(cut=st.integers(min_value=0, max_value=2000))
@example(cut=len(msgspec.json.encode(make_trajectory(0))))
def test_a_file_cut_anywhere_reads_as_its_whole_lines_and_can_be_appended_to(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """Whatever the cut, reading gives a prefix of what was written, and a new record comes right after that prefix."""
    path = tmp_path_factory.mktemp("cut") / "t.jsonl"
    written = [make_trajectory(index) for index in range(4)]
    with LineWriter(path) as writer:
        for trajectory in written:
            writer.append(trajectory)
    data = path.read_bytes()
    kept = data[: cut % (len(data) + 1)]
    path.write_bytes(kept)
    left = list(read_lines(path, Trajectory))
    num_whole = kept.count(b"\n") + (len(kept) < len(data) and data[len(kept) :].startswith(b"\n"))
    assert left == written[:num_whole], "a line that lacks its end alone is whole"
    with LineWriter(path) as writer:
        writer.append(written[3])
    assert list(read_lines(path, Trajectory)) == [*left, written[3]]


def test_a_torn_line_is_warned_of_once_however_often_the_file_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": "half')
    assert [list(read_lines(path, Trajectory)) for _ in range(3)] == [[], [], []]
    assert [record.message for record in caplog.records] == [f"{path}:1: the last line is incomplete; skipped"]


@pytest.mark.parametrize("text", ['{"a": [1, {"b": "x\\u00e9é\\\\"}], "c": -1.5e3, "d": true, "e": null}'])
def test_every_beginning_of_a_line_is_torn_and_a_line_with_more_is_not(text: str) -> None:
    data = text.encode()
    assert all(is_torn(data[:cut]) for cut in range(1, len(data)))
    whole = [
        data,
        data + b",",
        data + data,
        data + b"]",
        data.replace("é".encode(), b"\xe9"),
        b'{"a": ' + b"9" * 5000 + b"}",
    ]
    assert not any(is_torn(line) for line in whole)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_failed_write_names_the_file_that_was_to_be_written(tmp_path: Path, number: int) -> None:
    path = tmp_path / "out.json"
    with pytest.raises(OSError) as caught, new_file(path):
        raise OSError(number, os.strerror(number))
    assert caught.value.filename == str(path) and not list(tmp_path.iterdir())


def test_a_json_array_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('[{"id": 1},\n{"id": 2}]\n')
    with pytest.raises(DataError, match=r"t\.jsonl:1: a JSON array begins here; write one object per line"):
        list(read_lines(path, Trajectory))


def test_a_broken_line_that_is_not_the_last_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with LineWriter(path) as writer:
        writer.append(make_trajectory())
    path.write_bytes(path.read_bytes() + b'{"id": 3}\n' + path.read_bytes())
    with pytest.raises(DataError, match=r"t\.jsonl:2: "):
        list(read_lines(path, Trajectory))


def test_a_newer_schema_is_refused_and_says_upgrade(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"schema_version": 99, "turns": "something else by then"}) + "\n")
    with pytest.raises(DataError, match=r"t\.jsonl:1: written by a newer art \(schema 99.*upgrade"):
        list(read_lines(path, Trajectory))


def test_a_failing_writer_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"old")
    with pytest.raises(ZeroDivisionError), new_directory(tmp_path / "d") as directory:
        (directory / "half").write_bytes(b"x")
        raise ZeroDivisionError
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", ["empty", "truncate", "flip", "missing", "no manifest", "torn manifest"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    run = RunDir(tmp_path)
    for step in (3, 4):
        make_checkpoint(run.checkpoint_path(step), step)
    weights = run.checkpoint_path(4) / "adapter_model.safetensors"
    manifest = run.checkpoint_path(4) / "manifest.json"
    data = weights.read_bytes()
    match damage:
        case "empty":
            weights.write_bytes(b"")
        case "truncate":
            weights.write_bytes(data[:-1])
        case "flip":
            weights.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "missing":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "torn manifest":
            manifest.write_bytes(manifest.read_bytes()[:40])
    newest = run.newest_checkpoint()
    assert newest is not None
    assert newest[1].step == 3
    assert "passed over a checkpoint" in caplog.text
    assert "step_0004" in caplog.text
    with pytest.raises(CheckpointError, match="step_0004"):
        verify_checkpoint(run.checkpoint_path(4))


def test_metrics_written_twice_count_once_the_last_wins(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append_metrics(0, "train", {"loss": 1.0})
    run.append_metrics(1, "train", {"loss": 2.0})
    run.append_metrics(0, "train", {"loss": 3.0})
    assert [(line.step, line.metrics["loss"]) for line in run.metrics()] == [(0, 3.0), (1, 2.0)]


def test_a_run_is_held_by_one_process_and_let_go_when_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom art_cli.runs.run_dir import RunDir\n"
        "with RunDir(pathlib.Path(sys.argv[1])).lock():\n print('held', flush=True)\n sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match=f"in use by process {holder.pid}"), RunDir(tmp_path).lock():
            pass
        holder.kill()
        holder.wait(timeout=10)
        with RunDir(tmp_path).lock():
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EACCES])
def test_a_file_system_without_locks_is_a_warning_and_any_other_error_is_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with contextlib.ExitStack() as stack:
        if number == errno.EACCES:
            stack.enter_context(pytest.raises(PermissionError))
        stack.enter_context(RunDir(tmp_path).lock())
    assert (f"{tmp_path}: not locked (No locks available): start one process at a time" in caplog.text) == (
        number == errno.ENOLCK
    )


def test_a_copied_step_is_not_the_first_evaluation(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.first_eval_path() is None
    for name in ("step_0010", "step_0005", "step_0004_old", "step_0003 (copy)", "step_10000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.jsonl").touch()
    assert run.first_eval_path() == run.eval_path(5)
