"""`art improve`: learns from live traffic, night by night."""

import logging
import time
from typing import TYPE_CHECKING, Annotated

from typer import Option

from art_cli.cli import Config, Json, Overrides, print_result
from art_cli.runtime.errors import ArtError, Interrupted, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from art_cli.config.compose import LoadedConfig
    from art_cli.loop.nights.night import Night

log = logging.getLogger(__name__)

COLUMNS = ("night", "scenarios", "traffic", "candidate", "promoted", "ratings", "minutes", "cost", "outcome")


def run(
    config: Config,
    overrides: Overrides = None,
    every_s: Annotated[
        float | None, Option("--every", metavar="SECONDS", min=1, help="Run as a service, with this pause.")
    ] = None,
    is_history: Annotated[bool, Option("--history", help="Show all nights; do nothing.")] = False,
    is_rollback: Annotated[
        bool, Option("--rollback", help="End the canary, and serve what was promoted before.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Learn from live traffic, night by night.

    Makes scenarios from what art gateway recorded since the last night; merges near duplicates, and holds out the
    newest. Trains from the served checkpoint, or from the last candidate if its canary ended undecided with promising
    ratings. Compares the new candidate with the served policy on eval's scenarios, on the last week's traffic and on
    improve.safety. A candidate that passes answers a share of the conversations of art gateway --follow, until their
    feedback promotes or withdraws it. Run it by hand, by cron or with --every: each call does what is due, and resumes
    after a kill.

    \b
    art gateway config.yaml --follow              answers clients, records, takes feedback
    art improve config.yaml                       begins a night, or reads the canary's feedback
    art improve config.yaml --every 600           the same as a service
    art improve config.yaml --history
    art improve config.yaml --rollback

    See docs/gateway.md.
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.nights.night import Nights, roll_back
    from art_cli.loop.references import check_ready

    if every_s is not None and (is_history or is_rollback):
        raise UsageError("--every: not together with --history or --rollback")
    loaded = load_config(config, overrides or [])
    if loaded.config.improve is None:
        raise UsageError(f"{config}: no improve section; add `improve: {{canary: {{metric: NAME}}}}`")
    root = loaded.config.runs / loaded.config.name
    if is_history:
        _print_history(Nights(root).all(), as_json)
    elif is_rollback:
        served = roll_back(root)
        text = f"{root}: {served.checkpoint} answers now"
        if loaded.config.store is not None:
            text += "; run art improve on this machine next, because the store does not know it yet"
        print_result({"checkpoint": served.checkpoint, "policy": served.policy}, text, as_json)
    else:
        check_ready(loaded, is_training=True)
        _improve(loaded, as_json)
        while every_s is not None:
            time.sleep(every_s)
            try:
                _improve(loaded, as_json)
            except Interrupted:
                raise
            except (ArtError, OSError) as error:
                log.error("tried again in %g s: %s", every_s, error)


def _improve(loaded: "LoadedConfig", as_json: bool) -> None:
    import msgspec

    from art_cli.loop.nights.night import improve
    from art_cli.runtime import threads

    result = threads.run(improve(loaded))
    print_result({"night": msgspec.to_builtins(result.night), "text": result.text}, result.text, as_json)


def _print_history(nights: "Sequence[Night]", as_json: bool) -> None:
    import msgspec

    from art_cli.reports.pages.report_text import columns

    rows = [_row(night) for night in nights]
    counts = {name: sum(night.outcome == name for night in nights) for name in ("promoted", "rolled back")}
    costs = [night.cost_usd for night in nights if night.cost_usd is not None]
    summary = f"{len(nights)} nights, {counts['promoted']} promoted, {counts['rolled back']} rolled back"
    summary += f", ${sum(costs):.2f}" if costs else ""
    text = "\n".join([*columns([COLUMNS, *rows]), summary]) if nights else "no night yet"
    print_result({"nights": msgspec.to_builtins(list(nights))}, text, as_json)


def _row(night: "Night") -> list[str]:
    gain = next((each.mean for each in night.gates if each.scenarios == "traffic"), None)
    trial = night.trial
    return [
        str(night.number),
        str(night.num_scenarios + night.num_held_out),
        "" if gain is None else f"{gain:+.3f}",
        f"{trial.candidate:.3f}" if trial is not None and trial.num_candidate else "",
        f"{trial.promoted:.3f}" if trial is not None and trial.num_promoted else "",
        str(trial.num_candidate + trial.num_promoted) if trial is not None else "",
        f"{night.seconds / 60:.1f}",
        "" if night.cost_usd is None else f"${night.cost_usd:.2f}",
        f"{night.outcome}: {night.reason}" if night.outcome else "under way",
    ]
