"""`art prove`: whether a run's weights came from its trajectories, by its chain of hashes, or by training it again."""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from art_cli.cli import Json, everything
from art_cli.runtime.errors import RunError, UsageError, printable_lines

if TYPE_CHECKING:
    from art_cli.loop.replay import Replayed

MAX_FLAWS = 20  # shown of them


def run(
    what: Annotated[
        str, typer.Argument(metavar="RUN|DIGEST|EXPORT", help="A run, a policy's digest, or an exported model.")
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            "--replay", metavar="CONFIG", help="Compute each update again; CONFIG is the file that trained it."
        ),
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Where a DIGEST is looked for.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Prove that weights came from a run's trajectories.

    \b
    A run names by hashes, checkpoint by checkpoint, what each was made from: base model, configuration, trajectories,
    verdicts. This reads all of it and says which byte is not what it was. With --replay it takes every update again
    from the saved groups, and says at which step the weights differ. An exported model carries the chain as
    certificate.json. Exit code 1 if anything differs.

    \b
    art prove runs/mine
    art prove 9f3c01d2                              the x-art-policy of a reply, looked for in runs/
    art prove runs/mine --replay config.yaml        as long as the training itself, without the sampling
    art prove mine-merged                           a directory that art export wrote
    """
    from art_cli.models.base_files import base_digest
    from art_cli.runs import chain
    from art_cli.runs.run_checkpoints import find_digest
    from art_cli.runs.run_dir import RunDir

    place, step = everything(what), None
    if not place.exists() and re.fullmatch("[0-9a-f]{8,64}", what):
        found = find_digest(runs, what) if runs.is_dir() else []
        if not found:
            raise RunError(f"{what}: no run in {runs} has a policy of this digest")
        place, step = found[0]
    if not place.is_dir():
        raise UsageError(f"{what}: no such directory, and no digest of 8 to 64 digits from 0 to f")
    updates: Iterable[Replayed] = ()
    if (place / chain.CERTIFICATE).exists():
        if config is not None:
            raise UsageError(f"{place}: an exported model has no trajectories to replay; name its run")
        links, flaws = chain.check_certificate(place)
    else:
        files = RunDir(place)
        links = chain.read_chain(files)
        if config is not None and links:
            from art_cli.loop.replay import replay

            updates = replay(files, config, links)
        flaws = list(chain.find_flaws(files, links)) if links else []
        if links and files.base.is_dir() and base_digest(str(files.base)) != links[0].origin.base:
            flaws.append(chain.Flaw("base", "is another base model than that of the first link"))
    if not links:
        raise RunError(
            f"{place}: no {chain.NAME}: an older version made the run, its policy is a prompt, or it has no checkpoint"
        )
    if step is not None:
        _say(f"{what}: step {step} of {place}", as_json)
    facts: dict[str, Any] = {
        "path": str(place),
        "base": links[0].origin.base,
        "first": links[0].step,
        "step": links[-1].step,
        "policy": next((link.policy for link in reversed(links) if link.files), ""),
        "chain": links[-1].digest,
        "flaws": [flaw._asdict() for flaw in flaws],
    }
    whole = f"{place}: {len(links)} links, from base {facts['base'][:12]} to step {facts['step']}, {facts['policy']}"
    _say(f"{whole}\n  the digest of the whole chain: {facts['chain']}", as_json)
    for flaw in flaws[:MAX_FLAWS]:
        _say(f"  {flaw.place}: {flaw.what}", as_json)
    differs = None if flaws else _replay(updates, facts, as_json)
    if as_json:
        sys.stdout.write(json.dumps(facts) + "\n")
    if flaws:
        raise RunError(f"{place}: its chain does not prove {', '.join(flaw.place for flaw in flaws[:3])}")
    if differs is not None:
        raise RunError(f"{place}: the update that made step {differs} gives other weights")


def _replay(updates: "Iterable[Replayed]", facts: dict[str, Any], as_json: bool) -> int | None:
    """Takes the updates again. Returns the first step that differs, or None."""
    facts["replayed"] = []
    for each in updates:
        facts["replayed"].append({**each._asdict(), "is_same": each.is_same})
        if not each.changed:
            _say(f"  step {each.step}: same bytes", as_json)
        else:
            names = ", ".join(each.changed[:3])
            scores = f"scores differ by {each.gap:.2e} nats, bound {each.bound:.0e}"
            _say(f"  step {each.step}: other bytes ({names}); {scores}", as_json)
        if not each.is_same:
            return each.step
    return None


def _say(text: str, as_json: bool) -> None:
    if not as_json:
        sys.stdout.write(printable_lines(text) + "\n")
        sys.stdout.flush()
