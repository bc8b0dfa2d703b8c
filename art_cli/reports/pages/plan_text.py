"""A run's plan as text for a terminal: four questions on a screen."""

from collections.abc import Iterator

from art_cli.reports.pages.report_text import duration
from art_cli.runs.promise import Expected, Measured, Pilot, Promise, steps_for

_NO_PRICE = (
    "no price of the judge is known; set judge.price={input: X, output: Y}, dollars for a million tokens "
    "(judge.judges.NAME.price of a blend)"
)


Row = tuple[str, str]  # a name, or "" to continue the previous row, and a text


def plan_text(promise: Promise, *, command: str, budget_usd: float | None = None, goal: float | None = None) -> str:
    """`command` trains the run ("" if it should not be trained); `budget_usd` and `goal` add a line."""
    lines = list[str]()
    for question, rows in plan_sections(promise, budget_usd=budget_usd, goal=goal):
        lines += [question, *(f"  {name:14s} {text}".rstrip() for name, text in rows), ""]
    lines += [f"continue with: {command}"] if command else []
    return "\n".join(lines).rstrip() + "\n"


def plan_sections(
    promise: Promise, *, budget_usd: float | None = None, goal: float | None = None
) -> list[tuple[str, list[Row]]]:
    """Returns the questions with their rows. Doubts have names starting with "!", followed by a cure."""
    found = promise.measured
    wished = [] if goal is None else [("goal", _goal(found, goal))]
    budget = [] if budget_usd is None else [("budget", _budget(promise, budget_usd))]
    size = f"{promise.steps} steps, {promise.evaluations} evaluations"
    return [
        ("can this reward be learned?", [*_learned(promise), *wished]),
        ("with which settings?", list(_settings(promise))),
        ("does it fit?", [("memory", _memory(found))]),
        (f"how long, how much? {size}", [*_costs(promise), *budget]),
        *([("prompt or weights?", list(_compared(promise)))] if promise.prompt else []),
    ]


def _learned(promise: Promise) -> Iterator[Row]:
    found = promise.measured
    if found.reward_mean is not None and found.reward_best is not None:
        yield "rewards", f"mean {found.reward_mean:.3f}, best of a group {found.reward_best:.3f}"
    yield from found.facts.items()
    for doubt in promise.doubts:
        yield f"! {doubt.kind}", doubt.text
        yield "", f"try: {doubt.cure}"
    if not promise.doubts:
        yield "verdict", "nothing was found against it"


def _goal(found: Measured, goal: float) -> str:
    """Compares a desired reward with the played step. A single step cannot show the end, so nothing is forecast."""
    if found.reward_mean is None or found.reward_best is None:
        return "no attempt has a reward"
    if found.reward_mean >= goal:
        return f"{goal:g} is reached already"
    if found.reward_best >= goal:
        return f"the best attempts of the groups get {goal:g} now; to make that usual is what training does"
    return f"{goal:g} is more than the best attempts get now; nothing here shows whether it is in reach"


def _settings(promise: Promise) -> Iterator[Row]:
    scale, pilots = promise.measured.noise_scale, promise.measured.pilots
    for key, value in promise.settings.items():
        yield f"{key}={value}", ""
        yield "", promise.reasons.get(key, "")
    why = promise.measured.obstacle or "no group has signal"
    yield "pilots", ", ".join(map(_pilot, pilots)) or f"none: {why}"
    if scale is not None:
        about = "hidden by noise" if scale.groups is None else f"{scale.groups:.0f} groups"
        high = "no bound" if scale.high is None else f"{scale.high:.0f}"
        yield "noise scale", f"{about}, 80 % interval {scale.low:.0f} to {high}; up to it more groups pay"


def _pilot(pilot: Pilot) -> str:
    if pilot.is_failed:
        return f"{pilot.rate:.2g} failed"
    return f"{pilot.rate:.2g} moves {'by an unknown KL' if pilot.kl is None else f'{pilot.kl:.2g}'}"


def _memory(found: Measured) -> str:
    memory = found.memory
    if memory is None:
        return "not measured"
    needed = f"about {memory.gigabytes:.2f} GB for {memory.tokens:,} tokens, the longest row or a micro-batch"
    return f"{needed}; {memory.there:.1f} GB are there"


def _costs(promise: Promise) -> Iterator[Row]:
    one, whole, tokens = promise.measured, promise.expected["whole"], promise.expected["tokens"]
    seconds = {"sampling": one.sampling_s, "judging": one.judging_s, "training": one.training_s or 0.0}
    parts = [f"{name} {duration(round(took, 2))}" for name, took in (seconds | {"the rest": one.rest_s}).items()]
    yield "a step", ", ".join(parts)
    if one.training_s is None:
        yield "", "training could not be measured, and is not in the sum"
    yield "the run", f"{duration(whole.value)}, 80 % interval {duration(whole.low)} to {duration(whole.high)}"
    yield "tokens", f"{tokens.value:,.0f} sampled, {tokens.low:,.0f} to {tokens.high:,.0f}"
    usd = promise.expected.get("usd")
    yield "dollars", _NO_PRICE if usd is None else _interval(usd)


def _compared(promise: Promise) -> Iterator[Row]:
    asked, attempts = promise.measured.reflection, promise.steps * promise.measured.num_attempts
    for name, expected in (("weights", promise.expected), ("prompt", promise.prompt)):
        whole, usd = expected["whole"], expected.get("usd")
        took = f"{duration(whole.value)}, 80 % interval {duration(whole.low)} to {duration(whole.high)}"
        yield name, f"{took}; {'an unknown price' if usd is None else _interval(usd)}"
    if asked is not None:
        price = "an unknown price" if asked.usd is None else _dollars(asked.usd)
        num = f"{promise.steps * max(asked.calls, 1):,} questions to {asked.model}"
        yield "each", f"{attempts:,} attempts; the prompt search adds {num}, without training"
        yield "", f"{asked.calls} of them took {duration(asked.seconds)}, {asked.tokens:,} tokens, {price}"


def _budget(promise: Promise, usd: float) -> str:
    steps, cost = steps_for(usd, promise), promise.expected.get("usd")
    if cost is None:
        return _NO_PRICE
    if steps is None:
        return f"nothing here costs money; 'stop=[{{usd: {usd:g}, usd_per_hour: PRICE}}]' is the price of the machine"
    if steps >= promise.steps:
        return f"${usd:g} pays the whole run, {_dollars(cost.high)} at the upper end of the interval"
    if steps == 0:
        step = f"{_dollars(cost.high / promise.steps)} at the upper end of the interval"
        return f"${usd:g} does not pay one step, {step}; a smaller rollout.groups_per_step costs less"
    return f"${usd:g} buys {steps} of {promise.steps} steps at the upper end of the interval: train.steps={steps}"


def _interval(usd: Expected) -> str:
    return f"{_dollars(usd.value)}, {_dollars(usd.low)} to {_dollars(usd.high)}"


def _dollars(usd: float) -> str:
    return f"${usd:.2f}" if usd >= 0.1 or usd == 0 else f"${usd:.4f}"
