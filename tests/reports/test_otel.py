"""The trackers otel and langfuse against a loopback receiver: delivered data, and the cost of a bad receiver."""

import base64
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from art_cli.config.schema import LangfuseTrackerConfig, OtelTrackerConfig
from art_cli.reports.trackers import TrackedRun, make_tracker
from art_cli.reports.trackers.otel import MAX_BATCH, _batches
from art_cli.runtime.errors import UsageError
from tests.support.records.attempts import attempt, scored
from tests.support.servers.receiver import Receiver, receiving, values

CONFIG: dict[str, Any] = {"name": "mail", "model": {"base": "builtin:tiny"}}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


def groups(num: int) -> list[list[Any]]:
    return [[scored(f"s7-g{group}", index) for index in range(2)] for group in range(num)]


def test_each_group_of_a_step_and_of_an_evaluation_arrives(receiver: Receiver, tmp_path: Path) -> None:
    config = OtelTrackerConfig(name="otel", url=receiver.url, max_groups=3)
    tracker: Any = make_tracker(config, TrackedRun("mail", tmp_path, CONFIG), tmp_path)
    tracker.log_trajectories(7, groups(5))
    tracker.log_evaluation(8, [[attempt("e8-g0")]])
    tracker.close()
    roots = [values(span.attributes) for span in receiver.spans() if not span.parent_span_id]
    assert [each["art.group_id"] for each in roots] == ["s7-g0", "s7-g0", "s7-g1", "s7-g1", "s7-g2", "s7-g2", "e8-g0"]
    assert [each["art.split"] for each in roots] == ["train"] * 6 + ["eval"]
    assert {each["gen_ai.request.model"] for each in roots} == {"builtin:tiny"}


@pytest.mark.parametrize("status", [500, None])
def test_a_step_that_is_not_taken_is_lost_and_the_next_one_is_tried(
    status: int | None, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`status` None: the receiver hangs."""
    released = threading.Event()
    receiver.answer = lambda post: (status or 200, b"", {"x": "y" if status else str(released.wait(60))})
    config = OtelTrackerConfig(name="otel", url=receiver.url, timeout_s=0.2)
    tracker = make_tracker(config, TrackedRun("mail", tmp_path, CONFIG), tmp_path)
    with caplog.at_level(logging.WARNING):
        tracker.log_trajectories(0, groups(2))
        tracker.log_trajectories(1, groups(2))
        released.set()
        receiver.answer = lambda post: (200, b"", {})
        receiver.posts.clear()
        tracker.log_trajectories(2, groups(2))
        tracker.close()
    assert len({span.trace_id for span in receiver.spans()}) == 4
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("tracker otel: 127.0.0.1:") and first.endswith("; the next step is tried again")
    assert last == "tracker otel: 8 of 12 attempts were lost"


def test_langfuse_gets_observations_and_scores_under_its_keys(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk-lf-1")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-2")
    config = LangfuseTrackerConfig(name="langfuse", url=receiver.url + "/")
    tracker = make_tracker(config, TrackedRun("mail", tmp_path / "mail", CONFIG), tmp_path)
    tracker.log_trajectories(7, [[scored(error=None), scored("s7-g1", error="timeout: x", limit="turn_limit")]])
    tracker.close()
    assert [post.path for post in receiver.posts] == ["/api/public/otel/v1/traces", "/api/public/scores"]
    word = base64.b64encode(b"pk-lf-1:sk-lf-2").decode()
    assert {post.headers["authorization"] for post in receiver.posts} == {f"Basic {word}"}
    spans = [values(span.attributes) | {"trace": span.trace_id.hex()} for span in receiver.spans()]
    assert [each["langfuse.observation.type"] for each in spans[:5]] == [
        "agent", "generation", "tool", "generation", "evaluator",
    ]  # fmt: skip
    assert json.loads(spans[1]["langfuse.observation.usage_details"]) == {"input": 5, "output": 3}
    assert spans[2]["langfuse.observation.input"] == '{"query": "cheese"}'
    assert spans[2]["langfuse.observation.output"] == "1 mail of Ann"
    assert spans[0]["langfuse.trace.name"] == "mail train" and spans[0]["langfuse.trace.tags"] == ["train", "step-7"]
    assert "langfuse.observation.level" not in spans[0] and spans[5]["langfuse.observation.level"] == "ERROR"
    assert len({each["session.id"] for each in spans[:5]}) == 1 != len({each["session.id"] for each in spans})
    scores = json.loads(receiver.posts[1].body)
    assert [(each["name"], each["value"]) for each in scores[:3]] == [
        ("reward", 0.75), ("judge.ruler", 0.75), ("metric.found", 1.0),
    ]  # fmt: skip
    assert scores[1]["comment"] == "found at once" and scores[0]["traceId"] == spans[0]["trace"]
    assert len({each["id"] for each in scores}) == len(scores) == 6


def test_scores_go_in_requests_of_less_than_a_mebibyte() -> None:
    scores = [b'"%s"' % (b"a" * 16_000)] * 200
    batches = list(_batches(scores))
    assert [score for batch in batches for score in batch] == scores and len(batches) == 4
    assert max(sum(map(len, batch)) + len(batch) for batch in batches) <= MAX_BATCH
    assert [len(batch) for batch in _batches([b"1"] * 1200)] == [500, 500, 200]


def test_keys_come_from_the_environment_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY", raising=False)
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "sk-lf-2")
    run = TrackedRun("mail", tmp_path, CONFIG)
    with pytest.raises(UsageError, match="LANGFUSE_PUBLIC_KEY not set"):
        make_tracker(LangfuseTrackerConfig(name="langfuse"), run, tmp_path)
    for url in ("http://pk:sk@host", "host:3000"):
        with pytest.raises(UsageError) as caught:
            make_tracker(OtelTrackerConfig(name="otel", url=url), run, tmp_path)
        assert "sk" not in str(caught.value)
