"""Losses: closed forms worked out by hand, and TRL's own code where it has the same loss."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from art_cli.config.schema import CispoConfig, DapoConfig, DrGrpoConfig, GrpoConfig, GspoConfig, LossConfig, RlooConfig
from art_cli.learners.algorithms.credit import overlong_penalty
from art_cli.learners.algorithms.normalization import (
    FinishedCounts,
    UpdateCounts,
    sample_mean,
    token_mean,
    trajectory_sum,
)
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms
from art_cli.learners.algorithms.pack_loss import LossTerms, k3, pack_loss
from art_cli.learners.algorithms.presets import build_algorithm
from art_cli.tinker.tinker_losses import server_loss


def evaluate(
    loss: LossConfig, ratios: list[float], advantages: list[float], samples: list[int]
) -> tuple[Objective, Tensor]:
    """The objective of tokens whose new / old probability ratios are given, and its gradient by each new logprob."""
    old = torch.full((len(ratios),), -1.0)
    new = (old + torch.tensor(ratios).log()).requires_grad_()
    terms = PolicyTerms(new, old, torch.tensor(advantages), torch.tensor(samples))
    result = build_algorithm(loss, max_tokens=1).objective(terms)
    result.values.sum().backward()
    assert new.grad is not None
    return result, new.grad


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [GrpoConfig(clip=0.2), DrGrpoConfig(name="dr_grpo", clip=0.2)])
def test_the_ratio_counts_until_the_clip_and_its_gradient_is_the_ratio(loss: LossConfig) -> None:
    """clip 0.2, -min(r A, clip(r, 0.8, 1.2) A), gradient by log p: -r A, or 0 where the clipped side is smaller.

    r 1.0, A  2: -2.0, gradient -2        r 1.5, A  1: -1.2, gradient 0, clipped
    r 1.5, A -1:  1.5, gradient 1.5       r 0.5, A  1: -0.5, gradient -0.5
    r 0.5, A -1:  0.8, gradient 0, clipped
    """
    result, gradient = evaluate(loss, [1.0, 1.5, 1.5, 0.5, 0.5], [2, 1, -1, 1, -1], [0, 1, 2, 3, 4])
    torch.testing.assert_close(result.values, torch.tensor([-2.0, -1.2, 1.5, -0.5, 0.8]))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.0, 1.5, -0.5, 0.0]))
    assert result.is_clipped.tolist() == [False, True, False, False, True]


def test_dapo_clips_higher_above_than_below() -> None:
    """clip 0.2 below, 0.28 above: r 1.25 goes free (-1.25), r 1.3 is cut at -1.28, r 0.75 with A -1 at 0.8."""
    result, gradient = evaluate(
        DapoConfig(name="dapo", clip=0.2, clip_high=0.28), [1.25, 1.3, 0.75], [1, 1, -1], [0, 1, 2]
    )
    torch.testing.assert_close(result.values, torch.tensor([-1.25, -1.28, 0.8]))
    torch.testing.assert_close(gradient, torch.tensor([-1.25, 0.0, 0.0]))
    assert result.is_clipped.tolist() == [False, True, True]


def test_gspo_takes_or_leaves_a_sequence_whole() -> None:
    """Sample 0: ratios 2 and 1/2, geometric mean 1, inside any clip: each token -1, gradient of the two: -1/2 each * 2.

    Sample 1: ratios 4 and 1, geometric mean 2, clipped at 1.5: each token -1.5, no gradient for either.
    By log p of one token of two, s = exp(mean) changes by s / 2, and both tokens carry it: -2 A s / 2 = -A s.
    """
    result, gradient = evaluate(
        GspoConfig(name="gspo", clip=0.5, clip_high=0.5), [2.0, 0.5, 4.0, 1.0], [1] * 4, [0, 0, 1, 1]
    )
    torch.testing.assert_close(result.values, torch.tensor([-1.0, -1.0, -1.5, -1.5]))
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -1.0, 0.0, 0.0]))
    assert result.is_clipped.tolist() == [False, False, True, True]


def test_cispo_cuts_the_weight_and_keeps_the_gradient() -> None:
    """-w A log p with w the detached ratio, at most 1 + 1: r 1, A 1: gradient -1; r 5, A 1: -2; r 5, A -1: +2.

    The value is w times -A log p: old is -1, so log p is -1 + log r.
    """
    result, gradient = evaluate(
        CispoConfig(name="cispo", clip=1.0, clip_high=1.0), [1.0, 5.0, 5.0], [1, 1, -1], [0, 1, 2]
    )
    torch.testing.assert_close(gradient, torch.tensor([-1.0, -2.0, 2.0]))
    log_p = math.log(5) - 1
    torch.testing.assert_close(result.values, torch.tensor([1.0, -2 * log_p, 2 * log_p]))
    assert result.is_clipped.tolist() == [False, True, True]


def test_k3_is_zero_at_the_reference_and_positive_on_both_sides() -> None:
    """d = reference - new: 0 -> 0; log 2 -> 2 - log 2 - 1; -log 2 -> 1/2 + log 2 - 1. Gradient by new: 1 - exp(d)."""
    new = torch.zeros(3, requires_grad=True)
    values = k3(new, torch.tensor([0.0, math.log(2), -math.log(2)]))
    values.sum().backward()
    torch.testing.assert_close(values, torch.tensor([0.0, 1 - math.log(2), math.log(2) - 0.5]))
    torch.testing.assert_close(new.grad, torch.tensor([0.0, -1.0, 0.5]))


def test_means_are_over_the_whole_update() -> None:
    """8 tokens in 2 samples (6 and 2) of 1 trajectory: each token 1/8; or 1/12 and 1/4; or 1/100 of a constant."""
    update = UpdateCounts(tokens=8, samples=2, trajectories=1, all=FinishedCounts(tokens=32, samples=4, trajectories=2))
    assert token_mean(6, update) == token_mean(2, update) == 1 / 8
    assert (sample_mean(6, update), sample_mean(2, update)) == (1 / 12, 1 / 4)
    assert trajectory_sum(6, update, max_tokens=100) == 1 / 100
    assert update.over("trained") == update


def test_over_all_a_mean_is_over_the_steps_finished_trajectories() -> None:
    """32 tokens in 4 samples of 2 trajectories, whatever of these is trained."""
    update = UpdateCounts(tokens=8, samples=2, trajectories=1, all=FinishedCounts(tokens=32, samples=4, trajectories=2))
    whole = update.over("all")
    assert token_mean(6, whole) == 1 / 32
    assert sample_mean(6, whole) == 1 / 24
    assert trajectory_sum(6, whole, max_tokens=100) == 1 / 200


def test_rloo_has_one_ratio_per_sample_the_product_of_its_tokens() -> None:
    """Sample 0: ratios 2 and 1/2, product 1: each token -1, and by each log p -1 for each of two tokens, so -2.

    Sample 1: ratios 1.5 and 1.2, product 1.8, clipped at 1.5: no gradient.
    """
    result, gradient = evaluate(RlooConfig(name="rloo", clip=0.5), [2.0, 0.5, 1.5, 1.2], [1] * 4, [0, 0, 1, 1])
    torch.testing.assert_close(result.values, torch.tensor([-1.0, -1.0, -1.5, -1.5]))
    torch.testing.assert_close(gradient, torch.tensor([-2.0, -2.0, 0.0, 0.0]))


@pytest.mark.parametrize("ratio", [0.1, 0.9, 1.1, 10.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_server_computes_a_sample_s_value_and_gradient_as_here_also_past_what_counts(
    ratio: float, advantage: float
) -> None:
    """Ten tokens: a sum of log ratios of 23 nats is beyond e^20, where a sample gets no gradient."""
    for loss in (RlooConfig(name="rloo"), GspoConfig(name="gspo")):
        result, gradient = evaluate(loss, [ratio] * 10, [advantage] * 10, [0] * 10)
        old = np.full(10, -1.0)
        found = server_loss(loss).values(old + math.log(ratio), old, np.full(10, advantage))
        np.testing.assert_allclose(found.values, result.values.detach(), rtol=1e-4)
        np.testing.assert_allclose(found.slopes, gradient, rtol=1e-4)


@pytest.mark.parametrize(("num_tokens", "penalty"), [(10, 0), (80, 0), (90, -0.5), (95, -0.75), (100, -1), (300, -1)])
def test_overlong_penalty_grows_evenly_to_the_limit(num_tokens: int, penalty: float) -> None:
    """Limit 100, buffer 20: free up to 80, then (80 - n) / 20, never below -1. Equation 13."""
    assert overlong_penalty(num_tokens, max_tokens=100, buffer=20) == penalty


def components(
    policy: list[float],
    cross_entropy: list[float] | None = None,
    reference_kl: list[float] | None = None,
) -> Tensor:
    """[5, N] weights; None: no term is in that component, and none is in `value`."""
    nothing = [math.nan] * len(policy)
    rows = [policy, cross_entropy or nothing, reference_kl or nothing, nothing, nothing]
    return torch.tensor(rows)


def test_a_pack_loss_is_objective_times_importance_plus_kl_times_share() -> None:
    """One token, r 1, A 1: objective -1. Importance 0.5, KL weight 0.1 at d = log 2, share 1/4.

    (-1 * 0.5 + 0.1 * (2 - log 2 - 1)) / 4
    """
    terms = LossTerms(
        new=torch.tensor([-1.0]),
        old=torch.tensor([-1.0]),
        samples=torch.tensor([0]),
        weights=components([1.0], None, [0.1]),
        shares=torch.full((3, 1), 0.25),
        importance=torch.tensor([0.5]),
        reference=torch.tensor([-1.0 + math.log(2)]),
    )
    result = pack_loss(build_algorithm(GrpoConfig(), max_tokens=1), terms)
    assert float(result.loss) == pytest.approx((-0.5 + 0.1 * (1 - math.log(2))) / 4)


def test_a_term_adds_to_the_components_it_is_in_and_to_no_other() -> None:
    """Terms: in policy (-1 at share 1/2), in cross entropy (0.5 * 2 at share 1/4), in both, in none.

    -1/2, then 1/4, then -1/2 + 1/4, then 0.
    """
    nan = math.nan
    terms = LossTerms(
        new=torch.full((4,), -2.0),
        old=torch.full((4,), -2.0),
        samples=torch.zeros(4, dtype=torch.int64),
        weights=components([1.0, nan, 1.0, nan], [nan, 0.5, 0.5, nan]),
        shares=torch.tensor([[0.5], [0.25], [9.0]]).expand(3, 4),
    )
    result = pack_loss(build_algorithm(GrpoConfig(), max_tokens=1), terms)
    assert result.parts.tolist() == [-0.5, 0.25, -0.25, 0.0]
    assert result.kl is None


# --- TRL --------------------------------------------------------------------------------------------------------------

B, T = 3, 5  # sequences, tokens
MAX_TOKENS = 7
KL = 0.3


class OneProcess:
    """What TRL's loss asks of accelerate, on one process."""

    num_processes = 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def trl_loss(inputs: dict[str, Any], new: Tensor, *, loss_type: str, level: str, low: float, high: float) -> Tensor:
    """GRPOTrainer's own _compute_loss, its forward pass replaced by the given logprobs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=KL,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_TOKENS,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    loss: Tensor = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss


@pytest.mark.parametrize(
    ("config", "trl"),
    [
        (GrpoConfig(), {"loss_type": "dapo", "level": "token", "low": 0.2, "high": 0.2}),
        (DapoConfig(name="dapo"), {"loss_type": "dapo", "level": "token", "low": 0.2, "high": 0.28}),
        (DrGrpoConfig(name="dr_grpo"), {"loss_type": "dr_grpo", "level": "token", "low": 0.2, "high": 0.2}),
        (
            GspoConfig(name="gspo", clip=0.1, clip_high=0.2),
            {"loss_type": "grpo", "level": "sequence", "low": 0.1, "high": 0.2},
        ),
        # TRL's epsilon_high is the bound itself for CISPO
        (CispoConfig(name="cispo", clip_high=0.2), {"loss_type": "cispo", "level": "token", "low": 0.0, "high": 1.2}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_value_and_gradient_are_trls(config: LossConfig, trl: dict[str, Any]) -> None:
    """With KL and truncated importance weights, on sequences of different lengths. TRL's "grpo" is a mean over each
    sequence first, so our grpo is its "dapo" with one clip, and our gspo its "grpo" at sequence level.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 3, 1]
    mask = torch.tensor([[float(t < length) for t in range(T)] for length in lengths])
    theirs = (-torch.rand(B, T, generator=generator) - 0.5).requires_grad_()
    old = theirs.detach() + 0.3 * torch.randn(B, T, generator=generator)
    reference = theirs.detach() + 0.3 * torch.randn(B, T, generator=generator)
    importance = torch.rand(B, T, generator=generator) + 0.5
    advantages = torch.tensor([1.5, -1.0, 0.5])
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long),
        "prompt_mask": torch.ones(B, 1),
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": importance,
        "num_items_in_batch": mask.sum(),
    }
    expected = trl_loss(inputs, theirs, **trl)
    expected.backward()

    kept = mask.bool()
    ours = theirs.detach().clone().requires_grad_()
    loss = build_algorithm(config, max_tokens=MAX_TOKENS)
    counts = FinishedCounts(tokens=sum(lengths), samples=B, trajectories=B)
    of_sample = torch.arange(B)[:, None].expand(B, T)[kept]
    shares = torch.tensor([loss.share(length, UpdateCounts(*counts, counts)) for length in lengths])[of_sample]
    terms = LossTerms(
        new=ours[kept],
        old=old[kept],
        samples=of_sample,
        weights=components(advantages[of_sample].tolist(), None, [KL] * sum(lengths)),
        shares=shares.expand(3, -1),
        importance=importance[kept],
        reference=reference[kept],
    )
    result = pack_loss(loss, terms)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected)
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert 0 < int(result.is_clipped.sum()) < sum(lengths)
