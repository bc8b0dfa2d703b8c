"""`art label`: labels to plus or minus 5 points, pairs chosen against pairs drawn at random, on simulated judges.

    python -m benchmarks.judges.label                    # 300 simulated files for each judge
    python -m benchmarks.judges.label --files 50 --only steep flat

A file has 100 groups of 8 attempts, 2,800 pairs. Each attempt has a quality and a length; a person says which of two is
better by the quality, or that they are equal where it is close. Both sides go on until the interval's half-width is at
most 5 points, and both have the same interval: Wilson's, for a file of that size. `floor` is the least that any choice
by the same strata can come to, with all variances known beforehand: (sum_h W_h s_h)^2 / s^2.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from art_cli.judges.pair_choice import Floats, Strata, credit

GROUPS, SIZE = 100, 8
JUDGES = {
    "steep": "errs by 0.3 of the spread of qualities",
    "graded": "errs by 0.5",
    "coarse": "errs by 0.5, scores in tenths, the person finds 8 % equal",
    "verdict": "0 or 1, errs by 0.4, the person finds 8 % equal",
    "length": "errs by 0.3, likes length as much as 0.7 of quality",
    "lapses": "errs by 0.3, but scores one attempt of ten at random",
    "flat": "wrong on one pair of five, whatever the margin",
}


class SimulatedFile(NamedTuple):
    """The pairs of a file, [P] each."""

    differences: Floats  # of the judge's scores, left minus right
    longer: np.typing.NDArray[np.bool_]  # whether the left attempt is the longer one
    credits: Floats


class Reached(NamedTuple):
    num: int  # labels
    error: float  # of the accuracy
    is_covered: bool  # whether the interval holds the accuracy over all pairs


def simulate(judge: str, draw: np.random.Generator) -> SimulatedFile:
    quality, length, noise = draw.normal(size=(3, GROUPS, SIZE))
    error = {"steep": 0.3, "graded": 0.5, "coarse": 0.5, "verdict": 0.4, "length": 0.3, "lapses": 0.3}.get(judge, 0.0)
    scores = quality + error * noise
    if judge == "coarse":
        scores = np.round(np.clip(0.5 + 0.2 * scores, 0, 1), 1)
    elif judge == "verdict":
        scores = (scores > 0).astype(float)
    elif judge == "length":
        scores = scores + 0.7 * length
    elif judge == "lapses":
        scores = np.where(draw.random(scores.shape) < 0.1, draw.normal(size=scores.shape), scores)
    one, other = np.triu_indices(SIZE, 1)
    differences, better, longer = ((each[:, one] - each[:, other]).ravel() for each in (scores, quality, length))
    if judge == "flat":
        differences = np.where(draw.random(differences.shape) < 0.2, -differences, differences)
    verdicts = np.where(np.abs(better) < (0.15 if judge in ("coarse", "verdict") else 0.0), 0, np.sign(better))
    credits = [credit(float(each), int(said)) for each, said in zip(differences, verdicts, strict=True)]
    return SimulatedFile(differences, longer > 0, np.array(credits))


def strata_of(file: SimulatedFile, *, is_chosen: bool) -> Strata:
    """Returns the strata of `art label`, or one of all pairs, from which every choice is by chance."""
    if is_chosen:
        return Strata(np.abs(file.differences), file.longer == (file.differences > 0))
    return Strata(np.ones(len(file.credits)), np.zeros(len(file.credits), bool))


def label(file: SimulatedFile, strata: Strata, draw: np.random.Generator) -> Reached:
    """Labels pairs until it is enough."""
    queues = [draw.permutation(np.flatnonzero(strata.of == stratum)) for stratum in range(len(strata.sizes))]
    while strata.num_needed():
        stratum = strata.choose(strata.sizes - strata.nums)
        assert stratum is not None
        value = float(file.credits[queues[stratum][int(strata.nums[stratum])]])
        strata.add(stratum, value, float(value == 0.5))
    found, truth = strata.accuracy(), float(file.credits.mean())
    return Reached(int(strata.nums.sum()), found.value - truth, found.low <= truth <= found.high)


def floor(file: SimulatedFile) -> float:
    strata = strata_of(file, is_chosen=True)
    deviations = [file.credits[strata.of == stratum].std() for stratum in range(len(strata.sizes))]
    return float((strata.shares @ np.array(deviations)) ** 2 / file.credits.var())


def row(judge: str, num_files: int) -> str:
    found: dict[bool, list[Reached]] = {True: [], False: []}
    accuracies, floors = [], []
    for seed in range(num_files):
        file = simulate(judge, np.random.default_rng(seed))
        accuracies.append(file.credits.mean())
        floors.append(floor(file))
        for is_chosen, reached in found.items():
            reached.append(label(file, strata_of(file, is_chosen=is_chosen), np.random.default_rng(seed + 10**6)))
    chosen, drawn = (np.mean([each.num for each in found[side]]) for side in (True, False))
    covered = [np.mean([each.is_covered for each in found[side]]) for side in (True, False)]
    bias = np.mean([each.error for each in found[True]])
    return (
        f"| {judge}: {JUDGES[judge]} | {np.mean(accuracies):.2f} | {drawn:.0f} | {chosen:.0f} | {chosen / drawn:.2f} "
        f"| {np.mean(floors):.2f} | {covered[1]:.3f} | {covered[0]:.3f} | {bias:+.3f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--files", type=int, default=300)
    options = parser.parse_args(arguments)
    print("| judge | accuracy | labels at random | chosen | ratio | floor | covered at random | chosen | bias |")
    print("|---|---|---|---|---|---|---|---|---|")
    for judge in options.only:
        print(row(judge, options.files), flush=True)


if __name__ == "__main__":
    main()
