"""Off-policy corrections: weights by hand, and what a learner does with them."""

import math
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from art_cli.config.schema import GrpoConfig
from art_cli.learners.algorithms.off_policy import SampledTerms, build_correction
from tests.learners.test_presets import GROUPS, WEIGHTS
from tests.support.models.gradients import Caught, distance, learner

nan = math.nan


def weights_of(
    section: dict[str, Any],
    now: list[float],
    then: list[float],
    advantages: list[float] | None = None,
    samples: list[int] | None = None,
) -> list[float]:
    """The weights of tokens whose probabilities are `now` under the learner and `then` under the engine."""
    learner_logprobs, engine = torch.tensor(now).log(), torch.tensor(then).log()
    correction = build_correction(GrpoConfig(off_policy=section).off_policy)
    assert correction is not None
    terms = SampledTerms(
        new=learner_logprobs,
        learner=learner_logprobs,
        engine=engine,
        advantages=torch.tensor(advantages or [1.0] * len(now)),
        samples=torch.tensor(samples or [0] * len(now)),
    )
    return correction(terms).tolist()


def test_truncated_weights_are_cut_at_the_cap_and_one_where_the_engine_is_silent() -> None:
    """learner / engine: 1/2 stays, 3 is cut to 2, unknown is 1."""
    assert weights_of({"name": "truncate", "cap": 2.0}, [0.2, 0.6, 0.3], [0.4, 0.2, nan]) == pytest.approx([0.5, 2, 1])


def test_icepop_leaves_out_what_is_out_of_bounds_on_either_side() -> None:
    """Bounds 0.5 and 2: ratios 0.4 and 3 are left out, 0.6 and 1.5 stay as they are."""
    section = {"name": "icepop", "low": 0.5, "high": 2.0}
    found = weights_of(section, [0.2, 0.3, 0.3, 0.6, 0.1], [0.5, 0.5, 0.2, 0.2, nan])
    assert found == pytest.approx([0.0, 0.6, 1.5, 0.0, 1.0])


def test_a_sequence_mask_takes_or_leaves_a_sample_whole_by_its_geometric_mean() -> None:
    """Sample 0: ratios 4 and 1/4, mean 1: both stay, the first cut to 2. Sample 1: 2 and 2, mean 2: out.

    Sample 2: 2, an unknown and a token outside of the policy component: the mean of what is known is 2, so it is out.
    Sample 3: all unknown: nothing to correct with.
    """
    section = {"name": "sequence_mask", "low": 0.8, "high": 1.25, "cap": 2.0}
    now = [0.8, 0.1, 0.4, 0.4, 0.4, 0.5, 0.001, 0.5]
    then = [0.2, 0.4, 0.2, 0.2, 0.2, nan, 0.5, nan]
    found = weights_of(section, now, then, [1, 1, 1, 1, 1, 1, nan, 1], [0, 0, 1, 1, 2, 2, 2, 3])
    assert found == pytest.approx([2.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("divergence", "delta"),
    [
        ("tv", 0.15),  # |0.5 - 0.3| = 0.2 is above, |0.02 - 0.01| is not, though the ratio is 2
        ("kl", 0.05),  # 0.3 log(0.3 / 0.5) + 0.7 log(0.7 / 0.5) = 0.082; 0.5 log(0.5/0.3) + 0.5 log(0.5/0.7) = 0.087
    ],
)
def test_dppo_leaves_out_tokens_that_are_far_and_would_move_on(divergence: str, delta: float) -> None:
    """From 0.3 to 0.5 with A > 0 is out, with A < 0 it moves back: 5/3. From 0.5 to 0.3 the other way round: 3/5."""
    section = {"name": "dppo", "divergence": divergence, "delta": delta}
    found = weights_of(section, [0.5, 0.5, 0.3, 0.3, 0.02, 0.5], [0.3, 0.3, 0.5, 0.5, 0.01, nan], [1, -1, 1, -1, 1, 1])
    assert found == pytest.approx([0.0, 5 / 3, 3 / 5, 0.0, 2.0, 1.0])


def test_dppo_masks_by_the_present_policy_and_weighs_by_the_one_at_the_start_of_the_step() -> None:
    """Start of the step 0.3, as the engine; after an update 0.6: A > 0 is out. A < 0 stays with weight 1."""
    same = torch.tensor([0.3, 0.3]).log()
    terms = SampledTerms(torch.tensor([0.6, 0.6]).log(), same, same, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]))
    correction = build_correction(GrpoConfig(off_policy={"name": "dppo"}).off_policy)
    assert correction is not None and correction(terms).tolist() == [0.0, 1.0]


def test_bounds_that_leave_out_tokens_of_the_present_policy_are_refused() -> None:
    with pytest.raises(ValidationError, match="low 1.5 and high 5: a ratio of 1"):
        TypeAdapter(GrpoConfig).validate_python({"off_policy": {"name": "icepop", "low": 1.5}})


SECTIONS: list[dict[str, Any]] = [
    {"name": "truncate", "cap": 1.05},
    {"name": "icepop", "low": 0.95, "high": 1.1},
    {"name": "sequence_mask", "low": 0.99, "high": 1.06},
    {"name": "dppo", "delta": 1e-4},
]


def gradient(section: dict[str, Any], budget: int, packing: str) -> tuple[dict[str, Tensor], float]:
    loss = GrpoConfig(off_policy=section)
    caught = Caught(learner(WEIGHTS, loss, micro_batch_tokens=budget, packing=packing, max_grad_norm=1e9))
    metrics = caught.learner.step(GROUPS)
    return caught.gradient, metrics.off_policy_masked


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["name"])
def test_the_gradient_is_the_same_for_every_packing_and_the_masked_share_is_told(section: dict[str, Any]) -> None:
    """Contract 1. The tokens' logprobs are off by 0.1 nats of noise, so that some are out of these narrow bounds."""
    expected, masked = gradient(section, 1, "rows")
    found, same = gradient(section, 4096, "tree")
    assert distance(found, expected) <= 1e-5 and masked == same
    assert masked == 0 if section["name"] == "truncate" else 0 < masked < 1
