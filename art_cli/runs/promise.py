"""Promise (promise.json): `art plan`'s measurements of the initial step and forecast for the whole run."""

import math
import random
from collections.abc import Mapping
from statistics import quantiles

import msgspec

SCHEMA_VERSION = 1
DRAWS = 1000  # resamples; the ends of an 80 % interval vary by about 2 % of the interval's width between seeds
# Replies get longer or shorter as a policy learns, and a first step cannot show how much. Assumption: in 80 % of runs,
# the mean reply length is between 1/1.5 and 1.5 times the first step's mean. benchmarks/forecasts/plan.py checks how
# often these intervals hold.
DRIFT = 1.5
PACE = 0.1  # minimum standard deviation of log seconds for the same work in two starts on one machine (assumed)
MOST = 1e15  # larger seconds, tokens and dollars are invalid
SHORT_S = 0.1  # shorter parts of a run are not compared
NORMAL_80 = 1.2816  # the normal distribution's 0.9 quantile


class Doubt(msgspec.Struct, frozen=True):
    """A reason why training cannot learn from this reward. Example: Doubt("too_hard", "no attempt of 24 ...", "...")"""

    kind: str
    text: str
    cure: str


class Expected(msgspec.Struct, frozen=True):
    """A median and its 80 % interval. Example: Expected(310.0, 240.0, 420.0)"""

    value: float
    low: float
    high: float


class Pilot(msgspec.Struct, frozen=True):
    """A trial step, undone afterwards. Example: Pilot(rate=0.0004, kl=0.003, clip_fraction=0.02, seconds=3.1)"""

    rate: float
    kl: float | None  # KL(before || after) in nats per trained token; None when unknown or the step failed
    clip_fraction: float | None  # None for losses without clipping
    seconds: float
    is_failed: bool = False


class NoiseScale(msgspec.Struct, frozen=True):
    """The number of groups where gradient noise equals gradient signal, and its 80 % interval.

    None means more groups than this sample can resolve, because noise hides the signal.
    """

    groups: float | None
    low: float
    high: float | None


class MemoryNeed(msgspec.Struct, frozen=True):
    """Peak memory for training on the longest allowed row, or on a micro-batch if it has more tokens."""

    tokens: int
    gigabytes: float
    there: float  # gigabytes of GPU memory, or available to this process
    is_packed: bool = False  # True if a micro-batch has more tokens than the longest row


class Reflected(msgspec.Struct, frozen=True):
    """Calls to the model that writes a prompt, after one step. Example: Reflected("NAME", 1, 8.2, 4100, 0.013)"""

    model: str
    calls: int  # greater than 1 when an answer was unusable
    seconds: float
    tokens: int
    usd: float | None  # None if the price is unknown


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the first step. Seconds, tokens and dollars are per step."""

    group_tokens: list[int]  # sampled tokens of each group
    num_attempts: int
    sampling_s: float
    judging_s: float  # seconds after the last attempt
    training_s: float | None = None  # None if no pilot ran
    rest_s: float = 0.0  # saving a checkpoint and loading it into the engine
    start_s: float = 0.0  # loading libraries and model, once per process
    # extra startup time before any call, while the agent loads its libraries; not part of sampling_s
    first_call_s: float = 0.0
    shared_prompt_s: float = 0.0  # time for the prompt prefix shared within a group, spent once per group
    first_training_s: float = 0.0  # extra time for a process's first training step
    pace: float = 0.0  # standard deviation of log seconds over equal steps
    judge_usd: float | None = 0.0  # None if a price is unknown
    contests: list[str] = []  # sources whose evaluations use the judge, because their rollouts return no reward
    num_contested: int = 0  # attempts of these sources in this step, paid for at the judge
    reward_mean: float | None = None
    reward_best: float | None = None  # each group's best reward, averaged over groups
    facts: dict[str, str] = {}  # text lines about the rewards, by name
    pilots: list[Pilot] = []
    obstacle: str = ""  # reason why no pilot ran, such as that none was asked for
    verdicts: int = 1  # judge verdicts per group
    noise_scale: NoiseScale | None = None
    memory: MemoryNeed | None = None
    reflection: Reflected | None = None  # None if prompt search was not compared


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """promise.json. `expected` has seconds for each part of the run and the "whole" run, plus "tokens" and "usd"."""

    schema_version: int = SCHEMA_VERSION
    config_hash: str
    measured: Measured
    doubts: list[Doubt]
    settings: dict[str, str]  # key -> value, to paste into the `art train` command
    reasons: dict[str, str]  # key -> reason
    steps: int
    evaluations: int
    contested: float = 0.0  # verdicts in all evaluations, divided by verdicts in a step
    usd_per_hour: float = 0.0  # price of the machine, included in "usd"
    speed_hash: str = ""  # hash of the settings that affect speed and memory
    expected: dict[str, Expected]
    prompt: dict[str, Expected] = {}  # the same forecast for prompt search with these groups, if compared

    def __post_init__(self) -> None:
        """Raises ValueError for impossible numbers."""
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
            raise ValueError("its numbers are not a plan's")


def forecast(
    found: Measured,
    *,
    steps: int,
    evaluations: int,
    eval_attempts: int,
    eval_prompts_s: float = 0.0,
    usd_per_hour: float,
    contested: float = 0.0,
    learning_usd: float = 0.0,
    is_ahead: bool = False,
) -> dict[str, Expected]:
    """Returns the forecast for the whole run, without "usd" if a price is unknown.

    `eval_attempts` is the number of attempts per evaluation. `eval_prompts_s` is the extra prompt time when fewer
    attempts share a prompt than in training. `contested` is the number of attempts judged in all evaluations, divided
    by attempts per step. `learning_usd` is the learner's cost per step. `is_ahead`: sampling continues during training;
    depending on the machine this saves between nothing and all of the overlap.

    Sampling, judging and training time scale with tokens. The mean token count is resampled over groups and multiplied
    by one factor for length drift. All seconds are multiplied by one factor for machine pace.
    """
    draw, groups, drawn = random.Random(0), found.group_tokens, dict[str, list[float]]()
    played, prompts_s = evaluations * eval_attempts / max(found.num_attempts, 1), evaluations * eval_prompts_s
    for _ in range(DRAWS):
        share = sum(draw.choices(groups, k=len(groups))) / sum(groups) if sum(groups) else 1.0
        share *= math.exp(draw.gauss(0.0, math.log(DRIFT) / NORMAL_80))
        seconds = {
            "sampling": steps * found.sampling_s * share,
            "judging": steps * found.judging_s * share,
            "training": steps * (found.training_s or 0.0) * share + found.first_training_s,
            "evaluating": (played * found.sampling_s + contested * found.judging_s) * share + prompts_s,
            "rest": found.start_s + found.first_call_s + steps * found.rest_s,
        }
        pace = math.exp(draw.gauss(0.0, max(found.pace, PACE)))
        seconds = {name: pace * value for name, value in seconds.items()}
        beside = min(seconds["sampling"] + seconds["judging"], seconds["training"]) if is_ahead else 0.0
        seconds["whole"] = whole = sum(seconds.values()) - (draw.random() * beside if beside else 0.0)
        paid = (steps + contested) * (found.judge_usd or 0.0) + steps * learning_usd
        usd = paid * share + whole / 3600 * usd_per_hour
        for name, value in (seconds | {"tokens": steps * sum(groups) * share, "usd": usd}).items():
            drawn.setdefault(name, []).append(value)
    if found.judge_usd is None:
        del drawn["usd"]
    tenths = {name: quantiles(values, n=10, method="inclusive") for name, values in drawn.items()}
    return {name: Expected(each[4], each[0], each[8]) for name, each in tenths.items()}


def steps_for(usd: float, promise: Promise) -> int | None:
    """Returns the number of steps that `usd` buys at the interval's upper end."""
    cost = promise.expected.get("usd")
    return int(min(usd / (cost.high / promise.steps), MOST)) if cost is not None and cost.high > 0 else None


class Promised(msgspec.Struct, frozen=True):
    """A promised number and the actual one. Example: Promised("sampling", Expected(300, 250, 380), 310.0, True)"""

    name: str
    promised: Expected
    happened: float
    is_inside: bool  # True if the actual number lies in the interval


def compare(promise: Promise, happened: Mapping[str, float]) -> list[Promised]:
    """Compares the promise with a run's actual numbers, adding the plan's seconds to these.

    A run's metrics exclude attempts played and judged before the run started. A plan that could not measure training
    promises no number that includes it.
    """
    found, rows = promise.measured, list[Promised]()
    paid = {"sampling": found.sampling_s, "judging": found.judging_s, "whole": found.sampling_s + found.judging_s}
    unknown = {"training", "whole", "usd"} if found.training_s is None else set()
    for name in promise.expected.keys() & happened.keys() - unknown:
        each, value = promise.expected[name], happened[name] + paid.get(name, 0.0)
        if name in ("usd", "tokens") or max(each.high, value) >= SHORT_S:
            rows.append(Promised(name, each, value, each.low <= value <= each.high))
    return sorted(rows, key=lambda row: list(promise.expected).index(row.name))
