"""A day of `art gateway` in some minutes: clients that leave, an endpoint that fails, a gateway that is killed.

    python -m benchmarks.serving.gateway_days [--conversations 10000] [--kills 5] [--seconds 300]

24 hours are played in `--seconds`: an idle conversation is over after two of these hours (or a minute), and files are
rotated every hour. Clients speak all protocols with five keys, think between their calls, quote keys and passwords,
hang up in the middle of a reply, and send a failed call again with the header of an SDK. The endpoint refuses, hangs,
breaks off streams and answers garbage. At the end what every client was told is held against the files:

    lost       a reply that a client got whole and that no trajectory has
    doubled    a reply or a conversation that two trajectories have, or a reply that was sampled in two turns
    mixed      a trajectory with the calls of two conversations
    inexact    a turn with other token ids than were sampled
    leaked     a key or password in a file, looked for at each kill and at the end
"""

import argparse
import asyncio
import base64
import contextlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from art_cli.chat.http_server import serve
from art_cli.judges.files.judged_files import TrajectoryFile
from art_cli.runs.durable import read_lines
from art_cli.runs.trajectory import Trajectory
from tests.support.servers.ports import free_port

Json = dict[str, Any]

KEYS = [f"sk-client-{number}-4f9d20ab" for number in range(5)]
UPSTREAM_KEY = "sk-upstream-77aa01cc93"
PASSWORD = "hunter2-of-ann"
SIMULATED_S = 24 * 3600.0
IDLE_S, ROTATE_S = 2 * 3600.0, 3600.0  # simulated
FAILURE, LEAVING, QUOTING = 0.05, 0.05, 0.05  # shares of calls that the endpoint fails, clients leave, that quote keys
TIMEOUT_S = 5.0  # of the endpoint; long, because one process plays the endpoint and all clients
MAX_OPEN = 10_000  # so that only idle time ends a conversation, which can be told from the files
SHORTEST_IDLE_S = 60.0  # of real time, because a start of the gateway takes some of it
START_TIMEOUT_S = 60.0
GIVE_UP_S = 60.0
ATTEMPTS = 4  # conversations that attempt one task
REPLY = re.compile(r"reply-[0-9a-f]{16}")


class Plan(NamedTuple):
    conversations: int = 10_000
    kills: int = 5
    seconds: float = 300.0  # in which a day is played
    timeout_s: float = TIMEOUT_S

    @property
    def idle_s(self) -> float:
        """Real seconds: two simulated hours, but long enough for a start of the gateway."""
        return max(SHORTEST_IDLE_S, IDLE_S * self.seconds / SIMULATED_S)


@dataclass
class Day:
    """What happened, as the clients and the endpoint know it."""

    replies: dict[str, int] = field(default_factory=dict)  # reply that a client got whole -> its conversation
    sampled: dict[str, str] = field(default_factory=dict)  # reply -> its whole text
    counts: Counter[str] = field(default_factory=Counter)
    resident: list[tuple[float, float]] = field(default_factory=list)  # (second, MB of the gateway)
    leaks: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # what is wrong, one line each


# --- the endpoint -----------------------------------------------------------------------------------------------------


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def render(messages: Iterable[Json]) -> str:
    return "".join(f"<{message['role']}>{message['content']}\n" for message in messages) + "<assistant>"


class Endpoint:
    """OpenAI's chat completions with token ids, a token per letter. A share of the calls fails in one of five ways."""

    def __init__(self, day: Day, seed: int, timeout_s: float) -> None:
        self._day, self._random, self._timeout_s = day, random.Random(seed), timeout_s
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._answer, methods=["POST"])])

    async def _answer(self, http: Request) -> Response:
        body = await http.json()
        assert http.headers["authorization"] == f"Bearer {UPSTREAM_KEY}"
        failure = self._random.choice(["refuses", "hangs", "garbage", "cut"]) if self._random.random() < FAILURE else ""
        self._day.counts[failure and f"endpoint {failure}"] += 1
        await asyncio.sleep(self._random.random() * 0.05)
        if failure == "refuses":
            return JSONResponse({"error": {"message": f"overloaded; your key {UPSTREAM_KEY}"}}, 500)
        if failure == "hangs":
            await asyncio.sleep(self._timeout_s * 1.5)
        if failure == "garbage":
            return Response("<html>\x00 oops", media_type="text/event-stream" if body.get("stream") else "text/html")
        name = f"reply-{self._random.getrandbits(64):016x}"
        text = f"{name} " + "word " * self._random.randrange(8)
        self._day.sampled[name] = text
        whole = self._reply(body, text)
        if not body.get("stream"):
            return Response(b'{"id": "cut", "choices": [' if failure == "cut" else msgspec.json.encode(whole))
        return StreamingResponse(self._stream(whole, is_cut=failure == "cut"), media_type="text/event-stream")

    def _reply(self, body: Json, text: str) -> Json:
        tokens = [{"token": letter, "logprob": -0.5, "bytes": None} for letter in text] + [
            {"token": "", "logprob": -0.1, "bytes": None}
        ]
        ids = encode(text) + [10]
        prompt = encode(render(body["messages"]))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": {"content": tokens},
            "finish_reason": "stop",
            "token_ids": ids,
        }
        return {"id": "c", "created": 1, "model": "m", "choices": [choice], "prompt_token_ids": prompt}

    async def _stream(self, whole: Json, *, is_cut: bool) -> AsyncIterator[bytes]:
        (choice,) = whole["choices"]
        num, size = len(choice["token_ids"]), 8
        for start in range(0, num, size):
            part = slice(start, start + size)
            is_last = start + size >= num
            if is_cut and is_last:
                return
            piece = {
                "index": 0,
                "delta": {"content": choice["message"]["content"][part]},
                "logprobs": {"content": choice["logprobs"]["content"][part]},
                "token_ids": choice["token_ids"][part],
                "finish_reason": "stop" if is_last else None,
            }
            event = {**whole, "choices": [piece]} | ({} if start == 0 else {"prompt_token_ids": None})
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"
            await asyncio.sleep(0.002)
        yield b"data: [DONE]\n\n"


# --- the clients ------------------------------------------------------------------------------------------------------


class Client:
    """One conversation of up to four calls, in one protocol, with one key."""

    def __init__(self, number: int, plan: Plan, root: str, session: aiohttp.ClientSession, day: Day) -> None:
        self._random = random.Random(number)
        self._number, self._root, self._session, self._day = number, root, session, day
        self._think_s = 900.0 * plan.seconds / SIMULATED_S
        self._wire = self._random.choice(["chat", "chat stream", "messages", "messages stream", "responses"])
        key = self._random.choice(KEYS)
        self._key = f"{key}:{number}" if self._random.random() < 0.2 else key
        self._messages: list[Json] = [{"role": "user", "content": f"Task {number // ATTEMPTS}: what is to be done?"}]

    async def play(self) -> None:
        for turn in range(self._random.randint(1, 4)):
            reply = await self._call()
            if reply is None:
                return
            quoted = f" My key is {KEYS[0]}." if self._random.random() < QUOTING else ""
            quoted += f' {{"password": "{PASSWORD}"}}' if self._random.random() < QUOTING else ""
            more = {"role": "user", "content": f"And {self._number}.{turn}?{quoted}"}
            self._messages += [{"role": "assistant", "content": reply}, more]
            await asyncio.sleep(self._random.random() * self._think_s)

    async def _call(self) -> str | None:
        """The reply; None if the client left, or gave up. A call that fails is sent again, as SDKs do."""
        leaves_after = self._random.random() * 0.05 if self._random.random() < LEAVING else None
        deadline = time.monotonic() + GIVE_UP_S
        for attempt in range(1000):
            try:
                reply = await self._send(attempt, leaves_after)
            except TimeoutError:
                self._day.counts["clients left"] += 1
                return None
            except (aiohttp.ClientError, ConnectionError, ValueError):
                reply = None
            if reply is not None:
                (name,) = REPLY.findall(reply)
                self._day.replies[name] = self._number
                self._day.counts["calls answered"] += 1
                return reply
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(min(1.0, 0.1 * 2**attempt))
        self._day.counts["clients gave up"] += 1
        return None

    async def _send(self, attempt: int, leaves_after: float | None) -> str | None:
        """The whole reply; None: an error. Raises TimeoutError: the client has left."""
        headers = {"x-stainless-retry-count": str(attempt)} if attempt else {}
        is_stream = self._wire.endswith("stream")
        body: Json = {"model": "m", "stream": is_stream}
        match self._wire.split()[0]:
            case "chat":
                path, body["messages"] = "chat/completions", self._messages
            case "messages":
                path, body["messages"], body["max_tokens"] = "messages", self._messages, 100
            case _:
                path, body["input"], body["store"] = "responses", self._messages, False
        headers |= {"x-api-key": self._key} if path == "messages" else {"authorization": f"Bearer {self._key}"}
        async with asyncio.timeout(leaves_after):
            async with self._session.post(f"{self._root}/v1/{path}", json=body, headers=headers) as response:
                data = await response.read()
        if response.status != 200:
            self._day.counts[f"status {response.status}"] += 1
            return None
        return _streamed(data, path) if is_stream else _whole(json.loads(data), path)


def _whole(reply: Json, path: str) -> str:
    match path:
        case "chat/completions":
            return str(reply["choices"][0]["message"]["content"])
        case "messages":
            return str(reply["content"][0]["text"])
    return str(reply["output"][0]["content"][0]["text"])


def _streamed(data: bytes, path: str) -> str | None:
    """The text of a stream; None if it did not come to its end."""
    if not data.rstrip().endswith(b"[DONE]" if path == "chat/completions" else b'{"type":"message_stop"}'):
        return None
    events = [json.loads(line[5:]) for line in data.splitlines() if line.startswith(b"data:") and b"[DONE]" not in line]
    if any("error" in event for event in events):
        return None
    if path == "messages":
        return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


# --- the gateway's process --------------------------------------------------------------------------------------------


class Process:
    """`art gateway`, started, killed and started again."""

    def __init__(self, place: Path, upstream: str, plan: Plan, day: Day) -> None:
        scale = plan.seconds / SIMULATED_S
        engine = {"name": "openai", "url": f"{upstream}/v1", "model": "m", "timeout_s": plan.timeout_s}
        gateway = {
            "directory": "out",
            "idle_s": plan.idle_s,
            "rotate_s": ROTATE_S * scale,
            "max_open": MAX_OPEN,
            "redact": {"keys": ["password"]},
        }
        self._config, self.out, self._day = place / "gateway.yaml", place / "out", day
        self._config.write_text(json.dumps({"engine": engine, "gateway": gateway}))
        (place / "keys").write_text("\n".join(KEYS))
        self._place, self._port = place, free_port()
        self._log = place / "log"
        self.root = f"http://127.0.0.1:{self._port}"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        command = [sys.executable, "-m", "art_cli", "gateway", str(self._config), "--port", str(self._port)]
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(*command, "--api-key-file", str(self._place / "keys"), "--json"),
                env={**os.environ, "OPENAI_API_KEY": UPSTREAM_KEY},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        ready = await asyncio.wait_for(self.process.stdout.readline(), START_TIMEOUT_S)
        assert json.loads(ready)["url"].startswith(self.root), self._log.read_text()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()
        self.look_for_leaks()

    async def stop(self) -> Json:
        """The last line that it prints."""
        self.process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(self.process.communicate(), START_TIMEOUT_S)
        assert self.process.returncode == 0, self._log.read_text()
        self.look_for_leaks()
        totals: Json = json.loads(output.splitlines()[-1])
        return totals

    def look_for_leaks(self) -> None:
        secrets = [*KEYS, UPSTREAM_KEY, PASSWORD]
        forms = [form.encode() for secret in secrets for form in (secret, base64.b64encode(secret.encode()).decode())]
        for path in [*self.out.rglob("*"), self._log]:
            data = path.read_bytes() if path.is_file() else b""
            self._day.leaks |= {f"{form.decode()} in {path.name}" for form in forms if form in data}

    def resident_mb(self) -> float:
        with contextlib.suppress(OSError, IndexError):
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        return 0.0


async def play(plan: Plan, place: Path) -> tuple[Day, Json]:
    """Plays the day. Returns what the clients know, and what the gateway said at its end."""
    day = Day()
    endpoint = Endpoint(day, seed=0, timeout_s=plan.timeout_s)
    async with serve(endpoint.app) as upstream, _session() as session:
        gateway = Process(place, upstream, plan, day)
        await gateway.start()
        begin = time.monotonic()
        clients = [
            asyncio.create_task(_play_later(Client(number, plan, gateway.root, session, day), begin, plan))
            for number in range(plan.conversations)
        ]
        watch = asyncio.create_task(_watch(gateway, day, begin))
        for number in range(plan.kills):
            at = begin + plan.seconds * (number + 1) / (plan.kills + 1)
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            await gateway.kill()
            await gateway.start()
            day.counts["kills"] += 1
        await asyncio.gather(*clients)
        watch.cancel()
        return day, await gateway.stop()


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=GIVE_UP_S)
    )


async def _play_later(client: Client, begin: float, plan: Plan) -> None:
    at = begin + plan.seconds * client._number / plan.conversations
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    await client.play()


async def _watch(gateway: Process, day: Day, begin: float) -> None:
    while True:
        await asyncio.sleep(1.0)
        if mb := gateway.resident_mb():
            day.resident.append((time.monotonic() - begin, mb))


# --- what the files hold ----------------------------------------------------------------------------------------------


class Findings(NamedTuple):
    """What is wrong, each with its number; all are 0 if nothing is."""

    lost: int
    doubled: int
    mixed: int
    inexact: int
    incomplete: int  # groups of which members are missing
    leaked: int


def examine(day: Day, out: Path, plan: Plan) -> tuple[Findings, Counter[str]]:
    """Holds the files against what the clients were told. Returns what is wrong, and counts of what there is.

    A client that was idle for so long that its conversation was over goes on in another trajectory, whose first prompt
    holds the first one. That is no fault, and counted as split.
    """
    holders: dict[str, set[str]] = {}  # reply -> trajectories
    owners: dict[int, set[str]] = {}  # conversation of a client -> trajectories
    sampled: Counter[str] = Counter()  # reply -> turns
    counts: Counter[str] = Counter()
    spans: dict[str, tuple[float, float]] = {}  # trajectory -> first and last call
    mixed = inexact = incomplete = 0
    for path in sorted(out.glob("trajectories-*.jsonl")):
        counts["files"] += 1
        incomplete += sum(not group.is_complete for group in TrajectoryFile(path))
        for trajectory in read_lines(path, Trajectory):
            replies = {name for messages in _conversations(trajectory) for name in _replies(messages)}
            spans[trajectory.id] = trajectory.started_at, trajectory.started_at + trajectory.duration_s
            for name in replies:
                holders.setdefault(name, set()).add(trajectory.id)
            mine = {day.replies[name] for name in replies if name in day.replies}
            mixed += len(mine) > 1
            for number in mine:
                owners.setdefault(number, set()).add(trajectory.id)
            for turn in trajectory.turns:
                text = "".join(map(chr, turn.sampled_ids))
                names = REPLY.findall(text)
                sampled.update(names)
                inexact += any(not (day.sampled[name] + "\n").startswith(text) for name in names)
            counts["trajectories"] += 1
            counts["of them text only"] += trajectory.metadata["text_only_calls"] > 0
            counts["of them with a branch"] += bool(trajectory.branches)
    for name, found in [*holders.items(), *owners.items()]:
        if len(found) > 1 and _is_split([spans[each] for each in found], plan.idle_s):
            counts["replies and conversations split by idle time"] += 1
        elif len(found) > 1:
            day.notes.append(f"{name}: in {sorted(found)}")
    day.notes += [f"{name}: sampled in {number} turns" for name, number in sampled.items() if number > 1]
    doubled = len(day.notes)
    lost = len(day.replies.keys() - holders.keys())
    return Findings(lost, doubled, mixed, inexact, incomplete, len(day.leaks)), counts


def _is_split(spans: list[tuple[float, float]], idle_s: float) -> bool:
    """Whether each of these trajectories begins only after the one before was idle for as long."""
    ordered = sorted(spans)
    return all(later[0] - earlier[1] >= idle_s for earlier, later in zip(ordered[:-1], ordered[1:], strict=True))


def _conversations(trajectory: Trajectory) -> list[list[Json]]:
    return [trajectory.messages, *trajectory.branches]


def _replies(messages: list[Json]) -> list[str]:
    texts = [message["content"] for message in messages if message["role"] == "assistant"]
    return [name for text in texts if isinstance(text, str) for name in REPLY.findall(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args()
    plan = Plan(options.conversations, options.kills, options.seconds)
    with tempfile.TemporaryDirectory(prefix="gateway-days-") as place:
        day, totals = asyncio.run(play(plan, Path(place)))
        findings, counts = examine(day, Path(place) / "out", plan)
    print("played: ", ", ".join(f"{name} {num}" for name, num in sorted(day.counts.items()) if name))
    print("written:", ", ".join(f"{name} {num}" for name, num in counts.items()))
    print(
        "wrong:  ",
        ", ".join(f"{name} {num}" for name, num in findings._asdict().items()),
        *sorted(day.leaks)[:3],
        *day.notes[:5],
    )
    step = max(1, len(day.resident) // 20)
    print("resident MB at second:", "  ".join(f"{at:.0f}: {mb:.0f}" for at, mb in day.resident[::step]))
    print("the gateway's last line:", json.dumps(totals))
    sys.exit(any(findings))


if __name__ == "__main__":
    main()
