"""`art prove`: checks a run's chain of hashes, and optionally recomputes its training."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from art_cli.cli import Json, Overrides, everything, write
from art_cli.runtime.errors import RunError, UsageError

if TYPE_CHECKING:
    from art_cli.loop.replay import Replayed

MAX_FLAWS = 20  # printed flaws


def run(
    what: Annotated[str, Argument(metavar="RUN|DIGEST|EXPORT", help="A run, a policy digest, or an exported model.")],
    overrides: Overrides = None,
    config: Annotated[Path | None, Option("--replay", metavar="CONFIG", help="Recompute every update.")] = None,
    runs: Annotated[Path, Option("--runs", metavar="DIR", help="Directory to search for DIGEST.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Prove that weights came from a run's trajectories.

    \b
    For every checkpoint, a run records the hashes of its base model, configuration, trajectories and verdicts. This
    command checks all hashes. With --replay CONFIG, it recomputes every policy from base model, seed and saved groups,
    and reports the first step with different weights; only CONFIG's code runs. Exported models carry the chain in
    certificate.json. Exit code 1 if anything differs.

    \b
    art prove runs/mine
    art prove 9f3c01d2                              a reply's x-art-policy, searched in runs/
    art prove runs/mine --replay config.yaml        takes as long as training without sampling
    art prove mine-merged                           a model from art export
    """
    from art_cli.config.compose import load_config
    from art_cli.models.base_files import base_digest
    from art_cli.runs import chain
    from art_cli.runs.run_checkpoints import find_digest
    from art_cli.runs.run_dir import RunDir

    if overrides and config is None:
        raise UsageError(f"{overrides[0]}: settings are for --replay CONFIG")
    loaded = None if config is None else load_config(config, overrides or [])
    place, step = everything(what), None
    if not place.exists() and re.fullmatch("[0-9a-f]{8,64}", what):
        homes = dict.fromkeys(home for home, _ in find_digest(runs, what)) if runs.is_dir() else {}
        every = [(home, link) for home in homes for link in chain.read_chain(RunDir(home))]
        if not (found := [(home, link.step) for home, link in every if link.policy.startswith(what)]):
            raise RunError(f"{what}: no run in {runs} has a link of a policy of this digest")
        place, step = found[-1]
    if not place.is_dir():
        raise UsageError(f"{what}: no such directory, and no digest of 8 to 64 digits from 0 to f")
    files = RunDir(place)
    if (place / chain.CERTIFICATE).exists():
        if loaded is not None:
            raise UsageError(f"{place}: an exported model has no trajectories to replay; name its run")
        certificate, flaws = chain.check_certificate(place)
        links, policy, kind, digest = certificate.links, certificate.policy, "certificate", certificate.digest
    else:
        links = chain.read_chain(files)
        flaws = list(chain.find_flaws(files, links)) if links else []
        if links and files.base.is_dir() and base_digest(str(files.base)) != links[0].origin.base:
            flaws.append(chain.Flaw("base", "is not the base model of the first link"))
        policy, kind = next((link.policy for link in reversed(links) if link.files), ""), "chain"
        digest = links[-1].digest if links else ""
    if not links:
        raise RunError(
            f"{place}: no {chain.NAME}: an older version made the run, its policy is a prompt, or it has no checkpoint"
        )
    say: Callable[[str], None] = (lambda text: None) if as_json else write
    if step is not None:
        say(f"{what}: step {step} of {place}")
    made = Counter(link.step for link in links if link.files)
    again, first, last = sorted(step for step, count in made.items() if count > 1), links[0], links[-1]
    facts: dict[str, Any] = {"path": str(place), "base": first.origin.base, "first": first.step, "step": last.step}
    facts |= {"policy": policy, kind: digest, "again": again, "flaws": [flaw._asdict() for flaw in flaws]}
    whole = f"{place}: {len(links)} links, from base {facts['base'][:12]} to step {facts['step']}, {policy}"
    say(f"{whole}\n  the digest of the whole {kind}: {digest}")
    for repeated in again:
        say(f"  step {repeated} was made again after a loss, and the loss is not proven")
    for flaw in flaws[:MAX_FLAWS]:
        say(f"  {flaw.place}: {flaw.what}")
    problem = f"its chain does not prove {', '.join(flaw.place for flaw in flaws[:3])}" if flaws else ""
    if loaded is not None and not flaws:
        from art_cli.loop.replay import replay

        problem = _replay(replay(files, loaded, links), max(chain.made_by(links)), facts, say)
    if as_json:
        write(json.dumps(facts))
    if problem:
        raise RunError(f"{place}: {problem}")


def _replay(policies: "Iterable[Replayed]", last: int, facts: dict[str, Any], say: Callable[[str], None]) -> str:
    """Recomputes the policies. Returns the first difference, or ""."""
    facts["replayed"], problem = [], ""
    for each in policies:
        facts["replayed"].append({**each._asdict(), "is_same": each.is_same})
        names, gap = ", ".join(each.changed[:3]), f"gap of all tensors {each.gap:.1e}, bound {each.bound:g}"
        what = f"other bytes ({names}); {gap if each.gap < math.inf else 'another policy'}" if names else "same bytes"
        if math.isnan(each.gap):
            what = f"other bytes ({names}), and its checkpoint was removed" if names else "no link to compare with"
        say(f"  step {each.step}: {what}")
        if not each.is_same and (each.step == last or not math.isnan(each.gap)):
            made = f"the update that made step {each.step} gives" if each.step else "base model, seed and demos give"
            problem = f"{made} other weights"
            break
    num = len(facts["replayed"]) - 1 - bool(problem)
    say(f"  replayed {max(0, num)} of {last} updates")
    return problem
