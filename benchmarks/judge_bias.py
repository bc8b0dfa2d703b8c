"""A judge with a position bias of 0.2: what one vote is worth, what four are, and whether the report names the bias.

    python -m benchmarks.judge_bias

300 groups of 8 attempts with qualities drawn evenly from [0.15, 0.85] are judged by a judge server that scores an
attempt by its true quality, adds 0.1 in the first place and takes off 0.1 in the last (linear between), and on top of
that is unsure by a standard deviation of `noise`. `art judge` runs as a user runs it; the numbers are its report's.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from art_cli.runs.durable import write_lines
from art_cli.runs.trajectory import Trajectory

ART = [sys.executable, "-m", "art_cli", "judge"]
GROUPS, SIZE, BIAS = 300, 8, 0.2
NOISES = (0.0, 0.03)
VOTES = (1, 2, 4, 8)


def write_groups(path: Path) -> None:
    """Attempts that state their quality, which the judge server goes by; the gold is the same number."""
    rng = random.Random(0)
    rows = []
    for number in range(GROUPS):
        for index in range(SIZE):
            quality = round(rng.uniform(0.15, 0.85), 4)
            messages = [
                {"role": "user", "content": f"Task {number}"},
                {"role": "assistant", "content": f"quality={quality}"},
            ]
            rows.append(
                Trajectory(
                    id=f"{number}-{index}", group_id=str(number), group_size=SIZE, index=index, messages=messages,
                    metrics={"quality": quality},
                )
            )  # fmt: skip
    write_lines(path, rows)


def judge(directory: Path, api_base: str, *, votes: int, noise: float) -> dict[str, Any]:
    """The report of one judgement, as `--json` prints it."""
    settings = [f"judge.base_url={api_base}", "judge.model=rule", f"judge.votes={votes}", "judge.cache=null"]
    output = directory / f"scored-{votes}-{noise}.jsonl"
    done = subprocess.run(
        [*ART, str(directory / "groups.jsonl"), "-o", str(output), *settings, "--gold", "metrics.quality", "--json"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    return report


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    out = sys.stdout.write
    out(f"{GROUPS} groups of {SIZE}, position bias {BIAS} built in\n")
    out(f"{'noise':>6s} {'votes':>5s}  {'pairwise accuracy':26s} {'order bias the report names':34s} {'spread':>7s}\n")
    missed = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_groups(directory / "groups.jsonl")
        for noise in NOISES:
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.judge_server", "--bias", str(BIAS), "--noise", str(noise)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": "0"},
            )  # fmt: skip
            try:
                assert server.stdout is not None
                api_base = server.stdout.readline().strip()
                for votes in VOTES:
                    found = judge(directory, api_base, votes=votes, noise=noise)["judges"][0]
                    accuracy, bias, spread = (
                        found["agreement"]["pairwise_accuracy"],
                        found["order_bias"],
                        found["spread"],
                    )
                    out(f"{noise:6.2f} {votes:5d}  {_interval(accuracy):26s} {_interval(bias, '+'):34s} ")
                    out("       \n" if spread is None else f"{spread:7.4f}\n")
                    if votes == 4 and (
                        accuracy["value"] < 0.95 or not bias["low"] - 0.005 <= BIAS <= bias["high"] + 0.005
                    ):
                        missed.append(f"noise {noise}")
            finally:
                server.kill()
                server.wait()
    if missed:
        raise SystemExit(f"four votes below 0.95, or a bias not named: {', '.join(missed)}")


def _interval(found: dict[str, float], sign: str = "") -> str:
    return f"{found['value']:{sign}.3f} [{found['low']:{sign}.3f}, {found['high']:{sign}.3f}]"


if __name__ == "__main__":
    main()
