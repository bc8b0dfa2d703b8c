"""tinker-cookbook's own scripts, unchanged, on `art backend` on a CPU: `rl_loop` (GRPO) and `sl_loop` (fine-tuning).

    python -m venv cookbook && cookbook/bin/pip install 'tinker-cookbook[math-rl]==0.5.8'
    python -m benchmarks.others.cookbook --python cookbook/bin/python

The scripts name a model and data sets of the hub. Without a network they find what is made here under these names in
the working directory: `Qwen/Qwen3-8B` is a random model of 40k parameters whose tokenizer has a token for an answer,
`openai/gsm8k` and `HuggingFaceH4/no_robots` are a few rows of the same columns. Each script runs as `python -m
tinker_cookbook.recipes.NAME` with its own flags, and its own metrics are printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import Qwen3ForCausalLM

from benchmarks.shared.paths import ROOT
from tests.support.models.tiny import tiny_config, tiny_tokenizer

MODEL = "Qwen/Qwen3-8B"
START_S, SCRIPT_S = 120.0, 240.0
COMMON = (f"model_name={MODEL}", "lora_rank=8")
RL = ("batch_size=8", "group_size=16", "max_tokens=24", "learning_rate=1e-3", "max_steps=3", "save_every=2")
SL = ("batch_size=8", "max_length=512", "learning_rate=3e-3", "save_every=2")


def make_model(directory: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("\\boxed{3}", special=False, normalized=False)])
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config(vocab=len(tokenizer))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def make_data(directory: Path) -> None:
    """The two data sets, as directories that `datasets.load_dataset` reads under the hub's names."""
    sums = [{"question": f"What is {n} minus {n - 3}?", "answer": f"{n} - {n - 3} = 3\n#### 3"} for n in range(4, 28)]
    says = [("Say three.", "Three."), ("Count.", "One, two, three.")]
    talks = [
        {
            "prompt": user,
            "prompt_id": str(n),
            "category": "Chat",
            "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
        }
        for n, (user, assistant) in enumerate(says * 16)
    ]
    for name, config, rows in (("openai/gsm8k", "main", sums), ("HuggingFaceH4/no_robots", "default", talks)):
        place = directory / name
        place.mkdir(parents=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (place / "train.jsonl").write_text(lines)
        files = "[{split: train, path: train.jsonl}]"
        (place / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files: {files}\n---\n")


@contextmanager
def backend(directory: Path) -> Iterator[str]:
    """`art backend` on a free port; yields its address."""
    command = [sys.executable, "-m", "art_cli", "backend", "--base", MODEL, "--port", "0", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    with open(directory / "backend.log", "wb") as log:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=log)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (directory / "backend.log").read_text()[-2000:]
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            process.wait(60)


def run_script(python: Path, name: str, flags: list[str], directory: Path, address: str) -> list[dict[str, Any]]:
    """The script's own metrics, one mapping a step."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "TINKER_BASE_URL": address,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(directory / "datasets"),
        "OMP_NUM_THREADS": "1",
    }
    log_path = directory / name
    command = [str(python), "-m", f"tinker_cookbook.recipes.{name}", *COMMON, *flags, f"log_path={log_path}"]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=SCRIPT_S)
    if done.returncode != 0:
        raise SystemExit(f"{name} failed:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="a Python that has tinker-cookbook")
    options = parser.parse_args()
    python = options.python.absolute()
    asked = (
        "from importlib.metadata import version as v; print(*(f'{n} {v(n)}' for n in ('tinker-cookbook', 'tinker')))"
    )
    print(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip(), flush=True)
    with tempfile.TemporaryDirectory(prefix="art-cookbook-") as name:
        directory = Path(name)
        make_model(directory / MODEL)
        make_data(directory)
        with backend(directory) as address:
            for row in run_script(python, "rl_loop", list(RL), directory, address):
                print(f"rl_loop step {row['step']}  reward {row['reward/total']:.3f}", flush=True)
            for row in run_script(python, "sl_loop", list(SL), directory, address):
                print(f"sl_loop step {row['step']}  nll {row['train_mean_nll']:.3f}", flush=True)


if __name__ == "__main__":
    main()
