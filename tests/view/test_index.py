"""The index has what the files have: whatever way they grow, and whichever program wrote their lines."""

import os
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.runs.run_dir import RunDir
from art_cli.view.index import Index
from tests.support.records.attempts import attempt, scored, write_attempts


def read(index: Index) -> dict[tuple[int, str], dict[str, list[tuple[str, float | None]]]]:
    """(step, split) -> group -> (id, reward) of each row, when all was read."""
    index.look()
    while not index.read(time.monotonic() + 10):
        pass
    return {
        (step.step, step.split): {g.id: [(row.id, row.reward) for row in g.rows] for g in step.groups()}
        for step in index.steps()
    }


def lines(*records: object) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def test_a_run_has_its_steps_scored_where_they_are(tmp_path: Path) -> None:
    write_attempts(tmp_path / "run")
    assert read(Index(tmp_path / "run")) == {
        (0, "train"): {
            "s0000-g0000": [("s0000-g0000-0", 0.75), ("s0000-g0000-1", 0.75)],
            "s0000-g0001": [("s0000-g0001-0", 0.75), ("s0000-g0001-1", None)],
        },
        (0, "eval"): {"e0000-g0000": [("e0000-g0000-0", 0.25), ("e0000-g0000-1", 0.25)]},
        (1, "train"): {"s0001-g0000": [("s0001-g0000-0", 0.25)]},
    }


@pytest.mark.slow
@given(st.lists(st.integers(0, 10_000), max_size=6))
def test_a_file_read_while_it_is_written_is_the_file_read_at_the_end(cuts: list[int]) -> None:
    """Cuts lie anywhere: amid a line, a number, a character of several bytes."""
    data = lines(*(scored("g", index, reward=index / 4, scenario={"id": "ä€😀"}) for index in range(4)))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "a.jsonl"
        path.write_bytes(b"")
        index = Index(path)
        read(index)
        ends = sorted(cut % (len(data) + 1) for cut in cuts)
        for start, end in zip([0, *ends], [*ends, len(data)], strict=True):
            with path.open("ab") as file:
                file.write(data[start:end])
            seen = read(index)[0, "train"].get("g", [])
            whole = data[:end].count(b"\n") + (data[end : end + 1] == b"\n")
            assert [id for id, _ in seen] == [f"g-{index}" for index in range(whole)]
        assert read(index) == read(Index(path)) == {(0, "train"): {"g": [(f"g-{i}", i / 4) for i in range(4)]}}
        [step] = index.steps()
        assert not step.problems


def test_only_new_bytes_of_a_file_are_read(tmp_path: Path) -> None:
    """The old bytes are overwritten in place by unreadable bytes."""
    path = tmp_path / "a.jsonl"
    first = lines(attempt("g", 0))
    path.write_bytes(first)
    index = Index(path)
    read(index)
    with path.open("r+b") as file:
        file.write(b"x" * (len(first) - 1) + b"\n")
        file.write(lines(attempt("g", 1)))
    assert [id for id, _ in read(index)[0, "train"]["g"]] == ["g-0", "g-1"]
    assert not index.steps()[0].problems


def test_a_replaced_file_and_a_removed_step_are_read_anew(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "run")
    index = Index(run.root)
    before = read(index)
    beside = tmp_path / "new.jsonl"
    beside.write_bytes(lines(scored("other", 0), scored("other", 1)))
    os.replace(beside, run.scored_path(0))
    run.trajectories_path(1).unlink()
    run.trajectories_path(1).parent.rmdir()
    after = read(index)
    assert after.keys() == before.keys() - {(1, "train")}
    assert after[0, "train"]["other"] == [("other-0", 0.75), ("other-1", 0.75)]
    assert after == read(Index(run.root))


def test_a_scored_line_takes_the_place_of_the_unscored_one_whichever_is_read_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.trajectories_path(0).parent.mkdir(parents=True)
    run.trajectories_path(0).write_bytes(lines(*(attempt("g", i) for i in range(3))))
    index = Index(run.root)
    read(index)
    run.scored_path(0).write_bytes(lines(scored("g", 1, reward=1.0)))
    expected = {(0, "train"): {"g": [("g-0", 0.25), ("g-1", 1.0), ("g-2", 0.25)]}}
    assert read(index) == read(Index(run.root)) == expected
    aside = run.trajectories_path(0).rename(tmp_path / "aside.jsonl")
    other = Index(run.root)
    assert read(other) == {(0, "train"): {"g": [("g-1", 1.0)]}}
    aside.rename(run.trajectories_path(0))
    assert read(other) == expected


def test_attempts_that_were_not_judged_are_shown_beside_longer_and_later_verdicts(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.trajectories_path(0).parent.mkdir(parents=True)
    run.trajectories_path(0).write_bytes(lines(attempt("g", 0), attempt("owed", 0)))
    run.scored_path(0).write_bytes(lines(scored("g", 0, reward=1.0)).replace(b"}\n", b" " * 100_000 + b"}\n"))
    assert read(Index(run.root)) == {(0, "train"): {"g": [("g-0", 1.0)], "owed": [("owed-0", 0.25)]}}


def test_lines_of_other_programs(tmp_path: Path) -> None:
    """Conversations that begin alike are a group; each line of ART's is one."""
    path = tmp_path / "a.jsonl"
    ask = {"role": "user", "content": "2+2?"}
    plain = [{"messages": [ask, {"role": "assistant", "content": str(n)}], "reward": n / 4} for n in (3, 4)]
    grouped = {"id": 7, "group_id": "mine", "messages": [ask]}
    of_art = {
        "trajectories": [{"messages_and_choices": [ask], "reward": 0.5}, {"messages_and_choices": [ask]}],
        "exceptions": [{"type": "ValueError", "message": "no"}],
    }
    path.write_bytes(lines(*plain, grouped, of_art) + b'{"half": \n')
    index = Index(path)
    groups = list(read(index)[0, "train"].values())
    assert groups == [
        [("line-1", 0.75), ("line-2", 1.0)],
        [("7", None)],
        [("line-4/0", 0.5), ("line-4/1", None), ("line-4/2", None)],
    ]
    [problem] = index.steps()[0].problems
    assert problem.startswith("a.jsonl:5: JSON is malformed")


def test_a_reward_that_would_overflow_a_mean_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"group_id": "g", "messages": [], "reward": 1e308}\n' * 2)
    index = Index(path)
    assert read(index)[0, "train"] == {"g": [("line-1", None), ("line-2", None)]}
    assert index.steps()[0].numbers().mean_reward is None


def test_equal_ids_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(*({"id": "same", "group_id": g, "messages": []} for g in ("a", "b", "a"))))
    assert read(Index(path))[0, "train"] == {"a": [("same", None), ("same~2", None)], "b": [("same~1", None)]}


@pytest.mark.slow
def test_a_hundred_thousand_equal_ids_are_as_many_rows(tmp_path: Path) -> None:
    """Names stay short, without quadratic comparisons."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines({"id": "same", "group_id": "g", "messages": []}) * 100_000)
    rows = read(Index(path))[0, "train"]["g"]
    assert len({id for id, _ in rows}) == 100_000 and max(len(id) for id, _ in rows) < 20
