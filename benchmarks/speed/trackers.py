"""What trackers cost a training step: each against a twin without it, as the median of paired steps.

    python -m benchmarks.speed.trackers   # half a minute for each tracker; make setup-readers first
    python -m benchmarks.speed.trackers --only none otel-hangs --pairs 200

A step gives 64 attempts of 5 turns and a metrics line to the tracker, as one of the demo does, and then computes a
quarter of a second with numpy on one thread, driven from Python. Steps with and without a tracker alternate, and which
comes first changes from pair to pair, so that a machine that is busy for a while is busy for both. `cost` is the median
of the pairs' differences, as a share of the demo's step of 1.9 s; `wait` is how long the loop's own thread was held by
the calls; `thread` is the processor time of the tracker's thread. A receiver that hangs takes the connection and never
answers; one that is healthy answers at once. Both are processes of their own. W&B, TensorBoard, MLflow and trackio are
the real packages, offline, in the Python of .venv-readers (ART_READERS_PYTHON names another).
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from art_cli.config.schema import TrackerConfig
from art_cli.reports.trackers import TrackedRun, check_tracker, make_tracker
from art_cli.reports.trackers.tracker_dispatch import Trackers, TrackerThread
from art_cli.runs.run_dir import MetricsLine
from art_cli.runs.trajectory import Json, Score, ScoredTrajectory, Turn
from art_cli.runtime.errors import UsageError
from tests.support.servers.receiver import receiving

for _library in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_library] = "1"  # before numpy is imported

GROUPS, ATTEMPTS, TURNS, TOKENS = 8, 8, 5, 12  # those of the demo: 64 games of about 5 moves
STEP_S = 0.25  # length of a step's own work: short, so that pairs are many
DEMO_STEP_S = 1.9  # length of the demo's steps on two cores
DEADLINE_S = 600.0  # longest time of one tracker in a Python of its own
CONFIG: Json = {"name": "bench", "train": {"steps": 1000}, "model": {"base": "builtin:tiny"}}


class Case(NamedTuple):
    name: str
    section: Json
    hangs: bool = False


CASES = [
    Case("none", {}),
    Case("otel", {"name": "otel"}),
    Case("otel-hangs", {"name": "otel"}, hangs=True),
    Case("langfuse", {"name": "langfuse"}),
    Case("langfuse-hangs", {"name": "langfuse"}, hangs=True),
    Case("tensorboard", {"name": "tensorboard"}),
    Case("wandb", {"name": "wandb", "mode": "offline"}),
    Case("mlflow", {"name": "mlflow"}),
    Case("trackio", {"name": "trackio"}),
]


def batch(step: int) -> list[list[ScoredTrajectory]]:
    return [[_attempt(step, group, index) for index in range(ATTEMPTS)] for group in range(GROUPS)]


def _attempt(step: int, group: int, index: int) -> ScoredTrajectory:
    messages: list[Json] = [{"role": "system", "content": "You play tic-tac-toe. " * 4}]
    turns = []
    for turn in range(TURNS):
        board = "board " + " ".join("XO."[(turn + place) % 3] for place in range(9))
        messages += [{"role": "user", "content": board}, {"role": "assistant", "content": f"move {turn}"}]
        turns.append(
            Turn(
                parent=turn - 1 if turn else None,
                kept=turn * (40 + TOKENS),
                prompt_ids=[7] * 40,
                sampled_ids=[8] * TOKENS,
                logprobs=[-0.5] * TOKENS,
                raw_logprobs=[-0.5] * TOKENS,
                step=step,
                temperature=1.0,
            )  # fmt: skip
        )
    return ScoredTrajectory(
        id=f"s{step}-g{group}-{index}", group_id=f"s{step}-g{group}", group_size=ATTEMPTS, index=index, step=step,
        scenario={"id": f"game-{group}"}, messages=messages, turns=turns, metrics={"won": 1.0, "illegal": 0.0},
        returned_reward=1.0, started_at=time.time(), duration_s=2.0, reward=index / ATTEMPTS,
        scores=[Score(judge="rollout", score=index / ATTEMPTS)],
    )  # fmt: skip


class Work:
    """STEP_S of small products from Python, as an update of the demo makes them. They let go of Python's lock."""

    def __init__(self) -> None:
        import numpy as np

        draw = np.random.default_rng(0)
        self._input = draw.standard_normal((256, 256), dtype=np.float32)
        self._layer = draw.standard_normal((256, 512), dtype=np.float32)
        self._output = np.empty((256, 512), np.float32)
        self._times = 1
        while (took := self._timed()) < STEP_S / 4:
            self._times *= 2
        self._times = max(1, round(self._times * STEP_S / took))

    def _timed(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin

    def __call__(self) -> None:
        for _ in range(self._times):
            self._input.dot(self._layer, out=self._output)


class Measured(NamedTuple):
    name: str
    step_s: float  # median of the steps without the tracker
    cost: float  # median of the pairs' differences, as a share of the demo's step
    low: float  # its interval over pairs: the order statistics that hold the median with 95 %
    high: float
    wait_ms: float  # median time in which the calls hold the loop's thread
    thread_ms: float  # processor time of the tracker's thread for a step
    process_ms: float  # processor time that a step of this process takes more, its package's threads included
    dropped: int


@contextmanager
def receiver(hangs: bool) -> Iterator[str]:
    """The address of a receiver in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.speed.trackers", "--receive", "hangs" if hangs else "answers"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def receive(hangs: bool) -> None:
    """Serves until it is killed."""
    with receiving() as server:
        server.answer = lambda post: (200, b"", {"x": str(threading.Event().wait(86_400))} if hangs else {})
        print(server.url, flush=True)
        while True:
            time.sleep(1.0)
            server.posts.clear()


@contextmanager
def opened(case: Case) -> Iterator[tuple[Trackers, list[TrackerThread]]]:
    """The trackers of a case, with a receiver of its own where it needs one."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        os.environ |= {"LANGFUSE_PUBLIC_KEY": "pk-lf-x", "LANGFUSE_SECRET_KEY": "sk-lf-x", "TRACKIO_DIR": scratch}
        threads: list[TrackerThread] = []
        if case.section:
            needs_url = case.section["name"] in ("otel", "langfuse")
            url = {"url": stack.enter_context(receiver(case.hangs))} if needs_url else {}
            config: Any = TypeAdapter(TrackerConfig).validate_python({**case.section, **url})
            root = Path(scratch) / "runs/bench"
            (root / "logs").mkdir(parents=True)
            run = TrackedRun("bench", root, CONFIG)
            threads = [TrackerThread(case.name, lambda: make_tracker(config, run, root))]
            threads[0].wait_for_start(60.0)
        yield Trackers(threads), threads
        for thread in threads:
            thread.end()
            if not case.hangs:
                thread.join(60.0)


def measure(case: Case, work: Work, pairs: int) -> Measured:
    plain, tracked, waits = [], [], []
    used: dict[bool, list[float]] = {True: [], False: []}
    with opened(case) as (trackers, threads):
        for pair in range(pairs + 1):
            groups = batch(pair)
            for is_tracked in (True, False) if pair % 2 else (False, True):
                begin, before = time.perf_counter(), time.process_time()
                if is_tracked:
                    trackers.log_trajectories(pair, groups)
                    trackers.log(MetricsLine(step=pair, split="train", metrics={"loss": 0.5}, time=time.time()))
                    waits.append(time.perf_counter() - begin)
                work()
                (tracked if is_tracked else plain).append(time.perf_counter() - begin)
                used[is_tracked].append(time.process_time() - before)
        spent = sum(map(_processor_s, threads))
        dropped = sum(thread.num_dropped for thread in threads)
    plain, tracked = plain[1:], tracked[1:]  # in the first pair the packages import what they need
    step = statistics.median(plain)
    shares = sorted((b - a) / DEMO_STEP_S for a, b in zip(plain, tracked, strict=True))
    reach = round(0.98 * len(shares) ** 0.5)  # 1.96 standard deviations of a binomial, half of them
    middle = len(shares) // 2
    low, high = shares[max(0, middle - reach)], shares[min(len(shares) - 1, middle + reach)]
    wait, thread_ms = 1000 * statistics.median(waits), 1000 * spent / (pairs + 1)
    more_ms = 1000 * (statistics.median(used[True][1:]) - statistics.median(used[False][1:]))
    return Measured(case.name, step, statistics.median(shares), low, high, wait, thread_ms, more_ms, dropped)


def _processor_s(thread: TrackerThread) -> float:
    """Processor seconds of the tracker's thread so far."""
    ident = thread.thread_id
    return 0.0 if ident is None else time.clock_gettime(time.pthread_getcpuclockid(ident))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--json", action="store_true", help="one object for each tracker")
    parser.add_argument("--receive", choices=["hangs", "answers"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.receive is not None:
        receive(arguments.receive == "hangs")
    work = Work()
    if not arguments.json:
        print("| tracker | a step without it | cost | its 95 % | the loop waits | its thread | the process | dropped |")
        print("|---|---|---|---|---|---|---|---|", flush=True)
    for case in CASES:
        if arguments.only is not None and case.name not in arguments.only:
            continue
        found = measured(case, work, arguments.pairs, is_asked=arguments.json)
        print(json.dumps(found._asdict()) if arguments.json else row(found), flush=True)


def measured(case: Case, work: Work, pairs: int, *, is_asked: bool) -> Measured:
    """The case in this Python, or in the readers' where only that one has the package. `is_asked`: this is that one."""
    try:
        check_tracker(TypeAdapter(TrackerConfig).validate_python(case.section))
    except UsageError as error:
        if is_asked:
            raise SystemExit(str(error)) from error
        from tests.support.others.real_readers import run  # it needs pytest, which the other Python has not

        words = ("-m", "benchmarks.speed.trackers", "--json", "--only", case.name, "--pairs", str(pairs))
        with tempfile.TemporaryDirectory() as home:
            done = run(*words, home=Path(home), timeout_s=DEADLINE_S)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:]) from error
        return Measured(**json.loads(done.stdout.splitlines()[-1]))
    return measure(case, work, pairs)


def row(found: Measured) -> str:
    return (
        f"| {found.name} | {found.step_s:.2f} s | {found.cost:+.2%} | {found.low:+.2%} to {found.high:+.2%} | "
        f"{found.wait_ms:.2f} ms | {found.thread_ms:.1f} ms | {found.process_ms:+.1f} ms | {found.dropped} |"
    )


if __name__ == "__main__":
    main()
