"""The proof of weights: how often right adapters pass and wrong ones are found, with vLLM and with a stand-in for it.

    python -m benchmarks.attacks.weight_proof          # all of it; a real vLLM needs make setup-vllm
    python -m benchmarks.attacks.weight_proof --engine fused --dtype bfloat16 --loads 8

A chain of policy gradient steps is made as the demo takes them: rows that the policy has sampled at most four steps
before, advantages of random sign, AdamW with a rate of 4e-4. The engine loads each step's adapter, which is right, and
it is proven as in a run, by the base model and the step before. Then each wrong one is proven as if it were the step's:
the step before, none, the adapter of another chain at that step, the step's with twice the scale, the step's with one
layer zeroed, and the step's under another chat template. `fused` rounds as vLLM's kernels do
(tests/support/standins/fused_rounding.py).
"""

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from art_cli.config.schema import LoraConfig, ModelConfig, VllmEngineConfig
from art_cli.engines.proof import WeightProof, WeightVerdict, bound_of, mean_gap
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.learners.probe import LENGTH, measure_probe, own_text
from art_cli.models.base_source import find_base
from art_cli.models.loading import load_weights
from art_cli.models.policy_spec import spec_of
from art_cli.models.saved_weights import load_checkpoint, save_weights
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runs.manifest import Manifest, Origin, Probe
from art_cli.runtime.errors import CheckpointError, DriftError
from tests.support.models.tiny import tiny_config, tiny_tokenizer
from tests.support.others.real_vllm import IS_THERE, PYTHON
from tests.support.standins.fused_rounding import fused_scores

RATE = 4e-4  # the demo's
MODELS = ("smollm2", "qwen3")
Score = Callable[[Path | None, list[int]], Awaitable[list[float]]]  # (adapter, or None for the base) -> logprobs


def base_of(model: str, home: Path) -> str:
    """Returns the directory of SmolLM2-135M, or of a random Qwen3 of 8 layers."""
    if model == "smollm2":
        return find_base("builtin:smollm2-135m", directory=home, built=home / "base")
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = tiny_config(layers=8, hidden=256)
    config.initializer_range, config.head_dim = 0.08, 64  # vLLM on a CPU has no smaller heads
    Qwen3ForCausalLM(config).save_pretrained(home / "base")
    tiny_tokenizer().save_pretrained(home / "base")
    return str(home / "base")


def load(base: str, dtype: str) -> Weights:
    lora = LoraConfig(rank=16, alpha=32)
    settings = {"base": base, "dtype": dtype, "lora": lora, "max_length": 1024}
    return load_weights(ModelConfig.model_validate(settings), base, device="cpu")


class Chain:
    """Policies, each one step from the one before, and their adapters on the disk."""

    def __init__(self, weights: Weights, home: Path, *, seed: int) -> None:
        self.weights, self._home, self._seed = weights, home, seed
        parameters = [each for each in weights.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
        self.adapters: list[Path] = []

    def sample(self) -> torch.Tensor:
        """Returns [rows, LENGTH] token ids that the policy samples."""
        text = own_text(self.weights, seed=1000 * self._seed + len(self.adapters))
        return torch.tensor(text[len(text) % LENGTH :]).view(-1, LENGTH)

    def step(self, rows: torch.Tensor) -> Path:
        """Takes a step on the rows and returns the directory of its adapter."""
        number, model = len(self.adapters), self.weights.model
        draw = torch.Generator().manual_seed(1000 * self._seed + number)
        advantages = 2.0 * torch.randint(0, 2, (len(rows),), generator=draw) - 1
        logprobs = model(rows, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        taken = logprobs.gather(2, rows[:, 1:, None])[..., 0]
        (-(advantages[:, None] * taken).mean()).backward()
        torch.nn.utils.clip_grad_norm_([each for each in model.parameters() if each.requires_grad], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.adapters.append(self._home / f"{self._seed}_{number}")
        save_weights(self.weights, self.adapters[-1])
        return self.adapters[-1]


def doubled(adapter: Path) -> Path:
    """Returns a copy of an adapter that a server reads with twice its scale."""
    other = _copy(adapter, "doubled")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    return other


def without_layer(adapter: Path, layer: int) -> Path:
    """Returns a copy of an adapter that leaves one layer as it is in the base."""
    other = _copy(adapter, f"without_{layer}")
    tensors = load_file(other / "adapter_model.safetensors")
    zeroed = {name: 0 * each if f".layers.{layer}." in name else each for name, each in tensors.items()}
    save_file(zeroed, other / "adapter_model.safetensors", metadata={"format": "pt"})
    return other


def _copy(adapter: Path, name: str) -> Path:
    other = adapter.with_name(f"{adapter.name}_{name}")
    other.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (other / file).write_bytes((adapter / file).read_bytes())
    return other


@asynccontextmanager
async def scoring(engine: str, weights: Weights, home: Path) -> AsyncIterator[Score]:
    """Yields what loads an adapter into the engine and scores with it. vLLM is one server for all of them."""
    if engine == "fused":
        own = load(weights.base, weights.dtype_name)

        async def fused(adapter: Path | None, tokens: list[int]) -> list[float]:
            for module in own.model.modules():
                if hasattr(module, "lora_B") and isinstance(scaling := getattr(module, "scaling", None), dict):
                    scaling["default"] = 4.0 if adapter is not None and "doubled" in adapter.name else 2.0
            if adapter is None:
                with own.adapter_off():
                    return fused_scores(own, tokens)
            load_checkpoint(own, adapter)
            return fused_scores(own, tokens)

        yield fused
        return
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    settings = {"name": "vllm", "python": PYTHON, "args": {"enforce-eager": True}, "env": env}
    server = VllmEngine(VllmEngineConfig.model_validate(settings), spec_of(weights), name="policy", logs=home)
    await server.start()
    try:

        async def real(adapter: Path | None, tokens: list[int]) -> list[float]:
            if adapter is not None:
                await server.load(adapter, 0)
            return await server.score(tokens)

        yield real
    finally:
        await server.close()


class Table:
    """Counts of verdicts by kind of adapter, and the numbers of the last one."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.shown: dict[str, str] = {}

    def add(self, kind: str, before: Probe, probe: Probe, scores: list[float], dtype: str) -> None:
        """Judges scores as if they were the engine's after the load of `probe`."""
        proof = WeightProof()
        proof.check([before.logprobs], before, dtype=dtype, name="the step before")
        try:
            verdict: WeightVerdict | None = proof.check([scores], probe, dtype=dtype)
            what = "passes" if verdict is not None and not verdict.undecided else "undecided"
            self._add(kind, what, verdict.undecided if verdict else "")
        except DriftError as error:
            self._add(kind, "fails", str(error).partition("weights: ")[2])

    def _add(self, kind: str, what: str, shown: str) -> None:
        self.counts.setdefault(kind, Counter())[what] += 1
        self.shown[f"{kind} {what}"] = shown

    def print(self) -> None:
        for kind, counts in self.counts.items():
            print(f"| {kind} | {counts['passes']} | {counts['fails']} | {counts['undecided']} |")
        for name, text in self.shown.items():
            if text:
                print(f"  {name}, the last one: {text}")


async def measure(model: str, dtype: str, engine: str, loads: int) -> "Table":
    """Prints the table of one model in one dtype, and returns it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        base = base_of(model, home)
        weights, others = load(base, dtype), load(base, dtype)
        chain, other = Chain(weights, home, seed=1), Chain(others, home, seed=2)
        score = partial(token_logprobs, weights)
        before = measure_probe(weights, score)
        table, gaps, roundings, bounds = Table(), [], [], []
        async with scoring(engine, weights, home) as score_engine:
            bare = stale = await score_engine(None, before.tokens)
            for number in range(loads):
                if number % 4 == 0:
                    rows = chain.sample()
                adapter, foreign = chain.step(rows), other.step(rows)
                probe = measure_probe(weights, score, before)
                right = await score_engine(adapter, probe.tokens)
                table.add("right", before, probe, right, dtype)
                gaps.append(mean_gap(right, probe.logprobs))
                roundings.append(mean_gap(probe.rounded, probe.logprobs))
                bounds.append(bound_of(dtype, probe).most)
                if number % 5 == 4 or number == loads - 1:
                    layer = number % weights.model.config.num_hidden_layers
                    table.add("the step before", before, probe, stale, dtype)
                    table.add("none, the base alone", before, probe, bare, dtype)
                    wrong = {"of another run": foreign, "twice the scale": doubled(adapter)}
                    wrong["one layer zeroed"] = without_layer(adapter, layer)
                    for kind, path in wrong.items():
                        table.add(kind, before, probe, await score_engine(path, probe.tokens), dtype)
                    table._add("template of another model", await refused(score_engine, adapter, probe, dtype), "")
                before, stale = probe, right
    print(f"\n## {model}, {dtype}, {engine}: {len(probe.tokens)} tokens, {time.monotonic() - begun:.0f} s\n")
    for what, values in (("gap", gaps), ("the learner's rounding", roundings), ("bound", bounds)):
        print(f"{what} {min(values):.2e} to {max(values):.2e} nats")
    print("\n| adapter | passes | fails | undecided |\n|---|---|---|---|")
    table.print()
    sys.stdout.flush()
    return table


async def refused(score: Score, adapter: Path, probe: Probe, dtype: str) -> str:
    class Engine:
        async def score(self, token_ids: list[int]) -> list[float]:
            return await score(adapter, token_ids)

    manifest = Manifest(step=1, base="", config_hash="", origin=Origin(base="b", template="t"), probe=probe)
    try:
        await WeightProof().prove(Engine(), manifest, Origin(base="b", template="another", dtype=dtype))
    except CheckpointError:
        return "fails"
    return "passes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=("bfloat16", "float32"))
    parser.add_argument("--engine", nargs="+", choices=("vllm", "fused"), default=("fused", "vllm"))
    parser.add_argument("--loads", type=int, default=40)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # the table has what is undecided
    for engine in given.engine:
        if engine == "vllm" and not IS_THERE:
            print("no .venv-vllm and no ART_VLLM_PYTHON: make setup-vllm")
            continue
        for model in given.model:
            for dtype in given.dtype:
                asyncio.run(measure(model, dtype, engine, given.loads))


if __name__ == "__main__":
    main()
