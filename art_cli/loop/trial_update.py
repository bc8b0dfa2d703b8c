"""A trial update: steps on made-up rows, and an estimate of the cost of longer rows.

Two rows are measured, because one part of the cost grows with the tokens and another part does not. Attention's cost
grows with the square of the length. Its share is computed from the model's shape, because short rows are too noisy.
"""

from collections.abc import Collection
from typing import NamedTuple

from art_cli.learners import Learner, StepMetrics
from art_cli.models.device import forget_peak, peak
from art_cli.models.weights import Weights, count_parameters
from art_cli.runs.trajectory import Trajectory, Turn, score_trajectory

MAX_TOKENS = 1024  # longest row to try; longer rows are estimated
MIN_SECOND = 256  # minimum length of the second row, long enough to differ from the first by more than noise
# Shortest first row to estimate from, by device. On a GPU, a chunk of logits has 883 rows of a vocabulary of 152k
# (packs/logprobs.py), so longer rows do not increase the head's memory.
SHORTEST = {"cuda": 2048}
GROWTH = 2  # ratio of the second row's length to row 1


class Cost(NamedTuple):
    """The cost of a forward and backward pass over a row. Example: Cost(tokens=256, seconds=1.4, gigabytes=1.9)."""

    tokens: int
    seconds: float
    gigabytes: float | None  # peak memory of process or GPU, if reported

    def __str__(self) -> str:
        memory = "" if self.gigabytes is None else f" and {self.gigabytes:.1f} GB"
        return f"about {self.seconds:,.0f} s{memory}"


def step(learner: Learner, num_tokens: int, *, vocabulary: int, parts: Collection[str] = ()) -> StepMetrics:
    """Takes a step on two equal attempts with `num_tokens` tokens. All tokens but the first count as sampled.

    `parts` are metrics that the loss reads rewards from. A loss that needs anything else makes no update.
    """
    ids = [(7 * place) % vocabulary for place in range(num_tokens)]
    logprobs = learner.score(ids)
    turn = Turn(
        parent=None,
        kept=0,
        prompt_ids=ids[:1],
        sampled_ids=ids[1:],
        logprobs=logprobs,
        raw_logprobs=logprobs,
        step=0,
        temperature=1.0,
    )
    attempts = [
        Trajectory(
            id=f"check-{i}",
            group_id="check",
            group_size=2,
            index=i,
            turns=[turn],
            metrics=dict.fromkeys(parts, float(i)),
        )
        for i in range(2)
    ]
    return learner.step([[score_trajectory(attempt, float(attempt.index)) for attempt in attempts]])


def second_length(num_tokens: int, longest: int) -> int:
    """Returns the second row's length, given the first row's."""
    return min(longest, max(GROWTH * num_tokens, MIN_SECOND))


def measure(learner: Learner, weights: Weights, num_tokens: int, parts: Collection[str] = ()) -> Cost:
    """Returns the cost of a row. Call it after a first step, which also checks packs."""
    forget_peak(weights)
    metrics = step(learner, num_tokens, vocabulary=weights.vocabulary, parts=parts)
    return Cost(num_tokens, metrics.train_s, peak(weights))


def forecast(
    learner: Learner,
    weights: Weights,
    num_tokens: int,
    longest: int,
    *,
    parts: Collection[str] = (),
    most_tokens: int = 0,
    most_gb: float = 0.0,
) -> Cost:
    """Estimates the cost of a row of `longest` tokens, from a row of `num_tokens` and a row twice as long.

    Row lengths are doubled, up to the longest row, while a row has at most `most_tokens` and is expected to take less
    than `most_gb`. The peak of short rows may come from parts that do not grow with the length: from 256 and 512
    tokens, 4,096 were estimated at 0.43 of the measured memory.
    """
    num_tokens = min(longest, max(num_tokens, SHORTEST.get(weights.device.type, 0)))
    rows, knee = [measure(learner, weights, num_tokens, parts)], knee_of(weights)
    while rows[-1].tokens < longest:
        length = second_length(rows[-1].tokens, longest)
        if len(rows) > 1:
            gigabytes = estimate(rows[-2], rows[-1], length, knee=knee).gigabytes
            if length > most_tokens or gigabytes is None or gigabytes > most_gb:
                return estimate(rows[-2], rows[-1], longest, knee=knee)
        rows.append(measure(learner, weights, length, parts))
    return rows[-1]


def estimate(short: Cost, long: Cost, num_tokens: int, *, knee: float) -> Cost:
    """Extrapolates the cost of a row of `num_tokens` from two measured rows.

    Time is linear in L * (1 + L / knee), where `knee` is the length at which attention costs the same as everything
    else. Memory is linear in L. Slopes are never negative, despite noise.
    """

    def work(length: int) -> float:
        return length * (1 + length / knee)

    def line(one: float, two: float, at: float, low: float, high: float) -> float:
        return high + max(0.0, high - low) * (at - two) / (two - one)

    seconds = line(work(short.tokens), work(long.tokens), work(num_tokens), short.seconds, long.seconds)
    gigabytes = None
    if short.gigabytes is not None and long.gigabytes is not None:
        gigabytes = line(short.tokens, long.tokens, num_tokens, short.gigabytes, long.gigabytes)
    return Cost(num_tokens, seconds, gigabytes)


def knee_of(weights: Weights) -> float:
    """Returns the length at which attention costs the same as the matrix products: P / (2 hidden layers)."""
    config = weights.model.config.get_text_config()
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    return count_parameters(weights.model).whole / (2 * width * layers) if width and layers else float("inf")
