"""The alarm at the parting of reward and anchor: false alarms, and the delay after a true onset.

    python -m benchmarks.judges.alarm --simulate         # drawn series, 1,000 runs each: minutes on one core
    python -m benchmarks.judges.alarm --only tictactoe   # five clean seeds, five with a judge that turns: half an hour
    python -m benchmarks.judges.alarm --only assistant   # SmolLM2-135M: one clean seed and one that turns

Drawn series are those of tests/support/records/parting_series.py: 60 steps, 30 of them after the onset. On a recipe the
judge says what the rollout says; where it turns it pays from an update on for something else (alarm_judge.py): in
tic-tac-toe for moves, won or lost, and at the desk for long replies. The anchor is the share of wins, or of right
answers. A run ends at its alarm. Runs that are in the cache are not done again.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import NamedTuple

from art_cli.runs.history import read_updates
from art_cli.runs.parting import Beside, Parting, find_parting, read_beside
from art_cli.runs.run_dir import RunDir
from benchmarks.shared import commands
from benchmarks.shared.paths import ROOT
from tests.support.records.parting_series import APART, TOGETHER, series

JUDGE = ROOT / "benchmarks" / "learning" / "tasks" / "alarm_judge.py"  # apart from gguf.py, which hides the package
STEPS, ONSET, AFTER = 60, 30, 30  # of a drawn series: steps of a clean one, onset, and steps after it


class Task(NamedTuple):
    config: Path
    judge: str  # class in alarm_judge.py
    anchor: str  # function in it
    onset: int  # the first update whose rewards are others
    settings: Sequence[str]


TASKS = {
    "tictactoe": Task(
        ROOT / "recipes/tictactoe/config-groups.yaml", "Moves", "win", 19,
        ["train.steps=30", "train.decay_to=1", "train.epochs_per_step=2", "eval=null", "rollout.processes=1"],
    ),
    "assistant": Task(
        ROOT / "recipes/assistant/config.yaml", "Length", "right", 13,
        ["train.steps=22", "train.decay_to=1", "eval=null"],
    ),
}  # fmt: skip


def simulate(num: int) -> None:
    """Prints the share of false alarms, and the delays, of `num` drawn runs of each kind."""
    print("| together | rise | own drifts | runs | false alarms |\n|---|---|---|---|---|")
    for name, attempt in TOGETHER.items():
        for rise in (0.0, 3.0, 6.0):
            found = alarms(num, lambda seed: series(attempt, seed, num=STEPS, rise=rise))  # noqa: B023
            print(f"| {name} | {rise:g} | none | {num} | {len(found)} |", flush=True)
    for follows in (0.5, 0.8):
        found = alarms(num, lambda seed: series(TOGETHER["scales"], seed, num=STEPS, follows=follows))  # noqa: B023
        print(f"| scales | 3 | autocorrelation {follows} | {num} | {len(found)} |", flush=True)
    print("\n| apart | runs | before the onset | found | steps from onset to alarm: median, 95 % | onset off by |")
    print("|---|---|---|---|---|---|")
    for name, attempt in APART.items():
        found = alarms(num, lambda seed: series(attempt, seed, num=ONSET + AFTER, onset=ONSET))  # noqa: B023
        right = [each for each in found if each.alarm >= ONSET]
        delays, errors = [each.alarm - ONSET for each in right], [each.onset - ONSET for each in right]
        shown = f"{cut(delays, 50):g}, {cut(delays, 95):g} | {cut(errors, 50):g} ({min(errors)} to {max(errors)})"
        print(f"| {name} | {num} | {len(found) - len(right)} | {len(right)} | {shown} |", flush=True)


def alarms(num: int, draw: Callable[[int], Sequence[Beside]]) -> list[Parting]:
    return [found for seed in range(num) if (found := find_parting(draw(seed))) is not None]


def cut(values: Sequence[int], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(name: str, seeds: Sequence[int], cache: Path) -> None:
    """Prints a row for each run of a recipe."""
    task = TASKS[name]
    print("| task | seed | turns at | alarm | onset named | reward, anchor before | at the end |")
    print("|---|---|---|---|---|---|---|")
    for onset in (None, task.onset):
        for seed in seeds:
            run = train(task, cache / f"{name}-{seed}-{onset or 'clean'}", cache / f"{name}-start", seed, onset)
            steps = read_beside(read_updates(run.metrics()), "truth")
            found = find_parting(steps)
            told = "none | " if found is None else f"step {found.alarm} ({found.kind}) | {found.onset}"
            before, after = (
                f"{sum(each.reward for each in part) / 5:.2f}, {sum(each.anchor for each in part) / 5:.2f}"
                for part in (steps[task.onset - 6 : task.onset - 1], steps[-5:])
            )
            print(f"| {name} | {seed} | {onset or 'never'} | {told} | {before} | {after} |", flush=True)


def train(task: Task, root: Path, start: Path, seed: int, onset: int | None) -> RunDir:
    """Trains the run, or goes on with it. All runs of tic-tac-toe begin with the policy of one warm-up.

    A run that turns is the clean run of its seed up to its onset, and begins as a fork of it.
    """
    common = [*task.settings, f"runs={root.parent}", "train.keep_checkpoints=99"]
    judge = f"judge={{entry: '{JUDGE}:{task.judge}', options: {{onset: {onset or 'null'}}}}}"
    shadow = f"+shadow.truth={{judge: {{entry: '{JUDGE}:{task.anchor}'}}}}"
    clean = root.with_name(f"{root.name.rpartition('-')[0]}-clean")
    if onset and not root.exists() and onset - 1 in RunDir(clean).checkpoint_steps():
        art("checkpoints", clean, "--fork", root, "--step", onset - 1)
    if task.judge == "Moves" and not RunDir(root).checkpoint_steps():
        if not RunDir(start).checkpoint_steps():
            art("train", task.config, *common, f"name={start.name}", "train.steps=1")
        art("checkpoints", root, "--import", RunDir(start).checkpoint_path(0))
    if find_parting(read_beside(read_updates(RunDir(root).metrics()), "truth")) is None:
        rule = "stop=[{parts_from: truth}]"
        art("train", task.config, *common, f"name={root.name}", judge, shadow, rule, f"train.seed={seed}")
    return RunDir(root)


def art(*arguments: object) -> None:
    """Runs a command, which may end with a pause."""
    done = commands.art(*arguments)
    if done.returncode and "paused at step" not in done.stderr:
        raise SystemExit(commands.last_lines(done))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--num", type=int, default=1000, help="drawn runs of each kind")
    parser.add_argument("--only", nargs="+", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "alarm", help="runs")
    given = parser.parse_args()
    if given.simulate or not given.only:
        simulate(given.num)
    for name in given.only or ([] if given.simulate else TASKS):
        measure(name, given.seeds, given.cache.resolve())


if __name__ == "__main__":
    main()
