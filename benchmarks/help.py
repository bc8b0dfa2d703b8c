"""How long `art --help` and every `art X --help` take: median and maximum wall seconds of whole processes.

python benchmarks/help.py
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from typer.main import get_command

from art_cli.cli.app import app

ART = Path(sys.executable).with_name("art")
RUNS = 7


def measure(arguments: list[str]) -> list[float]:
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        subprocess.run([ART, *arguments], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    commands: dict[str, object] = get_command(app).commands  # type: ignore[attr-defined]
    print(f"{'command':24s} median     max  (of {RUNS})")
    for arguments in [["--help"], *([name, "--help"] for name in commands)]:
        seconds = measure(arguments)
        print(f"art {' '.join(arguments):20s} {statistics.median(seconds):6.3f}  {max(seconds):6.3f}")


if __name__ == "__main__":
    main()
