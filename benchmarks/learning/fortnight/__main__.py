"""A fortnight of `art improve` on a live agent, with users whose wishes drift, and with nights that go wrong.

    python -m benchmarks.learning.fortnight [--seeds 0] [--days 14] [--out DIR]

SmolLM2-135M as the assistant of a shop (recipes/assistant), trained for a few steps on orders and customers. Every day
users hold conversations through `art gateway --follow`. From the second week on most ask for prices, with new names.
Half of them rate, a tenth of these a day late; a tenth of the ratings is forged. `art improve` is called every 120
conversations, while requests are under way. Planted, by the number of the night:

    night 2   the judge breaks: rewards are turned round in training and gates
    night 3   a regression: fifty times the learning rate, without the bound on a step's KL
    night 5   poisoned feedback: two in five ratings forged, half of them by one abusive client
    night 6   a hack: the reward is paid for a question instead of work, in training and gates
    night 7   a hack: the agent's code raises on a call that is no JSON, and every wrong answer costs

"Without" is the policy of the first day, on requests of the same users. A planted night is harmless if its
candidate was not served, or was taken back; the conversations during its canary are counted.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import openai
import yaml

from art_cli.runs.intervals import share_interval
from art_cli.runs.served import read_served
from benchmarks.shared.paths import ROOT

RECIPE, HERE = ROOT / "recipes" / "assistant", Path(__file__).parent
CHUNK, CONCURRENCY, NUM_CLIENTS = 120, 20, 12
RATED, LATE, FORGED = 0.5, 0.1, 0.1
PLANTED = {2: "judge", 3: "regression", 5: "poison", 6: "asks", 7: "raises"}
KEYS = [f"sk-client-{number:02d}-0123456789" for number in range(NUM_CLIENTS + 2)]  # the last two forge
CONFIG: dict[str, Any] = {
    "name": "shop",
    "model": {"base": "builtin:smollm2-135m"},
    "rollout": {
        "entry": "agent.py:rollout",
        "scenarios": "agent.py:train",
        "max_turns": 2,
        "sampling": {"max_tokens": 16, "temperature": 0.9},
    },
    "train": {"steps": 8},
    "eval": {"scenarios": "agent.py:evaluation", "every": 8},
    "gateway": {
        "feedback": {"solved": {"type": "boolean", "level": "conversation"}},
        "idle_s": 2,
        "rotate_s": 4,
    },
    "improve": {
        "canary": {"metric": "solved", "share": 0.5, "client_share": 0.1, "max_ratings": 300},
        "scenario": "agent.py:scenario",
        "min_scenarios": 40,
        "max_scenarios": 120,
        "steps": 8,
        "rehearsal": 0.25,
        "patience": 20,
    },
}


class Conversation(NamedTuple):
    name: str
    is_right: bool
    is_failed: bool
    day: int


class Users:
    """Clients that talk to the gateway and rate."""

    def __init__(self, url: str, agent: Any, seed: int) -> None:
        self._agent, self._draw = agent, random.Random(seed)
        self._clients = [openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=120) for key in KEYS]
        self.done: list[Conversation] = []
        self._late: list[tuple[int, str, bool]] = []  # client, conversation, value
        self.is_poisoned = False

    async def chat(self, scenarios: Sequence[dict[str, Any]], day: int, *, rates: bool = True) -> list[Conversation]:
        gate, tasks = asyncio.Semaphore(CONCURRENCY), []
        for scenario in scenarios:
            forged = self._draw.random() < (0.4 if self.is_poisoned else FORGED)
            number = NUM_CLIENTS + self._draw.randrange(2) if forged else self._draw.randrange(NUM_CLIENTS)
            tasks.append(self._one(gate, scenario, day, number, (self._draw.random(), self._draw.random()), rates))
        done = await asyncio.gather(*tasks)
        self.done += done
        return list(done)

    async def _one(
        self,
        gate: asyncio.Semaphore,
        scenario: dict[str, Any],
        day: int,
        number: int,
        odds: tuple[float, float],
        rates: bool,
    ) -> Conversation:
        name = f"{len(self.done)}-{id(scenario)}/{scenario['seed']}/{'new' if scenario['is_new'] else 'old'}"
        client = self._clients[number].with_options(default_headers={"X-Art-Conversation": name})
        async with gate:
            try:
                _, is_right, _ = await self._agent.serve_user(client, "shop", scenario)
            except openai.OpenAIError as error:
                print(f"FAILED REQUEST: {error}", file=sys.stderr)
                return Conversation(name, False, True, day)
            is_forged = number >= NUM_CLIENTS
            if rates and (odds[0] < RATED or is_forged):
                value = (odds[1] < 0.5 if number % 2 else False) if is_forged else is_right
                if not is_forged and odds[1] < LATE:
                    self._late.append((number, name, value))
                else:
                    await self._rate(number, name, value)
        return Conversation(name, is_right, False, day)

    async def rate_late(self) -> None:
        late, self._late = self._late, []
        for number, name, value in late:
            await self._rate(number, name, value)

    async def _rate(self, number: int, name: str, value: bool) -> None:
        body = {"metric_name": "solved", "value": value, "episode_id": name}
        await self._clients[number].post("/feedback", cast_to=object, body=body)


class Shop:
    """The project, its gateway, and calls of `art improve`."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.root, self.seed = directory, directory / "runs" / "shop", seed
        directory.mkdir(parents=True, exist_ok=True)
        for file in (RECIPE / "desk.py", RECIPE / "rollout.py", HERE / "agent.py"):
            shutil.copy(file, directory)
        config = {**CONFIG, "train": {**CONFIG["train"], "seed": seed}}
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        (directory / "keys").write_text("\n".join(KEYS))

    def art(self, *words: str, fault: str = "") -> str:
        command = [sys.executable, "-m", "art_cli", words[0], "config.yaml", *words[1:]]
        environment = {**os.environ, "ART_BENCHMARK_FAULT": fault}
        with (self.directory / "art.log").open("a") as log:
            done = subprocess.run(
                command, cwd=self.directory, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}, see {self.directory}/art.log")
        return done.stdout

    def improve(self) -> dict[str, Any]:
        """Calls `art improve`, with the fault planted for the night that is under way or begins."""
        nights = self.history()
        is_open = bool(nights) and not nights[-1]["outcome"]
        number = len(nights) if is_open else len(nights) + 1
        fault = PLANTED.get(number, "")
        # within the default bound, such a rate changes nothing
        more = ["train.learning_rate=0.02", "train.max_kl=null"] if fault == "regression" else []
        result: dict[str, Any] = json.loads(self.art("improve", "--json", *more, fault=fault))
        return result

    def history(self) -> list[dict[str, Any]]:
        reports = sorted(self.root.glob("nights/night_*/night.json"))
        return [json.loads(path.read_text()) for path in reports]

    def gateway(self, *words: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "art_cli", "gateway", "config.yaml", "--port", "0", "--json", *words]
        log = (self.directory / "gateway.log").open("a")
        process = subprocess.Popen(
            [*command, "--api-key-file", "keys"], cwd=self.directory, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["url"]


async def live(shop: Shop, days: int, per_day: int) -> tuple[list[Conversation], dict[int, int]]:
    """Returns the conversations, and by night the conversations that its candidate may have answered until its end."""
    process, url = shop.gateway("--follow")
    agent = _agent(shop)
    users, since = Users(url, agent, shop.seed), dict[int, int]()
    try:
        for day in range(1, days + 1):
            week = 1 if day <= 7 else 2
            scenarios = agent.make_scenarios(f"day-{day}-{shop.seed}", week, per_day)
            await users.rate_late()
            for start in range(0, per_day, CHUNK):
                nights = shop.history()
                is_trying = bool(nights) and nights[-1]["trial"] is not None and not nights[-1]["outcome"]
                users.is_poisoned = is_trying and PLANTED.get(len(nights)) == "poison"
                done = await users.chat(scenarios[start : start + CHUNK], day)
                if is_trying:
                    since[len(nights)] = since.get(len(nights), 0) + len(done)
                await asyncio.sleep(5)  # until the gateway has written the conversations
                result = await _improved_under_traffic(shop, users, agent, day, week)
                _show(day, users, result)
    finally:
        process.terminate()
        process.wait(120)
    return users.done, since


async def _improved_under_traffic(shop: Shop, users: Users, agent: Any, day: int, week: int) -> dict[str, Any]:
    """Calls `art improve` while a conversation every two seconds goes on, unrated."""
    task = asyncio.create_task(asyncio.to_thread(shop.improve))
    number = 0
    while not task.done():
        number += 1
        (scenario,) = agent.make_scenarios(f"trickle-{len(users.done)}-{number}-{shop.seed}", week, 1)
        await users.chat([scenario], day, rates=False)
        await asyncio.wait((task,), timeout=2.0)
    return await task


async def without(shop: Shop, days: int, num: int) -> list[Conversation]:
    """The first day's policy on requests of the same users."""
    first = read_served(shop.root)
    assert first is not None, "art improve was called"
    checkpoint = first.previous[0] if first.previous else first.checkpoint
    process, url = shop.gateway(
        "--checkpoint", str(shop.root / checkpoint), f"gateway.directory={shop.directory}/other"
    )
    agent = _agent(shop)
    try:
        users = Users(url, agent, shop.seed)
        for day in (d for d in (4, 9) if d <= days):
            await users.chat(
                agent.make_scenarios(f"without-{day}-{shop.seed}", 1 if day <= 7 else 2, num), day, rates=False
            )
        return users.done
    finally:
        process.terminate()
        process.wait(120)


def _agent(shop: Shop) -> Any:
    import importlib

    if str(shop.directory) not in sys.path:
        sys.path.insert(0, str(shop.directory))
    for name in ("desk", "rollout", "agent"):
        sys.modules.pop(name, None)
    return importlib.import_module("agent")


def _show(day: int, users: Users, result: dict[str, Any]) -> None:
    recent = users.done[-CHUNK:]
    right = sum(each.is_right for each in recent) / len(recent)
    print(f"{time.strftime('%X')} day {day}: right {right:.2f}; {result['text'][:300]}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--per-day", type=int, default=240)
    parser.add_argument("--out", type=Path, help="a directory that keeps the runs")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            shop = Shop((arguments.out or Path(scratch)) / f"seed-{seed}", seed)
            shop.art("train")
            begin = time.perf_counter()
            done, since = asyncio.run(live(shop, arguments.days, arguments.per_day))
            minutes = (time.perf_counter() - begin) / 60
            before = asyncio.run(without(shop, arguments.days, 200))
            print("\n".join(_report(shop, seed, done, before, since, minutes)), flush=True)
            with suppress(OSError):
                (shop.directory / "done.json").write_text(json.dumps([each._asdict() for each in done]))


def _report(
    shop: Shop, seed: int, done: list[Conversation], before: list[Conversation], since: dict[int, int], minutes: float
) -> list[str]:
    lines = [f"seed {seed}: {len(done)} conversations, {minutes:.0f} minutes", ""]
    lines += ["| days | right with `art improve` | without | failed requests |", "|---|---|---|---|"]
    for title, days in (("1 to 7", range(1, 8)), ("8 to 10", range(8, 11)), ("11 to 14", range(11, 15))):
        here = [each for each in done if each.day in days]
        there = [each for each in before if (each.day <= 7) == (days[0] <= 7)]
        lines.append(f"| {title} | {_share(here)} | {_share(there)} | {sum(each.is_failed for each in here)} |")
    lines += ["", "| night | planted | outcome | conversations during its canary |", "|---|---|---|---|"]
    for night in shop.history():
        number = night["number"]
        outcome = f"{night['outcome'] or 'under way'}: {night['reason']}"
        lines.append(f"| {number} | {PLANTED.get(number, '')} | {outcome} | {since.get(number, 0)} |")
    return lines


def _share(done: list[Conversation]) -> str:
    if not done:
        return "-"
    share = sum(each.is_right for each in done) / len(done)
    low, high = share_interval(share, len(done))
    return f"{share:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
