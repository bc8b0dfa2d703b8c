"""Which model fits on which GPU: `python -m benchmarks.forecasts.fits` prints the table of docs/running.md.

Each cell composes configs/model/NAME.yaml with vLLM and the torch learner on one GPU, and asks the functions by which
`art check` refuses a run before vLLM starts. Nothing is loaded or downloaded: their sizes follow from published.py.
The memory of the GPUs is that of configs/machines.yaml. Estimates, not measurements.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from art_cli.config.compose import load_config
from art_cli.config.schema import RunConfig
from art_cli.loop.gpu_fit import find_misfit
from art_cli.loop.machines import read_machines
from art_cli.models.run_memory import ModelSize, size_of
from benchmarks.forecasts.published import published

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
