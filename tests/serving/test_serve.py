"""`art serve`: real checkpoints, real clients, real sockets; engines with scripted answers where no model is needed."""

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import pytest
import torch
import transformers

from art_cli import cli
from art_cli.chat.app import closing_stream
from art_cli.chat.connection import Patience
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.commands import serve as serve_command
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.errors import ArtError, CheckpointError, EngineError, UsageError
from art_cli.model import save_weights
from art_cli.run_dir import Manifest, RunDir, new_checkpoint
from art_cli.serving import follow
from art_cli.serving.admission import Admission
from art_cli.serving.desk import Desk
from art_cli.serving.keys import Keys, check_exposure, read_keys
from art_cli.serving.loader import Loader, engine_config, read_knobs
from art_cli.serving.meter import Meter
from art_cli.serving.policies import Policies, ServedPolicy
from art_cli.serving.service import Limits, Service
from art_cli.serving.source import Source, find_source
from tests.support.served import ScriptedEngine, ScriptedLoader, add_checkpoint, make_run, scripted_source
from tests.support.tiny import tiny_weights
from tests.support.waiting import until

USER = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@contextlib.asynccontextmanager
async def serving(
    *sources: Source,
    loader: Any = None,
    keys: Keys | None = None,
    host: str = "127.0.0.1",
    follows_best: bool | None = None,
    logs_content: bool = False,
    **limits: Any,
) -> AsyncIterator[tuple[Service, str]]:
    """A service and its root, ready; stopped at once on the way out."""
    loader = loader or Loader(EmbeddedEngineConfig(max_batch=16, prefill_tokens=512), logs=Path("/nowhere"))
    policies = Policies([ServedPolicy(source, loader) for source in sources or [scripted_source()]])
    service = Service(
        policies, keys=keys or Keys(), limits=Limits(**limits), follows_best=follows_best, logs_content=logs_content
    )
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(service.run(host, 0, ready.set_result))
    await asyncio.wait((task, ready), timeout=240, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield service, await ready
    finally:
        service.stop()
        service.stop()
        await asyncio.wait_for(task, 240)


@contextlib.asynccontextmanager
async def client(root: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=key, max_retries=0) as made:
        yield made


async def fetch(url: str) -> str:
    async with httpx.AsyncClient() as http:
        return (await http.get(url)).text


class Gate:
    """Answers nothing until it is opened."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.num_waiting = 0

    async def __call__(self, request: Request) -> str:
        self.num_waiting += 1
        try:
            await self.is_open.wait()
        finally:
            self.num_waiting -= 1
        return "ok"


# --- what is served ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", (1, 2), rewards={1: 0.9, 2: 0.1})


def greedy(run: RunDir, step: int | None, num: int = 8) -> str:
    """What transformers and peft alone generate after USER's prompt, from the files; step None: the base."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.base)
    model = transformers.AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    if step is not None:
        model = peft.PeftModel.from_pretrained(model, run.checkpoint_path(step))
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=num, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


async def say(ai: openai.AsyncOpenAI, model: str, **options: Any) -> str:
    reply = await ai.chat.completions.create(model=model, messages=[USER], temperature=0, **options)
    return reply.choices[0].message.content or ""


async def test_each_name_answers_with_its_own_weights_on_one_base(run: RunDir) -> None:
    """Newest, best and bare base of one run, at once: each says what transformers says from its files."""
    loader = Loader(EmbeddedEngineConfig(max_batch=4), logs=Path("/nowhere"))
    sources = [
        find_source(f"newest={run.root}"),
        find_source(f"best={run.root}", best=True),
        find_source(f"base={run.base}"),
    ]
    async with serving(*sources, loader=loader) as (service, root), client(root) as ai:
        assert [model.id async for model in ai.models.list()] == ["newest", "best", "base"]
        said = await asyncio.gather(*(say(ai, name, max_tokens=8) for name in ("newest", "best", "base")))
        with pytest.raises(openai.NotFoundError, match="there is 'newest', 'best', 'base'"):
            await say(ai, "mine")
    assert said == [greedy(run, 2), greedy(run, 1), greedy(run, None)]
    assert len(set(said)) == 3
    assert len(loader._bases) == 1
    shares = {
        policy._shift.engine._weights.model.get_input_embeddings().weight.data_ptr()  # type: ignore[union-attr]
        for policy in service.policies.served.values()
    }
    assert len(shares) == 1


async def test_the_whole_protocol_through_the_real_engine(run: RunDir) -> None:
    """Streaming, tools, logprobs, stop, n, seed and usage, as the openai client sees them."""
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        whole = await ai.chat.completions.create(
            model="mine", messages=[USER], tools=TOOLS, n=3, seed=7, logprobs=True, top_logprobs=2, max_tokens=6
        )
        options = {"tools": TOOLS, "seed": 7, "max_tokens": 6, "stream_options": {"include_usage": True}}
        stream = await ai.chat.completions.create(model="mine", messages=[USER], stream=True, **options)
        chunks = [chunk async for chunk in stream]
        text = await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1, logprobs=1)
        letters = (await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1)).choices[0].text
        letter = next(letter for letter in letters[1:] if letter.isascii())
        cut = await ai.completions.create(model="mine", prompt="abc", max_tokens=30, seed=1, stop=[letter])
        forced = await ai.chat.completions.create(
            model="mine", messages=[USER], tools=TOOLS, tool_choice="required", max_tokens=4
        )
    assert whole.usage and whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)  # type: ignore[union-attr, arg-type, misc]
    first = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == first
    assert chunks[-1].usage and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert text.choices[0].logprobs and all(value <= 0 for value in text.choices[0].logprobs.token_logprobs or [1])
    assert text.choices[0].text == letters
    assert cut.choices[0].text == letters[: letters.index(letter)]
    assert cut.choices[0].finish_reason == "stop"
    assert forced.choices[0].finish_reason == "length"


async def test_requests_that_do_not_say_are_sampled_as_in_training(run: RunDir, tmp_path: Path) -> None:
    """The run's rollout.sampling.max_tokens is 8, for its base too; a base model of no run has no such limit."""
    async with serving(find_source(str(run.root))) as (_, root), client(root) as ai:
        reply = await ai.completions.create(model="mine", prompt="abc", seed=3)
    assert reply.usage and reply.usage.completion_tokens <= 8
    assert find_source(str(run.root)).defaults == Sampling(max_tokens=8)
    assert find_source(str(run.base)).defaults == Sampling(max_tokens=8)
    bare = shutil.copytree(run.base, tmp_path / "bare")
    assert find_source(str(bare)).defaults == Sampling()


def test_a_source_is_what_the_files_say(run: RunDir, tmp_path: Path) -> None:
    newest = find_source(str(run.root))
    assert newest.name == "mine"
    assert (newest.base, newest.adapter, newest.step) == (str(run.base), run.checkpoint_path(2), 2)
    assert find_source(str(run.checkpoint_path(1))).step == 1
    moved = find_source(str(run.root), base="org/other", dtype="bfloat16")
    assert (moved.base, moved.dtype, newest.dtype) == ("org/other", "bfloat16", "auto")
    assert find_source("Qwen/Qwen3-0.6B").base == "Qwen/Qwen3-0.6B"
    assert find_source("q=Qwen/Qwen3-0.6B").name == "q"
    plain = tmp_path / "plain"
    save_weights(tiny_weights(), plain)
    with pytest.raises(CheckpointError, match="which base model it belongs to; give --base"):
        find_source(str(plain))
    assert find_source(str(plain), base=str(run.base)).adapter == plain
    (tmp_path / "a=b").mkdir()
    with pytest.raises(CheckpointError, match="a=b: no checkpoint"):
        find_source(str(tmp_path / "a=b"))


@pytest.mark.parametrize("text", ["./nothing", "/nothing", "a/b/c", "x=", "n@me!=org/model", ""])
def test_what_is_neither_a_directory_nor_a_hub_id_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="no such directory, and no hub id|expected NAME=CHECKPOINT"):
        find_source(text)


def test_a_name_is_served_once(run: RunDir) -> None:
    loader = ScriptedLoader()
    with pytest.raises(UsageError, match="mine: served twice"):
        Policies([ServedPolicy(find_source(str(run.checkpoint_path(step))), loader) for step in (1, 2)])  # type: ignore[arg-type]


async def test_all_weights_in_a_checkpoint_are_served_without_a_base(tmp_path: Path) -> None:
    """A run with lora null: the checkpoint is a whole model; nothing else is read."""
    run = make_run(tmp_path / "whole", ())
    save_weights(tiny_weights(seed=3, lora_rank=None), tmp_path / "other")
    with new_checkpoint(run.checkpoint_path(1), Manifest(step=1, base="gone", config_hash="")) as directory:
        save_weights(tiny_weights(seed=3, lora_rank=None), directory)
    async with (
        serving(find_source(str(run.root)), find_source(f"same={tmp_path}/other")) as (_, root),
        client(root) as ai,
    ):
        assert await say(ai, "whole", max_tokens=8) == await say(ai, "same", max_tokens=8)


async def test_what_cannot_be_loaded_ends_the_service(run: RunDir, tmp_path: Path) -> None:
    """A base of another shape: one line, before anything was answered."""
    save_weights(tiny_weights(lora_rank=None, hidden=64), tmp_path / "wide")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        async with serving(find_source(str(run.root), base=str(tmp_path / "wide"))):
            pass


# --- following a run --------------------------------------------------------------------------------------------------


async def test_following_changes_to_each_new_checkpoint_and_drops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests all the while, a stream across the change: each answer is one checkpoint's, old before new.

    The stream of 200 tokens begins at step 1 and ends as step 1, token for token, after step 2 has answered others.
    """
    monkeypatch.setattr(follow, "POLL_S", 0.05)
    run = make_run(tmp_path / "mine", (1,))
    said: list[str] = []
    async with serving(find_source(str(run.root)), follows_best=False) as (service, root), client(root) as ai:
        expected = await say(ai, "mine", max_tokens=200)

        async def ask() -> None:
            while service.policies.served["mine"].source.step < 3:
                said.append(await say(ai, "mine", max_tokens=8))

        stream = await ai.chat.completions.create(
            model="mine", messages=[USER], temperature=0, max_tokens=200, stream=True
        )
        pieces = [(await anext(aiter(stream))).choices[0].delta.content or ""]
        asking = [asyncio.create_task(ask()) for _ in range(2)]
        for step in (2, 3):
            add_checkpoint(run, step)
            await until(lambda step=step: service.policies.served["mine"].source.step == step)
        await asyncio.gather(*asking)
        pieces += [chunk.choices[0].delta.content or "" async for chunk in stream]
        said.append(await say(ai, "mine", max_tokens=8))
        ready, metrics = json.loads(await fetch(f"{root}/ready")), await fetch(f"{root}/metrics")
        await until(lambda: not service.policies.served["mine"]._retiring)
    answers = [greedy(run, step) for step in (1, 2, 3)]
    places = [answers.index(text) for text in said]
    assert places == sorted(places)
    assert places[-1] == 2
    assert "".join(pieces) == expected
    assert ready["models"] == [{"id": "mine", "step": 3}]
    assert 'art_checkpoint_changes_total{model="mine"} 2' in metrics
    assert 'art_policy_step{model="mine"} 3' in metrics


async def test_an_engine_that_was_replaced_is_closed_when_its_last_request_ends() -> None:
    gate = Gate()
    loader = ScriptedLoader(gate)
    policy = ServedPolicy(scripted_source(step=1), loader)  # type: ignore[arg-type]
    await policy.start()
    request = Request(model="policy", messages=[USER], sampling=Sampling())
    old = asyncio.create_task(policy.reply(request))
    await until(lambda: gate.num_waiting == 1)
    await policy.change(scripted_source(step=2))
    new = asyncio.create_task(policy.reply(request))
    await until(lambda: gate.num_waiting == 2)
    assert [engine.is_closed for engine in loader.engines] == [False, False]
    gate.is_open.set()
    await asyncio.gather(old, new)
    await until(lambda: loader.engines[0].is_closed)
    assert not loader.engines[1].is_closed
    await policy.close()
    assert loader.engines[1].is_closed


async def test_a_checkpoint_that_cannot_be_loaded_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 has a flipped byte, step 3 is of another shape; step 4 is good."""
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,))
    async with serving(find_source(str(run.root)), follows_best=False) as (service, root), client(root) as ai:
        policy = service.policies.served["mine"]
        broken = tmp_path / "aside"
        add_checkpoint(run, 2).rename(broken)
        data = bytearray((broken / "adapter_model.safetensors").read_bytes())
        data[-1] ^= 1
        (broken / "adapter_model.safetensors").write_bytes(bytes(data))
        broken.rename(run.checkpoint_path(2))
        await until(lambda: "does not match its hash" in caplog.text)
        with new_checkpoint(run.checkpoint_path(3), Manifest(step=3, base="../../base", config_hash="")) as directory:
            save_weights(tiny_weights(hidden=64), directory)
        await until(lambda: "stays at step 1" in caplog.text)
        assert policy.source.step == 1
        assert await say(ai, "mine", max_tokens=8) == greedy(run, 1)
        add_checkpoint(run, 4)
        await until(lambda: policy.source.step == 4)
        assert await say(ai, "mine", max_tokens=8) == greedy(run, 4)
    assert caplog.text.count("stays at step 1") == 1  # once, not at every look


async def test_following_the_best_waits_for_a_better_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "POLL_S", 0.02)
    run = make_run(tmp_path / "mine", (1,), rewards={1: 0.5})
    source = find_source(str(run.root), best=True)
    async with serving(source, loader=ScriptedLoader(), follows_best=True) as (service, _):
        add_checkpoint(run, 2)
        run.append_metrics(2, "eval", {"reward": 0.4})
        add_checkpoint(run, 3)
        run.append_metrics(3, "eval", {"reward": 0.6})
        await until(lambda: service.policies.served["mine"].source.step == 3)


def test_only_a_run_can_be_followed(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", str(run.base), "--follow"]) == 2
    assert "--follow: name a run" in capsys.readouterr().err


# --- keys -------------------------------------------------------------------------------------------------------------


def routes_of(service: Service) -> list[tuple[str, str]]:
    """Each method and path that the application itself says it has, and some that it has not."""
    routes = service.app._app.routes  # type: ignore[attr-defined]
    found = [(method, re.sub("{.*}", "policy", route.path)) for route in routes for method in sorted(route.methods)]
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models/policy"), ("GET", "/metrics")} < set(found)
    return [*found, ("GET", "/nowhere"), ("DELETE", "/v1/models"), ("OPTIONS", "/v1/completions"), ("GET", "/health/x")]


def ways_to_send(key: str) -> list[dict[str, Any]]:
    """Where clients put a key, other than where it belongs."""
    headers: list[dict[str, Any]] = [
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"X-Api-Key": key},
        {"Api-Key": key},
        {"Cookie": f"key={key}"},
    ]
    return [{"headers": given} for given in headers] + [
        {"params": {n: key}} for n in ("api_key", "key", "access_token")
    ]


async def test_without_a_key_nobody_gets_in_but_to_health(caplog: pytest.LogCaptureFixture) -> None:
    """On an address that others can reach, for every route that there is: no key, wrong ones, the key elsewhere."""
    caplog.set_level(1)
    key = "right-key-0123456789"
    wrong = [b"Bearer wrong-key-0123456789", f"Bearer {key[:-1]}", f"Bearer {key}x", "Bearer", b"Bearer \xff\xfe"]
    others: list[dict[str, Any]] = [{}, *({"headers": {"Authorization": sent}} for sent in wrong)]
    others += ways_to_send(key)
    async with serving(loader=ScriptedLoader(), keys=Keys([key, "other-key"]), host="0.0.0.0") as (service, root):
        for name in ("uvicorn.error", "uvicorn.access"):
            caplog.set_level(1, logger=name)
        async with httpx.AsyncClient(base_url=root) as http:
            for sent in others:
                for method, path in routes_of(service):
                    reply = await http.request(method, path, **sent)
                    if path == "/health":
                        assert reply.status_code == 200
                        continue
                    assert reply.status_code == 401, (method, path, sent)
                    assert method == "HEAD" or reply.json()["error"]["code"] == "invalid_api_key"
                    assert key not in reply.text
            for good in (key, "other-key"):
                headers = {"Authorization": f"Bearer {good}"}
                for method, path in routes_of(service):
                    assert (await http.request(method, path, headers=headers)).status_code != 401, (method, path)
            metrics = (await http.get("/metrics", headers=headers)).text
        async with client(root, key) as ai:
            assert await say(ai, "policy") == "ok"
    assert f'art_requests_total{{route="/v1/chat/completions",code="401"}} {len(others)}\n' in metrics
    written = logging.Formatter("%(name)s %(message)s")
    ours = "\n".join(
        written.format(r) for r in caplog.records if not r.name.startswith(("httpx", "httpcore", "openai"))
    )
    assert "POST /v1/chat/completions 401" in ours
    for text in (key[:-1], "other-key", "wrong-key"):
        assert text not in ours
        assert text not in repr(service.keys)
        assert text not in metrics


async def test_no_key_is_in_anything_that_the_command_writes(run: RunDir, tmp_path: Path) -> None:
    """`art serve --verbose` on 0.0.0.0, as a process: good keys and a wrong one, right or elsewhere, on every route."""
    keys = ["environment-key-0123", "filekey", "wrong-key-0123"]
    (tmp_path / "keys").write_text(keys[1])
    routes = routes_of(Service(Policies([]), keys=Keys(), limits=Limits()))
    command = [sys.executable, "-m", "art_cli", "--verbose", "serve", str(run.root), "--host", "0.0.0.0", "--port", "0"]
    command += ["--engine", "embedded", "--json", "--api-key-file", str(tmp_path / "keys")]
    pipe, environment = asyncio.subprocess.PIPE, {**os.environ, "ART_API_KEY": keys[0]}
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
    try:
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        root = json.loads(line)["url"].removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root) as http:
            for key in keys:
                bearer = {"headers": {"Authorization": f"Bearer {key}"}}
                statuses = [(await http.request(*route, **bearer)).status_code for route in routes]
                assert (401 in statuses) == (key == keys[2])
                elsewhere = [(await http.post("/v1/completions", **sent)).status_code for sent in ways_to_send(key)]
                assert set(elsewhere) == {401}
                for url in (f"/v1/models/{key}", f"/{key}/v1/models", f"/v1/models/a%20{key}", f"/v1/models?key={key}"):
                    assert (await http.get(url)).status_code == 401
                broken = f"GET / HTTP/1.1\r\nAuthorization: Bearer {key}\r\n{key}\0\r\n\r\n"
                assert (await asyncio.to_thread(send_raw, root, broken.encode()))[0].startswith(b"HTTP/1.1 400 ")
        async with client(root, keys[0]) as ai:
            await say(ai, "mine", max_tokens=2)
    finally:
        process.terminate()
        out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0
    written = (line + out + err).decode()
    assert written.count("POST /v1/completions 401") == 1 + 3 * len(ways_to_send(""))
    assert written.count("GET /v1/models/* 401") == 2 * len(keys)
    assert written.count("GET /*/v1/models 401") == len(keys)
    assert "GET /metrics 200" in written  # which stands there under --verbose only
    assert not any(key in written for key in keys)


# What a browser sends for a page of elsewhere; PORT becomes the server's.
OF_PAGES: list[tuple[dict[str, str], int]] = [
    ({"Host": "rebound.example"}, 421),
    ({"Host": "rebound.example:PORT"}, 421),
    ({"Host": "localhost.rebound.example:PORT"}, 421),
    ({"Host": "127.0.0.1.rebound.example"}, 421),
    ({"Host": "192.168.1.5:PORT"}, 421),
    ({"Host": "localhost@rebound.example"}, 421),
    ({"Host": "0.0.0.0:PORT"}, 421),  # browsers take it for this machine
    ({"Host": ""}, 421),
    ({"Origin": "https://page.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://localhost:1"}, 403),
    ({"Origin": "http://localhost:PORT.page.example"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
]
OF_PROGRAMS: list[dict[str, str]] = [
    {},
    {"Host": "localhost"},
    {"Host": "LOCALHOST:PORT"},
    {"Host": "[::1]:PORT"},
    {"Host": "127.0.0.1:9"},  # through a forwarded port
    {"Origin": "http://127.0.0.1:PORT", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
    {"Content-Type": "application/json; charset=utf-8"},
]


async def test_a_server_without_a_key_obeys_no_web_page() -> None:
    """Every route refuses what a browser sends for a foreign page or a rebound name, and nothing reaches the engine."""
    loader = ScriptedLoader()
    body = json.dumps({"model": "policy", "messages": [USER]})
    async with serving(loader=loader) as (service, root), httpx.AsyncClient(base_url=root) as http:
        port = root.rpartition(":")[2]
        for headers, status in OF_PAGES:
            sent = {name: value.replace("PORT", port) for name, value in headers.items()}
            for method, path in routes_of(service):
                reply = await http.request(method, path, headers={**JSON, **sent}, content=body)
                assert reply.status_code == status, (method, path, sent)
                assert method == "HEAD" or reply.json()["error"]["code"] in ("foreign_host", "foreign_origin")
                assert not any(name.startswith("access-control-") for name in reply.headers)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None):
            for path in ("/v1/chat/completions", "/v1/completions"):
                reply = await http.post(path, content=body, headers={} if kind is None else {"Content-Type": kind})
                assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_media_type")
        assert loader.engines[0].requests == []
        for headers in OF_PROGRAMS:
            sent = {name: value.replace("PORT", port) for name, value in headers.items()}
            reply = await http.post("/v1/chat/completions", content=body, headers={**JSON, **sent})
            assert reply.status_code == 200, sent
            assert (await http.get("/metrics", headers=sent)).status_code == 200
        assert len(loader.engines[0].requests) == len(OF_PROGRAMS)
        twice = f"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nHost: page.example\r\nConnection: close\r\n\r\n"
        assert (await asyncio.to_thread(send_raw, root, twice.encode()))[0].startswith(b"HTTP/1.1 421 ")
        old = b"GET /health HTTP/1.0\r\n\r\n"
        assert (await asyncio.to_thread(send_raw, root, old))[0].split()[1] == b"200"


async def test_programs_without_a_key_keep_working() -> None:
    """curl as the server prints it, the Python client, and node's fetch, which sends Sec-Fetch-Mode."""
    body = json.dumps({"model": "policy", "messages": [USER]})
    async with serving(loader=ScriptedLoader()) as (_, root):
        async with client(root) as ai:
            assert await say(ai, "policy") == "ok"
        url = f"{root.replace('127.0.0.1', 'localhost')}/v1/chat/completions"
        line = f"curl -s --ipv4 {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
        assert json.loads(await run_line(line))["choices"][0]["message"]["content"] == "ok"
        if shutil.which("node"):
            options = {"method": "POST", "headers": JSON, "body": body}
            program = f"fetch('{root}/v1/chat/completions', {json.dumps(options)}).then(r => console.log(r.status))"
            assert await run_line(f"node -e {shlex.quote(program)}") == "200\n"


async def test_a_server_with_a_key_is_reached_by_any_name() -> None:
    """A proxy hands on the name that the world knows; the key says who asks."""
    headers = {"Authorization": "Bearer k", "Host": "models.example", "Origin": "https://app.example"}
    async with (
        serving(loader=ScriptedLoader(), keys=Keys(["k"])) as (_, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        body = {"model": "policy", "messages": [USER]}
        assert (await http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200


def test_an_address_that_others_reach_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(UsageError, match="it needs a key"):
            check_exposure(host, Keys())
        check_exposure(host, Keys(["k"]))
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(host, Keys())
    assert cli.run(["serve", "org/model", "--host", "0.0.0.0"]) == 2
    assert capsys.readouterr().err.startswith("error: --host 0.0.0.0: others can reach it, so it needs a key")


def test_keys_come_from_an_option_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \n")
    keys = read_keys("gamma", file)
    assert [keys.admits(key) for key in ("alpha", "beta", "gamma")] == [True] * 3
    assert [keys.admits(key) for key in ("# ours", "", None, "alph", "alpha ")] == [False] * 5
    assert Keys().admits(None)
    file.write_text("# none\n")
    with pytest.raises(UsageError, match="no keys in"):
        read_keys(None, file)
    file.write_text("kläy\n")
    with pytest.raises(UsageError, match="key 1: a key is printable ASCII") as caught:
        read_keys(None, file)
    assert "kläy" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot read"):
        read_keys(None, tmp_path / "nothing")


# --- limits -----------------------------------------------------------------------------------------------------------


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
        assert (service.admission.num_inside, service.admission.num_waiting) == (5, 3)
        assert (await http.get("/v1/models")).status_code == 200  # only completions are counted
        gate.is_open.set()
        answered = await asyncio.gather(*(call for call in calls if not call.done()))
        assert {reply.status_code for reply in answered} == {200}
        assert service.admission.num_inside == 0


async def test_a_body_too_large_is_413() -> None:
    async with (
        serving(loader=ScriptedLoader(), max_body_bytes=1000) as (service, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        reply = await http.post("/v1/chat/completions", content=b"x" * 1001, headers=JSON)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
        assert service.admission.num_inside == 0


def send_raw(root: str, *pieces: bytes) -> tuple[bytes, float]:
    """What a raw connection gets until the server closes it, and after how many seconds."""
    host, _, port = root.removeprefix("http://").partition(":")
    begin = time.perf_counter()
    with socket.create_connection((host, int(port)), timeout=10) as wire:
        for piece in pieces:
            wire.sendall(piece)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := wire.recv(65536):
                received += piece
        return received, time.perf_counter() - begin


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n"
)


async def test_a_body_too_slow_is_408_and_frees_its_place() -> None:
    async with serving(loader=ScriptedLoader(), body_timeout_s=0.3) as (service, root):
        received, seconds = await asyncio.to_thread(send_raw, root, HEAD + b"\r\n{")
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in received
        assert 0.25 < seconds < 5
        assert service.admission.num_inside == 0


async def test_a_request_that_never_becomes_one_is_ended() -> None:
    """Nothing at all, half a header, headers without end: closed, with 408 or 431 where something was sent."""
    async with serving(loader=ScriptedLoader(), patience=Patience(request_s=0.3)) as (_, root):
        nothing = asyncio.to_thread(send_raw, root)
        half = asyncio.to_thread(send_raw, root, HEAD)
        endless = asyncio.to_thread(send_raw, root, HEAD, b"X: " + b"x" * 2**17)
        results = await asyncio.gather(nothing, half, endless)
    assert results[0][0] == b""
    assert results[1][0].startswith(b"HTTP/1.1 408 ")
    assert results[2][0] == b"" or results[2][0].startswith(b"HTTP/1.1 431 ")
    assert all(seconds < 5 for _, seconds in results)


class Talker(ScriptedEngine):
    """Its answers are larger than every buffer on the way: 20 MB."""

    async def reply(self, request: Request) -> Reply:
        reply = await super().reply(request)
        reply.choices[0].text *= 10_000_000
        return reply

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        async for chunk in super().stream(request):
            chunk.choice.text *= 100_000
            for _ in range(100):
                yield chunk


async def ask_and_not_read(root: str, wire: socket.socket, *, is_stream: bool) -> None:
    """Sends a request through `wire`, whose buffer is small, and leaves what comes back there."""
    body = json.dumps({"model": "policy", "prompt": "x", "stream": is_stream}).encode()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.setblocking(False)
    host, _, port = root.removeprefix("http://").partition(":")
    await asyncio.get_running_loop().sock_connect(wire, (host, int(port)))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    head += b"Content-Length: %d\r\n\r\n"
    wire.send(head % len(body) + body)


def rest_of(wire: socket.socket) -> bytes:
    """All that comes until the server closes the connection, or cuts it off."""
    wire.setblocking(True)
    wire.settimeout(20)
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := wire.recv(1 << 20):
            received += piece
    return bytes(received)


async def test_clients_that_do_not_read_are_given_up() -> None:
    """One asks for a whole answer, then one for a stream, and neither reads: both are cut off, the place is free."""
    async with serving(loader=ScriptedLoader(make=Talker), patience=Patience(read_s=0.3)) as (service, root):
        with socket.socket() as whole, socket.socket() as stream:
            for num_gone, wire in enumerate((whole, stream)):
                await ask_and_not_read(root, wire, is_stream=wire is stream)
                await until(lambda: service.admission.num_inside == 1)
                await until(lambda: service.admission.num_inside == 0)
                assert service.meter.requests.total() == num_gone + 1
            received = await asyncio.to_thread(rest_of, whole)
    assert len(received) < 20_000_000


async def test_slow_readers_keep_nobody_from_being_answered() -> None:
    """Two places, two streams of 20 MB that nobody reads: others are answered. Then they read, and have it all."""
    async with (
        serving(loader=ScriptedLoader(make=Talker), concurrency=2, queue=1) as (service, root),
        httpx.AsyncClient(base_url=root) as http,
    ):
        with socket.socket() as one, socket.socket() as other:
            for wire in (one, other):
                await ask_and_not_read(root, wire, is_stream=True)
            await until(lambda: (service.admission.num_inside, service.admission.num_answering) == (2, 0))
            short = {"model": "policy", "prompt": "x", "max_tokens": 1}
            assert (await http.post("/v1/completions", json=short)).status_code == 200
            await until(lambda: service.admission.num_inside == 2)
            assert (await http.post("/v1/completions", json=short)).status_code == 200
            numbers = (await http.get("/metrics")).text
            received = await asyncio.gather(*(asyncio.to_thread(rest_of, wire) for wire in (one, other)))
        await until(lambda: service.admission.num_inside == 0)
    assert "art_requests_inside 2\n" in numbers
    assert "art_requests_answering 0\n" in numbers
    for data in received:
        assert data.count(b"o") >= 10_000_000
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_stream_that_nobody_reads_keeps_neither_slot_nor_place(run: RunDir) -> None:
    """One slot, one place: a stream of 200 tokens is read once, others are answered, then the rest of it is there."""
    loader = Loader(EmbeddedEngineConfig(max_batch=1), logs=Path("/nowhere"))
    policies = Policies([ServedPolicy(find_source(str(run.root)), loader)])
    await policies.start()
    desk = Desk(policies, Admission(concurrency=1, queue=0), Meter(), logs_content=False)
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
        async with closing_stream(desk.stream(long)) as stream:
            ids = list((await anext(stream)).choice.token_ids)
            async with asyncio.timeout(60):
                assert (await desk.reply(short)).choices[0].text == greedy(run, 2)
                assert [chunk async for chunk in desk.stream(short)]
            ids += [id async for chunk in stream for id in chunk.choice.token_ids]
        assert len(ids) == 200
        assert ids == (await desk.reply(long)).choices[0].token_ids
    finally:
        await policies.close()


async def test_a_client_that_goes_away_frees_its_slot(run: RunDir) -> None:
    """An engine with one slot: an answer of 900 tokens is left early; it ends there, unfinished."""
    loader = Loader(EmbeddedEngineConfig(max_batch=1), logs=Path("/nowhere"))
    async with serving(find_source(str(run.root)), loader=loader, concurrency=2) as (service, root), client(root) as ai:
        shift = service.policies.served["mine"]._shift
        assert shift is not None
        scheduler = shift.engine._worker._scheduler  # type: ignore[attr-defined]
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
            await until(lambda: service.admission.num_inside == 0)
            assert await say(ai, "mine", max_tokens=8) == greedy(run, 2)
            assert (left.slot, left.finish_reason) == (-1, None)
            assert scheduler.num_sampled(left) < 900
            assert scheduler.is_idle
        metrics = await fetch(f"{root}/metrics")
    assert 'art_requests_total{route="/v1/completions",code="499"} 1' in metrics
    assert "art_requests_answering 0\n" in metrics


# --- from start to end ------------------------------------------------------------------------------------------------


async def test_it_listens_before_it_has_loaded() -> None:
    """/health answers, /ready and completions say 503, until the model is there."""
    loading = asyncio.Event()

    class Slow(ScriptedLoader):
        async def make(self, source: Source) -> Any:
            await loading.wait()
            return await super().make(source)

    policies = Policies([ServedPolicy(scripted_source(), Slow())])  # type: ignore[arg-type]
    service = Service(policies, keys=Keys(), limits=Limits())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ready = asyncio.Event()
    task = asyncio.create_task(service.run("127.0.0.1", port, lambda root: ready.set()))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:

        async def statuses() -> list[int]:
            body = {"model": "policy", "messages": [USER]}
            calls = [http.get("/health"), http.get("/ready"), http.post("/v1/chat/completions", json=body)]
            return [(await call).status_code for call in calls]

        while True:
            with contextlib.suppress(httpx.ConnectError):
                await http.get("/health")
                break
            await asyncio.sleep(0.01)
        assert await statuses() == [200, 503, 503]
        loading.set()
        await asyncio.wait_for(ready.wait(), 10)
        assert await statuses() == [200, 200, 200]
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
        await until(lambda: service.admission.num_inside == 2)
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
        await until(lambda: (service.admission.num_inside, service.admission.num_answering) == (2, 0))
        service.stop()
        await until(lambda: service.admission.state == "draining")
        assert await service.admission.emptied(0.0) == 2
        received = await asyncio.gather(*(asyncio.to_thread(rest_of, wire) for wire in (whole, stream)))
    await asyncio.wait_for(task, 20)
    head, _, body = received[0].partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert received[1].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


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
        with pytest.raises(openai.APIError):
            await call
    assert gate.num_waiting == 0
    assert "stopped with 1 requests unfinished" in caplog.text


@pytest.mark.slow
async def test_a_sigterm_at_any_instant_ends_the_process(run: RunDir) -> None:
    """The command itself, at 12 instants from before its first import to after it is ready, with requests or without.

    Before it listens the system ends it at once; from then on it ends by itself, with 0.
    """
    command = [sys.executable, "-m", "art_cli", "serve", str(run.root), "--port", "0", "--json", "--follow"]
    pipe, draw, whole_s = asyncio.subprocess.PIPE, random.Random(0), 0.0
    for attempt in range(12):
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        assert process.stdout
        begin = time.monotonic()
        try:
            if attempt % 4 == 0:
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
        assert process.returncode == (0 if b"stopping: " in said else -signal.SIGTERM), said.decode()
        assert b"Traceback" not in said


async def test_what_does_not_let_go_when_it_is_cancelled_keeps_no_service_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading that swallows its cancellation. With no request in the house it still says that it stops."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("art_cli.serving.service.LET_GO_S", 0.1)
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


async def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        service = Service(Policies([]), keys=Keys(), limits=Limits())
        with pytest.raises(EngineError, match="the port is in use"):
            await service.run("127.0.0.1", taken.getsockname()[1], lambda root: None)


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
    numbers = dict(line.rsplit(" ", 1) for line in reply.text.splitlines() if not line.startswith("#"))
    assert numbers['art_requests_total{route="/v1/chat/completions",code="200"}'] == "3"
    assert numbers['art_requests_total{route="/v1/chat/completions",code="400"}'] == "1"
    assert numbers['art_prompt_tokens_total{model="policy"}'] == "60"
    assert numbers['art_sampled_tokens_total{model="policy"}'] == "9"
    assert numbers["art_first_token_seconds_count"] == "1"
    assert numbers['art_request_seconds_bucket{le="+Inf"}'] == numbers["art_request_seconds_count"] == "4"
    assert (numbers["art_requests_inside"], numbers["art_ready"]) == ("0", "1")


async def run_line(line: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("bash", "-c", line, stdout=pipe, stderr=pipe, env=environment)
    out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, err.decode()
    return out.decode()


async def test_the_lines_it_prints_work_as_they_stand(run: RunDir) -> None:
    """The command itself, as a process: its curl and its Python line get answers; SIGTERM ends it with 0."""
    command = [sys.executable, "-m", "art_cli", "serve", str(run.root), "--port", "0"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout
        async with asyncio.timeout(120):
            lines = [(await process.stdout.readline()).decode() for _ in range(5)]
        assert lines[0].startswith(f"serving mine (step 2 of {run.root}) at http://127.0.0.1:")
        reply = json.loads(await run_line(lines[2]))
        assert (reply["model"], reply["choices"][0]["message"]["role"]) == ("mine", "assistant")
        assert (await run_line(lines[4])).endswith("\n")
    finally:
        process.terminate()
        _, errors = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, errors
    assert errors.decode().count("POST /v1/chat/completions 200") == 2


@pytest.mark.parametrize("in_file", [False, True])
async def test_the_lines_of_a_server_with_keys_find_the_key_and_do_not_show_it(
    in_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my keys"
    file.write_text("# a key\n\n  the-key \nother\n")
    monkeypatch.setenv("ART_API_KEY", "the-key")
    async with serving(loader=ScriptedLoader(), keys=read_keys(None, file)) as (_, root):
        serve_command._greet(
            root, [scripted_source()], serve_command._how_to_get_key(True, file if in_file else None), False
        )
        lines = capsys.readouterr().out.splitlines()
        assert json.loads(await run_line(lines[2]))["choices"][0]["message"]["content"] == "ok"
        assert await run_line(lines[4]) == "ok\n"
    assert "the-key" not in "".join(lines)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_the_engine_is_set_up_as_in_the_run_it_was_trained_with() -> None:
    trained = {"name": "embedded", "max_batch": 7, "prefill_tokens": 9}
    assert engine_config("embedded", {}, trained) == EmbeddedEngineConfig(max_batch=7, prefill_tokens=9)
    assert engine_config("embedded", {"max_batch": 3}, {"name": "vllm"}) == EmbeddedEngineConfig(max_batch=3)
    elsewhere = {"name": "vllm", "url": "http://elsewhere", "sleep": 1}
    forced = engine_config("vllm", {"python": "/opt/python"}, elsewhere)
    assert (forced.name, forced.url, str(forced.python)) == ("vllm", None, "/opt/python")  # type: ignore[union-attr]
    for name, knobs, message in (
        ("fast", [], "--engine fast: one of auto, embedded, vllm"),
        ("embedded", ["max_batch"], "expected KEY=VALUE"),
        ("embedded", ["max_batch=0"], r"--set max_batch: .*\(engine embedded\)"),
        ("embedded", ["speed=9"], "--set speed: "),
    ):
        with pytest.raises(UsageError, match=message):
            engine_config(name, read_knobs(knobs), {})


def test_errors_of_serving_are_lines(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in (
        ([str(run.root), "--dtype", "int8"], 2, "--dtype int8: one of"),
        ([str(tmp_path)], 1, "no checkpoint (manifest.json), run"),
        ([f"a={run.root}", f"b={run.root}", "--engine", "vllm"], 2, "serves one checkpoint"),
        ([str(run.checkpoint_path(1)), "--best"], 2, "--best picks among"),
    ):
        assert cli.run(["serve", *arguments]) == code
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
    assert issubclass(UsageError, ArtError)
