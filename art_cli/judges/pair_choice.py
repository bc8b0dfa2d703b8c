"""The choice of pairs that a person is asked about, and what the answers say of the judge. Pure numbers, no files.

A pair is two attempts of one group. Its credit is 1 if the judge orders it as the person does, 0 if the other way
round, and one half if only one of the two finds a difference. The accuracy is the mean credit over all P pairs.

Pairs are in strata by their margin, the difference of the judge's scores, and by whether the judge prefers the longer
attempt. Judges err most where margins are small, and on the side of their taste for length. Within a stratum pairs are
drawn at random, so that the stratified mean has no bias by the choice (Neyman 1934):

    accuracy = sum_h W_h m_h        variance = sum_h W_h^2 v_h (1 - n_h / N_h) / n_h        n_h ~ W_h sqrt(v_h)

m_h is the mean credit of stratum h, drawn by PULL pseudo-labels toward a logistic curve in margin and side, so that a
few labels that are right by luck show no certainty. A part of the labels (FLOOR) is drawn by the strata's sizes alone.
The interval is Wilson's (1927) at the number of random labels that would have the same variance. The choice
follows the answers, and it ends at the first narrow interval; that adds less than a point (benchmarks/judges/label.py).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.runs.trajectory import EQUAL_REWARDS

Floats = npt.NDArray[np.float64]

NUM_BINS = 5  # bins of the margin on each side of 0
PILOT = 30  # labels that are drawn by size alone, before anything is known
FLOOR = 0.4  # share of the later labels that is drawn by size
PULL = 4.0  # pseudo-labels of the curve in each stratum
CAP = 0.98  # the most that the curve says; a judge may err now and then at any margin
Z = 1.96  # the normal distribution's 0.975 quantile: a 95 % interval
MAX_ROUNDS = 30  # limit for Newton's method, which takes 4 or 5
GOAL = 0.05  # half-width at which it is enough
_PRIOR, _RIDGE = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.1, 0.3, 0.3, 0.3])  # for the curve; 1.0 is 73 % right


class JudgeAccuracy(NamedTuple):
    """The judge's accuracy with its 95 % interval. Example: JudgeAccuracy(0.84, 0.79, 0.88)"""

    value: float
    low: float
    high: float


def credit(difference: float, verdict: int) -> float:
    """Returns the credit of a pair by its score difference, left minus right, and the person's verdict.

    The verdict is 1 if the left attempt is better, -1 if the right one is, and 0 if they are equal.
    """
    return 1 - abs((difference > EQUAL_REWARDS) - (difference < -EQUAL_REWARDS) - verdict) / 2


class Strata:
    """The strata of P pairs, and what is known of each. `of` [P] is the stratum of a pair, the first is 0."""

    def __init__(self, margins: Floats, prefers_longer: npt.NDArray[np.bool_]) -> None:
        """Both are [P]. Pairs with equal scores are a stratum of their own, wherever length stands."""
        untied = margins > EQUAL_REWARDS
        cuts = np.linspace(0, 1, NUM_BINS + 1)[1:-1]
        edges: Floats = np.unique(np.quantile(margins[untied], cuts)) if untied.any() else np.zeros(0)
        bins = np.where(untied, 1 + np.searchsorted(edges, margins, side="right"), 0)
        codes = np.where(untied, 2 * bins + prefers_longer, 0)
        known, self.of, sizes = np.unique(codes, return_inverse=True, return_counts=True)
        self.sizes = sizes.astype(np.float64)  # [H]
        self.shares = self.sizes / max(len(margins), 1)  # [H]
        self._is_tied = known == 0
        x, side = known // 2 / max(len(edges) + 1, 1) * 2 - 1, np.where(known % 2, 1.0, -1.0)
        self._curve = np.stack([np.ones(len(known)), x, side, side * x], axis=1)  # [H, 4]
        self.count([])

    def count(self, credits: Iterable[tuple[int, float]]) -> None:
        """Forgets the labels, and takes these: (stratum, credit)."""
        self.nums, self._totals, self._halves = (np.zeros(len(self.sizes)) for _ in range(3))
        for stratum, value in credits:
            self.add(stratum, value, float(value == 0.5))

    def add(self, stratum: int, value: float, half: float) -> None:
        self.nums[stratum] += 1
        self._totals[stratum] += value
        self._halves[stratum] += half

    def choose(self, num_left: Floats) -> int | None:
        """Returns the stratum to ask about next, or None if no pair is left. `num_left` [H] can still be asked."""
        is_open = num_left > 0
        if not is_open.any():
            return None
        num, wanted = self.nums.sum(), self.shares
        if num >= PILOT:
            parts = self.shares * np.sqrt(self._variances(self._expected()))
            wanted = FLOOR * self.shares + (1 - FLOOR) * parts / parts.sum()
        return int(np.argmax(np.where(is_open, wanted * (num + 1) - self.nums, -np.inf)))

    def accuracy(self) -> JudgeAccuracy:
        means = self._means()
        value = float(self.shares @ means)
        left = self._variances(means) * (1 - self.nums / self.sizes) / np.maximum(self.nums, 1)
        variance = float(self.shares**2 @ left)
        if variance <= 0:  # every pair has its label
            return JudgeAccuracy(value, value, value)
        z2_n = Z**2 * variance / max(value * (1 - value), 1e-12)  # z^2 / n, n the number of labels of that variance
        middle, spread = value + z2_n / 2, math.sqrt(value * (1 - value) * z2_n + z2_n**2 / 4)
        return JudgeAccuracy(value, max(0.0, (middle - spread) / (1 + z2_n)), min(1.0, (middle + spread) / (1 + z2_n)))

    def num_needed(self) -> int:
        """Returns how many labels more it takes to reach GOAL, about: the width goes with the root of their number.

        The first PILOT labels, or all where there are fewer pairs, are always needed.
        """
        found, num = self.accuracy(), int(self.nums.sum())
        half = (found.high - found.low) / 2
        needed = 0 if half <= GOAL else math.ceil(num * ((half / GOAL) ** 2 - 1))
        return min(int(self.sizes.sum()) - num, max(PILOT - num, needed))

    def _means(self) -> Floats:
        """Returns [H] the mean credits. Once all pairs of a stratum are labelled, the curve has no part in its mean."""
        pull = PULL * (1 - self.nums / self.sizes)
        return (self._totals + pull * self._expected()) / (self.nums + pull)

    def _expected(self) -> Floats:
        """Returns [H] the mean credits by the curve: logistic regression with a ridge, by Newton's method.

        Where scores are equal a credit is 1/2 or 1, and the share of the ones is counted.
        """
        nums, totals = np.where(self._is_tied, 0, self.nums), np.where(self._is_tied, 0, self._totals)
        beta = _PRIOR
        for _ in range(MAX_ROUNDS):
            p = 1 / (1 + np.exp(-np.clip(self._curve @ beta, -30, 30)))
            slope = self._curve.T @ (totals - nums * p) - _RIDGE * (beta - _PRIOR)
            bend = (self._curve.T * (nums * p * (1 - p))) @ self._curve + np.diag(_RIDGE)
            step = np.clip(np.linalg.solve(bend, slope), -1, 1)
            beta = beta + step
            if np.abs(step).max() < 1e-4:
                break
        tied = (2 * self._totals - self.nums + 0.5) / (self.nums + 1)
        mixed: Floats = np.where(self._is_tied, 0.5 + 0.5 * tied, np.clip(p, 1 - CAP, CAP))
        return mixed

    def _variances(self, means: Floats) -> Floats:
        """Returns [H] the variance of one credit, (1 - m)(m - k / 4), with k halves for each credit that is lost."""
        lost = float((self.nums - self._totals)[~self._is_tied].sum())
        halves = float(self._halves[~self._is_tied].sum()) / (lost + 0.5)
        rest = np.where(self._is_tied, means - 0.5, np.maximum(means - halves / 4, means / 10))
        variances: Floats = (1 - means) * rest
        return variances
