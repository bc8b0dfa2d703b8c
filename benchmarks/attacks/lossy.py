"""Training over a network that loses, cuts, delays and repeats, while client and server are killed: nothing is lost.

    python -m benchmarks.attacks.lossy                  # a script of the official SDK on `art backend`, 30 kills
    python -m benchmarks.attacks.lossy --client train   # `art train` with engine and learner on it
    python -m benchmarks.attacks.lossy --kills 10 --seed 3

The client goes on from its last checkpoint whenever it is started again, and the server from the checkpoints on its
disk. Both are killed by SIGKILL at random moments, also while they start. Then the weights and the optimizer's state
are compared, byte for byte, with those of a run without any disturbance, and the updates in the checkpoint are counted.
Attempts of `art train` are sampled one at a time with the run's own seeds, so that they too are the same.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT
from tests.letters.build import build
from tests.support.attacks.lossy_proxy import LossyProxy, Rates
from tests.support.servers.ports import free_port

CLIENT = ROOT / "tests" / "support" / "attacks" / "lossy_client.py"
LETTERS = ROOT / "tests" / "letters" / "config.yaml"
KILL_AFTER_S = 8.0  # a process is killed at most so long after the last kill, which is about twice what a start takes
DEADLINE_S = 400.0
SMALL = ("rollout.groups_per_step=1", "rollout.group_size=3")  # a step has one group of three attempts
FILES = ("adapter_model.safetensors", "optimizer.safetensors")


class Child:
    """A process that is started again whenever it has ended."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self.process: asyncio.subprocess.Process | None = None
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        settings = {"OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, env={**os.environ, **settings}, cwd=ROOT
            )

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Outcome(NamedTuple):
    seconds: float
    kills: Counter[str]
    gave_up: int  # how often the client ended with an error, and was started again
    faults: Counter[str]


class Script:
    """A script of the official SDK, with a checkpoint for each step."""

    def __init__(self, home: Path, steps: int) -> None:
        self._ledger, self._batches = home / "ledger.json", home / "batches.json"
        rows = [[[(7 * step + 3 * row + at) % 250 for at in range(20)] for row in range(2)] for step in range(steps)]
        self._batches.write_text(json.dumps(rows))

    def command(self, address: str) -> list[str]:
        return [sys.executable, str(CLIENT), address, str(self._ledger), str(self._batches)]

    def last(self) -> str:
        """The server's path of the last checkpoint."""
        return str(json.loads(self._ledger.read_bytes())["path"])

    def check(self) -> None:
        """Nothing else to check."""


class Train:
    """`art train` of the letters task, whose weights are on the server."""

    def __init__(self, home: Path, steps: int) -> None:
        self._home, self._steps = home, steps

    def command(self, address: str) -> list[str]:
        there = [
            "engine=tinker",
            "learner=tinker",
            f"engine.base_url={address}",
            f"engine.base_model={self._home / 'base'}",
        ]
        run = [f"runs={self._home}", f"train.steps={self._steps}", "train.keep_checkpoints=99", "eval=null"]
        return [sys.executable, "-m", "art_cli", "train", str(LETTERS), *there, *run, "rollout.concurrency=1", *SMALL]

    def last(self) -> str:
        """The server's path of the last checkpoint."""
        at = self._home / "letters" / "checkpoints" / f"step_{self._steps:04d}" / "remote.json"
        return str(json.loads(at.read_bytes())["state"])

    def check(self) -> None:
        """Each step is there once, with each of its attempts once."""
        files = RunDir(self._home / "letters")
        assert [line.step for line in files.metrics() if line.split == "train"] == list(range(self._steps))
        for step in range(self._steps):
            ids = [trajectory.id for trajectory in files.trajectories(step)]
            assert len(ids) == len(set(ids)) == 3, (step, ids)


CLIENTS = {"script": Script, "train": Train}


async def run(home: Path, made: Script | Train, *, kills: int, seed: int, rates: Rates) -> Outcome:
    """Starts server, proxy and client, kills the two at random moments, and returns when the client is done."""
    begin, port = time.monotonic(), free_port()
    chance, killed, gave_up = random.Random(seed), Counter[str](), 0
    art = [sys.executable, "-m", "art_cli", "backend", "--base", str(home / "base"), "--port", str(port)]
    server = Child("server", [*art, "--checkpoints", str(home / "backend")], home / "server.log")
    proxy = LossyProxy(f"http://127.0.0.1:{port}", seed=seed, rates=rates)
    async with proxy.serve() as address:
        client = Child("client", made.command(address), home / "client.log")
        try:
            await server.start()
            if not kills:
                await asyncio.sleep(5)  # a script's first request may find no server; `art train` says so and ends
            await client.start()
            while True:
                assert client.process is not None
                await _wait(client.process, chance.uniform(0, KILL_AFTER_S) if killed.total() < kills else None)
                if client.process.returncode == 0:
                    return Outcome(time.monotonic() - begin, killed, gave_up, proxy.counts)
                assert time.monotonic() - begin < DEADLINE_S, f"not done; {killed}; {proxy.counts}; {home}"
                if client.process.returncode is not None:
                    gave_up += 1
                    await client.start()
                    continue
                victim = chance.choice((server, client))
                killed[victim.name] += 1
                await victim.kill()
                await victim.start()
        finally:
            await client.kill()
            await server.kill()


async def _wait(process: asyncio.subprocess.Process, timeout_s: float | None) -> None:
    try:
        await asyncio.wait_for(process.wait(), DEADLINE_S if timeout_s is None else timeout_s)
    except TimeoutError:
        return


def final(home: Path, path: str) -> tuple[list[bytes], int]:
    """The files of the checkpoint at that path of the server, and how many updates its manifest counts."""
    at = home / "backend" / path.removeprefix("tinker://")
    return [(at / name).read_bytes() for name in FILES], json.loads((at / "manifest.json").read_bytes())["step"]


async def compare(directory: Path, client: str, steps: int, kills: int, seed: int) -> bool:
    """Prints what happened to the disturbed run, and returns whether it ended as the undisturbed one."""
    ends = []
    for name, num_kills, rates in (("undisturbed", 0, Rates.none()), ("disturbed", kills, Rates())):
        home = directory / name
        home.mkdir()
        build(home / "base")
        made = CLIENTS[client](home, steps)
        found = await run(home, made, kills=num_kills, seed=seed, rates=rates)
        made.check()
        ends.append(final(home, made.last()))
        print(f"{name}: {steps} steps in {found.seconds:.0f} s, updates in the last checkpoint: {ends[-1][1]}")
        if num_kills:
            print(f"killed: {dict(found.kills)}; the client ended with an error and was started again: {found.gave_up}")
            errors = re.findall(r"(?m)^error: (.*)$", (home / "client.log").read_text(errors="replace"))
            for line, count in Counter(
                re.sub(r"[0-9a-f]{8,}\S*|:\d{4,}", "...", line) for line in errors
            ).most_common():
                print(f"    {count} x error: {line[:230]}")
            print(f"requests: {', '.join(f'{what} {count}' for what, count in found.faults.most_common())}")
    is_same, is_counted = ends[0][0] == ends[1][0], ends[0][1] == ends[1][1] == steps
    print(f"weights and optimizer state are the same bytes: {is_same}; each update is there once: {is_counted}")
    return is_same and is_counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", choices=sorted(CLIENTS), default="script")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lossy-") as directory:
        if not asyncio.run(compare(Path(directory), options.client, options.steps, options.kills, options.seed)):
            raise SystemExit("the two runs differ")


if __name__ == "__main__":
    main()
