"""Traces written by other tools are read correctly, and bad input never loses a good record.

The files in fixtures/ were written by the real packages with native types:

    openenv.jsonl, openenv.schema.json   openenv 0.10.0: TrainingTrace.from_entries([...]).model_dump() in a record with
                                         its reward, and TrainingTrace.model_json_schema()
    verifiers.jsonl                      verifiers 0.4.0: Trace(nodes=[MessageNode(...)]).to_record()
    inspect.eval                         inspect-ai 0.3.285: eval(Task(dataset, [use_tools(add()), generate()],
                                         [match(), includes()], epochs=2), get_model("mockllm/model", ...))
    langfuse.jsonl                       langfuse 5's API types: ObservationV2(...).json(), NumericScore(...).json()
"""

import json
import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.cli.app import run as art
from art_cli.formats import READ, write_traces
from art_cli.formats import openenv_traces as openenv
from art_cli.formats.importing import Imported, import_files
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.learners.sft.examples import load_demos
from art_cli.rollouts.recorder import Recorder
from art_cli.runs.durable import read_lines, write_lines
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, prompt, sequence
from art_cli.runtime.errors import DataError, UsageError

Json = dict[str, Any]
FIXTURES = Path(__file__).parent / "fixtures"


def imported(directory: Path, *sources: Path, **knobs: Any) -> tuple[Imported, list[ScoredTrajectory]]:
    output = directory / "imported.jsonl"
    output.unlink(missing_ok=True)
    done = import_files(sources, output, **knobs)
    return done, list(read_lines(output, ScoredTrajectory))


def write(path: Path, *records: Any) -> Path:
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records))
    return path


ASKED = {"role": "user", "content": "1+1?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}
GOOD = {"messages": [ASKED, {"role": "assistant", "content": "2"}], "group_id": "sum", "reward": 1.0}


# --- each format, as its own tool wrote it ----------------------------------------------------------------------------


def test_openenv(tmp_path: Path) -> None:
    """Two calls: [1 2] -> [3 4], and [1 2 3 4 5] -> one trained token, the second of them masked."""
    done, found = imported(tmp_path, FIXTURES / "openenv.jsonl")
    assert done.num_with_tokens == 2 and not done.unread.counts
    first, second = found
    assert [(t.group_id, t.group_size, t.index, t.reward) for t in found] == [("sum", 2, 0, 1.0), ("sum", 2, 1, 0.0)]
    assert first.messages == [ASKED, CALL, RESULT, {"role": "assistant", "content": "two"}]
    assert [tool["function"]["name"] for tool in first.tools] == ["add"]
    assert [sequence(first.turns, index) for index in range(2)] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 9]]
    assert [sequence(second.turns, index) for index in range(2)] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 11]]
    assert [turn.logprobs for turn in first.turns] == [[-0.5, -0.5], [-0.5]]
    assert [turn.kept for turn in first.turns] == [0, 4]
    assert [turn.finish_reason for turn in first.turns] == ["tool_calls", "stop"]


def test_openenv_without_a_record_around_it(tmp_path: Path) -> None:
    """The first question says which attempts are at the same scenario, and there is no reward."""
    traces = [json.loads(line)["trace"] for line in (FIXTURES / "openenv.jsonl").read_text().splitlines()]
    done, found = imported(tmp_path, write(tmp_path / "t.jsonl", *traces))
    assert len(done.groups) == 1 and [t.group_size for t in found] == [2, 2]
    assert [t.reward for t in found] == [None, None] and done.num_with_tokens == 2


def test_verifiers(tmp_path: Path) -> None:
    """The tokens along the path are 1 2 | 3 4 | 5 [6 7] | 8 | 5 [9 10]; the rewards 1 x 1 and 0.5 x 0.5 add up."""
    done, found = imported(tmp_path, FIXTURES / "verifiers.jsonl")
    assert not done.unread.counts
    assert [(t.group_id, t.returned_reward, t.reward) for t in found] == [
        ("a", 1.25, 1.25),
        ("a", 0.25, 0.25),
        ("b", 0.25, None),
    ]
    first = found[0]
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert first.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 1}'}
    assert first.messages[2]["reasoning_content"] == "hm"
    assert first.tools[0]["function"]["parameters"]["properties"] == {"x": {"type": "integer"}}
    assert prompt(first.turns, 0) == [1, 2, 3, 4, 5] and first.turns[0].sampled_ids == [6, 7]
    assert prompt(first.turns, 1) == [1, 2, 3, 4, 5, 6, 7, 8, 5] and first.turns[1].sampled_ids == [9, 10]
    assert first.turns[0].logprobs == [-0.1235, -0.5] and first.turns[0].temperature == 0.7
    assert first.metrics == {"num": 2.0, "right": 1.0, "short": 0.25}
    assert found[2].error == "ToolError: no such file"
    opponent = json.loads((FIXTURES / "verifiers.jsonl").read_text().splitlines()[0])
    opponent["agent"]["trainable"] = False
    _, found = imported(tmp_path, write(tmp_path / "o.jsonl", opponent))
    assert found[0].messages == first.messages and not found[0].turns


@pytest.mark.parametrize("num", [400, 1600, 6400])
def test_replies_to_one_long_prompt_do_not_grow_with_the_square(num: int, tmp_path: Path) -> None:
    """M5: the attempt would repeat the prompt with each reply. One of few replies is imported."""
    root = {"message": {"role": "user", "content": "long " * num}}
    reply = {"message": {"role": "assistant", "content": "ok"}, "parent": 0, "sampled": True}
    trace = {"task": {"data": {"id": "a"}}, "rewards": {"x": 1.0}, "agent": {}}
    few = write(tmp_path / "few.jsonl", trace | {"nodes": [root, *[reply] * 8]})
    assert imported(tmp_path, few)[0].num_attempts == 1
    good, many = trace | {"nodes": [root, reply]}, trace | {"nodes": [root, *[reply] * num]}
    done, _ = imported(tmp_path, path := write(tmp_path / "many.jsonl", good, many))
    assert (tmp_path / "imported.jsonl").stat().st_size < 2**18 + 64 * path.stat().st_size
    assert num == 400 or any("more than 32 times as long" in reason for reason in done.unread.counts)


def test_an_attachment_that_is_named_again_and_again_does_not_grow_with_the_square(tmp_path: Path) -> None:
    """M5: 200 kB, 200 times."""
    asked, reply = {"role": "user", "content": "attachment://a"}, {"role": "assistant", "content": "ok"}
    sample = {"id": "a", "epoch": 1, "target": "", "scores": {"m": {"value": 1}}, "attachments": {"a": "x" * 200_000}}
    good = sample | {"messages": [asked, reply]}
    done, found = imported(tmp_path, write(tmp_path / "i.jsonl", good, good | {"messages": [*[asked] * 200, reply]}))
    assert len(found) == 1 and any("times as long as the record" in reason for reason in done.unread.counts)


def test_inspect(tmp_path: Path) -> None:
    """Of two scores, `match` and `includes`, the user chooses the reward; sum is right twice but for epoch 2."""
    pytest.importorskip("pyarrow")
    done, found = imported(tmp_path, FIXTURES / "inspect.eval")
    assert done.num_attempts == 4 and done.scores == {"match", "includes"} and found[0].reward is None
    done, found = imported(tmp_path, FIXTURES / "inspect.eval", reward="match")
    assert {(t.group_id, t.metadata["epoch"]): t.reward for t in found} == {
        ("sum", 1): 1.0,
        ("sum", 2): 0.0,
        ("capital", 1): 0.0,
        ("capital", 2): 1.0,
    }
    first = next(t for t in found if t.group_id == "sum")
    assert [message["role"] for message in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert json.loads(first.messages[2]["tool_calls"][0]["function"]["arguments"]) == {"x": 1, "y": 1}
    assert first.messages[3]["tool_call_id"] == first.messages[2]["tool_calls"][0]["id"]
    assert [tool["function"]["name"] for tool in first.tools] == ["add"]
    assert first.scenario["target"] == "2" and not first.turns


def test_langfuse(tmp_path: Path) -> None:
    """Two traces, their observations out of order, one input as text; the reward is the score `right`."""
    done, found = imported(tmp_path, FIXTURES / "langfuse.jsonl")
    assert done.num_records == 10 and not done.unread.counts
    assert [(t.id, t.group_id, t.reward) for t in found] == [("t1", "sum", 1.0), ("t2", "sum", 0.0)]
    roles = [message["role"] for message in found[0].messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"] and not found[0].branches
    assert found[0].messages[-1]["content"] == "two" and found[0].duration_s == 8.0


def test_a_generation_that_failed_costs_a_trace_of_langfuse_nothing_else(tmp_path: Path) -> None:
    """Three generations, of which the second is an error without a reply; and two that cannot be read."""

    def generation(number: int, **given: Any) -> Json:
        asked = [{"role": "user", "content": f"q{number}"}]
        reply = {"role": "assistant", "content": f"a{number}"}
        return {"id": str(number), "type": "GENERATION", "startTime": f"2026-11-01T12:00:0{number}Z", "input": asked,
                "output": reply, **given}  # fmt: skip

    failed = generation(2, output=None, level="ERROR", statusMessage="overloaded")
    unknown = generation(5, input=[{"role": "human", "content": "q5"}])  # as LangChain writes it
    asked = [{"role": "user", "content": "q6"}]
    nameless = generation(6, input={"messages": asked, "tools": [{"google_search": {}}]})
    odd = generation(7, input=[{"role": "user", "content": [{"type": "text", "text": {"value": "hi"}}]}])
    parts = [generation(1), failed, generation(3, output=None), generation(4), unknown, nameless, odd]
    trace = {
        "id": "t",
        "name": "n",
        "observations": parts,
        "scores": [{"name": "win", "value": 1, "dataType": "NUMERIC"}],
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(trace) + "\n")
    done, [found] = imported(tmp_path, tmp_path / "t.jsonl")
    assert sum(done.unread.counts.values()) == 1 and found.metrics == {"win": 1.0}
    assert found.error == "langfuse: overloaded" and found.reward is None
    contents = [message["content"] for branch in [found.messages, *found.branches] for message in branch]
    assert {"a1", "a4"} <= set(contents)


def test_generations_of_langfuse_are_in_the_order_of_their_times_not_of_their_text(tmp_path: Path) -> None:
    asked, first = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    asked_again, last = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "b"}
    lines = [
        {"id": "2", "startTime": "2026-11-01T12:00:01.500Z", "input": [asked, first, asked_again], "output": last},
        {"id": "1", "startTime": "2026-11-01T12:00:01Z", "input": [asked], "output": first},
    ]
    trace = {"id": "t", "name": "n", "scores": [], "observations": [{**each, "type": "GENERATION"} for each in lines]}
    (tmp_path / "t.jsonl").write_text(json.dumps(trace) + "\n")
    _, [found] = imported(tmp_path, tmp_path / "t.jsonl")
    assert [message["content"] for message in found.messages] == ["q", "a", "and?", "b"] and not found.branches


def call(messages: list[Json], reply: Json, *, ids: tuple[list[int], list[int]] | None = None, **more: Any) -> Json:
    """One call as a log has it; with ids as vLLM gives them."""
    choice: Json = {"index": 0, "message": reply, "finish_reason": "stop"}
    response: Json = {"id": "r", "object": "chat.completion", "choices": [choice]}
    if ids is not None:
        response["prompt_token_ids"], choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"token": "x", "logprob": -0.5, "top_logprobs": []} for _ in ids[1]]}
    return {"request": {"model": "m", "messages": messages, "temperature": 1}, "response": response, **more}


def test_calls_of_a_log_are_one_attempt_where_one_goes_on_from_the_other(tmp_path: Path) -> None:
    """Two interleaved attempts at one question, without a key; the client reformats the arguments."""
    function = {"name": "add", "arguments": '{"x":1}'}
    back = {**CALL, "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    other = {"role": "assistant", "content": "three"}
    lines = [
        call([ASKED], CALL, ids=([1, 2], [3, 4])),
        call([ASKED], other, ids=([1, 2], [5])),
        call([ASKED, back, RESULT], {"role": "assistant", "content": "two"}, ids=([1, 2, 3, 4, 6], [7])),
    ]
    done, found = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert done.num_attempts == 2 and len({t.group_id for t in found}) == 1
    by_length = sorted(found, key=lambda t: len(t.turns))
    assert [len(t.turns) for t in by_length] == [1, 2]
    assert by_length[1].messages[-1]["content"] == "two" and by_length[1].turns[1].kept == 4


def test_a_call_with_wrong_tokens_adds_nothing_to_its_attempt(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "2"}
    lines = [
        call([ASKED], said, ids=([1, 2], [3]), session_id=1),
        call([ASKED, said, ASKED], {"role": "assistant", "content": "wrong"}, ids=([1, 2, 3, 4], [-5]), session_id=1),
    ]
    done, [found] = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert done.unread.counts.total() == 1 and len(found.turns) == 1
    assert found.messages == [ASKED, said] and found.branches == []


def test_calls_of_a_log_with_a_session_are_its_attempt(tmp_path: Path) -> None:
    lines = [call([ASKED], {"role": "assistant", "content": str(n)}, session_id=n % 2, reward=n) for n in range(4)]
    _, found = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert sorted((t.reward, len(t.branches)) for t in found) == [(2.0, 1), (3.0, 1)]


def test_a_reward_that_is_no_number_is_told_and_an_error_of_any_form_makes_a_failed_attempt(tmp_path: Path) -> None:
    odd = [call([ASKED], {"role": "assistant", "content": "2"}, reward=reward) for reward in ("0.5", [1], {"a": 1})]
    failed = [{"message": "no shop"}, {"code": 3}, ["x"]]
    lines = [call([ASKED], {"role": "assistant", "content": "2"}, reward=1, error=error) for error in failed]
    done, found = imported(tmp_path, write(tmp_path / "log.jsonl", *odd, *lines))
    assert [each.error for each in found] == ["no shop", '{"code": 3}', '["x"]'] and len(done.unread.counts) == 3
    assert all(each.reward is None for each in found) and "its reward is '0.5', not a number" in str(done.unread)


def test_other_spellings_of_request_and_response(tmp_path: Path) -> None:
    """A logger that adds the response to the request, and one that keeps the bodies of HTTP."""
    one = call([ASKED], {"role": "assistant", "content": "2"})
    bodies = {"request": {"body": one["request"]}, "response": {"status_code": 200, "body": one["response"]}}
    _, found = imported(
        tmp_path, write(tmp_path / "log.jsonl", {**one["request"], "response": one["response"]}, bodies)
    )
    assert [t.messages[-1]["content"] for t in found] == ["2", "2"]


def test_calls_of_the_responses_protocol(tmp_path: Path) -> None:
    """Two calls, the second by `previous_response_id` alone; the reply as the official SDK dumps it."""
    from openai.types.responses import Response

    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False, "description": None}
    search = {"type": "web_search"}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    called = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "add", "arguments": '{"x": 1}'}
    text = {"type": "output_text", "text": "two", "annotations": []}
    said = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]}

    def response(id: str, *output: Json) -> Json:
        fields = {"id": id, "created_at": 0.0, "model": "m", "object": "response", "parallel_tool_calls": True}
        fields |= {"tool_choice": "auto", "tools": [], "output": list(output)}
        return Response.model_validate(fields).model_dump()

    first = {"model": "m", "instructions": "Be brief.", "input": "1+1?", "tools": [tool, search]}
    result = {"type": "function_call_output", "call_id": "c", "output": "2"}
    second = {"instructions": "Be brief.", "previous_response_id": "resp_a", "input": [result]}
    lines = [
        {"request": first, "response": response("resp_a", reasoning, called)},
        {**second, "response": response("resp_b", said), "reward": 1},
        {"request": {**second, "previous_response_id": "resp_x"}, "response": response("resp_c", said)},
        {"request": first, "response": response("resp_d")},
    ]
    done, (found,) = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {**CALL, "content": "", "reasoning_content": "hm"},
        RESULT,
        {"role": "assistant", "content": "two"},
    ]
    assert (found.reward, len(found.tools), found.tools[0]["function"]["name"]) == (1.0, 1, "add")
    assert {why.partition(":")[0] for why in done.unread.counts} == {
        "it continues a response that is not in the log",
        "a response without a message or a call",
    }


def test_a_chain_of_responses_is_read_up_to_a_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call adds two messages, so the fourth continues six."""
    monkeypatch.setattr("art_cli.formats.openai_log.MAX_CONTINUED", 4)
    lines = []
    for n in range(4):
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"a{n}"}]}
        request = {"input": f"q{n}", "previous_response_id": f"r{n - 1}" if n else None}
        lines.append({"request": request, "response": {"id": f"r{n}", "output": [said]}})
    done, (found,) = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert [each["content"] for each in found.messages] == ["q0", "a0", "q1", "a1", "q2", "a2"]
    assert done.unread.counts == {"it continues a conversation of more than 4 messages": 1}


def test_calls_of_the_messages_protocol(tmp_path: Path) -> None:
    """Two calls as dumped by the official SDK; the second continues the first reply."""
    from anthropic.types import Message

    usage = {"input_tokens": 1, "output_tokens": 1}
    tools = [{"name": "add", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web_search"}]

    def response(*content: Json) -> Json:
        fields = {"id": "m", "type": "message", "role": "assistant", "model": "m", "usage": usage}
        return Message.model_validate({**fields, "stop_reason": "end_turn", "content": list(content)}).model_dump()

    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    used = {"type": "tool_use", "id": "c", "name": "add", "input": {"x": 1}}
    asked = {"model": "m", "max_tokens": 9, "system": "Be brief.", "tools": tools, "messages": [ASKED]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]}
    one = response(thought, used)
    later = {**asked, "messages": [ASKED, {"role": "assistant", "content": one["content"]}, result]}
    image = {"role": "user", "content": [{"type": "image", "source": {}}]}
    lines = [
        {"request": asked, "response": one},
        {"request": later, "response": response({"type": "text", "text": "two"})},
        {"request": {**asked, "messages": [image]}, "response": one},
        {"request": asked, "response": {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}},
    ]
    done, (found,) = imported(tmp_path, write(tmp_path / "log.jsonl", *lines))
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {**CALL, "reasoning_content": "hm"},
        RESULT,
        {"role": "assistant", "content": "two"},
    ]
    assert [tool["function"]["name"] for tool in found.tools] == ["add"] and not found.branches
    assert done.unread.counts.total() == 2


def test_a_system_prompt_beside_the_messages_is_their_first(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    (tmp_path / "log.jsonl").write_text(json.dumps({"system": "Add.", "messages": said}) + "\n")
    import_files([tmp_path / "log.jsonl"], tmp_path / "t.jsonl")
    [read] = read_lines(tmp_path / "t.jsonl", ScoredTrajectory)
    assert read.messages == [{"role": "system", "content": "Add."}, *said]


def test_a_damaged_first_line_costs_only_itself(tmp_path: Path) -> None:
    done, found = imported(tmp_path, write(tmp_path / "torn.jsonl", b'{"messages": [\n', GOOD, GOOD))
    assert len(found) == 2 and list(done.unread.first.values()) == [f"{tmp_path / 'torn.jsonl'}:1"]


def test_lines_that_end_in_a_comma_are_read(tmp_path: Path) -> None:
    line = json.dumps(GOOD).encode() + b",\n"
    done, found = imported(tmp_path, write(tmp_path / "comma.jsonl", line, line, b"{bad},\n", line[:-1]))
    assert len(found) == 3 and list(done.unread.first.values()) == [f"{tmp_path / 'comma.jsonl'}:3"]


@pytest.mark.slow
def test_twenty_thousand_attempts_at_one_question_are_read_in_seconds(tmp_path: Path) -> None:
    begin = time.process_time()
    done, found = imported(tmp_path, write(tmp_path / "one.jsonl", *[{**GOOD, "id": str(n)} for n in range(20_000)]))
    assert [each.index for each in found] == list(range(20_000)) and done.groups.total() == 20_000
    assert time.process_time() - begin < 7


# --- and on -----------------------------------------------------------------------------------------------------------


def test_what_is_imported_goes_to_the_judge_and_to_sft(tmp_path: Path) -> None:
    """A log without tokens is attempts to the judge and transcripts to `art sft`; --min-reward keeps the good ones."""
    bad = {**GOOD, "reward": 0.0, "messages": [ASKED, {"role": "assistant", "content": "3"}]}
    log = write(tmp_path / "log.jsonl", GOOD, bad)
    imported(tmp_path, log)
    groups = TrajectoryFile(tmp_path / "imported.jsonl")
    assert [(group.kind, group.size, group.is_complete) for group in groups] == [("own", 2, True)]
    done, _ = imported(tmp_path, log, min_reward=1.0)
    assert done.num_below == 1
    assert [demo["messages"] for demo in load_demos("imported.jsonl", tmp_path)] == [GOOD["messages"]]


def test_the_command_says_what_it_read_and_what_can_be_done_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "log.jsonl", GOOD, b"{half\n", {"x": 1}, b'{"messages": [')
    assert art(["import", str(log), "-o", str(tmp_path / "t.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "1 attempts in 1 groups, of 4 records (openai)" in said
    assert "3 of 4 records were not read: " in said and "half-written" in said and "no known format" in said
    assert "no tokens and logprobs: art step cannot train on them; art judge and art sft can use them" in said
    assert art(["import", str(log), "-o", str(tmp_path / "t.jsonl")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert art(["import", str(log), "-o", str(tmp_path / "u.jsonl"), "--from", "opnai"]) == 2
    assert "did you mean 'openai'" in capsys.readouterr().err
    assert art(["import", str(log), "-o", str(tmp_path / "u.jsonl"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_read"] == 3
    assert sorted(os.listdir(tmp_path)) == ["log.jsonl", "t.jsonl", "u.jsonl"]
    assert (tmp_path / "t.jsonl").stat().st_mode & 0o077 == 0


def test_group_by_names_the_scenario(tmp_path: Path) -> None:
    lines = [{**GOOD, "metadata": {"task": n % 2}} for n in range(4)]
    lines.append(GOOD)
    done, found = imported(tmp_path, write(tmp_path / "l.jsonl", *lines), group_by="metadata.task")
    assert dict(done.groups) == {"0": 2, "1": 2} and [t.index for t in found] == [0, 0, 1, 1]
    assert done.unread.counts == {"no 'metadata.task' to group by": 1}
    _, found = imported(tmp_path, FIXTURES / "langfuse.jsonl", group_by="traceId")
    assert [t.group_id for t in found] == ["t1", "t2"]


def test_one_record_of_an_attempt_is_enough_to_group_it_by(tmp_path: Path) -> None:
    """A Langfuse trace score has no task; in a session with two calls only the first has a task."""
    asked, reply = [{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}
    call = {"type": "GENERATION", "traceId": "t", "id": "1", "input": asked, "output": reply, "metadata": {"task": "x"}}
    score = {"traceId": "t", "name": "win", "value": 1, "dataType": "NUMERIC"}
    done, [found] = imported(tmp_path, write(tmp_path / "f.jsonl", call, score), group_by="metadata.task")
    assert (found.group_id, found.metrics, done.unread.counts) == ("x", {"win": 1.0}, {})
    lines = [
        {"request": {"messages": asked}, "response": {"choices": [{"message": reply}]}, "session_id": "s", **given}
        for given in ({"metadata": {"task": "x"}}, {"metrics": {"win": 1}, "error": "lost"}, {"session_id": "other"})
    ]
    done, [found] = imported(tmp_path, write(tmp_path / "o.jsonl", *lines), group_by="metadata.task")
    assert (found.group_id, found.metrics, found.error) == ("x", {"win": 1.0}, "lost")
    assert done.unread.counts == {"no 'metadata.task' to group by": 1}


# --- round trip -------------------------------------------------------------------------------------------------------

words = st.text(max_size=5)
ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """Groups as the recorder makes them: conversations that go on or branch, tool calls, edited prompts."""
    made: list[Trajectory] = []
    for group in range(draw(st.integers(1, 2))):
        size = draw(st.integers(1, 3))
        for index in range(size):
            recorder, sent, seen = Recorder(), [{"role": "user", "content": draw(words)}], draw(ids)
            for _ in range(draw(st.integers(1, 3))):
                reply: Json = {"role": "assistant", "content": draw(words)}
                if draw(st.booleans()):
                    reply["tool_calls"] = [
                        {"id": "c", "type": "function", "function": {"name": "f", "arguments": draw(words)}}
                    ]
                sampled = draw(ids)
                choice = Choice(
                    index=0, message=reply, token_ids=sampled, logprobs=[-draw(st.floats(0, 9))] * len(sampled)
                )
                tool = {"type": "function", "function": {"name": draw(st.sampled_from("fg"))}}
                request = Request(model="m", sampling=Sampling(temperature=0.5), messages=list(sent), tools=[tool])
                recorded = recorder.record(
                    request, Reply(id="", created=0, model="m", choices=[choice], prompt_ids=list(seen), step=3)
                )
                if draw(st.integers(0, 4)) == 0:
                    recorder.abandon(recorded)
                if draw(st.booleans()):
                    sent, seen = [*sent, reply, {"role": "user", "content": draw(words)}], [*seen, *sampled, *draw(ids)]
                else:
                    sent, seen = [{"role": "user", "content": draw(words)}], draw(ids)
            reward = draw(st.none() | st.floats(-1, 1))
            made.append(
                Trajectory(
                    id=f"g{group}-{index}",
                    group_id=f"g{group}",
                    group_size=size,
                    index=index,
                    scenario={"id": f"g{group}", "level": draw(words)},
                    messages=recorder.messages,
                    branches=recorder.branches,
                    tools=recorder.tools,
                    turns=recorder.turns,
                    metrics={"a": draw(st.floats(-9, 9))},
                    metadata={"note": draw(words)},
                    returned_reward=reward,
                    error=None if draw(st.booleans()) else "rollout: it failed",
                )
            )
    return made


@settings(max_examples=40, deadline=None)
@given(trajectories(), st.randoms())
def test_openenv_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, made: list[Trajectory], order: Any
) -> None:
    """Property: every field of every trajectory, tokens, logprobs and places in the group, whatever the order."""
    directory = tmp_path_factory.mktemp("round")
    played = order.sample(made, len(made))
    write_traces(played, directory / "t.jsonl", "openenv")
    _, found = imported(directory, directory / "t.jsonl")
    read = {t.id: msgspec.convert(msgspec.to_builtins(t), Trajectory) for t in found}
    assert read == {t.id: t for t in made}
    assert all(t.reward == (None if t.error else t.returned_reward) for t in found)


@settings(max_examples=40, deadline=None)
@given(trajectories())
def test_openai_gives_back_messages_tools_and_rewards(
    tmp_path_factory: pytest.TempPathFactory, made: list[Trajectory]
) -> None:
    directory = tmp_path_factory.mktemp("round")
    write_traces(made, directory / "t.jsonl", "openai")
    _, found = imported(directory, directory / "t.jsonl")
    kept = ("id", "group_id", "group_size", "index", "scenario", "messages", "branches", "tools", "metrics", "metadata")
    for name in (*kept, "returned_reward", "error"):
        assert [getattr(t, name) for t in found] == [getattr(t, name) for t in made], name


@settings(max_examples=25, deadline=None)
@given(trajectories())
def test_what_is_written_as_a_training_trace_is_one(made: list[Trajectory]) -> None:
    """By the JSON schema that openenv's own type gives, and by its rules for masks, logprobs and names of calls."""
    validate = pytest.importorskip("jsonschema").validate
    schema = json.loads((FIXTURES / "openenv.schema.json").read_text())
    for trajectory in made:
        record = json.loads(msgspec.json.encode(openenv.record_of(trajectory)))
        validate(record, schema)
        turns = record["turns"]
        assert len({turn["node_id"] for turn in turns}) == len(turns)
        for index, turn in enumerate(turns):
            sampled = turn["completion_token_ids"]
            assert turn["prompt_token_ids"] == prompt(trajectory.turns, index)
            assert len(turn["per_token_logps"]) == len(sampled) and max(turn["per_token_logps"]) <= 0
            mask = [0] * len(turn["prompt_token_ids"]) + [not trajectory.turns[index].is_abandoned] * len(sampled)
            assert turn["loss_mask"] == mask


@pytest.mark.slow
def test_generate_writes_the_format_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """After a kill halfway, the remaining attempts are played; the file has all attempts with tokens."""
    shutil.copytree(Path(__file__).parent.parent / "letters", project := tmp_path / "letters")
    words = ["generate", str(project / "config.yaml"), "-o", str(tmp_path / "t.jsonl"), "--format", "openenv"]
    assert art(words) == 0
    first = list(read_lines(tmp_path / "t.art.jsonl", Trajectory))
    write_lines(tmp_path / "t.art.jsonl", first[: len(first) // 2])
    assert art(words) == 0
    own = {t.id: t for t in read_lines(tmp_path / "t.art.jsonl", Trajectory)}
    _, found = imported(tmp_path, tmp_path / "t.jsonl")
    assert len(found) == len(own) == len(first) and all(t.turns == own[t.id].turns for t in found)
    assert all(t.messages == own[t.id].messages and t.reward == own[t.id].returned_reward for t in found)


# --- hostile ----------------------------------------------------------------------------------------------------------

HOSTILE: dict[str, bytes] = {
    "no JSON": b"{]\n",
    "no object": b'"text"\n',
    "a list of numbers": b"[1, 2]\n",
    "bytes": b'{"messages": "\xc3\x28"}\n',
    "nothing but brackets": b"[" * 100_000 + b"\n",
    "deep": b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}\n",
    "messages of numbers": b'{"messages": [1, 2]}\n',
    "no role": b'{"messages": [{"content": "x"}]}\n',
    "a role of a list": b'{"messages": [{"role": ["user"], "content": "x"}]}\n',
    "content of a number": b'{"messages": [{"role": "assistant", "content": 5}]}\n',
    "no reply": b'{"messages": [{"role": "user", "content": "x"}]}\n',
    "calls of a number": b'{"messages": [{"role": "assistant", "content": "", "tool_calls": 7}]}\n',
    "calls without a name": b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}\n',
    "metadata of a list": b'{"messages": [{"role": "assistant", "content": "x"}], "metadata": [1]}\n',
    "a call that failed": b'{"request": {"messages": [{"role": "user"}]}, "response": {"error": {"message": "no"}}}\n',
    "tokens and logprobs that misfit": json.dumps(
        {"turns": [{"prompt_token_ids": [1], "completion_token_ids": [2], "loss_mask": [0, 1], "per_token_logps": []}]}
    ).encode() + b"\n",
    "an id without end": json.dumps({**GOOD, "group_id": "x" * 2000}).encode() + b"\n",
    "a negative token": json.dumps(call([ASKED], GOOD["messages"][1], ids=([1], [-2]))).encode() + b"\n",
    "an OpenEnv mask that misfits": b'{"turns": [{"prompt_token_ids": [1], '
    b'"completion_token_ids": [2], "loss_mask": [0]}]}\n',
    "an OpenEnv turn of text": b'{"turns": [{"completion_token_ids": "abc", "prompt_token_ids": 5}]}\n',
    "an own trace of a lie": b'{"turns": [{"completion_token_ids": [1], "prompt_token_ids": [1], "metadata": '
    b'{"art": {"trajectory": {}, "turn": {"parent": 7, "kept": -1}}}}]}\n',
    "a circle of nodes": b'{"task": {}, "rewards": {}, '
    b'"nodes": [{"parent": 0, "sampled": true, "message": {"role": "user"}}]}\n',
    "a reward of text": b'{"task": {}, "rewards": {"a": {"score": "x"}}, "nodes": []}\n',
    "a sample of inspect without messages": b'{"messages": [], "epoch": 1, "target": "x", "id": 1}\n',
    "attachments that grow": json.dumps(
        {"messages": [{"role": "assistant", "content": ["attachment://a"] * 90}], "epoch": 1, "target": "", "id": 1,
         "attachments": {"a": "x" * 2**20}}
    ).encode() + b"\n",
    "a trajectory of ours": msgspec.json.encode(
        Trajectory(id="a", group_id="g", group_size=1, index=0, messages=GOOD["messages"])
    )
    + b"\n",
    "an observation without output": b'{"type": "GENERATION", "traceId": "t", "input": "x"}\n',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_record_loses_no_good_one(tmp_path: Path, name: str) -> None:
    log = write(tmp_path / "l.jsonl", GOOD, HOSTILE[name], {**GOOD, "id": "last"})
    done, found = imported(tmp_path, log)
    assert len(found) == 2 and found[1].id == "last"
    assert done.unread.counts.total() >= 1 and "\n" not in str(done.unread)
    with pytest.raises(DataError, match="could be read: "):
        imported(tmp_path, write(tmp_path / "alone.jsonl", HOSTILE[name]))
    assert sorted(os.listdir(tmp_path)) == ["alone.jsonl", "l.jsonl"]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats()
    | st.sampled_from(["", "user", "assistant", "GENERATION", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["messages", "role", "content", "tool_calls", "request", "response", "choices", "message", "turns", "nodes",
         "task", "rewards", "epoch", "target", "traceId", "type", "input", "output", "observations", "id", "name",
         "prompt_token_ids", "completion_token_ids", "loss_mask", "per_token_logps", "metadata", "art", "parent",
         "sampled", "token_ids", "mask", "logprobs", "function", "arguments", "scores", "value", "tools", "events"]
    ), inner, max_size=6),
    max_leaves=25,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=75, deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "request", "response", "turns", "nodes", "task", "rewards", "epoch",
       "target", "traceId", "type", "id", "observations", "name", "metadata", "input", "output"]), values, max_size=8),
       st.sampled_from([None, *READ]))  # fmt: skip
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, record: Json, form: str | None) -> None:
    """Property: any record gives an attempt or a reason, and written attempts can be read back."""
    directory = tmp_path_factory.mktemp("any")
    try:
        done, found = imported(directory, write(directory / "l.jsonl", record), form=form)
    except DataError as error:
        assert "\n" not in str(error)
    else:
        assert len(found) == done.num_attempts
        list(TrajectoryFile(directory / "imported.jsonl"))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["openenv.jsonl", "verifiers.jsonl", "langfuse.jsonl", "inspect.eval"]), st.data())
def test_a_damaged_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    """Property: bytes of a real file overwritten or cut off anywhere; the other records are read."""
    directory, whole = tmp_path_factory.mktemp("damaged"), bytearray((FIXTURES / name).read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place : place + 8] = data.draw(st.binary(max_size=8))
    (directory / name).write_bytes(bytes(whole[: data.draw(st.integers(place, len(whole)))]))
    try:
        imported(directory, directory / name)
    except DataError as error:
        assert "\n" not in str(error)


def test_an_entry_said_to_be_where_the_archive_has_ended_is_passed_over(tmp_path: Path) -> None:
    """In the central directory, the four bytes before a name are the data offset (APPNOTE 4.3.12)."""
    whole = bytearray((FIXTURES / "inspect.eval").read_bytes())
    name = whole.rindex(b"samples/")
    whole[name - 4 : name] = (len(whole) - 10).to_bytes(4, "little")
    (tmp_path / "inspect.eval").write_bytes(whole)
    done, _ = imported(tmp_path, tmp_path / "inspect.eval")
    assert any("it cannot be unpacked" in reason for reason in done.unread.counts)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cli.formats.importing.MAX_LINE_BYTES", 10_000)
    log = write(tmp_path / "l.jsonl", GOOD, {**GOOD, "x": "y" * 100_000}, {**GOOD, "id": "last"}, b"z" * 20_000)
    done, found = imported(tmp_path, log)
    assert [t.id for t in found] == ["sum/0", "last"]
    assert done.unread.counts == {"a line of more than 0 MiB": 2}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_a_zip_bomb_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int) -> None:
    """An entry that unpacks to a thousand times its size, whatever size the archive names."""
    sample = {"id": "a", "epoch": 1, "target": "x", "messages": [ASKED, GOOD["messages"][1]], "scores": {"m": "C"}}
    with zipfile.ZipFile(tmp_path / "l.eval", "w", method) as archive:
        archive.writestr("samples/bomb.json", b" " * 2**24)
        archive.writestr("samples/a.json", json.dumps(sample))
        archive.writestr("samples/half.json", json.dumps(sample)[:50])
        archive.writestr("header.json", "{}")
    monkeypatch.setattr("art_cli.formats.importing.MAX_LINE_BYTES", 2**20)
    done, found = imported(tmp_path, tmp_path / "l.eval")
    assert [(t.group_id, t.reward) for t in found] == [("a", 1.0)]
    assert done.unread.counts.total() == 2 and "it unpacks to more than 1 MiB" in str(done.unread)


def test_entries_of_other_methods_and_bombs_of_zstandard_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LZMA's decoder reserves the memory that an entry names. The entries of inspect.eval unpack to 9 kB and more."""
    pytest.importorskip("pyarrow")
    with zipfile.ZipFile(tmp_path / "l.eval", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("samples/a.json", "{}")
    with pytest.raises(DataError, match="packed by method 14 of zip"):
        imported(tmp_path, tmp_path / "l.eval")
    monkeypatch.setattr("art_cli.formats.importing.MAX_LINE_BYTES", 8000)
    with pytest.raises(DataError, match="none of 4 records could be read: 4 it unpacks to more"):
        imported(tmp_path, FIXTURES / "inspect.eval")


def test_files_that_hold_nothing_are_refused_in_one_line(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("a.txt", "x")
    files = {"empty.jsonl": b"", "utf16.jsonl": '{"messages": []}'.encode("utf-16"), "packed.gz": b"\x1f\x8b\x08\0"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    wrong = {
        "empty.jsonl": "no records",
        "utf16.jsonl": "UTF-16",
        "packed.gz": "gunzip",
        "other.zip": "without samples/",
    }
    for name, message in wrong.items():
        with pytest.raises(DataError, match=message):
            imported(tmp_path, tmp_path / name)
    with pytest.raises(UsageError, match=r"nowhere\.jsonl: no such file"):
        imported(tmp_path, tmp_path / "nowhere.jsonl")
    write(tmp_path / "l.jsonl", GOOD)
    with pytest.raises(UsageError, match="already exists"):
        import_files([tmp_path / "l.jsonl"], tmp_path / "l.jsonl")


def test_json_over_many_lines_and_in_an_envelope(tmp_path: Path) -> None:
    for value in ([GOOD, GOOD], {"data": [GOOD, GOOD], "meta": {}}, {"eval": {}, "samples": [GOOD, GOOD]}):
        for indent in (None, 2):
            (tmp_path / "l.json").write_text(json.dumps(value, indent=indent))
            assert len(imported(tmp_path, tmp_path / "l.json")[1]) == 2


def test_a_trace_that_is_read_twice_counts_once(tmp_path: Path) -> None:
    done, found = imported(tmp_path, FIXTURES / "openenv.jsonl", FIXTURES / "openenv.jsonl")
    assert len(found) == 2 and done.unread.counts == {"an attempt with this id was already read": 2}


def test_a_generation_that_is_read_twice_counts_once(tmp_path: Path) -> None:
    """In its trace, and again in an export of observations. Without ids they are two."""
    asked, said = [{"role": "user", "content": "q"}], {"role": "assistant", "content": "a"}
    part = {"id": "g", "traceId": "t", "type": "GENERATION", "input": asked, "output": said}
    trace = write(tmp_path / "trace.jsonl", {"id": "t", "name": "n", "observations": [part]})
    _, [found] = imported(tmp_path, trace, write(tmp_path / "observations.jsonl", part))
    assert found.messages == [*asked, said] and found.branches == []
    _, [found] = imported(tmp_path, write(tmp_path / "observations.jsonl", *[{**part, "id": None}] * 2))
    assert found.branches == [[*asked, said]]
