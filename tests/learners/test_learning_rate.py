"""The rule behind `train.learning_rate: auto`, as properties; benchmarks/learning/rates.py measures its worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.schema import LoraConfig
from art_cli.learners.learning_rate import ADAPTER_RATE, MAX_RATE, RATE, WIDTH, choose_rate

widths = st.integers(1, 2**17)


def test_the_model_it_was_measured_on_has_the_rates_that_were_measured() -> None:
    assert choose_rate(WIDTH, None) == (RATE, "all weights of a model of width 576")
    assert choose_rate(WIDTH, LoraConfig()) == (ADAPTER_RATE, "an adapter on a model of width 576")


@given(widths, widths)
def test_a_wider_model_has_no_larger_rate(one: int, other: int) -> None:
    narrow, wide = sorted((one, other))
    for lora in (None, LoraConfig()):
        assert choose_rate(narrow, lora)[0] >= choose_rate(wide, lora)[0] > 0


@given(widths, st.integers(1, 512))
def test_the_rank_changes_no_rate_and_alpha_divides_it(width: int, rank: int) -> None:
    rate = choose_rate(width, LoraConfig(rank=rank))[0]
    assert rate == choose_rate(width, LoraConfig(rank=16))[0] <= MAX_RATE
    assert choose_rate(width, LoraConfig(alpha=64))[0] >= 0.45 * rate
    if rate < MAX_RATE:
        assert choose_rate(width, LoraConfig(alpha=64))[0] == pytest.approx(rate / 2, rel=0.06)
