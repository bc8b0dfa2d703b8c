"""Requests per second through the capturing gateway, what it adds to a call, and whether its memory stays flat.

    python -m benchmarks.serving.gateway [--calls 50000] [--repeats 5]

Three processes on two cores: the gateway alone on one, the upstream and the client on the other, both as thin as they
can be (sockets and ready-made bytes), so that what is measured is the gateway. Every call asks for logprobs; every
reply has 300 prompt ids, 128 token ids and 128 logprobs, all of which the gateway parses, records as a turn of the
call's own rollout, and renders for the client. A rollout makes 16 calls with its key and is closed; its record is then
held against what was sent. `upstream alone` is the same client at the same upstream with nothing in between.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import multiprocessing.synchronize
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import msgspec
import uvloop

from art_cli.chat.client import HttpBackend
from art_cli.chat.requests import Sampling
from art_cli.rollouts.rollout_gateway import Gateway

NUM_PROMPT, NUM_SAMPLED = 300, 128
CALLS_PER_ROLLOUT = 16
DEADLINE_S = 600.0
MODEL = "policy"


class Row(NamedTuple):
    """One way of calling, over the repeats. Rates are calls per second."""

    name: str
    concurrency: int
    rate: float
    rate_low: float
    rate_high: float
    p50_ms: float  # median of one call's time
    processor_ms: float  # processor time of the gateway's process per call; NaN without a gateway


# --- the upstream and the client: sockets and ready-made bytes --------------------------------------------------------


def reply_body() -> bytes:
    """As vLLM says it."""
    tokens = [
        {"token": f" word{i}", "logprob": -0.5 - i / 1000, "bytes": [32, 119], "top_logprobs": []} for i in range(128)
    ]
    message = {"role": "assistant", "content": "".join(token["token"] for token in tokens)}  # type: ignore[misc]
    choice = {"index": 0, "message": message, "logprobs": {"content": tokens}, "finish_reason": "stop"}
    return msgspec.json.encode(
        {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL,
            "choices": [{**choice, "token_ids": list(range(NUM_SAMPLED))}],
            "prompt_token_ids": list(range(1000, 1000 + NUM_PROMPT)),
            "usage": {"prompt_tokens": NUM_PROMPT, "completion_tokens": NUM_SAMPLED},
        }
    )  # fmt: skip


class _Framed(asyncio.Protocol):
    """HTTP/1.1 messages with a content-length, one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.index(b"content-length:") + 15
            size = int(head[at:].split(b"\r\n", 1)[0])
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            self.message(head, body)

    def message(self, head: bytes, body: bytes) -> None:
        raise NotImplementedError


class Upstream(_Framed):
    """Answers everything with the same reply."""

    BODY = reply_body()
    REPLY = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)

    def message(self, head: bytes, body: bytes) -> None:
        self.transport.write(self.REPLY)


class Caller(_Framed):
    """Makes the calls that `next_key` gives keys for, one after the other; notes how long each took."""

    def __init__(self, next_key: Callable[[], str | None], took: list[float], done: asyncio.Future[None]) -> None:
        self._next_key, self._took, self._done = next_key, took, done
        question = {"role": "user", "content": "What do you see? " * 20}
        self._body = msgspec.json.encode({"model": MODEL, "messages": [question], "logprobs": True})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._call()

    def _call(self) -> None:
        if (key := self._next_key()) is None:
            self.transport.close()
            self._done.set_result(None)
            return
        self._begin = time.perf_counter()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(self._body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + self._body)

    def message(self, head: bytes, body: bytes) -> None:
        self._took.append(time.perf_counter() - self._begin)
        assert head.startswith(b"http/1.1 200") and b" word127" in body, (head, body[:200])
        self._call()


async def call(port: int, keys: list[str], *, concurrency: int) -> tuple[float, list[float]]:
    """Seconds for a call with every key, and each call's own."""
    loop = asyncio.get_running_loop()
    waiting, took = iter(keys), list[float]()
    done = [loop.create_future() for _ in range(concurrency)]
    begin = time.perf_counter()
    for future in done:
        await loop.create_connection(
            lambda future=future: Caller(lambda: next(waiting, None), took, future), "127.0.0.1", port
        )  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*done), DEADLINE_S)
    return time.perf_counter() - begin, took


# --- the processes ----------------------------------------------------------------------------------------------------


def run_upstream(pipe: Connection) -> None:
    _stay_on(1)

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.to_thread(pipe.recv)

    uvloop.run(main())


class _Endpoint(NamedTuple):
    model: str = MODEL
    step: int = 0


class _HttpUpstream(NamedTuple):
    backend: HttpBackend
    endpoint: _Endpoint = _Endpoint()


def run_gateway(pipe: Connection, upstream_port: int) -> None:
    """Opens the keys it is asked for; closes each when its calls are made and checks what was recorded."""
    _stay_on(0)

    async def main() -> None:
        backend = HttpBackend(f"http://127.0.0.1:{upstream_port}/v1", "key", MODEL)
        gateway = Gateway(_HttpUpstream(backend), defaults=Sampling(max_tokens=200), seed=0, max_turns=10**9)
        async with gateway.serve() as url:
            pipe.send(int(url.rpartition(":")[2].split("/")[0]))
            while (num := await asyncio.to_thread(pipe.recv)) is not None:
                keys = [gateway.open(f"t{i}") for i in range(num)]
                pipe.send(keys)
                begin = time.process_time()
                await _close_when_done(gateway, keys)
                pipe.send((time.process_time() - begin, _resident_mb()))
        await backend.close()

    uvloop.run(main())


async def _close_when_done(gateway: Gateway, keys: list[str]) -> None:
    waiting = list(keys)
    while waiting:
        await asyncio.sleep(0.02)
        done = [key for key in waiting[:64] if gateway._backends[key].recorder.num_calls == CALLS_PER_ROLLOUT]
        for key in done:
            waiting.remove(key)
            turns = gateway.close(key).turns
            assert len(turns) == CALLS_PER_ROLLOUT
            assert all(
                turn.sampled_ids == list(range(NUM_SAMPLED)) and len(turn.logprobs) == NUM_SAMPLED for turn in turns
            )


def _stay_on(core: int) -> None:
    """One core, where there are two or more."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[min(core, len(cores) - 1)]})


def _resident_mb() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Stage:
    """The upstream and the gateway, each in its process; this process is the client."""

    def __enter__(self) -> "Stage":
        context = multiprocessing.get_context("spawn")
        self._upstream, theirs = context.Pipe()
        self._processes = [context.Process(target=run_upstream, args=(theirs,), daemon=True)]
        self._processes[0].start()
        self.upstream_port: int = self._receive(self._upstream)
        self._gateway, theirs = context.Pipe()
        self._processes.append(context.Process(target=run_gateway, args=(theirs, self.upstream_port), daemon=True))
        self._processes[1].start()
        self.gateway_port: int = self._receive(self._gateway)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._gateway.send(None)
            self._upstream.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()

    @staticmethod
    def _receive(pipe: Connection) -> Any:
        assert pipe.poll(DEADLINE_S), "a process did not answer in time"
        return pipe.recv()

    def through(self, calls: int, concurrency: int) -> tuple[float, list[float], float, float]:
        """(seconds, each call's, the gateway's processor seconds, its resident MB) of calls through the gateway."""
        num = max(1, calls // CALLS_PER_ROLLOUT)
        self._gateway.send(num)
        keys = [key for key in self._receive(self._gateway) for _ in range(CALLS_PER_ROLLOUT)]
        seconds, took = uvloop.run(call(self.gateway_port, keys, concurrency=concurrency))
        return seconds, took, *self._receive(self._gateway)

    def alone(self, calls: int, concurrency: int) -> tuple[float, list[float]]:
        return uvloop.run(call(self.upstream_port, ["key"] * calls, concurrency=concurrency))


def measure(*, repeats: int, calls: int) -> list[Row]:
    """Both ways at concurrency 32 and 1, in alternation."""
    _stay_on(1)
    rows = []
    with Stage() as stage:
        stage.through(1600, 32)
        for concurrency, num in ((32, calls), (1, calls // 8)):
            alone, through = [], []
            for _ in range(repeats):
                alone.append((*stage.alone(num, concurrency), float("nan")))
                through.append(stage.through(num, concurrency)[:3])
            rows += [_row("upstream alone", concurrency, alone), _row("through the gateway", concurrency, through)]
    return rows


def _row(name: str, concurrency: int, runs: list[tuple[float, list[float], float]]) -> Row:
    rates = [len(took) / seconds for seconds, took, _ in runs]
    p50 = statistics.median(statistics.median(took) for _, took, _ in runs)
    processor = statistics.median(processor / len(took) for _, took, processor in runs)
    return Row(name, concurrency, statistics.median(rates), min(rates), max(rates), 1e3 * p50, 1e3 * processor)


def memory(calls: int) -> list[tuple[int, float]]:
    """(calls made, the gateway's resident MB) after each tenth."""
    _stay_on(1)
    with Stage() as stage:
        return [(calls * part // 10, stage.through(calls // 10, 32)[3]) for part in range(1, 11)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=50_000, help="of the memory's part")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = measure(repeats=options.repeats, calls=4_000)
    print(f"{'':20} at once   calls/s [min, max]       p50 ms   gateway's processor ms a call")
    for row in rows:
        print(
            f"{row.name:20} {row.concurrency:7d}   {row.rate:7.0f} [{row.rate_low:.0f}, {row.rate_high:.0f}]"
            f"{row.p50_ms:12.2f} {row.processor_ms:10.2f}"
        )
    print(f"added at concurrency 1: p50 {rows[3].p50_ms - rows[2].p50_ms:.2f} ms (limit 3)")
    print("resident MB after calls:", "  ".join(f"{num}: {mb:.0f}" for num, mb in memory(options.calls)))


if __name__ == "__main__":
    main()
