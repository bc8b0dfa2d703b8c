"""Effect of judge errors on advantages, compared with enumeration and over simulated steps."""

import math
from itertools import product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from numpy.random import Generator, default_rng

from art_cli.config.schema import DrGrpoConfig, GrpoConfig, NoiseConfig
from art_cli.judges import Judge, Verdict
from art_cli.judges.judge_groups import reward_noise
from art_cli.judges.reliability import (
    GRID,
    VerdictCounts,
    corrected_mean,
    error_variance,
    factor_of_verdicts,
    reliabilities,
    reliability_numbers,
    share_of_scores,
    share_of_verdicts,
    success_rates,
    with_reliability,
)
from art_cli.learners.algorithms.credit import advantages
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.learners.step.step_samples import StepSamples, make_step_samples
from art_cli.runs.trajectory import RewardNoise, ScoredTrajectory, by_group
from art_cli.runtime.errors import JudgeError
from tests.support.records.trees import scored, turn

Floats = npt.NDArray[np.float64]
FLIPS = RewardNoise(false_positive=0.2, false_negative=0.3)


SCALED = GrpoConfig(scale_advantages=True)


def group_of(*rewards: float, known: RewardNoise | None = FLIPS, group: str = "g") -> list[ScoredTrajectory]:
    found = [
        scored([turn([1, 2], [3 + index])], reward, index=index, group=group) for index, reward in enumerate(rewards)
    ]
    for each in found:
        each.noise = known
    return found


def batch_of(groups: list[list[ScoredTrajectory]], loss: GrpoConfig | DrGrpoConfig | None = None) -> StepSamples:
    return make_step_samples(with_reliability(groups), build_algorithm(loss or SCALED, max_tokens=10))


# --- flip rates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_groups_factor_gives_the_mean_of_the_true_advantages_given_its_verdicts(is_scaled: bool) -> None:
    """Verdicts 1, 1, 0, 0 and 1, 0, 0, 0: the sum over all 16 truths and all success rates, each as probable as it is.

    P(truth, verdicts | p) = prod p^t (1 - p)^(1 - t) P(r | t).
    """
    prior = success_rates([VerdictCounts(k, 4, 0.2, 0.3) for k in (0, 1, 1, 2, 4)])
    says = {(0, 0): 0.8, (0, 1): 0.2, (1, 0): 0.3, (1, 1): 0.7}  # (truth, verdict) -> probability
    for verdicts in ([1, 1, 0, 0], [1, 0, 0, 0]):
        total, expected = 0.0, np.zeros(4)
        for truth in product((0, 1), repeat=4):
            flips = math.prod(says[t, r] for t, r in zip(truth, verdicts, strict=True))
            weight = flips * float(prior @ (GRID ** sum(truth) * (1 - GRID) ** (4 - sum(truth))))
            total += weight
            expected += weight * np.array(advantages([float(t) for t in truth], scale=is_scaled))
        counts = VerdictCounts(sum(verdicts), 4, 0.2, 0.3)
        factor = factor_of_verdicts(counts, prior) if is_scaled else share_of_verdicts(counts, prior)
        ours = factor * np.array(advantages([float(r) for r in verdicts], scale=is_scaled))
        assert ours == pytest.approx(expected / total, abs=1e-12)


def test_the_corrected_mean_is_unbiased() -> None:
    """Truth 1, 0, 0: the mean over all 8 verdicts, each as probable as its flips are, is 1/3."""
    says = {(0, 0): 0.8, (0, 1): 0.2, (1, 0): 0.3, (1, 1): 0.7}
    truth, mean = (1, 0, 0), 0.0
    for verdicts in product((0, 1), repeat=3):
        flips = math.prod(says[t, r] for t, r in zip(truth, verdicts, strict=True))
        mean += flips * corrected_mean([group_of(*map(float, verdicts))])
    assert mean == pytest.approx(1 / 3)


class Simulated(NamedTuple):
    """Advantages over many steps: true, from flipped verdicts, and corrected."""

    true: Floats
    plain: Floats
    corrected: Floats


def simulate(draw: Generator, alpha: float, beta: float, *, is_scaled: bool) -> Simulated:
    """40 steps of 32 groups of 8, with success rates from Beta(alpha, beta) and 20 % of the verdicts flipped."""
    found: list[Floats] = []
    for _ in range(40):
        truth = draw.random((32, 8)) < draw.beta(alpha, beta, 32)[:, None]
        verdicts = truth ^ (draw.random(truth.shape) < 0.2)
        counts = [VerdictCounts(int(row.sum()), 8, 0.2, 0.2) for row in verdicts]
        prior = success_rates(counts)
        estimate = factor_of_verdicts if is_scaled else share_of_verdicts
        factors = {each: estimate(each, prior) if 0 < each.num_positive < 8 else 0.0 for each in counts}
        true, plain = (
            np.array([advantages(row, scale=is_scaled) for row in rows.astype(float).tolist()])
            for rows in (truth, verdicts)
        )
        found.append(np.stack([true, plain, plain * np.array([factors[each] for each in counts])[:, None]]))
    true, plain, corrected = np.concatenate(found, axis=1)
    return Simulated(true, plain, corrected)


@pytest.mark.slow
@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize(("alpha", "beta", "bound"), [(1.0, 1.0, 0.75), (20.0, 1.0, 0.4), (0.3, 0.3, 0.6)])
def test_corrected_advantages_are_nearer_to_the_true_ones(
    alpha: float, beta: float, bound: float, is_scaled: bool
) -> None:
    """The mean squared error against true advantages shrinks at least by the factor `bound`, compared with flipped
    verdicts.

    And a corrected advantage is on average right: E[A | corrected] = corrected, so the slope of the true advantages on
    the corrected ones is 1, or a little less, because the success rates are estimated from 32 groups. Uncorrected
    advantages stay below 0.65, because differences shrink by 1 - 2 * 0.2.
    """
    true, plain, corrected = simulate(default_rng(0), alpha, beta, is_scaled=is_scaled)
    assert ((corrected - true) ** 2).mean() < bound * ((plain - true) ** 2).mean()
    assert (true * corrected).sum() / (corrected**2).sum() == pytest.approx(0.9, abs=0.2)
    assert (true * plain).sum() / (plain**2).sum() < 0.65


def test_a_judge_without_errors_changes_nothing() -> None:
    exact = RewardNoise(false_positive=0.0, false_negative=0.0)
    [found] = reliabilities([group_of(1.0, 0.0, 0.0, known=exact)])
    assert found is not None and (found.share, found.scaled) == pytest.approx((1.0, 1.0)) and not found.is_left_out
    assert corrected_mean([group_of(1.0, 0.0, 0.0, known=exact)]) == pytest.approx(1 / 3)


def test_a_lone_success_counts_less_in_a_step_of_failures() -> None:
    """One 1 of eight among groups that have one or two, as flips alone would give, and among groups of all kinds."""
    lone, flips = VerdictCounts(1, 8, 0.2, 0.2), [VerdictCounts(k, 8, 0.2, 0.2) for k in (1, 2, 1, 2, 1)]
    mixed = [VerdictCounts(k, 8, 0.2, 0.2) for k in (1, 3, 5, 7, 4)]
    assert share_of_verdicts(lone, success_rates(flips)) < 0.5 * share_of_verdicts(lone, success_rates(mixed))


# --- votes ------------------------------------------------------------------------------------------------------------


def test_the_error_variance_of_votes_is_what_is_left_of_attempts_and_votes() -> None:
    """Votes (0, 1), (1, 2): every attempt got 1 more in the second, no error. (0, 1), (1, 0): residuals of 1/2, their
    squares' sum 1 over (2 - 1)(2 - 1), and half of it for a mean of two votes."""
    assert error_variance([[0.0, 1.0], [1.0, 2.0]]) == pytest.approx(0)
    assert error_variance([[0.0, 1.0], [1.0, 0.0]]) == pytest.approx(0.5)
    assert error_variance([[0.0, 1.0]]) is error_variance([[0.0], [1.0]]) is None


def test_reliability_is_the_intraclass_correlation_of_mean_scores() -> None:
    """1 - 1 / F of a two-way analysis of variance, F = V var(means) / residual variance."""
    draw = default_rng(1)
    votes = draw.normal(size=(6, 1)) + draw.normal(size=(6, 4)) + draw.normal(size=(1, 4))
    variance, means = error_variance(votes.tolist()), votes.mean(axis=1)
    residuals = votes - votes.mean(axis=0) - means[:, None] + votes.mean()
    f = 4 * means.var(ddof=1) / ((residuals**2).sum() / 15)
    assert variance is not None
    assert share_of_scores(means.tolist(), variance) == pytest.approx(max(0, 1 - 1 / f))


# --- in a step --------------------------------------------------------------------------------------------------------


def test_a_group_that_its_votes_do_not_tell_apart_is_left_out() -> None:
    """Scores 0, 1, 2 have s^2 = 1. Variance 0.25: share 0.75; variance 1: nothing is left."""
    sure, unsure = RewardNoise(variance=0.25), RewardNoise(variance=1.0)
    groups = [group_of(0.0, 1.0, 2.0, known=sure, group="a"), group_of(0.0, 1.0, 2.0, known=unsure, group="b")]
    batch = batch_of(groups)
    assert [sample.trajectory_id for group in batch.groups for sample in group] == ["a/0", "a/1", "a/2"]
    assert batch.num_with_signal == 1
    assert reliability_numbers(with_reliability(groups)) == {"reliability": 0.375, "num_unreliable": 1}
    assert batch.groups[0][2].advantages.tolist() == pytest.approx([math.sqrt(0.75)])  # (2 - 1) / 1, by sqrt(0.75)
    assert batch_of(groups, DrGrpoConfig(name="dr_grpo")).groups[0][2].advantages.tolist() == pytest.approx([0.75])
    bound = RewardNoise(variance=0.25, min_reliability=0.8)
    assert not batch_of([group_of(0.0, 1.0, 2.0, known=bound)]).groups


def test_without_known_noise_a_step_is_what_it_was() -> None:
    groups = [group_of(0.0, 1.0, known=None)]
    assert with_reliability(groups) == groups and reliability_numbers(groups) == {}
    batch = batch_of(groups)
    assert batch.groups[0][1].advantages.tolist() == pytest.approx([0.5**0.5])


def test_the_groups_of_an_older_file_give_the_advantages_and_metrics_that_they_gave() -> None:
    """scored_step.json: lines of a step, and the numbers of a version whose learner computed the factors itself.

    Three groups with flip rates and a signal (one excluded), a group without a signal, two groups with votes (one
    excluded), and a group with unknown errors. An attempt failed.
    """
    stored = msgspec.json.decode((Path(__file__).parent / "scored_step.json").read_bytes())
    lines = [msgspec.convert(line, ScoredTrajectory) for line in stored["lines"]]
    groups = with_reliability(list(by_group(lines).values()))
    for loss in (SCALED, DrGrpoConfig(name="dr_grpo")):
        samples = [sample for group in batch_of(groups, loss).groups for sample in group]
        advantages = {each.trajectory_id: each.advantages.item() for each in samples}
        assert advantages == pytest.approx(stored["advantages"][loss.name], rel=1e-12)
    assert reliability_numbers(groups) == pytest.approx(stored["numbers"], rel=1e-12)


def test_no_file_has_the_reliability_of_a_step() -> None:
    """Reliability depends on the other groups in the step, so scored lines do not store it."""
    [[first, *_]] = groups = [group_of(1.0, 0.0)]
    assert "reliability" not in msgspec.to_builtins(first)
    assert with_reliability(groups)[0][0].reliability is not msgspec.UNSET and first.reliability is msgspec.UNSET


def test_a_learner_refuses_groups_with_known_errors_and_without_their_reliability() -> None:
    with pytest.raises(AssertionError, match="with_reliability"):
        make_step_samples([group_of(1.0, 0.0)], build_algorithm(GrpoConfig(), max_tokens=10))


def test_a_judge_writes_what_it_knows_into_the_scored_group() -> None:
    """Flip rates are of rewards 0 and 1, and the failed attempt has none."""
    judge = Judge()
    verdicts = {"g/0": Verdict(reward=1.0, variance=0.1), "g/1": Verdict(reward=0.0, variance=0.3)}
    judge.noise = NoiseConfig(false_positive=0.2, false_negative=0.3)
    assert reward_noise(judge, verdicts) == FLIPS
    judge.noise = NoiseConfig(min_reliability=0.5)
    assert reward_noise(judge, verdicts) == RewardNoise(variance=0.2, min_reliability=0.5)
    judge.noise = None
    assert reward_noise(judge, verdicts) is None


def test_rewards_that_flip_rates_do_not_fit_are_not_scored() -> None:
    judge, verdicts = Judge(), {"g/0": Verdict(reward=0.5), "g/1": Verdict(reward=0.0)}
    for config, told in (({"false_positive": 0.1, "false_negative": 0.1}, "0 and 1"), ({}, "no variance")):
        judge.noise = NoiseConfig(**config)
        with pytest.raises(JudgeError, match=told):
            reward_noise(judge, verdicts)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"false_positive": 0.2},
        {"false_positive": 0.5, "false_negative": 0.5},
        {"false_positive": -0.1, "false_negative": 0.1},
        {"false_positive": math.nan, "false_negative": 0.1},
        {"variance": -1.0},
        {"variance": math.inf},
        {"variance": 1.0, "false_positive": 0.1, "false_negative": 0.1},
        {"variance": 1.0, "min_reliability": 1.5},
    ],
)
def test_noise_that_no_judge_can_have_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="flip rates|noise is|min_reliability"):
        RewardNoise(**fields)
