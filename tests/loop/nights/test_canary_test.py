"""CanaryTest: its error rate, its caps, and what it does not depend on."""

import random
from statistics import fmean

import pytest

from art_cli.loop.nights.canary_test import CanaryTest, Rating


def verdicts(promoted: float, candidate: float, *, share: float, num: int = 60, rates: float = 1.0) -> list[str]:
    """The verdicts of `num` canaries of 2,000 conversations. `rates`: how often the candidate's users rate."""
    found = []
    for seed in range(num):
        draw, test = random.Random(seed), CanaryTest(share=share, error=0.05)
        for _ in range(2000):
            is_candidate = draw.random() < share
            value = float(draw.random() < (candidate if is_candidate else promoted))
            if test.verdict == "open" and (not is_candidate or draw.random() < rates):
                test.add(Rating(is_candidate, value, "key 1"))
        found.append(test.verdict)
    return found


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_without_a_difference_few_canaries_decide_and_large_ones_are_found(share: float) -> None:
    """Ville's bound is 0.05 for each verdict; 60 canaries exceed 0.15 with a probability below 0.001."""
    same = verdicts(0.6, 0.6, share=share)
    assert fmean(each == "better" for each in same) <= 0.15 and fmean(each == "worse" for each in same) <= 0.15
    assert fmean(each == "better" for each in verdicts(0.4, 0.8, share=share)) >= 0.95
    assert fmean(each == "worse" for each in verdicts(0.8, 0.4, share=share)) >= 0.95


def test_users_who_rate_the_candidate_less_often_do_not_change_the_error() -> None:
    rare = verdicts(0.7, 0.7, share=0.5, rates=0.2)
    assert fmean(each == "better" for each in rare) <= 0.15 and fmean(each == "worse" for each in rare) <= 0.15


def test_a_drift_of_all_ratings_is_no_difference_of_the_policies() -> None:
    """Ratings rise from 0.2 to 0.8, and the candidate's users rate half as often, so its ratings are never ahead."""
    found = []
    for seed in range(40):
        draw, test = random.Random(seed), CanaryTest(share=0.5, error=0.05)
        for number in range(1500):
            is_candidate = draw.random() < 0.5
            value = float(draw.random() < 0.2 + 0.6 * number / 1500)
            if not is_candidate or draw.random() < 0.5:
                test.add_all([Rating(is_candidate, value, "key 1")])
        found.append(test.verdict)
    assert fmean(each == "better" for each in found) <= 0.15 and fmean(each == "worse" for each in found) <= 0.15


def test_a_client_counts_for_its_share_only() -> None:
    """One client sends half of all ratings, against the candidate. Forty others find it better."""
    draw = random.Random(0)
    capped, open_to_all = (CanaryTest(share=0.5, error=0.05, client_share=share) for share in (0.1, 1.0))
    for number in range(3000):
        is_candidate, is_abusive = draw.random() < 0.5, number % 2 == 0
        value = float(not is_candidate) if is_abusive else float(draw.random() < (0.8 if is_candidate else 0.5))
        rating = Rating(is_candidate, value, "abuser" if is_abusive else f"key {number % 80}")
        for test in (capped, open_to_all):
            test.add_all([rating])
    assert (capped.verdict, open_to_all.verdict) == ("better", "worse")
    assert capped.num_capped > 0 and open_to_all.num_capped == 0


def test_a_single_client_is_not_capped_and_its_users_are() -> None:
    test = CanaryTest(share=0.5, error=0.05, client_share=0.1)
    for number in range(200):
        test.add(Rating(number % 2 == 0, 1.0, "key 1"))
    assert (test.num, test.num_capped) == (200, 0)
    for number in range(200):
        test.add(Rating(number % 2 == 0, 1.0, "key 1", "loud" if number % 4 else f"user {number}"))
    assert test.num_capped > 50


def test_a_margin_accepts_what_is_nearly_as_good() -> None:
    draw = random.Random(1)
    ratings = [Rating(number % 2 == 0, float(draw.random() < 0.6), "key 1") for number in range(4000)]
    strict, lenient = CanaryTest(share=0.5, error=0.05), CanaryTest(share=0.5, error=0.05, margin=0.15)
    for test in (strict, lenient):
        test.add_all(ratings)
    assert (strict.verdict, lenient.verdict) == ("open", "better")
