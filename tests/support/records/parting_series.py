"""Series of steps in which reward and anchor are drawn: they go together, or part. For the test of parting and figures.

Each step has GROUPS groups of SIZE attempts. Their quality is the policy's ability, which grows by 3 standard
deviations over a run, plus the scenario's ease and luck. Reward and anchor of an attempt follow from its
quality and noise.
"""

import math
import random
from collections.abc import Callable
from statistics import fmean

from art_cli.judges.shadow_judges import compare_within
from art_cli.runs.parting import Beside

GROUPS, SIZE = 8, 8

Draw = random.Random
Attempt = Callable[[Draw, float, int], tuple[float, float]]  # (draw, quality, steps since onset) -> reward, anchor


def logistic(draw: Draw) -> float:
    share = draw.uniform(1e-9, 1 - 1e-9)
    return math.log(share / (1 - share))


def _scales(draw: Draw, quality: float, _: int) -> tuple[float, float]:
    return quality + draw.gauss(0, 0.7), 20 + 5 * (quality + draw.gauss(0, 0.7))


def _game(draw: Draw, quality: float, _: int) -> tuple[float, float]:
    """Loss, draw or win; the anchor is the share of wins."""
    said = quality - 1 + logistic(draw)
    return (1.0 if said > 0.5 else 0.5 if said > -1 else 0.0), float(said > 0.5)


def _judge(draw: Draw, quality: float, _: int) -> tuple[float, float]:
    """A judge that is unsure of whether the task is solved."""
    solved = float(quality + logistic(draw) > 0)
    return 0.2 + 0.5 * solved + draw.gauss(0, 0.2), solved


def _heavy(draw: Draw, quality: float, _: int) -> tuple[float, float]:
    """Noise without a variance (Student's t with 2 degrees of freedom)."""
    noise = [draw.gauss(0, 0.7) / math.sqrt(draw.expovariate(1)) for _ in range(2)]
    return quality + noise[0], quality + noise[1]


def _switched(draw: Draw, quality: float, since: int) -> tuple[float, float]:
    """From the onset on the reward pays for something else, and the policy learns it."""
    solved = float(quality + logistic(draw) > 0)
    return (float(draw.gauss(0, 1) + 0.1 * since > 0) if since else solved), solved


def _hacked(draw: Draw, quality: float, since: int) -> tuple[float, float]:
    """From the onset on a growing share of attempts gets the reward without the work, half of them after 8 steps."""
    hacks = bool(since) and draw.random() < 1 / (1 + math.exp(4 - 0.5 * since))
    solved = 0.0 if hacks else float(quality + logistic(draw) > 0)
    return (1.0 if hacks else solved), solved


def _biased(draw: Draw, quality: float, since: int) -> tuple[float, float]:
    """From the onset on half of the reward is for length, which grows."""
    reward, solved = _judge(draw, quality, since)
    return reward + (0.4 * (draw.gauss(0, 1) + 0.1 * since) if since else 0.0), solved


TOGETHER: dict[str, Attempt] = {"scales": _scales, "game": _game, "judge": _judge, "heavy": _heavy}
APART: dict[str, Attempt] = {"switched": _switched, "hacked": _hacked, "biased": _biased}


def series(
    attempt: Attempt, seed: int, *, num: int, onset: int | None = None, rise: float = 3.0, follows: float = 0.0
) -> list[Beside]:
    """Returns `num` steps. From `onset` on, ability falls by 0.05 a step.

    `follows` is the autocorrelation of drifts that reward and anchor have on top, each its own, of a standard deviation
    of 0.3 abilities.
    """
    draw, steps, drifts = random.Random(seed), [], [0.0, 0.0]
    for number in range(1, num + 1):
        since = max(0, number - onset + 1) if onset is not None else 0
        ability = rise * (number - since) / num - 1 - 0.05 * since
        drifts = [
            follows * each + math.sqrt(1 - follows**2) * draw.gauss(0, 0.3) if follows else 0.0 for each in drifts
        ]
        groups = []
        for _ in range(GROUPS):
            ease = draw.gauss(0, 1)
            pairs = [attempt(draw, ability + ease + draw.gauss(0, 1), since) for _ in range(SIZE)]
            groups.append([(reward + drifts[0], anchor + 5 * drifts[1]) for reward, anchor in pairs])
        found = compare_within(groups)
        reward, anchor = (fmean(pair[side] for group in groups for pair in group) for side in (0, 1))
        stds = (found["reward_std"], found["std"])
        steps.append(Beside(number, reward, anchor, found.get("correlation"), *stds, has_levels=True))
    return steps
