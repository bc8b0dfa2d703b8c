"""Chooses attempt pairs for a person to label and estimates the judge's accuracy from the answers. Pure functions.

A pair is two attempts from the same group. The judge earns credit 1 for the person's order, 0 for the opposite order,
and one half if exactly one side sees a tie. The accuracy is the mean credit over all P pairs.

Pairs are stratified by margin (the difference between the judge's scores) and by whether the judge prefers the longer
attempt. Judges err most at small margins and when they favor length. Pairs are drawn at random within a stratum, so the
stratified mean is unbiased (Neyman 1934):

    accuracy = sum_h W_h m_h        variance = sum_h W_h^2 v_h (1 - n_h / N_h) / n_h        n_h ~ W_h sqrt(v_h)

m_h is the mean credit in stratum h, shrunk with PULL pseudo-labels toward a logistic curve in margin and side. The
shrinkage prevents false certainty after a few lucky labels. A share FLOOR of the labels is allocated by stratum size
alone. The interval is Wilson's (1927) with the effective sample size of simple random sampling. Adaptive allocation and
stopping at the first narrow interval add less than one point of bias (benchmarks/judges/label.py).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from art_cli.runs.trajectory import EQUAL_REWARDS

Floats = npt.NDArray[np.float64]

NUM_BINS = 5  # margin bins per side
PILOT = 30  # first labels, allocated by stratum size
FLOOR = 0.4  # share of later labels allocated by stratum size
PULL = 4.0  # pseudo-labels per stratum from the curve
CAP = 0.98  # upper limit for the curve; judges err occasionally at any margin
Z = 1.96  # 0.975 quantile of the normal distribution, for 95 % intervals
MAX_ROUNDS = 30  # limit for Newton's method; usually 4 or 5
GOAL = 0.05  # target half-width of the interval
# Prior mean and precision of the curve's coefficients; an intercept of 1.0 means 73 % accuracy.
_PRIOR, _RIDGE = np.array([1.0, 0.0, 0.0, 0.0]), np.array([0.1, 0.3, 0.3, 0.3])


class JudgeAccuracy(NamedTuple):
    """The judge's accuracy with a 95 % interval. Example: JudgeAccuracy(0.84, 0.79, 0.88)"""

    value: float
    low: float
    high: float


def credit(difference: float, verdict: int) -> float:
    """Returns the judge's credit for a pair from the score difference (left minus right) and the person's verdict.

    The verdict is 1 if the left attempt is better, -1 if the right attempt is better, and 0 for a tie.
    """
    return 1 - abs((difference > EQUAL_REWARDS) - (difference < -EQUAL_REWARDS) - verdict) / 2


class Strata:
    """The strata of P pairs and their labels. `of` [P] has the stratum index of each pair, starting from 0."""

    def __init__(self, margins: Floats, prefers_longer: npt.NDArray[np.bool_]) -> None:
        """Both arguments are [P]. Pairs with tied scores form a separate stratum regardless of length."""
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
        """Replaces all labels with these (stratum, credit) pairs."""
        self.nums, self._totals, self._halves = (np.zeros(len(self.sizes)) for _ in range(3))
        for stratum, value in credits:
            self.add(stratum, value, float(value == 0.5))

    def add(self, stratum: int, value: float, half: float) -> None:
        self.nums[stratum] += 1
        self._totals[stratum] += value
        self._halves[stratum] += half

    def choose(self, num_left: Floats) -> int | None:
        """Returns the stratum for the next question; None when no pairs remain. `num_left` [H] counts unasked pairs."""
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
        if variance <= 0:  # every pair is labeled
            return JudgeAccuracy(value, value, value)
        z2_n = Z**2 * variance / max(value * (1 - value), 1e-12)  # z^2 / n with effective sample size n
        middle, spread = value + z2_n / 2, math.sqrt(value * (1 - value) * z2_n + z2_n**2 / 4)
        return JudgeAccuracy(value, max(0.0, (middle - spread) / (1 + z2_n)), min(1.0, (middle + spread) / (1 + z2_n)))

    def num_needed(self) -> int:
        """Returns roughly how many more labels are needed to reach GOAL; the width shrinks with the square root of
        their number.

        The first PILOT labels (or all pairs, if fewer) are always required.
        """
        found, num = self.accuracy(), int(self.nums.sum())
        half = (found.high - found.low) / 2
        needed = 0 if half <= GOAL else math.ceil(num * ((half / GOAL) ** 2 - 1))
        return min(int(self.sizes.sum()) - num, max(PILOT - num, needed))

    def _means(self) -> Floats:
        """Returns [H] mean credits. The curve has no influence on fully labeled strata."""
        pull = PULL * (1 - self.nums / self.sizes)
        return (self._totals + pull * self._expected()) / (self.nums + pull)

    def _expected(self) -> Floats:
        """Returns [H] mean credits predicted by the curve: ridge logistic regression, fitted with Newton's method.

        In tied strata the credit is 1/2 or 1, and the share of ones is used instead.
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
        """Returns [H] the variance (1 - m)(m - k / 4) of a single credit, with k half credits per lost credit."""
        lost = float((self.nums - self._totals)[~self._is_tied].sum())
        halves = float(self._halves[~self._is_tied].sum()) / (lost + 0.5)
        rest = np.where(self._is_tied, means - 0.5, np.maximum(means - halves / 4, means / 10))
        variances: Floats = (1 - means) * rest
        return variances
