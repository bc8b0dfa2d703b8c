"""Tokens per second of the embedded engine against transformers: same weights, prompts, dtype and process, in turn.

    python -m benchmarks.speed.sampling  # the table that is claimed, about 4 minutes on 2 cores
    python -m benchmarks.speed.sampling --case alone --repeats 3  # part of it; --size 1M, --dtype bfloat16, --lora

Cases: `alone`, 32 prompts of 200 tokens, 64 new ones each; `groups`, 4 prompts of 800 tokens, 8 attempts at each;
`turns`, 32 conversations of 6 turns, 200 tokens first, then 32 new ones and 20 of the other side in each. All sample at
temperature 1; before each repeat the engine forgets what it computed, as after a training step.

The other sides, at the best a user can do with them:
  generate         one batch of equal lengths, nothing padded; dynamic KV cache (a static one was not faster)
  generate, cache  turns only: it keeps its past_key_values from turn to turn, which asks for conversations in lockstep
  generate_batch   continuous batching with paged attention; slow here, so a part of the case, once: its rate is given
"""

import argparse
import asyncio
import json
import logging
import statistics
import time
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from art_cli.chat.requests import Request, Sampling
from art_cli.config.schema import EmbeddedEngineConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.models.weights import Weights
from art_cli.runtime import openmp
from benchmarks.shared.models import SIZES, build

Prompts = list[list[int]]
Row = dict[str, Any]
SLOW_SECONDS = 8.0  # a side that takes longer than this is repeated less
SLOW_REPEATS = 2
ASIDE_REPEATS = 3  # repetitions of cases for which no figure is claimed
# Of generate_batch: without these it fills most of the free memory with pages first, which takes 20 s.
NUM_BLOCKS = 64


class Side:
    """One that samples: `sample(prompts, num)` gives `num` new tokens to each prompt; prompts of a case only grow."""

    async def sample(self, prompts: Prompts, num: int) -> Prompts:
        raise NotImplementedError

    def forget(self) -> None:
        """What was computed for earlier prompts is of no use any more."""


class Embedded(Side):
    def __init__(self, engine: EmbeddedEngine, weights: Weights) -> None:
        self._engine, self._weights = engine, weights

    async def sample(self, prompts: Prompts, num: int) -> Prompts:
        requests = [
            Request(model="policy", prompt=ids, sampling=Sampling(max_tokens=num, ignore_eos=True)) for ids in prompts
        ]
        replies = await asyncio.gather(*map(self._engine.reply, requests))
        return [reply.choices[0].token_ids for reply in replies]

    def forget(self) -> None:
        self._weights.version += 1


class Generate(Side):
    def __init__(self, weights: Weights, *, keeps_cache: bool = False) -> None:
        self._model, self._keeps_cache = weights.model, keeps_cache
        self._cache: transformers.DynamicCache | None = None

    async def sample(self, prompts: Prompts, num: int) -> Prompts:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            cache = self._cache if self._keeps_cache and self._cache is not None else self.new_cache(ids)
            whole = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
            )
        self._cache = cache
        sampled: Prompts = whole[:, ids.shape[1] :].tolist()
        return sampled

    def new_cache(self, ids: torch.Tensor) -> transformers.DynamicCache:
        """The cache of prompts [prompt, token] that were not there before."""
        return transformers.DynamicCache()

    def forget(self) -> None:
        self._cache = None


class GenerateBatch(Side):
    def __init__(self, weights: Weights) -> None:
        self._model = weights.model

    async def sample(self, prompts: Prompts, num: int) -> Prompts:
        config: Any = transformers.GenerationConfig  # untyped there
        outputs = self._model.generate_batch(
            inputs=prompts,
            generation_config=config(max_new_tokens=num, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=NUM_BLOCKS, page_size=256, max_batch_tokens=2048
            ),
            warmup=False,
        )
        return [list(output.generated_tokens) for output in outputs.values()]


class Case(NamedTuple):
    prompts: int
    prompt_tokens: int
    new_tokens: int
    group: int = 1  # attempts at each prompt
    turns: int = 1

    def smaller(self) -> "Case":
        """A quarter of the prompts and a third of the turns, for a side that is slow."""
        return self._replace(prompts=max(1, self.prompts // 4), turns=max(1, self.turns // 3))


def tokens(random: np.random.Generator, num: int) -> list[int]:
    ids: list[int] = random.integers(0, 1000, num).tolist()
    return ids


async def play(case: Case, side: Side, random: np.random.Generator) -> int:
    firsts = [tokens(random, case.prompt_tokens) for _ in range(case.prompts)]
    histories = [list(first) for first in firsts for _ in range(case.group)]
    for _ in range(case.turns):
        replies = await side.sample(histories, case.new_tokens)
        assert all(len(reply) == case.new_tokens for reply in replies)
        for history, reply in zip(histories, replies, strict=True):
            history += [*reply, *tokens(random, 20)]
    return len(histories) * case.turns * case.new_tokens


CASES = {
    "alone": Case(prompts=32, prompt_tokens=200, new_tokens=64),
    "groups": Case(prompts=4, prompt_tokens=800, new_tokens=64, group=8),
    "turns": Case(prompts=32, prompt_tokens=200, new_tokens=32, turns=6),
}


class Taken(NamedTuple):
    """One run of a case by one side."""

    wall_s: float
    cpu_s: float  # processor time of all threads
    tokens: int


async def take(case: Case, side: Side, seed: int) -> Taken:
    side.forget()
    wall, cpu = time.perf_counter(), time.process_time()
    num = await play(case, side, np.random.default_rng(seed))
    taken = Taken(time.perf_counter() - wall, time.process_time() - cpu, num)
    openmp.release_pool()  # so that each side computes as in a process of its own
    return taken


async def measure(name: str, weights: Weights, repeats: int, *, with_batch: bool) -> list[Row]:
    """A row per side: medians, the ratios of their rates to the embedded engine's."""
    case = CASES[name]
    engine = EmbeddedEngine(weights, name="policy", config=EmbeddedEngineConfig())
    await engine.start()
    sides: dict[str, Side] = {"embedded": Embedded(engine, weights), "generate": Generate(weights)}
    if case.turns > 1:
        sides["generate, cache"] = Generate(weights, keeps_cache=True)
    taken: dict[str, list[Taken]] = {side: [] for side in sides}
    await take(case.smaller(), sides["embedded"], seed=-1 % 2**32)  # kernels chosen, memory touched
    for repeat in range(repeats):
        for side, runs in taken.items():
            if repeat < SLOW_REPEATS or runs[0].wall_s < SLOW_SECONDS:
                runs.append(await take(case, sides[side], repeat))
    await engine.close()
    if with_batch:
        taken["generate_batch"] = [await take(case.smaller(), GenerateBatch(weights), 0)]
    shared = {"case": name, "dtype": weights.dtype_name, "lora": weights.has_adapter}
    return [{**shared, **_row(side, runs, taken["embedded"])} for side, runs in taken.items()]


def _row(side: str, runs: list[Taken], embedded: list[Taken]) -> Row:
    wall, cpu = _rate(runs, "wall_s"), _rate(runs, "cpu_s")
    return {
        "side": side,
        "repeats": len(runs),
        "tokens": runs[0].tokens,
        "wall_s": round(statistics.median(run.wall_s for run in runs), 2),
        "wall_spread_s": [round(pick(run.wall_s for run in runs), 2) for pick in (min, max)],
        "cpu_s": round(statistics.median(run.cpu_s for run in runs), 2),
        "tokens_per_s": round(wall),
        "embedded_is_faster": round(_rate(embedded, "wall_s") / wall, 2),
        "embedded_is_faster_cpu": round(_rate(embedded, "cpu_s") / cpu, 2),
    }


def _rate(runs: list[Taken], clock: str) -> float:
    seconds: list[float] = [getattr(run, clock) for run in runs]
    return runs[0].tokens / statistics.median(seconds)


def rows(repeats: int = 5) -> list[Row]:
    """The table that is claimed: every case in float32, `alone` also in bfloat16 and with an unmerged adapter."""
    plain = build("24M", has_adapter=False)
    found = [row for name in CASES for row in asyncio.run(measure(name, plain, repeats, with_batch=True))]
    for has_adapter, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        weights = build("24M", has_adapter=has_adapter, dtype=dtype)
        found += asyncio.run(measure("alone", weights, min(repeats, ASIDE_REPEATS), with_batch=False))
    return found


COLUMNS = ("case", "dtype", "lora", "side", "repeats", "tokens", "wall_s", "wall_spread_s", "cpu_s", "tokens_per_s",
           "embedded_is_faster", "embedded_is_faster_cpu")  # fmt: skip


def table(found: list[Row]) -> str:
    """Markdown."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *([str(row[column]) for column in COLUMNS] for row in found)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--size", choices=SIZES, default="24M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--no-batch", action="store_true", help="leave generate_batch out")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if arguments.case is None:
        found = rows(arguments.repeats)
    else:
        weights = build(arguments.size, has_adapter=arguments.lora, dtype=getattr(torch, arguments.dtype))
        with_batch = not arguments.no_batch
        found = asyncio.run(measure(arguments.case, weights, arguments.repeats, with_batch=with_batch))
    print(json.dumps(found, indent=1) if arguments.json else table(found))


if __name__ == "__main__":
    main()
