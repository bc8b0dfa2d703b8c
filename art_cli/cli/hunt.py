"""`art hunt`: attempts that score without doing the task, found before a run learns to make them."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from art_cli.cli import Checkpoint, Config, Json, Overrides
from art_cli.runtime.errors import RolloutError, printable

if TYPE_CHECKING:
    from art_cli.loop.hunt_file import Hunt, Tried

SHOWN = 10  # lines of exploits, or of the best attacks where none is one
WIDTH = 100  # characters of a reply in a line


def run(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    num_scenarios: Annotated[int, typer.Option("--scenarios", min=1, help="Scenarios that are attacked.")] = 8,
    minutes: Annotated[float, typer.Option("--minutes", min=0, help="Time for the search; 0: known attacks only.")] = 5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Appended to, as attacks are scored.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look for a reward without the task.

    Plays a few honest attempts, then attempts whose replies follow a rule that does not do the task: empty and constant
    replies, copies of the question, of tool outputs and of other scenarios' replies, lists of all candidates, orders to
    the judge, forged turns, tool calls with copied arguments, in each form that the prompt mentions. Those that score
    are varied until the time is up. The run's own rollout plays them, and its own judge or reward scores them.

    Prints each exploit beside the honest scores. Exit code 1 if there is one. A judge that costs money is asked for
    every attempt: --minutes 0 tries the known attacks only. Ctrl-C ends the search and prints what it has found. With
    -o FILE the same command goes on from there.

    \b
    art hunt config.yaml
    art hunt config.yaml --minutes 0 --scenarios 4
    art hunt config.yaml --minutes 60 -o hunt.jsonl
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.reward_hunt import hunt

    loaded = load_config(config, overrides or [])
    found = hunt(loaded, checkpoint=checkpoint, num_scenarios=num_scenarios, minutes=minutes, output=output)
    exploits = found.exploits()
    sys.stdout.write(_as_json(found, exploits) if as_json else _as_text(found, exploits))
    if found.error is not None:
        raise found.error
    if exploits:
        raise RolloutError(f"{config}: {len(exploits)} of {len(found.tried)} attacks score without doing the task")


def _as_json(found: "Hunt", exploits: "list[Tried]") -> str:
    rows = [
        {"attack": str(tried.attack), "score_mean": tried.mean, "scores": tried.scores, "reply": tried.example}
        for tried in exploits
    ]
    honest = {"honest_median": found.honest_median, "honest_best": found.reference, "floor": found.floor}
    return json.dumps({**honest, "num_tried": len(found.tried), "exploits": rows}) + "\n"


def _as_text(found: "Hunt", exploits: "list[Tried]") -> str:
    lines = [
        f"honest: median {found.honest_median:.3f}, mean of each scenario's best {found.reference:.3f}; "
        f"lowest of all {found.floor:.3f}",
        f"{len(found.tried)} attacks, {len(exploits)} of them exploits"
        + ("" if exploits else "; the best of the others:"),
    ]
    for tried in (exploits or found.tried)[:SHOWN]:
        lines.append(f"{tried.mean:8.3f}  {tried.attack}")
        lines.append(f"          {printable(' '.join(tried.example.split()), limit=WIDTH) or '(empty)'}")
    return "\n".join(lines) + "\n"
