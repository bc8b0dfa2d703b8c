"""The plan of a run as text for a terminal: one screen with four questions."""

from collections.abc import Iterator

from art_cli.reports.pages.report_text import duration
from art_cli.runs.promise import Measured, Pilot, Promise, steps_for


def plan_text(promise: Promise, *, command: str, budget_usd: float | None = None, goal: float | None = None) -> str:
    """Returns the whole text. `command` trains the run; `budget_usd` and `goal` get a line each if they are given."""
    found = promise.measured
    lines = ["can this reward be learned?", *_learned(promise)]
    lines += [] if goal is None else [_row("goal", _goal(found, goal))]
    lines += ["", "with which settings?", *_settings(promise), "", "does it fit?", _row("memory", _memory(found))]
    lines += ["", f"how long, how much? {promise.steps} steps, {promise.evaluations} evaluations", *_costs(promise)]
    lines += [] if budget_usd is None else [_row("budget", _budget(promise, budget_usd))]
    chosen = " ".join(f"{key}={value}" for key, value in promise.settings.items())
    return "".join(f"{line}\n" for line in [*lines, "", f"go on with: {command} {chosen}".rstrip()])


def _row(name: str, text: str) -> str:
    return f"  {name:14s} {text}"


def _learned(promise: Promise) -> Iterator[str]:
    found = promise.measured
    if found.reward_mean is not None:
        yield _row("rewards", f"mean {found.reward_mean:.3f}, best of a group {found.reward_best:.3f}")
    yield from (_row(name, text) for name, text in found.facts.items())
    for doubt in promise.doubts:
        yield _row(f"! {doubt.kind}", doubt.text)
        yield _row("", f"try: {doubt.cure}")
    if not promise.doubts:
        yield _row("verdict", "nothing was found that stands against it")


def _goal(found: Measured, goal: float) -> str:
    """Returns what the first step shows of a wished reward. It forecasts none, because no first step shows the end."""
    if found.reward_mean is None or found.reward_best is None:
        return "no attempt has a reward"
    if found.reward_mean >= goal:
        return f"{goal:g} is reached already"
    if found.reward_best >= goal:
        return f"the best attempts of the groups get {goal:g} now; to make that usual is what training does"
    return f"{goal:g} is more than the best attempts get now; nothing here shows whether it is in reach"


def _settings(promise: Promise) -> Iterator[str]:
    scale, pilots = promise.measured.noise_scale, promise.measured.pilots
    for key, value in promise.settings.items():
        yield f"  {key}={value}"
        yield _row("", promise.reasons[key])
    yield _row("pilots", ", ".join(map(_pilot, pilots)) or "none, because no group has signal")
    if scale is not None:
        about = "hidden by noise" if scale.groups is None else f"{scale.groups:.0f} groups"
        high = "no bound" if scale.high is None else f"{scale.high:.0f}"
        yield _row("noise scale", f"{about}, 80 % interval {scale.low:.0f} to {high}; up to it more groups pay")


def _pilot(pilot: Pilot) -> str:
    return f"{pilot.rate:.2g} moves {'by an unknown KL' if pilot.kl is None else f'{pilot.kl:.2g}'}"


def _memory(found: Measured) -> str:
    memory = found.memory
    if memory is None:
        return "not measured"
    needed = f"about {memory.gigabytes:.2f} GB for {memory.tokens:,} tokens, the longest row or a micro-batch"
    return f"{needed}; {memory.there:.1f} GB are there"


def _costs(promise: Promise) -> Iterator[str]:
    one, whole, tokens = promise.measured, promise.expected["whole"], promise.expected["tokens"]
    seconds = {"sampling": one.sampling_s, "judging": one.judging_s, "training": one.training_s or 0.0}
    parts = [f"{name} {duration(round(took, 2))}" for name, took in (seconds | {"the rest": one.rest_s}).items()]
    yield _row("a step", ", ".join(parts))
    if one.training_s is None:
        yield _row("", "training could not be measured, and is not in the sum")
    yield _row("the run", f"{duration(whole.value)}, 80 % interval {duration(whole.low)} to {duration(whole.high)}")
    yield _row("tokens", f"{tokens.value:,.0f} sampled, {tokens.low:,.0f} to {tokens.high:,.0f}")
    usd = promise.expected.get("usd")
    price = "the judge's price is unknown" if usd is None else f"${usd.value:.2f}, ${usd.low:.2f} to ${usd.high:.2f}"
    yield _row("dollars", price)


def _budget(promise: Promise, usd: float) -> str:
    steps = steps_for(usd, promise)
    if steps is None:
        return "no price is known; usd_per_hour of a rule of `stop` is that of the machine"
    return f"${usd:g} buys {steps} steps at the upper end of the interval"
