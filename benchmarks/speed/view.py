"""How quickly `art view` opens 100,000 trajectories, what it keeps in memory, and how soon it answers.

    python -m benchmarks.speed.view                 a run of 100,000 trajectories, and one file of as many
    python -m benchmarks.speed.view --num 10000     fewer

The trajectories are made by a seeded script: 8 attempts a group, 3 to 8 turns with tokens and tool calls, 8 KB a line.
The server is `art view` itself in a process of its own, asked over HTTP by one client. Times are from the start of the
process, imports included; memory is the largest resident set of the process until the end.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from art_cli.runs.run_dir import MetricsLine, RunDir
from art_cli.runs.trajectory import Score, ScoredTrajectory, Turn
from benchmarks.shared.commands import processor_seconds_of

GROUP, GROUPS = 8, 125  # attempts of a group, groups of a step
ASKED = 200  # groups and trajectories that are opened
WORDS = ("the", "agent", "opens", "a", "file", "reads", "every", "line", "finds", "an", "order", "returns", "it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100_000, help="number of trajectories")
    num = parser.parse_args().num
    with tempfile.TemporaryDirectory(prefix="art-view-") as place:
        root = Path(place)
        file, run = root / "scored.jsonl", root / "run"
        num_bytes = make(run, file, num)
        print(f"{num:,} trajectories, {num_bytes / 1e6:,.0f} MB, {num_bytes / num / 1e3:.1f} KB each", flush=True)
        for name, path in {"a run": run, "one file": file}.items():
            print(f"{name}: {measure(path)}", flush=True)


def make(run: Path, file: Path, num: int) -> int:
    """Writes the same trajectories as a run and as one file. Returns their bytes."""
    draw, num_bytes = random.Random(7), 0
    directory = RunDir(run)
    run.mkdir()
    directory.config_path.write_text(json.dumps({"name": "made", "train": {"steps": num}}))
    with file.open("wb") as whole:
        for step in range(-(-num // (GROUP * GROUPS))):
            directory.scored_path(step).parent.mkdir()
            with directory.scored_path(step).open("wb") as part:
                for place in range(min(GROUP * GROUPS, num - step * GROUP * GROUPS)):
                    line = msgspec.json.encode(trajectory(draw, step, place)) + b"\n"
                    num_bytes += len(line)
                    whole.write(line)
                    part.write(line)
    lines = [MetricsLine(step=s, split="train", metrics=numbers(draw), time=1.0 * s) for s in range(step + 1)]
    directory.metrics_path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return num_bytes


def numbers(draw: random.Random) -> dict[str, float]:
    names = ("reward_mean", "entropy", "grad_norm", "train_s", "sample_s", "judge_s", "num_trajectories")
    return {name: draw.random() for name in names}


def trajectory(draw: random.Random, step: int, place: int) -> ScoredTrajectory:
    group, index = divmod(place, GROUP)
    messages = [{"role": "user", "content": words(draw, 60)}]
    turns: list[Turn] = []
    for number in range(draw.randint(3, 8)):
        sampled = [draw.randrange(150_000) for _ in range(draw.randint(10, 30))]
        logprobs = [-draw.random() for _ in sampled]
        length = sum(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns)
        turns.append(
            Turn(
                parent=number - 1 if number else None,
                kept=length,
                prompt_ids=[draw.randrange(150_000) for _ in range(30)],
                sampled_ids=sampled,
                logprobs=logprobs,
                raw_logprobs=None,
                step=step,
                temperature=1.0,
            )
        )
        call = {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": f'{{"n": {number}}}'}}
        messages.append({"role": "assistant", "content": words(draw, len(sampled)), "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": words(draw, 20)})
    reward = round(draw.random(), 2)
    return ScoredTrajectory(
        id=f"s{step:04d}-g{group:04d}-a{index:02d}",
        group_id=f"s{step:04d}-g{group:04d}",
        group_size=GROUP,
        index=index,
        step=step,
        scenario={"id": f"task-{group}", "question": words(draw, 12)},
        messages=messages,
        turns=turns,
        metrics={"num_turns": len(turns), "num_sampled": sum(len(turn.sampled_ids) for turn in turns), "win": reward},
        returned_reward=reward,
        reward=reward,
        scores=[Score(judge="ruler", model="openai/gpt-6.1-sol", score=reward, explanation=words(draw, 15))],
        error="RuntimeError: made" if draw.random() < 0.02 else None,
    )


def words(draw: random.Random, num: int) -> str:
    return " ".join(draw.choices(WORDS, k=num))


def measure(path: Path) -> str:
    """What is measured on one server over the path, as text."""
    began = time.monotonic()
    with server(path) as (process, get):
        sources = get("/api/sources")
        get("/api/source/0")
        first = time.monotonic() - began
        place = "/api/source/0/step/{step}/{split}".format(**sources["sources"][0]["steps"][-1])
        rows = get(f"{place}/groups?limit=100")["rows"]
        while not rows:
            rows = get(f"{place}/groups?limit=100")["rows"]
        groups = time.monotonic() - began
        while get("/api/sources")["sources"][0]["indexing"]:
            time.sleep(0.05)
        whole, worked = time.monotonic() - began, processor_seconds_of(process.pid)
        rows = get(f"{place}/groups?limit=1000")["rows"]
        group_ms = [timed(get, f"{place}/group/{quote(row['group_id'])}") for row in rows[:ASKED]]
        page_ms = [timed(get, f"/api/source/0/trajectory/{quote(row['ids'][0])}") for row in rows[:ASKED]]
        sort_ms = [timed(get, f"{place}/groups?sort={sort}&order=desc") for sort in 3 * ("reward", "spread", "length")]
        found_s = timed(get, f"{place}/groups?text=finds an order returns".replace(" ", "%20")) / 1000
        none_s = timed(get, f"{place}/groups?text=nothing has these words".replace(" ", "%20")) / 1000
        memory = peak(process)
    return (
        f"first answers {first:.2f} s, first groups {groups:.2f} s, whole index {whole:.2f} s "
        f"({worked:.2f} s of processor), {memory:.0f} MB; "
        f"group {both(group_ms)}, trajectory {both(page_ms)}, sorted groups {both(sort_ms)}, "
        f"text found in the step {found_s:.2f} s, text that is nowhere {none_s:.2f} s"
    )


def both(times_ms: list[float]) -> str:
    ordered = sorted(times_ms)
    return f"{statistics.median(ordered):.0f} ms (95 %: {ordered[int(0.95 * (len(ordered) - 1))]:.0f} ms)"


def timed(get: Callable[[str], dict], url: str) -> float:
    began = time.monotonic()
    get(url)
    return 1000 * (time.monotonic() - began)


@contextlib.contextmanager
def server(path: Path) -> Iterator[tuple[subprocess.Popen, Callable[[str], dict]]]:
    """Yields the process of `art view`, and what asks it."""
    command = [sys.executable, "-m", "art_cli", "view", str(path), "--port", "0", "--no-open"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        root = process.stdout.readline().strip().rstrip("/")
        yield process, lambda url: json.loads(urllib.request.urlopen(root + url, timeout=120).read())
    finally:
        process.terminate()
        process.wait()


def peak(process: subprocess.Popen) -> float:
    """The largest resident set of the process so far, in MB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e3


if __name__ == "__main__":
    main()
