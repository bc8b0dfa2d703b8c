"""Runs with checkpoints of random bytes, for tests of object stores; no model, no torch."""

import json
import random
from pathlib import Path

from art_cli.runs.durable import write_lines
from art_cli.runs.manifest import Manifest, new_checkpoint
from art_cli.runs.run_dir import RunDir


def add_step(run: RunDir, step: int, *, reward: float | None = None, size: int = 4000) -> None:
    """What a run has after the policy of `step` was saved: its checkpoint, and the records of the step before."""
    draw = random.Random(step)
    run.root.mkdir(parents=True, exist_ok=True)
    if not run.config_path.exists():
        run.config_path.write_text(json.dumps({"train": {"keep_checkpoints": 2}}))
    if step:
        write_lines(run.trajectories_path(step - 1), [{"id": f"{step - 1}-{number}"} for number in range(20)])
        run.append_metrics(step - 1, "train", {"loss": draw.random()})
    if reward is not None:
        run.append_metrics(step, "eval", {"reward": reward})
    with new_checkpoint(run.checkpoint_path(step), Manifest(step=step, base="base", config_hash="")) as directory:
        (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        (directory / "adapter_model.safetensors").write_bytes(draw.randbytes(size))
        (directory / "optimizer.safetensors").write_bytes(draw.randbytes(size))


def made(root: Path, steps: int, **rewards: float) -> RunDir:
    run = RunDir(root)
    for step in range(steps + 1):
        add_step(run, step, reward=rewards.get(f"at_{step}"))
    return run


def content(run: RunDir, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.checkpoint_path(step).iterdir()}
