"""`POST /v1/feedback` on `art gateway`: what counts, for whom, how often, and that it is on the disk."""

import asyncio
import contextlib
import json
import sqlite3
import tracemalloc
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from art_cli.chat.replies import Reply
from art_cli.config.schema import FeedbackMetricConfig, RedactConfig
from art_cli.learners.sft.examples import best_attempts
from art_cli.runs.durable import LineWriter, read_lines, write_lines
from art_cli.runs.feedback import FeedbackEntry, latest, rating
from art_cli.runs.trajectory import score_trajectory
from art_cli.runtime.errors import DataError
from art_cli.serving.gateway.client_names import name_clients
from art_cli.serving.gateway.entries import CapturedCall, JournalEntry
from art_cli.serving.gateway.feedback_service import FeedbackLog, new_id
from art_cli.serving.gateway.journal import Journal
from art_cli.serving.gateway.reply_index import Answered, ReplyIndex, episode_keys
from tests.serving.test_capture import ANN, BOB, Standing, numbered, standing, written
from tests.support.standins.scripted import ScriptedBackend
from tests.view.serving import asking

Json = dict[str, Any]
METRICS = {
    "thumbs": FeedbackMetricConfig(type="boolean"),
    "solved": FeedbackMetricConfig(type="boolean", level="conversation"),
    "minutes": FeedbackMetricConfig(type="float", level="conversation", optimize="min"),
}


async def rate(
    gateway: Standing, body: Json | bytes, *, key: str = ANN, path: str = "/v1/feedback", **more: str
) -> Any:
    head = {"authorization": f"Bearer {key}", "content-type": "application/json", **more}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await gateway.http.post(path, content=content, headers=head)


async def rated(gateway: Standing, body: Json, **more: str) -> str:
    response = await rate(gateway, body, **more)
    assert response.status_code == 200, response.text
    return str(response.json()["feedback_id"])


async def reply_id(gateway: Standing, *messages: str, **more: str) -> str:
    response = await gateway.ask(*(messages or ("how?",)), **more)
    return str(response.json()["id"])


def test_an_entry_takes_little_memory(tmp_path: Path) -> None:
    """All entries of the file are kept, without their values; 400 bytes each."""
    path, num = tmp_path / "feedback.jsonl", 2000
    text = "x" * 1000
    entries = (
        FeedbackEntry(
            id=new_id(), at=1.0, client="key 2", conversation=uuid.uuid4().hex, reply=uuid.uuid4().hex,
            metric="comment", value=text, tags={"user": "ann"},
        )
        for _ in range(num)
    )  # fmt: skip
    write_lines(path, entries)
    with LineWriter(path) as writer:
        tracemalloc.start()
        try:
            log = FeedbackLog(writer)
            taken = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
    assert len(log._counts) == num and taken < 600 * num


def lines(directory: Path) -> list[FeedbackEntry]:
    return list(read_lines(directory / "feedback.jsonl", FeedbackEntry))


async def test_feedback_is_counted_once_amended_and_withdrawn(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        id = await reply_id(gateway)
        body: Json = {"metric_name": "thumbs", "value": True, "inference_id": id, "tags": {"user": "7"}}
        first = await rated(gateway, body)
        assert await rated(gateway, body) == first and uuid.UUID(first).version == 7
        assert await rated(gateway, body | {"dryrun": True}) not in ("", first) and len(lines(tmp_path)) == 1
        changed = await rated(gateway, body | {"value": False})
        (entries,) = latest(tmp_path).values()
        assert changed != first and (rating(entries, "thumbs"), entries[0].tags) == (0.0, {"user": "7"})
        assert await rated(gateway, body | {"value": None, "tags": {}}) == await rated(
            gateway, body | {"value": None, "tags": {}}
        )
        assert latest(tmp_path) == {} and len(lines(tmp_path)) == 3

        again = await rated(gateway, body, **{"idempotency-key": "k1"})
        head = {"authorization": f"Bearer {ANN}"}
        for _ in range(2):
            gone = await gateway.http.delete(f"/v1/feedback/{again}", headers=head)
            assert gone.json() == {"feedback_id": again}
        assert latest(tmp_path) == {} and len(lines(tmp_path)) == 5
        # a double that comes after the withdrawal counts no second time, because its key was seen
        assert await rated(gateway, body, **{"idempotency-key": "k1"}) == again and latest(tmp_path) == {}
        assert (await rate(gateway, body | {"value": False}, **{"idempotency-key": "k1"})).status_code == 400
        other = {"authorization": f"Bearer {BOB}"}
        assert (await gateway.http.delete(f"/v1/feedback/{again}", headers=other)).status_code == 404
    assert len(lines(tmp_path)) == 5


async def test_a_body_with_a_key_that_came_as_a_double_is_no_later_change_of_mind(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        body: Json = {"metric_name": "thumbs", "value": True, "inference_id": await reply_id(gateway)}
        first = await rated(gateway, body)
        assert await rated(gateway, body, **{"idempotency-key": "k1"}) == first
        await rated(gateway, body | {"value": False})
        assert await rated(gateway, body, **{"idempotency-key": "k1"}) == first
    assert [entry.value for entries in latest(tmp_path).values() for entry in entries] == [False]


async def test_a_conversation_is_named_by_its_id_its_name_or_one_of_its_replies(tmp_path: Path) -> None:
    """The mean of a reply's metric is the conversation's; a metric to minimize is negated."""
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        ids = [await reply_id(gateway, "how?", X_Art_Conversation="chat 7") for _ in range(2)]
        await rated(gateway, {"metric_name": "minutes", "value": 3, "episode_id": "chat 7"})
        await rated(gateway, {"metric_name": "solved", "value": True, "inference_id": ids[0]})
        (trajectory,) = latest(tmp_path)
        await rated(gateway, {"metric_name": "solved", "value": False, "episode_id": str(uuid.UUID(trajectory))})
        for id, value in zip(ids, (True, False), strict=True):
            await rated(gateway, {"metric_name": "thumbs", "value": value, "inference_id": str(uuid.UUID(id[9:]))})
    assert [each.id for each in written(tmp_path)] == [trajectory]
    ratings = {metric: rating(latest(tmp_path)[trajectory], metric) for metric in (*METRICS, "comment")}
    assert ratings == {"thumbs": 0.5, "solved": 0.0, "minutes": -3.0, "comment": None}


async def test_a_conversation_of_a_long_name_can_be_rated(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(), feedback=METRICS) as gateway:
        for name in ("a" * 300, "é" * 300):
            await gateway.ask("how?", X_Art_Conversation=quote(name))
            await rated(gateway, {"metric_name": "solved", "value": True, "episode_id": name})
    assert len({entry.conversation for entry in lines(tmp_path)}) == 2


async def test_a_conversation_whose_name_is_not_ascii_can_be_rated(tmp_path: Path) -> None:
    """Clients send the name percent-encoded, as UTF-8 or as Latin-1, in the header or in the key."""
    body: Json = {"model": "policy", "messages": [{"role": "user", "content": "how?"}]}
    key = f"Bearer {ANN}"
    heads: dict[str, dict[str, str | bytes]] = {
        "Gespräch 1": {"x-art-conversation": quote("Gespräch 1"), "authorization": key},
        "会話 2": {"x-art-conversation": "会話 2".encode(), "authorization": key},
        "Gespräch 3": {"x-art-conversation": "Gespräch 3".encode("latin-1"), "authorization": key},
        "会話 100%": {"authorization": f"{key}:会話 100%".encode()},
    }
    async with standing(tmp_path, ScriptedBackend(), feedback=METRICS) as gateway:
        for name, head in heads.items():
            sent = [(field, value.encode() if isinstance(value, str) else value) for field, value in head.items()]
            assert (await gateway.http.post("/v1/chat/completions", json=body, headers=sent)).status_code == 200
            await rated(gateway, {"metric_name": "solved", "value": True, "episode_id": name})
    assert [each.metadata["conversation"] for each in written(tmp_path)] == list(heads)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"metric_name": "demonstration", "value": [{"type": "text", "text": "x", "foo": 1}]}, "value[0].foo"),
    ],
)
async def test_a_field_that_does_not_exist_is_named(tmp_path: Path, more: Json, param: str) -> None:
    async with standing(tmp_path, ScriptedBackend(), feedback=METRICS) as gateway:
        body = {"metric_name": "thumbs", "value": True, "inference_id": await reply_id(gateway), **more}
        error = (await rate(gateway, body)).json()["error"]
    assert (error["message"], error["param"]) == (f"{param}: unknown field", param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_each_protocol_has_an_id_to_rate_also_while_streaming(tmp_path: Path, path: str) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        said = [{"role": "user", "content": "how?"}]
        asked: Json = {"input": said} if "responses" in path else {"messages": said, "max_tokens": 9}
        body = {"model": "policy", **asked}
        head = {"authorization": f"Bearer {ANN}", "x-api-key": ANN}
        whole = (await gateway.http.post(path, json=body, headers=head)).json()["id"]
        streamed = (await gateway.http.post(path, json=body | {"stream": True}, headers=head)).text
        first = json.loads(next(line for line in streamed.splitlines() if line.startswith("data:"))[5:])
        ids = {whole, (first.get("message") or first.get("response") or first)["id"]}
        for id in ids:
            await rated(gateway, {"metric_name": "thumbs", "value": True, "inference_id": id})
    assert len(ids) == 2 and {entry.reply for entry in lines(tmp_path)} == {
        id.split("_")[-1].split("-")[-1] for id in ids
    }


async def test_what_is_wrong_is_refused_with_its_reason_and_stores_nothing(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        id = await reply_id(gateway)
        good: Json = {"metric_name": "thumbs", "value": True, "inference_id": id}
        refused: list[tuple[Json | bytes, int]] = [
            (good | {"metric_name": "stars"}, 400),
            (good | {"metric_name": "stars", "value": None}, 400),
            (good | {"value": 1}, 400),
            (good | {"value": "yes"}, 400),
            (good | {"metric_name": "minutes", "value": True}, 400),
            (good | {"metric_name": "minutes", "value": 10**400}, 400),
            (good | {"metric_name": "comment", "value": 3}, 400),
            (good | {"metric_name": "demonstration", "value": [{"type": "image", "url": "x"}]}, 400),
            (good | {"metric_name": "demonstration", "value": []}, 400),
            (good | {"tags": {"a": 1}}, 400),
            (good | {"episode_id": "chat"}, 400),
            (good | {"extra": 1}, 400),
            ({"metric_name": "thumbs", "value": True}, 400),
            ({"metric_name": "thumbs", "inference_id": id}, 400),
            ({"metric_name": "thumbs", "value": True, "episode_id": "chat"}, 400),
            (good | {"value": None}, 404),
            (good | {"inference_id": "chatcmpl-" + "0" * 32}, 404),
            (good | {"inference_id": "nonsense"}, 404),
            ({"metric_name": "solved", "value": True, "episode_id": "no such"}, 404),
            (b'{"metric_name": "minutes", "value": NaN, "inference_id": "x"}', 400),
            (b'{"metric_name": "minutes", "value": 1e999, "inference_id": "x"}', 400),
            (b'{"metric_name": "comment", "value": "\x01", "inference_id": "x"}', 400),
            (b'{"metric_name": "comment", "value": "\\ud800", "inference_id": "x"}', 400),
            (b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
            (b"[]", 400),
            (b" " * (2**20 + 1), 413),
        ]
        for body, status in refused:
            response = await rate(gateway, body)
            assert (response.status_code, "\n" in response.json()["error"]["message"]) == (status, False), body
        for stranger in (BOB, "sk-nobody-00000000"):
            response = await rate(gateway, good, key=stranger)
            assert response.status_code == (404 if stranger == BOB else 401)
        assert "gateway.feedback" in (await rate(gateway, good | {"metric_name": "stars"})).json()["error"]["message"]
    assert lines(tmp_path) == []


async def test_feedback_days_later_finds_calls_of_earlier_files_and_processes(tmp_path: Path) -> None:
    """The gateway is killed after the first call; the second start writes both conversations' files."""
    ids = []
    for is_killed in (True, False):
        async with standing(tmp_path, ScriptedBackend(numbered()), is_killed=is_killed) as gateway:
            ids.append(await reply_id(gateway, f"question {is_killed}"))
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        for id in ids:
            await rated(gateway, {"metric_name": "thumbs", "value": True, "inference_id": id})
            assert (
                await rate(gateway, {"metric_name": "thumbs", "value": True, "inference_id": id}, key=BOB)
            ).status_code == 404
        before = lines(tmp_path)
    assert latest(tmp_path).keys() == {each.id for each in written(tmp_path)}
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        body = {"metric_name": "thumbs", "value": True, "inference_id": ids[0]}
        assert await rated(gateway, body) == before[0].id and lines(tmp_path) == before


async def test_a_key_that_takes_anothers_place_in_the_file_is_another_client(tmp_path: Path) -> None:
    cat = "sk-cat-0123456789abcdef"
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        of_ann, of_bob = [await reply_id(gateway, key=key) for key in (ANN, BOB)]
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS, keys=[cat, BOB, ANN]) as gateway:
        body = {"metric_name": "thumbs", "value": True, "inference_id": of_ann}
        assert (await rate(gateway, body, key=cat)).status_code == 404
        await rated(gateway, body, key=ANN)
        await rated(gateway, {**body, "inference_id": of_bob}, key=BOB)
        await rated(gateway, {**body, "inference_id": await reply_id(gateway, key=cat)}, key=cat)
    assert [each.client for each in lines(tmp_path)] == ["key 1", "key 2", "key 3"]
    known = (tmp_path / "clients.json").read_text()
    assert not any(key in known for key in (ANN, BOB, cat))
    (tmp_path / "clients.json").write_text('{"salt": 1}')
    with pytest.raises(DataError, match="not a list of clients"):
        name_clients(tmp_path, [ANN])


async def test_an_index_of_an_earlier_version_is_brought_up_to_date_also_after_a_kill(tmp_path: Path) -> None:
    for number, columns in enumerate(("", ", policy TEXT DEFAULT ''")):
        path = tmp_path / f"{number}.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as old, old:
            old.execute(
                f"CREATE TABLE names (client TEXT, id TEXT, conversation TEXT{columns}, PRIMARY KEY (client, id))"
            )
            old.execute("INSERT INTO names (client, id, conversation) VALUES ('key 1', 'reply a', 'before')")
        index = ReplyIndex(path)
        index.add({("key 1", "reply b"): Answered("now", "9f3c", 5.0)})
        assert index.find("key 1", "reply a") == Answered("before")
        assert index.find("key 1", "reply b") == Answered("now", "9f3c", 5.0)
        index.close()


async def test_a_conversation_belongs_to_the_policy_that_answered_last_also_after_a_rotation(tmp_path: Path) -> None:
    """A rotation copies earlier calls behind later ones."""
    id = "c" * 32

    def entry(number: int, policy: str) -> JournalEntry:
        reply = Reply(id=f"{number:032x}", created=0, model="m", choices=[], prompt_ids=[], policy=policy)
        call = CapturedCall(messages=[], reply=reply)
        return JournalEntry(conversation=id, number=number, at=float(number), client="key 1", call=call)

    entries = [entry(2, "new"), entry(0, "old"), entry(1, "old")]
    write_lines(tmp_path / "calls-20260101-000000.jsonl", entries)
    with Journal(tmp_path, group_size=4, rotate_bytes=1e9, rotate_s=1e9) as journal:
        assert await journal.find("key 1", episode_keys(id)) == Answered(id, "new", 2.0)


async def test_feedback_is_redacted_like_calls(tmp_path: Path) -> None:
    rules = RedactConfig(patterns=[r"\d{3}-\d{2}-\d{4}"], keys=["password"])
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS, redact=rules) as gateway:
        id = await reply_id(gateway)
        blocks = [
            {"type": "text", "text": "call 123-45-6789"},
            {"type": "tool_call", "name": "login", "arguments": {"password": "hunter2", "user": "ann"}},
        ]
        for name, value in (("comment", f"my key is {ANN}, 123-45-6789"), ("demonstration", blocks)):
            tags = {"password": "hunter2", "ssn": "123-45-6789", "place": "here"}
            await rated(gateway, {"metric_name": name, "value": value, "inference_id": id, "tags": tags})
    text = (tmp_path / "feedback.jsonl").read_text()
    assert not any(secret in text for secret in (ANN, "123-45", "hunter2"))
    comment, edited = lines(tmp_path)
    assert comment.value == "my key is ***, [redacted]" and comment.tags["place"] == "here"
    assert isinstance(edited.value, dict) and edited.value["content"] == "call [redacted]"
    (call,) = edited.value["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"password": "[redacted]", "user": "ann"}


async def test_names_that_redaction_would_make_equal_stay_different(tmp_path: Path) -> None:
    """Conversations named by telephone numbers, and users as well. Also after a restart, and without any key."""
    redact = {"patterns": [r"\+\d+"]}
    numbers = ("+4915112345678", "+4915199999999")
    for keys in ((ANN, BOB), ()):
        place = tmp_path / str(len(keys))
        for value in (True, False):
            async with standing(
                place, ScriptedBackend(numbered()), keys=keys, feedback=METRICS, redact=redact
            ) as gateway:
                for number in numbers:
                    await reply_id(gateway, "how?", X_Art_Conversation=number)
                    rating_of = {"metric_name": "solved", "value": value, "episode_id": number}
                    await rated(gateway, rating_of | {"tags": {"user": number}})
        assert len(lines(place)) == 4 and len({entry.tags["user"] for entry in lines(place)}) == 2
        assert len(latest(place)) == len({each.id for each in written(place)}) == 4
        assert not any(number in path.read_text() for path in place.glob("*.jsonl") for number in numbers)


async def test_feedback_is_refused_after_its_file_was_moved(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        body: Json = {"metric_name": "thumbs", "value": True, "inference_id": await reply_id(gateway)}
        (tmp_path / "feedback.jsonl").rename(tmp_path / "feedback.old")
        answer = await rate(gateway, body)
        assert (answer.status_code, "restart the gateway" in answer.text) == (503, True)
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        await rated(gateway, body)
    assert len(lines(tmp_path)) == 1


def test_a_metric_that_became_one_of_conversations_counts_once() -> None:
    fields: Json = {"id": "1", "at": 1.0, "client": "key 1", "conversation": "c", "metric": "thumbs"}
    old, new = FeedbackEntry(**fields, reply="a" * 32, value=False), FeedbackEntry(**fields, value=True)
    assert rating([old, new], "thumbs") == 1.0
    assert rating([old, new], "solved") is None


async def test_concurrent_doubles_count_once_and_are_synced_before_any_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a body's doubles all wait for the first one's fsync."""
    synced = 0
    real = LineWriter.sync

    def sync(writer: LineWriter) -> None:
        nonlocal synced
        real(writer)
        synced += writer.path.name == "feedback.jsonl"

    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        id = await reply_id(gateway)
        monkeypatch.setattr(LineWriter, "sync", sync)
        body = {"metric_name": "thumbs", "value": True, "inference_id": id}
        assert len({await task for task in [asyncio.create_task(rated(gateway, body)) for _ in range(20)]}) == 1
        assert synced == 1 and len(lines(tmp_path)) == 1


async def test_the_page_shows_feedback_at_its_conversation(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        id = await reply_id(gateway)
        await rated(gateway, {"metric_name": "comment", "value": "wrong", "inference_id": id, "tags": {"user": "7"}})
    (trajectory,) = written(tmp_path)
    async with asking([tmp_path]) as page:
        (source,) = (await page.get("sources"))["sources"]
        shown = await page.get("source", source["id"], "trajectory", trajectory.id)
    entry = {"metric": "comment", "value": "wrong", "reply": id.removeprefix("chatcmpl-"), "tags": {"user": "7"}}
    assert shown["trajectory"]["metadata"]["feedback"] == [entry]


async def test_an_edited_answer_is_an_example_in_place_of_its_attempt(tmp_path: Path) -> None:
    """Two attempts; the better one's second reply was edited, so the first reply is context and not learned."""
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        first = [await gateway.say("how?") for _ in range(2)]
        ids = [await reply_id(gateway, "how?", reply, "and then?") for reply in first]
        await rated(gateway, {"metric_name": "demonstration", "value": "like so", "inference_id": ids[1]})
    scored = [score_trajectory(each, float(each.index)) for each in written(tmp_path)]
    write_lines(tmp_path / "scored.jsonl", scored)
    (example,) = best_attempts(tmp_path / "scored.jsonl", 1)
    assert [(each["role"], each["content"], each.get("weight")) for each in example["messages"][1:]] == [
        ("user", "how?", None),
        ("assistant", first[1], 0),
        ("user", "and then?", None),
        ("assistant", "like so", None),
    ]
    kept, edited = best_attempts(tmp_path / "scored.jsonl", 1, min_reward=0.0)
    assert [turn["finish_reason"] for turn in kept["turns"]] == ["stop", "stop"] and edited == example


def test_ids_are_ordered_by_time() -> None:
    ids = [new_id() for _ in range(2)]
    assert [(uuid.UUID(id).version, uuid.UUID(id).variant) for id in ids] == [(7, uuid.RFC_4122)] * 2
    assert ids[0][:13] <= ids[1][:13]


async def test_a_torn_line_is_cut_off_and_its_feedback_counts_when_it_comes_again(tmp_path: Path) -> None:
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        id = await reply_id(gateway)
        body = {"metric_name": "thumbs", "value": True, "inference_id": id}
        await rated(gateway, body)
    file = tmp_path / "feedback.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    async with standing(tmp_path, ScriptedBackend(numbered()), feedback=METRICS) as gateway:
        await rated(gateway, body)
    assert [entry.value for entry in lines(tmp_path)] == [True]
