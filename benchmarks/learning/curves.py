"""How many rollouts it takes to learn, ours beside TRL: the same model, start, scenarios, sampling and evaluation.

    python -m benchmarks.learning.curves           # all that is missing: more than a day
    python -m benchmarks.learning.curves --only tictactoe --contestant default trl --seeds 0 1 2
    python -m benchmarks.learning.curves --only tictactoe --variant lower "train.learning_rate=2e-4 loss.clip=0.1"
    python -m benchmarks.learning.curves --table   # runs nothing; writes LEARNING.md

Every run is one row of benchmarks/results/learning.jsonl: (task, contestant, seed) with its curve. Rows that are there
are not run again, so that the work of a day can be broken off at any moment; `--again` runs them once more, and the
newest row of each counts.

Contestants: `default` is the tic-tac-toe recipe's config.yaml, without what is for its game alone (OF_THE_GAME). All
others of ours play groups of attempts, as its config-groups.yaml says, unless their settings say otherwise: `loss=NAME`
with that loss (`loss=grpo` is the file as it is), `old` with the settings that the recipe had before this benchmark
(OLD), a variant with its own. `trl` is TRL's GRPOTrainer with the settings that won a search on seed 0. A point of that
search is a contestant too, and can be named: `trl:learning_rate=1e-3,beta=0.02`. All of this holds for the other tasks
too. All contestants of a task and seed start from one checkpoint, made once by `art sft`.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.learning.table import Goal, best_search, table
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

ROWS = ROOT / "benchmarks" / "results" / "learning.jsonl"
RECIPE = Path("recipes/tictactoe/config.yaml")
GROUPS = Path("recipes/tictactoe/config-groups.yaml")
TASKS_HOME = Path("benchmarks/learning/tasks")
OLD = (
    "loss=grpo",
    "loss.mean_over=trained",
    "rollout.groups_per_step=32",
    "train.learning_rate=5e-4",
    "train.decay=none",
    "train.updates_per_step=1",
    "train.epochs_per_step=1",
)
OF_THE_GAME = ("loss.value_trunk",)  # the recipe has these for its game: they gain most there, and lose in filtering
NOT_ALONE = ("gdpo", "distill", "sdpo")  # losses that need a reward in parts, a teacher, or a judge that explains
DEADLINE_S = 3 * 3600.0  # longest time for one command
SCENE = ("entry", "scenarios", "group_size", "groups_per_step", "max_turns", "processes", "sampling")  # a task's own
EVERY = 768  # rollouts between two evaluations
SEARCH_RATES = ("1e-4", "2.5e-4", "5e-4", "1e-3")
SEARCH_OTHERS = (
    "num_iterations=4",
    "loss_type=dr_grpo",
    "scale_rewards=none",
    "beta=0.02",
    "lr_scheduler_type=linear",
    "rollout.groups_per_step=32",
)


class Task(NamedTuple):
    """A task. Paths are relative to the root of a checkout."""

    config: Path
    demos: str  # "file.py:function" of the warm-up, relative to the configuration
    metric: str  # the metric of an evaluation that is the success
    goal: Goal


TASKS = {
    "tictactoe": Task(
        TASKS_HOME / "tictactoe.yaml", "../../../recipes/tictactoe/demos.py:games", "win", Goal(0.75, 6144)
    ),
    "sorting": Task(TASKS_HOME / "sorting.yaml", "reasoning.py:sorting_demos", "reward", Goal(0.75, 6144)),
    "filtering": Task(TASKS_HOME / "filtering.yaml", "reasoning.py:filtering_demos", "reward", Goal(0.3, 6144)),
    "guessing": Task(TASKS_HOME / "guessing.yaml", "guessing.py:demos", "reward", Goal(0.6, 6144)),
}


class Contestant(NamedTuple):
    """What is compared. Example: Contestant("loss=dapo", ("loss=dapo",))."""

    name: str
    settings: tuple[str, ...] = ()  # key=value of ours, or of TRL's GRPOConfig
    is_trl: bool = False
    is_whole: bool = False  # the settings are all for learning; else they come after those of config-groups.yaml

    @property
    def told(self) -> list[str]:
        """The settings as a row tells them: paths in this checkout are relative to its root."""
        return [setting.replace(f"{ROOT}{os.sep}", "") for setting in self.settings]


class Job(NamedTuple):
    """One row to be."""

    name: str
    task: Task
    contestant: Contestant
    seed: int
    rollouts: int

    @property
    def scene(self) -> list[str]:
        """The settings of the contestant that change the scene, for TRL too. Example: rollout.groups_per_step=32."""
        return [setting for setting in self.contestant.settings if setting.startswith("rollout.")]


class Place:
    """The cache: bases, starts and runs; and how commands are run."""

    def __init__(self, root: Path, threads: int) -> None:
        self.root, self.threads = root.resolve(), threads

    def start(self, name: str, task: Task, seed: int) -> Path:
        """The warmed-up policy from which everyone starts; made if it is not there."""
        start = self.root / name / f"start-{seed}"
        if not (start / "manifest.json").exists():
            config, base = ROOT / task.config, self.base(name, task)
            demos = f"{config.parent / task.demos}"
            self.art(ROOT, "sft", config, demos, "-o", start, *self._common(base, seed))
        return start

    def base(self, name: str, task: Task) -> Path:
        """The directory of the base model that the task's configuration builds."""
        base = self.root / name / "base"
        if not base.exists():
            program = "import sys; from pathlib import Path; from art_cli.config.compose import load_config\n"
            program += "from art_cli.models.base_source import find_base; loaded = load_config(Path(sys.argv[1]), [])\n"
            program += "find_base(loaded.config.model.base, directory=loaded.directory, built=Path(sys.argv[2]))"
            self.python(ROOT, "-c", program, ROOT / task.config, base)
        return base

    def _common(self, base: Path, seed: int) -> list[str]:
        return [f"model.base={base}", f"train.seed={seed}", f"runs={self.root / 'runs'}"]

    def art(self, code: Path, *arguments: object) -> str:
        return self.python(code, "-m", "art_cli", *arguments)

    def python(self, code: Path, *arguments: object) -> str:
        """What a Python process printed whose imports come from the checkout `code`. Raises Failed."""
        threads = str(self.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise Failed("\n".join(done.stderr.strip().splitlines()[-8:]))
        return done.stdout

    # --- one run of each side ---------------------------------------------------------------------------------------

    def train_ours(self, job: Job) -> dict[str, Any]:
        """The curve and the entropy of a run of `art train`, which goes on if it was broken off."""
        from art_cli.runs.run_dir import RunDir

        start, base = self.start(job.name, job.task, job.seed), self.base(job.name, job.task)
        run = RunDir(self._run_path(job))
        config = ROOT / job.task.config
        if not run.checkpoint_steps():
            self.art(ROOT, "checkpoints", run.root, "--import", start)
        num, every = num_steps(job)
        settings = [*all_settings(job.contestant), f"train.steps={num}", f"eval.every={every}", "rollout.processes=1"]
        self.art(ROOT, "train", config, *self._common(base, job.seed), f"name={run.root.name}", *settings)
        played = {step: count_lines(run.trajectories_path(step)) for step in range(num)}
        curve = [
            (sum(played[before] for before in range(step)), means[job.task.metric], count_lines(run.eval_path(step)))
            for step, means in sorted(run.evaluations().items())
        ]
        entropies = [line.metrics["entropy"] for line in run.metrics() if "entropy" in line.metrics]
        kept = json.loads(run.config_path.read_text())
        return {
            "curve": curve,
            "entropy": entropies[-1],
            "config": {name: kept.get(name) for name in ("train", "loss", "algorithm", "rollout")},
        }

    def train_trl(self, job: Job) -> dict[str, Any]:
        """The curve and the entropy of a run of TRL; its checkpoints are evaluated by `art eval`."""
        start, base = self.start(job.name, job.task, job.seed), self.base(job.name, job.task)
        config, out = ROOT / job.task.config, self._run_path(job)
        num, every = num_steps(job)
        options: list[object] = ["--base", base, "--start", start, "--out", out, "--steps", num, "--every", every]
        own = [setting for setting in job.contestant.settings if setting not in job.scene]
        options += [word for setting in own for word in ("--set", setting)]
        shutil.rmtree(out, ignore_errors=True)
        said = self.python(ROOT, "-m", "benchmarks.learning.trl_side", config, *job.scene, *options, "--seed", job.seed)
        steps = sorted({*range(0, num, every), num})
        policies = {str(out / "checkpoints" / f"step_{step:04d}"): step for step in steps}
        named = [word for path in policies for word in ("--checkpoint", path)]
        common = self._common(base, job.seed)
        rows = json.loads(self.art(ROOT, "eval", config, *common, "rollout.processes=1", *named, "--json"))["metrics"]
        size = step_size(job)
        found = [
            (policies[row["policy"]] * size, row["mean"], row["num"])
            for row in rows
            if row["metric"] == job.task.metric
        ]
        return {"curve": sorted(found), **json.loads(said.splitlines()[-1])}

    def _run_path(self, job: Job) -> Path:
        name = "".join(c if c.isalnum() or c in ".-" else "-" for c in job.contestant.name)
        return self.root / "runs" / f"{job.name}_{name}_{job.seed}_{job.rollouts}"

    def forget(self, job: Job) -> None:
        shutil.rmtree(self._run_path(job), ignore_errors=True)


class Failed(Exception):
    """A command failed; the text is the end of what it said."""


def all_settings(contestant: Contestant) -> list[str]:
    """What one of ours learns with on any task."""
    groups = [] if contestant.is_whole else learning_settings(ROOT / GROUPS)
    return combine(groups, contestant.settings)


def step_size(job: Job) -> int:
    """The rollouts of a step."""
    from art_cli.config.compose import load_config

    rollout = load_config(ROOT / job.task.config, job.scene).config.rollout
    return rollout.group_size * rollout.groups_per_step


def num_steps(job: Job) -> tuple[int, int]:
    """The steps of the run, and between two evaluations."""
    size = step_size(job)
    return -(-job.rollouts // size), max(EVERY // size, 1)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def learning_settings(recipe: Path) -> list[str]:
    """What a recipe sets for learning, as key=value: not its task, steps and seed."""
    found = yaml.safe_load(recipe.read_text())
    train = {name: value for name, value in found.get("train", {}).items() if name not in ("steps", "seed")}
    rollout = {name: value for name, value in found["rollout"].items() if name not in SCENE}
    sections = {"rollout": rollout, "train": train, "loss": found.get("loss"), "algorithm": found.get("algorithm")}
    return [line for name, value in sections.items() if value is not None for line in _flat(name, value)]


def _flat(key: str, value: Any) -> Iterator[str]:
    """Example: ("loss", {"name": "dapo", "clip": 0.1}) gives loss=dapo, loss.clip=0.1."""
    if not isinstance(value, dict):
        yield f"{key}={json.dumps(value) if not isinstance(value, str) else value}"
        return
    if "name" in value:
        yield f"{key}={value['name']}"
    for name, inner in value.items():
        if name != "name":
            yield from _flat(f"{key}.{name}", inner)


def combine(settings: Sequence[str], own: Sequence[str]) -> list[str]:
    """The settings with one's own after them. Another loss leaves nothing of the loss that was set before, and no decay
    leaves nothing of where a decay would end."""
    is_other = any(setting.startswith(("loss=", "algorithm")) for setting in own)
    kept = [one for one in settings if not (is_other and one.startswith(("loss", "algorithm")))]
    if "train.decay=none" in own:
        kept = [one for one in kept if not one.startswith("train.decay_to=")]
    return [*kept, *own]


# --- which rows -----------------------------------------------------------------------------------------------------


def presets() -> list[Contestant]:
    """One contestant for each loss that a configuration can name."""
    from art_cli.config.compose import load_config
    from art_cli.config.sections.loss_config import EXPERIMENTS
    from art_cli.learners.algorithms.presets import PRESETS

    used = load_config(ROOT / GROUPS, []).config.loss
    own = getattr(used, "name", "")  # its knobs are those of the file
    names = [name for name in (*PRESETS, *EXPERIMENTS) if name not in NOT_ALONE]
    return [Contestant(f"loss={name}", () if name == own else (f"loss={name}",)) for name in names]


def default() -> Contestant:
    """What the recipe's config.yaml sets for any task, the sizes of a step included, as the other tasks have groups."""
    rollout = yaml.safe_load((ROOT / RECIPE).read_text())["rollout"]
    sizes = [f"rollout.{name}={rollout[name]}" for name in ("group_size", "groups_per_step")]
    settings = [one for one in learning_settings(ROOT / RECIPE) if not one.startswith(OF_THE_GAME)]
    return Contestant("default", (*settings, *sizes), is_whole=True)


def search(task: str, rows: Path) -> Iterator[Contestant]:
    """TRL's settings to try on one seed; those of the second round are made from the best learning rate so far."""
    for rate in SEARCH_RATES:
        yield _point(f"learning_rate={rate}")
    best = best_trl(task, rows)
    if best is None:
        return
    rate = next(one for one in best.settings if one.startswith("learning_rate="))
    for other in SEARCH_OTHERS:
        yield _point(rate, other)


def _point(*settings: str) -> Contestant:
    return Contestant("trl:" + ",".join(settings), settings, is_trl=True)


def best_trl(task: str, path: Path) -> Contestant | None:
    """The winner of the search so far, as the contestant `trl`; None: nothing was tried."""
    rows = [row for row in read_rows(path) if (row["task"], row["seed"]) == (task, 0)]
    rows = [row for row in rows if row["contestant"].startswith("trl:")]
    if not rows:
        return None
    return Contestant("trl", tuple(best_search(rows, TASKS[task].goal)["settings"]), is_trl=True)


class Runner:
    """Runs what has no row yet, one after the other."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.place = given, Place(given.cache, given.threads)
        self.failures: list[str] = []
        revision = ["git", "describe", "--always", "--dirty", "--abbrev=7"]
        self.version = subprocess.run(revision, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        variants = [Contestant(name, tuple(settings.split())) for name, settings in given.variant]
        self.ours = [Contestant("old", OLD), default(), *presets(), *variants]
        self.asked = given.contestant or [one.name for one in variants] or [*(one.name for one in self.ours), "trl"]

    def run(self) -> None:
        points = [_point(*name[4:].split(",")) for name in self.asked if name.startswith("trl:")]
        known = {one.name: one for one in [*self.ours, *points]}
        if unknown := [name for name in self.asked if name not in known and name not in ("trl", "search")]:
            raise SystemExit(f"no contestant {', '.join(unknown)}; there are: {', '.join(known)}, trl, search")
        for name in self.given.only or TASKS:
            for seed in self.given.seeds:
                for asked in self.asked:
                    if asked in known:
                        self.measure(name, known[asked], seed)
            if {"trl", "search"} & set(self.asked):
                self._run_trl(name)

    def _run_trl(self, name: str) -> None:
        """Searches on seed 0, then runs the winner on all seeds. On seed 0 it was run: its row is copied as `trl`."""
        for point in search(name, self.given.rows):
            self.measure(name, point, seed=0)
        best = best_trl(name, self.given.rows)
        if best is None or "trl" not in self.asked:
            return
        for seed in self.given.seeds:
            if seed:
                self.measure(name, best, seed)
        rows = [row for row in read_rows(self.given.rows) if (row["task"], row["seed"]) == (name, 0)]
        won = [r for r in rows if r["contestant"].startswith("trl:") and tuple(r["settings"]) == best.settings][-1]
        if [row["curve"] for row in rows if row["contestant"] == "trl"][-1:] != [won["curve"]]:
            append_row(self.given.rows, {**won, "contestant": "trl"})

    def measure(self, name: str, contestant: Contestant, seed: int) -> None:
        """Runs one contestant on one seed, unless it has a row; adds the row."""
        task = TASKS[name]
        job = Job(name, task, contestant, seed, self.given.rollouts or task.goal.rollouts)
        if not self.given.again and is_done(job, self.given.rows):
            return
        train: Callable[[Job], dict[str, Any]] = self.place.train_trl if contestant.is_trl else self.place.train_ours
        try:
            self.place.start(name, task, seed)
            begin, cpu_s = time.perf_counter(), _children_s()
            found = train(job)
        except (Failed, subprocess.TimeoutExpired) as error:
            self.failures.append(f"{name}, {contestant.name}, seed {seed}: {error}")
            print(self.failures[-1], file=sys.stderr, flush=True)
            return
        rates = [success for _, success, _ in found["curve"]]
        row = {
            "task": name,
            "contestant": contestant.name,
            "seed": seed,
            "settings": contestant.told,
            "rollouts": job.rollouts,
            **found,
            "min": min(rates),
            "max": max(rates),
            "seconds": round(time.perf_counter() - begin, 1),
            "cpu_s": round(_children_s() - cpu_s, 1),
            "threads": self.given.threads,
            "version": self.version,
        }
        append_row(self.given.rows, row)
        print(
            f"{name}  {contestant.name}  seed {seed}  {row['seconds']} s  " + " ".join(f"{r:.3f}" for r in rates),
            flush=True,
        )
        if not self.given.keep:
            self.place.forget(job)


def _children_s() -> float:
    """The processor seconds of all processes that were run from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def is_done(job: Job, path: Path) -> bool:
    """Whether there is a row of at least as many rollouts with the same settings."""
    key = (job.name, job.contestant.name, job.seed, job.contestant.told)
    return any(
        (row["task"], row["contestant"], row["seed"], row["settings"]) == key and row["rollouts"] >= job.rollouts
        for row in read_rows(path)
    )


HEAD = """\
# How many rollouts it takes to learn

Written by `python -m benchmarks.learning.curves --table` from learning.jsonl, which has every curve. Means over seeds
with 95 % intervals (Student's t). A run reaches a success rate at the first evaluation from which its isotonic curve is
there; `>` marks one that did not. A run falls if it ends below its best evaluation by more than the 95 % interval of
the difference. Seconds are processor seconds of a whole run, evaluations included.

"""


def write_table(path: Path) -> str:
    """The table of the rows in `path`, written beside it."""
    text = HEAD + table(read_rows(path), {name: task.goal for name, task in TASKS.items()})
    path.with_name("LEARNING.md").write_text(text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--contestant", nargs="+", help="old, default, loss=NAME, trl, search, trl:SETTINGS, a variant")
    parser.add_argument("--variant", nargs=2, action="append", default=[], metavar=("NAME", "SETTINGS"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rollouts", type=int, help="length of a run; by default the task's own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / "runs" / "learning", help="bases, starts and runs")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--keep", action="store_true", help="run directories stay in the cache")
    parser.add_argument("--again", action="store_true", help="run also what has a row")
    parser.add_argument("--table", action="store_true", help="only print the table and write LEARNING.md")
    given = parser.parse_args()
    runner = Runner(given)
    if not given.table:
        runner.run()
    print(write_table(given.rows))
    if runner.failures:
        raise SystemExit("not run: " + "\n".join(runner.failures))


if __name__ == "__main__":
    main()
