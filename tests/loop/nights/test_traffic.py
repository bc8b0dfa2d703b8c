"""What `art improve` reads from a gateway's files: scenarios and ratings, also from files that somebody changed."""

from pathlib import Path
from typing import Any

import pytest

from art_cli.config.sections.improve_config import CanaryConfig, ImproveConfig
from art_cli.loop.nights.canary_test import Rating
from art_cli.loop.nights.traffic import Traffic, count_unwritten, read_ratings, read_traffic
from art_cli.runs.durable import write_lines
from art_cli.runs.feedback import FeedbackEntry
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import DataError, UsageError

Json = dict[str, Any]
LONG = "please tell me when my order with the long number arrives at the house of my aunt in the north"


def conversation(number: int, text: str, **more: Any) -> Trajectory:
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": "Monday"}]
    id = f"{number:032x}"
    fields: Json = {"id": id, "group_id": id, "group_size": 1, "index": 0, "messages": said, "started_at": number}
    return Trajectory(**fields | more)


def read(directory: Path, scenario: str | None = None, tested: list[Json] | None = None, **knobs: Any) -> Traffic:
    config = ImproveConfig(canary=CanaryConfig(metric="solved"), scenario=scenario, **knobs)
    return read_traffic(config, [directory], directory, read_before=set(), tested=tested or [])


def test_near_duplicates_and_failures_are_left_out_and_the_newest_kept(tmp_path: Path) -> None:
    first = [conversation(1, f"{LONG} 1"), conversation(2, "hello"), conversation(3, "x", error="timeout: late")]
    write_lines(tmp_path / "trajectories-20260101-000000.jsonl", first)
    write_lines(tmp_path / "trajectories-20260102-000000.jsonl", [conversation(4, f"{LONG} 2"), conversation(5, "bye")])
    found = read(tmp_path)
    assert [each["messages"][0]["content"] for each in found.scenarios] == ["hello", f"{LONG} 2", "bye"]
    assert (found.num_conversations, len(found.files)) == (4, 2)
    assert len({each["id"] for each in found.scenarios}) == 3
    assert len(read(tmp_path, max_scenarios=1).scenarios) == 1
    like = [{"id": "h", "messages": [{"role": "user", "content": f"{LONG} 7"}], "tools": []}]
    assert [each["messages"][0]["content"] for each in read(tmp_path, tested=like).scenarios] == ["hello", "bye"]


def test_a_long_system_prompt_and_tools_make_no_near_duplicates(tmp_path: Path) -> None:
    system, tools = {"role": "system", "content": LONG * 9}, [{"type": "function", "function": {"name": LONG}}]
    asked = ["where is my order", "cancel it", "Cancel it!", "who are you"]
    found = [
        conversation(number, "", messages=[system, {"role": "user", "content": text}], tools=tools)
        for number, text in enumerate(asked)
    ]
    write_lines(tmp_path / "trajectories-20260101-000000.jsonl", found)
    kept = [each["messages"][1]["content"] for each in read(tmp_path).scenarios]
    assert kept == ["where is my order", "Cancel it!", "who are you"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", "JSON object or None"),
        ("return {'id': {}}", "id"),
        ("return {'a': object()}", "plain JSON"),
        ("raise KeyError('x')", "KeyError"),
    ],
)
def test_a_wrong_function_is_one_line(tmp_path: Path, body: str, message: str) -> None:
    write_lines(tmp_path / "trajectories-20260101-000000.jsonl", [conversation(1, "hello")])
    (tmp_path / f"t{abs(hash(body))}.py").write_text(f"def f(conversation, feedback):\n    {body}\n")
    with pytest.raises(DataError, match=message) as error:
        read(tmp_path, f"t{abs(hash(body))}.py:f")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError):
        read(tmp_path, "nothing.py:f")


def test_a_conversation_that_breaks_the_function_stops_no_night(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = [conversation(number, f"{number} things to ask") for number in range(3)]
    write_lines(tmp_path / "trajectories-20260101-000000.jsonl", [*found, conversation(3, "", messages=[{}])])
    (tmp_path / "own.py").write_text("def f(conversation, feedback):\n    return {'a': conversation['messages'][-2]}\n")
    assert len(read(tmp_path, "own.py:f").scenarios) == 3
    assert "1 of 4 conversations gave no scenario" in caplog.text and "IndexError" in caplog.text


def test_the_first_rating_of_a_conversation_during_the_canary_counts(tmp_path: Path) -> None:
    def entry(number: int, conversation: str, policy: str, value: Any, **more: Any) -> FeedbackEntry:
        fields: Json = {"id": str(number), "at": 100.0 + number, "client": "key 1", "answered_at": 50.0}
        fields |= {"metric": "solved", "conversation": conversation, "policy": policy, "value": value}
        return FeedbackEntry(**fields | more)

    entries = [
        entry(0, "old", "new", True, answered_at=49.0),  # answered before the canary
        entry(1, "a", "new", True, tags={"user": "u1"}),
        entry(2, "a", "new", False),  # a change of mind
        entry(3, "b", "base", 7.0),  # beyond 1
        entry(4, "c", "base", None),  # withdrawn before it counted
        entry(5, "d", "new", "text", metric="comment"),
        entry(6, "e", "other", True),  # a policy of another night
        entry(7, "f", "new", 0.25, optimize="min"),
    ]
    write_lines(tmp_path / "feedback.jsonl", entries)
    found = list(read_ratings([tmp_path], "solved", promoted="base", candidate="new", since=50.0))
    assert found == [
        Rating(True, 1.0, "0/key 1", "u1"),
        Rating(False, 1.0, "0/key 1"),
        Rating(True, 0.75, "0/key 1"),
    ]


def test_calls_that_are_not_in_a_trajectory_file_yet_are_counted(tmp_path: Path) -> None:
    for name, num in (("calls-20261129-000000", 2), ("calls-20261129-000001", 3), ("trajectories-20261129-000000", 9)):
        (tmp_path / f"{name}.jsonl").write_text("{}\n" * num)
    assert count_unwritten([tmp_path, tmp_path / "none"]) == 5


def test_scored_files_beside_the_traffic_are_no_traffic(tmp_path: Path) -> None:
    """`art judge FILE` writes FILE's name with .scored before the ending."""
    for name in ("trajectories-20260101-000000", "trajectories-20260101-000000.scored"):
        write_lines(tmp_path / f"{name}.jsonl", [conversation(number, f"ask {number}") for number in range(3)])
    assert read(tmp_path).num_conversations == 3


def test_clients_of_different_gateways_are_different_clients(tmp_path: Path) -> None:
    """Each gateway numbers its own keys."""
    for name in ("one", "other"):
        fields: Json = {"id": name, "at": 1.0, "client": "key 1", "answered_at": 1.0, "metric": "solved"}
        entry = FeedbackEntry(**fields, conversation=name, policy="new", value=True)
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "feedback.jsonl", [entry])
    places = [tmp_path / "one", tmp_path / "other"]
    found = list(read_ratings(places, "solved", promoted="base", candidate="new", since=0.0))
    assert len({rating.client for rating in found}) == 2
