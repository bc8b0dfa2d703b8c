"""Two vLLM servers against one, routing by group against routing at random, and one server killed in the middle.

    python -m benchmarks.replicas             # with .venv-vllm (make setup-vllm); about three minutes on 2 cores
    python -m benchmarks.replicas --python /path/to/bin/python

The model is tests/letters' random Qwen3 of two layers, whose tokens are bytes. Each of GROUPS groups has a prompt of
its own of PREFIX tokens, and ATTEMPTS attempts make CALLS calls each. All settings use the same two servers, in turn;
"one" sends every call to the first. Every round has new prompts. vLLM counts itself how many prompt tokens its prefix
cache had. Then one of the two gets SIGKILL in the middle of a round, through the same engine.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import aiohttp

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import LoraConfig, ModelConfig, VllmEngineConfig
from art_cli.engines.vllm.replicas import Replica, VllmReplicas
from art_cli.engines.vllm.routing import Router
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.models.policy_spec import read_spec
from art_cli.runtime.errors import EngineError

HERE = Path(__file__).parent
LETTERS = HERE.parent / "tests" / "letters"

GROUPS, ATTEMPTS, CALLS = 8, 8, 2
PREFIX, TOKENS = 400, 16  # of the prompt that a group shares; sampled by each call
CONCURRENCY, ROUNDS = 16, 5
WAIT_S = 240.0  # longest wait for a server to be back
HITS = re.compile(rb"^vllm:prefix_cache_(queries|hits)_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)


class Round(NamedTuple):
    tokens_per_s: float
    hit_share: float  # part of the prompts' tokens that a prefix cache had
    num_failed: int


class AtRandom(Router):
    def choose(self, request: Request, in_flight: Mapping[int, int]) -> int:
        return random.choice(list(in_flight))


class FirstOnly(Router):
    def choose(self, request: Request, in_flight: Mapping[int, int]) -> int:
        return min(in_flight)


async def play(engine: VllmReplicas, name: str) -> Round:
    """One round of all groups, whose prompts nothing has seen before."""
    slots, before, begin = asyncio.Semaphore(CONCURRENCY), await counts(engine), time.perf_counter()
    attempts = [(group, attempt) for attempt in range(ATTEMPTS) for group in range(GROUPS)]
    done = await asyncio.gather(*(attempt_at(engine, name, *which, slots) for which in attempts))
    took = time.perf_counter() - begin
    asked, hit = (after - earlier for after, earlier in zip(await counts(engine), before, strict=True))
    failed = sum(tokens is None for tokens in done)
    return Round(sum(tokens or 0 for tokens in done) / took, hit / asked if asked else 0.0, failed)


async def attempt_at(engine: VllmReplicas, name: str, group: int, attempt: int, slots: asyncio.Semaphore) -> int | None:
    """Number of tokens sampled; None where a call failed. The prompts begin with the group's."""
    words = random.Random(f"{name} {group}").choices("abcdefghijklmnopqrstuvwxyz ", k=PREFIX)
    messages = [{"role": "user", "content": "".join(words) + f" {attempt}"}]
    num_sampled = 0
    async with slots:
        for number in range(CALLS):
            sampling = Sampling(max_tokens=TOKENS, seed=attempt * CALLS + number)
            request = Request(model="policy", messages=messages, sampling=sampling, group=f"{name} {group}")
            try:
                (choice,) = (await engine.reply(request)).choices
            except ChatError:
                return None
            num_sampled += len(choice.token_ids)
            messages = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": str(number)}]
    return num_sampled


async def counts(engine: VllmReplicas) -> tuple[float, float]:
    """Prompt tokens looked up in the prefix caches of the servers that answer, and those found."""
    found = {b"queries": 0.0, b"hits": 0.0}
    for replica in engine.replicas:
        if replica.can_answer:
            control, key = replica.engine._server.control, replica.engine._server.key
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{control.root}/metrics") as got:
                for what, number in HITS.findall(await got.read()):
                    found[what] += float(number)
    return found[b"queries"], found[b"hits"]


async def kill(engine: VllmReplicas) -> str:
    """What became of a round in whose middle the second server is killed."""
    victim: Replica = engine.replicas[1]
    playing = asyncio.create_task(play(engine, "killed"))
    await until(lambda: victim.num_requests >= CONCURRENCY // 4)
    await asyncio.sleep(0.3)
    held, num_moved, begin = victim.num_requests, engine.num_moved, time.perf_counter()
    os.kill(victim.engine.pid, signal.SIGKILL)
    await until(lambda: not victim.can_answer)
    noticed = time.perf_counter() - begin
    result = await playing
    await until(lambda: victim.can_answer)
    back = time.perf_counter() - begin
    return (
        f"One of the two killed in the middle of a round: it held {held} calls, {engine.num_moved - num_moved} moved, "
        f"{GROUPS * ATTEMPTS - result.num_failed} of {GROUPS * ATTEMPTS} attempts are there. Its end was noticed after "
        f"{noticed:.2f} s; it was back with its adapter after {back:.0f} s."
    )


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.005)


async def measure(python: Path, directory: Path) -> None:
    engine = make_engine(python, directory)
    await engine.start()
    try:
        routers: dict[str, Router] = {
            "one server": FirstOnly(2),
            "two, by group": Router(2),
            "two, at random": AtRandom(2),
        }
        rounds: dict[str, list[Round]] = {name: [] for name in routers}
        for number in range(ROUNDS + 1):  # the first one warms up
            for name, engine.router in routers.items():
                rounds[name].append(await play(engine, f"{name} {number}"))
        base = statistics.median(each.tokens_per_s for each in rounds["one server"][1:])
        if not base:
            raise EngineError("every call failed")
        print("| setting | tokens/s | to one server | prefix hits, share of prompt tokens | failed |")
        print("|---|---|---|---|---|")
        for name, played in rounds.items():
            speed = statistics.median(each.tokens_per_s for each in played[1:])
            hits = statistics.median(each.hit_share for each in played[1:])
            failed = sum(each.num_failed for each in played)
            print(f"| {name} | {speed:.0f} | {speed / base:.2f} | {hits:.3f} | {failed} |")
        engine.router = Router(2)
        print("\n" + await kill(engine))
    finally:
        await engine.close()


def make_engine(python: Path, directory: Path) -> VllmReplicas:
    sys.path.insert(0, str(LETTERS.parent.parent))
    from tests.letters.build import build_wide

    build_wide(directory / "base")
    policy = read_spec(ModelConfig(base=str(directory / "base"), lora=LoraConfig(rank=4)), str(directory / "base"))
    settings = {
        "args": {"enforce-eager": True},
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"},
    }
    config = VllmEngineConfig.model_validate({"name": "vllm", "python": python, "replicas": 2, **settings})
    engine = VllmReplicas(config, policy, name="policy", logs=directory)
    assert all(isinstance(replica.engine, VllmEngine) for replica in engine.replicas)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-vllm" / "bin" / "python")
    python = parser.parse_args().python.absolute()
    with tempfile.TemporaryDirectory(prefix="art-replicas-") as scratch:
        asyncio.run(measure(python, Path(scratch)))


if __name__ == "__main__":
    main()
