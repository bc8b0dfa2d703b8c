"""Labels for a run's steps: a test with bounded false alarms, and the choice of questions."""

import itertools
import json
import math
import random
import re
from pathlib import Path

import pytest

from art_cli.judges.files.person_labels import Pair, PersonLabels
from art_cli.judges.files.run_labels import OrderedPair, RunLabels, find_fall, largest_fall, shares
from art_cli.reports.run_report import read_report
from art_cli.runs.parting import LEVEL
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import UsageError
from tests.judges.test_person_labels import write_scored
from tests.support.processes.forked import run as forked

STEPS, ONSET = 60, 31


def simulated(draw: random.Random, num: int, *, before: float, since: float) -> list[OrderedPair]:
    """Answers about random steps, of a judge that orders a share of the pairs as the person does."""
    steps = [draw.randint(1, STEPS) for _ in range(num)]
    return [OrderedPair(n, step, draw.random() < (before if step < ONSET else since)) for n, step in enumerate(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("num", [45, 101])
def test_of_runs_whose_agreement_stays_at_most_the_stated_share_has_an_alarm(num: int) -> None:
    """1,000 runs. By chance alone 18 or more of them would exceed a level of 1 % once in 70 times."""
    draw = random.Random(0)
    alarms = 0
    for _ in range(1000):
        share = draw.choice([0.5, 0.7, 0.9])
        alarms += find_fall(simulated(draw, num, before=share, since=share)) is not None
    assert alarms <= 1000 * LEVEL + 8


@pytest.mark.slow
def test_a_judge_that_comes_to_err_is_found_with_its_step() -> None:
    draw, found = random.Random(2), []
    for _ in range(100):
        found.append(find_fall(simulated(draw, 151, before=0.92, since=0.5)))
    onsets = [each.onset for each in found if each is not None]
    assert len(onsets) >= 95
    assert sum(abs(onset - ONSET) <= 6 for onset in onsets) >= 0.7 * len(onsets)


def test_a_judge_that_gets_better_raises_no_alarm() -> None:
    answers = simulated(random.Random(3), 100, before=0.5, since=0.95)
    assert find_fall(answers) is None


@pytest.mark.parametrize("steps", [[1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 2, 2, 2, 5, 5, 9], [1, 1, 1, 1, 1, 1, 1, 2]])
def test_the_probability_is_that_of_all_orders(steps: list[int]) -> None:
    """By counting every order of the alike pairs, of each number of them."""

    def largest(alike: tuple[int, ...]) -> float:
        num, total = len(alike), sum(alike)
        falls = [
            (sum(alike[:at]) - total * at / num) / math.sqrt(at * (num - at))
            for at in range(1, num)
            if steps[at - 1] < steps[at]
        ]
        return max(falls)

    for order in itertools.product([0, 1], repeat=len(steps)):
        same = [other for other in itertools.product([0, 1], repeat=len(steps)) if sum(other) == sum(order)]
        expected = sum(largest(other) >= largest(order) - 1e-9 for other in same) / len(same)
        found, _ = largest_fall([OrderedPair(0.0, step, bool(each)) for step, each in zip(steps, order, strict=True)])
        assert found == pytest.approx(expected)


def test_an_alarm_stays_however_many_labels_follow() -> None:
    answers = simulated(random.Random(2), 152, before=0.95, since=0.4)
    found = find_fall(answers)
    assert found is not None
    first = next(num for num in range(len(answers) + 1) if find_fall(answers[:num]) is not None)
    assert [find_fall(answers[:num]) for num in range(first, 153, 20)] == [found] * len(range(first, 153, 20))
    assert find_fall(list(reversed(answers))) == found, "the times count, not the order of the lines"
    assert find_fall([]) is None and shares([]) == []
    assert [find_fall([each._replace(step=7) for each in answers])] == [None], "one step has no earlier ones"


# --- a run's files ----------------------------------------------------------------------------------------------------


def project(tmp_path: Path, *, num_steps: int = 12) -> RunDir:
    """A run whose groups have the names that training gives them, one step of them without a difference."""
    run = RunDir(tmp_path / "mine")
    for step in range(num_steps):
        path = write_scored(run.scored_path(step))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["group_id"] = f"{step:04d}-{line['group_id']}"
            line["reward"] = 0.5 if step == 4 else line["reward"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run.append_metrics(step, "train", {"reward_mean": 0.5})
    return run


def label(run: RunDir, num: int, *, wrong_from: int) -> list[Pair]:
    """A person who orders attempts as the judge does in the steps before `wrong_from`, the other way round since."""
    labels, pairs = RunLabels(run), []
    for _ in range(num):
        pair = labels.next()
        assert pair is not None and pair == labels.next(), "the same question until it is answered"
        is_wrong = int(pair.group_id[:4]) + 1 >= wrong_from
        labels.answer(pair, "left" if (pair.left[-1] > pair.right[-1]) != is_wrong else "right")
        pairs.append(pair)
    return pairs


def test_each_step_gets_as_many_questions_and_steps_without_any_order_none(tmp_path: Path) -> None:
    run = project(tmp_path)
    pairs = label(run, 20, wrong_from=99) + label(run, 24, wrong_from=99)
    assert len(set(pairs)) == len(pairs)
    assert [sum(pair.group_id.startswith(f"{step:04d}") for pair in pairs) for step in range(12)] == [
        4 * (step != 4) for step in range(12)
    ]
    assert RunLabels(run).report().parted == "" and RunLabels(run).report().num_labels == 44


@pytest.mark.slow
def test_a_run_whose_judge_comes_to_err_has_the_finding_in_its_report(tmp_path: Path) -> None:
    run = project(tmp_path)
    label(run, 44, wrong_from=8)
    report = read_report(run)
    [finding] = [each for each in report.findings if each.kind == "parted"]
    assert finding.step == 8 and "judge and labels part since step 8 (false in at most 1% of runs): they order" in (
        finding.text
    )
    assert "1.00 of 24 pairs alike before, 0.00 of 20 since" in finding.text
    assert report.series["labels/alike"][0] == (3, 1.0) and report.series["labels/alike"][-1] == (12, 0.0)
    done = forked(["report", str(run.root)], timeout=60)
    assert done.returncode == 0 and "step 8 to 12: reward and anchor parted: judge and labels part" in done.stdout
    assert re.search(r"labels/alike +1 .* 0\n", done.stdout)
    done = forked(["label", str(run.root), "--report"], timeout=60)
    assert done.returncode == 0 and "1.00 up to step 3, " in done.stdout and finding.text in done.stdout
    done = forked(["label", str(run.root), "--json"], timeout=60)
    assert json.loads(done.stdout)["num_labels"] == 44


def test_pairs_that_were_not_drawn_at_random_do_not_count(tmp_path: Path) -> None:
    """On the page of a step, or with `art label FILE`, hard pairs are asked about first."""
    run = project(tmp_path)
    label(run, 6, wrong_from=99)
    chosen = PersonLabels(run.scored_path(11))
    for _ in range(12):
        pair = chosen.next()
        assert pair is not None
        chosen.answer(pair, "left")
    assert len(RunLabels(run).answers()) == 6


def test_undo_goes_back_over_steps_and_equal_and_skipped_pairs_do_not_count(tmp_path: Path) -> None:
    run = project(tmp_path)
    labels = RunLabels(run)
    for verdict in ("left", "right", "equal", "skip"):
        pair = labels.next()
        assert pair is not None
        labels.answer(pair, verdict)  # type: ignore[arg-type]
    assert len(labels.answers()) == 2 == len(RunLabels(run).answers())
    for _ in range(5):
        labels.answer(pair, "undo")
    assert RunLabels(run).answers() == []


@pytest.mark.slow
def test_damaged_labels_are_left_out_of_a_report_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = project(tmp_path)
    label(run, 3, wrong_from=99)
    path = next(run.root.glob("step_*/labels.jsonl"))
    path.write_text('{"group_id": 7}\n')
    assert read_report(run).series["labels/alike"][0][1] == 1.0 and "its labels are skipped" in caplog.text
    done = forked(["label", str(run.root), "--report"], timeout=60)
    assert done.returncode == 0 and "labels    2 pairs" in done.stdout and f"{path}:1: " in done.stderr
    with pytest.raises(UsageError, match="no step"):
        RunLabels(RunDir(tmp_path / "none")).report()
