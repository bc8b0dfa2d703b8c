"""`art plan`: plays a run's first step, and estimates cost and prospects of the run."""

import contextlib
import math
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from art_cli.cli import Config, Json, Overrides
from art_cli.runtime.errors import ArtError, UsageError, one_line, printable_lines

if TYPE_CHECKING:
    from art_cli.config.compose import LoadedConfig


def run(
    config: Config,
    overrides: Overrides = None,
    budget_usd: Annotated[
        float | None, Option(min=0, metavar="N", help="Print the number of steps for N dollars.")
    ] = None,
    goal: Annotated[str | None, Option(metavar="'reward>=X'", help="Target reward to compare with.")] = None,
    repeats: Annotated[int | None, Option(min=1, metavar="N", help="Verdicts per group; default: 2 if free.")] = None,
    compare: Annotated[str | None, Option(metavar="prompt", help="Also estimate a prompt search (one call).")] = None,
    on: Annotated[list[str] | None, Option("--on", metavar="MACHINE", help="Another machine: h100x8.")] = None,
    as_json: Json = False,
) -> None:
    """Estimate before a run: can it learn, how long, how much?

    Plays and judges the run's first step, then tries pilot updates at five learning rates and reverts them. `art train`
    reuses the played step, so you pay nothing twice. With train.learning_rate: auto it also takes the best rate. `art
    report` compares the plan with the run (docs/check.md).

    A line with "!" is a doubt with a cure: scenarios are too hard, too easy or duplicates; rewards are equal, noisy, or
    follow length; the answer is in the prompt; a limit is short; the temperature is 0; the judge has a position bias.

    \b
    art plan config.yaml
    art plan config.yaml train.steps=200 --budget-usd 20 --goal 'reward>=0.8'
    art plan config.yaml --compare prompt                     (also estimates a prompt search)
    art plan config.yaml name=other rollout.group_size=16     (plans another run)
    art plan config.yaml --on h100 --on laptop                (other machines, 1 to 1,000 GPUs)
    """
    import msgspec

    from art_cli.config.compose import load_config
    from art_cli.learners.prompt.prompt_learner import PromptLearner
    from art_cli.loop.machines import choose_machines, elsewhere
    from art_cli.loop.prompt_plan import as_prompt
    from art_cli.loop.references import check_ready
    from art_cli.loop.run_plan import plan
    from art_cli.reports.pages.elsewhere_text import Elsewhere, elsewhere_text
    from art_cli.reports.pages.plan_text import plan_text
    from art_cli.runs.promise import steps_for
    from art_cli.runtime import threads

    wished = None if goal is None else _parse_goal(goal)
    if budget_usd is not None and not math.isfinite(budget_usd):
        raise UsageError(f"--budget-usd {budget_usd:g}: expected a number of dollars")
    loaded = load_config(config, overrides or [])
    other, beside = None, None
    if compare is not None:
        check_ready(other := as_prompt(loaded, compare), is_training=True)
        beside = PromptLearner(other.config, other.directory)
    machines = choose_machines(loaded, on) if on else []  # before playing
    promise = threads.run(plan(loaded, repeats=repeats, beside=beside))
    try:
        there = elsewhere(loaded, promise, machines) if machines else []
    except (ArtError, OSError, ValueError) as error:  # still print the plan, which was paid for
        there = [Elsewhere(each.name, f"not known: {one_line(error)}") for each in machines]
    steps = None if budget_usd is None else steps_for(budget_usd, promise)
    if as_json:
        asked: dict[str, Any] = {} if wished is None else {"goal": wished}
        asked |= {} if budget_usd is None else {"steps_for_budget": steps}
        asked |= {"elsewhere": msgspec.to_builtins(there)} if on else {}
        sys.stdout.write(msgspec.json.encode(msgspec.to_builtins(promise) | asked).decode() + "\n")
        return
    settings = promise.settings | ({"train.steps": str(steps)} if steps is not None and steps < promise.steps else {})
    kept = [each for each in overrides or [] if each.partition("=")[0] not in settings]
    chosen = [f"{key}={value}" for key, value in settings.items()]
    command = "" if steps == 0 else shlex.join(["art", "train", str(config), *kept, *chosen])
    prompt_lines = ""
    if other is not None:
        searched = msgspec.structs.replace(promise, expected=promise.prompt)
        most = None if budget_usd is None else steps_for(budget_usd, searched)
        prompt_lines = _of_prompt(loaded, other, kept, most if most is not None and most < promise.steps else None)
    text = plan_text(promise, command=command, budget_usd=budget_usd, goal=wished) + prompt_lines
    sys.stdout.write(printable_lines(text + (elsewhere_text(there) if on else "")))


def _of_prompt(loaded: "LoadedConfig", other: "LoadedConfig", kept: list[str], steps: int | None) -> str:
    """Returns lines with the commands for a prompt search and a comparison."""
    from art_cli.config.key_locations import show

    arguments = list(other.overrides)
    if steps is not None:
        arguments = [each for each in arguments if not each.startswith("train.steps=")] + [f"train.steps={steps}"]
    search = (
        "the budget does not pay a step" if steps == 0 else shlex.join(["art", "train", str(loaded.path), *arguments])
    )
    runs = [show(each.config.runs / each.config.name) for each in (loaded, other)]
    both = ["--checkpoint", runs[0], "--checkpoint", runs[1]]
    compare = shlex.join(["art", "eval", str(loaded.path), *kept, *both])
    if loaded.config.eval is None:
        compare = "nothing is held out; a plan with eval.held_out=0.3 has scenarios for it"
    return f"a prompt:   {search}\ncompare:    {compare}\n"


def _parse_goal(text: str) -> float:
    """Parses "reward>=X". Raises UsageError."""
    name, _, bound = text.partition(">=")
    if name.strip() == "reward":
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(bound)):
                return value
    raise UsageError(f"--goal {text!r}: expected reward>=NUMBER, for example reward>=0.8")
