"""Labels of a person: kept at once, taken up again, and what they say of the judge."""

import json
import os
import random
from pathlib import Path

import pytest

from art_cli.judges.files.person_labels import Pair, PersonLabels, Verdict
from art_cli.runs.durable import LineWriter
from art_cli.runs.trajectory import Score, ScoredTrajectory
from art_cli.runtime.errors import DataError, RunError, UsageError

GROUPS, SIZE = 12, 4


def write_scored(path: Path, *, is_verdict: bool = False, votes: int = 1, wrong: float = 0.0) -> Path:
    """12 groups of 4 attempts. Attempt i has the quality i / 4; a share of the attempts gets another one's reward."""
    draw = random.Random(5)
    with LineWriter(path) as writer:
        for group in range(GROUPS):
            for index in range(SIZE):
                quality = draw.random() if draw.random() < wrong else index / SIZE
                reward = float(quality >= 0.5) if is_verdict else quality
                messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": f"A{index}" * index}]
                place = {"id": f"g{group}-{index}", "group_id": f"g{group}", "group_size": SIZE, "index": index}
                scores = [Score(judge="j", score=reward, votes=[reward] * votes)]
                writer.append(ScoredTrajectory(**place, reward=reward, messages=messages, scores=scores))
    return path


def better(pair: Pair) -> Verdict:
    """The answer of a person who prefers the higher index."""
    return "left" if pair.left[-1] > pair.right[-1] else "right"


def answer(labels: PersonLabels, num: int) -> list[Pair]:
    pairs = []
    for _ in range(num):
        pair = labels.next()
        assert pair is not None and pair == labels.next(), "the same question until it is answered"
        labels.answer(pair, better(pair))
        pairs.append(pair)
    return pairs


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_answer_is_a_line_and_another_process_goes_on_where_this_one_stopped(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    whole, other = PersonLabels(scored), tmp_path / "other"
    answered = answer(whole, 30)
    (other).mkdir()
    write_scored(other / "scored.jsonl")
    again = [pair for _ in range(30) for pair in answer(PersonLabels(other / "scored.jsonl"), 1)]
    assert again == answered
    lines = lines_of(tmp_path / "labels.jsonl")
    assert len(lines) == 30 and lines[0].keys() == {
        *("schema_version", "group_id", "left", "right", "verdict", "digests", "time", "is_random")
    }  # fmt: skip
    assert PersonLabels(scored).report() == whole.report()


def test_ratings_of_clients_answer_the_pairs_that_nobody_has_answered(tmp_path: Path) -> None:
    labels = PersonLabels(write_scored(tmp_path / "scored.jsonl"))
    labels.answer(Pair("g0", "g0-3", "g0-0"), "right")  # a person disagrees with the clients
    ratings = {"g0-0": 0.0, "g0-3": 1.0, "g0-1": 1.0, "g1-2": 1.0, "unknown": 1.0}
    assert labels.answer_by(ratings) == 2 and labels.answer_by(ratings) == 0
    said = {frozenset((line["left"], line["right"])): line for line in lines_of(tmp_path / "labels.jsonl")}
    assert said[frozenset(("g0-0", "g0-3"))]["verdict"] == "right"
    assert said[frozenset(("g0-1", "g0-3"))]["verdict"] == "equal"
    low = said[frozenset(("g0-0", "g0-1"))]
    assert low[str(low["verdict"])] == "g0-1" and PersonLabels(tmp_path / "scored.jsonl").report().num_labels == 3


def test_a_label_is_of_the_attempts_that_were_shown(tmp_path: Path) -> None:
    """A different file in the directory has attempts with the same ids. Labels of older versions have no digests."""
    answer(PersonLabels(write_scored(tmp_path / "a.jsonl")), 5)
    other = write_scored(tmp_path / "b.jsonl")
    other.write_text(other.read_text().replace('"Q"', '"another question"'))
    report = PersonLabels(other).report()
    assert (report.num_labels, report.num_unknown) == (0, 5)
    old = [
        {key: value for key, value in line.items() if key != "digests"} for line in lines_of(tmp_path / "labels.jsonl")
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in old))
    assert PersonLabels(other).report().num_labels == 5


def test_the_last_half_of_a_line_is_cut_off_and_its_pair_is_asked_again(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    pairs = answer(PersonLabels(scored), 3)
    path = tmp_path / "labels.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert answer(PersonLabels(scored), 1) == pairs[2:]
    assert len(lines_of(path)) == 3


def test_one_pair_of_ten_is_asked_again_with_its_sides_swapped(tmp_path: Path) -> None:
    labels = PersonLabels(write_scored(tmp_path / "scored.jsonl"))
    pairs = answer(labels, 22)
    assert pairs[10] == pairs[0].swapped and pairs[21] == pairs[1].swapped
    assert labels.report().num_labels == 20 and labels.report().repeated == (2, 2)
    labels.answer(pairs[0], "undo")
    assert labels.report().num_labels == 20 and labels.next() == pairs[21]
    labels.answer(pairs[21], better(pairs[1]))  # the same side as before, which is the other attempt
    assert labels.report().repeated == (1, 2)


def test_undo_takes_back_the_last_answer_also_of_an_earlier_session_and_skip_gives_no_credit(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    labels = PersonLabels(scored)
    first, second = answer(labels, 2)
    after = PersonLabels(scored)
    after.answer(first, "undo")
    assert after.next() == second and after.report().num_labels == 1
    after.answer(second, "skip")
    assert after.next() not in (first, second, None)
    report = after.report()
    assert (report.num_labels, report.num_skipped) == (1, 1) and after.next() == PersonLabels(scored).next()
    for _ in range(3):
        after.answer(first, "undo")
    assert after.next() == first and after.report().accuracy is None


def test_when_all_pairs_are_answered_the_accuracy_is_exact_and_nothing_is_asked(tmp_path: Path) -> None:
    labels = PersonLabels(write_scored(tmp_path / "scored.jsonl", wrong=0.3))
    num = GROUPS * SIZE * (SIZE - 1) // 2
    answer(labels, num + num // 10)
    assert labels.next() is None
    report = labels.report()
    rewards = {row["id"]: row["reward"] for row in lines_of(tmp_path / "scored.jsonl")}
    right = 0.0
    for group in range(GROUPS):
        for low in range(SIZE):
            for high in range(low + 1, SIZE):
                one, other = rewards[f"g{group}-{low}"], rewards[f"g{group}-{high}"]
                right += 0.5 if one == other else float(other > one)  # type: ignore[operator]
    assert report.accuracy == pytest.approx((right / num,) * 3) and right / num < 0.95
    assert report.num_labels == num and report.num_needed == 0


def test_labels_of_other_files_are_counted_and_play_no_part(tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    labels = PersonLabels(scored)
    answer(labels, 5)
    before = labels.report()
    foreign = {"group_id": "g1", "left": "g1-0", "right": "elsewhere", "verdict": "left", "time": 0}
    with (tmp_path / "labels.jsonl").open("a") as file:
        file.write(json.dumps(foreign) + "\n" + json.dumps(foreign | {"left": "g2-0", "right": "g2-1"}) + "\n")
    after = PersonLabels(scored).report()
    assert after.num_unknown == 2 and (after.num_labels, after.accuracy) == (5, before.accuracy)


def test_verdicts_of_0_and_1_give_the_flip_rates_of_the_pairs_as_the_yaml_takes_them(tmp_path: Path) -> None:
    """The judge's verdict is wrong for attempts 1 of the groups 0 to 5, which get a 1."""
    path = tmp_path / "scored.jsonl"
    write_scored(path, is_verdict=True)
    rows = lines_of(path)
    for row in rows:
        row["reward"] = (
            1.0 if row["index"] in (2, 3) or (row["index"] == 1 and int(str(row["group_id"])[1:]) < 6) else 0.0
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = PersonLabels(path)
    while (pair := labels.next()) is not None:
        is_right = [name[-1] in "23" for name in (pair.left, pair.right)]
        labels.answer(pair, "equal" if is_right[0] == is_right[1] else "left" if is_right[0] else "right")
    noise = labels.report().noise
    assert noise == {"false_positive": 0.25, "false_negative": 0.0}  # of the 4 pairs of a group in 6 of 12 groups 2


def test_scores_give_no_rates_and_several_votes_their_own_setting(tmp_path: Path) -> None:
    single = PersonLabels(write_scored(tmp_path / "single.jsonl"))
    votes = PersonLabels(write_scored(tmp_path / "votes.jsonl", votes=3))
    assert single.report().noise is None and votes.report().noise == "votes"


def test_a_link_or_a_pipe_in_the_place_of_the_labels_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    scored, path = write_scored(tmp_path / "scored.jsonl"), tmp_path / "labels.jsonl"
    target = tmp_path / "target"
    target.write_text('{"half')
    path.symlink_to(target)
    with pytest.raises(RunError, match="not a regular file"):
        PersonLabels(scored)
    path.unlink()
    labels = PersonLabels(scored)
    pair = labels.next()
    assert pair is not None
    path.symlink_to(target)
    with pytest.raises(RunError, match="not a regular file"):
        labels.answer(pair, "left")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match="not a regular file"):
        labels.answer(pair, "left")
    assert target.read_text() == '{"half'


@pytest.mark.parametrize(
    "line",
    ["[]", "not json", '{"group_id": "g", "left": "a", "right": "b", "verdict": "\\u001b[2J", "time": 0}', "\xff\x00"],
)
def test_a_damaged_line_of_the_labels_is_named_with_its_place(line: str, tmp_path: Path) -> None:
    scored = write_scored(tmp_path / "scored.jsonl")
    (tmp_path / "labels.jsonl").write_text(line + "\n", encoding="latin-1")
    with pytest.raises(DataError, match=r"labels.jsonl:1: ") as error:
        PersonLabels(scored)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("change", [{"reward": 1e300}, {"scores": 7}, {"schema_version": 99}], ids=str)
def test_a_damaged_line_of_the_scored_file_is_named_with_its_place(change: dict[str, object], tmp_path: Path) -> None:
    path = write_scored(tmp_path / "scored.jsonl")
    rows = lines_of(path)
    path.write_text("".join(json.dumps(row | (change if at == 2 else {})) + "\n" for at, row in enumerate(rows)))
    with pytest.raises(DataError, match=r"scored.jsonl:\d: "):
        PersonLabels(path)


def test_messages_of_any_kind_are_shown_and_a_file_without_pairs_is_refused(tmp_path: Path) -> None:
    path = write_scored(tmp_path / "scored.jsonl")
    rows = lines_of(path)
    deep: object = "x"
    for _ in range(400):
        deep = [deep]
    odd: list[object] = [{"role": 7, "content": {"a": 1}}, {"content": None, "tool_calls": 3}, {"content": deep}, {}]
    path.write_text("".join(json.dumps(row | {"messages": odd}) + "\n" for row in rows))
    labels = PersonLabels(path)
    pair = labels.next()
    assert pair is not None and [len(each) for each in labels.load_messages(pair)] == [4, 4]
    path.write_text("".join(json.dumps(row | {"reward": None}) + "\n" for row in rows))
    with pytest.raises(UsageError, match="no two attempts"):
        PersonLabels(path)
    with pytest.raises(UsageError, match="no such file"):
        PersonLabels(tmp_path / "none.jsonl")
