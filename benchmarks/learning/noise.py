"""How many rollouts a judge's errors cost in tic-tac-toe, with its flip rates known to the learner and without.

    python -m benchmarks.learning.noise                                   # all that is missing: hours on one core
    python -m benchmarks.learning.noise --seeds 0 --rollouts 1024
    python -m benchmarks.learning.noise --table                           # runs nothing

The judge says 1 of a won game and 0 of any other (noise_judge.py). `clean` has its verdicts as they are; in `flipped`
one of five is turned round; `corrected` has the same flips, by seed, and `judge.noise` with their rates. With `--loss`
all three have another loss. Start, settings, evaluation and rows are those of benchmarks/learning/curves.py; the
evaluation counts won games. Rows that are in noise.jsonl are not run again.
"""

import argparse
from pathlib import Path

from benchmarks.learning.curves import TASKS, Runner
from benchmarks.learning.table import table
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import read_rows

ROWS = ROOT / "benchmarks" / "results" / "noise.jsonl"
JUDGE = ROOT / "benchmarks" / "learning" / "noise_judge.py"


def contestants(rate: float, loss: str | None) -> list[tuple[str, str]]:
    """(name, settings) of the three."""
    suffix = "" if loss is None else f" loss={loss}"
    clean = f"judge=function judge.entry={JUDGE}:Wins{suffix}"
    flipped = f"{clean} judge.options.rate={rate:g}"
    corrected = f"{flipped} judge.noise.false_positive={rate:g} judge.noise.false_negative={rate:g}"
    named = {"clean": clean, "flipped": flipped, "corrected": corrected}
    return [(name + suffix.replace(" loss=", " "), settings) for name, settings in named.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestant", nargs="+", choices=["clean", "flipped", "corrected"])
    parser.add_argument("--rate", type=float, default=0.2, help="share of verdicts that are flipped")
    parser.add_argument("--loss", help="a loss for all, instead of the recipe's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, help="length of a run; by default that of benchmarks.learning.curves")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "learning", help="bases, starts and runs")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--keep", action="store_true", help="run directories stay in the cache")
    parser.add_argument("--again", action="store_true", help="run also what has a row")
    parser.add_argument("--table", action="store_true", help="only print the table")
    given = parser.parse_args()
    named = contestants(given.rate, given.loss)
    asked = given.contestant or ["clean", "flipped", "corrected"]
    given.variant = [(name, settings) for name, settings in named if name.split()[0] in asked]
    given.contestant, given.only = None, ["tictactoe"]
    runner = Runner(given)
    if not given.table:
        runner.run()
    print(table(read_rows(given.rows), {"tictactoe": TASKS["tictactoe"].goal}))
    if runner.failures:
        raise SystemExit("not run: " + "\n".join(runner.failures))


if __name__ == "__main__":
    main()
