"""Whether each reply names the weights that sampled it: 1,000 requests over 20 swaps, checked by scoring.

    python -m benchmarks.attacks.policies                                     # embedded, vllm, replicas, tinker
    python -m benchmarks.attacks.policies --only embedded ahead --steps 5

Each is a run of tests/letters of 20 steps, with 28 attempts of two calls a step, so that the engine changes its weights
20 times. `ahead` plays a step ahead of the learner, so that weights change while replies are sampled. Afterwards each
recorded turn is scored by transformers with the checkpoint that its digest names, and with the ones before and after:
its logprobs have to be those of the digest's checkpoint. Planted errors (the adapter of an earlier step, another base,
a changed chat template) are in tests/serving/test_proven_policies.py.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from art_cli.config.schema import ModelConfig
from art_cli.models.loading import load_weights
from art_cli.models.saved_weights import load_checkpoint
from art_cli.models.weights import Weights, token_logprobs
from art_cli.runs import run_checkpoints
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import sequence
from benchmarks.shared.commands import art
from benchmarks.shared.paths import ROOT
from benchmarks.speed.remote import TASKS, serving

LETTERS = TASKS["letters"]
BOUND = 1e-3  # nats; largest mean difference of logprobs of the same weights
VLLM = (
    "model.base=build.py:build_wide",
    f"engine={{name: vllm, python: {ROOT}/.venv-vllm/bin/python, args: {{enforce-eager: true}}, "
    "env: {VLLM_CPU_KVCACHE_SPACE: '1', OMP_NUM_THREADS: '1'}, replicas: NUM}",
)
CASES = {
    "embedded": (),
    "ahead": ("train.max_staleness=1", "loss.off_policy.name=truncate"),
    "vllm": tuple(each.replace("NUM", "1") for each in VLLM),
    "replicas": tuple(each.replace("NUM", "2") for each in VLLM),
    "tinker": ("engine=tinker", "learner=tinker", "engine.url=URL"),
}


class Checked(NamedTuple):
    """The turns of a run. `own` and `other` are mean differences of logprobs in nats."""

    turns: int
    digests: int
    right: int  # turns whose logprobs are those of the checkpoint that their digest names
    own: float  # the largest over the turns, with that checkpoint
    other: float  # the median over the turns, with the nearer one of the checkpoints before and after


def train(name: str, settings: tuple[str, ...], steps: int, runs: Path) -> RunDir:
    words = [f"name={name}", f"runs={runs}", f"train.steps={steps}", "train.keep_checkpoints=99", "~eval"]
    words += ["rollout.groups_per_step=7", "model.dtype=float32", "train.learning_rate=2e-2"]
    done = art("train", LETTERS.config, *words, *settings)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return RunDir(runs / name)


def check(run: RunDir) -> Checked:
    """Scores every turn of the run."""
    steps = {entry.policy: entry.step for entry in run_checkpoints.listed(run)}
    policies = {step: _load(run, step) for step in steps.values()}
    own, other, right, digests = [], [], 0, set()
    for step in range(max(policies)):
        for trajectory in run.trajectories(step):
            for index, turn in enumerate(trajectory.turns):
                named = steps.get(turn.policy, -1)
                ids, length = sequence(trajectory.turns, index), len(turn.sampled_ids)
                gaps = {
                    near: float(np.abs(np.array(token_logprobs(policies[near], ids)[-length:]) - turn.logprobs).mean())
                    for near in (named - 1, named, named + 1)
                    if near in policies
                }
                digests.add(turn.policy)
                own.append(gaps.pop(named, float("inf")))
                other.append(min(gaps.values(), default=float("inf")))
                right += own[-1] <= BOUND and own[-1] < other[-1]
    return Checked(len(own), len(digests), right, max(own), statistics.median(other))


def _load(run: RunDir, step: int) -> Weights:
    base = str(run.base)
    lora = {"rank": 4, "alpha": 8}
    weights = load_weights(ModelConfig.model_validate({"base": base, "lora": lora, "dtype": "float32"}), base)
    load_checkpoint(weights, run_checkpoints.fetched(run.checkpoint_path(step)))
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    os.environ.setdefault("TINKER_API_KEY", "tml-none")
    with tempfile.TemporaryDirectory(prefix="art-policies-") as home:
        for name in options.only:
            with serving(LETTERS, Path(home)) if name == "tinker" else contextlib.nullcontext(("", 0)) as (url, _):
                run = train(name, tuple(each.replace("URL", url) for each in CASES[name]), options.steps, Path(home))
                found = check(run)
            print(
                f"{name:10s} {found.right} of {found.turns} turns have the logprobs of the policy that they name; "
                f"{found.digests} policies; differences: {found.own:.1e} nats at most, "
                f"{found.other:.1e} to the nearest other policy",
                flush=True,
            )


if __name__ == "__main__":
    main()
