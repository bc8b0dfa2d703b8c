"""How often `art improve` promotes a candidate that is no better, and how soon it promotes one that is.

    python -m benchmarks.learning.canary [--repeats 200] [--requests 20000]

Gate and canary alone, on replayed outcomes. The gate plays 64 scenarios with both policies. Attempts succeed with their
scenario's probability (0.05 to 0.95, mean 0.6), and with the gain more for the candidate. Then requests come from 30
clients, a few of them busy (Zipf), and the candidate answers the canary's share. A request in three is rated, on
average 200 requests late. A tenth of the ratings is forged by four clients: tossed coins, or always bad. The error is
0.05. A request is a conversation. A canary that is behind ends undecided, as in `art improve`.
"""

import argparse
import heapq
import random
from collections.abc import Iterator
from statistics import fmean, median
from typing import NamedTuple

from art_cli.config.sections.improve_config import ImproveConfig
from art_cli.loop.evaluate import check_policy, parse_gate
from art_cli.loop.nights.canary_test import CanaryTest, Rating
from art_cli.runs.intervals import share_interval

NUM_SCENARIOS, NUM_CLIENTS, NUM_FORGERS = 64, 30, 4
RATED, FORGED, DELAY, ERROR = 0.33, 0.1, 200, 0.05
GAINS = (-0.3, -0.05, 0.0, 0.05, 0.1, 0.2)


class Ended(NamedTuple):
    verdict: str  # gate, better, worse, open
    num_requests: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--requests", type=int, default=20_000, help="after which a canary ends undecided")
    arguments = parser.parse_args()
    print(
        "| gain | share | passed the gate | promoted, of all | of those at the gate | rolled back | requests, median | "
        "until undecided, median |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for share in (0.2, 0.5):
        for gain in GAINS:
            ended = [night(gain, share, arguments.requests, seed) for seed in range(arguments.repeats)]
            print(_row(gain, share, ended))


def night(gain: float, share: float, num_requests: int, seed: int) -> Ended:
    draw = random.Random(f"{gain}/{share}/{seed}")
    chances = [min(max(draw.gauss(0.6, 0.3), 0.05), 0.95) for _ in range(NUM_SCENARIOS)]
    if not passes_gate(chances, gain, draw):
        return Ended("gate", 0)
    test = CanaryTest(share=share, error=ERROR, client_share=0.1)
    for number, rating in ratings(chances, gain, share, num_requests, draw):
        test.add(rating)
        if test.verdict != "open":
            return Ended(test.verdict, number)
        if test.is_behind(test.num / (num_requests * RATED)):
            return Ended("open", number)
    return Ended("open", num_requests)


def passes_gate(chances: list[float], gain: float, draw: random.Random) -> bool:
    values: dict[str, dict[str, dict[str, float]]] = {}
    for name, more in (("baseline", 0.0), ("candidate", gain)):
        rewards = {str(place): float(draw.random() < chance + more) for place, chance in enumerate(chances)}
        values[name] = {"reward": rewards, "failed": dict.fromkeys(rewards, 0.0)}
    gate = ImproveConfig.model_fields["gates"].default["traffic"]
    return check_policy(parse_gate(gate, [*values]), values, "candidate").error is None


def ratings(
    chances: list[float], gain: float, share: float, num_requests: int, draw: random.Random
) -> Iterator[tuple[int, Rating]]:
    """Yields (number of requests so far, rating) by arrival."""
    weights = [1 / (number + 1) for number in range(NUM_CLIENTS)]
    waiting: list[tuple[float, int, Rating]] = []
    for number in range(num_requests):
        is_candidate = draw.random() < share
        client = draw.choices(range(NUM_CLIENTS), weights)[0]
        if draw.random() < RATED:
            value = float(draw.random() < draw.choice(chances) + gain * is_candidate)
            if draw.random() < FORGED:
                client = NUM_CLIENTS + draw.randrange(NUM_FORGERS)
                value = float(draw.random() < 0.5) if client % 2 else 0.0
            at = number + draw.expovariate(1 / DELAY)
            heapq.heappush(waiting, (at, number, Rating(is_candidate, value, f"key {client}")))
        while waiting and waiting[0][0] <= number:
            yield number + 1, heapq.heappop(waiting)[2]


def _row(gain: float, share: float, ended: list[Ended]) -> str:
    tried = [each for each in ended if each.verdict != "gate"]
    promoted = [each for each in ended if each.verdict == "better"]
    decided = [each.num_requests for each in tried if each.verdict != "open"]
    of_all = fmean(each.verdict == "better" for each in ended)
    low, high = share_interval(of_all, len(ended))
    of_tried = f"{len(promoted) / len(tried):.3f}" if tried else "-"
    back = f"{fmean(each.verdict == 'worse' for each in tried):.3f}" if tried else "-"
    when = f"{median(decided):.0f} ({max(decided)} at most)" if decided else "-"
    undecided = [each.num_requests for each in tried if each.verdict == "open"]
    until = f"{median(undecided):.0f}" if undecided else "-"
    promoted_share = f"{of_all:.3f} [{low:.3f}, {high:.3f}]"
    passed = f"{len(tried) / len(ended):.2f}"
    return f"| {gain:+.2f} | {share} | {passed} | {promoted_share} | {of_tried} | {back} | {when} | {until} |"


if __name__ == "__main__":
    main()
