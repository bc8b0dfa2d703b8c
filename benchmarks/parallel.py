"""The learner in two processes: how far its gradient is from that of one, and how soon a killed process ends a run.

    python benchmarks/parallel.py

Two gloo processes on this machine's CPU share a step on a random Qwen3 model in float32; after one update AdamW's first
moment is (1 - beta1) times the gradient, which is compared with that of one process. Then a real `art train` of
tests/letters loses a process of its learner in the middle of a step, and is started again.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from art_cli.config.schema import GrpoConfig, LoraConfig, ModelConfig, TorchLearnerConfig, TrainConfig  # noqa: E402
from art_cli.learners.processes.job import Job  # noqa: E402
from art_cli.learners.processes.workers import ParallelLearner, Workers  # noqa: E402
from art_cli.runs.trajectory import ScoredTrajectory  # noqa: E402
from tests.learners.test_parallel_learner import Run, alone, distance, until  # noqa: E402
from tests.support.tiny import tiny_config, tiny_tokenizer  # noqa: E402
from tests.support.trees import scored, turn  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="art-benchmark-") as scratch:
        compare_gradients(Path(scratch))
        kill_a_process(Path(scratch))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"processor time: {sum(usage.ru_utime + usage.ru_stime for usage in used):.0f} s, children included")


def compare_gradients(scratch: Path) -> None:
    base = scratch / "base"
    torch.manual_seed(0)
    Qwen3ForCausalLM(tiny_config(layers=4, hidden=128)).save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    groups = played()
    for packing, lora in (("tree", True), ("rows", True), ("tree", False)):
        job = Job(
            base=str(base),
            model=ModelConfig(base=str(base), lora=LoraConfig() if lora else None),
            train=TrainConfig(learning_rate=1e-5, max_logprob_gap=1e9),
            loss=GrpoConfig(),
            learner=TorchLearnerConfig(processes=2, packing=packing, micro_batch_tokens=700),
            sft=None,
            sampling_max_tokens=64,
        )
        name = f"{packing}_{lora}"
        for kind, learner in (("one", alone(job)), ("two", ParallelLearner(job, Workers(2, logs=scratch / name)))):
            learner.step(groups)
            (scratch / name / kind).mkdir(parents=True, exist_ok=True)
            learner.save(scratch / name / kind)
            learner.close()
        one, two = (scratch / name / kind / "optimizer.safetensors" for kind in ("one", "two"))
        size = sum(tensor.numel() for key, tensor in load_file(one).items() if key.endswith(":exp_avg"))
        gap = distance(one, two, kind=":exp_avg")
        what = f"{packing}, {'LoRA' if lora else 'all weights'}, {size:,} numbers"
        print(f"gradient of two processes against one: {gap:.1e} of its norm ({what}; at most 1e-5)")


def played() -> list[list[ScoredTrajectory]]:
    """Four prompts of 100 tokens with six replies of 8 to 64 each."""
    draw = np.random.default_rng(0)
    groups = []
    for group in range(4):
        prompt = draw.integers(3, 250, 100).tolist()
        replies = [draw.integers(3, 250, draw.integers(8, 64)).tolist() for _ in range(6)]
        turns = [turn(prompt, reply, logprobs=[-6.0] * len(reply)) for reply in replies]
        groups.append([scored([t], float(draw.normal()), index=i, group=f"g{group}") for i, t in enumerate(turns)])
    return groups


def kill_a_process(scratch: Path) -> None:
    run = Run(scratch)
    with run.started() as child:
        until(lambda: any(line.split == "train" for line in run.files.metrics()), child)
        victim = run.learner_pid(1)
        os.kill(victim, signal.SIGSTOP)
        until(lambda: len(run.files.scored(1)) == 12, child)
        time.sleep(1.0)  # the other process is in the step now, and waits for this one
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        _, said = child.communicate(timeout=60)
        took = time.monotonic() - begin
    line = next(line for line in said.splitlines() if line.startswith("error:"))
    print(f"from the kill to the end of the run: {took:.1f} s, exit code {child.returncode} (at most 30 s)\n  {line}")
    again = subprocess.run(run.command, capture_output=True, text=True, timeout=300)
    steps = [line.step for line in run.files.metrics() if line.split == "train"]
    print(f"the same command again: exit code {again.returncode}, steps done: {steps}")


if __name__ == "__main__":
    main()
