"""`art reward` on attempts of a recipe, whose own reward is the teacher.

    python -m benchmarks.judges.own_judge --groups 24     # assistant, SmolLM2: 12 minutes on two idle cores
    python -m benchmarks.judges.own_judge --made 11 --steps 5     # measured on the policy after ten steps
    python -m benchmarks.judges.own_judge --recipe function-calling --made 11 --steps 5    # also email-search
    python -m benchmarks.judges.own_judge --run runs/assistant --steps 2    # of a run that is there
    python -m benchmarks.judges.own_judge --made 16 --steps 12 --thumbs 200   # learns from 200 single ratings
    python -m benchmarks.judges.own_judge --made 16 --steps 12 --train   # then trains with each of SIDES

A run makes attempts. The judge learns from the first steps. It is measured on held-out requests of these, and on the
attempts of the last steps, by a policy that has learned since. Then the judge and the recipe's own reward score
these as a cascade, and the calls of the second are counted.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from art_cli.judges.cascade import FIRST
from art_cli.runs.durable import read_lines, write_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory

ROOT = Path(__file__).parents[2]
TRAIN_STEPS = 14
RELEARNED = 5  # steps after which the judge learns again from what the cascade asked
SIDES = ("teacher", "judge", "cascade", "relearned")


def art(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "art_cli", *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout


def make_run(recipe: str, directory: Path, num_steps: int, num_groups: int | None) -> Path:
    settings = [f"runs={directory}", f"train.steps={num_steps}", "eval=null"]
    settings += [] if num_groups is None else [f"rollout.groups_per_step={num_groups}"]
    art("train", ROOT / "recipes" / recipe / "config.yaml", *settings)
    return directory / recipe


def thumbs(files: Iterable[Path], num: int, output: Path) -> Path:
    """Writes `num` attempts as groups of one, rated 1 if they reached the best reward and else 0."""
    rows = [each for file in files for each in read_lines(file, ScoredTrajectory) if each.reward is not None]
    best = max(each.reward or 0.0 for each in rows)
    chosen = random.Random(0).sample(rows, min(num, len(rows)))
    write_lines(
        output,
        [
            msgspec.structs.replace(
                each, group_id=f"thumb-{number}", group_size=1, index=0, reward=float(each.reward == best)
            )
            for number, each in enumerate(chosen)
        ],
    )
    return output


def cascade_calls(scored: Path, judge: Path) -> str:
    output = judge.with_name("cascade.jsonl")
    art("judge", scored, "-o", output, *cascade(judge))
    return f"cascade: the second judge scored {_asked(output)} groups"


def cascade(judge: Path) -> list[str]:
    first = f"judge.first={{name: reward_model, model: '{judge}', activation: sigmoid}}"
    return ["judge.name=cascade", first, "judge.then={name: rollout}", "judge.unsure=0.08", "judge.audit=0.02"]


def learn(data: Iterable[object], judge: Path, *words: object) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(
        art("reward", *data, "-o", judge, *words, "--json", "--base", "builtin:smollm2-135m")
    )
    return result


def train_relearned(train: Sequence[object], run: Path, judge: Path, data: Sequence[Path]) -> None:
    """Trains with the cascade, and after every RELEARNED steps trains the judge on what the teacher has scored."""
    for step in (*range(RELEARNED, TRAIN_STEPS, RELEARNED), TRAIN_STEPS):
        art(*train, f"train.steps={step}", *cascade(judge))
        if step < TRAIN_STEPS:
            judge = run.with_name(f"judge-{step}")
            learn([*data, run], judge)


def _asked(*files: Path) -> str:
    rows = [each for file in files for each in read_lines(file, ScoredTrajectory) if each.reward is not None]
    groups = {(each.step, each.group_id): each.scores for each in rows}
    asked = sum(len(scores) > 1 and scores[0].judge == FIRST for scores in groups.values())
    return f"{asked} of {len(groups)}"


def train_with(recipe: str, directory: Path, judge: Path, data: Sequence[Path], names: Sequence[str]) -> str:
    """Trains from the start with the teacher, with the judge, with both as a cascade, and with a cascade whose judge
    learns as it goes.
    """
    lines = ["| trained with | right, held out, by step | teacher's groups |", "|---|---|---|"]
    config = ROOT / "recipes" / recipe / "config.yaml"
    sides = {
        "teacher": [],
        "judge": ["judge.name=reward_model", f"judge.model={judge}", "judge.activation=sigmoid"],
        "cascade": cascade(judge),
    }
    for name in names:
        run = RunDir(directory / "trained" / name)
        train = ["train", config, f"runs={directory}/trained", f"name={name}", "eval.every=7", "train.decay_to=1"]
        if name == "relearned":
            train_relearned(train, run.root, judge, data)
        else:
            art(*train, f"train.steps={TRAIN_STEPS}", *sides[name])
        means = {step: values.get("right", values["reward"]) for step, values in run.evaluations().items()}
        files = sorted(run.root.glob("step_*/scored.jsonl"))
        asked = {"teacher": "all", "judge": "0"}.get(name) or _asked(*files)
        lines.append(f"| {name} | {', '.join(f'{step}: {mean:.3f}' for step, mean in means.items())} | {asked} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="assistant")
    parser.add_argument("--run", type=Path, help="a run of the recipe; otherwise one is made")
    parser.add_argument("--made", type=int, default=4, help="steps of the run that is made")
    parser.add_argument("--groups", type=int, help="groups of its steps; otherwise the recipe's")
    parser.add_argument("--steps", type=int, default=2, help="the judge learns from this many first steps")
    parser.add_argument("--present", type=int, default=4, help="it is measured on this many last steps")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--thumbs", type=int, default=0, help="learn from this many single ratings")
    parser.add_argument("--train", nargs="*", choices=SIDES, help="then train with these; all if none is named")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-own-judge-") as temporary:
        directory = Path(temporary)
        run = options.run or make_run(options.recipe, directory, options.made, options.groups)
        files = sorted(run.glob("step_*/scored.jsonl"))
        start, judge, data = time.monotonic(), directory / "judge", files[: options.steps]
        present = directory / "present.jsonl"  # several steps: in a single one perhaps every attempt is right
        last = files[max(options.steps, len(files) - options.present) :]
        present.write_bytes(b"".join(file.read_bytes() for file in last))
        if options.thumbs:
            data = [thumbs(data, options.thumbs, directory / "thumbs.jsonl")]
        result = learn(data, judge, f"reward.epochs={options.epochs}", "--present", present)
        print(table(result, f"{(time.monotonic() - start) / 60:.1f}"))
        if not options.thumbs:
            print(cascade_calls(present, judge))
        if options.train is not None:
            print(train_with(options.recipe, directory, judge, data, options.train or SIDES))


def table(result: dict[str, Any], minutes: str) -> str:
    lines = [f"{result['groups']} groups; {minutes} minutes", "| pairs | in the teacher's order |", "|---|---|"]
    for name, parts in result["measures"].items():
        for part, each in parts.items():
            lines.append(f"| {name}, {part} | {each['value']:.3f} [{each['low']:.3f}, {each['high']:.3f}] |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
