"""`art serve RUN --engine vllm --follow` as a process, with a real vLLM on the CPU. `make test-vllm` sets it up.

One server for all of it; the last tests give it another checkpoint and stop it. What it says is held against
transformers and PEFT, which compute it from the files.
"""

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import peft
import pytest
import pytest_asyncio
import torch
import transformers

from art_cli.runs import run_checkpoints
from art_cli.runs.run_dir import RunDir
from tests.support.models.tool_clients import (
    ANSWER,
    CALL,
    MODEL,
    QUESTION,
    TOOLS,
    add_changed,
    converse,
    demo,
    is_right,
    teach,
)
from tests.support.others.real_vllm import MARKS, OPTIONS
from tests.support.processes.forked import Forked
from tests.support.processes.waiting import until
from tests.support.servers.serving import art_serve, number

pytestmark = MARKS

KEY = "the-key-of-this-test"
OTHER = "other"  # the same run under another name: another adapter in the same server
USER = {"role": "user", "content": QUESTION}
COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}},
    "required": ["color"],
    "additionalProperties": False,
}


class Served(NamedTuple):
    """The server, what it serves, and where it logs."""

    process: Forked
    url: str
    run: RunDir
    log: Path
    ai: openai.AsyncOpenAI

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    async def get(self, path: str) -> str:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
            return (await http.get(self.root + path)).text

    async def say(self, **options: Any) -> str:
        reply = await self.ai.chat.completions.create(**{"model": MODEL, "messages": [USER], **options})
        return reply.choices[0].message.content or ""

    async def greedy(self) -> list[int]:
        """The tokens of the greedy answer to USER. (Text that ends within a character has more than one rendering.)"""
        reply = await self.ai.chat.completions.create(
            model=MODEL, messages=[USER], temperature=0, max_tokens=12, extra_body={"return_token_ids": True}
        )
        return list(reply.choices[0].token_ids)  # type: ignore[attr-defined]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    place: Path = tmp_path_factory.mktemp("served")
    run, log = teach(place, [demo(TOOLS)]), place / "serve.log"
    with log.open("wb") as file:
        async with (
            art_serve(
                *(f"{name}={run.root}" for name in (MODEL, OTHER)), *OPTIONS, "--follow", key=KEY, log=file.fileno()
            ) as (process, url),
            openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as ai,
        ):
            yield Served(process, url, run, log, ai)


class Reference:
    """What transformers and PEFT make of one checkpoint."""

    def __init__(self, run: RunDir, step: int) -> None:
        place = run.root.parent / "base"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        base = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        self.model = peft.PeftModel.from_pretrained(base, run.checkpoint_path(step)).eval()

    def greedy(self) -> list[int]:
        """The tokens of the greedy answer to USER."""
        prompt = self.tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            out = self.model.generate(**ids, max_new_tokens=12, do_sample=False)
        return out[0, ids["input_ids"].shape[1] :].tolist()

    def logprobs(self, prompt: list[int], sampled: list[int]) -> list[float]:
        with torch.no_grad():
            rows = self.model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        return rows.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("program", ["openai_sdk.py", "anthropic_sdk.py"])
async def test_a_client_gets_the_call_then_the_streamed_answer_and_401_with_another_key(
    served: Served, program: str
) -> None:
    found = await converse(program, served.url, KEY)
    assert is_right(found), found


async def test_it_says_what_the_checkpoint_says(served: Served) -> None:
    """Greedy tokens, and the logprobs of what was sampled at temperature 1, n = 3: each to 1e-4 nats."""
    reference = Reference(served.run, 0)
    assert await served.greedy() == reference.greedy()
    reply = await served.ai.chat.completions.create(
        model=MODEL, messages=[USER], n=3, seed=5, max_tokens=10, logprobs=True, extra_body={"return_token_ids": True}
    )
    prompt = reply.prompt_token_ids  # type: ignore[attr-defined]
    assert len({tuple(choice.token_ids) for choice in reply.choices}) == 3  # type: ignore[attr-defined]
    for choice in reply.choices:
        found = [token.logprob for token in choice.logprobs.content]  # type: ignore[union-attr]
        assert found == pytest.approx(reference.logprobs(prompt, choice.token_ids), abs=1e-4)  # type: ignore[attr-defined]
    assert reply.usage is not None
    sampled = sum(len(choice.token_ids) for choice in reply.choices)  # type: ignore[attr-defined]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), sampled)


async def test_a_second_policy_shares_the_server(served: Served) -> None:
    assert await served.say(model=OTHER, temperature=0) == await served.say(temperature=0)
    assert served.log.read_text().count("vllm: starting ") == 1


async def test_a_stream_is_the_plain_reply_in_pieces(served: Served) -> None:
    """The same seed, tools and all; usage comes last."""
    create = served.ai.chat.completions.create
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "max_tokens": 20, "seed": 3}
    plain = await create(**asked)
    stream = await create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage
    stream = await create(model=MODEL, messages=[USER], tools=TOOLS, temperature=0, stream=True)
    calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls if call.function.name] == ["add"]
    assert calls[0].function.arguments is not None
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments) == json.loads(CALL["tool_calls"][0]["function"]["arguments"])


async def test_plain_completions_obey_their_seed_and_their_stop(served: Served) -> None:
    create = served.ai.completions.create
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "temperature": 2.0}
    text = (await create(**asked, seed=1, logprobs=1)).choices[0]
    assert (await create(**asked, seed=1)).choices[0].text == text.text
    assert (await create(**asked, seed=2)).choices[0].text != text.text
    assert text.logprobs and all(logprob <= 0 for logprob in text.logprobs.token_logprobs or [1])
    letter = next(letter for letter in text.text[1:] if letter.isascii())
    cut = (await create(**asked, seed=1, stop=[letter])).choices[0]
    assert (cut.text, cut.finish_reason) == (text.text[: text.text.index(letter)], "stop")
    ids = Reference(served.run, 0).tokenizer("abc").input_ids
    echoed = await create(model=MODEL, prompt="abc", max_tokens=2, temperature=0, echo=True)
    same = await create(model=MODEL, prompt=ids, max_tokens=2, temperature=0)
    assert echoed.usage is not None and echoed.usage.prompt_tokens == 3
    assert echoed.choices[0].text == "abc" + same.choices[0].text


async def test_a_json_schema_holds_at_any_temperature(served: Served) -> None:
    """In the reply's format and in the arguments of a tool that is forced; the model itself never wrote such JSON."""
    schema = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR, "strict": True}}
    tool = {"type": "function", "function": {"name": "paint", "parameters": COLOR, "strict": True}}
    for seed in range(3):
        text = await served.say(temperature=1.5, seed=seed, max_tokens=300, response_format=schema)
        assert json.loads(text)["color"] in ("red", "green")
        reply = await served.ai.chat.completions.create(
            model=MODEL, messages=[USER], seed=seed, max_tokens=300, tools=[tool], tool_choice="required"
        )
        (call,) = reply.choices[0].message.tool_calls or [None]
        assert call is not None and call.function.name == "paint"
        assert json.loads(call.function.arguments)["color"] in ("red", "green")


async def test_refusals_are_in_openai_words(served: Served) -> None:
    async def refusal(**options: Any) -> tuple[int, str | None, str | None]:
        with pytest.raises(openai.APIStatusError) as error:
            await served.say(**options)
        return error.value.status_code, error.value.type, error.value.code

    nonsense = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    invalid, too_long = "invalid_request_error", "context_length_exceeded"
    assert await refusal(messages=[{"role": "user", "content": "x" * 3000}]) == (400, invalid, too_long)
    assert await refusal(max_tokens=5000) == (400, invalid, too_long)
    assert await refusal(response_format=nonsense) == (400, invalid, None)
    assert await refusal(temperature=-1) == (400, invalid, None)
    with pytest.raises(openai.NotFoundError, match="there is 'adder'"):
        await served.ai.chat.completions.create(model="gpt-5", messages=[USER])  # type: ignore[list-item]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_bound_that_the_context_cannot_hold_is_no_wish(served: Served, is_stream: bool) -> None:
    """Anthropic's clients ask for as many tokens as Claude may write; OpenAI's mean what they ask for."""
    asked = {"model": MODEL, "max_tokens": 5000, "messages": [USER], "stream": is_stream}
    async with httpx.AsyncClient(base_url=served.root, headers={"x-api-key": KEY}, timeout=100) as http:
        answer = await http.post("/v1/messages", json=asked)
        too_long = await http.post("/v1/messages", json=asked | {"messages": [{"role": "user", "content": "x" * 3000}]})
    assert answer.status_code == 200, answer.text
    assert ("message_stop" if is_stream else "stop_reason") in answer.text
    assert (too_long.status_code, "prompt is too long" in too_long.text) == (400, True)


async def test_without_the_key_there_is_health_and_nothing_else(served: Served) -> None:
    async with httpx.AsyncClient(base_url=served.root) as http:
        assert (await http.get("/health")).status_code == 200
        for path in ("/ready", "/metrics", "/v1/models", "/v1/load_lora_adapter"):
            assert (await http.get(path)).status_code == 401
    policy = run_checkpoints.listed(served.run)[0].policy
    models = [{"id": name, "step": 0, "policy": policy} for name in (MODEL, OTHER)]
    assert json.loads(await served.get("/ready"))["models"] == models
    metrics = await served.get("/metrics")
    assert number(metrics, "art_requests_total", route="/v1/chat/completions", code="200") > 0
    assert number(metrics, "art_sampled_tokens_total", model=MODEL) > 0


# --- from here on the server changes, and stops -----------------------------------------------------------------------


async def ask(served: Served, said: list[list[int]]) -> None:
    while True:
        said.append(await served.greedy())


async def listen(served: Served, asked: dict[str, Any], heard: list[str]) -> None:
    while True:
        stream = await served.ai.completions.create(**asked, stream=True)
        heard.append("".join([chunk.choices[0].text async for chunk in stream if chunk.choices]))


async def long_request(served: Served, num: int = 300) -> dict[str, Any]:
    """One whose answer is of at least so many tokens, and at most twice as many: 300 take seconds."""
    for seed in range(100):
        asked = {"model": MODEL, "prompt": "abc", "seed": seed, "temperature": 2.0, "max_tokens": 2 * num}
        reply = await served.ai.completions.create(**asked)
        if reply.usage.completion_tokens >= num:
            return asked
    raise AssertionError("they all end early")


async def test_following_changes_adapters_and_drops_nothing(served: Served) -> None:
    """Three clients ask and one streams without a pause; each answer is one checkpoint's, each client's old before new.

    The streams are of a hundred tokens and more, so one of them begins before the change and ends after it.
    """
    said: list[list[list[int]]] = [[], [], []]
    heard: list[str] = []
    asked = await long_request(served, 120)
    whole = [(await served.ai.completions.create(**asked)).choices[0].text]
    tasks = [asyncio.create_task(ask(served, mine)) for mine in said]
    tasks += [asyncio.create_task(listen(served, asked, heard))]
    await until(lambda: all(said) or any(task.done() for task in tasks))
    add_changed(served.run, 1)
    answers = [Reference(served.run, step).greedy() for step in (0, 1)]
    try:
        await until(lambda: all(answers[1] in mine for mine in said) or any(task.done() for task in tasks))
        num = len(heard)
        await until(lambda: len(heard) >= num + 2 or any(task.done() for task in tasks))
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
    whole += [(await served.ai.completions.create(**asked)).choices[0].text]
    for places in (*([answers.index(ids) for ids in mine] for mine in said), [whole.index(text) for text in heard]):
        assert places == sorted(places)
        assert set(places) == {0, 1}
    await until(lambda: served.log.read_text().count("answers from step 1 now") == 2)
    assert json.loads(await served.get("/ready"))["models"] == [{"id": name, "step": 1} for name in (MODEL, OTHER)]
    assert await served.say(model=OTHER, temperature=0) == await served.say(temperature=0)
    assert number(await served.get("/metrics"), "art_checkpoint_changes_total", model=MODEL) == 1


def processes(of: Path) -> list[str]:
    """The command lines that name the directory: vLLM's, while it serves the base that lies there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended meanwhile
            continue
        if str(of) in line and "vllm" in line:
            found.append(line)
    return found


async def test_a_signal_ends_what_runs_and_then_vllm(served: Served) -> None:
    """A stream in the middle comes to its end, new requests get 503, exit code 0, no process is left, no key logged."""
    base = served.run.root.parent / "base"
    assert processes(base)
    stream = aiter(await served.ai.completions.create(**await long_request(served), stream=True))
    chunks = [await anext(stream)]
    served.process.send_signal(signal.SIGTERM)
    await until(lambda: b"stopping:" in served.log.read_bytes())
    with pytest.raises(openai.InternalServerError, match="shutting down"):
        await served.say()
    chunks += [chunk async for chunk in stream]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] in ("stop", "length")
    assert await asyncio.to_thread(served.process.wait, 60) == 0
    assert processes(base) == []
    assert KEY not in served.log.read_text()
    assert ANSWER not in served.log.read_text()
