"""The optimizer: AdamW with warm-up and clipping, whose state is plain tensors."""

from pathlib import Path

import pytest
import torch

from art_cli.errors import CheckpointError
from art_cli.learners.optimizer import Optimizer


def optimizer(
    size: int = 2, *, learning_rate: float = 0.1, warmup_steps: int = 0, weight_decay: float = 0.0
) -> Optimizer:
    return Optimizer(
        {"w": torch.nn.Parameter(torch.ones(size))},
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_grad_norm=1.0,
    )


def test_the_rate_grows_evenly_from_the_first_step_on() -> None:
    """Warm-up over 4 steps to 0.1: 0.025, 0.05, 0.075, 0.1, then 0.1."""
    made = optimizer(warmup_steps=4)
    rates = []
    for _ in range(6):
        rates.append(made.current_rate())
        made.counts.num_steps += 1
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_clipping_scales_the_gradient_and_reports_its_norm() -> None:
    """Gradient (3, 4): norm 5, scaled to 1: (0.6, 0.8)."""
    made = optimizer()
    made.parameters["w"].grad = torch.tensor([3.0, 4.0])
    assert made.clip() == 5.0
    torch.testing.assert_close(made.parameters["w"].grad, torch.tensor([0.6, 0.8]))


def test_the_first_update_moves_each_weight_by_the_rate_against_its_gradient() -> None:
    """Adam's first step is g / |g|; decay takes 0.1 * 0.5 of each weight of 1: 1 - 0.05 -+ 0.1."""
    made = optimizer(weight_decay=0.5)
    made.parameters["w"].grad = torch.tensor([0.3, -0.02])
    made.update()
    torch.testing.assert_close(made.parameters["w"].detach(), torch.tensor([0.85, 1.05]))
    assert made.parameters["w"].grad is None


def test_restored_everything_an_update_changes_is_back() -> None:
    made = optimizer()
    for value in (1.0, 2.0):
        snapshot = made.snapshot()
        before = (made.parameters["w"].detach().clone(), made.tensors().keys(), made.counts.num_updates)
        made.parameters["w"].grad = torch.tensor([value, -value])
        made.update()
    made.restore(snapshot)
    assert torch.equal(made.parameters["w"], before[0])
    assert (made.tensors().keys(), made.counts.num_updates) == before[1:]
    assert float(made.tensors()["w:step"]) == 1


def test_refuses_the_state_of_another_model(tmp_path: Path) -> None:
    other = optimizer(size=3)
    other.parameters["w"].grad = torch.ones(3)
    other.update()
    other.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer state of w \[3\], which this model does not have"):
        optimizer(size=2).load(tmp_path)
