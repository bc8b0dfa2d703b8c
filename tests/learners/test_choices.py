"""Choices where papers and other trainers differ: the numbers of docs/algorithms.md, ours by the code, theirs by hand.

The batch is two attempts with rewards 1 and 0, of three and one tokens, or turns.
"""

import re
from statistics import fmean, stdev

import pytest
import torch

from art_cli.config.schema import GrpoConfig
from art_cli.learners.algorithms.gigpo import GigpoConfig
from art_cli.learners.algorithms.normalization import FinishedCounts, UpdateCounts
from art_cli.learners.algorithms.off_policy import SampledTerms, build_correction
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.algorithms.reinforce_plus_plus import ReinforcePlusPlusConfig
from art_cli.learners.samples import Credit
from tests.support.paths import ROOT
from tests.support.records.trees import scored, turn

LENGTHS, REWARDS = (3, 1), (1.0, 0.0)
TOKENS = [reward for reward, length in zip(REWARDS, LENGTHS, strict=True) for _ in range(length)]  # 1, 1, 1, 0


def written(choice: str) -> tuple[list[float], list[float]]:
    """(ours, the other's) as the row of the table has them."""
    text = (ROOT / "docs/algorithms.md").read_text()
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{choice}`: ")]
    ours, others = [cell.rpartition(":")[2].removesuffix(" a token ") for cell in row.split("|")[-3:-1]]
    return _numbers(ours), _numbers(others)


def _numbers(cell: str) -> list[float]:
    found = re.findall(r"(-?[0-9.]+)(?:/([0-9]+))?", cell)
    return [float(above) / float(below or 1) for above, below in found]


def whitened(values: list[float]) -> list[float]:
    """The first attempt's and the last one's value, minus the mean and divided by the deviation of all."""
    return [(value - fmean(values)) / stdev(values) for value in (values[0], values[-1])]


def is_written(choice: str, *, ours: list[float], others: list[float]) -> None:
    assert written(choice) == (pytest.approx(ours, abs=5e-3), pytest.approx(others, abs=5e-3))


def test_grpo_gives_each_token_of_the_step_the_same_share() -> None:
    """Four tokens: 1/4 each. Over each attempt first: 1/2 times 1/3, and 1/2 times 1."""
    counts = FinishedCounts(tokens=4, samples=2, trajectories=2)
    update = UpdateCounts(tokens=4, samples=2, trajectories=2, all=counts)
    algorithm = build_algorithm(GrpoConfig(), max_tokens=10)
    ours = [algorithm.share(length, update) for length in LENGTHS]
    is_written("grpo", ours=ours, others=[1 / (len(LENGTHS) * length) for length in LENGTHS])


def test_reinforce_plus_plus_normalizes_over_attempts() -> None:
    """1, 0: mean 1/2, deviation 1/sqrt 2. Over tokens 1, 1, 1, 0: mean 3/4, deviation 1/2."""
    attempts = [
        scored([turn([1], [5] * length)], reward, index=index)
        for index, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True))
    ]
    (ours,) = build_algorithm(ReinforcePlusPlusConfig(name="reinforce++"), max_tokens=10).credit_step([attempts])
    is_written("reinforce++", ours=[float(each) for each in ours], others=whitened(TOKENS))  # type: ignore[arg-type]


def test_gigpos_whole_attempts_are_compared_with_attempts() -> None:
    """Without its part of equal states. The authors' code repeats an attempt's reward for each of its steps."""
    attempts = []
    for index, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        turns = [turn([0], [5], state=f"{index}-0")]
        for number in range(1, length):
            turns.append(turn([0], [5], state=f"{index}-{number}", parent=number - 1, kept=2 * number))
        attempts.append(scored(turns, reward, index=index))
    loss = GigpoConfig(name="gigpo", step_weight=0.0)
    ours = []
    for credit in build_algorithm(loss, max_tokens=10).credit(attempts):
        assert isinstance(credit, Credit) and isinstance(credit.policy, list)
        ours.append(float(credit.policy[0][-1]))
    is_written("gigpo", ours=ours, others=whitened(TOKENS))


def test_a_sequence_mask_counts_no_token_more_than_twice() -> None:
    """Ratios 4 and 1/4, whose geometric mean of 1 is inside the bounds."""
    ratios = torch.tensor([4.0, 0.25])
    zeros = torch.zeros(2)
    terms = SampledTerms(ratios.log(), ratios.log(), zeros, torch.ones(2), torch.tensor([0, 0]))
    found = []
    for cap in ({}, {"cap": 1e9}):
        correction = build_correction(GrpoConfig(off_policy={"name": "sequence_mask", **cap}).off_policy)
        assert correction is not None
        found.append(correction(terms).tolist())
    assert found[1] == pytest.approx(ratios.tolist())
    is_written("sequence_mask", ours=found[0], others=ratios.tolist())
