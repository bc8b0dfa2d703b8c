"""`art serve` under attack: does /health answer while clients send what would hold the event loop?

    python -m benchmarks.attacks.serve_attack --seconds 60 --clients 20   # the tiny model, its context of 1,024 tokens
    python -m benchmarks.attacks.serve_attack --seconds 5 --clients 5     # a quick look

The clients send templates of their own, template variables without bound, prompts of 28 MiB, endless tool definitions
and messages, schemas that are costly to compile, and the like on each protocol. Another process asks /health all the
while, of this server and of a second one without attackers, whose times show what the machine itself costs. At the end
SIGTERM comes in the middle of the attack. Prints a table; exit code 1 where /health was slower than 250 ms for its
server (and not for the idle one too), where a request got a 5xx other than 503, or where the server outlived its
deadline.
"""

import argparse
import asyncio
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from art_cli.models.saved_weights import save_weights
from benchmarks.serving.serve_load import Broken, Wire, art_serve
from benchmarks.shared.paths import ROOT
from tests.support.models.tiny import tiny_weights

HEALTH_S = 0.25  # bound on the slowest answer of /health
ANSWER_S = 120.0
LATE_S = 5.0  # longest wait for the answers to the last requests
DRAIN_S = 5
END_S = 30.0  # longest time from SIGTERM to the end of the process: DRAIN_S, and more on a busy machine
SPIN = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
GROW = "{% set ns = namespace(x='x' * 99999) %}{% for a in range(99999) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"


class Attack(NamedTuple):
    path: str
    body: bytes


def attacks(mib: int) -> dict[str, Attack]:
    """Requests by name; the long ones have a body of `mib` MiB."""
    size, user = mib * 2**20, {"role": "user", "content": "hi"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    parameters = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(20_000)}}
    schema = {"type": "object", "properties": {f"p{n}": {"pattern": f"^a{n}.*b$"} for n in range(900)}}
    chats: dict[str, dict[str, Any]] = {
        "template that spins": {"chat_template_kwargs": {"chat_template": SPIN}},
        "template that grows": {"chat_template_kwargs": {"chat_template": GROW}},
        "another conversation": {"chat_template_kwargs": {"conversation": [[user]] * 1000, "tokenize": True}},
        "huge variable": {"chat_template_kwargs": {"enable_thinking": 10**400}},
        "long message": {"messages": [{"role": "user", "content": "hello wo" * (size // 8)}]},
        "many messages": {"messages": [user] * 30_000},
        "too many messages": {"messages": [user] * 300_000},
        "long tool": {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * size}}]},
        "broad tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]},
        "deep arguments": {"messages": [user, {"role": "assistant", "tool_calls": [call]}]},
        "costly schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
            "max_tokens": 2,
        },
    }
    found = {
        name: Attack(CHAT, json.dumps({"model": "tiny", "messages": [user], **fields}).encode())
        for name, fields in chats.items()
    }
    text, item = "hello wo" * (size // 8), {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    broad = [{"name": "f", "description": "d", "input_schema": parameters}]
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": [[]] * 30_000}}
    others: dict[str, tuple[str, dict[str, Any]]] = {
        "long system": (MESSAGES, {"system": text, "messages": [user]}),
        "broad tool, messages": (MESSAGES, {"tools": broad, "messages": [user]}),
        "broad input": (MESSAGES, {"messages": [user, {"role": "assistant", "content": [use]}]}),
        "long count": (COUNT, {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        "many blocks": (COUNT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}] * 30_000}]}),
        "long instructions": (RESPONSES, {"instructions": text, "input": "hi"}),
        "many items": (RESPONSES, {"input": [item] * 30_000, "store": True}),
        "deep item": (RESPONSES, {"input": [user, {**item, "arguments": "[" * 100_000}]}),
    }
    for name, (path, fields) in others.items():
        limit = {} if path == COUNT else {"max_tokens" if path == MESSAGES else "max_output_tokens": 2}
        found[name] = Attack(path, json.dumps({"model": "tiny", **limit, **fields}).encode())
    found["long prompt"] = Attack(TEXT, json.dumps({"model": "tiny", "prompt": "hello wo" * (size // 8)}).encode())
    found["long prompt of ids"] = Attack(TEXT, json.dumps({"model": "tiny", "prompt": [7] * (size // 4)}).encode())
    found["lists"] = Attack(CHAT, b'{"model": "tiny", "messages": [' + b"[]," * (size // 3) + b"1]}")
    return found


async def post(port: int, attack: Attack) -> int:
    """The status; 0: the server is gone."""
    head = f"POST {attack.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    wire = None
    try:
        async with asyncio.timeout(ANSWER_S):
            wire = await Wire.open(port)
            await wire.send(f"{head}Content-Length: {len(attack.body)}\r\n\r\n".encode() + attack.body)
            return (await wire.receive()).status
    except (OSError, Broken):  # a TimeoutError, too, is an OSError
        return 0
    finally:
        if wire is not None:
            wire.close()


class Tally(NamedTuple):
    statuses: dict[str, Counter[int]]

    @property
    def num_failed(self) -> int:
        return sum(
            n for counts in self.statuses.values() for status, n in counts.items() if status >= 500 and status != 503
        )


async def attack_with(port: int, seconds: float, num_clients: int, mib: int) -> Tally:
    """Each client sends one request after the other, each another one."""
    requests = list(attacks(mib).items())
    tally, end = Tally({name: Counter() for name, _ in requests}), time.monotonic() + seconds

    async def client(number: int) -> None:
        while time.monotonic() < end:
            name, attack = requests[number % len(requests)]
            status = await post(port, attack)
            tally.statuses[name][status] += 1
            number += 1
            if status == 0:
                await asyncio.sleep(0.01)

    clients = [asyncio.create_task(client(number)) for number in range(num_clients)]
    _, late = await asyncio.wait(clients, timeout=seconds + LATE_S)
    for task in late:
        task.cancel()
    for task in clients:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return tally


# --- /health ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asking_health(ports: Sequence[int]) -> AsyncIterator[dict[int, list[float]]]:
    """Asks all the while; what is yielded is filled at the end with the seconds of each answer, by port."""
    command = [sys.executable, str(ROOT / "benchmarks" / "attacks" / "health.py"), *map(str, ports)]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=2**26)
    assert process.stdin and process.stdout
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
    took_s: dict[int, list[float]] = {}
    yield took_s
    process.stdin.close()
    answer = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    took_s.update((int(port), took) for port, took in answer.items())
    await process.wait()


class Health(NamedTuple):
    """Milliseconds."""

    num: int
    median: float
    p99: float
    most: float


def health_of(took_s: list[float]) -> Health:
    ms = sorted(1000 * value for value in took_s)
    return Health(len(ms), statistics.median(ms), ms[int(0.99 * (len(ms) - 1))], ms[-1])


# --- the measurement --------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    attacked: Health
    idle: Health
    tally: Tally
    end_s: float  # time from SIGTERM to the end of the process
    code: int | None


async def measure(seconds: float, num_clients: int, mib: int) -> Measured:
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "model"
        save_weights(tiny_weights(lora_rank=None), model)
        with (Path(place) / "log").open("wb") as log:
            options = ("--drain", str(DRAIN_S))
            async with art_serve(model, log, *options) as (process, port), art_serve(model, log) as (_, beside):
                async with asking_health((port, beside)) as took_s:
                    tally = await attack_with(port, seconds, num_clients, mib)
                attacked, idle = health_of(took_s[port]), health_of(took_s[beside])
                more = asyncio.create_task(attack_with(port, END_S, num_clients, mib))
                await asyncio.sleep(1.0)
                begin = time.perf_counter()
                process.send_signal(signal.SIGTERM)
                code = None
                with contextlib.suppress(TimeoutError):
                    code = await asyncio.wait_for(process.wait(), END_S)
                end_s = time.perf_counter() - begin
                more.cancel()
                await asyncio.wait((more,))
    return Measured(attacked, idle, tally, end_s, code)


def report(found: Measured) -> bool:
    """Prints the table; whether all was as wanted."""
    for name, counts in found.tally.statuses.items():
        print(f"{name:24} {dict(sorted(counts.items()))}")
    print(f"{'/health':24} {'asked':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}")
    for name, health in (("under attack", found.attacked), ("idle, beside it", found.idle)):
        print(f"{name:24} {health.num:7} {health.median:8.1f} {health.p99:8.1f} {health.most:8.1f}")
    print(f"SIGTERM in the attack: ended with code {found.code} after {found.end_s:.1f} s (drain {DRAIN_S} s)")
    is_quick = found.attacked.most <= max(1000 * HEALTH_S, 2 * found.idle.most)
    return is_quick and found.tally.num_failed == 0 and found.code == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--mib", type=int, default=28)
    options = parser.parse_args()
    found = asyncio.run(measure(options.seconds, options.clients, options.mib))
    sys.exit(0 if report(found) else 1)


if __name__ == "__main__":
    main()
