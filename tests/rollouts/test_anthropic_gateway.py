"""Anthropic's official client at the gateway: conversations continue their own tokens, and are recorded once.

Each test is named after a way in which a gateway for this protocol has failed before.
"""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.recorder import Recorder
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import prompt, sequence
from tests.support.models.tiny import CHAT_TEMPLATE
from tests.support.others.node import clients
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import Engine, ScriptedBackend
from tests.support.standins.template_backend import THINKS, TemplateBackend, scripted

Json = dict[str, Any]
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
DEFAULTS = Sampling(temperature=0.7, max_tokens=500)
# Possible replies: JSON with unusual spaces, order, and numbers; text next to calls; several calls.
REPLIES = (
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"b":  1.0, "a":2}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": "é\\u00e9", "b": [true, null]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "The sum is 3,\nand that is all. ",
    "You are welcome.",
)


@contextlib.asynccontextmanager
async def gateway_of(backend: Any, **options: Any) -> AsyncIterator[tuple[Gateway, str, str]]:
    """A gateway being served, the root that Anthropic's clients want, and the key of one attempt."""
    gateway = Gateway(Engine(backend), **{"defaults": DEFAULTS, "seed": 0, "max_turns": 20, **options})
    async with gateway.serve() as url:
        yield gateway, url.removesuffix("/v1"), gateway.open("t0")


def client_of(root: str, key: str, **options: Any) -> Any:
    """The official client, whose import takes seconds in which other files' tests would wait."""
    import anthropic

    return anthropic.AsyncAnthropic(base_url=root, api_key=key, **{"max_retries": 0, **options})


async def say(client: Any, messages: list[Any], *, is_stream: bool, **options: Any) -> Any:
    options = {"model": "policy", "max_tokens": 400, "messages": messages, "tools": [TOOL], **options}
    if not is_stream:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        return await stream.get_final_message()


async def converse(client: Any, *, is_stream: bool, rewrite: Callable[[Json], Json] = lambda block: block) -> list[Any]:
    """Asks, answers every call, thanks once, and sends each reply back as the client has it; the messages."""
    messages: list[Any] = [USER]
    while len(messages) < 8:
        reply = await say(client, messages, is_stream=is_stream)
        content = [rewrite(block.model_dump(exclude_none=True)) for block in reply.content]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert reply.stop_reason == ("tool_use" if calls else "end_turn")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "3"} for call in calls]
        messages.append({"role": "user", "content": results or "thanks"})
    return messages[:-1]


def assert_one_path(recorder: Recorder, replies: tuple[str, ...], backend: TemplateBackend) -> None:
    """Each prompt continues all tokens of the previous turn, and the record equals the policy's tokens."""
    assert recorder.metrics()["num_branches"] == 0
    for index, text in enumerate(replies):
        turn = recorder.turns[index]
        assert turn.sampled_ids == backend.encode(text + "<|im_end|>")
        if index:
            assert (turn.parent, turn.kept) == (index - 1, len(sequence(recorder.turns, index - 1)))
    assert recorder.branches == []


# --- the conversation's own tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_conversation_with_tools_is_one_sequence(is_stream: bool) -> None:
    """Four turns: text with a call, two calls, text with a trailing space, thanks."""
    backend = TemplateBackend(scripted(*REPLIES))
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        messages = await converse(client, is_stream=is_stream)
        recorder = gateway.close(key)
    assert_one_path(recorder, REPLIES, backend)
    assert [block["type"] for block in messages[1]["content"]] == ["text", "tool_use"]
    assert messages[1]["content"][1]["input"] == {"a": 2, "b": 1.0}
    roles = ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in recorder.messages] == roles
    assert recorder.tools[0]["function"]["name"] == "add"


@pytest.mark.parametrize("name", ["keys turned round", "integers for whole floats", "spaces"])
async def test_tool_arguments_that_come_back_written_otherwise_open_no_branch(name: str) -> None:
    """JavaScript writes 1.0 as 1; frameworks sort keys."""

    def rewrite(block: Json) -> Json:
        if block["type"] != "tool_use":
            return block
        changed = dict(reversed(block["input"].items()))
        if name == "integers for whole floats":
            changed = {key: int(value) if value == 1.0 else value for key, value in changed.items()}
        return {**block, "input": changed, "caller": {"type": "direct"}}

    backend = TemplateBackend(scripted(*REPLIES))
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        await converse(client, is_stream=name == "spaces", rewrite=rewrite)
        recorder = gateway.close(key)
    assert_one_path(recorder, REPLIES, backend)


@pytest.mark.slow
async def test_arguments_that_a_client_changed_are_not_those_that_were_sampled() -> None:
    """True is not 1, and 2 is not 3: what the client says is what the policy reads."""
    texts = ('<tool_call>\n{"name": "add", "arguments": {"a": 1,"b": 2}}\n</tool_call>', "done")
    for changed in ({"a": True, "b": 2}, {"a": 1, "b": 3}, {"a": 1}):
        backend = TemplateBackend(scripted(*texts))
        async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
            reply = await say(client, [USER], is_stream=False)
            call = {**reply.content[0].model_dump(exclude_none=True), "input": changed}
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
            talk = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
            await say(client, talk, is_stream=False)
            recorder = gateway.close(key)
        assert recorder.metrics()["num_branches"] == 1
        assert json.dumps(changed) in backend.vocabulary.decode(prompt(recorder.turns, 1))


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_thoughts_come_first_and_come_back_with_their_signature(is_stream: bool) -> None:
    """Equal thoughts have equal signatures, and the next prompt contains the thoughts token for token."""
    assert THINKS != CHAT_TEMPLATE
    texts = tuple(f"<think>\nthought {number}\n\nmore\n</think>\n\n{text}" for number, text in enumerate(REPLIES))
    backend = TemplateBackend(scripted(*texts), template=THINKS)
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        messages = await converse(client, is_stream=is_stream)
        recorder = gateway.close(key)
    assert_one_path(recorder, texts, backend)
    assert [block["type"] for block in messages[1]["content"]] == ["thinking", "text", "tool_use"]
    assert messages[1]["content"][0]["thinking"] == "thought 0\n\nmore"
    assert messages[1]["content"][0]["signature"]
    backend = TemplateBackend(scripted(*texts), template=THINKS)
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        reply = await say(client, [USER], is_stream=not is_stream)
    assert reply.content[0].signature == messages[1]["content"][0]["signature"]


THOUGHTS = tuple(f"<think>\nthought {number}\n</think>\n\n{text}" for number, text in enumerate(REPLIES))
LLAMA = ('{"name": "add", "parameters": {"b":  1.0, "a":2}}', '{"name": "add", "parameters": {"a": "x"}}', *REPLIES[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "texts", "end", "branching"),
    [
        ("qwen3", REPLIES, "<|im_end|>", []),
        ("qwen3", THOUGHTS, "<|im_end|>", [3]),  # thoughts go at the user's next question
        ("qwen2_5", REPLIES, "<|im_end|>", []),
        ("llama3_2", LLAMA, "<|eot_id|>", []),
    ],
    ids=["qwen3", "qwen3 thinks", "qwen2.5", "llama3.2"],
)
async def test_a_conversation_branches_only_where_its_real_template_writes_replies_anew(
    name: str, texts: tuple[str, ...], end: str, branching: list[int]
) -> None:
    """Templates of model families, taken from TRL. `branching` lists turns that do not continue the previous turn."""
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    backend = TemplateBackend(scripted(*texts), template=(templates / f"{name}.jinja").read_text(), end=end)
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        await converse(client, is_stream=True)
        turns = gateway.close(key).turns
    kept = [turn.parent == index and turn.kept == len(sequence(turns, index)) for index, turn in enumerate(turns[1:])]
    assert [index for index, is_kept in enumerate(kept, 1) if not is_kept] == branching


async def test_a_billing_header_that_changes_per_request_breaks_no_prefix() -> None:
    backend = TemplateBackend(scripted("yes", "no"))

    def system(number: int) -> list[Json]:
        header = f"x-anthropic-billing-header: cc_version=2; cch={number:05x};"
        return [{"type": "text", "text": text} for text in (header, "You are helpful.", "\nVery.")]

    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        await say(client, [USER], is_stream=False, system=system(1))
        talk = [USER, {"role": "assistant", "content": "yes"}, USER]
        await say(client, talk, is_stream=False, system=system(2))
        recorder = gateway.close(key)
    assert recorder.metrics()["num_branches"] == 0
    assert "billing" not in backend.vocabulary.decode(prompt(recorder.turns, 1))
    assert recorder.messages[0] == {"role": "system", "content": "You are helpful.\n\nVery."}


# --- what is recorded -------------------------------------------------------------------------------------------------


async def test_counts_are_answered_and_never_recorded() -> None:
    """As many tokens as the call's own prompt has; the one call allowed is still there after five counts."""
    backend = TemplateBackend(scripted(*["x"] * 5, "yes"))
    async with gateway_of(backend, max_turns=1) as (gateway, root, key), client_of(root, key) as client:
        for _ in range(5):
            count = await client.messages.count_tokens(model="policy", messages=[USER], tools=[TOOL], system="Be.")
        reply = await say(client, [USER], is_stream=False, system="Be.")
        recorder = gateway.close(key)
    assert count.input_tokens == reply.usage.input_tokens == len(prompt(recorder.turns, 0))
    assert reply.usage.output_tokens == len("yes") + 1
    assert (recorder.num_calls, len(recorder.turns)) == (1, 1)


async def test_a_retry_replaces_its_call_and_is_no_turn_of_its_own() -> None:
    """The SDK repeats the body and reports it in a header: siblings, and the first is abandoned."""
    backend = TemplateBackend(scripted("one", "two", "three"))
    body = {"model": "policy", "max_tokens": 9, "messages": [USER]}
    async with gateway_of(backend) as (gateway, root, key), httpx.AsyncClient(base_url=root) as http:
        for count in ("0", "1"):
            headers = {"x-api-key": key, "x-stainless-retry-count": count}
            assert (await http.post("/v1/messages", json=body, headers=headers)).status_code == 200
        talk = [USER, {"role": "assistant", "content": "two"}, USER]
        await http.post("/v1/messages", json={**body, "messages": talk}, headers={"x-api-key": key})
        recorder = gateway.close(key)
    assert [turn.is_abandoned for turn in recorder.turns] == [True, False, False]
    assert recorder.turns[2].parent == 1
    assert recorder.metrics()["num_branches"] == 0 and recorder.branches == []


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_reply_is_a_stream_exactly_when_a_stream_was_asked_for(is_stream: bool) -> None:
    body = {"model": "policy", "max_tokens": 9, "messages": [USER], "stream": is_stream}
    backend = TemplateBackend(scripted("yes"))
    async with gateway_of(backend) as (gateway, root, key), httpx.AsyncClient() as http:
        reply = await http.post(f"{root}/v1/messages?beta=true", json=body, headers={"x-api-key": key})
        turn = gateway.close(key).turns[0]
    kind = "text/event-stream" if is_stream else "application/json"
    assert reply.headers["content-type"].startswith(kind)
    assert turn.sampled_ids == backend.encode("yes<|im_end|>")
    if is_stream:
        names = [line.removeprefix("event: ") for line in reply.text.splitlines() if line.startswith("event: ")]
        assert names == ["message_start", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
                         "message_delta", "message_stop"]  # fmt: skip


PROGRAM = """
import os, anthropic
reply = anthropic.Anthropic(max_retries=0).messages.create(
    model=os.environ["ANTHROPIC_MODEL"], max_tokens=50, messages=[{"role": "user", "content": "hi"}])
print(float(reply.content[0].text == "yes" and "ANTHROPIC_AUTH_TOKEN" not in os.environ))
"""


@pytest.mark.slow
async def test_a_program_finds_the_gateway_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anthropic's clients read the variables themselves. The user's token is removed, because clients prefer it to the
    key.
    """
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    (tmp_path / "agent.py").write_text(PROGRAM)
    stage = Stage(tmp_path, TemplateBackend(scripted("yes")))
    (trajectory,) = await stage.play(entry=None, command=[sys.executable, "agent.py"])
    assert (trajectory.error, trajectory.returned_reward) == (None, 1.0)
    assert [message["content"] for message in trajectory.messages] == ["hi", "yes"]


@pytest.mark.slow
async def test_an_agent_in_node_is_one_sequence(tmp_path: Path) -> None:
    """Anthropic's official client for Node. JavaScript writes 1 for 1.0, and the call is the same all the same."""
    backend = TemplateBackend(scripted(*REPLIES))
    command = ["node", str(clients() / "agent_anthropic.mjs")]
    (trajectory,) = await Stage(tmp_path, backend).play(entry=None, command=command, timeout_s=120)
    assert trajectory.error is None
    assert trajectory.metadata == {
        "text": REPLIES[-1],
        "inputs": [{"b": 1, "a": 2}, {"a": "éé", "b": [True, None]}, {}],
        "errors": {
            "key": ["AuthenticationError", 401, "authentication_error"],
            "model": ["NotFoundError", 404, "not_found_error"],
            "image": ["BadRequestError", 400, "invalid_request_error"],
        },
    }
    assert [turn.sampled_ids for turn in trajectory.turns] == [backend.encode(f"{text}<|im_end|>") for text in REPLIES]
    assert trajectory.metrics["num_branches"] == 0 and trajectory.branches == []


async def test_max_tokens_of_another_model_are_a_bound_and_both_numbers_are_recorded() -> None:
    """Claude Code asks for 32,000 tokens in any context; the run's 500 apply, and a smaller number stays."""
    backend = TemplateBackend(scripted("a", "b"))
    async with gateway_of(backend) as (gateway, root, key), client_of(root, key) as client:
        await say(client, [USER], is_stream=True, max_tokens=32_000)
        await say(client, [USER], is_stream=False, max_tokens=50)
        turns = gateway.close(key).turns
    assert [request.sampling.max_tokens for request in backend.requests] == [500, 50]
    assert [turn.asked for turn in turns] == [{"max_tokens": 32_000}, None]


# --- keys and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["x-api-key", "bearer", "both"])
async def test_the_key_decides_the_trajectory_however_it_is_sent(how: str) -> None:
    """Also beside a client's own session headers."""
    async with gateway_of(ScriptedBackend()) as (gateway, root, key), httpx.AsyncClient() as http:
        headers = {"x-session-id": "another", "x-claude-code-session-id": "another"}
        headers |= {} if how == "bearer" else {"x-api-key": key}
        headers |= {} if how == "x-api-key" else {"authorization": f"Bearer {key}"}
        body = {"model": "policy", "max_tokens": 9, "messages": [USER]}
        assert (await http.post(f"{root}/v1/messages", json=body, headers=headers)).status_code == 200
        assert gateway.close(key).num_calls == 1
        refused = await http.post(f"{root}/v1/messages", json=body, headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


async def test_errors_are_those_that_the_official_client_knows() -> None:
    import anthropic

    errors = iter([ChatError(503, "loading", retry_after="5"), ChatError(429, "too many"), ChatError(500, "oops")])

    def fail(request: Request) -> str:
        raise next(errors)

    async with gateway_of(ScriptedBackend(fail)) as (_, root, key), client_of(root, key) as client:
        for kind, name, options in (
            (anthropic.NotFoundError, "not_found_error", {"model": "other"}),
            (anthropic.BadRequestError, "invalid_request_error", {"max_tokens": 0}),
            (anthropic.InternalServerError, "overloaded_error", {}),
            (anthropic.RateLimitError, "rate_limit_error", {}),
            (anthropic.InternalServerError, "api_error", {}),
        ):
            with pytest.raises(kind) as refusal:
                await say(client, [USER], is_stream=False, **options)
            body = refusal.value.body
            assert isinstance(body, dict) and set(body) == {"type", "error"}
            assert (body["type"], body["error"]["type"]) == ("error", name)
        async with client_of(root, "wrong") as other:
            with pytest.raises(anthropic.AuthenticationError):
                await say(other, [USER], is_stream=True)
            with pytest.raises(anthropic.AuthenticationError):
                await other.models.list()
        (card,) = (await client.models.list()).data
        assert (card.id, card.type, card.display_name) == ("policy", "model", "policy")
