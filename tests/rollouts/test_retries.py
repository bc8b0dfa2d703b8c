"""An SDK that gives up on a call and sends it again: the reply that the agent never saw is not trained on."""

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.rollouts.recorder import Recorder, Retries
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.trajectory import Trajectory
from tests.support.attacks.lossy import Swallowing
from tests.support.records.trees import samples_of, scored, turn
from tests.support.standins.scripted import Engine, ScriptedBackend, encode

USER = {"role": "user", "content": "hi"}
BODY = Request(model="policy", messages=[USER], sampling=Sampling(), digest=b"one body")


async def read(client: openai.AsyncOpenAI, is_stream: bool, *messages: dict[str, str]) -> str:
    """The text of a reply, streamed or not."""
    asked: Any = {"model": "policy", "messages": list(messages) or [USER]}
    if not is_stream:
        return (await client.chat.completions.create(**asked)).choices[0].message.content or ""
    async with client.chat.completions.stream(**asked) as stream:
        return (await stream.get_final_completion()).choices[0].message.content or ""


def trained(recorder: Recorder) -> list[str]:
    """The text of the trained tokens, sample by sample."""
    trajectory = Trajectory(id="t", group_id="g", group_size=1, index=0, turns=recorder.turns)
    samples = samples_of(trajectory)
    return ["".join(map(chr, sample.token_ids[sample.targets])) for sample in samples]


@asynccontextmanager
async def calling(
    answer: Callable[[Request], Any],
    *,
    swallows: bool = False,
    max_retries: int = 2,
    timeout_s: float = 1.0,
    max_turns: int = 10,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, ScriptedBackend, Gateway, str]]:
    backend = ScriptedBackend(answer)
    gateway = Gateway(Engine(backend), defaults=Sampling(), seed=0, max_turns=max_turns)
    key = gateway.open("t0")
    async with gateway.serve() as url, Swallowing(url).serve() as proxy:
        client = openai.AsyncOpenAI(
            base_url=proxy if swallows else url, api_key=key, max_retries=max_retries, timeout=timeout_s
        )
        async with client:
            yield client, backend, gateway, key


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_call_that_times_out_stops_the_engine_and_only_the_retry_is_trained_on(is_stream: bool) -> None:
    """The two are one turn of the limit."""
    numbers = itertools.count()

    async def answer(request: Request) -> str:
        if next(numbers) == 0:
            await asyncio.Event().wait()
        return "second"

    async with calling(answer, max_turns=1) as (client, backend, gateway, key):
        assert await read(client, is_stream) == "second"
        await asyncio.wait_for(backend.was_cancelled.wait(), 20)
        recorder = gateway.close(key)
    assert [request.num_retries for request in backend.requests] == [0, 1]
    assert trained(recorder) == ["second\n"]
    assert recorder.messages == [USER, {"role": "assistant", "content": "second"}]
    assert (recorder.num_cancelled, recorder.num_abandoned, len(recorder.turns)) == (1, 0, 1)
    assert recorder.limit is None


@pytest.mark.slow
@pytest.mark.parametrize("is_late", [False, True], ids=["answered", "in-flight"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["plain", "streamed"])
async def test_a_reply_that_the_client_never_saw_is_marked_and_not_trained_on(is_stream: bool, is_late: bool) -> None:
    """The engine answers before the retry arrives, or after the retry was answered; the gateway sees no disconnect.

    If a later prompt continues the abandoned reply, the reply was used and is trained on. Call and retry count as one
    turn.
    """
    numbers, may_answer, has_answered = itertools.count(), asyncio.Event(), asyncio.Event()
    answers = ["first", "second", "third"]

    async def answer(request: Request) -> str:
        number = next(numbers)
        if number == 0 and is_late:
            await may_answer.wait()
            has_answered.set()
        return answers[number]

    async with calling(answer, swallows=True, max_turns=2) as (client, _, gateway, key):
        recorder = gateway._backends[key].recorder
        assert await read(client, is_stream) == "second"
        may_answer.set()
        async with asyncio.timeout(20):
            while len(recorder.turns) < 2:
                await asyncio.sleep(0.01)
        assert has_answered.is_set() == is_late
        assert trained(recorder) == ["second\n"]
        assert recorder.messages == [USER, {"role": "assistant", "content": "second"}]
        assert recorder.branches == []
        marks = {bytes(turn.sampled_ids): turn.is_abandoned for turn in recorder.turns}
        assert marks == {b"first\n": True, b"second\n": False}
        metrics = recorder.metrics()
        assert (metrics["num_turns"], metrics["num_abandoned"], metrics["num_branches"]) == (2, 1, 0)

        await read(client, is_stream, USER, {"role": "assistant", "content": "first"}, {"role": "user", "content": "?"})
        with pytest.raises(openai.BadRequestError, match="has made its 2 model calls"):
            await read(client, is_stream)
        gateway.close(key)
    assert sorted(trained(recorder)) == ["first\nthird\n", "second\n"]
    assert recorder.branches == [[USER, {"role": "assistant", "content": "second"}]]


async def test_a_client_that_has_gone_when_the_engine_answers_gets_no_turn() -> None:
    """The end of the file and the answer arrive together."""
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> str:
        asked.set()
        await may_answer.wait()
        return "never seen"

    async with calling(answer) as (client, _, gateway, key):
        url = urlsplit(str(client.base_url))
        body = json.dumps({"model": "policy", "messages": [USER]})
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        with socket.create_connection((url.hostname or "", url.port or 0), timeout=20) as connection:
            connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
            await asyncio.wait_for(asked.wait(), 20)
        may_answer.set()
        recorder = gateway._backends[key].recorder
        async with asyncio.timeout(20):
            while recorder.num_calls == 0:
                await asyncio.sleep(0.01)
    assert (recorder.num_cancelled, recorder.turns) == (1, [])


async def test_equal_calls_at_once_are_no_retries_of_each_other() -> None:
    """Best of three by the agent: one call gets a 503 and is repeated, and the other calls keep their replies."""
    numbers = itertools.count()

    def answer(request: Request) -> str:
        number = next(numbers)
        if number == 1:
            raise ChatError(503, "busy")
        return f"answer {number}"

    async with calling(answer, timeout_s=60) as (client, backend, gateway, key):
        await asyncio.gather(*(read(client, False) for _ in range(3)))
        recorder = gateway.close(key)
    assert [request.num_retries for request in backend.requests] == [0, 0, 0, 1]
    assert sorted(trained(recorder)) == ["answer 0\n", "answer 2\n", "answer 3\n"]
    assert recorder.num_abandoned == 0


async def test_the_conversation_stays_when_the_retry_fails_too() -> None:
    numbers = itertools.count()

    async def answer(request: Request) -> str:
        if next(numbers):
            await asyncio.Event().wait()
        return "first"

    async with calling(answer, swallows=True, max_retries=1) as (client, _, gateway, key):
        with pytest.raises(openai.APITimeoutError):
            await read(client, False)
        recorder = gateway.close(key)
    assert trained(recorder) == []
    assert recorder.messages == [USER, {"role": "assistant", "content": "first"}]


@pytest.mark.parametrize("said", ["-1", "1e3", "99999999999999", "²", "one", "", "0", "1"])
async def test_a_retry_count_is_a_small_number_or_none(said: str) -> None:
    async with calling(lambda request: "ok") as (client, backend, _, _):
        headers = {"x-stainless-retry-count": said.encode()}
        reply: Any = await client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "hi"}],
            extra_headers=headers,  # type: ignore[arg-type]
        )
    assert reply.choices[0].message.content == "ok"
    assert backend.requests[0].num_retries == (said == "1")


def test_a_retry_replaces_the_likeliest_of_equal_calls_once() -> None:
    retries = Retries()
    answered, left, waiting, last = (retries.add(BODY) for _ in range(4))
    answered.state = last.state = "answered"
    left.end()
    again = Request(model="policy", messages=[USER], sampling=Sampling(), digest=BODY.digest, num_retries=1)
    assert [retries.replaced(again) for _ in range(5)] == [left, waiting, last, answered, None]
    assert retries.replaced(BODY) is None
    other = Request(model="policy", messages=[USER], sampling=Sampling(), digest=b"another", num_retries=1)
    assert retries.replaced(other) is None


def test_what_is_remembered_of_calls_is_bounded() -> None:
    retries = Retries()
    for number in range(3000):
        retries.add(Request(model="policy", sampling=Sampling(), digest=b"%d" % (number % 2000)))
        retries.add(BODY)
    assert len(retries._calls) <= 1001
    assert all(len(equal) <= 128 for equal in retries._calls.values())


def test_abandoned_turns_hold_nothing_of_other_turns_back() -> None:
    """An abandoned leaf over a turn that was used: that turn's tokens are trained, the leaf's are not."""
    used = turn(encode("ab"), encode("cd"))
    abandoned = turn(encode("e"), encode("f"), parent=0, kept=4, is_abandoned=True)
    [sample] = samples_of(scored([used, abandoned], 1.0))
    assert (sample.token_ids.tolist(), sample.targets.tolist()) == (encode("abcde"), [2, 3])
    retried = turn([], encode("g"), parent=1, kept=5)
    [sample] = samples_of(scored([used, abandoned, retried], 1.0))
    assert (sample.token_ids.tolist(), sample.targets.tolist()) == (encode("abcdeg"), [2, 3, 5])
