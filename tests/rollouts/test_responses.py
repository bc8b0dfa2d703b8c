"""OpenAI's Responses at the gateway: each test is named after a failure that training of agents on this wire has had.

The official client talks to the gateway over HTTP. Prompts are rendered by a chat template with thoughts and calls.
"""

import gc
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import openai_responses
from art_cli.chat.wires.openai_responses import Memory
from art_cli.rollouts.recorder import Recorder
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import Turn, prompt, sequence
from tests.support.standins.scripted import BreakingBackend, Engine, ScriptedBackend
from tests.support.standins.template_backend import THINKS, TemplateBackend, scripted

Json = dict[str, Any]
Rewrite = Callable[[Json], Json | None]

OBJECT = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "number"}}}
TOOLS: list[Any] = [{"type": "function", "name": "look", "parameters": OBJECT}]
QUESTION = {"role": "user", "content": "Where is it warm?"}


def call(**arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def thinking(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def speaking(*texts: str) -> TemplateBackend:
    """Samples these texts, behind prompts that a template with thoughts and calls renders."""
    return TemplateBackend(scripted(*texts), template=THINKS)


class Bare(ScriptedBackend):
    """Answers with whole messages, without tokens."""

    async def reply(self, request: Request) -> Reply:
        message = await self._ask(request)
        choice = Choice(index=0, message=message, text=message["content"] or "")
        return Reply(id="reply", created=1, model=request.model, choices=[choice], prompt_ids=[])


@asynccontextmanager
async def playing(backend: Any, *, max_turns: int = 20) -> AsyncIterator[tuple[openai.AsyncOpenAI, Recorder]]:
    """Yields a client with a rollout's key, and the rollout's recorder."""
    gateway = Gateway(Engine(backend), defaults=Sampling(max_tokens=500), seed=0, max_turns=max_turns)
    key = gateway.open("t0")
    recorder = gateway._backends[key].recorder
    async with gateway.serve() as url, openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield client, recorder


async def ask(client: openai.AsyncOpenAI, input: Any, *, is_stream: bool = False, **options: Any) -> Any:
    asked = {"model": "policy", "input": input, "tools": TOOLS, **options}
    if not is_stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as stream:
        return await stream.get_final_response()


async def ask_for_events(client: openai.AsyncOpenAI, **options: Any) -> Any:
    return await client.responses.create(**{"model": "policy", "input": "hi", "stream": True, **options})


def assert_one_sequence(turns: Sequence[Turn]) -> None:
    """Each prompt continues the whole sequence of the turn before it."""
    for index, turn in enumerate(turns[1:], 1):
        whole = sequence(turns, index - 1)
        assert (turn.parent, turn.kept) == (index - 1, len(whole)), index
        assert prompt(turns, index)[: turn.kept] == whole


def assert_one_conversation(recorder: Recorder, num_turns: int) -> None:
    assert len(recorder.turns) == num_turns
    assert_one_sequence(recorder.turns)
    assert recorder.metrics()["num_branches"] == 0
    assert recorder.branches == []


# --- what clients do to items before they send them back --------------------------------------------------------------


def as_they_are(item: Json) -> Json:
    return item


def written_anew(item: Json) -> Json:
    """No space behind a colon, keys in another sequence, characters escaped; as JavaScript writes numbers."""
    if item["type"] == "function_call":
        values = json.loads(item["arguments"], parse_float=lambda text: int(float(text)))
        item["arguments"] = json.dumps(dict(reversed(values.items())), separators=(",", ":"), ensure_ascii=True)
    return item


def without_ids(item: Json) -> Json:
    return {name: value for name, value in item.items() if name not in ("id", "status")}


def encrypted_only(item: Json) -> Json:
    """As a client with store: false keeps a thought."""
    if item["type"] == "reasoning":
        return {"type": "reasoning", "summary": [], "encrypted_content": item["encrypted_content"]}
    return without_ids(item)


def with_more_fields(item: Json) -> Json:
    """Fields of a client's own, and fields that other providers give."""
    more = {"status": "completed", "provider_data": {"a": 1}, "phase": "commentary", "content_filter": None}
    return {**item, **more}


WAYS: list[Rewrite] = [as_they_are, written_anew, without_ids, encrypted_only, with_more_fields]


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("rewrite", WAYS, ids=lambda rewrite: rewrite.__name__)
async def test_eight_turns_do_not_come_back_as_eight_roots(rewrite: Rewrite, is_stream: bool) -> None:
    """Each turn has thoughts, text, and one or two calls. All turns form a single sequence for every kind of client."""
    answers = [
        thinking(f"It is turn {turn}.")
        + f"I look.\n{call(city='Zürich', n=turn + 0.0)}"
        + f"\n{call(n=9)}" * (turn % 2)
        for turn in range(7)
    ]
    backend = speaking(*answers, "Nowhere.")
    input: list[Any] = [QUESTION]
    async with playing(backend) as (client, recorder):
        for turn in range(8):
            reply = await ask(client, input, is_stream=is_stream, include=["reasoning.encrypted_content"])
            items = [rewrite(item.model_dump(exclude_none=True)) for item in reply.output]
            kinds = ["reasoning", "message", *["function_call"] * (1 + turn % 2)]
            assert [item.type for item in reply.output] == (kinds if turn < 7 else ["message"])
            input += items
            for item in reply.output:
                if item.type == "function_call":
                    input.append({"type": "function_call_output", "call_id": item.call_id, "output": "20 °C"})
    assert reply.output_text == "Nowhere."
    assert_one_conversation(recorder, 8)
    assert [message["role"] for message in recorder.messages[:3]] == ["user", "assistant", "tool"]


async def test_a_number_that_became_true_is_another_argument() -> None:
    """Equal JSON is restored to the sampled text, other JSON is not: the client's own value is in the prompt."""
    backend = speaking(call(n=1), "done")
    async with playing(backend) as (client, _):
        reply = await ask(client, [QUESTION])
        item = reply.output[0].model_dump() | {"arguments": '{"n": true}'}
        await ask(client, [QUESTION, item, output(item["call_id"], "1")])
    (message,) = [sent for sent in backend.requests[1].messages or [] if sent["role"] == "assistant"]
    assert message["tool_calls"][0]["function"]["arguments"] == '{"n": true}'


def output(call_id: str, text: str) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


@pytest.mark.parametrize("sequence_of", ["interleaved", "late", "early"])
async def test_parallel_calls_stand_in_the_order_in_which_they_were_made(sequence_of: str) -> None:
    """A client that runs tools at once may send their outputs as they come. The template shows no ids."""
    backend = speaking(f"{call(n=1)}\n{call(n=2)}", "done")
    async with playing(backend) as (client, recorder):
        reply = await ask(client, [QUESTION])
        first, second = (item.model_dump() for item in reply.output)
        one, two = output(first["call_id"], "first"), output(second["call_id"], "second")
        orders = {"interleaved": [first, one, second, two], "late": [first, second, two, one]}
        await ask(client, [QUESTION, *orders.get(sequence_of, [first, second, one, two])])
    assert_one_conversation(recorder, 2)
    assert [sent["content"] for sent in backend.requests[1].messages or []][2:] == ["first", "second"]


async def test_a_call_without_an_id_gets_one_and_its_output_finds_it() -> None:
    """As some endpoints give calls; the second one lacks its function as well."""
    calls = [{"type": "function", "function": {"name": "look", "arguments": "{}"}}, {"type": "function"}]
    answers = iter([{"role": "assistant", "content": None, "tool_calls": calls}, "warm"])
    async with playing(Bare(lambda request: next(answers))) as (client, _):
        reply = await client.responses.create(model="policy", input=[QUESTION], tools=TOOLS)
        look, empty = reply.output
        assert (look.name, look.arguments, empty.name) == ("look", "{}", "")
        assert look.call_id and look.call_id != empty.call_id
        output = {"type": "function_call_output", "call_id": look.call_id, "output": "20"}
        sent: Any = [QUESTION, look.model_dump(exclude_none=True), output]
        assert (await client.responses.create(model="policy", input=sent, tools=TOOLS)).output_text == "warm"


async def test_a_function_in_a_namespace_is_called_and_comes_back() -> None:
    """As Codex has the tools of MCP servers and sub-agents: they are its own, and no provider's."""
    namespace = {"type": "namespace", "name": "mcp__mail", "description": "Mail.", "tools": TOOLS}
    called = call(n=1).replace("look", "mcp__mail__look")
    backend = speaking(f"{call(n=2)}\n{called}", "done")
    async with playing(backend) as (client, recorder):
        reply = await ask(client, [QUESTION], tools=[*TOOLS, namespace])
        items = [item.model_dump(exclude_none=True) for item in reply.output]
        outputs = [output(item["call_id"], "20") for item in items]
        await ask(client, [QUESTION, *items, *outputs], tools=[*TOOLS, namespace], is_stream=True)
    assert [(item["name"], item.get("namespace")) for item in items] == [("look", None), ("look", "mcp__mail")]
    assert_one_conversation(recorder, 2)
    assert [tool["function"]["name"] for tool in recorder.tools] == ["look", "mcp__mail__look"]


async def test_outputs_come_before_the_text_of_the_user() -> None:
    backend = speaking(call(n=1), "done")
    async with playing(backend) as (client, recorder):
        reply = await ask(client, [QUESTION])
        item = reply.output[0].model_dump()
        await ask(client, [QUESTION, item, output(item["call_id"], "20"), {"role": "user", "content": "Quick!"}])
    assert_one_conversation(recorder, 2)
    assert [sent["role"] for sent in recorder.messages] == ["user", "assistant", "tool", "user", "assistant"]


async def test_a_developer_message_amid_a_conversation_is_not_refused_by_the_template() -> None:
    template = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    template += "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    backend = TemplateBackend(scripted("done"), template=template)
    late = [QUESTION, {"role": "assistant", "content": "There."}, {"role": "developer", "content": "Be brief."}]
    async with playing(backend) as (client, _):
        await ask(client, [{"role": "developer", "content": "In English."}, *late], instructions="You help.", tools=[])
    roles = [(sent["role"], sent["content"]) for sent in backend.requests[0].messages or []]
    assert roles[0] == ("system", "You help.\n\nIn English.") and roles[-1] == ("user", "Be brief.")


async def test_an_answer_that_was_asked_for_as_events_is_events() -> None:
    """A JSON body where a client reads events yields no token and no error."""
    backend = speaking(thinking("Hm.") + f"Let me look.\n{call(n=1)}")
    async with playing(backend) as (client, _):
        raw = await client.responses.with_raw_response.create(model="policy", input="hi", tools=TOOLS, stream=True)
        assert raw.headers["content-type"].startswith("text/event-stream")
        events = [event async for event in raw.parse()]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    shown = [name for place, name in enumerate(names) if name != names[place - 1]]
    part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert shown == [
        *("created", "in_progress"),
        *(name.format("reasoning_text") for name in part),
        *(name.format("output_text") for name in part),
        *("output_item.added", *arguments, "output_item.done"),
        "completed",
    ]
    thought, text, called = events[-1].response.output
    assert (thought.content[0].text, text.content[0].text) == ("Hm.", "Let me look.")
    assert (called.name, json.loads(called.arguments)) == ("look", {"n": 1})
    assert [event.item for event in events if event.type == "response.output_item.done"] == [thought, text, called]


async def test_a_stream_that_breaks_is_an_error_and_not_a_short_answer() -> None:
    """The official client raises it, though it takes response.failed for an event like any other."""
    async with playing(BreakingBackend()) as (client, recorder):
        with pytest.raises(openai.APIError, match="the engine died"):
            await ask(client, "hi", is_stream=True)
        stream = await ask_for_events(client)
        seen = []
        with pytest.raises(openai.APIError, match="the engine died"):
            async for event in stream:
                seen.append(event)
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
    assert seen[-1].response.error.message == "the engine died"
    assert recorder.upstream_error == "the engine died"


class Counting(ScriptedBackend):
    """Streams end with a chunk that only has token counts, as in vLLM and `art serve`."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        async for chunk in super().stream(request):
            yield chunk
        yield msgspec.structs.replace(chunk, choice=Choice(index=0), is_last=False, usage=(18, 4))


@pytest.mark.parametrize("kind", [ScriptedBackend, Counting])
async def test_an_answer_that_was_cut_off_says_so(kind: type[ScriptedBackend]) -> None:
    async with playing(kind(lambda request: "a long story")) as (client, recorder):
        reply = await ask(client, "hi", max_output_tokens=4)
        events = [event async for event in await ask_for_events(client, max_output_tokens=4)]
    for response in (reply, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output_text, response.output[0].status) == ("a lo", "incomplete")
        assert response.usage.output_tokens == 4 and response.usage.total_tokens == response.usage.input_tokens + 4
    assert events[-1].type == "response.incomplete"
    assert [turn.finish_reason for turn in recorder.turns] == ["length", "length"]


async def test_a_retry_is_no_second_turn() -> None:
    """Each response has a new id, but a retry is recognized by its body."""
    async with playing(ScriptedBackend()) as (client, recorder):
        for number in range(2):
            await ask(client, "hi", extra_headers={"x-stainless-retry-count": str(number)})
    assert recorder.metrics()["num_abandoned"] == 1
    assert [turn.is_abandoned for turn in recorder.turns] == [True, False]


async def test_a_title_and_a_sub_agent_are_roots_of_their_own() -> None:
    """Calls of other conversations, between two turns, are no branches of the conversation and do not break it."""
    backend = speaking(call(n=1), "A title", "Of a sub-agent", "done")
    async with playing(backend) as (client, recorder):
        reply = await ask(client, [QUESTION], instructions="Be brief.")
        await ask(client, "Name this conversation.", instructions="You name conversations.", tools=[])
        await ask(client, "Look there.", instructions="You are a helper.")
        outputs = [output(item.call_id, "20") for item in reply.output]
        await ask(client, [QUESTION, *reply.output, *outputs], instructions="Be brief.")
    first, *others, last = recorder.turns
    assert (last.parent, last.kept) == (0, len(sequence(recorder.turns, 0)))
    system = len(backend.encode("<|im_start|>system\n"))
    assert first.parent is None and all(turn.kept <= system + len(backend.encode("You ")) for turn in others)
    assert [conversation[-1]["content"] for conversation in recorder.branches] == ["A title", "Of a sub-agent"]
    assert recorder.messages[-1]["content"] == "done"


async def test_a_prompt_that_is_too_long_says_so_of_the_input() -> None:
    async def refuse(request: Request) -> str:
        raise ChatError(400, "the context holds 64 tokens", param="messages", code="context_length_exceeded")

    async with playing(ScriptedBackend(refuse)) as (client, recorder):
        with pytest.raises(openai.BadRequestError) as refusal:
            await ask(client, "hi")
    assert (refusal.value.param, refusal.value.code) == ("input", "context_length_exceeded")
    assert recorder.limit == "context_length_exceeded"


async def test_the_key_says_which_rollout_calls_whatever_session_a_client_names() -> None:
    """Two rollouts at once, which claim to be the same session."""
    gateway = Gateway(Engine(ScriptedBackend()), defaults=Sampling(), seed=0, max_turns=9)
    keys = [gateway.open("t0"), gateway.open("t1")]
    named = {"session_id": "one", "x-session-id": "one", "conversation_id": "one"}
    async with gateway.serve() as url, openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for number, key in enumerate(keys):
            await ask(client.with_options(api_key=key), f"from {number}", extra_headers=named, prompt_cache_key="one")
        with pytest.raises(openai.AuthenticationError, match="no running attempt has it"):
            await ask(client, "hi")
    texts = [gateway.close(key).messages[0]["content"] for key in keys]
    assert texts == ["from 0", "from 1"]


# --- responses that are kept ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("way", ["previous_response_id", "item_reference"])
async def test_a_conversation_by_reference_is_one_sequence(way: str, is_stream: bool) -> None:
    """Two calls together, with outputs in another order. Instructions apply only to their own call."""
    answers = [thinking("Hm.") + f"{call(n=1)}\n{call(n=2)}", thinking("So.") + call(n=3), "Nowhere."]
    backend = speaking(*answers)
    input: list[Any] = [{"role": "developer", "content": "In English."}, QUESTION]
    more: Json = {}
    async with playing(backend) as (client, recorder):
        for _ in range(3):
            reply = await ask(client, input, is_stream=is_stream, instructions="Be brief.", **more)
            called = [item.call_id for item in reply.output if item.type == "function_call"]
            outputs = [output(id, id) for id in reversed(called)]
            if way == "previous_response_id":
                input, more = outputs, {"previous_response_id": reply.id}
            else:
                input += [*({"id": item.id} for item in reply.output), *outputs]
    assert_one_conversation(recorder, 3)
    system, *_ = backend.requests[2].messages or []
    assert system["content"] == "Be brief.\n\nIn English."


async def test_the_instructions_of_a_response_are_not_those_of_the_next() -> None:
    backend = ScriptedBackend()
    async with playing(backend) as (client, _):
        first = await ask(client, "hi", instructions="Be brief.")
        second = await ask(client, "more", previous_response_id=first.id)
        await ask(client, "and?", previous_response_id=second.id, instructions="Be long.")
    said = [[sent["content"] for sent in request.messages or []] for request in backend.requests]
    assert said == [["Be brief.", "hi"], ["hi", "ok", "more"], ["Be long.", "hi", "ok", "more", "ok", "and?"]]


async def test_a_response_that_is_not_kept_is_refused_and_no_turn() -> None:
    """An unstored response, another rollout's response, an unknown response, and an invalid id."""
    gateway = Gateway(Engine(ScriptedBackend()), defaults=Sampling(), seed=0, max_turns=9)
    keys = [gateway.open("t0"), gateway.open("t1")]
    async with gateway.serve() as url, openai.AsyncOpenAI(base_url=url, api_key=keys[0], max_retries=0) as client:
        unstored = await ask(client, "hi", store=False)
        others = await ask(client.with_options(api_key=keys[1]), "hi")
        assert (unstored.store, others.store) == (False, True)
        for id in (unstored.id, others.id, "resp_" + "0" * 32, "conv_1", "ü"):
            with pytest.raises(openai.BadRequestError, match="not, or no longer, kept here") as refusal:
                await ask(client, "more", previous_response_id=id)
            assert refusal.value.code == "previous_response_not_found"
            with pytest.raises(openai.BadRequestError, match="not, or no longer, kept here"):
                await ask(client, [{"type": "item_reference", "id": f"msg_{id.removeprefix('resp_')}_0"}])
    assert [gateway.close(key).num_calls for key in keys] == [1, 1]


async def test_what_is_kept_for_a_rollout_ends_with_it() -> None:
    gateway = Gateway(Engine(ScriptedBackend()), defaults=Sampling(), seed=0, max_turns=9)
    key = gateway.open("t0")
    backend = weakref.ref(gateway._backends[key])
    async with gateway.serve() as url, openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        await ask(client, "hi")
        gateway.close(key)
        gc.collect()
        assert backend() is None


def test_only_so_much_is_kept_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_responses, "MAX_REPLIES", 3)
    monkeypatch.setattr(openai_responses, "MAX_BYTES", 10_000)
    memory = Memory()

    def keep(id: str, text: str, key: str = "key") -> None:
        asked = Request(
            model="m", sampling=Sampling(), id=id, messages=[{"role": "user", "content": text}], is_kept=True
        )
        choice = Choice(index=0, message={"role": "assistant", "content": "ok"})
        memory.keep(asked, key, Reply(id="", created=0, model="m", choices=[choice], prompt_ids=[]))

    def kept() -> list[str]:
        return [id for _, id in memory._kept]

    for id in "abcd":
        keep(id, "hi")
    assert kept() == ["b", "c", "d"]
    keep("large", "x" * 9_900)
    assert kept() == ["large"]
    keep("too large", "x" * 10_000)
    assert kept() == ["large"]
    again = Request(model="m", sampling=Sampling(), previous="large", messages=[{"role": "user", "content": "?"}])
    assert [len(sent["content"]) for sent in memory.recall(again, "key").messages or []] == [9_900, 2, 1]
    with pytest.raises(ChatError, match="kept"):
        memory.recall(again, "another key")
    keep("another's", "hi", "another key")
    assert kept() == ["another's"]
    for id in "abcde":
        keep(id, "x" * 4_000)
    assert kept() == ["another's", "d", "e"]


@pytest.mark.slow
async def test_a_short_request_does_not_become_an_endless_conversation() -> None:
    async with playing(ScriptedBackend()) as (client, _):
        reply = await ask(client, "hi")
        reference = {"type": "item_reference", "id": reply.output[0].id}
        with pytest.raises(openai.BadRequestError, match="in two places"):
            await ask(client, [reference, QUESTION] * 1000)


# --- what is refused, by name -----------------------------------------------------------------------------------------

HOSTED = ["web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview", "mcp",
          "image_generation", "local_shell", "shell", "apply_patch", "custom", "tool_search"]  # fmt: skip
IMAGE = {"type": "input_image", "image_url": "https://example.com/cat.png"}
FILE = {"type": "input_file", "file_id": "file-1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        *(({"tools": [{"type": kind}]}, kind) for kind in HOSTED),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}, "mcp"),
        ({"tools": [*TOOLS, *TOOLS]}, "look"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input_image"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input_file"),
        ({"input": [output("c", "x") | {"output": [IMAGE]}]}, "input_image"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "web_search_call"),
        ({"input": [{"type": "computer_call_output", "call_id": "c", "output": {}}]}, "computer_call_output"),
        (
            {"input": [{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}]},
            "encrypted_content",
        ),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "web_search_preview"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "other"),
        ({"include": ["everything"]}, "everything"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"temprature": 1}, "temprature"),
        ({"input": []}, "input"),
        ({"metadata": {"a": "x" * 20_000}}, "metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_only_a_hosted_service_has_is_not_dropped_in_silence(fields: Json, named: str) -> None:
    async with playing(ScriptedBackend()) as (client, recorder):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.responses.create(**{"model": "policy", "input": "hi"}, extra_body=fields)
    assert named in refusal.value.message
    assert recorder.num_calls == 0


# --- what a request says ----------------------------------------------------------------------------------------------


async def test_a_policy_sees_the_prompt_that_chat_completions_would_show_it() -> None:
    """The same conversation, tools, choice and format through both wires are the same request to the engine."""
    backend = ScriptedBackend()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "look", "description": "Looks.", "parameters": OBJECT, "strict": True}
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"n": 1}'}}
    async with playing(backend) as (client, _):
        await client.chat.completions.create(
            model="policy",
            messages=[
                {"role": "system", "content": "Be brief.\n\nIn English."},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "I look.", "tool_calls": [called]},
                {"role": "tool", "tool_call_id": "c1", "content": "20"},
            ],
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "look"}},
            response_format={"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}},
            temperature=0.5,
            top_p=0.9,
            max_completion_tokens=7,
        )
        await client.responses.create(
            model="policy",
            instructions="Be brief.",
            input=[
                {"role": "developer", "content": "In English."},
                {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
                {"role": "assistant", "content": "I look."},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "20"}]},
            ],
            tools=[{"type": "function", **function}],
            tool_choice={"type": "function", "name": "look"},
            text={"format": {"type": "json_schema", "name": "n", "strict": True, "schema": schema}},
            temperature=0.5,
            top_p=0.9,
            max_output_tokens=7,
        )
    chat, responses = backend.requests
    for name in ("messages", "tools", "tool_choice", "response_format", "user_set"):
        assert getattr(responses, name) == getattr(chat, name), name
    assert msgspec.structs.replace(responses.sampling, seed=chat.sampling.seed) == chat.sampling


async def test_logprobs_are_those_of_chat_completions() -> None:
    wants: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    messages: Any = [{"role": "user", "content": "hi"}]
    async with playing(ScriptedBackend(lambda request: "yes")) as (client, _):
        told = await ask(client, "hi", **wants)
        events = [event async for event in await ask_for_events(client, **wants)]
        chat = await client.chat.completions.create(model="policy", messages=messages, logprobs=True, top_logprobs=1)
    assert chat.choices[0].logprobs and chat.choices[0].logprobs.content
    wanted = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    assert [entry.model_dump() for entry in told.output[0].content[0].logprobs] == wanted
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [(entry.token, entry.logprob) for entry in streamed] == [(each["token"], each["logprob"]) for each in wanted]


async def test_a_response_repeats_what_was_asked() -> None:
    asked: Json = {
        "instructions": "Be brief.",
        "temperature": 0.0,
        "parallel_tool_calls": False,
        "metadata": {"a": "b"},
        "tool_choice": "required",
    }
    async with playing(ScriptedBackend()) as (client, _):
        reply = await ask(client, "hi", **asked, reasoning={"effort": "low"}, text={"verbosity": "low"})
    assert {name: getattr(reply, name) for name in asked} == asked
    assert reply.reasoning.effort == "low" and reply.text.format.type == "text"
    assert [(tool.type, tool.name) for tool in reply.tools] == [("function", "look")]
    assert reply.id.startswith("resp_") and reply.output[0].id.startswith("msg_")
