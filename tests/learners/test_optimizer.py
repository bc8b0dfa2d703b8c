"""The optimizer: AdamW with warm-up and clipping, whose state is plain tensors."""

from pathlib import Path

import pytest
import torch

from art_cli.config.schema import TrainConfig
from art_cli.errors import CheckpointError
from art_cli.learners.optimizer import Optimizer


def optimizer(
    size: int = 2,
    *,
    learning_rate: float = 0.1,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
    place: str = "cpu",
    device: str | None = None,
) -> Optimizer:
    """Of one parameter of ones at `place`, updated at `device`."""
    config = TrainConfig(
        learning_rate=learning_rate, warmup_steps=warmup_steps, weight_decay=weight_decay, max_grad_norm=1.0
    )
    return Optimizer(
        {"w": torch.nn.Parameter(torch.ones(size, dtype=dtype, device=place))},
        config,
        device=None if device is None else torch.device(device),
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


# --- updates on copies ------------------------------------------------------------------------------------------------


def update(made: Optimizer, *values: float) -> None:
    parameter = made.parameters["w"]
    parameter.grad = torch.tensor(values, dtype=parameter.dtype, device=parameter.device)
    made.clip()
    made.update()


GRADIENTS = [(0.3, -0.02), (-0.1, 0.4), (0.7, 0.7), (1e-4, -3.0)]


@pytest.mark.parametrize(
    ("place", "device"), [("cpu", "cpu"), ("cpu", "cpu:0"), pytest.param("cuda", "cpu", marks=pytest.mark.gpu)]
)
def test_the_updates_are_the_same_wherever_the_state_lives(place: str, device: str) -> None:
    """Bit by bit on one kind of processor, and so is the state; on two kinds to rounding."""
    here, there = (optimizer(weight_decay=0.1, warmup_steps=3, place=place, device=d) for d in (None, device))
    for gradient in GRADIENTS:
        update(here, *gradient)
        update(there, *gradient)
        assert there.parameters["w"].grad is None
        rounding = 0.0 if place == "cpu" else 1e-6
        torch.testing.assert_close(here.parameters["w"], there.parameters["w"], rtol=0, atol=rounding)
    assert here.tensors().keys() == there.tensors().keys()
    for name, tensor in there.tensors().items():
        assert tensor.device.type == torch.device(device).type
        torch.testing.assert_close(here.tensors()[name].cpu(), tensor.cpu(), rtol=0, atol=rounding)


def test_state_moves_between_the_two(tmp_path: Path) -> None:
    """Saved where the state lies with the parameters, loaded where it lies apart, and back: the same next update."""
    here, there = optimizer(), optimizer(device="cpu")
    for gradient in GRADIENTS[:2]:
        update(here, *gradient)
    here.save(tmp_path)
    with torch.no_grad():
        there.parameters["w"].copy_(here.parameters["w"])
    there.load(tmp_path)
    for gradient in GRADIENTS[2:]:
        update(here, *gradient)
        update(there, *gradient)
    assert torch.equal(here.parameters["w"], there.parameters["w"])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_bfloat16_weights_lose_no_small_step(device: str | None) -> None:
    """100 steps of 1e-4 down from 1: 0.99. In bfloat16 each alone is rounded away (its next number is 0.996)."""
    made = optimizer(learning_rate=1e-4, dtype=torch.bfloat16, device=device)
    for _ in range(100):
        update(made, 1.0, 1.0)
    assert made.parameters["w"].tolist() == pytest.approx([0.99, 0.99], abs=2e-3)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_what_bfloat16_cannot_hold_is_saved_loaded_and_restored(device: str | None, tmp_path: Path) -> None:
    made, other = (optimizer(learning_rate=1e-3, dtype=torch.bfloat16, device=device) for _ in range(2))
    update(made, 0.5, -0.5)
    made.save(tmp_path)
    snapshot = made.snapshot()
    for _ in range(5):
        update(made, 0.5, -0.5)
    with torch.no_grad():
        other.parameters["w"].copy_(snapshot.parameters["w"])
    other.load(tmp_path)
    expected = {name: tensor.clone() for name, tensor in made.tensors().items()}
    for again in (made, other):
        if again is made:
            made.restore(snapshot)
        for _ in range(5):
            update(again, 0.5, -0.5)
        assert again.tensors().keys() == expected.keys() == {"w:step", "w:exp_avg", "w:exp_avg_sq", "w:copy"}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in again.tensors().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_put_in_place_meanwhile_count(dtype: torch.dtype) -> None:
    """As an engine that loads a checkpoint in the same process does: the update starts from them."""
    made = optimizer(learning_rate=0.25, dtype=dtype, device="cpu")
    update(made, 1.0, 1.0)
    with torch.no_grad():
        made.parameters["w"].fill_(4.0)
    update(made, 1.0, 1.0)
    assert made.parameters["w"].tolist() == pytest.approx([3.75, 3.75], abs=1e-6)
