"""A service in this process, and helpers of the serving tests that start it, ask it and read its replies."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import peft
import torch
import transformers
from prometheus_client.parser import text_string_to_metric_families

from art_cli.chat.api_keys import Keys
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.run_dir import RunDir
from art_cli.serving.serve_service import Limits, Service
from art_cli.serving.served_model import Source
from art_cli.serving.served_policies import Loader, Policies, ServedPolicy
from tests.support.processes import forked
from tests.support.servers.served import ScriptedEngine, scripted_source

USER = {"role": "user", "content": "hi"}
JSON = {"Content-Type": "application/json"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
START_S, END_S = 600.0, 240.0  # longest start, that of vLLM on busy cores, and longest end of `art serve`


@contextlib.asynccontextmanager
async def serving(
    *sources: Source,
    loader: Any = None,
    keys: Keys | None = None,
    host: str = "127.0.0.1",
    follows: Which | None = None,
    logs_content: bool = False,
    is_processed: bool = False,
    **limits: Any,
) -> AsyncIterator[tuple[Service, str]]:
    """A service and its root, ready; stopped at once on the way out."""
    loader = loader or Loader(EmbeddedEngineConfig(max_batch=16, prefill_tokens=512), logs=Path("/nowhere"))
    policies = Policies([ServedPolicy(source, loader) for source in sources or [scripted_source()]])
    service = Service(
        policies,
        keys=keys or Keys(),
        limits=Limits(**limits),
        follows=follows,
        logs_content=logs_content,
        is_processed=is_processed,
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


def number(text: str, name: str, **labels: str) -> float:
    """The value of one sample in a reply of /metrics."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    (value,) = [sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)]
    return value


def greedy(run: RunDir, step: int | None, num: int = 8) -> str:
    """The text that transformers and peft alone generate for USER's prompt from the files; step None: the base."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.base)
    model = transformers.AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    if step is not None:
        model = peft.PeftModel.from_pretrained(model, run.checkpoint_path(step))
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**ids, max_new_tokens=num, do_sample=False)
    return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))


def own_logprobs(run: RunDir, step: int, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[L - 1, V] logprobs of each next token that transformers and peft alone compute from the files."""
    model = transformers.AutoModelForCausalLM.from_pretrained(run.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, run.checkpoint_path(step))
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


async def say(ai: openai.AsyncOpenAI, model: str, **options: Any) -> str:
    reply = await ai.chat.completions.create(model=model, messages=[USER], temperature=0, **options)
    return reply.choices[0].message.content or ""


def send_raw(root: str, *pieces: bytes) -> tuple[bytes, float]:
    """All bytes that a raw connection receives until the server closes it, and the seconds until then."""
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


class Talker(ScriptedEngine):
    """Its answers are larger than every buffer on the way: 20 MB."""

    async def reply(self, request: Request) -> Reply:
        reply = await super().reply(request)
        reply.choices[0].text *= 10_000_000
        return reply

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
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
    """All bytes until the server closes the connection or aborts it."""
    wire.setblocking(True)
    wire.settimeout(20)
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while piece := wire.recv(1 << 20):
            received += piece
    return bytes(received)


@contextlib.asynccontextmanager
async def art_serve(
    what: str | Path, *options: str, key: str | None = None, log: int | None = None
) -> AsyncIterator[tuple[forked.Forked, str]]:
    """`art serve` as a process of its own, and its base URL; `log`: where its standard error goes."""
    environment = os.environ | ({"ART_API_KEY": key} if key is not None else {})
    words = ["serve", what, "--port", "0", "--json", *options]
    process = forked.Forked(words, stdout=forked.PIPE, stderr=log, env=environment)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
        yield process, json.loads(line)["url"]
    finally:
        process.terminate()
        await asyncio.to_thread(process.communicate, END_S)


async def run_line(line: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("bash", "-c", line, stdout=pipe, stderr=pipe, env=environment)
    out, err = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0, err.decode()
    return out.decode()
