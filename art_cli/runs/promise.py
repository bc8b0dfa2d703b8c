"""Promise: what `art plan` found out about a run before its first step, and what it says that the run will take.

    promise.json        Measured -> forecast -> seconds, tokens and dollars of the whole run, with 80 % intervals

The forecast is pure and cheap, so that a plan that is asked again with other steps or evaluations plays nothing.
"""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import quantiles
from typing import NamedTuple

import msgspec

SCHEMA_VERSION = 1
DRAWS = 1000  # resamples; the ends of an 80 % interval move by about 2 % of its width between seeds
# Replies get longer or shorter while a policy learns, which no first step shows. Assumed: by a factor within 1/1.5 and
# 1.5 over the mean of the run, in 80 % of runs. benchmarks/plan.py counts how often the intervals hold.
DRIFT = 1.5
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
    """A step that was taken and taken back. Example: Pilot(0.0004, kl=0.003, clip_fraction=0.02, seconds=3.1)"""

    rate: float
    kl: float | None  # KL(before || after) by k3, in nats per trained token; None: the step failed
    clip_fraction: float | None  # share of the tokens whose ratio was clipped; None: the loss clips none
    seconds: float


class NoiseScale(msgspec.Struct, frozen=True):
    """The number of groups at which noise and signal of the gradient are equal (McCandlish et al. 2018), estimated.

    `low` and `high` are an 80 % interval; None: more than any number, because the groups' gradients hide their mean.
    """

    groups: float | None
    low: float
    high: float | None


class Memory(msgspec.Struct, frozen=True):
    """The peak memory of training on the longest row that the limits allow, in gigabytes, and what is there."""

    tokens: int
    gigabytes: float
    there: float


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the first step showed. Seconds and tokens are those of one step; dollars those of the judge's calls."""

    group_tokens: list[int]  # sampled tokens of each group
    num_attempts: int
    sampling_s: float
    judging_s: float  # after the last attempt
    training_s: float | None  # None: no pilot was taken
    rest_s: float  # saving a checkpoint and loading it into the engine
    judge_usd: float | None = 0.0  # None: a price is unknown
    reward_mean: float | None = None
    reward_best: float | None = None  # mean over the groups of the best attempt's reward
    spread_share: float = 0.0  # share of the groups whose rewards differ
    repeats: float | None = None  # share of a score's variance that repeats when the judge is asked again
    facts: dict[str, str] = {}  # further lines about the rewards, by name
    pilots: list[Pilot] = []
    noise_scale: NoiseScale | None = None
    memory: Memory | None = None


class Extent(NamedTuple):
    """The length of a run. Example: Extent(steps=50, evaluations=6, attempts=40, usd_per_hour=0.0)"""

    steps: int
    evaluations: int
    attempts: int  # attempts of one evaluation
    usd_per_hour: float  # price of the machine


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """promise.json. `seconds` has the parts of the whole run and "whole", their sum."""

    schema_version: int = SCHEMA_VERSION
    config_hash: str
    measured: Measured
    doubts: list[Doubt]
    settings: dict[str, str]  # key -> value, to be pasted into the command of `art train`
    reasons: dict[str, str]  # key -> why
    steps: int
    evaluations: int
    seconds: dict[str, Expected]
    tokens: Expected
    usd: Expected | None  # None: a price is unknown


class Forecast(NamedTuple):
    seconds: dict[str, Expected]
    tokens: Expected
    usd: Expected | None


def forecast(found: Measured, extent: Extent) -> Forecast:
    """Returns what the whole run takes.

    Sampling, judging and training are proportional to tokens, whose mean is resampled over groups; then all are
    multiplied by one factor for the drift of lengths.
    """
    draw, groups = random.Random(0), found.group_tokens or [0]
    played, size = sum(groups), found.num_attempts or 1
    parts: dict[str, list[float]] = {}
    for _ in range(DRAWS):
        share = sum(draw.choices(groups, k=len(groups))) / played if played else 1.0
        share *= math.exp(draw.gauss(0.0, math.log(DRIFT) / NORMAL_80))
        seconds = {
            "sampling": extent.steps * found.sampling_s * share,
            "judging": extent.steps * found.judging_s * share,
            "training": extent.steps * (found.training_s or 0.0) * share,
            "evaluating": extent.evaluations * extent.attempts / size * found.sampling_s * share,
            "rest": extent.steps * found.rest_s,
        }
        whole = sum(seconds.values())
        usd = extent.steps * (found.judge_usd or 0.0) * share + whole / 3600 * extent.usd_per_hour
        numbers = seconds | {"whole": whole, "tokens": extent.steps * played * share, "usd": usd}
        for name, value in numbers.items():
            parts.setdefault(name, []).append(value)
    found_by_name = {name: expect(values) for name, values in parts.items()}
    tokens, dollars = found_by_name.pop("tokens"), found_by_name.pop("usd")
    return Forecast(found_by_name, tokens, None if found.judge_usd is None else dollars)


def expect(values: Sequence[float]) -> Expected:
    """Returns the median and the 0.1 and 0.9 quantiles of at least two values."""
    tenths = quantiles(values, n=10, method="inclusive")
    return Expected(tenths[4], tenths[0], tenths[8])


def steps_for(usd: float, promise: Promise) -> int | None:
    """Returns the number of steps that the dollars buy at the upper end of the interval, or None if it is free."""
    if promise.usd is None or promise.usd.high <= 0:
        return None
    return int(usd / (promise.usd.high / promise.steps))


class Kept(NamedTuple):
    """A promised number beside what happened. Example: Kept("sampling", Expected(300, 250, 380), 310.0)"""

    name: str
    promised: Expected
    happened: float

    @property
    def is_inside(self) -> bool:
        return self.promised.low <= self.happened <= self.promised.high


def compare(promise: Promise, happened: Mapping[str, float]) -> list[Kept]:
    """Returns the promised numbers that have a counterpart in what happened, in the order of the promise.

    The promise counts the first step, whose playing the plan has paid; the run's metrics count what came after.
    """
    found, promised = promise.measured, {**promise.seconds, "tokens": promise.tokens}
    spent = {"sampling": found.sampling_s, "judging": found.judging_s, "whole": found.sampling_s + found.judging_s}
    if promise.usd is not None:
        promised["usd"], spent["usd"] = promise.usd, found.judge_usd or 0.0
    return [
        Kept(name, each, happened[name] + spent.get(name, 0.0)) for name, each in promised.items() if name in happened
    ]
