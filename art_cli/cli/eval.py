"""`art eval`: plays the evaluation scenarios with several policies, compares them, and checks gates."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperCommand

from art_cli import cli
from art_cli.runtime.errors import GateError, RolloutError, UsageError

ORDER = "art.eval.order"  # key for the order of options


class Command(TyperCommand):
    """The command `eval`, with --checkpoint and --endpoint in their common order."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = [word.partition("=")[0] for word in args]
        ctx.meta[ORDER] = [option for option in options if option in ("--checkpoint", "--endpoint")]
        return super().parse_args(ctx, args)


def run(
    context: typer.Context,
    config: cli.Config,
    overrides: cli.Overrides = None,
    checkpoints: Annotated[
        list[Path] | None,
        Option("--checkpoint", metavar="DIR", parser=cli.policy, help="Checkpoint, run(s), or base; repeatable."),
    ] = None,
    is_last: cli.Last = False,
    is_trusted: Annotated[bool, Option("--trust", help="Send your key to a prompt run's endpoint.")] = False,
    endpoints: Annotated[list[str] | None, Option("--endpoint", metavar="MODEL@URL", help="Repeatable.")] = None,
    gates: cli.Gates = None,
    output: Annotated[Path | None, Option("-o", "--output", metavar="DIR", help="Keep the trajectories.")] = None,
    junit: cli.Junit = None,
    markdown: cli.Markdown = None,
    link: cli.Link = None,
    as_json: cli.Json = False,
) -> None:
    """Compare policies; gate on the result.

    Plays the evaluation scenarios with every policy, and compares the others with the first, scenario by scenario.
    Gates apply to the last policy.

    \b
    art eval config.yaml --checkpoint runs/mine --gate 'reward>=0.8'
    art eval config.yaml --checkpoint runs/a --checkpoint runs/b --endpoint gpt-6.1-sol@https://api.openai.com/v1
    art eval config.yaml --checkpoint base --checkpoint runs/mine --gate 'reward>=baseline-0.02'
    art eval config.yaml --checkpoint base --checkpoint runs/mine --gate 'reward.low>=baseline' --markdown eval.md
    art eval config.yaml --checkpoint runs/weights --checkpoint runs/prompt      trained weights, and a prompt
    art eval config.yaml --checkpoint 'runs/sweep-*'          a table for a sweep, best run first
    """
    from art_cli.cli import eval_comparison
    from art_cli.config.compose import load_config
    from art_cli.loop import evaluate
    from art_cli.loop.interrupts import Interrupts
    from art_cli.loop.references import check_ready
    from art_cli.reports.pages import ci_files
    from art_cli.rollouts.scenario_files import RunScenarios
    from art_cli.runs.durable import write_file
    from art_cli.runtime import threads
    from art_cli.runtime.scratch import scratch

    loaded = load_config(config, overrides or [])
    if loaded.config.eval is None:
        raise UsageError(f"{config}: no eval section; add `eval: {{scenarios: FILE}}`")
    players = eval_comparison.find_players(
        loaded,
        checkpoints or [],
        endpoints or [],
        which=cli.which_checkpoint(False, is_last),
        is_trusted=is_trusted,
        order=context.meta[ORDER],
    )
    check_ready(loaded, ("model", "rollout", "gateway", "engine", "eval"))
    last = list(players)[-1]
    parsed = [evaluate.parse_gate(gate, list(players)) for gate in gates or []]
    evaluate.check_gates(parsed, last, loaded.config.rollout.sources)
    with contextlib.ExitStack() as stack:
        directory = output or stack.enter_context(scratch("eval"))
        eval_comparison.claim_directory(directory, loaded)
        watch = eval_comparison.Watch(loaded, parsed, num_policies=len(players))
        scenarios = RunScenarios(loaded.config, loaded.directory).evaluation_by_source
        files = eval_comparison.file_names({name: player.address for name, player in players.items()})
        paths = {name: directory / file for name, file in files.items()}
        there = f"what is played is in {output}; the same command plays the rest"
        interrupts = Interrupts(f"interrupted; {there if output else 'nothing is kept without -o DIR'}")
        with interrupts.explained():
            played = threads.run(eval_comparison.play(players, scenarios, paths, watch, interrupts))
    results = {
        name: evaluate.values_by_scenario(done) | evaluate.spent_by_scenario(done, players[name].price)
        for name, done in played.items()
    }
    eval_comparison.judge(loaded, played, results)
    results = {name: values | evaluate.values_of_sources(values, loaded.config) for name, values in results.items()}
    rows = eval_comparison.compare(results)
    faults, digests = eval_comparison.find_failures(played), eval_comparison.digests(played)
    verdicts = [evaluate.check_policy(gate, results, last) for gate in parsed]
    whole = eval_comparison.as_object(rows, verdicts, digests=digests, faults=faults)
    cli.print_result(whole, eval_comparison.as_text(rows, gates=parsed), as_json)
    if junit is not None:
        write_file(junit, ci_files.junit("art eval", ci_files.eval_cases(whole), digests))
    if markdown is not None:
        hidden = eval_comparison.hidden(parsed, rows)
        write_file(markdown, ci_files.eval_markdown(whole, hidden=hidden, link=link).encode())
    if faults:
        raise RolloutError(" | ".join(f"{name}: {fault}" for name, fault in faults.items()))
    missed = [verdict.error for verdict in verdicts if verdict.error is not None]
    for error in missed:
        if len(missed) == 1 or isinstance(error, UsageError):
            raise error
    if missed:
        raise GateError("; ".join(map(str, missed)))
