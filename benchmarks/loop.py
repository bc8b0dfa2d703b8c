"""The whole loop, tic-tac-toe: seconds of a step against a TRL script that plays the same games; where ours go.

    python -m benchmarks.loop                        # about 4 minutes on 2 quiet cores
    python -m benchmarks.loop --base DIR --threads 1 # DIR: the policy both start from, made once; saves making it
    python -m benchmarks.loop --tune                 # TRL at each of its settings first, and then at the fastest

Ours is `art train recipes/tictactoe/config.yaml`, TRL's is benchmarks/tictactoe_trl.py; each in a process of its own,
in turn, from the same warmed-up policy, with the same games in the same order against the same opponent, the same
adapter, sampling and learning rate. A step is from the end of the one before to its own end, everything between
included: ours with checkpoint, proof and files; TRL's with neither saving nor logging. Each process's first step is
left out, as that is where both load and compile. Processor seconds are of the whole process, its start included.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from art_cli.durable import write_lines
from art_cli.model import find_base
from art_cli.run_dir import RunDir
from benchmarks.sides import Row, table
from benchmarks.tictactoe_trl import SAME_WORK

RECIPE = Path(__file__).parent.parent / "recipes" / "tictactoe"
CONFIG = RECIPE / "config.yaml"
ART = [sys.executable, "-m", "art_cli"]
TRL = [sys.executable, "-m", "benchmarks.tictactoe_trl"]
TRL_BEST = ("--batch", "32", "--cache", "--merge")  # the fastest of TRL_SETTINGS, by --tune
TRL_SETTINGS = [
    ("--batch", batch, *flags) for batch in ("16", "32", "64") for flags in ((), ("--cache",), ("--cache", "--merge"))
]
DEADLINE_S = 900.0  # longest time for one process


class Step(NamedTuple):
    """One step of either side. `judge_s`, `train_s`: ours only; TRL's hooks do not tell training from the rest."""

    step_s: float
    sample_s: float
    games: float
    tokens_sampled: float
    reward: float
    judge_s: float = 0.0
    train_s: float = 0.0


class Played(NamedTuple):
    """What one process did: its steps but the first, and its processor seconds in all."""

    steps: list[Step]
    cpu_s: float


def make_base(scratch: Path) -> Path:
    """The demo's model after its warm-up, merged: what both sides start from."""
    sys.path.insert(0, str(RECIPE))
    from demos import games

    built = find_base("model.py:build", directory=RECIPE, built=scratch / "built")
    write_lines(scratch / "demos.jsonl", games())
    _run([*ART, "sft", str(CONFIG), str(scratch / "demos.jsonl"), "-o", str(scratch / "sft"), *SAME_WORK], threads=None)
    _run([*ART, "export", str(scratch / "sft"), "-o", str(scratch / "base"), "--base", built], threads=None)
    return scratch / "base"


def play_ours(base: Path, runs: Path, *, steps: int, threads: int | None) -> Played:
    name = f"run-{len(list(runs.glob('*')))}"
    settings = [*SAME_WORK, f"model.base={base}", "sft=null", "eval=null"]
    settings += [f"train.steps={steps}", f"runs={runs}", f"name={name}"]
    _, cpu_s = _run([*ART, "train", str(CONFIG), *settings], threads=threads)
    lines = RunDir(runs / name).metrics()
    found = [
        Step(
            step_s=line.time - before.time,
            sample_s=line.metrics["sample_s"],
            games=line.metrics["num_trajectories"],
            tokens_sampled=line.metrics["tokens_sampled"],
            reward=line.metrics["reward_mean"],
            judge_s=line.metrics["judge_s"],
            train_s=line.metrics["train_s"],
        )
        for before, line in pairwise(lines)
    ]
    return Played(found, cpu_s)


def play_trl(base: Path, settings: Sequence[str], *, steps: int, threads: int | None) -> Played:
    output, cpu_s = _run([*TRL, str(base), "--steps", str(steps), *settings], threads=threads)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Played([Step(**{name: line[name] for name in line if name in Step._fields}) for line in lines[1:]], cpu_s)


def _run(command: Sequence[str], *, threads: int | None) -> tuple[str, float]:
    """What it prints, and its processor seconds. Raises RuntimeError with its last lines: it failed."""
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, env=environment, cwd=RECIPE.parent.parent, capture_output=True, text=True, timeout=DEADLINE_S
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-800:]}")
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fastest(base: Path, *, threads: int | None) -> tuple[str, ...]:
    """TRL's best settings here; prints what each takes."""
    found = {}
    for settings in TRL_SETTINGS:
        found[settings] = _median(play_trl(base, settings, steps=3, threads=threads).steps, "step_s")
        print(f"TRL {' '.join(settings)}: {found[settings]:.2f} s a step", flush=True)
    return min(found, key=lambda settings: found[settings])


def _median(steps: Sequence[Step], name: str) -> float:
    return statistics.median(getattr(step, name) for step in steps)


def measure(
    base: Path | None = None,
    *,
    steps: int = 4,
    rounds: int = 2,
    threads: int | None = None,
    settings: Sequence[str] | None = TRL_BEST,
) -> list[Row]:
    """Figure 5. `threads`: of torch, None for its default; `settings`: of the TRL script, None to look for the best."""
    with tempfile.TemporaryDirectory(prefix="art-loop-") as name:
        scratch = Path(name)
        policy = base.resolve() if base else make_base(scratch)
        best = fastest(policy, threads=threads) if settings is None else tuple(settings)
        runs = scratch / "runs"
        ours, trl = [], []
        for _ in range(rounds):
            ours.append(play_ours(policy, runs, steps=steps, threads=threads))
            trl.append(play_trl(policy, best, steps=steps, threads=threads))
    return _rows(ours, trl, best)


def _rows(ours: Sequence[Played], trl: Sequence[Played], settings: Sequence[str]) -> list[Row]:
    our_steps, trl_steps = ([step for played in side for step in played.steps] for side in (ours, trl))
    ratio = _median(trl_steps, "step_s") / _median(our_steps, "step_s")
    cpu = [f"{statistics.median(played.cpu_s for played in side):.1f} s" for side in (ours, trl)]
    shares = {part: _share(our_steps, part) for part in ("sample_s", "judge_s", "train_s")}
    split = ", ".join(f"{part.removesuffix('_s')} {share:.1%}" for part, share in shares.items())
    return [
        Row("5", "whole loop, tictactoe: step", _seconds(our_steps), _seconds(trl_steps), round(ratio, 2), ">= 4",
            "TRL " + " ".join(settings)),
        Row("5", "work of a step", _work(our_steps), _work(trl_steps), None, "equal"),
        Row("5", "processor seconds of the whole process", *cpu, None, ""),
        Row("5", "where a step goes", f"{split}, rest {1 - sum(shares.values()):.1%}",
            f"sample {_share(trl_steps, 'sample_s'):.1%}, train and rest {1 - _share(trl_steps, 'sample_s'):.1%}",
            None, "rest < 5 %"),
    ]  # fmt: skip


def _share(steps: Sequence[Step], part: str) -> float:
    """Of all the steps' seconds."""
    whole: float = sum(step.step_s for step in steps)
    return sum(getattr(step, part) for step in steps) / whole


def _seconds(steps: Sequence[Step]) -> str:
    walls = [step.step_s for step in steps]
    return f"{statistics.median(walls):.2f} s ({min(walls):.2f}-{max(walls):.2f}; n={len(walls)})"


def _work(steps: Sequence[Step]) -> str:
    games, tokens, reward = (
        statistics.mean(getattr(s, n) for s in steps) for n in ("games", "tokens_sampled", "reward")
    )
    return f"{games:.0f} games, {tokens:.0f} tokens sampled, reward {reward:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="of an earlier run of make_base")
    parser.add_argument("--steps", type=int, default=4, help="of each process; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--tune", action="store_true")
    given = parser.parse_args()
    settings = None if given.tune else TRL_BEST
    print(table(measure(given.base, steps=given.steps, rounds=given.rounds, threads=given.threads, settings=settings)))


if __name__ == "__main__":
    main()
