"""`art log --otlp`: what a receiver gets, decoded by OpenTelemetry's own messages; receivers that fail."""

import json
import threading
import time
from pathlib import Path

import pytest

from art_cli.formats.traces import otlp
from art_cli.formats.traces.otlp import OtlpSender, headers_from, traces_url, url_from
from art_cli.formats.traces.spans import MAX_INPUT, MAX_SPANS, Span, TracedRun, spans_of
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import DeliveryError, UsageError
from tests.cli.test_cli import Art, art
from tests.support.records.attempts import attempt, scored, write_attempts
from tests.support.servers.receiver import receiving, values

__all__ = ["art"]
SOURCE = TracedRun("mail", "0123456789abcdef", "Qwen/Qwen3-0.6B")


def sent(*spans: Span) -> list[Json]:
    """The spans as a receiver sees them."""
    with receiving() as receiver:
        assert OtlpSender(traces_url(receiver.url)).send(spans) == len(spans)
        return [
            {"name": each.name, "id": each.span_id, "parent": each.parent_span_id, "trace": each.trace_id,
             "begin": each.start_time_unix_nano, "end": each.end_time_unix_nano, "kind": each.kind,
             "status": each.status, "events": [(event.name, values(event.attributes)) for event in each.events],
             **values(each.attributes)}
            for each in receiver.spans()
        ]  # fmt: skip


def test_an_attempt_is_one_trace_of_turns_tools_judge_and_scores() -> None:
    root, first, tool, second, judge = sent(*spans_of(scored(), SOURCE))
    assert [each["name"] for each in (root, first, tool, second, judge)] == [
        "invoke_agent mail", "chat Qwen/Qwen3-0.6B", "execute_tool search", "chat Qwen/Qwen3-0.6B", "judge ruler",
    ]  # fmt: skip
    assert len({each["trace"] for each in (root, first, tool, second, judge)}) == 1 and len(root["trace"]) == 16
    assert root["parent"] == b"" and {each["parent"] for each in (first, tool, second, judge)} == {root["id"]}
    assert len({each["id"] for each in (root, first, tool, second, judge)}) == 5 and len(root["id"]) == 8

    assert (root["begin"], root["end"]) == (1_700_000_000 * 10**9, 1_700_000_010 * 10**9)
    assert root["begin"] == first["begin"] <= first["end"] == tool["begin"] == second["begin"] <= second["end"]
    assert (root["gen_ai.operation.name"], root["gen_ai.agent.name"]) == ("invoke_agent", "mail")
    assert (root["gen_ai.usage.input_tokens"], root["gen_ai.usage.output_tokens"]) == (5 + 12, 3 + 2)
    assert (root["art.step"], root["art.scenario_id"], root["art.reward"]) == (7, "mail-1", 0.75)
    assert root["art.metric.found"] == 1.0 and root["status"].code == 0
    assert root["events"] == [
        ("gen_ai.evaluation.result", {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": 0.75}),
        ("gen_ai.evaluation.result", {
            "gen_ai.evaluation.name": "ruler", "gen_ai.evaluation.score.value": 0.75,
            "gen_ai.evaluation.explanation": "found at once"}),
    ]  # fmt: skip

    assert first["kind"] == 3 and first["gen_ai.operation.name"] == "chat"
    assert (first["gen_ai.usage.input_tokens"], first["gen_ai.usage.output_tokens"]) == (5, 3)
    assert first["gen_ai.response.finish_reasons"] == ["tool_calls"] and first["art.policy_step"] == 7
    assert first["gen_ai.request.temperature"] == 0.8 and second["gen_ai.request.top_p"] == 0.9
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "system", "parts": [{"type": "text", "content": "You find mails."}]},
        {"role": "user", "parts": [{"type": "text", "content": "Who wrote about cheese?"}]},
    ]
    assert json.loads(first["gen_ai.output.messages"]) == [
        {"role": "assistant", "finish_reason": "tool_calls", "parts": [
            {"type": "reasoning", "content": "I should look."},
            {"type": "tool_call", "id": "c1", "name": "search", "arguments": {"query": "cheese"}}]}
    ]  # fmt: skip
    asked = json.loads(second["gen_ai.input.messages"])
    assert asked[-1] == {
        "role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "1 mail of Ann"}]
    }  # fmt: skip
    assert (tool["gen_ai.tool.name"], tool["gen_ai.tool.call.id"]) == ("search", "c1")
    assert tool["gen_ai.tool.call.arguments"] == '{"query": "cheese"}'
    assert tool["gen_ai.tool.call.result"] == "1 mail of Ann"
    assert (judge["gen_ai.request.model"], json.loads(judge["art.votes"])) == ("openai/gpt-6-luna", [0.5, 1.0])
    assert judge["gen_ai.response.model"] == "gpt-6-luna-1"
    assert judge["end"] - judge["begin"] == 1_500_000_000


def test_an_attempt_that_failed_has_the_status_error_and_keeps_its_ids_when_it_is_sent_again() -> None:
    failed = attempt(error="timeout: not finished after 600 s")
    (root, *_), (again, *_) = sent(*spans_of(failed, SOURCE)), sent(*spans_of(failed, SOURCE))
    assert (root["status"].code, root["status"].message) == (2, "timeout: not finished after 600 s")
    assert root["error.type"] == "timeout" and root["art.returned_reward"] == 0.25
    assert (root["trace"], root["id"]) == (again["trace"], again["id"])
    others = [sent(*spans_of(failed, SOURCE, split="eval"))[0], sent(*spans_of(failed, SOURCE._replace(id="x")))[0]]
    assert len({root["trace"], *(each["trace"] for each in others)}) == 3


def test_hostile_texts_and_sizes_arrive_bounded() -> None:
    """Half surrogates, NUL, a megabyte on one line, 10,000 tool calls, arguments that are no JSON or are deep."""
    deep = "[" * 5_000 + "]" * 5_000
    bad = '{"a": NaN, "b": "\ud800"}'
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "x\x00\u202e", "arguments": (deep, bad)[n % 2]}}
        for n in range(10_000)
    ]
    messages: list[Json] = [
        {"role": "user", "content": "\ud800</script>" + "y" * 2**20},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "z" * 2**20},
    ]
    spans = list(spans_of(attempt(messages=messages, turns=[], error="\ud800" * 20_000), SOURCE))
    got = sent(*spans)
    assert MAX_SPANS <= len(got) <= MAX_SPANS + 2
    assert json.loads(got[0]["gen_ai.input.messages"])[0]["parts"][0]["content"].startswith("?</script>yyy")
    assert max(len(value) for each in got for value in each.values() if isinstance(value, str)) < 2 * MAX_INPUT
    assert got[3]["gen_ai.tool.call.result"].count("z") == 16_000 and got[3]["name"].startswith("execute_tool x")


@pytest.mark.parametrize("seconds", [1e300, -1e308])
def test_times_beyond_the_format_are_bounded(seconds: float) -> None:
    spans = list(spans_of(attempt(started_at=seconds, duration_s=1e308), SOURCE))
    with receiving() as receiver:
        assert OtlpSender(traces_url(receiver.url)).send(spans) == len(spans)


def test_many_spans_go_in_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "MAX_BATCH_BYTES", 20_000)
    with receiving() as receiver:
        spans = [span for n in range(100) for span in spans_of(attempt(index=n), SOURCE)]
        assert OtlpSender(traces_url(receiver.url)).send(spans) == len(spans)
        assert len(receiver.posts) > 5 and all(len(post.body) < 30_000 for post in receiver.posts)
        assert [span.span_id for span in receiver.spans()] == [span.id for span in spans]


def test_a_receiver_that_hangs_ends_at_the_deadline() -> None:
    released = threading.Event()
    with receiving() as receiver:
        receiver.answer = lambda post: (200, b"", {"x": str(released.wait(60))})
        begin = time.monotonic()
        with pytest.raises(DeliveryError, match=r"127.0.0.1:\d+ did not answer in time; it was tried for 0.3 s"):
            OtlpSender(traces_url(receiver.url), timeout_s=0.3).send(spans_of(attempt(), SOURCE))
        assert time.monotonic() - begin < 5.0
        released.set()


def test_a_busy_receiver_is_asked_again_and_one_that_refuses_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "FIRST_PAUSE_S", 0.01)
    with receiving() as receiver:
        receiver.answer = lambda post: (503, b"", {}) if len(receiver.posts) < 3 else (200, b"", {})
        assert OtlpSender(traces_url(receiver.url)).send(spans_of(attempt(), SOURCE)) == 4
        assert len(receiver.posts) == 3
        receiver.answer = lambda post: (401, b"bad key sk-verysecret\x1b[2J", {})
        sender = OtlpSender(traces_url(receiver.url), {"authorization": "Bearer sk-verysecret"})
        with pytest.raises(DeliveryError, match=r"answered 401: bad key \*\*\*\\x1b\[2J; is the key right\?"):
            sender.send(spans_of(attempt(), SOURCE))
        assert len(receiver.posts) == 4 and receiver.posts[-1].headers["authorization"] == "Bearer sk-verysecret"
        # a partial success with 2 rejected spans: field 1 { field 1: 2, field 2: "full" }
        receiver.answer = lambda post: (200, b"\x0a\x08\x08\x02\x12\x04full", {})
        with pytest.raises(DeliveryError, match="refused 2 spans: full"):
            sender.send(spans_of(attempt(), SOURCE))
        receiver.answer = lambda post: (301, b"", {"location": "http://127.0.0.1:1/"})
        with pytest.raises(DeliveryError, match="answered 301"):
            sender.send(spans_of(attempt(), SOURCE))
        receiver.answer = lambda post: (200, b"{}", {"content-type": "application/json"})
        assert sender.send(spans_of(attempt(), SOURCE)) == 4


def test_the_addresses_and_keys_are_those_of_opentelemetrys_variables() -> None:
    assert traces_url("http://h:4318") == traces_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert traces_url("https://h/api/public/otel/v1/traces") == "https://h/api/public/otel/v1/traces"
    assert url_from({}) == "http://localhost:4318/v1/traces"
    assert url_from({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}) == "http://a/v1/traces"
    assert url_from({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/x"}) == "http://a/x"
    keys = {"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Basic%20abc, x-project = mine"}
    assert headers_from(keys) == {"authorization": "Basic abc", "x-project": "mine"}
    for wrong in ("no equals sign", "a=b%0d%0ac"):
        with pytest.raises(UsageError, match="OTEL_EXPORTER_OTLP_HEADERS is name=value"):
            headers_from({"OTEL_EXPORTER_OTLP_HEADERS": wrong})
    for wrong in ("localhost:4318", "ftp://x", "http://", "http://user:key@h", "http://h?key=1", "http://[::1"):
        with pytest.raises(UsageError) as caught:
            traces_url(wrong)
        assert "key=1" not in str(caught.value) and "user:key" not in str(caught.value)


@pytest.mark.slow
def test_the_command_sends_a_run_that_was_killed(art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_attempts(tmp_path / "run")
    with run.trajectories_path(1).open("ab") as file:
        file.write(b'{"id": "torn')
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=abc")
    with receiving() as receiver:
        done = art("log", str(run.root), "--otlp", receiver.url, "--json")
        assert done.code == 0, done.err
        traces = {span.trace_id for span in receiver.spans()}
        assert json.loads(done.out) == {"url": f"{receiver.url}/v1/traces", "traces": 7, "spans": len(receiver.spans())}
        assert len(traces) == 7 and receiver.posts[0].headers["x-key"] == "abc"
        steps = [values(span.attributes) for span in receiver.spans() if not span.parent_span_id]
        rewards = [(each["art.split"], each.get("art.reward")) for each in steps]
        train = [("train", 0.75)] * 3 + [("train", None), ("train", 0.25)]  # the last is played and not scored yet
        assert sorted(rewards, key=str) == sorted([*train, *[("eval", 0.25)] * 2], key=str)
        one = art("log", str(run.root), "--otlp", receiver.url, "--step", "1")
        assert one.code == 0 and "1 traces" in one.out
    refused = art("log", str(run.root), "--otlp", receiver.url)
    assert refused.code == 1 and "cannot be reached" in refused.err and refused.err.count("\n") <= 2
