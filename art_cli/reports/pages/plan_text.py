"""The plan of a run as text for a terminal: one screen with four questions."""

from collections.abc import Iterator

from art_cli.reports.pages.report_text import duration
from art_cli.runs.promise import Expected, Measured, Pilot, Promise, steps_for

WIDTH = 15


def plan_text(promise: Promise, *, command: str, budget_usd: float | None = None, goal: str = "") -> str:
    """Returns the whole text. `command` trains the run, and `goal` is the line about a wished reward."""
    lines = ["can this reward be learned?", *_learned(promise), *([_row("goal", goal)] if goal else [])]
    lines += ["", "with which settings?", *_settings(promise)]
    lines += ["", "does it fit?", *_memory(promise.measured)]
    lines += ["", f"how long, how much? {promise.steps} steps, {promise.evaluations} evaluations", *_costs(promise)]
    if budget_usd is not None:
        lines.append(_row("budget", _budget(promise, budget_usd)))
    chosen = " ".join(f"{key}={value}" for key, value in promise.settings.items())
    return "".join(f"{line}\n" for line in [*lines, "", f"go on with: {command} {chosen}".rstrip()])


def goal_text(found: Measured, bound: float) -> str:
    """Returns what the first step shows of a wished reward. It forecasts none, because no first step shows the end."""
    if found.reward_mean is None or found.reward_best is None:
        return "no attempt has a reward"
    if found.reward_mean >= bound:
        return f"{bound:g} is reached already"
    if found.reward_best >= bound:
        return f"{bound:g} is what the best of {round(found.num_attempts / len(found.group_tokens))} attempts gets now"
    return f"{bound:g} is more than the best attempts get now ({found.reward_best:.3f}); nothing here shows it in reach"


def _row(name: str, text: str) -> str:
    return f"  {name:{WIDTH}s}{text}"


def _learned(promise: Promise) -> Iterator[str]:
    found = promise.measured
    if found.reward_mean is not None and found.reward_best is not None:
        text = f"mean {found.reward_mean:.3f}, best of a group {found.reward_best:.3f}"
        yield _row("rewards", f"{text}; they differ within {found.spread_share:.0%} of {len(found.group_tokens)} groups")
    if found.repeats is not None:
        yield _row("judge", f"repeats {max(found.repeats, 0.0):.0%} of the differences when it is asked again")
    yield from (_row(name, text) for name, text in found.facts.items())
    for doubt in promise.doubts:
        yield _row(f"! {doubt.kind}", doubt.text)
        yield _row("", f"-> {doubt.cure}")
    if not promise.doubts:
        yield _row("verdict", "nothing was found that stands against it")


def _settings(promise: Promise) -> Iterator[str]:
    found = promise.measured
    for key, value in promise.settings.items():
        yield f"  {key}={value}"
        yield _row("", promise.reasons[key])
    if found.pilots:
        yield _row("pilots", "  ".join(map(_pilot, found.pilots)))
    scale = found.noise_scale
    if scale is not None:
        high = "more than it can show" if scale.high is None else f"{scale.high:.0f}"
        about = "hidden by noise" if scale.groups is None else f"about {scale.groups:.0f} groups"
        yield _row("noise scale", f"{about}, 80 % interval {scale.low:.0f} to {high}")
    if not found.pilots:
        yield _row("", "no pilot was taken")


def _pilot(pilot: Pilot) -> str:
    return f"{pilot.rate:.2g}: KL {'unknown' if pilot.kl is None else f'{pilot.kl:.2g}'}"


def _memory(found: Measured) -> Iterator[str]:
    if found.memory is None:
        yield _row("memory", "not measured")
    else:
        row, needed, there = found.memory.tokens, found.memory.gigabytes, found.memory.there
        yield _row("memory", f"{needed:.2f} GB for a row of {row:,} tokens, the longest; {there:.1f} GB are there")


def _costs(promise: Promise) -> Iterator[str]:
    per_step = promise.measured
    once = {"sampling": per_step.sampling_s, "judging": per_step.judging_s, "training": per_step.training_s or 0.0,
            "rest": per_step.rest_s}  # fmt: skip
    yield _row("a step", ", ".join(f"{name} {duration(seconds)}" for name, seconds in once.items()))
    if per_step.training_s is None:
        yield _row("", "training could not be measured, and is not in the sums")
    whole, tokens = promise.seconds["whole"], promise.tokens
    yield _row("the run", f"{duration(whole.value)}, in 80 % of cases {duration(whole.low)} to {duration(whole.high)}")
    yield _row("tokens", f"{tokens.value:,.0f} sampled, {tokens.low:,.0f} to {tokens.high:,.0f}")
    yield _row("dollars", "a price of the judge is unknown" if promise.usd is None else _dollars(promise.usd))


def _dollars(usd: Expected) -> str:
    return f"${usd.value:.2f}, ${usd.low:.2f} to ${usd.high:.2f}" if usd.high else "none for a judge"


def _budget(promise: Promise, usd: float) -> str:
    if promise.usd is None:
        return "the price of a step is unknown"
    steps = steps_for(usd, promise)
    if steps is None:
        return "nothing costs dollars that are known; stop.usd_per_hour prices the machine"
    return f"${usd:g} buys {steps} steps at the upper end"
