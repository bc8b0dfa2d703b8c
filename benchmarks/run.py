"""Every speed that is claimed, measured in one go: writes benchmarks/results/RESULTS.md.

    make bench                                   # all of it, about two hours on two cores
    python -m benchmarks.run --only gateway      # a part; its section alone is written anew

Each part is a command of its own, run one after the other in a fresh process; what it prints is its section, with the
load of the machine before it began. A part that fails or takes too long is said so in its section, and the exit code
is 1.
"""

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from benchmarks.shared.paths import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "RESULTS.md"
DEADLINE_S = 900.0  # longest time for one part
PACKAGES = ("torch", "transformers", "peft", "trl")


class Part(NamedTuple):
    """A command and what it shows."""

    title: str
    arguments: tuple[str, ...]  # the arguments after `python -m`
    plots: tuple[str, ...] = ()  # files it writes beside RESULTS.md


PARTS = {
    "learner": Part("Training step against TRL; trees against rows", ("benchmarks.step.learner",)),
    "training": Part("Training alone at the shapes of the loop", ("benchmarks.step.training",)),
    "loss": Part("The loss with a large vocabulary", ("benchmarks.step.loss_memory",)),
    "memory": Part("Memory of a process that trains", ("benchmarks.step.memory",)),
    "sampling": Part("Sampling against transformers", ("benchmarks.speed.sampling",)),
    "loop": Part("The whole loop against TRL", ("benchmarks.speed.loop",)),
    "gateway": Part("The capturing gateway", ("benchmarks.serving.gateway",)),
    "calls": Part("A rollout's call, by who spends its time", ("benchmarks.speed.calls",)),
    "ray_rollouts": Part("Rollouts on a Ray cluster against local processes", ("benchmarks.speed.ray_rollouts",)),
    "gateway_days": Part("A day of the gateway alone", ("benchmarks.serving.gateway_days",)),
    "view": Part("Opening 100,000 attempts", ("benchmarks.speed.view",)),
    "startup": Part("From the start of art train to the first reply", ("benchmarks.speed.startup",)),
    "install": Part("What make demo installs", ("benchmarks.speed.install",)),
    "overlap": Part("Sampling beside training", ("benchmarks.speed.overlap",)),
    "trackers": Part("What trackers cost", ("benchmarks.speed.trackers",)),
    "storage": Part("A run in an object store", ("benchmarks.speed.storage",)),
    "remote": Part("Training through a server against local", ("benchmarks.speed.remote",)),
    "lossy": Part(
        "A network that loses and repeats, and thirty kills of client and server",
        ("benchmarks.attacks.lossy", "--kills", "30"),
    ),
    "demo": Part("The demo", ("benchmarks.learning.recipes", "assistant", "--judge", "--seeds", "0")),
    "forged_turns": Part("Texts that forge turns", ("benchmarks.attacks.forged_turns",)),
    "gguf": Part("The round trip through a GGUF file", ("benchmarks.serving.gguf",)),
    "templates": Part("Which turns branch in each chat template", ("benchmarks.others.templates",)),
    "utilisation": Part("Share of the machine", ("benchmarks.step.utilisation",)),
    "scaling": Part(
        "How a step grows",
        ("benchmarks.step.scaling", "--plots", "benchmarks/results"),
        ("learner_attempts.svg", "learner_tokens.svg", "learner_turns.svg"),
    ),
}
HEAD = """# Results

Written by `make bench`. Ratios are between things measured in turn in the same run; seconds are of one machine. What
was tried on the way is in [LOG.md](LOG.md).

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(PARTS), help="may be given several times")
    options = parser.parse_args()
    sections = _read() if options.only else {}
    failed = []
    for name in options.only or PARTS:
        print(f"{name} ...", flush=True)
        begin, load = time.monotonic(), os.getloadavg()[0]
        output, is_done = run(PARTS[name])
        seconds = time.monotonic() - begin
        sections[name] = _section(name, output, seconds, load)
        failed += [] if is_done else [name]
        print(output, f"\n({seconds:.0f} s)\n", sep="", flush=True)
        _write(sections)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(part: Part) -> tuple[str, bool]:
    """What the part printed, and whether it came to its end."""
    command = [sys.executable, "-m", *part.arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"Not done after {DEADLINE_S:.0f} s.", False
    if done.returncode:
        return f"{done.stdout}\nFailed: {(done.stderr.strip() or '?').splitlines()[-1]}", False
    return done.stdout, True


def machine() -> str:
    """Processor, cores, what it computes natively, and versions, on two lines."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", text)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    name = model[1] if model else platform.machine()
    return f"{cores} cores ({name}; {', '.join(flags)}), no GPU.\nPython {platform.python_version()}, {versions}."


def _section(name: str, output: str, seconds: float, load: float) -> str:
    part = PARTS[name]
    source = (ROOT / f"{part.arguments[0].replace('.', '/')}.py").read_text()
    says = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")[0]
    lines = [line for line in output.strip().splitlines() if line.strip()]
    is_markdown = any(line.startswith("|") for line in lines)
    body = output.strip() if is_markdown else f"```\n{output.strip()}\n```"
    command = " ".join(("python -m", *part.arguments))
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    plots = "".join(f"\n![{name}]({name})" for name in part.plots)
    return f"## {part.title}\n\n{says}\n`{command}`, {seconds:.0f} s, {when}, load {load:.1f}.\n\n{body}\n{plots}"


def _read() -> dict[str, str]:
    """The sections that stand already, by part."""
    if not RESULTS.exists():
        return {}
    found = re.split(r"(?m)^(?=## )", RESULTS.read_text())[1:]
    names = {f"## {part.title}": name for name, part in PARTS.items()}
    return {names[s.splitlines()[0]]: s.rstrip() + "\n" for s in found if s.splitlines()[0] in names}


def _write(sections: dict[str, str]) -> None:
    body = "\n".join(sections[name] for name in PARTS if name in sections)
    beside = RESULTS.with_suffix(".tmp")
    beside.write_text(f"{HEAD}{machine()}\n\n{body}")
    beside.replace(RESULTS)


if __name__ == "__main__":
    main()
