"""`art serve` from start to end, and what it says of itself: its log, its metrics, the lines that it prints."""

import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from art_cli.chat.api_keys import Keys, read_key_texts
from art_cli.chat.replies import Choice, Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.cli import serve as serve_command
from art_cli.runs.run_dir import RunDir
from art_cli.runs.system_prompt import SystemPrompt
from art_cli.runtime.errors import EngineError, UsageError
from art_cli.serving.serve_service import Limits, Service
from art_cli.serving.served_model import Source
from art_cli.serving.served_policies import Policies, ServedPolicy
from tests.support.paths import LETTERS
from tests.support.processes import forked
from tests.support.processes.waiting import until
from tests.support.servers.ports import free_port
from tests.support.servers.served import ScriptedEngine, ScriptedLoader, scripted_source
from tests.support.servers.serving import (
    JSON,
    USER,
    Gate,
    Talker,
    ask_and_not_read,
    client,
    number,
    rest_of,
    run_line,
    say,
    serving,
)


async def test_it_listens_before_it_has_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """/health answers, the others say 503, until the model is there. The last line of the log says that it is."""
    caplog.set_level(logging.INFO, logger="art_cli")
    loading = asyncio.Event()

    class Slow(ScriptedLoader):
        async def make(self, source: Source) -> Any:
            await loading.wait()
            return await super().make(source)

    policies = Policies([ServedPolicy(scripted_source(), Slow())])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits())
    port, ready = free_port(), asyncio.Event()
    task = asyncio.create_task(service.run("127.0.0.1", port, lambda root: ready.set()))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

        async def statuses() -> list[int]:
            body = {"model": "policy", "messages": [USER]}
            paths = ("/health", "/ready", "/health/ready", "/v1/models", "/v1/models/policy")
            gets = [(await http.get(path)).status_code for path in paths]
            return [*gets, (await http.post("/v1/chat/completions", json=body)).status_code]

        while True:
            with contextlib.suppress(httpx.ConnectError):
                await http.get("/health")
                break
            await asyncio.sleep(0.01)
        assert await statuses() == [200, 503, 503, 503, 503, 503]
        loading.set()
        await asyncio.wait_for(ready.wait(), 10)
        await until(lambda: caplog.messages[-1] == f"ready: calls are answered at http://127.0.0.1:{port}/v1")
        assert await statuses() == [200, 200, 200, 200, 200, 200]
    service.stop()
    await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_what_runs_and_refuses_what_is_new(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    """One request in flight, one in the queue: both are answered; a new one gets 503; then the port is closed."""
    caplog.set_level(logging.INFO)
    gate = Gate()
    policies = Policies([ServedPolicy(scripted_source(), ScriptedLoader(gate))])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits(concurrency=1))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.run("127.0.0.1", 0, ready.set_result))
    root = await asyncio.wait_for(ready, 10)
    async with client(root) as ai, httpx.AsyncClient(base_url=root) as http:
        calls = [asyncio.create_task(say(ai, "policy")) for _ in range(2)]
        await until(lambda: service.admission.num_in_flight == 2)
        os.kill(os.getpid(), number)
        await until(lambda: "stopping: 2 requests are ended first" in caplog.text)
        refused = await http.post("/v1/chat/completions", json={"model": "policy", "messages": [USER]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in refused.headers
        assert ((await http.get("/ready")).status_code, (await http.get("/health")).status_code) == (503, 200)
        gate.is_open.set()
        assert await asyncio.gather(*calls) == ["ok", "ok"]
        await asyncio.wait_for(task, 10)
        with pytest.raises(httpx.ConnectError):
            await http.get("/health")


@pytest.mark.slow
async def test_draining_waits_for_replies_that_are_not_read_yet() -> None:
    """All is sampled and sent when it is told to stop, but the client has most of 10 MB to read: it gets the rest."""
    policies = Policies([ServedPolicy(scripted_source(), ScriptedLoader(make=Talker))])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits())
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.run("127.0.0.1", 0, ready.set_result))
    root = await asyncio.wait_for(ready, 10)
    with socket.socket() as whole, socket.socket() as stream:
        for wire in (whole, stream):
            await ask_and_not_read(root, wire, is_stream=wire is stream)
        await until(lambda: (service.admission.num_in_flight, service.admission.num_answering) == (2, 0))
        service.stop()
        await until(lambda: service.admission.state == "draining")
        assert service.admission.num_in_flight == 2
        received = await asyncio.gather(*(asyncio.to_thread(rest_of, wire) for wire in (whole, stream)))
    await asyncio.wait_for(task, 20)
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert received[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.slow
@pytest.mark.parametrize(("drain_s", "num_signals"), [(0.2, 1), (600.0, 2)])
async def test_draining_has_a_deadline_and_a_second_signal_does_not_wait(
    drain_s: float, num_signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    policies = Policies([ServedPolicy(scripted_source(), ScriptedLoader(gate))])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits(drain_s=drain_s))
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.run("127.0.0.1", 0, ready.set_result))
    async with client(await asyncio.wait_for(ready, 10)) as ai:
        call = asyncio.create_task(say(ai, "policy"))
        await until(lambda: gate.num_waiting == 1)
        for _ in range(num_signals):
            service.stop()
        await asyncio.wait_for(task, 20)
        with pytest.raises(openai.InternalServerError) as ended:
            await call
    assert (ended.value.status_code, ended.value.code) == (503, "shutting_down")
    assert gate.num_waiting == 0
    assert "stopped with 1 requests unfinished" in caplog.text


@pytest.mark.slow
async def test_a_sigterm_at_any_instant_ends_the_process(run: RunDir) -> None:
    """The command itself, at instants from before its first import to after it is ready, the first with a request.

    ART_TEST_KILLS says how many instants; every fifth one has a request that runs. Before it listens the system ends it
    at once; from then on it ends by itself, with 0.
    """
    command = [sys.executable, "-m", "art_cli", "serve", str(run.root), "--port", "0", "--json", "--follow"]
    pipe, draw, whole_s = asyncio.subprocess.PIPE, random.Random(0), 0.0
    for attempt in range(int(os.environ.get("ART_TEST_KILLS", "2"))):
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert process.stdout
        begin = time.monotonic()
        try:
            if attempt % 5 == 0:
                line = await asyncio.wait_for(process.stdout.readline(), 120)
                whole_s = time.monotonic() - begin
                body = {"model": "mine", "prompt": "abc", "max_tokens": 500, "stream": True}
                async with (
                    httpx.AsyncClient() as http,
                    http.stream("POST", json.loads(line)["url"] + "/completions", json=body, timeout=60) as reply,
                ):
                    lines = reply.aiter_lines()
                    await anext(lines)
                    process.terminate()
                    assert [line async for line in lines if line][-1] == "data: [DONE]"
            else:
                await asyncio.sleep(draw.uniform(0, whole_s))
                process.terminate()
            _, said = await asyncio.wait_for(process.communicate(), 240)
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode in ((0,) if b"stopping: " in said else (130, -signal.SIGTERM)), said.decode()
        assert b"Traceback" not in said


async def test_what_does_not_let_go_when_it_is_cancelled_keeps_no_service_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading that swallows its cancellation. With no request in flight it still says that it stops."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("art_cli.chat.http_server.CANCEL_TIMEOUT_S", 0.1)
    is_over = asyncio.Event()

    class Stubborn(ScriptedLoader):
        async def make(self, source: Source) -> Any:
            while not is_over.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await is_over.wait()
            raise EngineError("late")

    policies = Policies([ServedPolicy(scripted_source(), Stubborn())])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits())
    task = asyncio.create_task(service.run("127.0.0.1", 0, lambda root: None))
    await asyncio.sleep(0.05)
    service.stop()
    await asyncio.wait_for(task, 10)
    is_over.set()
    assert "stopping: 0 requests" in caplog.text
    assert "not ended within 0.1 s" in caplog.text


async def test_an_engine_that_fails_ends_the_service() -> None:
    loader = ScriptedLoader()
    policies = Policies([ServedPolicy(scripted_source(), loader)])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits())
    failed = asyncio.Event()

    async def watch() -> None:
        await failed.wait()
        raise EngineError("out of memory")

    def on_ready(root: str) -> None:
        loader.engines[0].watch = watch  # type: ignore[method-assign, assignment]
        failed.set()

    with pytest.raises(EngineError, match="out of memory"):
        await asyncio.wait_for(service.run("127.0.0.1", 0, on_ready), 20)
    assert loader.engines[0].is_closed


# --- what it says of itself -------------------------------------------------------------------------------------------


async def test_content_is_logged_only_when_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret = {"role": "user", "content": "my secret"}
    for logs_content in (False, True):
        caplog.clear()
        loader = ScriptedLoader(lambda request: "your answer")
        async with serving(loader=loader, logs_content=logs_content) as (_, root), client(root) as ai:
            await ai.chat.completions.create(model="policy", messages=[secret])
            stream = await ai.chat.completions.create(model="policy", messages=[secret], stream=True)
            assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "your answer"
        own = [record.getMessage() for record in caplog.records if record.name.startswith("art_cli")]
        assert sum("POST /v1/chat/completions 200" in line for line in own) == 2
        assert sum("my secret" in line and "your answer" in line for line in own) == (2 if logs_content else 0)
        assert sum("secret" in line for line in own) == (2 if logs_content else 0)


async def test_embeddings_and_feedback_are_refused_in_words() -> None:
    async with serving(loader=ScriptedLoader()) as (_, root), client(root) as ai:
        with pytest.raises(openai.NotFoundError, match="the models here write text and give no embeddings"):
            await ai.embeddings.create(model="policy", input="x")
        with pytest.raises(openai.NotFoundError, match="art gateway CONFIG --follow"):
            await ai.post("/feedback", cast_to=object, body={"metric_name": "thumbs", "value": True})


async def test_a_path_cannot_write_log_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(loader=ScriptedLoader()) as (_, root), httpx.AsyncClient(base_url=root) as http:
        await http.get("/v1/models/x%0aE: forged")
    assert not any("\n" in record.getMessage() for record in caplog.records if record.name.startswith("art_cli"))


async def test_the_numbers_are_prometheus_and_right() -> None:
    """Two plain replies of 3 tokens to prompts of 20 (see test_chat.py), one streamed, one refused."""
    async with (
        serving(loader=ScriptedLoader()) as (_, root),
        client(root) as ai,
        httpx.AsyncClient(base_url=root) as http,
    ):
        await say(ai, "policy")
        await say(ai, "policy")
        async for _ in await ai.chat.completions.create(model="policy", messages=[USER], stream=True):
            pass
        await http.post("/v1/chat/completions", content=b"{", headers=JSON)
        reply = await http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert number(reply.text, "art_requests_total", route="/v1/chat/completions", code="200") == 3
    assert number(reply.text, "art_requests_total", route="/v1/chat/completions", code="400") == 1
    assert number(reply.text, "art_prompt_tokens_total", model="policy") == 60
    assert number(reply.text, "art_sampled_tokens_total", model="policy") == 9
    assert number(reply.text, "art_first_token_seconds_count") == 1
    assert number(reply.text, "art_request_seconds_bucket", le="+Inf") == 4
    assert number(reply.text, "art_request_seconds_count") == 4
    assert (number(reply.text, "art_requests_inside"), number(reply.text, "art_ready")) == (0, 1)


@pytest.mark.slow
async def test_the_lines_it_prints_work_as_they_stand(run: RunDir) -> None:
    """The command itself, as a process: its curl and its Python line get answers; SIGTERM ends it with 0."""
    process = forked.Forked(["serve", run.root, "--port", "0"], stdout=forked.PIPE, stderr=forked.PIPE)
    try:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(5)]
        assert lines[0].startswith(f"serving mine (step 2 of {run.root}) at http://127.0.0.1:")
        reply = json.loads(await run_line(lines[2]))
        assert (reply["model"], reply["choices"][0]["message"]["role"]) == ("mine", "assistant")
        assert (await run_line(lines[4])).endswith("\n")
    finally:
        process.terminate()
        _, errors = process.communicate(240)
    assert process.returncode == 0, errors
    assert errors.count("POST /v1/chat/completions 200") == 2


@pytest.mark.slow
@pytest.mark.parametrize("in_file", [False, True])
async def test_the_lines_of_a_server_with_keys_find_the_key_and_do_not_show_it(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my keys"
    file.write_text("# a key\n\n  the-key \nother\n")
    monkeypatch.setenv("ART_API_KEY", "the-key")
    async with serving(loader=ScriptedLoader(), keys=Keys(read_key_texts(None, file))) as (_, root):
        serve_command._greet(
            root, [scripted_source()], serve_command.how_to_get_key(True, file if in_file else None), False
        )
        lines = capsys.readouterr().out.splitlines()
        assert json.loads(await run_line(lines[2]))["choices"][0]["message"]["content"] == "ok"
        assert await run_line(lines[4]) == "ok\n"
    assert "the-key" not in "".join(lines)


class HostedEngine(ScriptedEngine):
    """Counts tokens, and gives no ids. Behind the end of a streamed answer comes a chunk with the counts."""

    async def reply(self, request: Request) -> Reply:
        reply = await super().reply(request)
        choices = [msgspec.structs.replace(choice, token_ids=[], logprobs=[]) for choice in reply.choices]
        return msgspec.structs.replace(reply, choices=choices, prompt_ids=[], usage=(9, 3))

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        async for chunk in super().stream(request):
            choice = msgspec.structs.replace(chunk.choice, token_ids=[], logprobs=[])
            yield msgspec.structs.replace(chunk, choice=choice, prompt_ids=None)
        yield msgspec.structs.replace(chunk, choice=Choice(index=0), is_last=False, prompt_ids=None, usage=(9, 3))


async def test_tokens_of_an_endpoint_count_and_replies_name_the_step_of_their_prompt() -> None:
    """The policy is a prompt in front of an endpoint, which knows nothing of steps."""
    prompt = SystemPrompt(parts={"all": "Be brief."}, place="after")
    first = scripted_source(step=1)._replace(prompt=prompt)
    asked: Any = {"model": "policy", "messages": [USER], "extra_body": {"return_token_ids": True}}
    async with (
        serving(first, loader=ScriptedLoader(make=HostedEngine)) as (service, root),
        client(root) as ai,
        httpx.AsyncClient(base_url=root) as http,
    ):
        steps = []
        for step in (1, 2):
            await service.policies.served["policy"].change(first._replace(step=step))
            steps.append((await ai.chat.completions.create(**asked)).model_extra["step"])
            chunks = [chunk async for chunk in await ai.chat.completions.create(**asked, stream=True)]
            steps.append(chunks[0].model_extra["step"])
        reply = await http.get("/metrics")
    assert steps == [1, 1, 2, 2]
    assert number(reply.text, "art_prompt_tokens_total", model="policy") == 36
    assert number(reply.text, "art_sampled_tokens_total", model="policy") == 12


def test_any_base_that_model_base_takes_can_be_served(tmp_path: Path) -> None:
    """A model that is built in, one that a function builds, under a name and without one; an unknown one is named."""
    builder = f"{LETTERS / 'build.py'}:build"
    texts = ["builtin:tiny", "mine=builtin:tiny", f"own={builder}"]
    tiny, mine, own = serve_command._find_sources(texts, which="offered", base=None, dtype=None, directory=tmp_path)
    assert [source.name for source in (tiny, mine, own)] == ["tiny", "mine", "own"]
    assert tiny.base == mine.base != own.base and tiny.adapter is None
    assert all((Path(source.base) / "model.safetensors").is_file() for source in (tiny, own))
    with pytest.raises(UsageError, match="'builtin:huge': .*there are: tiny"):
        serve_command._find_sources(["builtin:huge"], which="offered", base=None, dtype=None, directory=tmp_path)
