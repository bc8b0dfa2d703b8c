"""The vLLM engine through whole runs: 5 steps with an adapter swapped each, the server killed, a wrong adapter.

    python benchmarks/vllm_demo.py                               # with .venv-vllm (make test-vllm); minutes on 2 cores
    python benchmarks/vllm_demo.py --python /path/to/bin/python  # another environment that has vLLM

Trains tests/letters (a random two-layer Qwen3, float32) on the machine's CPU or GPU. First run: the server gets SIGKILL
while the third step is played. Second run: the engine loads every step's adapter one step late, which the proof of
weights must not let through. Prints a line per step and what became of both.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import DriftError

HERE = Path(__file__).parent
LETTERS = HERE.parent / "tests" / "letters" / "config.yaml"
STEPS, KILLED = 5, 2  # steps in all; the one that is being played when the server is killed


def load(name: str, runs: Path, python: Path) -> LoadedConfig:
    overrides = ["model.base=build.py:build_wide", "engine=vllm", f"engine.python={python}", "rollout.concurrency=4"]
    overrides += ["+engine.args={enforce-eager: true}", "+engine.env={VLLM_CPU_KVCACHE_SPACE: 1, OMP_NUM_THREADS: 1}"]
    overrides += [f"name={name}", f"runs={runs}", f"train.steps={STEPS}", "train.keep_checkpoints=9", "eval=null"]
    return load_config(LETTERS, overrides)


@contextmanager
def watched() -> Iterator[list[VllmEngine]]:
    """The engines that are started meanwhile."""
    engines: list[VllmEngine] = []
    start = VllmEngine.start

    async def started(engine: VllmEngine) -> None:
        engines.append(engine)
        await start(engine)

    VllmEngine.start = started  # type: ignore[method-assign]
    try:
        yield engines
    finally:
        VllmEngine.start = start  # type: ignore[method-assign]


async def killed(loaded: LoadedConfig, run: RunDir) -> float:
    """Seconds from the server's death to the first trajectory after it."""
    path = run.trajectories_path(KILLED)
    with watched() as engines:
        training = asyncio.create_task(train(loaded))
        while not (path.exists() and path.stat().st_size) and not training.done():
            await asyncio.sleep(0.002)
        os.kill(engines[0].pid, signal.SIGKILL)
        begin, size = time.perf_counter(), path.stat().st_size
        while path.stat().st_size == size and not training.done():
            await asyncio.sleep(0.01)
        away = time.perf_counter() - begin
        await training
    return away


async def late(loaded: LoadedConfig, run: RunDir) -> str:
    """What stops a run whose engine loads the step before the one it says."""
    honest = VllmEngine.load

    async def load_late(engine: VllmEngine, checkpoint: Path, step: int) -> None:
        await honest(engine, run.checkpoint_path(max(0, step - 1)), step)

    VllmEngine.load = load_late  # type: ignore[method-assign]
    try:
        await train(loaded)
    except DriftError as error:
        return f"stopped: {error}"
    finally:
        VllmEngine.load = honest  # type: ignore[method-assign]
    return "NOT stopped"


def report(run: RunDir, away: float) -> None:
    print("step  adapter       trajectories  failed  logprob gap (max)    probe gap  sampling s  training s")
    log = (run.logs / "vllm.log").read_text()
    for line in run.metrics():
        played, metrics = run.trajectories(line.step), line.metrics
        adapter = f"letters@{line.step:04d}"
        num_loads = log.count(f"Loaded new LoRA adapter: name '{adapter}'")
        failed = sum(trajectory.error is not None for trajectory in played)
        print(
            f"{line.step:4d}  {adapter} x{num_loads}  {len(played):11d}  {failed:6d}  "
            f"{metrics['logprob_gap']:.1e} ({metrics['logprob_gap_max']:.1e})  {metrics['probe_gap']:.1e}  "
            f"{metrics['sample_s']:10.1f}  {metrics['train_s']:10.2f}"
        )
    print(f"the server was killed in step {KILLED}; the next trajectory came {away:.0f} s later")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-vllm" / "bin" / "python")
    python = parser.parse_args().python.absolute()
    with tempfile.TemporaryDirectory(prefix="art-vllm-") as scratch:
        runs = Path(scratch)
        away = asyncio.run(killed(load("letters", runs, python), RunDir(runs / "letters")))
        report(RunDir(runs / "letters"), away)
        print(
            "an engine that is one step behind:", asyncio.run(late(load("late", runs, python), RunDir(runs / "late")))
        )


if __name__ == "__main__":
    main()
