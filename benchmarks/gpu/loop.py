"""The whole loop on a GPU: `art train` with an engine, and TRL's GRPOTrainer with vLLM colocated; the same work.

A step is from the end of the one before to its own end, everything between included: ours with checkpoint, proof and
files; TRL's with neither saving nor logging. The first step of each is left out, because both compile in it.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.order import NotHere, Order
from benchmarks.gpu.shapes import RANK, base_of, config_of, load_of
from benchmarks.gpu.task import scenarios

HERE = Path(__file__).parent
Figures = dict[str, Any]
LEARNING_RATE = 1e-5
TRL_ENTRY = "benchmarks.gpu.trl_loop"


def vllm(order: Order) -> Iterator[Figures]:
    """`art train` with a vLLM server, which sleeps while the learner works where they share the GPU."""
    from benchmarks.gpu.cards import card_name

    settings = ["engine=vllm", f"engine.python={order.vllm_python()}"]
    if card_name() == "CPU":
        settings += ["+engine.args={enforce-eager: true}"]
        settings += ["+engine.env={VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1'}"]
    yield from _train(order, settings)


def embedded(order: Order) -> Iterator[Figures]:
    """`art train` with the embedded engine, one copy of the weights with the learner."""
    yield from _train(order, ["engine=embedded"])


def _train(order: Order, settings: list[str]) -> Iterator[Figures]:
    from art_cli.runs.durable import remove, write_lines
    from art_cli.runs.run_dir import RunDir
    from benchmarks.gpu.memory import watched

    base = base_of(order)
    load, model = load_of(order), config_of(order, base)
    directory = order.directory / f"{order.row}-{order.shape}"
    if directory.exists():  # of an earlier time, from which `art train` would go on
        remove(directory)
    directory.mkdir(parents=True)
    played = directory / "scenarios.jsonl"
    write_lines(played, scenarios(load.prompt_tokens))
    settings = settings + [
        f"model.base={base}", f"model.dtype={order.dtype}", f"model.max_length={model.max_length}",
        f"model.lora={{rank: {RANK}, alpha: {2 * RANK}}}", "learner=torch", f"rollout.scenarios={played}",
        f"rollout.groups_per_step={load.prompts}", f"rollout.group_size={load.attempts}",
        f"rollout.sampling={{max_tokens: {load.new_tokens}}}", f"train.learning_rate={LEARNING_RATE}",
        f"train.steps={load.repeats + 1}", f"runs={directory}", "name=run",
    ]  # fmt: skip
    if order.is_small:
        settings.append("rollout.processes=1")
    command = [sys.executable, "-m", "art_cli", "train", str(HERE / "config.yaml"), *settings]
    with watched() as memory:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise RuntimeError(f"art train: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    lines = [line for line in RunDir(directory / "run").metrics() if line.split == "train"]
    steps = [(after.time - before.time, after.metrics) for before, after in pairwise(lines)]
    walls = [wall for wall, _ in steps]
    yield {
        "step_s": statistics.median(walls),
        "step_s_range": [min(walls), max(walls)],
        **{name: statistics.median(metrics[name] for _, metrics in steps) for name in ("sample_s", "train_s")},
        "attempts": statistics.median(metrics["num_trajectories"] for _, metrics in steps),
        "failed": max(metrics["num_failed"] for _, metrics in steps),
        "tokens": statistics.median(metrics["tokens_sampled"] for _, metrics in steps),
        "gap": max(metrics["logprob_gap"] for _, metrics in steps if "logprob_gap" in metrics),
        "probe_gap": max(metrics["probe_gap"] for _, metrics in steps if "probe_gap" in metrics),
        "reward": statistics.mean(metrics["reward_mean"] for _, metrics in steps),
        "memory_gb": memory.gb,
    }


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_large(order: Order) -> Iterator[Figures]:
    """TRL with micro-batches of 64 sequences."""
    yield from _trl(order, batch=64)


def trl(order: Order) -> Iterator[Figures]:
    """TRL with micro-batches of 16 sequences."""
    yield from _trl(order, batch=4 if order.is_small else 16)


def _trl(order: Order, *, batch: int) -> Iterator[Figures]:
    """In the Python that ART_TRL_PYTHON names, else in this one."""
    python = os.environ.get("ART_TRL_PYTHON") or sys.executable
    load, base = load_of(order), base_of(order)
    told = {
        "base": str(base), "dtype": order.dtype, "prompts": load.prompts, "attempts": load.attempts,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens, "steps": load.repeats + 1,
        "batch": min(batch, load.num_attempts), "rank": RANK, "learning_rate": LEARNING_RATE,
    }  # fmt: skip
    command = [python, "-m", TRL_ENTRY, json.dumps(told)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    if done.returncode == 3:
        raise NotHere(done.stdout.strip())
    if done.returncode:
        raise RuntimeError(f"TRL ended with status {done.returncode}; its log says why")
    yield json.loads(done.stdout.strip().splitlines()[-1])
