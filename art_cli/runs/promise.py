"""Promise: what `art plan` measured at a run's first step, and what it says that the run will take (promise.json)."""

import math
import random
from collections.abc import Mapping
from statistics import quantiles

import msgspec

SCHEMA_VERSION = 1
DRAWS = 1000  # resamples; the ends of an 80 % interval move by about 2 % of its width between seeds
# Replies get longer or shorter while a policy learns, which no first step shows. Assumed: their mean over the run is
# within 1 / 1.5 and 1.5 of the first step's in 80 % of runs. benchmarks/forecasts/plan.py counts how often the
# intervals hold.
DRIFT = 1.5
PACE = 0.1  # least standard deviation of the logarithm of equal work's seconds in two starts on one machine (assumed)
MOST = 1e15  # larger seconds, tokens and dollars are damage
SHORT_S = 0.1  # seconds below which a part of a run is not compared
NORMAL_80 = 1.2816  # the normal distribution's 0.9 quantile


class Doubt(msgspec.Struct, frozen=True):
    """A reason why the reward cannot be learned as it is. Example: Doubt("too_hard", "no attempt of 24 ...", "...")"""

    kind: str
    text: str
    cure: str


class Expected(msgspec.Struct, frozen=True):
    """A median with its 80 % interval. Example: Expected(310.0, 240.0, 420.0)"""

    value: float
    low: float
    high: float


class Pilot(msgspec.Struct, frozen=True):
    """A step that was taken and taken back. Example: Pilot(rate=0.0004, kl=0.003, clip_fraction=0.02, seconds=3.1)"""

    rate: float
    kl: float | None  # KL(before || after) in nats per trained token, or None if the step failed or it is not known
    clip_fraction: float | None  # or None if the loss clips nothing
    seconds: float
    is_failed: bool = False


class NoiseScale(msgspec.Struct, frozen=True):
    """The number of groups at which noise and signal of the gradient are equal, with its 80 % interval.

    None is a number above all that these groups can show, because their noise hides the signal.
    """

    groups: float | None
    low: float
    high: float | None


class MemoryNeed(msgspec.Struct, frozen=True):
    """The peak memory of training on the longest row that the limits allow, or a micro-batch if that is more."""

    tokens: int
    gigabytes: float
    there: float  # gigabytes of the GPU, or that this process may use
    is_packed: bool = False  # whether a micro-batch has more tokens than the longest row


class Reflected(msgspec.Struct, frozen=True):
    """The questions to a model that writes a prompt, after one step. Example: Reflected("NAME", 1, 8.2, 4100, 0.013)"""

    model: str
    calls: int  # more than one if an answer could not be used
    seconds: float
    tokens: int
    usd: float | None  # or None if the price is unknown


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of the first step. Seconds, tokens and dollars are those of one step."""

    group_tokens: list[int]  # sampled tokens of each group
    num_attempts: int
    sampling_s: float
    judging_s: float  # after the last attempt
    training_s: float | None = None  # or None if no pilot was taken
    rest_s: float = 0.0  # saving a checkpoint and loading it into the engine
    start_s: float = 0.0  # loading libraries and model, once in a process
    first_call_s: float = 0.0  # further time before the first call, in which the agent loads its own; not in sampling_s
    shared_prompt_s: float = 0.0  # time for the part of a prompt that only a group's attempts share, once in the group
    first_training_s: float = 0.0  # additional time of a process's first training step
    pace: float = 0.0  # standard deviation of the logarithm of the seconds that equal steps took
    judge_usd: float | None = 0.0  # or None if a price is unknown
    contests: list[str] = []  # sources whose evaluations the judge decides, because their rollouts return no reward
    num_contested: int = 0  # the step's attempts of those sources, which the judge was paid for
    reward_mean: float | None = None
    reward_best: float | None = None  # mean over the groups of the best attempt's reward
    facts: dict[str, str] = {}  # lines about the rewards, by name
    pilots: list[Pilot] = []
    obstacle: str = ""  # why no pilot could be taken, or none was asked for
    verdicts: int = 1  # asked for on each group
    noise_scale: NoiseScale | None = None
    memory: MemoryNeed | None = None
    reflection: Reflected | None = None  # or None if no search for a prompt was compared


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """promise.json. `expected` has the seconds of the whole run's parts and of all ("whole"), "tokens" and "usd"."""

    schema_version: int = SCHEMA_VERSION
    config_hash: str
    measured: Measured
    doubts: list[Doubt]
    settings: dict[str, str]  # key -> value, to be pasted into the command of `art train`
    reasons: dict[str, str]  # key -> why
    steps: int
    evaluations: int
    contested: float = 0.0  # verdicts in all evaluations, in those of a step
    usd_per_hour: float = 0.0  # of the machine, which "usd" includes
    speed_hash: str = ""  # of the settings that decide seconds and memory
    expected: dict[str, Expected]
    prompt: dict[str, Expected] = {}  # the same of a search for a prompt with these groups, if it was compared

    def __post_init__(self) -> None:
        """Raises ValueError if it promises what no plan does."""
        found = self.measured
        promised = [*self.expected.values(), *self.prompt.values()]
        numbers = [number for each in promised for number in msgspec.structs.astuple(each)]
        numbers += [found.sampling_s, found.judging_s, found.training_s or 0.0, found.rest_s, found.start_s]
        numbers += [found.first_call_s, found.first_training_s, found.shared_prompt_s, found.judge_usd or 0.0]
        is_whole = all({"whole", "tokens"} <= each.keys() for each in (self.expected, self.prompt or self.expected))
        if (
            not is_whole
            or (self.prompt and found.reflection is None)
            or self.steps < 1
            or not all(0 <= number < MOST for number in numbers)
        ):
            raise ValueError("its numbers are not those of a plan")


def forecast(
    found: Measured,
    *,
    steps: int,
    plays: float | None = None,
    evaluations: int,
    eval_attempts: int,
    eval_prompts_s: float = 0.0,
    usd_per_hour: float,
    contested: float = 0.0,
    learning_usd: float = 0.0,
    is_ahead: bool = False,
) -> dict[str, Expected]:
    """Returns what the whole run takes; no "usd" if a price is unknown. `eval_attempts` are those of one evaluation.

    `eval_prompts_s` is what their prompts take beyond as many of a step, where more attempts share one. `contested` is
    what the judge is shown in all evaluations together, in attempts of a step, and `learning_usd` the cost of a step of
    the learner. `plays` is what is played, in attempts of a step; less than `steps` with replay. `is_ahead`: sampling
    goes on while weights move, and what of it that saves depends on the machine, from nothing to all.

    Sampling, judging and training are proportional to tokens. Their mean is resampled over groups, and multiplied by
    one factor for the drift of lengths. All seconds are multiplied by one factor for the pace of the machine.
    """
    draw, groups, drawn = random.Random(0), found.group_tokens, dict[str, list[float]]()
    plays = steps if plays is None else plays
    played, prompts_s = evaluations * eval_attempts / max(found.num_attempts, 1), evaluations * eval_prompts_s
    for _ in range(DRAWS):
        share = sum(draw.choices(groups, k=len(groups))) / sum(groups) if sum(groups) else 1.0
        share *= math.exp(draw.gauss(0.0, math.log(DRIFT) / NORMAL_80))
        seconds = {
            "sampling": plays * found.sampling_s * share,
            "judging": plays * found.judging_s * share,
            "training": steps * (found.training_s or 0.0) * share + found.first_training_s,
            "evaluating": (played * found.sampling_s + contested * found.judging_s) * share + prompts_s,
            "rest": found.start_s + found.first_call_s + steps * found.rest_s,
        }
        pace = math.exp(draw.gauss(0.0, max(found.pace, PACE)))
        seconds = {name: pace * value for name, value in seconds.items()}
        beside = min(seconds["sampling"] + seconds["judging"], seconds["training"]) if is_ahead else 0.0
        seconds["whole"] = whole = sum(seconds.values()) - (draw.random() * beside if beside else 0.0)
        paid = (plays + contested) * (found.judge_usd or 0.0) + steps * learning_usd
        usd = paid * share + whole / 3600 * usd_per_hour
        for name, value in (seconds | {"tokens": plays * sum(groups) * share, "usd": usd}).items():
            drawn.setdefault(name, []).append(value)
    if found.judge_usd is None:
        del drawn["usd"]
    tenths = {name: quantiles(values, n=10, method="inclusive") for name, values in drawn.items()}
    return {name: Expected(each[4], each[0], each[8]) for name, each in tenths.items()}


def steps_for(usd: float, promise: Promise) -> int | None:
    """Returns the number of steps that the dollars buy at the upper end of the interval, or None if none are known."""
    cost = promise.expected.get("usd")
    return int(min(usd / (cost.high / promise.steps), MOST)) if cost is not None and cost.high > 0 else None


class Promised(msgspec.Struct, frozen=True):
    """A promised number beside what happened. Example: Promised("sampling", Expected(300, 250, 380), 310.0, True)"""

    name: str
    promised: Expected
    happened: float
    is_inside: bool  # whether it lies in the interval


def compare(promise: Promise, happened: Mapping[str, float]) -> list[Promised]:
    """Returns the promised numbers that have a counterpart in what happened; the plan's own seconds are added to that.

    The metrics of a run do not count what was played and judged before its own start.
    """
    found, rows = promise.measured, list[Promised]()
    paid = {"sampling": found.sampling_s, "judging": found.judging_s, "whole": found.sampling_s + found.judging_s}
    for name in promise.expected.keys() & happened.keys():
        each, value = promise.expected[name], happened[name] + paid.get(name, 0.0)
        if name in ("usd", "tokens") or max(each.high, value) >= SHORT_S:
            rows.append(Promised(name, each, value, each.low <= value <= each.high))
    return sorted(rows, key=lambda row: list(promise.expected).index(row.name))
