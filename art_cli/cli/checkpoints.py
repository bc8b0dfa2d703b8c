"""`art checkpoints`: lists, prunes, forks and imports a run's checkpoints."""

import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from art_cli.cli import Base, Json, everything, print_result
from art_cli.runtime.errors import RunError, UsageError

if TYPE_CHECKING:
    from art_cli.runs.run_checkpoints import Listed

MIB = 2**20


def run(
    named: Annotated[str, Argument(metavar="RUN", help="A run directory.", show_default=False)],
    is_pruning: Annotated[bool, Option("--prune", help="Remove all but the newest checkpoints and the best.")] = False,
    keep: Annotated[int | None, Option("--keep", min=1, help="With --prune: number to keep.")] = None,
    fork: Annotated[str | None, Option("--fork", metavar="NEW_RUN", help="Start a new run from a checkpoint.")] = None,
    step: Annotated[int | None, Option("--step", min=0, help="With --fork: the step; default: the newest.")] = None,
    adapter: Annotated[
        Path | None, Option("--import", metavar="DIR", help="Create RUN with this adapter as step 0.")
    ] = None,
    base: Base = None,
    digest: Annotated[
        str | None, Option("--find", metavar="DIGEST", help="Find the policy that replied with this digest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List a run's checkpoints; prune, fork, import.

    \b
    art checkpoints runs/mine
    art checkpoints runs/mine --prune --keep 2
    art checkpoints runs/mine --fork mine-again --step 40     then: art train config.yaml name=mine-again
    art checkpoints runs/new --import adapter                 then: art train config.yaml name=new
    art checkpoints runs --find 9f3c01d2                      searches all runs; 8 digits are enough
    """
    from art_cli.runs import run_checkpoints
    from art_cli.runs.run_dir import RunDir

    if "://" in named and (is_pruning or adapter is not None or (fork is not None and Path(fork).name == fork)):
        raise UsageError(f"{named}: --prune and --import need a run's directory, and --fork a path for the new run")
    run = everything(named)
    if sum((is_pruning, fork is not None, adapter is not None, digest is not None)) > 1:
        raise UsageError("--prune, --fork, --import and --find: one at a time")
    if keep is not None and not is_pruning:
        raise UsageError("--keep goes with --prune")
    if step is not None and fork is None:
        raise UsageError("--step goes with --fork")
    if base is not None and adapter is None:
        raise UsageError("--base goes with --import")
    if digest is not None:
        _find(run, digest, as_json)
    elif adapter is not None:
        find = None if base is None else partial(_find_base, base)
        made = run_checkpoints.import_start(adapter, run, base=find)
        print_result({"checkpoint": str(made.path)}, f"{made.path}: step 0, from {adapter}", as_json)
    elif fork is not None:
        new = run.resolve().parent / fork if Path(fork).name == fork else Path(fork)  # a bare name is next to the run
        made = run_checkpoints.fork(RunDir(run), new, step=step)
        assert made.run is not None, made
        place = made.run.root
        given = f"name={place.name}"
        given += "" if place.name == fork else f" runs={shlex.quote(str(place.parent))}"
        text = f"{place}: forked from step {made.step}; continue with: art train CONFIG {given}"
        print_result({"checkpoint": str(made.path), "step": made.step}, text, as_json)
    elif is_pruning:
        removed = run_checkpoints.prune(RunDir(run), keep=keep)
        freed = sum(entry.num_bytes for entry in removed)
        text = f"{run}: removed {len(removed)} checkpoints, {freed / MIB:.1f} MiB"
        print_result({"removed": [entry.step for entry in removed], "num_bytes": freed}, text, as_json)
    else:
        entries = run_checkpoints.listed(RunDir(run))
        print_result([run_checkpoints.as_json(entry) for entry in entries], _as_table(entries), as_json)


def _find(root: Path, digest: str, as_json: bool) -> None:
    """Prints runs and steps with the digest. Raises RunError if nothing matches."""
    from art_cli.runs import run_checkpoints

    if not re.fullmatch("[0-9a-f]{8,64}", digest):
        raise UsageError(f"--find {digest}: expected 8 to 64 digits from 0 to f, as a reply's x-art-policy has them")
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory")
    found = run_checkpoints.find_digest(root, digest)
    if not found:
        raise RunError(f"{root}: no run there has a policy {digest}")
    text = "\n".join(f"{place}: step {step}" for place, step in found)
    print_result([{"run": str(place), "step": step} for place, step in found], text, as_json)


def _find_base(base: str, built: Path) -> str:
    from art_cli.models.base_source import find_base

    return find_base(base, directory=Path.cwd(), built=built, named="--base")


def _as_table(entries: "Sequence[Listed]") -> str:
    lines = [f"{'step':>6s}  {'valid':5s}  {'MiB':>8s}  evaluation"]
    for entry in entries:
        shown = [
            f"{name} {value:.3f}" for name, value in sorted(entry.evaluation.items()) if not name.startswith("num_")
        ]
        notes = [*shown, *(["best"] if entry.is_best else []), *([entry.problem] if entry.problem else [])]
        is_valid = "no" if entry.problem else "yes"
        lines.append(f"{entry.step:6d}  {is_valid:5s}  {entry.num_bytes / MIB:8.1f}  {'  '.join(notes)}".rstrip())
    return "\n".join(lines) if entries else "no checkpoints yet"
