"""`art check`: a read-only preflight that prints findings and cures."""

import sys
from typing import Annotated

from typer import Option

from art_cli.cli import Config, Finding, Json, Overrides, print_findings
from art_cli.runtime.errors import ArtError, UsageError, printable_lines


def run(
    config: Config,
    overrides: Overrides = None,
    asks_judge: Annotated[bool, Option("--judge/--no-judge", help="Ask a paid judge once (cents).")] = True,
    has_conversations: Annotated[bool, Option("--show", help="Also print both attempts.")] = False,
    as_json: Json = False,
) -> None:
    """Try everything a run needs, once.

    Composes the configuration, loads the model, plays a rollout twice, takes an update, asks the judge. Prints findings
    and cures. Changes nothing.

    \b
    art check config.yaml
    art check config.yaml hardware=h100     with a packaged starting point (docs/config.md)
    art check config.yaml --show            both conversations; useful if rewards are 0 (docs/scenarios.md)
    art check config.yaml --no-judge        only estimates the cost of asking the judge
    """
    from art_cli.config.compose import load_config
    from art_cli.loop.decide import decide_engine
    from art_cli.loop.references import check_ready
    from art_cli.reports.pages.conversation_text import whole_text
    from art_cli.runtime.scratch import scratch

    if as_json and has_conversations:
        raise UsageError("--json and --show: one at a time")
    try:
        loaded = load_config(config, overrides or [])
        check_ready(loaded, is_training=True)
        findings = [Finding("config", True, f"{loaded.path} is valid")]
        if not as_json:
            print_findings(findings)
        loaded = decide_engine(loaded)
    except ArtError as error:
        if as_json:
            print_findings([Finding("config", False, str(error))], as_json)
        raise
    from art_cli.cli.preflight.preflight import Preflight  # takes seconds, so the first finding is printed before

    with scratch("check") as directory:
        preflight = Preflight(loaded, directory, asks_judge)
        try:
            for finding in preflight.check():
                findings.append(finding)
                if not as_json:
                    print_findings([finding])
        finally:
            if as_json:  # also after an interruption
                print_findings(findings, as_json)
            preflight.close()
        if has_conversations:
            played = [each for part in preflight.parts.values() for each in part.played]
            sys.stdout.write(printable_lines("".join(f"\n{whole_text(each)}" for each in played)))
        bad = [finding.name for finding in findings if not finding.is_good]
        if bad:  # inside the block, to keep log files named in findings
            raise ArtError(f"{config}: not ready: {', '.join(bad)}")
