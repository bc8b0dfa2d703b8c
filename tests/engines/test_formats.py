"""Replies held to a format: what completes parses and validates, and nobody else in the batch notices.

The model's weights are random, so whatever is well-formed is so because it was held to it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any, Literal

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import openai
import pydantic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from art_cli.chat.chat_app import build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import serve
from art_cli.chat.replies import Choice, ReplyBuilder
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import OpenAIChat
from art_cli.config.schema import EmbeddedEngineConfig, GrpoConfig, TorchLearnerConfig, TrainConfig
from art_cli.engines.embedded import chat_prompts as messages
from art_cli.engines.embedded import token_sampling as sampling
from art_cli.engines.embedded.chat_prompts import MessageParser, Prompt
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.engines.embedded.grammars import Format
from art_cli.engines.embedded.token_sampling import Allowed, Knobs
from art_cli.learners import LearnerSetup
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.weights import Weights
from tests.support.models.tiny import CHAT_TEMPLATE, tiny_tokenizer, tiny_weights

Json = dict[str, Any]
STOP = 258

PERSON: Json = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["age", "kind", "tags"],
    "additionalProperties": False,
}
COMPACT: Json = {"x-guidance": {"whitespace_flexible": False}}  # what art asks of llguidance
LOOK: Json = {
    "type": "function",
    "function": {
        "name": 'look "é"',
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": ["up", "down"]}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
}
WAIT: Json = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"properties": {}, "additionalProperties": False}},
}
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (LOOK, WAIT)}


def held(schema: Json | None = None) -> Json:
    """The response_format of a schema; None: any object."""
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "it", "strict": True, "schema": schema}}


def ask(text: str = "hello", format: Json | None = None, tools: list[Json] | None = None, **knobs: Any) -> Request:
    choice = knobs.pop("tool_choice", "auto")
    wants = {name: knobs.pop(name) for name in ("wants_logprobs", "top_logprobs") if name in knobs}
    knobs = {"max_tokens": 400, "seed": 1, **knobs}
    return Request(
        model="policy",
        messages=[{"role": "user", "content": text}],
        sampling=Sampling(**knobs),
        user_set=frozenset(knobs),
        response_format=format,
        tools=tools or [],
        tool_choice=choice,
        **wants,
    )


@asynccontextmanager
async def running(weights: Weights | None = None) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(weights or tiny_weights(), name="policy", config=EmbeddedEngineConfig())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def content(choice: Choice) -> Any:
    assert choice.message and choice.finish_reason == "stop", choice
    return json.loads(choice.message["content"], parse_float=Decimal)  # as a float, 3.999... is 4


# --- what completes is well-formed ------------------------------------------------------------------------------------

TEXTS = st.one_of(
    st.builds(lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
              st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from(
        ["^[a-c]{1,4}$", "^[A-Z][0-9]{2}$", "^(é|日本)?x$"]
    ).map(lambda it: {"pattern": it, "type": "string"}),
)  # fmt: skip
NUMBERS = st.one_of(
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-200, 200), st.integers(0, 500)),
    st.builds(lambda low, more: {"type": "number", "minimum": low, "exclusiveMaximum": low + more},
              st.integers(-5, 5), st.integers(1, 9)),
    st.sampled_from([{"type": "integer", "multipleOf": 5}, {"type": "boolean"}, {"type": "null"}]),
)  # fmt: skip
ATOMS = st.one_of(
    TEXTS,
    NUMBERS,
    st.lists(st.one_of(st.integers(-9, 9), st.booleans(), st.none(), st.text(max_size=4)), min_size=1, max_size=4).map(
        lambda values: {"enum": [json.loads(text) for text in sorted({json.dumps(value) for value in values})]}
    ),
    st.sampled_from([{"const": {"a": [1, "}"]}}, {"type": ["string", "null"], "maxLength": 2}]),
)


def arrays(items: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.builds(
        lambda item, least, more: {"type": "array", "items": item, "minItems": least, "maxItems": least + more},
        items, st.integers(0, 2), st.integers(0, 2),
    )  # fmt: skip


def objects(values: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=4)
    properties = st.dictionaries(names, st.tuples(values, st.booleans()), max_size=3)
    return properties.map(
        lambda fields: {
            "type": "object",
            "properties": {name: value for name, (value, _) in fields.items()},
            "required": [name for name, (_, is_required) in fields.items() if is_required],
            "additionalProperties": False,
        }
    )


def unions(values: st.SearchStrategy[Json]) -> st.SearchStrategy[Json]:
    return st.lists(values, min_size=1, max_size=2).map(lambda several: {"anyOf": several})


ANY = st.recursive(ATOMS, lambda inner: st.one_of(arrays(inner), objects(inner), unions(inner)), max_leaves=6)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[asyncio.Runner, EmbeddedEngine]]:
    """One engine for all examples, on a separate event loop."""
    engine = EmbeddedEngine(tiny_weights(), name="policy", config=EmbeddedEngineConfig())
    with asyncio.Runner() as runner:
        runner.run(engine.start())
        yield runner, engine
        runner.run(engine.close())


@pytest.mark.slow
def test_every_completed_reply_validates(shared: tuple[asyncio.Runner, EmbeddedEngine]) -> None:
    """Four replies per schema, 48 schemas; the model may write endless digits up to the limit."""
    runner, engine = shared
    reasons: list[str] = []

    async def replies(schemas: list[Json], seed: int) -> list[list[Choice]]:
        requests = [ask(format=held(schema), n=4, seed=seed) for schema in schemas]
        return [reply.choices for reply in await asyncio.gather(*map(engine.reply, requests))]

    @settings(max_examples=12, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(ANY, min_size=4, max_size=4), st.integers(0, 99))
    def check(schemas: list[Json], seed: int) -> None:
        for schema, choices in zip(schemas, runner.run(replies(schemas, seed)), strict=True):
            for choice in choices:
                reasons.append(choice.finish_reason)
                if choice.finish_reason == "stop":
                    jsonschema.validate(content(choice), schema)
                    assert choice.token_ids[-1] == STOP

    check()
    assert set(reasons) <= {"stop", "length"}
    assert reasons.count("stop") > 0.8 * len(reasons)


async def test_a_reply_held_to_a_schema_has_no_white_space_but_in_its_texts() -> None:
    """24 replies to a strict schema with two booleans, and to a non-strict schema: no reply hits max_tokens."""
    schema = {**PERSON, "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    loose = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    async with running() as engine:
        for format in (held(schema), loose):
            reply = await engine.reply(ask(format=format, n=24, max_tokens=len('{"a":false,"b":false}') + 1))
            texts = {choice.text for choice in reply.choices}
            assert texts <= {f'{{"a":{a},"b":{b}}}' for a in ("true", "false") for b in ("true", "false")}
            assert all(choice.finish_reason == "stop" for choice in reply.choices)


@pytest.mark.slow
async def test_any_object_is_an_object() -> None:
    async with running() as engine:
        reply = await engine.reply(ask(format=held(), n=16))
    ended = [content(choice) for choice in reply.choices if choice.finish_reason == "stop"]
    assert ended and all(isinstance(value, dict) for value in ended)
    for choice in reply.choices:
        assert choice.finish_reason in ("stop", "length")
        assert choice.text.startswith("{")


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{"top_p": 0.5}, {"top_k": 3}, {"temperature": 0.0}, {"temperature": 2.0}])
async def test_every_way_of_sampling_keeps_to_the_format(knobs: Json) -> None:
    async with running() as engine:
        first, again = [await engine.reply(ask(format=held(PERSON), n=3, **knobs)) for _ in range(2)]
        chunks = [chunk async for chunk in engine.stream(ask(format=held(PERSON), n=3, **knobs))]
    builder = ReplyBuilder(ask(n=3))
    for chunk in chunks:
        builder.add(chunk)
    for one, other, streamed in zip(first.choices, again.choices, builder.reply().choices, strict=True):
        assert one.token_ids == other.token_ids == streamed.token_ids
        assert one.message == streamed.message
        jsonschema.validate(content(one), PERSON)


async def test_a_reply_cut_short_says_so() -> None:
    async with running() as engine:
        [choice] = (await engine.reply(ask(format=held(PERSON), max_tokens=5))).choices
    assert choice.finish_reason == "length" and len(choice.token_ids) == 5 and choice.text.startswith("{")


async def test_a_preempted_reply_goes_on_where_it_was() -> None:
    """The weights change in the middle: everything is computed again, and the format holds on."""
    async with running() as engine:
        stream = engine.stream(ask(format=held(PERSON)))
        builder = ReplyBuilder(ask())
        async for chunk in stream:
            builder.add(chunk)
            await engine.sleep()
    jsonschema.validate(content(builder.reply().choices[0]), PERSON)


# --- the others in the batch ------------------------------------------------------------------------------------------


async def test_free_replies_are_what_they_would_be_alone() -> None:
    free = [ask(text, n=2, seed=7, max_tokens=60) for text in ("red", "a longer line", "日本")]
    async with running() as engine:
        alone = [await engine.reply(request) for request in free]
        together = await asyncio.gather(*map(engine.reply, [*free, ask(format=held(PERSON), n=3)]))
    for before, beside in zip(alone, together, strict=False):
        for one, other in zip(before.choices, beside.choices, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert all(content(choice) for choice in together[-1].choices)


def test_a_draw_among_the_allowed_is_one_from_logits_without_the_others() -> None:
    """Same numbers, same tokens; logprobs of the policy itself; rows that nothing holds are untouched."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 700, generator=generator)
    randomness = np.random.default_rng(0)
    knobs = Knobs(
        temperature=randomness.choice(np.array([0.0, 0.5, 1.0], np.float32), 40),
        top_p=randomness.choice(np.array([0.7, 1.0], np.float32), 40),
        top_k=randomness.choice(np.array([0, 5], np.int64), 40),
        seeds=randomness.integers(0, 2**63, 40).astype(np.uint64),
        num_sampled=np.arange(40),
    )
    rows = np.flatnonzero(randomness.random(40) < 0.5)
    tokens = randomness.random((len(rows), 700)) < 0.02
    tokens[:, 3] = True
    before = logits.clone()
    drawn = sampling.draw(logits, knobs, Allowed(rows, tokens))
    cut = logits.clone()
    cut[rows] = cut[rows].masked_fill(torch.from_numpy(~tokens), -torch.inf)
    free = sampling.draw(logits, knobs)
    assert torch.equal(logits, before)
    assert torch.equal(drawn.ids, sampling.draw(cut, knobs).ids)
    others = np.setdiff1d(np.arange(40), rows)
    assert torch.equal(drawn.logprobs[others], free.logprobs[others])
    for place, row in enumerate(rows):
        id, temperature = int(drawn.ids[row]), float(knobs.temperature[row])
        assert tokens[place, id]
        own = (logits[row] / temperature).log_softmax(-1)[id].item() if temperature else 0.0
        assert drawn.logprobs[row].item() == pytest.approx(own, abs=1e-5)
        assert drawn.raw_logprobs[row].item() == pytest.approx(logits[row].log_softmax(-1)[id].item(), abs=1e-5)


# --- references -------------------------------------------------------------------------------------------------------


async def test_a_greedy_reply_takes_the_likeliest_of_the_allowed() -> None:
    weights = tiny_weights()
    async with running(weights) as engine:
        reply = await engine.reply(ask(format=held(PERSON), temperature=0.0))
    [choice] = reply.choices
    tokenizer = LLTokenizer(tiny_tokenizer().backend_tokenizer.to_str(), n_vocab=265, eos_token=[256, STOP])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps({**PERSON, **COMPACT})))
    ids = list(reply.prompt_ids)
    for id in choice.token_ids:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[:265].astype(bool))
        with torch.no_grad():
            logits = weights.model(torch.tensor([ids])).logits[0, -1]
        assert int(logits.masked_fill(~allowed, -torch.inf).argmax()) == id
        matcher.consume_token(id)
        ids.append(id)
    assert choice.finish_reason == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_learner_computes_the_logprobs_that_were_reported(temperature: float) -> None:
    """Contract 2 with a grammar: reported logprobs are the policy's own, ignoring the grammar."""
    weights = tiny_weights()
    async with running(weights) as engine:
        reply = await engine.reply(ask(format=held(PERSON), n=4, temperature=temperature))
        forced = await engine.reply(ask(tools=[LOOK], tool_choice="required", n=2, temperature=temperature))
    learner = TorchLearner(
        weights,
        LearnerSetup(
            train=TrainConfig(learning_rate=1e-5),
            loss=GrpoConfig(),
            learner=TorchLearnerConfig(),
            sampling_max_tokens=400,
        ),
    )
    for answer in (reply, forced):
        for choice in answer.choices:
            whole = [*answer.prompt_ids, *choice.token_ids]
            count = len(choice.token_ids)
            assert choice.raw_logprobs is not None
            assert choice.logprobs == pytest.approx(learner.score(whole, temperature=temperature)[-count:], abs=1e-4)
            assert choice.raw_logprobs == pytest.approx(learner.score(whole)[-count:], abs=1e-4)


# --- tools and thoughts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_forced_calls_follow_their_schemas() -> None:
    named = {"type": "function", "function": {"name": LOOK["function"]["name"]}}
    async with running() as engine:
        required = await engine.reply(ask(tools=[LOOK, WAIT], tool_choice="required", n=12))
        one = await engine.reply(ask(tools=[LOOK, WAIT], tool_choice=named, n=4))
    names = set()
    for reply in (required, one):
        for choice in reply.choices:
            assert choice.finish_reason == "tool_calls" and choice.message and choice.message["content"] is None
            for call in choice.message["tool_calls"]:
                names.add(call["function"]["name"])
                jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert names == set(SCHEMAS)
    assert all(len(choice.message["tool_calls"]) == 1 for choice in one.choices if choice.message)


@pytest.mark.slow
async def test_with_tools_a_reply_is_a_call_or_in_the_format() -> None:
    async with running() as engine:
        reply = await engine.reply(ask(format=held(PERSON), tools=[LOOK, WAIT], n=32))
    kinds = set()
    for choice in reply.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema.validate(content(choice), PERSON)
        for call in (choice.message or {}).get("tool_calls", []):
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert {"stop", "tool_calls"} <= kinds


def test_text_in_a_format_is_no_call() -> None:
    parser = MessageParser(Prompt([], has_tools=True, format=Format("", (), "response_format")))
    text = '{"a": "<tool_call>{\\"name\\": \\"f\\"}</tool_call>"}'
    for letter in text:
        parser.push(letter)
    parser.flush()
    assert parser.message == {"role": "assistant", "content": text}


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["<think>\\n", "<think>\\n\\n</think>\\n\\n", ""])
async def test_a_thought_comes_before_the_format(prompt: str) -> None:
    """Prompts with an open thought, with a finished thought, and without any thought."""
    weights = tiny_weights(vocab=266)
    template = CHAT_TEMPLATE.replace(
        "<|im_start|>assistant\\n' }}{% endif", f"<|im_start|>assistant\\n{prompt}' }}}}{{% endif"
    )
    weights.tokenizer.chat_template = template + "{# <think></think> #}"
    weights.tokenizer.add_tokens(["</think>"])  # a separate token that random models sample
    async with running(weights) as engine:
        reply = await engine.reply(ask(format=held(PERSON), n=4, max_tokens=900))
        calls = await engine.reply(ask(tools=[LOOK], tool_choice="required", n=4, max_tokens=600))
    ended = [choice for choice in reply.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        jsonschema.validate(content(choice), PERSON)
        assert bool(choice.message and choice.message.get("reasoning_content")) == (prompt == "<think>\\n")
    called = [choice for choice in calls.choices if choice.finish_reason == "tool_calls"]
    assert called and all(choice.message and choice.message["tool_calls"] for choice in called)


# --- what cannot be had -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "poem"}, "Invalid type: poem"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "minimum"),
        ({"$ref": "http://127.0.0.1:1/x"}, "127.0.0.1"),
        ({"type": "string", "pattern": "\ud800"}, "hex escape"),
        ({"enum": ["x" * 200_000]}, "at most 131072"),
        ({"type": "array", "minItems": 10**8}, "too much memory"),
        ({"properties": {f"p{i}": {} for i in range(2000)}, "type": "object"}, "2000"),
    ],
)  # fmt: skip
async def test_a_schema_that_cannot_be_held_to_is_a_400(schema: Json, reason: str) -> None:
    async with running() as engine:
        for _ in range(2):
            with pytest.raises(ChatError, match=reason) as refusal:
                await engine.reply(ask(format=held(schema)))
            assert (refusal.value.status, refusal.value.param) == (400, "response_format")
            assert "\n" not in refusal.value.message and len(refusal.value.message) < 400


@pytest.mark.slow
async def test_a_schema_that_turns_out_too_costly_ends_its_reply_alone() -> None:
    """The trial sees the first two tokens; the object with 2,000 optional properties comes later."""
    costly = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    late = {"type": "array", "items": costly, "minItems": 1}
    late = {"type": "object", "properties": {"a": late}, "required": ["a"], "additionalProperties": False}
    async with running() as engine:
        other = asyncio.create_task(engine.reply(ask(format=held(PERSON), n=4)))
        with pytest.raises(ChatError, match="2000") as refusal:
            await engine.reply(ask(format=held(late)))
        assert (refusal.value.status, refusal.value.param) == (400, "response_format")
        for choice in (await other).choices:
            jsonschema.validate(content(choice), PERSON)


@pytest.mark.slow
async def test_a_schema_that_takes_minutes_holds_nobody_up() -> None:
    patterns = [{"type": "string", "pattern": f"(.*a){{{count}}}.{{20}}b"} for count in range(1, 20)]
    async with running() as engine:
        await engine.reply(ask(format=held(PERSON)))
        begin = time.perf_counter()
        hostile = asyncio.create_task(engine.reply(ask(format=held({"allOf": patterns}))))
        for _ in range(3):
            await engine.reply(ask(max_tokens=20))
            await engine.reply(ask(format=held(PERSON), max_tokens=20))
        assert not hostile.done()
        with pytest.raises(ChatError, match="more than 2 s"):
            await hostile
        assert time.perf_counter() - begin < 30


async def test_a_schema_that_a_busy_machine_could_not_try_out_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as engine:
        with monkeypatch.context() as busy:
            busy.setattr("art_cli.engines.embedded.grammars.TRIAL_WALL_S", 1e-3)
            with pytest.raises(ChatError, match="try again later") as refusal:
                await engine.reply(ask(format=held(PERSON)))
            assert refusal.value.status == 503
        await engine.reply(ask(format=held(PERSON), max_tokens=20))


async def test_a_tools_schema_is_advice_unless_it_is_strict() -> None:
    odd: Json = {"type": "object", "properties": {"x": {"type": "array", "maxItems": 1, "uniqueItems": True}}}
    odd |= {"additionalProperties": False}
    loose, strict = (
        {"type": "function", "function": {"name": "f", "parameters": odd, "strict": s}} for s in (False, True)
    )
    async with running() as engine:
        await engine.reply(ask(tools=[loose], tool_choice="required", max_tokens=5))
        with pytest.raises(ChatError, match="uniqueItems") as refusal:
            await engine.reply(ask(tools=[strict], tool_choice="required", max_tokens=5))
    assert (refusal.value.status, refusal.value.param) == (400, "tools")


ODD: list[tuple[str, Json, str]] = [
    ("oneOf that overlaps", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1"),
    ("dependencies", {"type": "object", "dependencies": {"a": ["b"]}}, "{}"),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}, "{}"),
    ("a format that is no standard's", {"type": "string", "format": "path"}, '"x"'),
    ("another one", {"type": "object", "properties": {"k": {"type": "string", "format": "password"}}}, '{"k":"x"}'),
    ("not", {"not": {"type": "string"}}, "1"),
    ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,2]"),
    ("if", {"type": "integer", "if": {"minimum": 1}, "then": {"maximum": 5}}, "3"),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}, '{"ab":1}'),
    ("contains", {"type": "array", "contains": {"type": "integer"}}, "[1]"),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}, "{}"),
    (
        "a set of pydantic's",
        {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "binary"}},
        "[]",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "example"), [odd[1:] for odd in ODD], ids=[odd[0] for odd in ODD])
async def test_a_formats_schema_is_advice_unless_it_is_strict(schema: Json, example: str) -> None:
    """As OpenAI documents `strict`. Without it, the grammar enforces the schema as far as possible."""
    async with running() as engine:
        for strict in (None, False):
            wanted = held(schema)
            del wanted["json_schema"]["strict"]
            wanted["json_schema"] |= {} if strict is None else {"strict": strict}
            reply = await engine.reply(ask(format=wanted, max_tokens=3))
            assert reply.choices[0].token_ids
        matcher = await engine._grammars.compile(_format_of(engine, wanted))
        tokens = engine._vocabulary.encode(example, most=99, adds_special=False) or []
        assert matcher.deep_copy().validate_tokens(tokens) == len(tokens) > 0
        with pytest.raises(ChatError, match="response_format: ") as refusal:
            await engine.reply(ask(format=held(schema), max_tokens=3))
    assert refusal.value.status == 400 and "coerce_one_of" not in refusal.value.message


def _format_of(engine: EmbeddedEngine, wanted: Json) -> Any:
    format = messages.render(engine._vocabulary, ask(format=wanted)).format
    assert format is not None
    return format


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": LOOK["function"]["name"]}}], ids=str
)
async def test_a_forced_call_that_is_cut_leaves_no_markup(choice: Any) -> None:
    """Cut after each number of tokens, whole and streamed: no part of the call is content."""
    async with running() as engine:
        for max_tokens in (1, 2, 3, 5, 8, 13, 21):
            request = ask(tools=[LOOK], tool_choice=choice, max_tokens=max_tokens)
            (whole,) = (await engine.reply(request)).choices
            streamed = [chunk.choice async for chunk in engine.stream(request)]
            if whole.finish_reason == "length":
                assert whole.message == {"role": "assistant", "content": ""}
                assert not any((piece.message or {}).get("content") for piece in streamed)


def test_a_cut_marker_of_a_held_reply_is_no_content() -> None:
    """Following a thought, the model writes the marker itself; in free replies it stays content."""
    for is_held, content in ((True, ""), (False, "<tool_ca")):
        format = Format("", (), "response_format") if is_held else None
        parser = MessageParser(Prompt([], opening="<think>", has_tools=True, has_thinking=True, format=format))
        parser.push("so\n</think>\n\n<tool_ca")
        parser.flush()
        assert parser.message == {"role": "assistant", "content": content, "reasoning_content": "so"}


@pytest.mark.parametrize("format", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {}, 5])
def test_a_format_without_its_schema_is_a_400(format: Any) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": format}
    with pytest.raises(ChatError) as refusal:
        OpenAIChat().parse(json.dumps(body).encode(), Sampling())
    assert (refusal.value.param or "").startswith("response_format")


# --- over the wire ----------------------------------------------------------------------------------------------------


class Move(pydantic.BaseModel):
    row: Literal[1, 2, 3]
    mark: Literal["x", "o"] | None
    why: list[Literal["fork", "block"]] = pydantic.Field(max_length=2)


async def test_the_openai_client_parses_a_pydantic_model() -> None:
    async with (
        running() as engine,
        serve(build_app(lambda key: engine)) as root,
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="x", max_retries=0) as client,
    ):
        messages: Any = [{"role": "user", "content": "move"}]
        reply = await client.chat.completions.parse(model="policy", messages=messages, response_format=Move, seed=5)
        options: Any = {"model": "policy", "messages": messages, "response_format": Move, "seed": 5}
        async with client.chat.completions.stream(**options) as stream:
            streamed = await stream.get_final_completion()
        with pytest.raises(openai.BadRequestError, match="uniqueItems"):
            bad: Any = held({"type": "array", "uniqueItems": True})
            await client.chat.completions.create(model="policy", messages=messages, response_format=bad)
    move = reply.choices[0].message.parsed
    assert isinstance(move, Move)
    assert streamed.choices[0].message.parsed == move
