"""The limits of `art serve`: requests at once, the size of bodies, and the time that slow clients have."""

import asyncio
import contextlib
import json
import socket
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from art_cli.chat.http_server import Timeouts
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.engines.embedded import embedded_engine as engine
from art_cli.engines.embedded import grammars
from art_cli.runs.run_dir import RunDir
from art_cli.serving.dispatch import Dispatch
from art_cli.serving.middleware import Admission, Meter
from art_cli.serving.served_model import find_source
from art_cli.serving.served_policies import Loader, Policies, ServedPolicy
from tests.support.attacks.hostile import NUM_MUTATIONS, MemoryBound
from tests.support.models.tiny import tiny_tokenizer
from tests.support.processes.waiting import until
from tests.support.servers.served import ScriptedLoader
from tests.support.servers.serving import (
    USER,
    Gate,
    Talker,
    ask_and_not_read,
    client,
    fetch,
    greedy,
    number,
    rest_of,
    say,
    send_raw,
    serving,
)


async def test_more_requests_than_fit_get_429_and_when_to_come_again() -> None:
    """Concurrency 2 and queue 3: of 8 at once 2 are at the engine, 3 wait, 3 are refused; then all 5 are answered."""
    gate = Gate()
    async with (
        serving(loader=ScriptedLoader(gate), concurrency=2, queue=3) as (service, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        body = {"model": "policy", "messages": [USER]}
        calls = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(8)]
        await until(lambda: sum(call.done() for call in calls) == 3)
        refused = [call.result() for call in calls if call.done()]
        assert {reply.status_code for reply in refused} == {429}
        assert {reply.json()["error"]["code"] for reply in refused} == {"overloaded"}
        assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused)
        await until(lambda: gate.num_waiting == 2)
        assert (service.admission.num_in_flight, service.admission.num_waiting) == (5, 3)
        assert (await http.get("/v1/models")).status_code == 200  # only completions are counted
        gate.is_open.set()
        answered = await asyncio.gather(*(call for call in calls if not call.done()))
        assert {reply.status_code for reply in answered} == {200}
        assert service.admission.num_in_flight == 0


async def test_a_body_that_no_context_holds_is_413_before_it_is_sent(run: RunDir) -> None:
    """A context of 1,024 tokens: 28 MiB are refused by their header; 1 MiB is read and is too long by its tokens.

    A client that closes and sends all the same sees the answer, too.
    """
    async with serving(find_source(str(run.root))) as (service, root):
        head = HEAD.replace(b"100\r\n", b"%d\r\nConnection: close\r\n" % (28 * 2**20))
        asking = asyncio.to_thread(send_raw, root, head + b"Expect: 100-continue\r\n\r\n")
        sending = asyncio.to_thread(send_raw, root, head + b"\r\n", b"x" * (28 * 2**20))
        for received, _ in await asyncio.gather(asking, sending):
            assert received.startswith(b"HTTP/1.1 413 ")
            assert b"no longer prompt fits the model's context" in received
            assert b"%d bytes" % service._body_limit().num_bytes in received
        body = {"model": "mine", "messages": [{"role": "user", "content": "x" * 2**20}]}
        async with httpx.AsyncClient(base_url=root) as http:
            reply = await http.post("/v1/chat/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert service.admission.num_in_flight == 0


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n"
)


async def test_a_body_too_slow_is_408_and_no_longer_in_flight() -> None:
    async with serving(loader=ScriptedLoader(), body_timeout_s=0.3) as (service, root):
        received, seconds = await asyncio.to_thread(send_raw, root, HEAD + b"\r\n{")
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in received
        assert 0.25 < seconds < 5
        assert service.admission.num_in_flight == 0


def send_blank_line_later(root: str) -> tuple[bytes, float]:
    """What comes for a request and then a blank line, and after how many seconds the connection is closed."""
    host, _, port = root.removeprefix("http://").partition(":")
    begin = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        wire.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = wire.recv(65536)
        wire.sendall(b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            while piece := wire.recv(65536):
                received += piece
        return received, time.perf_counter() - begin


async def test_a_request_that_never_becomes_one_is_ended() -> None:
    """Nothing at all, half a header, headers without end: closed, with 408 or 431 where something was sent.

    A connection that has had an answer and sends a blank line after it is closed as well.
    """
    async with serving(loader=ScriptedLoader(), timeouts=Timeouts(request_s=1.0)) as (_, root):
        nothing = asyncio.to_thread(send_raw, root)
        half = asyncio.to_thread(send_raw, root, HEAD)
        endless = asyncio.to_thread(send_raw, root, HEAD, b"X: " + b"x" * 2**17)
        results = await asyncio.gather(nothing, half, endless, asyncio.to_thread(send_blank_line_later, root))
    assert results[0][0] == b""
    assert results[1][0].startswith(b"HTTP/1.1 408 ")
    assert results[2][0] == b"" or results[2][0].startswith(b"HTTP/1.1 431 ")
    assert results[3][0].startswith(b"HTTP/1.1 200 ")
    assert all(seconds < 5 for _, seconds in results)


async def test_clients_that_do_not_read_are_given_up() -> None:
    """One asks for a whole answer, then one for a stream, and neither reads: both are cut off and not in flight."""
    async with serving(loader=ScriptedLoader(make=Talker), timeouts=Timeouts(read_s=0.3)) as (service, root):
        with socket.socket() as whole, socket.socket() as stream:
            for num_gone, wire in enumerate((whole, stream)):
                await ask_and_not_read(root, wire, is_stream=wire is stream)
                await until(lambda: service.admission.num_in_flight == 1)
                await until(lambda: service.admission.num_in_flight == 0)
                metrics = await fetch(f"{root}/metrics")
                assert number(metrics, "art_requests_total", route="/v1/completions", code="200") == num_gone + 1
            received = await asyncio.to_thread(rest_of, whole)
    assert len(received) < 20_000_000


@pytest.mark.slow
async def test_slow_readers_keep_no_client_from_being_answered() -> None:
    """Two slots, two streams of 20 MB that wait for their clients: others are answered. Then both clients get all."""
    async with (
        serving(loader=ScriptedLoader(make=Talker), concurrency=2, queue=1) as (service, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        with socket.socket() as one, socket.socket() as other:
            for wire in (one, other):
                await ask_and_not_read(root, wire, is_stream=True)
            await until(lambda: (service.admission.num_in_flight, service.admission.num_answering) == (2, 0))
            short = {"model": "policy", "prompt": "x", "max_tokens": 1}
            assert (await http.post("/v1/completions", json=short)).status_code == 200
            await until(lambda: service.admission.num_in_flight == 2)
            assert (await http.post("/v1/completions", json=short)).status_code == 200
            numbers = (await http.get("/metrics")).text
            received = await asyncio.gather(*(asyncio.to_thread(rest_of, wire) for wire in (one, other)))
        await until(lambda: service.admission.num_in_flight == 0)
    assert (number(numbers, "art_requests_inside"), number(numbers, "art_requests_answering")) == (2, 0)
    for data in received:
        assert data.count(b"o") >= 10_000_000
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.slow
async def test_a_stream_that_no_client_reads_keeps_no_slot(run: RunDir) -> None:
    """One slot: one chunk of a stream of 200 tokens is read, others are answered, then the rest of it is there."""
    loader = Loader(EmbeddedEngineConfig(max_batch=1), logs=Path("/nowhere"))
    policies = Policies([ServedPolicy(find_source(str(run.root)), loader)])
    await policies.start()
    admission = Admission(concurrency=1, queue=0)
    dispatch = Dispatch(policies, admission, Meter(), logs_content=False)
    long, short = (
        Request(
            model="mine",
            messages=[USER],
            sampling=Sampling(temperature=0, max_tokens=num),
            user_set=frozenset({"temperature", "max_tokens"}),
        )
        for num in (200, 8)
    )
    try:
        async with contextlib.aclosing(dispatch.stream(long)) as stream:
            ids = list((await anext(stream)).choice.token_ids)
            async with asyncio.timeout(60):
                assert (await dispatch.reply(short)).choices[0].text == greedy(run, 2)
                assert [chunk async for chunk in dispatch.stream(short)]
            ids += [id async for chunk in stream for id in chunk.choice.token_ids]
        assert len(ids) == 200
        assert ids == (await dispatch.reply(long)).choices[0].token_ids
    finally:
        await policies.close()


@pytest.mark.slow
async def test_a_client_that_goes_away_frees_its_slot(run: RunDir) -> None:
    """An engine with one slot: an answer of 900 tokens is left early; it ends there, unfinished."""
    loader = Loader(EmbeddedEngineConfig(max_batch=1), logs=Path("/nowhere"))
    async with serving(find_source(str(run.root)), loader=loader, concurrency=2) as (service, root), client(root) as ai:
        generation = service.policies.served["mine"]._generation
        assert generation is not None
        scheduler = generation.engine._thread._scheduler  # type: ignore[attr-defined]
        for is_stream in (True, False):
            call = ai.completions.create(model="mine", prompt="abc", max_tokens=900, seed=5, stream=is_stream)
            task = asyncio.create_task(call)
            await until(lambda: bool(scheduler.running))
            (left,) = scheduler.running.values()
            if is_stream:
                stream = await task
                await anext(aiter(stream))  # type: ignore[call-overload]
                await stream.close()  # type: ignore[union-attr]
            else:
                task.cancel()
            await until(lambda: service.admission.num_in_flight == 0)
            assert await say(ai, "mine", max_tokens=8) == greedy(run, 2)
            assert (left.slot, left.finish_reason) == (-1, None)
            assert scheduler.num_sampled(left) < 900
            assert scheduler.is_idle
        metrics = await fetch(f"{root}/metrics")
    assert number(metrics, "art_requests_total", route="/v1/completions", code="499") == 1
    assert number(metrics, "art_requests_answering") == 0


# --- what takes memory ------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_likeliest_tokens_of_many_whole_replies_wait_for_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 700 of them: 20 clients ask for 2 x 8 x 20 = 320 each, so two at once; one of 4 leaves while it waits.

    128 x 900 x 20 never fit: refused as a whole reply, begun as a stream.
    """
    monkeypatch.setattr(engine, "MAX_ALTERNATIVES", 700)
    loader = Loader(EmbeddedEngineConfig(max_batch=64), logs=Path("/nowhere"))
    body = {"model": "mine", "messages": [USER], "logprobs": True, "top_logprobs": 20, "n": 2, "max_tokens": 8}
    async with (
        serving(find_source(str(run.root)), loader=loader) as (service, root),
        httpx.AsyncClient(base_url=root, timeout=60) as http,
    ):
        generation = service.policies.served["mine"]._generation
        assert generation is not None
        scheduler = generation.engine._thread._scheduler  # type: ignore[attr-defined]
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(scheduler.running))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        calls = [asyncio.create_task(http.post("/v1/chat/completions", json=body)) for _ in range(20)]
        await until(lambda: bool(scheduler.running))
        for call in calls[3::4]:
            call.cancel()
        replies = await asyncio.gather(*calls, return_exceptions=True)
        watching.cancel()
        assert sum(isinstance(reply, httpx.Response) and reply.status_code == 200 for reply in replies) == 15
        assert 1 <= most <= 4
        huge = {**body, "n": 128, "max_tokens": 900}
        refused = await http.post("/v1/chat/completions", json=huge)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "top_logprobs")
        async with http.stream("POST", "/v1/chat/completions", json={**huge, "stream": True}) as stream:
            assert stream.status_code == 200
        await until(lambda: service.admission.num_in_flight == 0)
        assert generation.engine._room._free == 700  # type: ignore[attr-defined]


def test_ten_thousand_different_schemas_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In memory or on the disk. A fifth has a pattern; as many are tried as ART_FUZZ has it."""
    monkeypatch.setattr(grammars, "try_out", lambda schemas: None)  # a process for each, whose end is tested elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    kept = grammars.Grammars(tokenizer, vocab=len(tokenizer), stop_ids=[tokenizer.eos_token_id])

    def compile_next(number: int) -> None:
        text = {"type": "string", "pattern": f"^a{number}(b|c)*d$"} if number % 5 == 0 else {"const": f"x{number}"}
        rule = "%json " + json.dumps({"type": "object", "properties": {f"p{number}": text}})
        kept._future(grammars.Format(f"start: answer\nanswer: {rule}", (rule,), "response_format")).result()

    try:
        for number in range(2 * grammars.MAX_KEPT):
            compile_next(number)
        with MemoryBound(mib=64):
            for number in range(2 * grammars.MAX_KEPT, NUM_MUTATIONS):
                compile_next(number)
    finally:
        kept.close()
    assert len(kept._kept) == grammars.MAX_KEPT
    assert not list(tmp_path.iterdir())
