"""Rejection sampling: which attempts of a scored file are learned from, and with which tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from art_cli.config.schema import SftConfig
from art_cli.learners.samples import Sample
from art_cli.learners.sft.examples import best_attempts, example_samples, load_examples
from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import DataError, LearnerError
from tests.support.records.trees import scored, turn


def attempts(rewards: Sequence[float | None], group: str = "g") -> list[ScoredTrajectory]:
    """One attempt for each reward; None: it failed."""
    return [
        scored([turn([1, 2], [3, index])], reward, index=index, group=group, error=None if reward is not None else "x")
        for index, reward in enumerate(rewards)
    ]


def taken(path: Path, num: int, min_reward: float | None = None) -> list[str]:
    return [example["id"] for example in best_attempts(path, num, min_reward=min_reward)]


def samples(example: dict[str, object], vocabulary: int = 10) -> list[Sample]:
    return example_samples(example, None, name="", max_length=100, vocabulary=vocabulary)


def test_takes_the_best_of_each_group_that_are_better_than_its_worst(tmp_path: Path) -> None:
    path = tmp_path / "scored.jsonl"
    write_lines(
        path, [*attempts([0.0, 0.5, None, 1.0, 1.0, 0.0]), *attempts([1.0, 1.0], "all"), *attempts([None], "x")]
    )
    assert taken(path, 1) == ["g/3"]
    assert taken(path, 2) == ["g/3", "g/4"]
    assert taken(path, 9) == ["g/3", "g/4", "g/1"]
    assert taken(path, 1, min_reward=1.0) == ["g/3", "all/0"]
    assert taken(path, 9, min_reward=0.5) == ["g/3", "g/4", "g/1", "all/0", "all/1"]


def test_reads_all_steps_of_a_run_whose_groups_may_have_equal_names(tmp_path: Path) -> None:
    for step in (2, 10000):
        (tmp_path / f"step_{step:04d}").mkdir()
        write_lines(tmp_path / f"step_{step:04d}" / "scored.jsonl", attempts([0.0, float(step)]))
    assert taken(tmp_path, 1) == ["g/1", "g/1"]


def test_trains_exactly_the_sampled_tokens_and_no_abandoned_reply(tmp_path: Path) -> None:
    turns = [
        turn([1, 2], [3, 4], temperature=0.7),
        turn([5], [6], parent=0, kept=4),
        turn([7], [8], parent=0, kept=3),
        turn([5], [9], parent=0, kept=4, is_abandoned=True),
    ]
    write_lines(tmp_path / "scored.jsonl", [scored(turns, 1.0), scored(turns[:1], 0.0, index=1)])
    [example] = best_attempts(tmp_path / "scored.jsonl", 1)
    first, second = samples(example)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.token_ids[first.targets].tolist() == [3, 4, 6]
    assert first.temperatures.tolist() == [0.7, 0.7, 1.0]
    assert second.token_ids[second.targets].tolist() == [8]
    assert np.isnan(first.weights[[0, 2]]).all() and (first.weights[1] == 1).all()
    with pytest.raises(LearnerError, match="trajectory g/0.*another model sampled it"):
        samples(example, vocabulary=6)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (scored([turn([1], [2])], None), "its reward is None; score the file first with art judge"),
        (scored([], 1.0, messages=[{"role": "assistant", "content": "x"}]), "no token ids, so another tool"),
        (scored([turn([1], [2])], 1.0), "no attempt is better than the worst of its group"),
    ],
)
def test_refuses_a_file_that_it_cannot_learn_from(record: ScoredTrajectory, message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "scored.jsonl", [record])
    with pytest.raises(DataError, match=message):
        load_examples(SftConfig(demos="scored.jsonl", best_of=1), tmp_path)


def test_a_scored_file_is_no_file_of_transcripts(tmp_path: Path) -> None:
    """Without best_of every message of every attempt would be learned from, those of the worst too."""
    rows = attempts([0.0, 1.0])
    for row in rows:
        row.messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    write_lines(tmp_path / "scored.jsonl", rows)
    with pytest.raises(DataError, match=r"scored.jsonl:1: an attempt, not a transcript: .*--best-of"):
        load_examples(SftConfig(demos="scored.jsonl"), tmp_path)


def test_all_attempts_at_a_scenario_are_on_one_side_of_the_split(tmp_path: Path) -> None:
    groups = [
        scored([turn([1], [2])], 1.0, index=k % 4, group=f"g{k}", scenario={"id": f"s{k % 9}"}) for k in range(90)
    ]
    write_lines(tmp_path / "scored.jsonl", groups)
    config = SftConfig(demos="scored.jsonl", best_of=1, min_reward=1.0, held_out=0.4)
    parts = load_examples(config, tmp_path)
    trained, evaluated = ({example["scenario"] for example in part} for part in parts)
    assert trained and evaluated and not trained & evaluated
    assert sum(map(len, parts)) == 90
    with pytest.raises(DataError, match=r"sft.held_out = 1e-09 of 90 examples leaves none to evaluate on"):
        load_examples(config.model_copy(update={"held_out": 1e-9}), tmp_path)
