"""The optimizer: AdamW with warm-up and clipping, whose state is plain tensors."""

from pathlib import Path

import pytest
import torch

from art_cli.config.schema import TrainConfig
from art_cli.learners.optimizer import Optimizer
from art_cli.models.run_memory import training_bytes
from art_cli.runtime.errors import CheckpointError


def optimizer(
    size: int = 2,
    *,
    learning_rate: float = 0.1,
    warmup_steps: int = 0,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
    place: str = "cpu",
    device: str | None = None,
    **knobs: object,
) -> Optimizer:
    """Of one parameter of ones at `place`, updated at `device`."""
    config = TrainConfig(
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
        **knobs,
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


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("linear", [0.05, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02]),
        ("cosine", [0.05, 0.1, 0.1, 0.02 + 0.08 * (2 + 2**0.5) / 4, 0.06, 0.02 + 0.08 * (2 - 2**0.5) / 4, 0.02]),
    ],
)
def test_the_rate_decays_from_the_warm_up_to_the_end_of_the_run(decay: str, rates: list[float]) -> None:
    """Two steps of warm-up to 0.1, four of decay to a fifth of it; a step past the end has that. Half a cosine:
    (1 + cos(x)) / 2 at pi/4, pi/2 and 3 pi/4 is (2 + sqrt 2) / 4, 1/2 and (2 - sqrt 2) / 4.
    """
    made = optimizer(warmup_steps=2, steps=6, decay=decay, decay_to=0.2)
    found = []
    for _ in rates:
        found.append(made.current_rate())
        made.counts.num_steps += 1
    assert found == pytest.approx(rates)


def test_betas_weigh_the_gradients_before() -> None:
    """betas 0.5 and 0.75, gradients 1 and 3: means (0.5 * 0.5 + 0.5 * 3) / 0.75 = 7/3 and
    (0.75 * 0.25 + 0.25 * 9) / (1 - 0.75^2) = 39/7; the second step is 0.1 * (7/3) / sqrt(39/7).
    """
    made = optimizer(1, betas=[0.5, 0.75], max_grad_norm=10.0)
    update(made, 1.0)
    update(made, 3.0)
    assert made.parameters["w"].item() == pytest.approx(1 - 0.1 - 0.1 * (7 / 3) / (39 / 7) ** 0.5)


def test_a_gradient_is_clipped_to_a_multiple_of_the_median_before() -> None:
    """Norms 1, 2, 3, 9 pass below 100; their median is 2.5, so the fifth may have 2 * 2.5 = 5, and one of 4 passes.

    Then the median of 1, 2, 3, 9, 400 is 3. The history holds norms before clipping.
    """
    made = optimizer(1, clip_to_history=2.0, max_grad_norm=100.0)
    for norm in (1.0, 2.0, 3.0, 9.0):
        assert made.clip_limit() == 100.0
        update(made, norm)
    made.parameters["w"].grad = torch.tensor([400.0])
    assert (made.clip_limit(), made.clip()) == (5.0, 400.0)
    torch.testing.assert_close(made.parameters["w"].grad, torch.tensor([5.0]))
    made.update()
    assert made.clip_limit() == 6.0
    assert optimizer(1, clip_to_history=None, max_grad_norm=100.0).clip_limit() == 100.0


def test_a_gradient_that_was_not_applied_is_not_in_the_history() -> None:
    made = optimizer(1, clip_to_history=2.0)
    made.parameters["w"].grad = torch.tensor([400.0])
    made.clip()
    made.clear()
    made.update()
    assert made.counts.norms == ()


def test_the_history_is_bounded_saved_and_restored(tmp_path: Path) -> None:
    """40 norms: the last 32 are kept, to the last bit. A checkpoint of an older version has none."""
    made, other = optimizer(1, clip_to_history=2.0), optimizer(1, clip_to_history=2.0)
    for index in range(40):
        update(made, 1 / (index + 3))
    assert len(made.counts.norms) == 32
    made.save(tmp_path)
    other.load(tmp_path)
    assert other.counts == made.counts
    snapshot = made.snapshot()
    update(made, 7.0)
    made.restore(snapshot)
    assert made.counts == other.counts
    (tmp_path / "optimizer.json").write_text('{"num_steps": 3, "num_updates": 40}')
    other.load(tmp_path)
    assert (other.counts.norms, other.counts.num_updates) == ((), 40)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_made_before_the_first_update_are_those_that_it_makes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Made so that a GPU's memory has them before a pass. Until an update uses them, nothing of them is saved."""
    plain, reserved = optimizer(dtype=dtype), optimizer(dtype=dtype)
    reserved.reserve()
    first = {id(tensor) for state in reserved._adamw.state.values() for tensor in state.values()}
    assert len(first) == 3 and reserved.tensors() == {}
    for value in (1.0, 2.0):
        reserved.reserve()
        for made in (plain, reserved):
            update(made, *[value] * 2)
    assert first == {id(tensor) for state in reserved._adamw.state.values() for tensor in state.values()}
    assert reserved.tensors().keys() == plain.tensors().keys()
    for name, tensor in plain.tensors().items():
        assert torch.equal(tensor, reserved.tensors()[name])
    assert torch.equal(plain.parameters["w"], reserved.parameters["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_memory_of_a_trained_weight_is_that_of_the_estimate(dtype: torch.dtype) -> None:
    updated = optimizer(64, dtype=dtype)
    weight = updated.parameters["w"]
    for _ in range(2):
        updated.reserve()
        weight.grad = torch.ones_like(weight)
        before = updated.remember()
        copies = list(updated._copies.values())
        moments = [each for state in updated._adamw.state.values() for each in state.values() if each.dim() > 0]
        held = [weight.grad, *before.values(), *copies, *(copy.grad for copy in copies), *moments]
        assert sum(each.nbytes for each in held) == 64 * training_bytes(dtype.itemsize, is_offloaded=False)
        updated.update()
