"""`art prove` on ten runs of the smallest model: whether each update, taken again, gives the same bytes, and whether a
flipped bit is found in each of their files, with its place.

    python -m benchmarks.attacks.prove               # ten runs, about ten minutes
    python -m benchmarks.attacks.prove --only grpo killed
    python -m benchmarks.attacks.prove --forgeries   # a table of forgeries: found, or not promised; about ten minutes

The runs are of tests/letters: three algorithms, RULER with a cache, a run that was killed and gone on with, a warm-up,
one on the best attempts of another run, all weights, groups of earlier steps, rollouts that are a step ahead.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from art_cli.runs.run_dir import RunDir
from benchmarks.attacks.forgeries import FORGERIES, is_found
from benchmarks.shared.paths import ROOT

CONFIG = ROOT / "tests" / "letters" / "config.yaml"
ART = [sys.executable, "-m", "art_cli"]
RUBRIC = """rule: +0.5 if assistant -1 has "a"\nrule: +0.3 if assistant -1 has "e"\n"""
CASES: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": ("loss=dapo",),
    "reinforce": ("loss=reinforce++",),
    "ruler": ("judge={name: ruler, model: builtin:rule, rubric: RULES}",),
    "killed": (),
    "warm-up": ("sft={demos: DEMOS, epochs: 2}",),
    "best-of": ("sft={demos: RUN, best_of: 1}",),
    "all weights": ("model.lora=null", "train.learning_rate=1e-3"),
    "a step ahead": ("train.max_staleness=1", "loss.off_policy.name=truncate"),
}


def art(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*ART, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def train(name: str, runs: Path, settings: Sequence[str]) -> tuple[Path, list[str]]:
    """Returns the directory of a run of four steps, and its settings."""
    demos = runs / "demos.jsonl"
    turns = [{"role": "user", "content": "more"}, {"role": "assistant", "content": "abcdef"}]
    demos.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(16)))
    (rules := runs / "rules.txt").write_text(RUBRIC)
    settings = [each.replace("RULES", str(rules)) for each in settings]
    settings = [each.replace("DEMOS", str(demos)).replace("RUN", str(runs / "grpo")) for each in settings]
    words = ("train", str(CONFIG), f"name={name.replace(' ', '-')}", f"runs={runs}", *settings)
    run = runs / name.replace(" ", "-")
    if name == "killed":
        kill(words, run)
    done = art(*words)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return run, settings


def kill(words: Sequence[str], run: Path) -> None:
    """Starts a run, and kills it in the middle of its third step."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*ART, *words], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not (run / "step_0002" / "trajectories.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(30)


def flips(run: Path, draw: random.Random) -> tuple[int, int, list[str]]:
    """Flips a bit of each file, one after the other. Returns (found, files, those that were not found)."""
    files = [path for path in sorted(run.rglob("*")) if path.is_file() and not _is_drawing(path, run)]
    missed = []
    for path in files:
        data = bytearray(path.read_bytes())
        if not data:
            continue
        place = draw.randrange(len(data))
        kept = data[place]
        data[place] ^= 1 << draw.randrange(7)
        path.write_bytes(data)
        found = art("prove", str(run))
        data[place] = kept
        path.write_bytes(data)
        name = path.relative_to(run)
        named = (
            name.parts[0] if name.parts[0] == "base" else str(name.parent) if "checkpoints" in name.parts else str(name)
        )
        if found.returncode != 1 or named not in found.stdout + found.stderr:
            missed.append(str(name))
    return len(files) - len(missed), len(files), missed


def forge() -> int:
    """Prints whether each forgery is found. Returns the number of those that are not as it is promised."""
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="art-forge-") as home:
        honest, _ = train("letters", Path(home), ("train.keep_checkpoints=9",))
        for number, forgery in enumerate(FORGERIES, 1):
            with tempfile.TemporaryDirectory(prefix="art-forged-") as place:
                found = is_found(forgery, RunDir(honest), Path(place), lambda *words: art(*words).returncode, CONFIG)
            said = "found" if found else "not found, and not promised" if not forgery.is_promised else "NOT FOUND"
            num_wrong += found is not forgery.is_promised
            print(f"{number:3d} {forgery.number:3s} {forgery.by:7s} {forgery.name:60s} {said}", flush=True)
    print(f"{sum(each.is_promised for each in FORGERIES)} of {len(FORGERIES)} are promised; {num_wrong} are otherwise")
    return num_wrong


def _is_drawing(path: Path, run: Path) -> bool:
    """Whether nothing but people reads the file."""
    return path.relative_to(run).parts[0] in ("logs", "curve.svg", "view.js") or path.name.endswith(".lock")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--forgeries", action="store_true")
    options = parser.parse_args()
    if options.forgeries:
        sys.exit(forge())
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="art-prove-") as home:
        for name in options.only:
            begin = time.perf_counter()
            run, settings = train(name, Path(home), CASES[name])
            trained = time.perf_counter()
            replayed = art("prove", str(run), "--replay", str(CONFIG), *settings, "--json")
            facts = json.loads(replayed.stdout)
            same = sum(not each["changed"] for each in facts.get("replayed", []))
            seconds = time.perf_counter() - trained
            num_found, num_files, missed = flips(run, draw)
            print(
                f"{name:14s} {same} of {len(facts.get('replayed', []))} policies the same bytes in {seconds:.0f} s "
                f"(training {trained - begin:.0f} s); flipped bits found {num_found} of {num_files} {missed or ''}"
                f"{'' if replayed.returncode == 0 else replayed.stderr.strip()}",
                flush=True,
            )
            if name != "grpo":
                shutil.rmtree(run)


if __name__ == "__main__":
    main()
