"""Requests that would block the event loop: client-supplied templates, endless prompts, countless values.

A heartbeat in this process measures the event loop. Other work on the machine can also delay a beat, so each
measurement has three attempts.
"""

import asyncio
import contextlib
import gc
import json
import random
import shutil
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from art_cli.chat.chat_app import build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import serve
from art_cli.chat.reading import MAX_NODES, RequestReader
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires import AnthropicMessages, OpenAIChat, OpenAICompletions, OpenAIResponses, Wire
from art_cli.chat.wires.openai_responses import ENCRYPTED, Memory
from art_cli.chat.wires.responses_items import encrypted
from art_cli.engines.embedded import chat_prompts as messages
from art_cli.engines.embedded import reply_text as text
from art_cli.engines.embedded.reply_text import Detokenizer, Vocabulary
from art_cli.models.saved_weights import save_weights
from art_cli.runtime.worker_pool import Crowded, Overran, WorkerPool
from tests.engines.test_embedded_engine import running
from tests.support.attacks.hostile import NUM_MUTATIONS, Heartbeat, MemoryBound, mutations
from tests.support.models.tiny import CHAT_TEMPLATE, tiny_tokenizer, tiny_weights
from tests.support.paths import LETTERS
from tests.support.processes import forked
from tests.support.servers.serving import art_serve

WIRE: dict[str, Wire] = {
    "chat": OpenAIChat(),
    "text": OpenAICompletions(),
    "messages": AnthropicMessages(),
    "responses": OpenAIResponses(),
}
PATH = {kind: wire.path for kind, wire in WIRE.items()}
Json = dict[str, Any]
USER = {"role": "user", "content": "hi"}
HOLD_S = 0.2
NUM_ATTEMPTS = 3
SPIN = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
OWN = ("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
       "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict",
       "tokenizer_kwargs", "return_assistant_tokens_mask", "chat_template_kwargs", "bos_token", "self")  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_collected() -> Iterator[None]:
    """A full collection visits every object that transformers imports, which takes longer than the measured work."""
    gc.collect()
    gc.freeze()
    yield
    gc.collect()
    gc.freeze()  # as conftest.py leaves it to the tests that follow


async def hold_of(work: Callable[[], Awaitable[Any]]) -> float:
    """The longest time for which the event loop was held in the calmest of some attempts."""
    longest = []
    for _ in range(NUM_ATTEMPTS):
        async with Heartbeat() as heart:
            await work()
        longest.append(heart.longest_s)
        if longest[-1] < HOLD_S:
            break
    return min(longest)


def chat(**fields: Any) -> Json:
    return {"model": "policy", "messages": [USER], "max_tokens": 2, **fields}


def vocabulary(template: str = CHAT_TEMPLATE) -> Vocabulary:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Vocabulary(tokenizer)


def rendered(template: str, **variables: Any) -> str:
    """The prompt that a request with these template variables has with that template."""
    body = json.dumps(chat(chat_template_kwargs=variables)).encode()
    whole = vocabulary(template)
    return whole.decode(messages.render(whole, WIRE["chat"].parse(body, Sampling()), 64).ids)


# --- templates --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN)
def test_the_renderers_own_parameters_are_no_template_variables(name: str) -> None:
    """Refused while reading the body, so before a request reaches vLLM or another endpoint."""
    with pytest.raises(ChatError, match=name) as refusal:
        WIRE["chat"].parse(json.dumps(chat(chat_template_kwargs={name: SPIN})).encode(), Sampling())
    assert (refusal.value.status, refusal.value.param) == (400, f"chat_template_kwargs.{name}")


def test_only_what_the_models_template_reads_can_be_set() -> None:
    template = "{% if loud is not defined %}{% set loud = false %}{% endif %}{{ 'HI' if loud else 'hi' }}{{ tone }}"
    template += "{% set ns = namespace(a=1) %}{% for m in messages %}{{ m.role if ns.a == 2 }}{% endfor %}"
    assert (rendered(template), rendered(template, loud=True), rendered(template, tone="!")) == ("hi", "HI", "hi!")
    for name in ("louder", "ns", "m", "namespace", "range", "eos_token", "strftime_now"):
        with pytest.raises(ChatError, match=f"{name}.*" + ("" if name == "eos_token" else "it reads loud, tone")):
            rendered(template, **{name: 1})
    with pytest.raises(ChatError, match="enable_thinking.*it reads no variables"):
        rendered(CHAT_TEMPLATE, enable_thinking=False)


@pytest.mark.parametrize(
    "value",
    [10**30, -(10**7), 1e300, [[10**9]], {"a": 2_000_000}, "x" * 20_000, ["x"] * 9_000],
    ids=lambda value: repr(value)[:20],
)
def test_a_variable_can_be_neither_a_huge_number_nor_a_long_text(value: Any) -> None:
    with pytest.raises(ChatError, match="chat_template_kwargs") as refusal:
        rendered("{{ 'x' * (n | int) }}", n=value)
    assert refusal.value.status == 400


def test_a_legitimate_template_is_not_blown_up_by_a_variable() -> None:
    """A million letters in each of 10,000 rounds are 10 GB; the text ends where the context cannot hold it any more."""
    template = "{% for a in range(n // 100) %}{{ 'x' * n }}{% endfor %}"
    with MemoryBound(mib=64), pytest.raises(ChatError, match="context holds 64 tokens") as refusal:
        rendered(template, n=1_000_000)
    assert refusal.value.code == "context_length_exceeded"


def test_the_text_is_that_of_transformers() -> None:
    """Rendered piece by piece, with tools, calls and thoughts."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": ["é", 1.5, null]}'}}
    talk = [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk += [{"role": "tool", "content": "1", "tool_call_id": "c"}, {"role": "assistant", "content": "x"}]
    talk[-1] |= {"reasoning": "because"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    thinks = CHAT_TEMPLATE + "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}{{ eos_token }}"
    tokenizer = vocabulary(thinks).tokenizer
    for given in ([], tools):
        wanted = tokenizer.apply_chat_template(talk, given or None, tokenize=False, add_generation_prompt=True)
        assert vocabulary(thinks).template.render(talk, given, {}, most=10**6) == wanted
    assert "because" in wanted


async def test_a_template_that_does_not_end_is_broken_off_and_the_loop_goes_on() -> None:
    """The model's own template never ends: the loop continues, the request gets a 400, and the next request is
    answered.
    """
    reader = RequestReader()
    reader._workers = WorkerPool(size=1, wait_s=30.0, run_s=2.0)
    body = WIRE["chat"].parse(json.dumps(chat()).encode(), Sampling())
    slow, good = vocabulary(SPIN), vocabulary()
    messages.render(good, body)

    async def attempt() -> None:
        with pytest.raises(ChatError, match="to read") as refusal:
            await reader.read(messages.render, slow, body)
        assert refusal.value.status == 400
        assert (await reader.read(messages.render, good, body)).ids == messages.render(good, body).ids

    assert await hold_of(attempt) < HOLD_S


ESCAPES = {
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursion by itself": "{% set x = messages %}{% for m in x recursive %}{{ loop(x) }}{% endfor %}",
    "class": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "class by filter": "{{ messages | attr('__class__') | attr('__mro__') }}",
    "globals": "{{ cycler.__init__.__globals__.os.popen('echo art-was-here').read() }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format map": "{{ '{a.__class__.__mro__}'.format_map({'a': messages}) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "wide range": "{% for a in range(10 ** 9) %}x{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "changing the request": "{{ messages.clear() }}{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", ESCAPES)
async def test_a_models_template_can_neither_recurse_nor_reach_out(name: str) -> None:
    """An untrusted model directory's template: the prompt shows nothing of Python or the machine, the template's time
    is limited, the event loop continues, and the next request is answered.
    """
    reader = RequestReader()
    reader._workers = WorkerPool(size=1, wait_s=30.0, run_s=1.0)
    asked = WIRE["chat"].parse(json.dumps(chat()).encode(), Sampling())
    whole, good = vocabulary(ESCAPES[name]), vocabulary()
    said = messages.render(good, asked, 1024).ids
    shown = []

    async def attempt() -> None:
        try:
            shown.append(whole.decode((await reader.read(messages.render, whole, asked, 1024)).ids))
        except ChatError as error:
            assert error.status == 400, error
            shown.append(error.message)
        assert (await reader.read(messages.render, good, asked, 1024)).ids == said

    assert await hold_of(attempt) < HOLD_S
    traces = ("<class", "art-was-here", "root:", "__main__", 'File "', "PATH")
    assert not [word for word in traces if word in shown[0]], shown[0][:500]


# --- long prompts -----------------------------------------------------------------------------------------------------


def one_response(size: int) -> list[Json]:
    """Items of a single response, with its calls' outputs between them."""
    text = "x" * (size // 6_000)
    ids = {"id": "msg_" + "0" * 32 + "_0"}
    called = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **ids}
    said = {"type": "message", "role": "assistant", "content": text, **ids}
    return [said, called, {"type": "function_call_output", "call_id": "c", "output": text}] * 3_000


def long_bodies(mib: int) -> dict[str, tuple[str, Json]]:
    """Bodies of that size, whose prompts no context of 1,024 tokens holds."""
    size = mib * 2**20
    tool = {"type": "function", "function": {"name": "f", "description": "x" * size}}
    many = {f"p{number}": {"type": "string"} for number in range(20_000)}
    broad = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": many}}}
    return {
        "chat": ("chat", chat(messages=[{"role": "user", "content": "hello wo" * (size // 8)}])),
        "text": ("text", {"model": "policy", "prompt": "hello wo" * (size // 8)}),
        "ids": ("text", {"model": "policy", "prompt": [7] * (size // 4)}),
        "tool": ("chat", chat(tools=[tool])),
        "broad tool": ("chat", chat(tools=[broad])),
        "messages": ("chat", chat(messages=[USER] * 25_000)),
        "parts": ("chat", chat(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 30_000}])),
        "model": ("chat", chat(model="x" * size)),
        "name": ("chat", chat(**{"x" * size: 1})),
        "items": ("responses", {"model": "policy", "input": one_response(size)}),
        "thought": (
            "responses",
            {"model": "policy", "input": [{"type": "reasoning", "encrypted_content": "x" * size}]},
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_bodies(0))
async def test_a_long_prompt_is_refused_and_the_loop_goes_on(kind: str) -> None:
    """A body of 28 MiB is answered with a 400 (or 404), in little memory."""
    path, fields = long_bodies(28)[kind]
    body = json.dumps(fields).encode()
    url = PATH[path]
    async with running() as engine:
        app = build_app(lambda key: engine)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.post("/v1/chat/completions", json=chat())

            async def attempt() -> None:
                reply = await client.post(url, content=body, timeout=60)
                assert reply.status_code in (400, 404), reply.text
                assert len(reply.content) < 10_000

            with MemoryBound(mib=400):
                assert await hold_of(attempt) < HOLD_S


def test_a_text_is_not_tokenized_as_a_whole_where_it_is_far_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text with too many characters is refused; a shorter text is tokenized in parts until it is too long."""
    whole, asked = vocabulary(), []
    encode = whole.tokenizer.encode

    def noting(text: str, **options: Any) -> list[int]:
        asked.append(len(text))
        ids: list[int] = encode(text, **options)
        return ids

    monkeypatch.setattr(whole.tokenizer, "encode", noting)
    most = 10_000
    assert whole.encode("x" * (most * whole.longest + 1), most=most, adds_special=False) is None
    assert asked == []
    assert whole.encode("x" * (most * whole.longest), most=most, adds_special=False) is None
    assert sum(asked) <= 2 * most
    long = "</tool_response>" * most  # as long as a text of so many tokens can be
    assert len(long) > text.SURE * most
    assert whole.encode(long, most=most, adds_special=False) == [encode("</tool_response>")[0]] * most
    assert whole.encode(long + "x", most=most, adds_special=False) is None


@pytest.mark.parametrize(
    "value",
    [
        b'{"a":[' + b"[]," * (MAX_NODES + 1) + b"1]}",
        b'{"a":[' + b'{"b":1},' * (MAX_NODES // 2 + 1) + b"1]}",
        b'{"a":[' + b"1," * 2_000_001 + b"1]}",
        b'{"a":"' + b"[{,:" * MAX_NODES + b'","b":[' + b"[]," * (MAX_NODES + 1) + b"1]}",
    ],
    ids=["lists", "objects", "numbers", "lists behind text"],
)
def test_a_body_of_too_many_values_is_refused_before_they_are_made(value: bytes) -> None:
    with MemoryBound(mib=32), pytest.raises(ChatError, match="more than") as refusal:
        WIRE["chat"].parse(value, Sampling())
    assert refusal.value.status == 400


def test_brackets_and_colons_in_a_text_are_not_counted() -> None:
    content = '{"a\\": [1, 2]}, ' * MAX_NODES
    body = json.dumps(chat(messages=[{"role": "user", "content": content}])).encode()
    parsed = WIRE["chat"].parse(body, Sampling())
    assert parsed.messages is not None and parsed.messages[0]["content"] == content


@pytest.mark.parametrize(
    "arguments",
    ["[" * 100_000, "[" + "[]," * 200_000 + "1]", '"\\ud800"', "9" * 5_000],
    ids=["deep", "broad", "surrogate", "long number"],
)
def test_arguments_of_a_call_that_are_no_plain_json_are_a_400(arguments: str) -> None:
    with pytest.raises(ChatError) as refusal:
        render_arguments(arguments)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


def test_half_a_surrogate_pair_inside_an_object_of_arguments_stands_as_it_was_written() -> None:
    written = '{"a": "\\udfff"}'
    assert render_arguments(written) == vocabulary("").encode(written, most=100, adds_special=False)


def render_arguments(arguments: str) -> list[int]:
    """Returns the prompt tokens of a conversation with a single call, for a template that rewrites arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    whole = vocabulary("{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
                       "{% endfor %}{% endfor %}")  # fmt: skip
    return messages.render(whole, WIRE["chat"].parse(json.dumps(chat(messages=talk)).encode(), Sampling())).ids


# --- tokens as text ---------------------------------------------------------------------------------------------------


async def test_bytes_of_a_token_are_its_own_also_where_it_is_part_of_a_character() -> None:
    """é of two tokens, forced by a format: the bytes of all tokens put together are the text."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "é日😀"}}}
    async with running() as engine, serve(build_app(lambda key: engine)) as root, httpx.AsyncClient() as client:
        fields = chat(max_tokens=40, logprobs=True, top_logprobs=3, response_format=schema)
        url = f"{root}/v1/chat/completions"
        whole = (await client.post(url, json=fields, timeout=60)).json()["choices"][0]
        streamed = (await client.post(url, json={**fields, "stream": True}, timeout=60)).text
    told = whole["logprobs"]["content"]
    assert json.loads(b"".join(bytes(token["bytes"]) for token in told)) == "é日😀"
    assert "\ufffd" in [token["token"] for token in told]
    for entry in [*told, *(top for token in told for top in token["top_logprobs"])]:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    pieces = [entry for e in events for entry in (e["choices"][0]["logprobs"] or {}).get("content", [])]
    assert json.loads(b"".join(bytes(entry["bytes"]) for entry in pieces)) == "é日😀"


class CountingVocabulary(Vocabulary):
    num_decoded = 0

    def decode(self, ids: Any) -> str:
        self.num_decoded += len(list(ids))
        return super().decode(ids)


@pytest.mark.parametrize("kind", ["replacement", "begun", "continued", "hidden", "unknown", "noise", "letters"])
def test_text_without_a_whole_character_is_decoded_a_bounded_number_of_times(kind: str) -> None:
    """U+FFFD itself, beginnings, middles, tokens without text: each is decoded 64 times at most, no letter differs."""
    whole = CountingVocabulary(tiny_tokenizer())
    byte = {data: id for id in range(256) if len(data := whole.text_of(id).encode(errors="surrogateescape")) == 1}
    draw = random.Random(0)
    data = {"replacement": "\ufffd".encode() * 500, "begun": b"\xe4" * 1500, "continued": b"\x80" * 1500,
            "noise": draw.randbytes(1500), "letters": "é日😀x".encode() * 150}.get(kind, b"")  # fmt: skip
    ids = [byte[bytes([value])] for value in data] or [{"hidden": 257, "unknown": 300}[kind]] * 1500
    whole.num_decoded = 0
    stream = Detokenizer(whole)
    pieces = [stream.push([id]) for id in ids]
    pieces.append(stream.flush())
    assert "".join(pieces) == data.decode(errors="replace")
    assert whole.num_decoded <= 64 * len(ids)


# --- worker pools -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
async def test_a_pool_takes_calls_in_order_and_never_more_at_once(size: int) -> None:
    pool, running_now, most, order = WorkerPool(size=size, wait_s=30, run_s=30), 0, 0, []
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal running_now, most
        with lock:
            running_now, order_now = running_now + 1, order.append(number)
            assert order_now is None
            most = max(most, running_now)
        time.sleep(0.002)
        with lock:
            running_now -= 1
        return number

    assert await asyncio.gather(*(pool.call(work, number) for number in range(50))) == list(range(50))
    assert most == size
    assert size > 1 or order == list(range(50))  # of several threads any may be the first to say so


async def test_a_call_that_overruns_or_is_cancelled_is_abandoned_and_the_next_one_has_its_turn() -> None:
    pool, returns = WorkerPool(size=1, wait_s=30, run_s=1.0), threading.Event()
    with pytest.raises(Overran):
        await pool.call(returns.wait)
    task = asyncio.create_task(pool.call(returns.wait))
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.wait((task,))
    assert await pool.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await pool.call(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pool.call(lambda: next(iter(())))
    returns.set()


async def test_no_more_than_some_abandoned_calls_are_replaced() -> None:
    pool, returns = WorkerPool(size=1, wait_s=0.3, run_s=0.01, max_abandoned=2), threading.Event()
    for _ in range(3):
        with pytest.raises(Overran):
            await pool.call(returns.wait)
    with pytest.raises(Crowded):
        await pool.call(lambda: 7)
    returns.set()
    pool._run_s = pool._wait_s = 30
    assert await asyncio.gather(*(pool.call(lambda: 7) for _ in range(3))) == [7] * 3
    async with asyncio.timeout(30):
        while pool._num_abandoned:
            await asyncio.sleep(0.01)
    assert not pool._turns.locked()


async def test_who_waits_too_long_for_a_pool_is_told() -> None:
    pool, gate = WorkerPool(size=1, wait_s=0.05, run_s=30), threading.Event()
    first = asyncio.create_task(pool.call(gate.wait))
    await asyncio.sleep(0)
    with pytest.raises(Crowded):
        await pool.call(lambda: 7)
    gate.set()
    assert await first is True


# --- fuzz -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_mutated_requests_are_answered_or_refused_and_never_hold_the_loop() -> None:
    """Through the real parser, template and tokenizer: a prompt, or a ChatError below 500; nothing else comes out."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x"]}'}}
    talk = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    full = chat(messages=talk, tools=[tool], tool_choice="required", response_format=schema, stop=["a"], seed=1)
    full |= {"chat_template_kwargs": {"loud": True}, "temperature": 0.5, "logprobs": True, "top_logprobs": 2}
    plain = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 3, "logprobs": 2, "stop": "x"}
    said = [{"type": "thinking", "thinking": "h", "signature": "s"}, {"type": "text", "text": "t"}]
    said += [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": [1, "x"]}}]
    told = [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}]
    claude = {
        "model": "policy",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "thinking": {"type": "auto"},
    }
    claude |= {"messages": [USER, {"role": "assistant", "content": said}, {"role": "user", "content": told}]}
    claude |= {"tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": False}], "top_k": 3}
    claude |= {"tool_choice": {"type": "any"}, "stop_sequences": ["x"], "output_config": {"effort": "low"}}
    names = {"call_id": "c", "name": "f", "id": "fc_" + "0" * 32 + "_1", "namespace": "n"}
    items = [{"type": "reasoning", "summary": [], "encrypted_content": encrypted("é")}, USER]
    items += [{"type": "function_call", "arguments": '{"a": [1, "x"]}', **names}]
    items += [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "1"}]}]
    inner = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    asked = {"model": "policy", "input": items, "tools": [*inner, {"type": "namespace", "name": "n", "tools": inner}]}
    asked |= {"instructions": "s", "tool_choice": {"type": "function", "name": "f"}, "top_logprobs": 1, "store": True}
    asked |= {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "include": [ENCRYPTED]}
    whole, reader = vocabulary(CHAT_TEMPLATE + "{{ loud }}"), RequestReader()

    async def attempt(kind: Any, body: bytes) -> int:
        try:
            request: Request = await reader.read(WIRE[kind].parse, body, Sampling())
            request = Memory().recall(request, None)
            await reader.read(messages.render, whole, request, 1024)
        except ChatError as error:
            assert error.status < 500, (error, body[:2000])
            WIRE[kind].error(error)
            return 1
        return 0

    num_refused = 0
    with MemoryBound(mib=256):
        for kind, good in (("chat", full), ("text", plain), ("messages", claude), ("responses", asked)):
            for number, body in enumerate(mutations(json.dumps(good).encode(), seed=1, count=NUM_MUTATIONS // 4)):
                async with Heartbeat() as heart:
                    num_refused += await attempt(kind, body)
                if heart.longest_s >= HOLD_S:
                    assert await hold_of(lambda kind=kind, body=body: attempt(kind, body)) < HOLD_S, (
                        number,
                        body[:500],
                    )
    assert NUM_MUTATIONS // 4 < num_refused < NUM_MUTATIONS


# --- whole commands ---------------------------------------------------------------------------------------------------

ATTACKING_ROLLOUT = """
from pathlib import Path

from art_cli import Outcome, Policy

SPIN = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"


async def rollout(policy: Policy, scenario: dict) -> Outcome:
    ask = policy.client.with_options(max_retries=0).chat.completions.create
    number = len(list(Path(__file__).parent.glob("attempt-*")))
    (Path(__file__).parent / f"attempt-{number}").touch()
    messages, extra = [{"role": "user", "content": scenario["ask"]}], {}
    if number == 0:
        extra = {"chat_template_kwargs": {"chat_template": SPIN}}
    if number == 1:
        messages[0]["content"] = "hello wo" * (28 * 2**20 // 8)
    reply = await ask(model=policy.model, messages=messages, extra_body=extra)
    return Outcome(reward=float(len(reply.choices[0].message.content or "")))
"""


@pytest.mark.slow
def test_a_rollout_that_attacks_its_engine_ends_alone(tmp_path: Path) -> None:
    """The first attempt sends a template, the second 28 MiB: both fail, but the run and the other attempts do not."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "rollout.py").write_text(ATTACKING_ROLLOUT)
    options = [f"runs={tmp_path}", "train.steps=1", "eval=null", "rollout.group_size=4", "rollout.timeout_s=60"]
    done = forked.run(["train", project / "config.yaml", *options], timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    [path] = tmp_path.glob("letters*/step_*/trajectories.jsonl")
    errors = [json.loads(line).get("error") for line in path.read_text().splitlines()]
    failed = sorted(error for error in map(str, filter(None, errors)))
    assert len(failed) == 2 < len(errors), failed
    assert any("chat_template" in error for error in failed) and any("context" in error for error in failed)


@pytest.mark.slow
async def test_a_server_under_attack_answers_and_ends_when_it_is_told(tmp_path: Path) -> None:
    """A small version of benchmarks/attacks/serve_attack.py: no 5xx, /health answers, SIGTERM in the middle ends it."""
    model = tmp_path / "tiny"
    save_weights(tiny_weights(lora_rank=None), model)
    async with art_serve(model) as (_, calm_url), art_serve(model, "--drain", "2") as (process, url):
        calm, root = calm_url.removesuffix("/v1"), url.removesuffix("/v1")
        asked = [asyncio.create_task(ask_attacks(root, number)) for number in range(6)]
        attacked_s, calm_s = await healths(root, calm, num=20)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        statuses = [status for task in asyncio.as_completed(asked) for status in await task]
    assert attacked_s < max(HOLD_S, 20 * calm_s)  # on a busy machine the other server is slow too
    assert statuses and all(status < 500 or status == 503 for status in statuses), Counter(statuses)
    assert 400 in statuses


async def healths(*roots: str, num: int) -> list[float]:
    """For each server the median seconds of an answer to /health; they are asked in turn."""
    seconds: dict[str, list[float]] = {root: [] for root in roots}
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(num):
            for root in roots:
                begin = time.monotonic()
                assert (await client.get(f"{root}/health")).status_code == 200
                seconds[root].append(time.monotonic() - begin)
            await asyncio.sleep(0.05)
    return [statistics.median(each) for each in seconds.values()]


async def ask_attacks(root: str, number: int) -> list[int]:
    """Returns the statuses of sequential requests until the server exits."""
    bodies = [*long_bodies(2).values(), ("chat", chat(chat_template_kwargs={"chat_template": SPIN}))]
    statuses = []
    async with httpx.AsyncClient(timeout=60) as client:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                kind, fields = bodies[number % len(bodies)]
                fields = fields if fields["model"] != "policy" else {**fields, "model": "tiny"}
                statuses.append((await client.post(root + PATH[kind], json=fields)).status_code)
                number += 1
    return statuses
