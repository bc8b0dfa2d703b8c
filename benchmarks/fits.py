"""Which model fits on which GPU: `python -m benchmarks.fits` prints the table of docs/running.md.

Each cell composes configs/model/NAME.yaml with vLLM and the torch learner on one GPU, and asks the functions by which
`art check` refuses a run before vLLM starts. Nothing is loaded or downloaded: the models' sizes are the numbers of
their published config.json below. The memory of the GPUs is that of configs/machines.yaml. Estimates, not measurements.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_cli.config.compose import load_config
from art_cli.config.schema import RunConfig
from art_cli.loop.gpu_fit import find_misfit
from art_cli.loop.machines import read_machines
from art_cli.models.run_memory import ModelSize, size_of

QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> Any:
    import transformers

    return transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        **QWEN3,
    )


def published(base: str) -> Any:
    """Returns the configuration that the model's config.json has on the hub."""
    import transformers

    match base.rpartition("/")[2]:
        case "Qwen3-0.6B":
            return qwen3(1024, 28, 16, 3072, tied=True)
        case "Qwen3-1.7B":
            return qwen3(2048, 28, 16, 6144, tied=True)
        case "Qwen3-4B":
            return qwen3(2560, 36, 32, 9728, tied=True)
        case "Qwen3-8B":
            return qwen3(4096, 36, 32, 12288, tied=False)
        case "Qwen3-14B":
            return qwen3(5120, 40, 40, 17408, tied=False)
        case "Llama-3.2-1B-Instruct":
            return transformers.LlamaConfig(
                vocab_size=128256,
                hidden_size=2048,
                num_hidden_layers=16,
                num_attention_heads=32,
                num_key_value_heads=8,
                intermediate_size=8192,
                max_position_embeddings=131072,
                tie_word_embeddings=True,
            )
        case "builtin_models:smollm2-135m" | "art_cli.builtin_models:smollm2-135m":
            return transformers.LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                num_hidden_layers=30,
                num_attention_heads=9,
                num_key_value_heads=3,
                intermediate_size=1536,
                max_position_embeddings=8192,
                tie_word_embeddings=True,
            )
    raise KeyError(f"{base}: write the numbers of its config.json here")


MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
LARGER = {"qwen3-14b": "Qwen/Qwen3-14B"}  # models without a file of their own; the settings are those of qwen3-8b
PLAIN = 'rollout: {entry: "rollout.py:rollout", scenarios: scenarios.jsonl}\nengine: vllm\nlearner: torch\n'


@contextlib.contextmanager
def plain_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text("model: {base: m}\n" + PLAIN)
        yield path


def run_of(model: str, *overrides: str) -> RunConfig:
    """Returns the run that trains this model in bfloat16, as `auto` decides on all of these GPUs."""
    named = "qwen3-8b" if model in LARGER else model
    base = [f"model.base={LARGER[model]}"] if model in LARGER else []
    with plain_file() as path:
        return load_config(path, [f"model={named}", "model.dtype=bfloat16", *base, *overrides]).config


def cards() -> dict[str, float]:
    """Returns the memory in bytes of each GPU of configs/machines.yaml, the smallest first."""
    gpus = {name: machine.memory for name, machine in read_machines().items() if machine.kind == "gpu"}
    return dict(sorted(gpus.items(), key=lambda item: item[1]))


def cell(config: RunConfig, size: ModelSize, total: float) -> str:
    """Returns "fits", the override that makes it fit, or "no"."""
    misfit = find_misfit(config, size, total, {})
    return "fits" if misfit is None else f"`{misfit.cure}`" if misfit.cure else "no"


def table() -> str:
    """Returns the table in Markdown: a row for each model, a column for each GPU."""
    gpus = cards()
    lines = ["| model | " + " | ".join(gpus) + " |", "|---" * (len(gpus) + 1) + "|"]
    for model in MODELS:
        config = run_of(model)
        size = size_of(published(config.model.base))
        cells = (cell(config, size, total) for total in gpus.values())
        lines.append(f"| {model}, {config.model.max_length:,} tokens | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
