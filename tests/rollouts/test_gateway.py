"""The gateway: the key selects the trajectory, and the record equals the sampled tokens."""

import asyncio
import hashlib
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import msgspec
import openai
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Choice, Chunk
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts import rollout_gateway
from art_cli.rollouts.policy import UNRECORDED
from art_cli.rollouts.rollout_gateway import Gateway, call_seed
from art_cli.runs.trajectory import Turn, prompt, sequence
from tests.support.others.node import clients
from tests.support.standins.scripted import Engine, ScriptedBackend, encode, logprob, tool_call

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
DEFAULTS = Sampling(temperature=0.7, max_tokens=50)


def make_gateway(backend: ScriptedBackend, *, max_turns: int = 10, seed: int = 0) -> Gateway:
    return Gateway(Engine(backend), defaults=DEFAULTS, seed=seed, max_turns=max_turns)


@asynccontextmanager
async def calling(gateway: Gateway, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        gateway.serve() as url,
        openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, *messages: dict[str, Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=list(messages) or [USER], **options)


# --- what is recorded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", [{"presence_penalty": 1}, {"logit_bias": {"5": 1}}, {"extra_body": {"min_tokens": 2}}]
)
async def test_a_turn_under_a_penalty_is_no_sample_of_the_policy(field: dict[str, Any]) -> None:
    """No learner can compute its logprobs, so that the turn is marked; where sampling is forced it is refused."""
    gateway = make_gateway(ScriptedBackend())
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        await ask(client)
        await ask(client, **field)
        gateway.is_forced = True
        with pytest.raises(openai.BadRequestError, match="samples from the policy itself"):
            await ask(client, **field)
        await ask(client)
    assert [turn.is_masked for turn in gateway.close(key).turns] == [False, True, False]


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_game_of_turns_is_recorded_token_for_token(is_stream: bool) -> None:
    """Two turns, the first with a tool call. Turn 1 keeps all of turn 0; all ids equal the backend's ids."""
    answers = iter([tool_call("add", a=1, b=2), "three"])
    backend = ScriptedBackend(lambda request: next(answers))
    gateway = make_gateway(backend)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        messages: list[Any] = [USER]
        for _ in range(2):
            if is_stream:
                async with client.chat.completions.stream(model="policy", messages=messages) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
            else:
                message = (await ask(client, *messages)).choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    recorder = gateway.close(key)
    first = encode("<user>hi\n<assistant>"), encode('add{"a": 1, "b": 2}\n')
    second = [*first[0], *first[1], *encode("<tool>3\n<assistant>")], encode("three\n")
    for index, (sent, sampled) in enumerate((first, second)):
        assert prompt(recorder.turns, index) == sent
        assert sequence(recorder.turns, index) == [*sent, *sampled]
        assert recorder.turns[index].logprobs == [logprob(id) for id in sampled]
        assert recorder.turns[index].raw_logprobs == [2 * logprob(id) for id in sampled]
        assert (recorder.turns[index].step, recorder.turns[index].temperature) == (3, 0.7)
    assert [turn.finish_reason for turn in recorder.turns] == ["tool_calls", "stop"]
    assert recorder.turns[1].kept == len(first[0]) + len(first[1])
    assert [message["role"] for message in recorder.messages] == ["user", "assistant", "tool", "assistant"]
    assert recorder.messages[-1]["content"] == "three"
    assert recorder.branches == []
    assert gateway.num_sampled == len(first[1]) + len(second[1])


class Counting(ScriptedBackend):
    """Streams end with a chunk that only has token counts, as in vLLM and `art serve`."""

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        async for chunk in super().stream(request):
            yield chunk
        yield msgspec.structs.replace(chunk, choice=Choice(index=0), is_last=False, usage=(9, 3))


async def test_counts_behind_the_end_of_a_stream_do_not_break_it() -> None:
    gateway = make_gateway(Counting())
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        asked: Any = {"model": "policy", "messages": [USER], "stream_options": {"include_usage": True}}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert chunks[-1].usage.total_tokens == 12
    (turn,) = gateway.close(key).turns
    assert turn.sampled_ids == encode("ok\n")


class Hosted(ScriptedBackend):
    """An endpoint without token ids. Its streamed answers are followed by `last`: counts, an error, or nothing."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self._last = last

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        async for chunk in super().stream(request):
            choice = msgspec.structs.replace(chunk.choice, token_ids=[], logprobs=[], raw_logprobs=None)
            yield msgspec.structs.replace(chunk, choice=choice, prompt_ids=None)
        if self._last == "error":
            raise ChatError(502, "broken")
        if self._last == "silence":
            await asyncio.Event().wait()
        yield msgspec.structs.replace(chunk, choice=Choice(index=0), is_last=False, prompt_ids=None, usage=(9, 3))


@pytest.mark.parametrize("last", ["counts", "error", "silence"])
async def test_tokens_of_a_stream_without_ids_are_counted_though_the_counts_come_last(
    last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A complete answer arrives and is recorded, whether its counts come or not."""
    monkeypatch.setattr(rollout_gateway, "COUNTS_TIMEOUT_S", 5.0 if last == "counts" else 0.2)
    gateway = make_gateway(Hosted(last))
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        async for chunk in await ask(client, stream=True):
            if chunk.choices and chunk.choices[0].finish_reason:
                recorder = gateway.close(key)
    assert recorder.messages[-1]["content"] == "ok"
    assert (recorder.num_calls, recorder.num_cancelled, recorder.upstream_error) == (1, 0, None)
    assert recorder.usage == ((9, 3) if last == "counts" else None)
    assert gateway.num_sampled == (3 if last == "counts" else 0)


async def test_each_key_records_into_its_own_trajectory() -> None:
    """20 concurrent rollouts with 3 calls each: every rollout's calls are only in its record."""
    gateway = make_gateway(ScriptedBackend(lambda request: request.messages[-1]["content"]))
    keys = {number: gateway.open(f"t{number}") for number in range(20)}
    async with calling(gateway, "none") as client:

        async def play(number: int) -> None:
            own = client.with_options(api_key=keys[number])
            for turn in range(3):
                await ask(own, {"role": "user", "content": f"{number}.{turn}"})

        await asyncio.gather(*map(play, keys))
    for number, key in keys.items():
        recorder = gateway.close(key)
        conversations = [*recorder.branches, recorder.messages]
        assert [c[0]["content"] for c in conversations] == [f"{number}.{turn}" for turn in range(3)]
        assert [c[1]["content"] for c in conversations] == [f"{number}.{turn}" for turn in range(3)]


async def test_every_choice_is_a_turn() -> None:
    gateway = make_gateway(ScriptedBackend())
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        await ask(client, n=3)
    turns = gateway.close(key).turns
    assert [prompt(turns, index) for index in range(3)] == [encode("<user>hi\n<assistant>")] * 3


LONG = "b" * 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "state"),
    [
        ("XO3456789", "XO3456789"),
        ("X%0A%C3%96", "X\nÖ"),
        ("100%", "100%"),
        ("%ED%A0%80", "\ufffd" * 3),
        ("", None),
        ("b" * 256, "b" * 256),
        (LONG[:20_000], "sha256:" + hashlib.sha256(LONG[:20_000].encode()).hexdigest()),
    ],
)
async def test_a_header_names_the_state_of_the_turn(sent: str, state: str | None) -> None:
    gateway = make_gateway(ScriptedBackend())
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        await ask(client, extra_headers={"X-Art-State": sent})
        await ask(client)
    turns = gateway.close(key).turns
    assert [turn.state for turn in turns] == [state, None]
    assert msgspec.json.decode(msgspec.json.encode(turns), type=list[Turn]) == turns


def test_a_file_with_a_longer_state_than_is_ever_recorded_is_refused() -> None:
    turn = {"parent": None, "kept": 0, "prompt_ids": [1], "sampled_ids": [2], "logprobs": [0.0], "raw_logprobs": None}
    turn |= {"step": 0, "temperature": 1.0}
    assert msgspec.convert(turn, Turn).state is None  # a file of before states were recorded
    with pytest.raises(msgspec.ValidationError, match="length <= 256"):
        msgspec.convert({**turn, "state": "b" * 257}, Turn)


async def test_the_end_of_a_stream_is_recorded_before_the_client_sees_it() -> None:
    gateway = make_gateway(ScriptedBackend())
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        async for chunk in await ask(client, stream=True):
            if chunk.choices[0].finish_reason:
                recorder = gateway.close(key)
    assert len(recorder.turns) == 1


class Paused(ScriptedBackend):
    """Waits for ever after `num` tokens of choice `index`; `left` counts the streams that were let go of."""

    def __init__(self, num: int, *, index: int = 0) -> None:
        super().__init__(lambda request: "long answer")
        self._num, self._index = num, index
        self.left = asyncio.Semaphore(0)

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        num = 0
        try:
            async for chunk in super().stream(request):
                if num == self._num:
                    await asyncio.Event().wait()
                num += chunk.choice.index == self._index
                yield chunk
        finally:
            self.left.release()


def ids_of(chunk: Any) -> list[int]:
    return [id for choice in chunk.choices for id in getattr(choice, "token_ids", None) or ()]


@pytest.mark.parametrize("num", [1, 4])
async def test_a_stream_that_the_client_leaves_is_a_turn_of_what_it_was_sent(num: int) -> None:
    """The client sees `num` tokens and goes. Recorded are these tokens, with their logprobs, and no others."""
    backend = Paused(num)
    gateway = make_gateway(backend)
    key = gateway.open("t0")
    seen: list[int] = []
    async with calling(gateway, key) as client:
        async with await ask(client, stream=True, extra_body={"return_token_ids": True}) as stream:
            async for chunk in stream:
                seen += ids_of(chunk)
                if len(seen) == num:
                    break
        await asyncio.wait_for(backend.left.acquire(), 20)
    recorder = gateway.close(key)
    (turn,) = recorder.turns
    assert turn.sampled_ids == seen == encode("long answer")[:num]
    assert (turn.logprobs, turn.finish_reason) == ([logprob(id) for id in seen], "cancelled")
    assert recorder.messages == [USER, {"role": "assistant", "content": "long answer"[:num]}]
    assert recorder.metrics() == {
        "num_turns": 1,
        "num_cancelled": 1,
        "num_abandoned": 0,
        "num_branches": 0,
        "num_sampled": num,
    }
    assert gateway.num_sampled == num


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["async", "sync"])
async def test_streams_left_early_count_against_the_turn_limit(keyword: str) -> None:
    """Sixty streams are begun and left after their first token, with a limit of three: three turns, 57 refusals."""
    backend = Paused(2)
    gateway = make_gateway(backend, max_turns=3)
    key = gateway.open("t0")
    codes: list[str | None] = []

    def leave_one(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            for chunk in client.chat.completions.create(model="policy", messages=[USER], stream=True):
                if chunk.choices[0].delta.content:
                    break

    async with calling(gateway, key) as client:
        for _ in range(60):
            try:
                if keyword == "sync":
                    await asyncio.to_thread(leave_one, str(client.base_url))
                else:
                    async with await ask(client, stream=True) as stream:
                        async for _chunk in stream:
                            break
            except openai.BadRequestError as error:
                codes.append(error.code)
        for _ in range(3):
            await asyncio.wait_for(backend.left.acquire(), 20)
    recorder = gateway.close(key)
    assert codes == ["turn_limit"] * 57
    assert len(backend.requests) == recorder.num_calls == recorder.num_cancelled == 3
    assert {turn.finish_reason for turn in recorder.turns} <= {"cancelled"}
    assert recorder.limit == "turn_limit"


async def test_a_call_whose_client_goes_away_before_any_answer_counts_and_is_no_turn() -> None:
    """Plain calls that the client gives up: nothing was sent, so there is no turn, but the engine has worked."""

    async def answer(request: Request) -> str:
        await asyncio.Event().wait()
        return "never"

    backend = ScriptedBackend(answer)
    gateway = make_gateway(backend, max_turns=2)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        for number, is_stream in enumerate((False, True), 1):
            call = asyncio.create_task(ask(client, stream=is_stream))
            while len(backend.requests) < number:
                await asyncio.sleep(0.005)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        async with asyncio.timeout(20):
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(client)
    recorder = gateway.close(key)
    assert (refused.value.code, len(backend.requests)) == ("turn_limit", 2)
    assert (recorder.turns, recorder.messages) == ([], [])
    assert recorder.metrics()["num_cancelled"] <= 2  # the limit also counts a call that is being cancelled


async def test_of_a_stream_of_several_choices_those_that_ended_keep_their_end() -> None:
    """The scripted backend streams one choice after another. The client leaves during the second choice."""
    backend = Paused(2, index=1)
    gateway = make_gateway(backend)
    key = gateway.open("t0")
    async with calling(gateway, key) as client, await ask(client, stream=True, n=2) as stream:
        async for chunk in stream:
            if chunk.choices[0].index == 1 and chunk.choices[0].delta.content == "o":
                break
    recorder = gateway.close(key)
    ended, left = recorder.turns
    assert (ended.sampled_ids, ended.finish_reason) == (encode("long answer\n"), "stop")
    assert (left.sampled_ids, left.finish_reason) == (encode("lo"), "cancelled")


async def test_a_stream_still_open_when_its_rollout_ends_is_recorded_as_far_as_it_was_sent() -> None:
    """An agent breaks its loop and returns without closing the stream."""
    gateway = make_gateway(Paused(3))
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        stream = await ask(client, stream=True, extra_body={"return_token_ids": True})
        seen: list[int] = []
        async for chunk in stream:
            seen += ids_of(chunk)
            if len(seen) == 3:
                break
        recorder = gateway.close(key)
        (turn,) = recorder.turns
        assert (turn.sampled_ids, turn.finish_reason) == (encode("lon"), "cancelled")
        await stream.close()
    assert len(recorder.turns) == 1


async def test_a_call_that_is_not_recorded_ends_with_its_rollout() -> None:
    """A thread of an agent that asks for an opponent's move cannot be cancelled; the engine is free all the same."""
    backend = Paused(0)
    gateway = make_gateway(backend)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        async with asyncio.timeout(10):
            asking = asyncio.create_task(ask(client, stream=True, extra_headers=UNRECORDED))
            while not backend.requests:
                await asyncio.sleep(0.01)
            recorder = gateway.close(key)
            await backend.left.acquire()
            with pytest.raises(openai.AuthenticationError, match="this rollout has finished"):
                await asking
    assert recorder.turns == []


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_defaults_fill_what_the_client_left_out_and_nothing_else() -> None:
    backend = ScriptedBackend()
    gateway = make_gateway(backend)
    async with calling(gateway, gateway.open("t0")) as client:
        await ask(client)
        await ask(client, temperature=0.1, max_tokens=5, seed=9)
    async with calling(gateway, gateway.open("t1", temperature=0.0)) as client:
        await ask(client)
    sampled = [(r.sampling.temperature, r.sampling.max_tokens, r.sampling.seed) for r in backend.requests]
    assert sampled == [(0.7, 50, call_seed(0, "t0", 0)), (0.1, 5, 9), (0.0, 50, call_seed(0, "t1", 0))]


def test_seeds_are_a_function_of_run_rollout_and_call() -> None:
    """`printf 1/t/0 | sha256sum` starts with 847c4089; the seed is the first 31 bits."""
    seeds = {call_seed(run, id, number) for run in (0, 1) for id in ("a", "b") for number in (0, 1)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert call_seed(1, "t", 0) == 0x847C4089 >> 1


# --- who may call -----------------------------------------------------------------------------------------------------


async def test_only_the_key_of_an_open_rollout_gets_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = make_gateway(ScriptedBackend())
    finished, opened = gateway.open("t0"), gateway.open("t0")
    gateway.close(finished)
    body = {"model": "policy", "messages": [USER]}
    async with gateway.serve() as url, httpx.AsyncClient() as client:
        for headers in ({}, {"Authorization": f"Bearer {opened}x"}, {"Authorization": f"Bearer {finished}"}):
            reply = await client.post(f"{url}/chat/completions", json=body, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        reply = await client.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {opened}"})
        assert reply.status_code == 200
        reply = await client.post(
            f"{url}/chat/completions", json={**body, "model": "other"}, headers={"Authorization": f"Bearer {opened}"}
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert finished not in caplog.text
    assert opened not in caplog.text


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_closing_breaks_off_calls_in_flight_with_a_401(is_stream: bool) -> None:
    started = asyncio.Event()

    async def answer(request: Request) -> str:
        started.set()
        await asyncio.Event().wait()
        return "never"

    backend = ScriptedBackend(answer)
    gateway = make_gateway(backend)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        call = asyncio.create_task(ask(client, stream=is_stream))
        await asyncio.wait_for(started.wait(), 10)
        recorder = gateway.close(key)
        with pytest.raises(openai.AuthenticationError, match="has finished"):
            await asyncio.wait_for(call, 10)
    assert backend.was_cancelled.is_set()
    assert recorder.num_calls == 0


async def test_the_turn_limit_counts_answered_and_running_calls() -> None:
    """Limit 2: of three concurrent calls, one is refused. A failed call does not count, but its retry does."""
    fails = iter([True])

    async def answer(request: Request) -> str:
        if next(fails, False):
            raise ChatError(503, "not now")
        await asyncio.sleep(0)
        return "ok"

    gateway = make_gateway(ScriptedBackend(answer), max_turns=2)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        with pytest.raises(openai.InternalServerError, match="not now"):
            await ask(client)
        retry: Any = {"extra_headers": {"x-stainless-retry-count": "1"}}
        results = await asyncio.gather(ask(client, **retry), ask(client), ask(client), return_exceptions=True)
    refused = [result for result in results if isinstance(result, openai.BadRequestError)]
    assert [error.code for error in refused] == ["turn_limit"]
    recorder = gateway.close(key)
    assert (recorder.num_calls, recorder.limit) == (2, "turn_limit")


async def test_it_remembers_why_the_last_call_failed_when_the_client_was_not_to_blame() -> None:
    errors: list[Exception | None] = [ChatError(400, "yours"), ChatError(502, "mine"), None, RuntimeError("defect")]

    def answer(request: Request) -> str:
        error = errors.pop(0)
        if error is not None:
            raise error
        return "ok"

    gateway = make_gateway(ScriptedBackend(answer))
    backend = gateway._backends[gateway.open("t0")]
    request = Request(model="policy", messages=[USER], sampling=Sampling())
    seen = []
    for _ in range(4):
        with suppress(ChatError, RuntimeError):
            await backend.reply(request)
        seen.append(backend.recorder.upstream_error)
    assert seen == [None, "mine", None, "RuntimeError: defect"]


# --- other clients ----------------------------------------------------------------------------------------------------


async def test_the_sync_client_streams_tool_calls() -> None:
    gateway = make_gateway(ScriptedBackend(lambda request: tool_call("add", a=1)))
    key = gateway.open("t0")

    def play(url: str) -> str:
        with openai.OpenAI(base_url=url, api_key=key) as client:
            stream = client.chat.completions.create(model="policy", messages=[USER], tools=TOOLS, stream=True)
            calls = [c.function for chunk in stream for c in chunk.choices[0].delta.tool_calls or ()]
        return "".join(call.arguments for call in calls)

    async with gateway.serve() as url:
        assert json.loads(await asyncio.to_thread(play, url)) == {"a": 1}
    assert gateway.close(key).tools == TOOLS


async def test_the_npm_client_works_as_its_users_use_it() -> None:
    def answer(request: Request) -> Any:
        return tool_call("add", a=1) if request.tools else "ok"

    gateway = make_gateway(ScriptedBackend(answer))
    key = gateway.open("t0")
    async with gateway.serve() as url:
        program = await asyncio.create_subprocess_exec(
            "node",
            str(clients() / "protocol.mjs"),
            env={**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key, "OPENAI_MODEL": "policy"},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await asyncio.wait_for(program.communicate(), 240)
    assert json.loads(output) == {
        "models": ["policy"],
        "contents": ["ok", "ok"],
        "logprobs": [2 * logprob(id) for id in encode("ok\n")],
        "call": {"name": "add", "arguments": '{"a": 1}'},
        "finish": "tool_calls",
        "text": "ok",
        "errors": {
            "key": ["AuthenticationError", 401],
            "model": ["NotFoundError", 404],
            "temperature": ["BadRequestError", 400],
        },
    }
    assert len(gateway.close(key).turns) == 4


@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_call_that_is_not_to_be_recorded_is_answered_and_leaves_no_trace(is_stream: bool) -> None:
    """It counts against no limit, and the recorded calls have the seeds that they have without it."""
    backend = ScriptedBackend(lambda request: "hello")
    gateway = make_gateway(backend, max_turns=2, seed=5)
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        for is_aside in (True, False, True, True, False):
            headers = {"X-Art-Record": "no"} if is_aside else {}
            if is_stream:
                chunks = [chunk async for chunk in await ask(client, stream=True, extra_headers=headers)]
                assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
            else:
                assert (await ask(client, extra_headers=headers)).choices[0].message.content == "hello"
    recorder = gateway.close(key)
    assert len(recorder.turns) == 2 and recorder.limit is None
    seeds = [request.sampling.seed for request in backend.requests]
    assert [seeds[1], seeds[4]] == [call_seed(5, "t0", 0), call_seed(5, "t0", 1)]
    assert len(set(seeds)) == 5


async def test_a_rate_limit_of_a_call_that_is_not_recorded_is_no_refusal_of_the_policys_calls() -> None:
    def busy(request: Request) -> str:
        raise ChatError(429, "slow down")

    gateway = make_gateway(ScriptedBackend(busy))
    key = gateway.open("t0")
    async with calling(gateway, key) as client:
        for headers, refused, upstream in ((UNRECORDED, 0, None), ({}, 1, "slow down")):
            with pytest.raises(openai.RateLimitError):
                await ask(client.with_options(max_retries=0), extra_headers=headers)
            assert (gateway.calls.refused, gateway._backends[key].recorder.upstream_error) == (refused, upstream)
    gateway.close(key)
