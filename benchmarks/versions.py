"""This version against an earlier one: the same work, in turn, on the same machine. No other trainer takes part.

    git worktree add /tmp/before 6df176a
    python benchmarks/versions.py /tmp/before                    # figures 1, 4, 5 and 7; about 15 minutes on two cores
    python benchmarks/versions.py /tmp/before --case step-shared --repeats 9

Each version runs in a process of its own whose imports come from its own checkout; the two take turns at every case.
The table gives the median seconds of each, and the median of the ratios of neighbouring turns (after over before: below
1 is faster now). Cases: `step-*`, one optimizer step of 24M parameters (figure 1); `sample-*`, the embedded engine
(figure 4); `loop`, a step of the demo (figure 5); `products`, the step that figure 7 counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
CASES = (
    "step-shared",
    "step-long",
    "step-alone",
    "sample-alone",
    "sample-groups",
    "sample-turns",
    "loop",
    "products",
)
LOOP_STEPS = 4  # the first of them is left out, because it loads and compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="checkout of the earlier version")
    parser.add_argument("--case", action="append", choices=CASES, help="may be given several times")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| case | before: wall, cpu | after: wall, cpu | after / before: wall | cpu |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="art-versions-") as scratch:
        for case in options.case or CASES:
            versions = [Version(Path(root).resolve(), case, scratch) for root in (options.before, ROOT)]
            taken = [[version.take() for version in versions] for _ in range(options.repeats + 1)][1:]
            for version in versions:
                version.close()
            print(f"| {case} | {row(taken)} |", flush=True)


def row(taken: list[list[tuple[float, float]]]) -> str:
    """Medians of each version's seconds, and of the ratios between neighbouring turns."""
    sides = [
        ", ".join(f"{statistics.median(turn[side][clock] for turn in taken):.2f} s" for clock in (0, 1))
        for side in (0, 1)
    ]
    ratios = [f"{statistics.median(turn[1][clock] / turn[0][clock] for turn in taken):.3f}" for clock in (0, 1)]
    return " | ".join([*sides, *ratios])


class Version:
    """One checkout's process, ready to do the work of one case again and again."""

    def __init__(self, root: Path, case: str, scratch: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "ART_VERSIONS_SCRATCH": scratch}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", case],
            cwd=root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._read()  # it is ready

    def take(self) -> tuple[float, float]:
        """Wall and processor seconds of one turn."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        wall, cpu = self._read()
        return wall, cpu

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.process.args} in {self.process.args[1]} ended with {self.process.wait()}")
        return json.loads(line)


# --- inside a version's process, where art_cli and benchmarks are those of its checkout -------------------------------


def serve(case: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the work prints stays out of the answers
    work = prepare(case)
    _answer(answers, None)
    for _ in sys.stdin:
        _answer(answers, work())


def _answer(answers: IO[str], value: Any) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


def prepare(case: str) -> Callable[[], tuple[float, float]]:
    kind, _, name = case.partition("-")
    if kind == "step":
        from benchmarks import learner

        return timed(learner.Ours(learner.CASES[name].groups()).step)
    if kind == "products":
        from benchmarks import utilisation

        return timed(utilisation.Step("24M", "float32").step)
    return sampling(name) if kind == "sample" else loop()


def timed(work: Callable[[], object]) -> Callable[[], tuple[float, float]]:
    import time

    def take() -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    return take


def sampling(name: str) -> Callable[[], tuple[float, float]]:
    import asyncio

    from benchmarks import models, sampling

    class Idle(sampling.Side):
        """Stands where transformers would sample."""

        def __init__(self, *_: object, **__: object) -> None: ...

        async def sample(self, prompts: Any, num: int) -> Any:
            return [[0] * num for _ in prompts]

    sampling.Generate = Idle  # type: ignore[assignment,misc]
    weights = models.build("24M", has_adapter=False)

    def take() -> tuple[float, float]:
        rows = asyncio.run(sampling.measure(name, weights, 1, with_batch=False))
        return rows[0]["wall_s"], rows[0]["cpu_s"]

    return take


def loop() -> Callable[[], tuple[float, float]]:
    from benchmarks import loop

    scratch = Path(os.environ["ART_VERSIONS_SCRATCH"])
    base = scratch / "policy"
    if not base.exists():  # both versions start from the policy that the first one made
        made = loop.make_base(scratch)
        base.symlink_to(made)

    def take() -> tuple[float, float]:
        with tempfile.TemporaryDirectory(dir=scratch) as runs:
            played = loop.play_ours(base.resolve(), Path(runs), steps=LOOP_STEPS, threads=None)
        return statistics.median(step.step_s for step in played.steps), played.cpu_s

    return take


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
