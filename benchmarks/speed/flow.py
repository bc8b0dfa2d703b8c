"""Rollouts per second with `rollout.concurrency: auto` against fixed numbers, with one engine, in turn.

    python -m benchmarks.speed.flow                                  # SmolLM2-135M, embedded engine with 32 slots
    python -m benchmarks.speed.flow --engine vllm --python .venv-vllm/bin/python
    python -m benchmarks.speed.flow --base builtin:tiny --num 32 --repeats 1 --fixed 8 32     # to see that it works

Shapes: `single`, one turn; `tools`, four turns with a tool that takes a second after each; `mixed`, one turn after
prompts of very different lengths. Every repeat plays each number once, in another order, with new prompts.
auto finds its number before the first repeat and keeps it, as in a run. Wanted: within 5 % of the best fixed number.
"""

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.loop.policy_sampler import open_sampler
from art_cli.loop.stage_policy import find_policy, open_policy
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import threads
from benchmarks.shared.real_model import smollm2

SLOTS = 32
FIXED = (8, 16, 32, 64, 128)
WORDS = ["red", "seven", "house", "quick", "river", "under", "tall", "open"]
SHAPES = ("single", "tools", "mixed")


# --- the agents, which the runner loads from this file ----------------------------------------------------------------


async def _ask(policy: Any, messages: list[Any]) -> Any:
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return reply.choices[0].message


async def single(policy: Any, scenario: dict[str, Any]) -> float:
    await _ask(policy, [{"role": "user", "content": scenario["text"]}])
    return 1.0


async def tools(policy: Any, scenario: dict[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": scenario["text"]}]
    for _ in range(4):
        messages += [await _ask(policy, messages), {"role": "user", "content": "the tool says no"}]
        await asyncio.sleep(1.0)
    return 1.0


mixed = single


# --- the measurement --------------------------------------------------------------------------------------------------


class Plans:
    """Plans of one shape, each with a prompt of its own."""

    def __init__(self, shape: str) -> None:
        self._lengths = (20, 600) if shape == "mixed" else (40, 60)  # words
        self._numbers = itertools.count()
        self._chance = random.Random(0)

    def next(self, num: int) -> list[RolloutPlan]:
        return [self._plan(next(self._numbers)) for _ in range(num)]

    def _plan(self, number: int) -> RolloutPlan:
        text = f"{number} " + " ".join(self._chance.choices(WORDS, k=self._chance.randint(*self._lengths)))
        scenario, name = {"id": str(number), "text": text}, str(number)
        return RolloutPlan(trajectory_id=name, group_id=name, group_size=1, index=0, scenario=scenario, step=0)


async def rate(runner: Runner, plans: list[RolloutPlan]) -> float:
    """Returns rollouts per second."""

    def check(played: Trajectory) -> None:
        assert played.error is None, played.error

    begin = time.perf_counter()
    await runner.run(plans, check)
    return len(plans) / (time.perf_counter() - begin)


@contextlib.asynccontextmanager
async def runners(loaded: LoadedConfig, directory: Path, fixed: list[int]) -> AsyncIterator[dict[str, Runner]]:
    """Yields the runners by their numbers, auto first, all with one engine."""
    source = find_policy(loaded, None)
    with open_policy(loaded, source) as policy:
        async with (
            open_sampler(loaded, policy, checkpoint=None, step=0, logs=directory) as sampler,
            contextlib.AsyncExitStack() as stack,
        ):
            found = {"auto": sampler.runner}
            for number in fixed:
                config = loaded.config.rollout.model_copy(update={"concurrency": number})
                found[str(number)] = await stack.enter_async_context(Runner(config, loaded.directory, sampler.gateway))
            yield found


async def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "agents.py").write_text(Path(__file__).read_text())
        engine = {"name": "embedded", "max_batch": SLOTS}
        if options.engine == "vllm":
            engine = {"name": "vllm", "python": str(options.python), "args": {"enforce-eager": True}}
        rollout = {"entry": f"agents.py:{shape}", "scenarios": "none", "processes": 0, "sampling": {"max_tokens": 48}}
        config = {"model": {"base": options.base, "lora": {}}, "engine": engine, "rollout": rollout, "runs": scratch}
        (directory / "config.yaml").write_bytes(msgspec.yaml.encode(config))
        plans = Plans(shape)
        rates: dict[str, list[float]] = {}
        async with runners(load_config(directory / "config.yaml", []), directory, options.fixed) as found:
            await rate(found["auto"], plans.next(4 * options.num))
            for repeat in range(options.repeats):
                names = list(found)[repeat % len(found) :] + list(found)[: repeat % len(found)]
                for name in names:
                    rates.setdefault(name, []).append(await rate(found[name], plans.next(options.num)))
            medians = {name: statistics.median(each) for name, each in sorted(rates.items())}
            best = max(medians[str(number)] for number in options.fixed)
            return {"medians": medians, "share": medians["auto"] / best, "chosen": str(found["auto"].concurrency)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument("--python", type=Path, help="the Python that has vLLM")
    parser.add_argument("--base", help="the base model; by default SmolLM2-135M")
    parser.add_argument("--num", type=int, default=256, help="rollouts of one measurement")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fixed", nargs="+", type=int, default=list(FIXED))
    options = parser.parse_args()
    options.base = options.base or str(smollm2() or parser.error("SmolLM2 is not installed; name a model by --base"))
    for shape in options.shapes:
        row = threads.run(measure(shape, options))
        rates = "  ".join(f"{name} {value:.2f}" for name, value in row["medians"].items())
        print(f"{shape:7} {options.engine}: rollouts/s {rates}; auto / best {row['share']:.3f}", flush=True)
        print(f"        auto is {row['chosen']}", flush=True)


if __name__ == "__main__":
    main()
