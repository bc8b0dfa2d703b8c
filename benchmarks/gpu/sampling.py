"""Rows of engines: vLLM and the embedded one sample the same prompts; then the learner scores what they sampled.

One vLLM server does all that is asked of it: its start takes a minute or two.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import cards
from benchmarks.gpu.memory import used_gb, watched
from benchmarks.gpu.order import Order
from benchmarks.gpu.shapes import adapter_of, base_of, config_of, load_of, num_multiplied

Figures = dict[str, Any]
NUM_SCORED = 8  # sampled sequences that the learner scores
NUM_SWAPS = 4
NUM_IDS = 1000  # token ids of prompts are drawn below this
# Without a GPU: nothing to compile, no threads that wait for each other where cores are shared, and the worker in
# the engine's process, as on one GPU. On a CPU vLLM would start one more process, which imports for 23 s.
QUICK: dict[str, Any] = {
    "args": {"enforce-eager": True},
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
}


def base(order: Order) -> Iterator[Figures]:
    """The model on disk, which every other row of the shape reads."""
    begin = time.perf_counter()
    path = base_of(order)
    yield {"build_s": time.perf_counter() - begin}
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    yield {"disk_gb": size / 1e9, "multiplied": _num_multiplied(order)}


def matmul(order: Order) -> Iterator[Figures]:
    """What a large product reaches here, and what the card's data sheet says."""
    measured = cards.measured_peak(order.dtype, is_small=order.is_small)
    known = cards.known_peak(order.card)
    yield {"tflops": measured, "sheet_tflops": known or "unknown", **({"mfu": measured / known} if known else {})}


# --- tokens per second ------------------------------------------------------------------------------------------------


def embedded(order: Order) -> Iterator[Figures]:
    """The embedded engine, adapter unmerged or merged as it does itself."""
    from art_cli.config.schema import EmbeddedEngineConfig
    from art_cli.engines.embedded.embedded_engine import EmbeddedEngine

    weights = _weights(order)
    engine = EmbeddedEngine(weights, name="policy", config=EmbeddedEngineConfig())

    def forget() -> None:
        weights.version += 1

    with asyncio.Runner() as runner:
        runner.run(engine.start())
        replies: list[Any] = []
        try:
            yield from _sample(order, runner, engine, replies, forget)
            yield {"memory_gb": used_gb()}
            probed = runner.run(_score(order, engine))
        finally:
            runner.run(engine.close())
    yield _gap(order, weights, replies, probed)


def vllm(order: Order) -> Iterator[Figures]:
    """A vLLM server of ours: start, tokens per second, adapter swap, sleep and wake where there is a GPU; when it is
    gone, its gap to the learner in tokens that it sampled and in a probe of random ids."""
    replies: list[Any] = []
    with asyncio.Runner() as runner, watched() as memory:
        engine, start_s = _start_vllm(order, runner)
        try:
            yield {"start_s": start_s}
            runner.run(engine.load(adapter_of(order, "a"), 1))
            yield from _sample(order, runner, engine, replies, lambda: None)
            yield {"memory_gb": memory.gb if order.has_gpu else sum(_resident_gb(pid) for pid in _family(engine.pid))}
            yield runner.run(_swaps(order, engine))
            if order.has_gpu:
                yield runner.run(_sleeps(order, engine))
            probed = runner.run(_score(order, engine))
        finally:
            runner.run(engine.close())
    yield _gap(order, _weights(order), replies, probed)


def _sample(order: Order, runner: asyncio.Runner, engine: Any, replies: list[Any], forget: Any) -> Iterator[Figures]:
    """Figures of sampling the batch again and again; `replies` are those of the last time."""
    from benchmarks.gpu.task import prompt_ids

    load = load_of(order)
    tokens: list[int] = []
    seconds: list[float] = []
    for repeat in range(load.repeats + 1):
        prompts = prompt_ids(load.prompts, load.prompt_tokens, seed=repeat, vocabulary=NUM_IDS)
        requests = [_request(ids, load.new_tokens) for ids in prompts for _ in range(load.attempts)]
        forget()
        begin = time.perf_counter()
        replies[:] = runner.run(_all(engine, requests))
        wall = time.perf_counter() - begin
        if repeat:
            tokens.append(sum(len(reply.choices[0].token_ids) for reply in replies))
            seconds.append(wall)
    rate = statistics.median(tokens) / statistics.median(seconds)
    operations = 2e-12 * _num_multiplied(order) * (1 + load.prompt_tokens / load.attempts / load.new_tokens)
    yield {
        "requests": len(replies),
        "tokens": statistics.median(tokens),
        "seconds": statistics.median(seconds),
        "tokens_per_s": rate,
        "mfu": operations * rate / cards.peak(order),
    }


def _request(ids: list[int], num: int) -> Any:
    from art_cli.chat.requests import Request, Sampling

    return Request(model="policy", prompt=ids, sampling=Sampling(max_tokens=num, ignore_eos=True))


async def _all(engine: Any, requests: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*(engine.backend.reply(request) for request in requests)))


# --- vLLM's server ----------------------------------------------------------------------------------------------------


def _start_vllm(order: Order, runner: asyncio.Runner) -> tuple[Any, float]:
    from art_cli.config.schema import VllmEngineConfig
    from art_cli.engines.vllm.vllm_engine import VllmEngine
    from art_cli.models.policy_spec import read_spec

    path = base_of(order)
    settings: dict[str, Any] = {"name": "vllm", "python": order.vllm_python()}
    settings |= {"sleep": 1} if order.has_gpu else QUICK
    logs = order.directory / "logs" / order.name
    logs.mkdir(parents=True, exist_ok=True)
    spec = read_spec(config_of(order, path), str(path))
    begin = time.perf_counter()

    async def start() -> Any:
        engine = VllmEngine(VllmEngineConfig.model_validate(settings), spec, name="policy", logs=logs)
        await engine.start()
        return engine

    return runner.run(start()), time.perf_counter() - begin


async def _swaps(order: Order, engine: Any) -> Figures:
    """Seconds from the call that loads an adapter to the first token sampled with it."""
    probe = _probe(order)
    seconds: list[float] = []
    scores: list[list[float]] = []
    for number in range(NUM_SWAPS):
        begin = time.perf_counter()
        await engine.load(adapter_of(order, "ba"[number % 2]), number + 2)
        await engine.backend.reply(_request(probe, 1))
        seconds.append(time.perf_counter() - begin)
        scores.append(await engine.score(probe))
    return {
        "swap_s": statistics.median(seconds),
        "swap_moves": _distance(scores[-1], scores[-2]),  # the two adapters differ
        "swap_returns": _distance(scores[-1], scores[-3]),  # and each is itself again
    }


async def _sleeps(order: Order, engine: Any) -> Figures:
    probe = _probe(order)
    before, awake_gb = await engine.score(probe), used_gb()
    begin = time.perf_counter()
    await engine.sleep()
    slept = time.perf_counter()
    asleep_gb = used_gb()
    woken = time.perf_counter()
    await engine.wake()
    return {
        "sleep_s": slept - begin,
        "wake_s": time.perf_counter() - woken,
        "awake_gb": awake_gb,
        "asleep_gb": asleep_gb,
        "freed_gb": awake_gb - asleep_gb,
        "wake_gap": _distance(before, await engine.score(probe)),
    }


def _probe(order: Order) -> list[int]:
    from benchmarks.gpu.task import prompt_ids

    return prompt_ids(1, load_of(order).prompt_tokens, seed=99, vocabulary=NUM_IDS)[0]


async def _score(order: Order, engine: Any) -> list[float]:
    """Returns the probe's logprobs under the adapter that was loaded last, which is "a"."""
    scores: list[float] = await engine.score(_probe(order))
    return scores


def _family(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that ended meanwhile
            found += [child for each in task.read_text().split() for child in _family(int(each))]
    return found


def _resident_gb(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    return 0.0


# --- engine against learner -------------------------------------------------------------------------------------------


def _weights(order: Order) -> Any:
    from art_cli.models.loading import load_weights
    from art_cli.models.saved_weights import load_checkpoint

    path = base_of(order)
    weights = load_weights(config_of(order, path), str(path))
    load_checkpoint(weights, adapter_of(order, "a"))
    return weights


def _gap(order: Order, weights: Any, replies: list[Any], probed: list[float]) -> Figures:
    """Mean and largest |engine - learner| in nats, over tokens that the engine sampled with adapter "a"; the mean over
    the probe as well."""
    from benchmarks.step.batches import make_learner

    learner = make_learner(weights)
    gaps = []
    for reply in replies[:NUM_SCORED]:
        [choice] = reply.choices
        scored = learner.score(reply.prompt_ids + choice.token_ids)[-len(choice.token_ids) :]
        gaps += [abs(ours - theirs) for ours, theirs in zip(choice.logprobs, scored, strict=True)]
    probe_gap = _distance(probed, learner.score(_probe(order)))
    return {"gap": statistics.mean(gaps), "gap_max": max(gaps), "gap_tokens": len(gaps), "probe_gap": probe_gap}


def _distance(left: list[float], right: list[float]) -> float:
    """Mean |difference| in nats."""
    return statistics.mean(abs(a - b) for a, b in zip(left, right, strict=True))


def _num_multiplied(order: Order) -> int:
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(base_of(order))
    return num_multiplied(config)
