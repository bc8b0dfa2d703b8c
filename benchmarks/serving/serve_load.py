"""`art serve` under load on the embedded engine: is a request lost or crossed with another, does memory grow?

    python -m benchmarks.serving.serve_load                # 200 clients for 3 minutes, then SIGTERM in the middle of it
    python -m benchmarks.serving.serve_load --seconds 20   # a quick look
    python -m benchmarks.serving.serve_load --clients 100 --seconds 300 --fresh  # a soak: no message comes twice
    python -m benchmarks.serving.serve_load --clients 100 --seconds 300 --inside  # what the server's memory is made of

The model is random and answers greedily, so that a reply depends on its prompt alone. What it should say to each of the
prompts is worked out before by transformers; prompts are left out where a rival token is ever nearer than MARGIN in
logits, because sums in another order could turn those. Replies are compared token for token. With --fresh each request
is a conversation of its own, which fills whatever is remembered of texts, and replies are only read.

One process holds all clients: half of the requests are streamed; a tenth of the clients leave in the middle of each
reply, a tenth read a few bytes at a time through a small buffer. 429 is honoured and tried again. Server and clients
share the machine. Prints a table; exit code 1 where anything was lost, crossed, or left behind.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from art_cli.models.saved_weights import save_weights
from art_cli.models.weights import Weights
from benchmarks.shared.paths import ROOT
from tests.support.models.tiny import tiny_weights

NUM_PROMPTS, PROMPT_LETTERS, NUM_NEW = 300, 24, 48
NUM_MESSAGES = 9  # messages of a fresh conversation, the last one the user's
MARGIN = 1e-2  # logits; the same sums in another order differ by 1e-5 in float32
PLACES, QUEUE = 128, 64  # fewer than there are clients: some requests are refused with 429
ANSWER_S, DRAIN_S = 120.0, 60
SLOW_BYTES, SLOW_PAUSE_S = 1024, 0.2
SIGTERM_AFTER_S = 5.0
WARM_SHARE = 0.25  # share of the time after which memory is expected to stay flat
MAX_GROWTH = 0.05  # largest growth of memory from then to the end


# --- what should be said ----------------------------------------------------------------------------------------------


def expected_replies(weights: Weights) -> dict[str, list[int]]:
    """What transformers' greedy search says to each prompt whose margins are clear."""
    draw = random.Random(0)
    texts = [_letters(draw, PROMPT_LETTERS) for _ in range(NUM_PROMPTS)]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = weights.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    prompts = torch.tensor(ids)  # all of one length: a letter is a token
    with torch.no_grad():
        made = weights.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            output_logits=True,
            return_dict_in_generate=True,
        )
    replies: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        reply = made.sequences[row, prompts.shape[1] :].tolist()
        end = weights.tokenizer.eos_token_id
        reply = reply[: reply.index(end) + 1] if end in reply else reply
        best = [logits[row].topk(2).values for logits in made.logits[: len(reply)]]
        if min(float(first - second) for first, second in best) > MARGIN:
            replies[text] = reply
    return replies


def _letters(draw: random.Random, num: int) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=num))


# --- the server -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def art_serve(
    model: Path, log: BinaryIO, *options: str, art: Sequence[str] = ("-m", "art_cli")
) -> AsyncIterator[tuple[Process, int]]:
    """The command as a process, and its port. `art` are the arguments by which Python runs it."""
    command = [sys.executable, *art, "serve", f"tiny={model}", "--engine", "embedded", "--port", "0", "--json"]
    command += ["--concurrency", str(PLACES), "--queue", str(QUEUE), "--drain", str(DRAIN_S), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=log, env=environment)
    try:
        assert process.stdout
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        yield process, int(json.loads(line)["url"].removesuffix("/v1").rpartition(":")[2])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Use(NamedTuple):
    at: float
    memory_mib: float
    cpu_s: float


def use_of(pid: int) -> Use:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, "the server is gone"
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return Use(time.perf_counter(), int(found[1]) / 1024, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))


async def watch(pid: int, uses: list[Use]) -> None:
    while True:
        uses.append(use_of(pid))
        await asyncio.sleep(1.0)


async def metrics(port: int) -> dict[str, float]:
    wire = await Wire.open(port)
    await wire.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    body = (await wire.receive()).body.decode()
    wire.close()
    lines = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


# --- the clients ------------------------------------------------------------------------------------------------------


class Received(NamedTuple):
    status: int
    headers: bytes
    body: bytes


class Broken(Exception):
    """The connection ended before the reply did; `num_bytes` of it had come."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


@dataclass
class Wire:
    """HTTP on one connection, as little of it as it takes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_slow: bool

    @classmethod
    async def open(cls, port: int, *, is_slow: bool = False) -> "Wire":
        wire = socket.socket()
        wire.setblocking(False)
        if is_slow:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            await asyncio.get_running_loop().sock_connect(wire, ("127.0.0.1", port))
        except OSError:
            wire.close()
            raise
        return cls(*await asyncio.open_connection(sock=wire, limit=SLOW_BYTES if is_slow else 2**16), is_slow)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self) -> Received:
        """The whole reply. Raises Broken."""
        data = bytearray()
        while (end := data.find(b"\r\n\r\n")) < 0:
            data += await self._more(len(data))
        headers = bytes(data[:end]).lower()
        length = re.search(rb"content-length: (\d+)", headers)
        while len(data) < end + 4 + int(length[1]) if length else not data.endswith(b"\r\n0\r\n\r\n"):
            data += await self._more(len(data))
        body = bytes(data[end + 4 :])
        return Received(int(data[9:12]), headers, body if length else _unchunked(body))

    async def first_piece(self) -> None:
        await self._more(0)

    async def _more(self, num_before: int) -> bytes:
        try:
            piece = await self.reader.read(SLOW_BYTES if self.is_slow else 2**16)
        except ConnectionError:
            piece = b""
        if not piece:
            raise Broken(num_before)
        if self.is_slow:
            await asyncio.sleep(SLOW_PAUSE_S)
        return piece

    def close(self) -> None:
        self.writer.transport.abort()


def _unchunked(data: bytes) -> bytes:
    pieces, place = [], 0
    while size := int(data[place : (start := data.index(b"\r\n", place))], 16):
        pieces.append(data[start + 2 : start + 2 + size])
        place = start + 4 + size
    return b"".join(pieces)


@dataclass
class Load:
    """What the clients share: where they ask, what is to come back, and what did."""

    port: int
    replies: dict[str, list[int]]
    seconds: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    is_over: bool = False
    told_to_stop_at: float = float("inf")  # when the server was
    is_fresh: bool = False  # whether each request is a conversation that never was

    async def client(self, number: int) -> None:
        """Asks again and again. Every tenth leaves in the middle, every tenth reads slowly."""
        draw, wire, num = random.Random(number), None, 0
        while not self.is_over:
            num += 1
            try:
                wire = wire or await Wire.open(self.port, is_slow=number % 10 == 1)
            except OSError:
                self.counts["sent"] += 1
                self._turned_away(time.perf_counter())
                return
            text = _letters(draw, 7 * NUM_MESSAGES) if self.is_fresh else draw.choice(list(self.replies))
            async with _deadline(self):
                stays = await self._ask(wire, text, is_stream=num % 2 == 0, leaves=number % 10 == 0, draw=draw)
                if stays:
                    continue
            wire.close()
            wire = None
        if wire is not None:
            wire.close()

    async def _ask(self, wire: Wire, text: str, *, is_stream: bool, leaves: bool, draw: random.Random) -> bool:
        """Whether the connection is of further use."""
        self.counts["sent"] += 1
        begin = time.perf_counter()
        try:
            await wire.send(_request(text, is_stream, wire.is_slow))
            if leaves:
                await (wire.first_piece() if is_stream else asyncio.sleep(draw.uniform(0.005, 0.2)))
                self.counts["left"] += 1
                return False
            received = await wire.receive()
        except (Broken, ConnectionError) as error:
            if getattr(error, "num_bytes", 0) or begin < self.told_to_stop_at:
                self.counts["lost"] += 1
            else:
                self._turned_away(begin)
            return False
        await self._judge(received, text, is_stream, time.perf_counter() - begin)
        return b"connection: close" not in received.headers

    async def _judge(self, received: Received, text: str, is_stream: bool, seconds: float) -> None:
        if received.status in (429, 503):
            self.counts[str(received.status)] += 1
            wait = re.search(rb"retry-after: (\d+)", received.headers)
            await asyncio.sleep(float(wait[1]) if wait and received.status == 429 else 0.1)
            return
        try:
            said = _said(received.body, is_stream)
        except (ValueError, KeyError, IndexError):
            said = None
        if received.status != 200 or said is None:
            self.counts["lost"] += 1
        elif not self.is_fresh and said != self.replies[text]:
            self.counts["crossed"] += 1
        else:
            self.counts["answered"] += 1
            self.counts["tokens"] += len(said)
            self.seconds.append(seconds)

    def _turned_away(self, begin: float) -> None:
        """Refused at the port, which is right once the server was told to stop."""
        self.counts["lost" if begin < self.told_to_stop_at else "at the port"] += 1


@contextlib.asynccontextmanager
async def _deadline(load: Load) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(ANSWER_S):
            yield
    except TimeoutError:
        load.counts["lost"] += 1


def _request(text: str, is_stream: bool, is_slow: bool) -> bytes:
    said = [text] if len(text) == PROMPT_LETTERS else [text[start : start + 7] for start in range(0, len(text), 7)]
    messages = [{"role": ("user", "assistant")[place % 2], "content": each} for place, each in enumerate(said)]
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0}
    body |= {"max_tokens": NUM_NEW, "stream": is_stream, "return_token_ids": True}
    if is_slow:  # more to read
        body |= {"logprobs": True, "top_logprobs": 5}
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(data) + data


def _said(body: bytes, is_stream: bool) -> list[int] | None:
    """The reply's token ids; None where a stream did not come to its end."""
    if not is_stream:
        ids: list[int] = json.loads(body)["choices"][0]["token_ids"]
        return ids
    events = body.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        return None
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    return [id for choice in choices for id in choice.get("token_ids") or ()]


# --- the measurement --------------------------------------------------------------------------------------------------


async def under_load(load: Load, process: Process, num_clients: int, seconds: float) -> bool:
    """Whether all was well: nothing lost or crossed, nothing left behind, memory flat."""
    uses: list[Use] = []
    watching = asyncio.create_task(watch(process.pid, uses))
    clients = [asyncio.create_task(load.client(number)) for number in range(num_clients)]
    await asyncio.sleep(seconds)
    load.is_over = True
    await asyncio.gather(*clients)
    watching.cancel()
    await asyncio.sleep(2.0)  # the server needs a moment to see which clients have left
    idle = use_of(process.pid)
    await asyncio.sleep(2.0)
    numbers, last = await metrics(load.port), use_of(process.pid)
    warm = [use for use in uses if use.at - uses[0].at >= WARM_SHARE * seconds]
    slope = statistics.linear_regression([use.at / 60 for use in warm], [use.memory_mib for use in warm]).slope
    growth = warm[-1].memory_mib / warm[0].memory_mib - 1
    busy = (warm[-1].cpu_s - warm[0].cpu_s) / (warm[-1].at - warm[0].at)
    behind = (last.cpu_s - idle.cpu_s) / (last.at - idle.at)
    took = sorted(load.seconds)
    table(
        load.counts,
        {
            "seconds": f"{seconds:g}",
            "tokens a second": f"{load.counts['tokens'] / seconds:.0f} (of replies read whole)",
            "seconds to an answer": f"median {statistics.median(took):.2f}, 99 % {took[int(0.99 * len(took))]:.2f}",
            "server's memory, MiB": f"{uses[0].memory_mib:.0f} at first, {warm[0].memory_mib:.0f} warm, "
            f"{warm[-1].memory_mib:.0f} at the end, {slope:+.1f} a minute since warm",
            "of each tenth": " ".join(f"{mib:.0f}" for mib in tenths(uses)),
            "server's processor": f"{busy:.2f} of a core under load, {behind:.3f} after it",
            "left behind": f"{numbers['art_requests_inside']:.0f} requests inside, "
            f"{numbers['art_requests_answering']:.0f} places taken",
        },
    )
    is_clean = not numbers["art_requests_inside"] and not numbers["art_requests_answering"] and behind < 0.1
    return is_clean and growth <= MAX_GROWTH and _is_whole(load)


def tenths(uses: Sequence[Use]) -> list[float]:
    """The median memory in each tenth of the time, in MiB."""
    parts = [uses[len(uses) * part // 10 : len(uses) * (part + 1) // 10] for part in range(10)]
    return [statistics.median(use.memory_mib for use in part) for part in parts if part]


async def until_stopped(load: Load, process: Process, num_clients: int) -> bool:
    """Whether SIGTERM in the middle of the load lost nothing and the server ended with 0 in its time."""
    clients = [asyncio.create_task(load.client(number)) for number in range(num_clients)]
    await asyncio.sleep(SIGTERM_AFTER_S)
    inside, before = (await metrics(load.port))["art_requests_inside"], load.counts["answered"]
    load.told_to_stop_at = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    code = await asyncio.wait_for(process.wait(), DRAIN_S + 20)
    took = time.perf_counter() - load.told_to_stop_at
    load.is_over = True
    await asyncio.gather(*clients)
    after = load.counts["answered"] - before
    ended = f"code {code}, {took:.1f} s after SIGTERM; {inside:.0f} were inside then, {after} answered after it"
    table(load.counts, {"ended with": ended})
    return code == 0 and _is_whole(load)


def _is_whole(load: Load) -> bool:
    return not load.counts["lost"] and not load.counts["crossed"]


def table(counts: Counter[str], facts: dict[str, str]) -> None:
    names = {
        "sent": "sent", "answered": "answered, right for the prompt", "left": "left in the middle by the client",
        "429": "refused for now, 429", "503": "refused while stopping, 503", "at the port": "refused at the port",
        "crossed": "crossed", "lost": "lost",
    }  # fmt: skip
    for name, shown in names.items():
        print(f"  {shown:32s} {counts[name]}")
    for name, fact in facts.items():
        print(f"  {name:32s} {fact}")


async def measure(seconds: float, num_clients: int, *, is_inside: bool, is_fresh: bool) -> bool:
    weights = tiny_weights(lora_rank=None)
    replies = expected_replies(weights)
    num_different = len({tuple(reply) for reply in replies.values()})
    print(f"{len(replies)} prompts of {NUM_PROMPTS} with clear margins, {num_different} different replies to them")
    with tempfile.TemporaryDirectory() as directory, open(Path(directory) / "log", "wb") as log:
        save_weights(weights, Path(directory) / "model")
        notes = Path(directory) / "notes"
        inside = (str(ROOT / "benchmarks" / "serving" / "memory_inside.py"), str(notes), str(seconds / 11))
        async with art_serve(Path(directory) / "model", log, art=inside if is_inside else ("-m", "art_cli")) as (
            process,
            port,
        ):
            print(f"{num_clients} clients, half of the requests streamed; {PLACES} places and {QUEUE} to wait:")
            is_well = await under_load(Load(port, replies, is_fresh=is_fresh), process, num_clients, seconds)
            if is_inside:
                print(notes.read_text())
            print(f"again, and SIGTERM after {SIGTERM_AFTER_S:g} s:")
            has_ended = await until_stopped(Load(port, replies), process, num_clients)
        if not (is_well and has_ended):
            print((Path(directory) / "log").read_text()[-2000:])
    return is_well and has_ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--inside", action="store_true", help="the server notes what its memory is made of")
    parser.add_argument("--fresh", action="store_true", help="each request is a conversation that never was")
    given = parser.parse_args()
    sys.exit(not asyncio.run(measure(given.seconds, given.clients, is_inside=given.inside, is_fresh=given.fresh)))


if __name__ == "__main__":
    main()
