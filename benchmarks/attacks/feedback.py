"""Feedback that comes twice, late, forged and out of order at an `art gateway` that is killed: each counts once or not.

    python -m benchmarks.attacks.feedback [--calls 100000] [--kills 20]

Conversations are played first, with five keys; their files are rotated and the gateway is killed meanwhile, so most
feedback is about calls of earlier processes. Then every reply and conversation is rated in up to three versions (a
value, another value or a withdrawal), one after the other. Each version has its own Idempotency-Key. Between them come
doubles of all earlier versions, forgeries with another client's key, unknown ids and values of a wrong kind. A client
that got no answer sends the same body again. At the end feedback.jsonl is held against what the clients were told:

    lost       an answered version that the file does not have
    counted twice   a version with several lines or several ids
    wrong value     a target whose value that counts is not its last version's
    let in     a forged, unknown or invalid entry that was not refused with its status, or is in the file
    leaked     a key or password in a file, looked for at each kill and at the end
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from art_cli.chat.http_server import serve
from art_cli.runs.durable import read_lines
from art_cli.runs.feedback import FeedbackEntry, latest
from benchmarks.serving.gateway_days import KEYS, PASSWORD, Day, Plan, Process

Json = dict[str, Any]

CALLS_PER_CONVERSATION = 40  # feedback calls about one conversation of two replies
CONCURRENCY = 64
DOUBLED, FORGED, UNKNOWN, INVALID = 0.45, 0.15, 0.05, 0.05  # of each version, that such a call comes after it
METRICS = {
    "thumbs": {"type": "boolean"},
    "stars": {"type": "float"},
    "solved": {"type": "boolean", "level": "conversation"},
    "minutes": {"type": "float", "level": "conversation", "optimize": "min"},
}
RETRY_S, GIVE_UP_S = 0.1, 120.0


class Target(NamedTuple):
    owner: int  # number of the client's key
    field: str  # inference_id or episode_id
    id: str
    metric: str


@dataclass
class Told:
    """What the clients know."""

    ids: dict[str, set[str]] = field(default_factory=dict)  # Idempotency-Key -> feedback ids answered
    last: dict[Target, Any] = field(default_factory=dict)  # the last version's value
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that are not as expected


class Clients:
    def __init__(self, root: str, session: aiohttp.ClientSession, told: Told, seed: int = 0) -> None:
        self._root, self._session, self.told = root, session, told
        self._random = random.Random(seed)
        self._gate = asyncio.Semaphore(CONCURRENCY)

    async def post(self, path: str, body: Json, owner: int, **headers: str) -> tuple[int, Json]:
        """The answer; a lost connection or a 503 is tried again."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                head = {"authorization": f"Bearer {KEYS[owner]}", **headers}
                async with self._gate, self._session.post(f"{self._root}{path}", json=body, headers=head) as response:
                    answer: Json = await response.json()
                if response.status not in (429, 503):
                    return response.status, answer
            except (aiohttp.ClientError, ConnectionError, ValueError):
                pass
            self.told.counts["sent again after a kill"] += 1
            assert time.monotonic() < deadline, "the gateway does not come back"
            await asyncio.sleep(RETRY_S)

    async def converse(self, number: int) -> list[Target]:
        """Plays two turns. Returns what can be rated."""
        owner, messages, targets = number % len(KEYS), [{"role": "user", "content": f"question {number}"}], []
        for _ in range(2):
            body = {"model": "m", "messages": messages}
            named = {"x-art-conversation": f"chat-{number}"}
            status, reply = await self.post("/v1/chat/completions", body, owner, **named)
            assert status == 200, reply
            targets += [Target(owner, "inference_id", reply["id"], metric) for metric in ("thumbs", "stars", "comment")]
            messages = [*messages, reply["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        metrics = ("solved", "minutes", "comment")
        return [*targets, *(Target(owner, "episode_id", f"chat-{number}", metric) for metric in metrics)]

    async def rate(self, target: Target) -> None:
        """Sends the versions, each with what follows it."""
        sent: list[tuple[str, Json]] = []
        for version in range(self._random.randint(1, 3)):
            withdraws = version > 0 and self._random.random() < 0.2
            value = None if withdraws else self._value(target.metric)
            body = {"metric_name": target.metric, "value": value, target.field: target.id, "tags": {"v": str(version)}}
            key = f"{self._random.getrandbits(64):016x}"
            sent.append((key, body))
            together = 2 if self._random.random() < DOUBLED else 1
            self.told.counts["versions"] += 1
            self.told.counts["doubled at once"] += together - 1
            await asyncio.gather(*(self._send(target, key, body) for _ in range(together)))
            self.told.last[target] = value
            await self._disturb(target, sent)

    async def _send(self, target: Target, key: str, body: Json) -> None:
        status, answer = await self.post("/v1/feedback", body, target.owner, **{"Idempotency-Key": key})
        if status == 200:
            self.told.ids.setdefault(key, set()).add(answer["feedback_id"])
        else:
            self.told.wrong.append(f"{status} {answer} for {body}")

    async def _disturb(self, target: Target, sent: list[tuple[str, Json]]) -> None:
        draw, (_, body) = self._random.random, sent[-1]
        for key, earlier in sent:
            if draw() < DOUBLED:
                self.told.counts["doubled late, out of order"] += 1
                await self._send(target, key, earlier)
        forger = (target.owner + 1) % len(KEYS)
        unknown = body | {target.field: f"chatcmpl-{self._random.getrandbits(128):032x}"}
        invalid = self._random.choice(
            [{"value": [1]}, {"value": {}}, {"metric_name": "cheers"}, {"tags": {"a": 1}}, {"more": 1}]
        )
        for share, name, changed, owner, expected in (
            (FORGED, "forged", body, forger, 404),
            (UNKNOWN, "unknown", unknown, target.owner, 404),
            (INVALID, "invalid", body | invalid, target.owner, 400),
        ):
            if draw() < share:
                self.told.counts[name] += 1
                status, answer = await self.post("/v1/feedback", changed, owner)
                if status != expected:
                    self.told.wrong.append(f"{name}: {status} {answer} for {changed}")

    def _value(self, metric: str) -> Any:
        match metric:
            case "thumbs" | "solved":
                return self._random.random() < 0.5
            case "stars" | "minutes":
                return round(self._random.uniform(-9, 9), 3)
        return f"said {self._random.getrandbits(64):x}; my key is {KEYS[0]}" + f' {{"password": "{PASSWORD}"}}'


async def _endpoint(http: Request) -> JSONResponse:
    message = {"role": "assistant", "content": f"reply {random.getrandbits(64):x}"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return JSONResponse({"id": "c", "created": 1, "model": "m", "choices": [choice]})


async def attack(num_calls: int, num_kills: int, place: Path) -> tuple[Told, Day, Path, float]:
    """Returns what the clients were told, the leaks, the gateway's directory, and the calls of feedback a second."""
    told, day = Told(), Day()
    app = Starlette(routes=[Route("/v1/chat/completions", _endpoint, methods=["POST"])])
    async with serve(app) as upstream, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        gateway = Process(place, upstream, Plan(), day)
        config = json.loads(gateway._config.read_text())
        config["gateway"] |= {"feedback": METRICS, "idle_s": 3, "rotate_s": 3}
        gateway._config.write_text(json.dumps(config))
        await gateway.start()
        clients = Clients(gateway.root, session, told)

        def num_sent() -> int:
            kinds = ("versions", "doubled at once", "doubled late, out of order", "forged", "unknown", "invalid")
            return sum(told.counts[kind] for kind in kinds)

        async def kill_at(shares: list[float], progress: Any) -> None:
            for share in shares:
                while progress() < share:
                    await asyncio.sleep(0.01)
                await gateway.kill()
                await gateway.start()
                told.counts["kills"] += 1

        num_conversations = max(5, num_calls // CALLS_PER_CONVERSATION)
        num_early = num_kills // 5
        targets: list[Target] = []
        killer = asyncio.create_task(
            kill_at(
                [n / (num_early + 1) for n in range(1, num_early + 1)], lambda: len(targets) / num_conversations / 9
            )
        )
        for coming in asyncio.as_completed([clients.converse(number) for number in range(num_conversations)]):
            targets += await coming
        await killer
        random.Random(1).shuffle(targets)
        shares = [n / (num_kills - num_early + 1) for n in range(1, num_kills - num_early + 1)]
        killer = asyncio.create_task(kill_at(shares, lambda: num_sent() / num_calls))
        begin, waiting = time.monotonic(), iter(targets)

        async def work() -> None:
            while num_sent() < num_calls and (target := next(waiting, None)) is not None:
                await clients.rate(target)

        await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
        rate = num_sent() / (time.monotonic() - begin)
        told.counts["calls of feedback"] = num_sent()
        killer.cancel()
        await gateway.stop()
        return told, day, gateway.out, rate


def examine(told: Told, out: Path) -> dict[str, int]:
    """Holds the file against what the clients were told. Returns what is wrong; all numbers are 0 if nothing is."""
    entries = list(read_lines(out / "feedback.jsonl", FeedbackEntry))
    lines = Counter(entry.id for entry in entries)
    answered = {id for ids in told.ids.values() for id in ids}
    counting = {(_where(entry), entry.metric): entry for each in latest(out).values() for entry in each}
    wrong = 0
    by_name = _conversations(out)
    for target, value in told.last.items():
        where = by_name[target.id] if target.field == "episode_id" else target.id.removeprefix("chatcmpl-")
        entry = counting.pop((where, target.metric), None)
        found = None if entry is None else entry.value
        wrong += (found != value) if target.metric != "comment" else ((found is None) != (value is None))
    return {
        "lost": len(answered - lines.keys()),
        "counted twice": sum(num > 1 for num in lines.values()) + sum(len(ids) > 1 for ids in told.ids.values()),
        "wrong value": wrong,
        "let in": len(told.wrong) + len(lines.keys() - answered) + len(counting),
    }


def _where(entry: FeedbackEntry) -> str:
    return entry.reply or entry.conversation


def _conversations(out: Path) -> dict[str, str]:
    """Conversation name -> the latest trajectory with it, which is the longest, as calls repeat earlier messages.

    A client that pauses for longer than `idle_s` begins another one, and a file may hold the older one last.
    """
    found: dict[str, tuple[int, str]] = {}
    for path in sorted(out.glob("trajectories-*.jsonl")):
        for line in path.read_bytes().splitlines():
            trajectory = json.loads(line)
            name, length = trajectory["metadata"]["conversation"], len(trajectory["messages"])
            if length >= found.get(name, (0, ""))[0]:
                found[name] = length, trajectory["id"]
    return {name: id for name, (_, id) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="feedback-") as place:
        begin = time.monotonic()
        told, day, out, rate = asyncio.run(attack(options.calls, options.kills, Path(place)))
        wrong = examine(told, out) | {"leaked": len(day.leaks)}
        files = len(list(out.glob("trajectories-*.jsonl")))
    for name, number in [*told.counts.items(), ("trajectory files", files)]:
        print(f"{name:28s} {number:9,}")
    print(f"{'calls a second':28s} {rate:9,.0f}\n{'seconds in all':28s} {time.monotonic() - begin:9,.0f}")
    for name, number in wrong.items():
        print(f"{'wrong: ' + name:28s} {number:9,}")
    print(*told.wrong[:3], *sorted(day.leaks)[:3], sep="\n", end="")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
