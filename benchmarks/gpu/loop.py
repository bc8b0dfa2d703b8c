"""The whole loop on a GPU: `art train` with an engine, and TRL's GRPOTrainer with vLLM colocated; the same work.

A step is from the end of the one before to its own end, everything between included: ours with checkpoint, proof and
files; TRL's with neither saving nor logging. The first step of each is left out, because both compile in it.
"""

import contextlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.gpu.memory import only_free, watched
from benchmarks.gpu.order import NotHere, Order
from benchmarks.gpu.shapes import RANK, base_of, config_of, load_of
from benchmarks.gpu.task import scenarios

HERE = Path(__file__).parent
Figures = dict[str, Any]
LEARNING_RATE = 1e-5
SMALL_CARD_GIB = 23.5  # what torch sees of an RTX 3090 or 4090; an L4 or A10G has 22.0
# Sequences in one micro-batch of TRL's, as many as 80 GB hold beside vLLM's share without gradient checkpointing.
MICRO_BATCH = {"4b": 8, "8b": 4}
TRL_ENTRY = "benchmarks.gpu.trl_loop"
NO_TRL = 3  # exit status of TRL_ENTRY where its Python lacks something


def vllm(order: Order) -> Iterator[Figures]:
    """`art train` with a vLLM server, which sleeps while the learner works where they share the GPU."""
    yield from _train(order, _with_vllm(order))


def updates(order: Order) -> Iterator[Figures]:
    """The same with two updates a step and an adapter of rank 64, whose AdamW moments are larger than 1 MB: what the
    learner keeps of the card between its blocks is what vLLM may miss when it wakes."""
    yield from _train(order, [*_with_vllm(order), "train.updates_per_step=2"], rank=64)


def limited(order: Order) -> Iterator[Figures]:
    """The same where another process leaves as much of the card free as a card of 24 GB has. Nothing is set for it."""
    if not order.has_gpu:
        raise NotHere("only a GPU has memory of its own that can be held")
    with only_free(SMALL_CARD_GIB):
        yield from _train(order, _with_vllm(order))


def embedded(order: Order) -> Iterator[Figures]:
    """`art train` with the embedded engine, one copy of the weights with the learner."""
    yield from _train(order, ["engine=embedded"])


def _with_vllm(order: Order) -> list[str]:
    settings = ["engine=vllm", f"engine.python={order.vllm_python()}"]
    if not order.has_gpu:
        settings += ["+engine.args={enforce-eager: true}"]
        settings += ["+engine.env={VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1'}"]
    return settings


def _train(order: Order, settings: list[str], *, rank: int = RANK) -> Iterator[Figures]:
    from art_cli.runs.durable import remove, write_lines

    base = base_of(order)
    load, model = load_of(order), config_of(order, base)
    directory = order.directory / order.name
    if directory.exists():  # of an earlier time, from which `art train` would go on
        remove(directory)
    directory.mkdir(parents=True)
    played, torch_memory = directory / "scenarios.jsonl", directory / "memory.json"
    write_lines(played, scenarios(load.prompt_tokens))
    settings = settings + [
        f"model.base={base}", f"model.dtype={order.dtype}", f"model.max_length={model.max_length}",
        f"model.lora={{rank: {rank}, alpha: {2 * rank}}}", "learner=torch", f"rollout.scenarios={played}",
        f"rollout.groups_per_step={load.prompts}", f"rollout.group_size={load.attempts}",
        f"rollout.sampling={{max_tokens: {load.new_tokens}}}", f"train.learning_rate={LEARNING_RATE}",
        f"train.steps={load.repeats + 1}", f"runs={directory}", "name=run",
    ]  # fmt: skip
    if order.is_small:
        settings.append("rollout.processes=1")
    command = [sys.executable, "-m", "benchmarks.gpu.art_train", str(torch_memory), "train"]
    with watched() as memory:
        done = subprocess.run(
            [*command, str(HERE / "config.yaml"), *settings], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    sys.stderr.write(done.stderr)
    yield {"memory_gb": memory.gb} | _started(done.stderr)
    if torch_memory.exists():
        yield json.loads(torch_memory.read_text())
    yield from _steps(directory / "run")
    if done.returncode:
        raise RuntimeError(f"art train: {_error(done.stderr)}")


def _steps(run: Path) -> Iterator[Figures]:
    """The steps after the first, as many as were done."""
    from art_cli.runs.run_dir import RunDir

    lines: list[Any] = []
    with contextlib.suppress(FileNotFoundError):
        lines = [line for line in RunDir(run).metrics() if line.split == "train"]
    if gaps := [line.metrics["probe_gap"] for line in lines if "probe_gap" in line.metrics]:
        yield {"probe_gap": max(gaps)}
    steps = [(after.time - before.time, after.metrics) for before, after in pairwise(lines)]
    if not steps:
        return
    walls = [wall for wall, _ in steps]
    names = {"sample_s": "sample_s", "train_s": "train_s", "attempts": "num_trajectories", "tokens": "tokens_sampled"}
    median = {name: statistics.median(metrics[metric] for _, metrics in steps) for name, metric in names.items()}
    step_s = statistics.median(walls)
    yield {
        "step_s": step_s,
        "step_s_range": [min(walls), max(walls)],
        **median,
        "tokens_per_s": median["tokens"] / step_s,
        "sampled_per_s": median["tokens"] / median["sample_s"],
        "updates": min(metrics["num_updates"] for _, metrics in steps),
        "failed": max(metrics["num_failed"] for _, metrics in steps),
        "gap": max((metrics["logprob_gap"] for _, metrics in steps if "logprob_gap" in metrics), default=None),
        "reward": statistics.mean(metrics["reward_mean"] for _, metrics in steps),
    }


def _started(log: str) -> Figures:
    """Seconds from the process's start to its first reply, which `art train` logs."""
    found = re.search(r"first reply after ([\d.]+) s", log)
    return {"first_reply_s": float(found[1])} if found else {}


def _error(log: str) -> str:
    """Returns the first line of the error that `art` reported, and of a server's log below it the first error."""
    errors = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    if not errors:
        return (log.strip().splitlines() or ["it wrote nothing"])[-1]
    cause = [line.strip() for line in errors[1:] if "Error" in line][:1]
    return " / ".join([errors[0], *cause])


# --- TRL --------------------------------------------------------------------------------------------------------------


def trl_large(order: Order) -> Iterator[Figures]:
    """TRL with micro-batches of 64 sequences."""
    yield from _trl(order, batch=64)


def trl(order: Order) -> Iterator[Figures]:
    """TRL with micro-batches of 16 sequences, or fewer of a larger model."""
    yield from _trl(order, batch=4 if order.is_small else MICRO_BATCH.get(order.shape, 16))


def _trl(order: Order, *, batch: int) -> Iterator[Figures]:
    python = order.trl_python()
    load, base = load_of(order), base_of(order)
    told = {
        "base": str(base), "dtype": order.dtype, "prompts": load.prompts, "attempts": load.attempts,
        "prompt_tokens": load.prompt_tokens, "new_tokens": load.new_tokens, "steps": load.repeats + 1,
        "batch": min(batch, load.num_attempts), "rank": RANK, "learning_rate": LEARNING_RATE,
        "has_gpu": order.has_gpu,
    }  # fmt: skip
    command = [str(python), "-m", TRL_ENTRY, json.dumps(told)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode == NO_TRL:
        raise NotHere(done.stdout.strip())
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        raise RuntimeError(f"TRL ended with status {done.returncode}: {(lines or ['it wrote nothing'])[-1]}")
    yield json.loads(done.stdout.strip().splitlines()[-1])
