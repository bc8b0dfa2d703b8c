"""The whole loop: seconds of a step against a TRL script that plays the same episodes; where ours go.

    python -m benchmarks.speed.loop                         # the shape `tiny`: about 4 minutes on 2 quiet cores
    python -m benchmarks.speed.loop --shape game agent      # others: benchmarks/speed/loop_shapes.py
    python -m benchmarks.speed.loop --bases DIR --threads 1  # DIR keeps the policies that both start from
    python -m benchmarks.speed.loop --tune                  # TRL at each of its settings first, and then at the fastest
    python -m benchmarks.speed.loop --before DIR            # against art as it is in the checkout DIR, instead of TRL

Ours is `art train`, TRL's is benchmarks/speed/loop_trl.py; each in a process of its own, in turn, from the same policy,
with the same scenarios in the same order, the same adapter, sampling and learning rate. A step is from the end of the
one before to its own end, everything between included: ours with checkpoint, proof and files; TRL's with neither saving
nor logging. Each process's first step is left out, as that is where both load and compile. Processor seconds are of the
whole process, its start included.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from art_cli.models.base_source import find_base
from art_cli.runs.durable import write_lines
from art_cli.runs.run_dir import RunDir
from benchmarks.shared.paths import ROOT
from benchmarks.shared.sides import Row, status_mb, table
from benchmarks.speed.loop_shapes import SHAPES, Shape

ART = [sys.executable, "-m", "art_cli"]
TRL = [sys.executable, "-m", "benchmarks.speed.loop_trl"]
DEADLINE_S = 2400.0  # longest time for one process


class Step(NamedTuple):
    """One step of either side. `judge_s`, `train_s`: ours only; TRL's hooks do not tell training from the rest."""

    step_s: float
    sample_s: float
    games: float
    tokens_sampled: float
    reward: float
    judge_s: float = 0.0
    train_s: float = 0.0


class Used(NamedTuple):
    """What a process took in all."""

    cpu_s: float
    peak_mb: float  # of resident memory, without that of its own processes


class Played(NamedTuple):
    """What one process did: its steps but the first."""

    steps: list[Step]
    used: Used


def make_base(shape: Shape, directory: Path) -> Path:
    """What both sides start from: the shape's model, after its warm-up if the project has one. Kept in `directory`."""
    base = directory / shape.name
    if (base / "config.json").exists():
        return base.resolve()
    with tempfile.TemporaryDirectory(prefix="art-loop-base-") as name:
        scratch = Path(name)
        sys.path.insert(0, str(shape.project))
        built = find_base(shape.build or "model.py:build", directory=shape.project, built=scratch / "built")
        if not (shape.project / "demos.py").exists():
            return Path(shutil.copytree(built, base)).resolve()
        from demos import games

        write_lines(scratch / "demos.jsonl", games())
        demos, output = str(scratch / "demos.jsonl"), str(scratch / "sft")
        settings = [f"model.base={built}", *shape.settings]
        _run([*ART, "sft", str(shape.config), demos, "-o", output, *settings], threads=None)
        _run([*ART, "export", output, "-o", str(base), "--base", built], threads=None)
    return base.resolve()


def play_ours(
    shape: Shape, base: Path, runs: Path, *, steps: int, threads: int | None, checkout: Path = ROOT
) -> Played:
    name = f"run-{len(list(runs.glob('*')))}"
    settings = [*shape.settings, f"model.base={base}", "sft=null", "eval=null"]
    settings += [f"train.steps={steps}", f"runs={runs}", f"name={name}"]
    _, used = _run([*ART, "train", str(shape.config), *settings], threads=threads, checkout=checkout)
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
    return Played(found, used)


def play_trl(shape: Shape, base: Path, settings: Sequence[str], *, steps: int, threads: int | None) -> Played:
    output, used = _run([*TRL, shape.name, str(base), "--steps", str(steps), *settings], threads=threads)
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return Played([Step(**{name: line[name] for name in line if name in Step._fields}) for line in lines[1:]], used)


def _run(command: Sequence[str], *, threads: int | None, checkout: Path = ROOT) -> tuple[str, Used]:
    """What it prints, and what it took. Raises RuntimeError with its last lines: it failed."""
    environment = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(checkout)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    before, peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN), 0.0
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        with subprocess.Popen(command, env=environment, cwd=checkout, stdout=out, stderr=log) as process:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None:
                with suppress(StopIteration):  # it has just ended
                    peak_mb = status_mb("VmHWM", process.pid)
                if time.monotonic() > deadline:
                    process.kill()
                time.sleep(0.1)
        out.seek(0)
        log.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)}: {log.read()[-800:]}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return out.read(), Used(cpu_s, peak_mb)


def fastest(shape: Shape, base: Path, *, threads: int | None) -> tuple[str, ...]:
    """TRL's best settings here; prints what each takes."""
    found = {}
    for batch in shape.batches:
        for flags in ((), ("--cache",), ("--cache", "--merge")):
            settings = ("--batch", batch, *flags)
            found[settings] = _median(play_trl(shape, base, settings, steps=3, threads=threads).steps, "step_s")
            print(f"TRL {' '.join(settings)}: {found[settings]:.2f} s a step", flush=True)
    return min(found, key=lambda settings: found[settings])


def _median(steps: Sequence[Step], name: str) -> float:
    return statistics.median(getattr(step, name) for step in steps)


def measure(
    shape: Shape, bases: Path, *, steps: int, rounds: int, threads: int | None, is_tuned: bool = False
) -> list[Row]:
    """`threads`: of torch, None for its default. With `is_tuned` TRL's best settings are looked for first."""
    base = make_base(shape, bases)
    best = fastest(shape, base, threads=threads) if is_tuned else shape.trl
    ours, trl = [], []
    with tempfile.TemporaryDirectory(prefix="art-loop-") as name:
        for _ in range(rounds):
            ours.append(play_ours(shape, base, Path(name), steps=steps, threads=threads))
            trl.append(play_trl(shape, base, best, steps=steps, threads=threads))
    return _rows(shape, ours, trl, best)


def compare(
    shape: Shape, bases: Path, before: Path, *, steps: int, rounds: int, threads: int | None
) -> list[tuple[str, str, str, str, str]]:
    """Returns for each quantity the medians in this checkout and in `before`, and their ratio: now over before.

    Both play in turn, from the same policy. A ratio's spread is that of the rounds, each a process of either.
    """
    base = make_base(shape, bases)
    pairs: list[tuple[Played, Played]] = []
    with tempfile.TemporaryDirectory(prefix="art-loop-") as name:
        for number in range(rounds):
            sides = (ROOT, before) if number % 2 else (before, ROOT)
            played = {
                root: play_ours(shape, base, Path(name), steps=steps, threads=threads, checkout=root) for root in sides
            }
            pairs.append((played[ROOT], played[before]))
    rows = []
    for part in ("step_s", "sample_s", "train_s", "cpu_s"):
        values = [tuple(p.used.cpu_s if part == "cpu_s" else _median(p.steps, part) for p in pair) for pair in pairs]
        now, then = (statistics.median(value[side] for value in values) for side in (0, 1))
        ratios = sorted(one / other for one, other in values)
        spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
        rows.append((shape.name, part, f"{now:.2f} s", f"{then:.2f} s", spread))
    return rows


def _rows(shape: Shape, ours: Sequence[Played], trl: Sequence[Played], settings: Sequence[str]) -> list[Row]:
    our_steps, trl_steps = ([step for played in side for step in played.steps] for side in (ours, trl))
    ratio = _median(trl_steps, "step_s") / _median(our_steps, "step_s")
    cpu = [f"{statistics.median(played.used.cpu_s for played in side):.1f} s" for side in (ours, trl)]
    peak = [f"{max(played.used.peak_mb for played in side) / 1024:.2f} GiB" for side in (ours, trl)]
    shares = {part: _share(our_steps, part) for part in ("sample_s", "judge_s", "train_s")}
    split = ", ".join(f"{part.removesuffix('_s')} {share:.1%}" for part, share in shares.items())
    trl_sample = _share(trl_steps, "sample_s")
    return [
        Row("1", f"{shape.name}: step", _seconds(our_steps), _seconds(trl_steps), round(ratio, 2), shape.target,
            "TRL " + " ".join(settings)),
        Row("1", f"{shape.name}: work of a step", _work(our_steps), _work(trl_steps), None, "equal"),
        Row("1", f"{shape.name}: processor seconds of the whole process", *cpu, None, ""),
        Row("1", f"{shape.name}: peak memory of the process that trains", *peak, None, ""),
        Row("1", f"{shape.name}: where a step goes", f"{split}, rest {1 - sum(shares.values()):.1%}",
            f"sample {trl_sample:.1%}, train and rest {1 - trl_sample:.1%}", None, "rest < 3 %"),
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
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["tiny"])
    parser.add_argument("--bases", type=Path, help="directory that keeps the policies both sides start from")
    parser.add_argument("--steps", type=int, default=4, help="of each process; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of torch")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--before", type=Path, help="another checkout of art, the other side instead of TRL")
    given = parser.parse_args()
    settings = {"steps": given.steps, "rounds": given.rounds, "threads": given.threads, "is_tuned": given.tune}
    with tempfile.TemporaryDirectory(prefix="art-loop-bases-") as scratch:
        bases = given.bases or Path(scratch)
        if given.before is not None:
            print("| shape | quantity | now | before | now / before (range) |\n|---|---|---|---|---|")
            del settings["is_tuned"]
            for name in given.shape:
                for row in compare(SHAPES[name], bases, given.before.resolve(), **settings):
                    print(f"| {' | '.join(row)} |", flush=True)
            return
        print(table([row for name in given.shape for row in measure(SHAPES[name], bases, **settings)]))


if __name__ == "__main__":
    main()
