"""1,000 groups of 4 against a judge that answers in 50 ms: wall time, memory, the cache, and ten kills.

    python -m benchmarks.judge_throughput

`art judge` and the judge server run as processes of their own, as a user runs them; times are of the whole command,
start of the interpreter included, on a machine that does nothing else (the processor time tells when it does). The
limit for the first pass is 1.5 times 1000 * 50 ms / 64 plus 3 s, for a second pass from the cache 5 s. Memory is the
peak of the resident set, for 1,000 groups and for 4,000. For the kills the judge is stopped with SIGKILL ten times at
random moments and started again; the server writes down every question it answered.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from art_cli.runs.durable import read_lines, write_lines
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory

GROUPS, SIZE, DELAY_S, PLACES, KILLS = 1000, 4, 0.05, 64, 10
FIRST_LIMIT_S = 1.5 * GROUPS * DELAY_S / PLACES + 3
CACHED_LIMIT_S = 5.0
MEMORY_LIMIT = 1.2  # peak for four times the groups, against the peak for the groups
ART = [sys.executable, "-m", "art_cli", "judge"]


def write_groups(path: Path, count: int) -> None:
    """Multi-turn attempts of about 600 tokens that state their quality."""
    rng = random.Random(0)
    rows = []
    for number in range(count):
        for index in range(SIZE):
            turns = [{"role": role, "content": "word " * 60} for _ in range(4) for role in ("assistant", "user")]
            end = {"role": "assistant", "content": f"quality={rng.random():.4f}"}
            messages = [
                {"role": "system", "content": "You are an agent."},
                {"role": "user", "content": f"Task {number}"},
            ]
            rows.append(
                Trajectory(
                    id=f"{number}-{index}", group_id=str(number), group_size=SIZE, index=index,
                    messages=[*messages, *turns, end],
                )
            )  # fmt: skip
    write_lines(path, rows)


@contextlib.contextmanager
def judge_server(log: Path) -> Iterator[str]:
    """A judge in a process of its own; its api_base."""
    command = [sys.executable, "-m", "tests.judge_server", "--delay-ms", str(DELAY_S * 1000), "--log", str(log)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()


def command(file: Path, output: Path, api_base: str, cache: Path) -> list[str]:
    settings = [f"judge.base_url={api_base}", "judge.model=rule", f"judge.concurrency={PLACES}", f"judge.cache={cache}"]
    return [*ART, str(file), "-o", str(output), *settings, "--json"]


class Pass(NamedTuple):
    """One run of the command: seconds by the clock and on the processor, peak memory, what it printed."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    summary: dict[str, object]


def run(arguments: list[str]) -> Pass:
    begin = time.perf_counter()
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, printed
    wall_s = time.perf_counter() - begin
    return Pass(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, json.loads(printed))


def pass_twice(directory: Path) -> list[str]:
    """The first pass, the second from the cache, and four times the groups."""
    file, large, cache = directory / "groups.jsonl", directory / "large.jsonl", directory / "v.sqlite"
    write_groups(file, GROUPS)
    write_groups(large, 4 * GROUPS)
    with judge_server(directory / "asked") as api_base:
        first = run(command(file, directory / "first.jsonl", api_base, cache))
        second = run(command(file, directory / "second.jsonl", api_base, cache))
        third = run(command(large, directory / "large-out.jsonl", api_base, directory / "other.sqlite"))
    assert (first.summary["groups"], second.summary["groups"]) == (GROUPS, GROUPS)
    assert second.summary["calls"] == 0, "the second pass paid"
    for name, one, limit in (("first pass", first, FIRST_LIMIT_S), ("second, from the cache", second, CACHED_LIMIT_S)):
        calls = one.summary["calls"]
        say(f"{name:23s} {one.wall_s:5.2f} s (limit {limit:.2f} s), {one.cpu_s:.2f} s on the processor, {calls} calls")
    say(f"{'peak memory':23s} {first.peak_mb:5.0f} MB for {GROUPS} groups, {third.peak_mb:.0f} MB for {4 * GROUPS}")
    checks = {
        "first pass": first.wall_s <= FIRST_LIMIT_S,
        "second pass": second.wall_s <= CACHED_LIMIT_S,
        "memory": third.peak_mb <= MEMORY_LIMIT * first.peak_mb,
    }
    return [name for name, holds in checks.items() if not holds]


def kill_ten_times(directory: Path) -> list[str]:
    """Every group once in the output, and no question asked again whose verdict was in the cache at a kill."""
    file, output, cache, log = (
        directory / name for name in ("groups.jsonl", "killed.jsonl", "k.sqlite", "killed-asked")
    )
    rng = random.Random(0)
    lost: list[int] = []
    with judge_server(log) as api_base:
        arguments = command(file, output, api_base, cache)
        for _ in range(KILLS):
            before = num_cached(cache)
            process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
            goal = before + rng.randint(1, 80)
            while num_cached(cache) < goal and process.poll() is None:
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.wait()
            time.sleep(10 * DELAY_S)  # until the server has answered what was in flight
            lost.append(num_lines(log) - num_cached(cache) - sum(lost))
        run(arguments)
    rows = list(read_lines(output, ScoredTrajectory))
    groups = Counter(row.group_id for row in rows)
    asked = log.read_text().split()
    twice = len(asked) - len(set(asked))
    ids = {row.id for row in rows}
    say(f"{KILLS} kills: {len(groups)} groups, {len(rows)} lines, {len(ids)} different trajectories")
    say(f"questions answered {len(asked)}, different {len(set(asked))}, verdicts in the cache {num_cached(cache)}")
    say(f"answered but not yet in the cache at a kill (in flight): {sum(lost)}; asked again: {twice}")
    checks = {
        "every group once": set(groups.values()) == {SIZE} and len(groups) == GROUPS,
        "no finished verdict paid twice": twice == sum(lost) == len(asked) - GROUPS,
    }
    return [name for name, holds in checks.items() if not holds]


def num_cached(cache: Path) -> int:
    if not cache.exists():
        return 0
    with contextlib.closing(sqlite3.connect(cache, timeout=10)) as database:
        try:
            return int(database.execute("select count(*) from verdicts").fetchone()[0])
        except sqlite3.OperationalError:  # not made yet
            return 0


def num_lines(path: Path) -> int:
    return len(path.read_text().split()) if path.exists() else 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    say(f"{GROUPS} groups of {SIZE}, {DELAY_S * 1000:.0f} ms an answer, {PLACES} calls at once, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        missed = [*pass_twice(Path(name)), *kill_ten_times(Path(name))]
    if missed:
        raise SystemExit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
