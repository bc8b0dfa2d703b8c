"""What `art plan` promises, beside what the run then takes; and its doubts, beside what was planted.

    python -m benchmarks.forecasts.plan                           # all that is missing; hours
    python -m benchmarks.forecasts.plan --only letters --seeds 0  # the smallest case, about a minute
    python -m benchmarks.forecasts.plan --planted                 # the doubts of tests/planned, and of a healthy reward
    python -m benchmarks.forecasts.plan --memory                  # the forecast of memory; 10 minutes
    python -m benchmarks.forecasts.plan --table                   # runs nothing; prints the table

A row of benchmarks/results/plan.jsonl is one promised number of one run: task, seed, name, the promised median and 80 %
interval, what happened, and whether it is inside; or the doubts about a reward; or the peak of a process that takes a
step on rows of some length, beside the forecast of another process by shorter rows. Rows that are there are not made
again.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.shared import commands
from benchmarks.shared.paths import ROOT
from benchmarks.shared.rows import append_row, read_rows

IMPORT = "from benchmarks.forecasts.plan import peak"
ROWS = ROOT / "benchmarks" / "results" / "plan.jsonl"
DEADLINE_S = 3 * 3600.0  # longest time for one command


class Task(NamedTuple):
    """A task: its configuration, and the settings that it is measured with."""

    config: str
    settings: tuple[str, ...] = ()


TASKS = {
    "letters": Task("tests/letters/config.yaml"),
    "tictactoe": Task("recipes/tictactoe/config-groups.yaml", ("train.steps=40",)),
    "tictactoe-ppo": Task("recipes/tictactoe/config.yaml", ("train.steps=40",)),
    "2048": Task("recipes/2048/config.yaml", ("train.steps=20",)),
    "codenames": Task("recipes/codenames/config.yaml", ("train.steps=20",)),
    "sorting": Task("benchmarks/learning/tasks/sorting.yaml", ("train.steps=20",)),
    "filtering": Task("benchmarks/learning/tasks/filtering.yaml", ("train.steps=20",)),
    "guessing": Task("benchmarks/learning/tasks/guessing.yaml", ("train.steps=20",)),
    "mail": Task("benchmarks/learning/tasks/mail.yaml", ("train.steps=6",)),
    "assistant": Task("recipes/assistant/config.yaml", ("train.steps=6",)),
}
MODELS = {
    "1M": (1024, 2048, 4096),
    "24M": (1024, 2048, 4096),
    "smollm2": (512, 1024, 2048),
}  # lengths of rows in tokens
MOST_GB = 4.0  # as much is tried, and for more it is estimated
BY_JUDGE = ("noise", "position")
PLANTED = ("fair", "too_hard", "too_easy", "constant", "temperature", "limit", "length", "leak", *BY_JUDGE, "twice")


def measure(name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields a row for each promised number of one run, which is planned, trained and reported."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory(prefix="plan-") as runs:
        settings = (*task.settings, f"runs={runs}", f"name={name}", f"train.seed={seed}")
        art("plan", task.config, *settings)
        art("train", task.config, *settings)
        report = json.loads(art("report", f"{runs}/{name}", "--json"))
    for row in report["promised"]:
        yield {"task": name, "seed": seed, "name": row["name"], **row["promised"], "happened": row["happened"],
               "is_inside": row["is_inside"]}  # fmt: skip


def doubts_of(name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yields the row of a planted reward: the kinds of doubt that it raised."""
    entry = "judged" if name in BY_JUDGE else "fair" if name == "twice" else name
    settings = [f"rollout.entry=rollout.py:{entry}"]
    settings += [f"judge={{entry: 'rollout.py:{name}'}}"] if name in BY_JUDGE else []
    settings += ["rollout.scenarios=twice.jsonl"] if name == "twice" else []
    with tempfile.TemporaryDirectory(prefix="plan-") as runs:
        chosen = (*settings, f"runs={runs}", f"train.seed={seed}", "--json")
        promise = json.loads(art("plan", "tests/planned/config.yaml", *chosen))
    yield {"planted": name, "seed": seed, "doubts": [each["kind"] for each in promise["doubts"]]}


def memory_of(model: str, length: int) -> Iterator[dict[str, Any]]:
    """Yields the row of a length: gigabytes that were forecast, and those that two steps of that length took."""
    promised, happened = (
        float(python("-c", f"{IMPORT}; print(peak({model!r}, {length}, is_forecast={each}))")) for each in (True, False)
    )
    yield {"model": model, "seed": length, "promised": promised, "happened": happened}


def peak(model: str, length: int, *, is_forecast: bool) -> float | None:
    """Returns the peak of this process in a step on rows of that length, or the forecast by shorter ones."""
    from art_cli.config.schema import GrpoConfig, ModelConfig, TorchLearnerConfig, TrainConfig
    from art_cli.learners import LearnerSetup
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.loop import trial_update
    from art_cli.models.loading import load_weights
    from art_cli.runtime.allocator import keep_freed_memory
    from benchmarks.shared.models import build
    from benchmarks.shared.real_model import smollm2

    keep_freed_memory()
    base = str(smollm2() if model == "smollm2" else "")
    weights = load_weights(ModelConfig(base=base, dtype="float32"), base) if base else build(model, has_adapter=True)
    train = TrainConfig(learning_rate=1e-5, max_logprob_gap=1000)
    learner = TorchLearner(weights, LearnerSetup(train=train, loss=GrpoConfig(), learner=TorchLearnerConfig()))
    short = min(length // 2, trial_update.MIN_SECOND)
    trial_update.step(learner, short, vocabulary=int(weights.model.config.vocab_size))
    if is_forecast:
        return trial_update.forecast(learner, weights, short, length, most_tokens=length, most_gb=MOST_GB).gigabytes
    return trial_update.measure(learner, weights, length).gigabytes


def art(*arguments: str) -> str:
    """Returns what the command prints. Raises CalledProcessError, after its last lines are shown."""
    return python("-m", "art_cli", *arguments)


def python(*arguments: str) -> str:
    done = commands.python(*arguments, timeout_s=DEADLINE_S)
    if done.returncode:
        print(commands.last_lines(done), file=sys.stderr)
    done.check_returncode()
    return done.stdout


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the share of the promises that were kept, by number, and the doubts about each planted reward."""
    kept, all_, lines = Counter[str](), Counter[str](), ["| promised | inside the 80 % interval |", "|---|---|"]
    for row in rows:
        if "task" in row:
            all_[row["name"]] += 1
            kept[row["name"]] += row["is_inside"]
    lines += [f"| {name} | {kept[name]} of {num} |" for name, num in all_.items()]
    lines += ["", "| planted | doubts |", "|---|---|"]
    lines += [f"| {row['planted']} | {', '.join(row['doubts']) or 'none'} |" for row in rows if "planted" in row]
    lines += ["", "| model | tokens | GB forecast | GB taken | forecast / taken |", "|---|---|---|---|---|"]
    for row in (each for each in rows if "model" in each):
        promised, happened = row["promised"], row["happened"]
        lines.append(
            f"| {row['model']} | {row['seed']} | {promised:.2f} | {happened:.2f} | {promised / happened:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--table", action="store_true")
    asked = parser.parse_args()
    rows = read_rows(ROWS)
    done = {(row.get("task", row.get("planted", row.get("model"))), row["seed"]) for row in rows}
    make, names = (
        (doubts_of, PLANTED) if asked.planted else (memory_of, MODELS) if asked.memory else (measure, asked.only)
    )
    jobs = [(name, seed) for name in names for seed in (MODELS[name] if asked.memory else asked.seeds)]
    for job in jobs if not asked.table else []:
        if job not in done:
            new = list(make(*job))
            rows += new
            for row in new:
                append_row(ROWS, row)
    print(table(rows))


if __name__ == "__main__":
    main()
