"""FeedbackJudge: what clients said is the reward, and another judge scores the rest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from art_cli.cli.judging import choose_judge, least
from art_cli.config.sections.judge_config import FeedbackJudgeConfig
from art_cli.judges import Judge, Verdict, make_judge
from art_cli.judges.feedback_judge import FeedbackJudge
from art_cli.judges.judge_groups import judge_group
from art_cli.runs.durable import write_lines
from art_cli.runs.feedback import FeedbackEntry
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import JudgeError, UsageError


class Other(Judge):
    """Scores by id and remembers whom it was asked about."""

    settings = "other"

    def __init__(self, *, compares: bool) -> None:
        self.compares, self.asked = compares, list[list[str]]()

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        self.asked.append([each.id for each in group])
        return {each.id: Verdict(reward=0.25) for each in group}


def entry(conversation: str, metric: str, value: object, number: int = 0, **more: object) -> FeedbackEntry:
    fields = {"id": f"{conversation}{number}", "at": 1.0, "client": "key 1", "conversation": conversation}
    return msgspec.convert({**fields, "metric": metric, "value": value, **more}, FeedbackEntry)


def group(*ids: str) -> list[Trajectory]:
    return [Trajectory(id=id, group_id="g", group_size=len(ids), index=index) for index, id in enumerate(ids)]


@pytest.mark.parametrize("compares", [False, True])
async def test_feedback_is_the_reward_and_the_rest_is_judged(
    tmp_path: Path, compares: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A judge that compares sees the rated attempts, too. Replies 1 and 0 make 0.5; 3 minutes to minimize make -3."""
    write_lines(
        tmp_path / "feedback.jsonl",
        [
            entry("a", "thumbs", False, 0, reply="r1"),
            entry("a", "thumbs", True, 1, reply="r1"),
            entry("a", "thumbs", False, 2, reply="r2"),
            entry("a", "comment", "too long", 3),
            entry("b", "thumbs", True, 4),
            entry("b", "thumbs", None, 5),
            entry("c", "minutes", 3, 6, optimize="min"),
        ],
    )
    other = Other(compares=compares)
    config = FeedbackJudgeConfig(name="feedback", metric="thumbs")
    scored = await judge_group(FeedbackJudge(config, tmp_path, judges={"otherwise": other}), group("a", "b", "c"))
    assert [each.reward for each in scored] == [0.5, 0.25, 0.25] and scored[0].scores[0].explanation == "too long"
    assert other.asked == [["a", "b", "c"] if compares else ["b", "c"]]
    (timed,) = await judge_group(make_judge(config.model_copy(update={"metric": "minutes"}), tmp_path), group("c"))
    assert timed.reward == -3.0
    assert not caplog.text
    make_judge(config.model_copy(update={"metric": "thumb"}), tmp_path)
    assert "feedback.jsonl has no 'thumb'; it has: minutes, thumbs" in caplog.text
    with pytest.raises(JudgeError, match=r"no feedback 'thumbs'.*judge.otherwise"):
        await make_judge(config, tmp_path).judge(group("a", "b"))


async def test_a_rated_single_attempt_needs_no_comparison(tmp_path: Path) -> None:
    """Most conversations of a gateway are single. An unrated one is owed, and the ranking judge is not asked."""
    write_lines(tmp_path / "feedback.jsonl", [entry("a", "thumbs", True)])
    loaded = choose_judge(
        None, ["judge=feedback", "judge.metric=thumbs", "judge.otherwise=ruler"], beside=tmp_path / "x"
    )
    assert isinstance(loaded.config, FeedbackJudgeConfig) and least(loaded) == 1
    other = Other(compares=True)
    judge = FeedbackJudge(loaded.config, tmp_path, judges={"otherwise": other})
    assert [each.reward for each in await judge_group(judge, group("a"))] == [1.0]
    with pytest.raises(JudgeError, match="no feedback 'thumbs'.*this group has one"):
        await judge.judge(group("b"))
    assert other.asked == []


def test_new_feedback_makes_other_settings_and_the_file_stands_beside_the_trajectories(tmp_path: Path) -> None:
    """So `art judge` continues no file that was scored before the feedback came."""
    words = ["judge=feedback", "judge.metric=thumbs", "judge.otherwise=ruler"]
    loaded = choose_judge(None, words, beside=tmp_path / "seen.jsonl")
    with pytest.raises(UsageError, match=r"feedback\.jsonl: no such file"):
        make_judge(loaded.config, loaded.directory)
    write_lines(tmp_path / "feedback.jsonl", [entry("a", "thumbs", True)])
    before = make_judge(loaded.config, loaded.directory).settings
    assert make_judge(loaded.config, loaded.directory).settings == before
    write_lines(tmp_path / "feedback.jsonl", [entry("a", "thumbs", False)])
    assert make_judge(loaded.config, loaded.directory).settings != before
    assert json.loads(loaded.config.model_dump_json())["otherwise"]["name"] == "ruler"
