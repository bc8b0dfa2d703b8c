"""Several vLLM servers as one engine: who answers which call, what happens when one of them dies.

Against fake servers (fake_vllm.py), real processes over real HTTP.
"""

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Chunk
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import VllmEngineConfig
from art_cli.engines import EngineSetup, Replicated
from art_cli.engines.vllm import arguments
from art_cli.engines.vllm.replicas import VllmReplicas
from art_cli.engines.vllm.routing import Router
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.runtime.errors import DriftError, EngineError
from tests.engines.test_vllm import MODEL, PROBE, Fake, foreign
from tests.support import fake_vllm
from tests.support.process_table import is_alive
from tests.support.waiting import until


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


@asynccontextmanager
async def running(fake: Fake, manner: str = "", **changes: Any) -> AsyncIterator[VllmReplicas]:
    config = fake.config(manner, **{"replicas": 2, **changes})
    engine = VllmReplicas(config, MODEL, name="policy", logs=fake.logs)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def chat(text: str = "hello", group: str | None = None) -> Request:
    messages = [{"role": "user", "content": text}]
    return Request(model="policy", messages=messages, sampling=Sampling(max_tokens=4, seed=1), group=group)


# --- routing ----------------------------------------------------------------------------------------------------------


def test_a_group_stays_with_its_server_and_new_groups_go_where_the_fewest_calls_are() -> None:
    """40 groups of 8 attempts that come in any order: each group has one server, and each of 4 servers 10 groups."""
    router, in_flight = Router(4), dict.fromkeys(range(4), 0)
    calls = [f"g{number}" for number in range(40)] * 8
    random.Random(0).shuffle(calls)
    homes: dict[str, set[int]] = {}
    for group in calls:
        server = router.choose(chat(group=group), in_flight)
        in_flight[server] += 1
        homes.setdefault(group, set()).add(server)
    assert all(len(servers) == 1 for servers in homes.values())
    assert max(in_flight.values()) - min(in_flight.values()) <= 3 * 8


def test_a_group_moves_while_its_server_is_away_and_stays_where_it_moved() -> None:
    router = Router(2)
    home = router.choose(chat(group="g"), {0: 0, 1: 0})
    other = 1 - home
    assert router.choose(chat(group="g"), {other: 99}) == other
    assert router.choose(chat(group="g"), {home: 0, other: 99}) == other


def test_a_conversation_without_a_group_is_known_by_its_beginning_and_a_crowd_spills_over() -> None:
    router = Router(2)
    first = chat("one")
    assert first.messages is not None
    answered = [*first.messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "two"}]
    later = msgspec.structs.replace(first, messages=answered)
    assert router.choose(first, {0: 0, 1: 0}) == router.choose(later, {0: 5, 1: 0}) == 0
    assert router.choose(chat("two"), {0: 1, 1: 0}) == 1
    assert router.choose(first, {0: 8, 1: 0}) == 1
    assert router.choose(first, {0: 7, 1: 0}) == 0


def test_what_is_remembered_of_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_cli.engines.vllm.routing.MAX_HOMES", 3)
    router = Router(2)
    for number in range(100):
        router.choose(chat(group=str(number)), {0: 0, 1: 0})
    assert len(router._homes) == 3 and sum(router._num_homes) == 3


# --- how they are started ---------------------------------------------------------------------------------------------


def test_gpus_are_dealt_out_and_too_few_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "has_gpu", lambda inherited: True)
    env = {"CUDA_VISIBLE_DEVICES": "2,3,5,7", "A": "b"}
    settings: dict[str, Any] = {"name": "vllm", "env": env, "args": {"tensor_parallel_size": 2}}
    parts = arguments.divide(VllmEngineConfig.model_validate({**settings, "replicas": 2}))
    assert [part.env["CUDA_VISIBLE_DEVICES"] for part in parts] == ["2,3", "5,7"]
    assert all(part.env["A"] == "b" for part in parts)
    with pytest.raises(EngineError, match=r"engine\.replicas: 3 of 2 GPUs each need 6, and 4 can be seen"):
        arguments.divide(VllmEngineConfig.model_validate({**settings, "replicas": 3}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"replicas": 2, "url": "http://a:1"}, "remove replicas"),
        ({"replicas": 0}, "greater than 0"),
        ({"url": []}, "at least one"),
        ({"url": ["http://a:1", "http://a:1/v1"]}, "each server once"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        VllmEngineConfig.model_validate({"name": "vllm", **changes})


def test_one_server_is_the_plain_engine(fake: Fake) -> None:
    for changes, kind in (({}, VllmEngine), ({"replicas": 2}, VllmReplicas)):
        config = fake.config(**changes)
        setup = EngineSetup(options={}, policy=MODEL, name="policy", step=0, logs=fake.logs)
        assert type(VllmReplicas.of(config, setup)) is kind


async def test_every_replica_has_a_log_a_key_and_a_template_of_its_own(fake: Fake) -> None:
    async with running(fake) as engine:
        assert len({replica.engine._server.key for replica in engine.replicas}) == 2
        pids = [pid for start in fake.starts() for pid in start["pids"]]
        for number in (1, 2):
            assert "fake: key" in (fake.logs / f"vllm-{number}.log").read_text()
            assert (fake.logs / f"vllm-{number}_chat_template.jinja").exists()
    assert not any(is_alive(pid) for pid in pids)


async def test_a_replica_that_does_not_start_ends_the_others_and_is_told(fake: Fake) -> None:
    with pytest.raises(EngineError, match=r"ended while it started \(exit status 3\)(?s:.)*no such model"):
        async with running(fake, "no start"):
            pass


# --- weights ----------------------------------------------------------------------------------------------------------


async def test_every_replica_has_the_adapter_when_a_step_counts_as_loaded(fake: Fake) -> None:
    async with running(fake) as engine:
        await engine.load(fake.adapter("a"), 3)
        assert fake.paths().count("/v1/load_lora_adapter") == 2
        replies = [await engine.reply(chat("hello", group=str(number))) for number in range(4)]
        assert [reply.step for reply in replies] == [3] * 4 and engine.endpoint.step == 3
        assert len({tuple(reply.choices[0].token_ids) for reply in replies}) == 1
        seed = fake_vllm.seed_of(fake.adapter("a"))
        expected = [fake_vllm.logprobs(seed, b)[t] for b, t in zip(PROBE, PROBE[1:], strict=False)]
        assert await engine.score(PROBE) == pytest.approx(expected)


async def test_a_replica_with_other_weights_stops_the_run(fake: Fake) -> None:
    async with running(fake) as engine:
        await engine.load(fake.adapter("a"), 3)
        await engine.replicas[1].engine.load(fake.adapter("b"), 3)
        with pytest.raises(DriftError, match=r"step 3: vLLM's replica 2 has other weights than replica 1"):
            await engine.score(PROBE)


# --- dying ------------------------------------------------------------------------------------------------------------


async def test_the_calls_of_a_dead_replica_move_and_it_comes_back_proven(fake: Fake) -> None:
    """Replica 1 holds three calls of a group when it gets SIGKILL. All are answered by replica 2. A step is loaded
    while replica 1 is away; it comes back with that step and has scored its probe."""
    async with running(fake) as engine:
        await engine.load(fake.adapter("a"), 1)
        first, second = engine.replicas
        calls = [asyncio.create_task(engine.reply(chat("slow", group="g"))) for _ in range(3)]
        await until(lambda: fake.paths().count("/v1/chat/completions") == 3)
        lost, other = (first, second) if first.num_requests else (second, first)
        assert (lost.num_requests, other.num_requests) == (3, 0)
        os.kill(lost.engine.pid, signal.SIGKILL)
        await until(lambda: not lost.is_joined, timeout_s=3.0)
        assert isinstance(engine, Replicated) and (engine.num_answering, engine.num_replicas) == (1, 2)
        await engine.load(fake.adapter("b"), 2)
        scoring = asyncio.create_task(engine.score(PROBE))  # it waits for the calls in flight
        fake.release()
        await scoring
        assert [reply.step for reply in await asyncio.gather(*calls)] in ([1] * 3, [2] * 3)
        assert engine.num_moved == 3
        await until(lambda: lost.is_joined)
        assert lost.engine.loaded == (fake.adapter("b"), 2)
        bodies = [call["body"] for call in fake.calls() if call.get("path") == "/v1/completions"]
        assert sum(body["prompt"] == PROBE for body in bodies) == 4  # twice each: with the prefix cache and without
        assert (await engine.reply(chat("hello", group="new"))).step == 2


async def test_a_stream_that_has_begun_is_not_sent_again(fake: Fake) -> None:
    async with running(fake) as engine:
        seen = []
        with pytest.raises(ChatError) as error:
            async for chunk in engine.stream(msgspec.structs.replace(chat("half", group="g"), is_stream=True)):
                seen.append(chunk)
        assert len(seen) == 1 and error.value.status >= 500
        assert engine.num_moved == 0 and fake.paths().count("/v1/chat/completions") == 1
        await until(lambda: all(replica.can_answer for replica in engine.replicas) and len(fake.starts()) == 3)


async def test_a_stream_that_has_not_begun_is_sent_again(fake: Fake) -> None:
    async with running(fake) as engine:
        request = msgspec.structs.replace(chat("slow", group="g"), is_stream=True)
        streaming = asyncio.create_task(collect(engine, request))
        await until(lambda: "/v1/chat/completions" in fake.paths())
        lost = next(replica for replica in engine.replicas if replica.num_requests)
        os.kill(lost.engine.pid, signal.SIGKILL)
        fake.release()
        assert len(await streaming) == 1 and engine.num_moved == 1
        await until(lambda: lost.is_joined)


async def collect(engine: VllmReplicas, request: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.stream(request)]


async def test_a_call_that_ends_servers_is_sent_to_two_and_all_dead_ends_the_run(fake: Fake) -> None:
    """Each replica is started three times again. The eighth death is the last, and `watch` says so."""
    async with running(fake) as engine:
        watch = asyncio.create_task(engine.watch())
        for _ in range(20):
            with pytest.raises(ChatError):
                await engine.reply(chat("die", group="g"))
            if watch.done():
                break
        with pytest.raises(EngineError, match=r"all 2 replicas have ended; the last one: .*exit status 9"):
            await asyncio.wait_for(watch, 20)
        with pytest.raises(ChatError) as refusal:
            await engine.reply(chat("hello"))
        assert (refusal.value.status, refusal.value.code) == (503, "engine_failed")
        assert Counter("argv" in call for call in fake.calls())[True] == 8


async def test_a_refusal_is_not_sent_to_another_replica(fake: Fake) -> None:
    async with running(fake) as engine:
        with pytest.raises(ChatError) as refusal:
            await engine.reply(chat("refuse"))
        assert refusal.value.status == 400 and engine.num_moved == 0


async def test_one_of_two_running_servers_may_go(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls go to the other at once, and the engine goes on without it."""
    async with foreign(fake, monkeypatch) as staying:
        async with foreign(fake, monkeypatch) as going:
            config = VllmEngineConfig(name="vllm", url=[going, staying], api_key_env="THEIR_KEY")
            engine = VllmReplicas(config, MODEL, name="policy", logs=fake.logs)
            await engine.start()
            await engine.load(fake.adapter("a"), 1)
            replies = [await engine.reply(chat(group=str(number))) for number in range(2)]
            assert [reply.step for reply in replies] == [1, 1]
        assert [(await engine.reply(chat(group=str(number)))).step for number in range(4)] == [1] * 4
        assert engine.num_moved > 0
        await engine.close()
