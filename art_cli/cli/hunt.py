"""`art hunt`: searches for attempts that score without doing the task, before a run learns them."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from art_cli.cli import Checkpoint, Config, Json, Last, Overrides, print_result, which_checkpoint
from art_cli.runtime.errors import RolloutError, printable

if TYPE_CHECKING:
    from art_cli.loop.reward_hunt import Hunt, Tried

SHOWN = 10  # printed exploits or attacks
WIDTH = 100  # characters per printed reply


def run(
    config: Config,
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    is_last: Last = False,
    num_scenarios: Annotated[int, Option("--scenarios", min=1, help="Number of attacked scenarios.")] = 8,
    minutes: Annotated[float, Option("--minutes", min=0, help="Search time; 0: known attacks only.")] = 5,
    output: Annotated[Path | None, Option("-o", "--output", metavar="FILE", help="Append scored attacks.")] = None,
    html: Annotated[Path | None, Option("--html", metavar="FILE", help="Also write a page.")] = None,
    as_json: Json = False,
) -> None:
    """Look for ways to get reward without doing the task.

    Plays honest attempts, then attacks: empty replies, copies of the question, orders to the judge, failing or late
    calls. It varies attacks that score until the time is over. The run's rollout plays all attempts, and the run's
    judge or reward scores them.

    Prints exploits and honest scores. Exit code 1 if an exploit was found. A paid judge is called for every attempt;
    --minutes 0 plays known attacks only. Ctrl-C stops the search and prints the results. -o FILE allows resuming.

    \b
    art hunt config.yaml
    art hunt config.yaml --minutes 0 --scenarios 4
    art hunt config.yaml --minutes 60 -o hunt.jsonl
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.reward_hunt import hunt

    loaded = load_config(config, overrides or [])
    which = which_checkpoint(False, is_last)
    found = hunt(loaded, checkpoint, which, num_scenarios=num_scenarios, minutes=minutes, output=output)
    exploits = found.exploits()
    rows = [
        {"attack": str(tried.attack), "score_mean": tried.mean, "scores": tried.scores, "reply": tried.example}
        for tried in exploits
    ]
    print_result({**_numbers(found, exploits), "exploits": rows}, _as_text(found, exploits), as_json)
    if html is not None:
        from art_cli.reports.pages.report_page import facts_table, html_page
        from art_cli.runs.durable import write_file

        title = "<h2>Exploits</h2>" if exploits else "<h2>The best attacks, none of them an exploit</h2>"
        shown = [(f"{each.mean:.3f}", f"{each.attack}: {each.example}") for each in exploits or found.tried[:SHOWN]]
        numbers = list(_numbers(found, exploits).items())
        page = html_page(f"Hunt in {config}", [facts_table(numbers), title, facts_table(shown)])
        write_file(html, page.encode())
    if found.error is not None:
        raise found.error
    if exploits:
        raise RolloutError(f"{config}: {len(exploits)} of {len(found.tried)} attacks score without doing the task")


def _numbers(found: "Hunt", exploits: "list[Tried]") -> dict[str, float]:
    median = statistics.median(found.honest_scores)
    honest = {"honest_median": median, "honest_best": found.reference, "floor": found.floor}
    return {**honest, "num_tried": len(found.tried), "num_exploits": len(exploits)}


def _as_text(found: "Hunt", exploits: "list[Tried]") -> str:
    lines = [f"{name:14s} {value:.4g}" for name, value in _numbers(found, exploits).items()]
    lines += [] if exploits else ["the best attacks, none of them an exploit:"]
    for tried in (exploits or found.tried)[:SHOWN]:
        lines.append(f"{tried.mean:8.3f}  {printable(tried.attack)}")
        lines.append(f"          {printable(' '.join(tried.example.split()), limit=WIDTH) or '(empty)'}")
    return "\n".join(lines) + "\n"
