"""How many rollouts a student needs with a teacher and without, and with the judge's words and without, in tic-tac-toe.

    python -m benchmarks.learning.distill                                    # all that is missing: hours on one core
    python -m benchmarks.learning.distill --only teaching --student 224x6 --teacher 512x6 --teacher-steps 96 \
        --teacher-settings train.learning_rate=1e-4                 # 4M and 20M parameters
    python -m benchmarks.learning.distill --only words --seeds 0 --rollouts 512
    python -m benchmarks.learning.distill --table                            # runs nothing

teaching   A teacher, trained here by the recipe that `--teacher-config` names, against none: `distill` has its logprobs
           and no reward, `distill+reward` has both, `grpo` has rewards alone. `fast` is three times the learning rate.
words      A judge that names better moves by rule (distill_words.py): `sdpo` has its words, `sdpo+score` its words and
           its scores (`10score`: with ten times their weight), `grpo` its scores alone. The model has learned to read
           such words, and no good play.

Every run is one row of benchmarks/results/distill.jsonl: (part, contestant, seed, sizes) with its curve. Rows that are
there are not run again, and a run that was broken off goes on. A model's size is WIDTHxLAYERS.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from art_cli.models import builtin_models
from benchmarks.learning.curves import Failed, Place, count_lines
from benchmarks.learning.table import mean, reach
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

RECIPE = ROOT / "recipes" / "tictactoe"
CONFIG = RECIPE / "config-groups.yaml"
ROWS = ROOT / "benchmarks" / "results" / "distill.jsonl"
WORDS = ROOT / "benchmarks" / "learning" / "distill_words.py"
TEACHER = ("teacher", "teacher_steps", "teacher_config", "teacher_settings")  # what tells one teacher from another
SIZE = 64  # rollouts of a step: the recipe's 8 groups of 8
CONTESTANTS: dict[str, dict[str, list[str]]] = {
    "teaching": {
        "grpo": [],
        "distill": ["loss={name: distill, teacher: {model: TEACHER}}"],
        "distill+reward": ["loss={name: distill, teacher: {model: TEACHER}, reward_weight: 1.0}"],
        "grpo, fast": ["train.learning_rate=3e-4"],
        "distill, fast": ["loss={name: distill, teacher: {model: TEACHER}}", "train.learning_rate=3e-4"],
    },
    "words": {
        "grpo": [],
        "sdpo": ["loss={name: sdpo}"],
        "sdpo+score": ["loss={name: sdpo, reward_weight: 1.0}"],
        "sdpo+10score": ["loss={name: sdpo, reward_weight: 10.0}"],
        "sdpo, jensen_shannon": ["loss={name: sdpo, divergence: jensen_shannon}"],
        "sdpo+score, jensen_shannon": ["loss={name: sdpo, divergence: jensen_shannon, reward_weight: 1.0}"],
    },
}


class Bench:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.place = given, Place(given.cache, given.threads)

    def run(self) -> None:
        for part, contestants in CONTESTANTS.items():
            for seed in self.given.seeds:
                for name, settings in contestants.items():
                    if part in self.given.only and not self._is_done(part, name, seed):
                        self._measure(part, name, settings, seed)

    def _is_done(self, part: str, name: str, seed: int) -> bool:
        key = self._key(part, name, seed)
        return any(key.items() <= row.items() for row in read_rows(self.given.rows))

    def _key(self, part: str, name: str, seed: int) -> dict[str, Any]:
        sizes = {"student": self.given.student, "rollouts": self.given.rollouts}
        if part == "teaching":
            sizes |= {name: getattr(self.given, name) for name in TEACHER}
        return {"part": part, "contestant": name, "seed": seed, **sizes}

    def _measure(self, part: str, name: str, settings: list[str], seed: int) -> None:
        begin = time.perf_counter()
        row = self._key(part, name, seed)
        told = [part, name, seed, self.given.student, self.given.rollouts]
        if part == "teaching":
            teacher = self._teacher()
            row["teacher_win"] = wins(teacher)[-1]
            if any("TEACHER" in each for each in settings):  # GRPO's run is the same for every teacher
                settings = [each.replace("TEACHER", str(teacher)) for each in settings]
                told.append(teacher.name)
        else:
            settings = [f"judge={{name: function, entry: '{WORDS}:Words'}}", *settings]
            if settings[-1].startswith("loss"):
                settings.append("loss.feedback=" + json.dumps("\nbetter: {explanation}"))
        run = self.given.cache / run_name(told)
        demos = RECIPE / "demos.py" if part == "teaching" else WORDS
        if not (run / "checkpoints").is_dir():
            start = self._start(self.given.student, demos, seed)
            self.place.art(ROOT, "checkpoints", run, "--import", start)
        steps = -(-self.given.rollouts // SIZE)
        self._train(run, self.given.student, seed, steps, settings)
        row |= {"curve": wins(run), "seconds": round(time.perf_counter() - begin, 1)}
        append_row(self.given.rows, row)
        print(f"{part}  {name}  seed {seed}  {row['seconds']} s  " + " ".join(f"{w:.3f}" for _, w, _ in row["curve"]))

    def _teacher(self) -> Path:
        """The run of the teacher, which begins as the recipe does."""
        given = self.given
        run: Path = given.cache / run_name([getattr(given, name) for name in TEACHER])
        if not (run / "checkpoints").is_dir():
            start = self._start(given.teacher, RECIPE / "demos.py", 0)
            self.place.art(ROOT, "checkpoints", run, "--import", start)
        settings = given.teacher_settings.split()
        self._train(run, given.teacher, 0, given.teacher_steps, settings, RECIPE / given.teacher_config)
        return run

    def _train(self, run: Path, size: str, seed: int, steps: int, settings: list[str], config: Path = CONFIG) -> None:
        """Trains the run to its end; one that was broken off goes on."""
        knobs = [f"train.steps={steps}", f"eval.every={self.given.every}", "rollout.processes=1", f"runs={run.parent}"]
        own = [f"model.base={self._base(size)}", f"train.seed={seed}", f"name={run.name}"]
        self.place.art(ROOT, "train", config, *own, *knobs, *settings)

    def _start(self, size: str, demos: Path, seed: int) -> Path:
        """The warmed-up adapter from which all contestants of a part and seed start."""
        start: Path = self.given.cache / f"start_{demos.stem}_{size}_{seed}"
        if not (start / "manifest.json").exists():
            own = [f"model.base={self._base(size)}", f"train.seed={seed}", f"runs={start.parent}"]
            self.place.art(ROOT, "sft", CONFIG, f"{demos}:games", "-o", start, *own)
        return start

    def _base(self, size: str) -> Path:
        """The recipe's model in another size."""
        base: Path = self.given.cache / f"base_{size}"
        if not base.exists():
            self.place.python(ROOT, "-m", "benchmarks.learning.distill", "--build", base, "--student", size)
        return base


def run_name(told: list[Any]) -> str:
    """A directory's name that tells the run from all others."""
    return re.sub(r"[^\w-]+", "-", "_".join(map(str, told)).replace("+", "-and-"))


def build(directory: Path, size: str) -> None:
    """Writes the recipe's model with WIDTHxLAYERS, random weights and the recipe's tokenizer."""
    sys.path.insert(0, str(RECIPE))
    import model

    width, layers = map(int, size.split("x"))
    builtin_models.build(directory, model.make_tokenizer(), hidden=width, layers=layers, rope_theta=100.0)


def wins(run: Path) -> list[tuple[int, float, int]]:
    """(rollouts so far, share of won games, games) at each evaluation of a run."""
    from art_cli.runs.run_dir import RunDir

    found = RunDir(run)
    return [
        (step * SIZE, means["win"], count_lines(found.eval_path(step)))
        for step, means in sorted(found.evaluations().items())
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Per part and contestant: wins at the start, in the middle and at the end, and rollouts to the teacher's level."""
    lines = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        names = ("part", "student", "contestant", "rollouts", *TEACHER)
        groups.setdefault(tuple(row.get(name) for name in names), []).append(row)
    for (part, student, contestant, _, teacher, *_), runs in groups.items():
        curves = [row["curve"] for row in runs]
        text = f"{part}  student {student}  {contestant}  {len(runs)} seeds "
        for at in range(min(map(len, curves))):
            text += f"  {curves[0][at][0]}: {shown([curve[at][1] for curve in curves])}"
        if teacher is not None:
            _, win, games = runs[0]["teacher_win"]
            level = win - 1.96 * (win * (1 - win) / games) ** 0.5
            reached = [reach(curve, level) for curve in curves]
            counts = ", ".join(f"{'' if each.is_reached else '>'}{each.rollouts}" for each in reached)
            text += f"  teacher {teacher} wins {win:.3f}; rollouts to {level:.3f}: {counts}"
        lines.append(text)
    return "\n".join(lines)


def shown(values: list[float]) -> str:
    """A mean, with the half of its 95 % interval where there are several seeds."""
    found = mean(values)
    return f"{found.value:.3f}" + ("" if found.half is None else f" +-{found.half:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--student", default="96x3", help="WIDTHxLAYERS; 0.4M parameters")
    parser.add_argument("--teacher", default="128x4", help="WIDTHxLAYERS; 0.9M parameters")
    parser.add_argument("--teacher-steps", type=int, default=160)
    parser.add_argument("--teacher-config", default="config.yaml", help="of the tictactoe recipe")
    parser.add_argument(
        "--teacher-settings", default="", help="more settings for the teacher's run, with spaces between"
    )
    parser.add_argument("--rollouts", type=int, default=6144)
    parser.add_argument("--every", type=int, default=8, help="steps of 64 rollouts between two evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=lambda text: Path(text).resolve(), default=ROOT / "runs" / "distill")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--build", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.build is not None:
        build(given.build, given.student)
        return
    if not given.table:
        given.cache.mkdir(parents=True, exist_ok=True)
        try:
            Bench(given).run()
        except (Failed, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"not run: {error}") from error
    print(table(read_rows(given.rows)))


if __name__ == "__main__":
    main()
