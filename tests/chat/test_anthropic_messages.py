"""The wire for Anthropic's Messages API: parsing, refusals by name, and equality of streams and messages."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.chat.chat_app import AppSettings, build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.reading import BodyLimit
from art_cli.chat.replies import Choice, Chunk, ReplyBuilder, are_same, input_of
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires.anthropic_messages import AnthropicCountTokens, AnthropicMessages, message_of, signature_of
from tests.support.standins.scripted import ScriptedBackend

Json = dict[str, Any]
WIRE = AnthropicMessages()
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
CALLED = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def body(**fields: Any) -> Json:
    return {"model": "policy", "max_tokens": 9, "messages": [USER], **fields}


def parse(fields: Json) -> Request:
    return WIRE.parse(json.dumps(fields).encode(), Sampling())


def messages(*talk: Json, **fields: Any) -> list[Json]:
    found = parse(body(messages=talk, **fields)).messages
    assert found is not None
    return found


def text(content: str, **more: Any) -> Json:
    return {"type": "text", "text": content, **more}


def tool_use(id: str, **given: Any) -> Json:
    return {"type": "tool_use", "id": id, "name": "add", "input": given}


def result(id: str, content: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": id, "content": content}


# --- messages ---------------------------------------------------------------------------------------------------------


def test_results_come_before_text_and_in_the_order_of_the_calls() -> None:
    """A client may send the text first, and results as its tools ended; the model reads them as it asked."""
    asked = {"role": "assistant", "content": [tool_use("one", a=1), tool_use("two", b=2)]}
    answered = {
        "role": "user",
        "content": [text("and now?"), result("two", [text("2"), text("!")]), result("one", "1")],
    }
    read = messages(USER, asked, answered)
    assert read[2:] == [
        {"role": "tool", "tool_call_id": "one", "content": "1"},
        {"role": "tool", "tool_call_id": "two", "content": "2\n!"},
        {"role": "user", "content": "and now?"},
    ]
    functions = [call["function"] for call in read[1]["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": 1}'}, {"name": "add", "arguments": '{"b": 2}'}]


def test_thoughts_that_come_back_in_another_order_are_the_same_message() -> None:
    """Thoughts that only their maker can read are nothing here; an empty reply is an empty message."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "any"}
    hidden = {"type": "redacted_thinking", "data": "AAAA"}
    blocks = [thought, hidden, text("I say"), tool_use("one")]
    read = [messages(USER, {"role": "assistant", "content": order}, USER)[1] for order in (blocks, blocks[::-1])]
    assert read[0] == read[1]
    assert (read[0]["content"], read[0]["reasoning_content"]) == ("I say", "hm")
    assert messages(USER, {"role": "assistant", "content": []}, USER)[1] == {"role": "assistant", "content": ""}


def test_a_system_message_behind_others_is_the_users() -> None:
    """Chat templates know one system message, the first."""
    late = {"role": "system", "content": [text("It is late.")]}
    assert [message["role"] for message in messages(USER, late, system="Be.")] == ["system", "user", "user"]
    assert messages(late, USER) == [{"role": "system", "content": "It is late."}, USER]


@pytest.mark.parametrize("is_block", [True, False], ids=["block", "line"])
def test_a_billing_header_in_the_system_prompt_is_left_out(is_block: bool) -> None:
    header = "x-anthropic-billing-header: cc_version=2.1; cch=0f3a1;"
    system = [text(header), text("Be.\nGood.")] if is_block else f"{header}\nBe.\nGood."
    assert messages(USER, system=system)[0] == {"role": "system", "content": "Be.\nGood."}
    assert messages(USER, system=[text(header)]) == [USER]
    kept = "The header x-anthropic-billing-header: is not sent."
    assert messages(USER, system=kept)[0]["content"] == kept


def test_a_deferred_tool_is_in_the_prompt_once_a_result_names_it() -> None:
    """So the beginning of the prompt stays as it was when a search has found a tool."""
    later = {**TOOL, "name": "later", "defer_loading": True}
    found = {"role": "user", "content": [result("one", [{"type": "tool_reference", "tool_name": "later"}])]}
    request = parse(
        body(tools=[TOOL, later], messages=[USER, {"role": "assistant", "content": [tool_use("one")]}, found])
    )
    assert [tool["function"]["name"] for tool in request.tools] == ["add"]
    assert request.messages and json.loads(request.messages[-1]["content"])["function"]["name"] == "later"


# --- parameters -------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_a_request() -> None:
    schema = {"type": "object"}
    request = parse(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            stop_sequences=["a", "b"],
            tools=[{**TOOL, "type": "custom", "description": "Adds.", "strict": True}],
            tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
            output_config={"effort": "high", "format": {"type": "json_schema", "schema": schema}},
        )
    )
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, stop=("a", "b"), max_tokens=9)
    assert (request.sampling, request.caps_tokens, request.is_stream) == (sampling, True, False)
    function = {"name": "add", "description": "Adds.", "parameters": schema, "strict": True}
    assert request.tools == [{"type": "function", "function": function}]
    assert request.tool_choice == {"type": "function", "function": {"name": "add"}}
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "strict": True, "schema": schema},
    }


@pytest.mark.parametrize(("kind", "is_meant"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_a_choice_of_tools_is_translated(kind: str, is_meant: str) -> None:
    assert parse(body(tools=[TOOL], tool_choice={"type": kind})).tool_choice == is_meant


@pytest.mark.parametrize(("kind", "thinks"), [("enabled", True), ("disabled", False), ("adaptive", None)])
def test_thinking_is_a_wish_to_the_template(kind: str, thinks: bool | None) -> None:
    assert parse(body(thinking={"type": kind, "budget_tokens": 1024})).thinks is thinks


def test_beta_headers_and_unknown_fields_of_blocks_change_nothing() -> None:
    """Fields of Claude Code that are ignored: caching, citations, callers, budgets, user ids."""
    plain = body(messages=[{"role": "user", "content": [text("hi")]}], system=[text("Be.")], tools=[TOOL])
    full = body(
        messages=[
            {"role": "user", "content": [text("hi", cache_control={"type": "ephemeral"}, citations=None)], "id": "x"}
        ],
        system=[text("Be.", cache_control={"type": "ephemeral", "ttl": "1h"})],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        container=None,
        frobnicate=None,
    )
    assert parse(full) == parse(plain)


SEARCHED = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].*web_search_20250305"),
        ({"tools": [TOOL, {"type": "code_execution_20250825", "name": "x"}]}, r"tools\[1\].*code_execution_20250825"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"mcp_servers": [{"type": "url", "url": "http://127.0.0.1", "name": "x"}]}, "mcp_servers"),
        ({"container": "box"}, "container"),
        ({"messages": [{"role": "user", "content": [text("see"), IMAGE]}]}, r"messages\[0\].content\[1\].*'image'"),
        ({"messages": [{"role": "user", "content": [result("x", [IMAGE])]}]}, r"content\[0\].content\[0\].*'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "'document'"),
        ({"messages": [{"role": "assistant", "content": [SEARCHED]}, USER]}, "'server_tool_use'"),
        ({"system": [IMAGE]}, r"system\[0\].*'image'"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is"}]}, "cannot be begun"),
        ({"max_tokens": None}, "max_tokens: required"),
        ({"tools": [{"name": "add"}]}, r"tools\[0\].input_schema: required"),
        ({"tool_choice": {"type": "tool", "name": "gone"}}, "no tool is named 'gone'"),
        ({"tool_choice": {"type": "any"}}, "needs tools"),
        ({"frobnicate": 1}, "unknown parameter: 'frobnicate'"),
        ({"temperature": 1e-9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id: required"),
    ],
)  # fmt: skip
def test_what_only_anthropic_can_do_is_refused_by_name(fields: Json, named: str) -> None:
    with pytest.raises(ChatError, match=named) as refusal:
        parse(body(**fields))
    assert refusal.value.status == 400
    if not {"max_tokens", "temperature"} & fields.keys() and "begun" not in named:  # a count has none of these
        with pytest.raises(ChatError, match=named):
            AnthropicCountTokens().parse(json.dumps(body(**fields)).encode(), Sampling())


# --- replies ----------------------------------------------------------------------------------------------------------

DELTAS = st.lists(
    st.one_of(
        st.builds(lambda piece: {"reasoning_content": piece}, st.sampled_from(["hm", " no", "\n"])),
        st.builds(lambda piece: {"content": piece}, st.sampled_from(["I", " say", "é\n"])),
        st.builds(
            lambda index, piece: {"tool_calls": [{"index": index, "function": {"arguments": piece}}]},
            st.integers(0, 1),
            st.sampled_from(['{"a": 1}', '{"a": ', "[1]", '"x', ""]),
        ),
        st.just({}),
    ),
    max_size=8,
)


def call_begins(index: int) -> Json:
    return {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": f"f{index}", "arguments": ""}}]}


def streamed(deltas: list[Json], finish: Json) -> tuple[Json, Json]:
    """The message that the events make, joined as Anthropic's clients join them; and the one of the whole reply."""
    request = parse(body())
    events, builder, sent = WIRE.stream(request), ReplyBuilder(request), b""
    for place, delta in enumerate([*deltas, {}]):
        is_last = place == len(deltas)
        choice = Choice(index=0, message=delta, token_ids=[1], logprobs=[-1.0], **(finish if is_last else {}))
        chunk = Chunk(
            id="x", created=1, model="policy", choice=choice, is_last=is_last, prompt_ids=None if place else [1]
        )
        builder.add(chunk)
        sent += events.render(chunk)
    counts = Chunk(id="x", created=1, model="policy", choice=Choice(index=0), usage=(1, len(deltas) + 1))
    builder.add(counts)  # as OpenAI's and vLLM's streams end
    sent += events.render(counts) + events.finish()
    message: Json = {}
    inputs: dict[int, str] = {}
    for event in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        match told["type"]:
            case "message_start":
                message = told["message"]
            case "content_block_start":
                assert told["index"] == len(message["content"])
                message["content"].append(told["content_block"])
            case "content_block_delta":
                block, delta = message["content"][told["index"]], told["delta"]
                if delta["type"] == "input_json_delta":
                    inputs[told["index"]] = inputs.get(told["index"], "") + delta["partial_json"]
                else:
                    kind = delta["type"].removesuffix("_delta")
                    block[kind] += delta[kind]
            case "message_delta":
                message |= told["delta"] | {"usage": told["usage"]}
    for index, written in inputs.items():
        message["content"][index]["input"] = json.loads(written)
    return message, message_of(builder.reply())


@settings(max_examples=60)
@given(DELTAS, st.booleans())
def test_a_streamed_message_is_the_whole_one(pieces: list[Json], is_cut: bool) -> None:
    """For all ways to split. Text after a call is a separate block in a stream, and the joined text is equal."""
    seen: set[int] = set()
    deltas: list[Json] = []
    order: list[int] = []
    for piece in pieces:
        for call in piece.get("tool_calls", ()):
            if call["index"] not in seen and call["index"] == len(seen):
                seen.add(call["index"])
                deltas.append(call_begins(call["index"]))
                order.append(call["index"])
            if not order or order[-1] != call["index"] or deltas[-1].get("tool_calls") is None:
                break  # no endpoint goes back to an earlier call, or to one that text has followed
        else:
            deltas.append(piece)
    stream, whole = streamed(deltas, {"finish_reason": "length" if is_cut else "tool_calls" if seen else "stop"})
    for name in ("type", "role", "model", "stop_reason", "stop_sequence", "usage"):
        assert stream[name] == whole[name]
    for kind, field in (("thinking", "thinking"), ("text", "text")):
        joined = [
            "".join(block[field] for block in each["content"] if block["type"] == kind) for each in (stream, whole)
        ]
        assert joined[0] == joined[1]
    calls = [[block for block in each["content"] if block["type"] == "tool_use"] for each in (stream, whole)]
    assert calls[0] == calls[1]
    for block in stream["content"]:
        if block["type"] == "thinking":
            assert block["signature"] == signature_of(block["thinking"])


@pytest.mark.parametrize(
    ("finish", "told"),
    [
        ({"finish_reason": "stop"}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_string": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "tool_calls"}, ("tool_use", None)),
    ],
)
def test_the_reason_of_the_end_is_anthropics(finish: Json, told: tuple[str, str | None]) -> None:
    for message in streamed([{"content": "x"}], finish):
        assert (message["stop_reason"], message["stop_sequence"]) == told
        assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (1, 2)


def test_two_replies_have_two_ids() -> None:
    """Claude Code joins messages of one id to one message, and some endpoints give every reply the same."""
    assert len({streamed([], {})[0]["id"] for _ in range(3)}) == 3


def test_calls_that_an_endpoint_gives_without_an_id_or_a_function_are_blocks_all_the_same() -> None:
    calls: list[Json] = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}, {"index": 1, "type": "custom"}]
    for message in streamed([{"tool_calls": calls}], {"finish_reason": "tool_calls"}):
        first, second = message["content"]
        assert (first["name"], second["name"], first["input"], second["input"]) == ("f", "", {}, {})
        assert first["id"] and second["id"] and first["id"] != second["id"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '{"a": NaN}', '{"a":' * 40 + "1" + "}" * 40])
def test_arguments_that_are_no_object_are_handed_out_as_their_text(text: str) -> None:
    """Arguments of a truncated reply, for example; sent back, they equal the sampled text."""
    handed_out = input_of(text)
    assert handed_out == ({"arguments": text} if text else {})
    assert are_same(text, json.dumps(handed_out))


@pytest.mark.parametrize(
    ("first", "second", "is_same"),
    [
        ('{"a": 1.0, "b":[2]}', '{"b": [2], "a": 1}', True),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": [1]}', '{"a": [1, 1]}', False),
        ('{"a": null}', "{}", False),
        ('{"a": 1}', "[" * 100_000, False),
        ('{"a": 1}', "9" * 5_000, False),
    ],
)
def test_arguments_are_compared_as_json(first: str, second: str, is_same: bool) -> None:
    assert are_same(first, second) is is_same


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "sent", "kind"),
    [
        (400, 400, "invalid_request_error"),
        (401, 401, "authentication_error"),
        (429, 429, "rate_limit_error"),
        (500, 500, "api_error"),
        (503, 529, "overloaded_error"),
        (504, 504, "timeout_error"),
    ],
)
def test_errors_have_anthropics_form(status: int, sent: int, kind: str) -> None:
    error = ChatError(status, "so it is")
    assert WIRE.status(error) == sent
    assert json.loads(WIRE.error(error)) == {"type": "error", "error": {"type": kind, "message": "so it is"}}


def test_a_prompt_that_does_not_fit_is_called_so_as_clients_know_it() -> None:
    told = json.loads(WIRE.error(ChatError(400, "9 of 8", code="context_length_exceeded")))
    assert told["error"]["message"].startswith("prompt is too long: ")


async def test_refusals_of_the_application_have_anthropics_form() -> None:
    """A wrong path below ours, a wrong method, a wrong key, a body that is too large, broken JSON."""
    backend = ScriptedBackend()
    app = build_app(lambda key: backend if key == "right" else None, AppSettings(body_limit=lambda: BodyLimit(200)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x/v1", headers={"x-api-key": "right"}) as http:
        for reply, status, kind in (
            (await http.get("/messages"), 405, "invalid_request_error"),
            (await http.post("/messages", json=body(), headers={"x-api-key": "wrong"}), 401, "authentication_error"),
            (await http.post("/messages", content=b"x" * 201), 413, "request_too_large"),
            (await http.post("/messages/count_tokens", content=b"{"), 400, "invalid_request_error"),
            (await http.post("/messages", json=body(model="other")), 404, "not_found_error"),
        ):
            assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)


def test_the_text_of_a_result_that_is_an_error_says_so() -> None:
    asked = {"role": "assistant", "content": [tool_use("one"), tool_use("two"), tool_use("three")]}
    results = [
        {**result("one", "no such file"), "is_error": True},
        {**result("two", "<tool_use_error>busy"), "is_error": True},
        {**result("three", "fine"), "is_error": False},
    ]
    request = parse(body(messages=[USER, asked, {"role": "user", "content": results}]))
    texts = [message["content"] for message in (request.messages or [])[2:]]
    assert texts == ["Error: no such file", "<tool_use_error>busy", "fine"]
    assert request.failed_calls == {"one", "two"}
