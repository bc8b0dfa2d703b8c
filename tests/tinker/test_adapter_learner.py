"""A client's gradients and updates, against plain PyTorch on the same model: one sequence at a time, no packing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import get_peft_model_state_dict

from art_cli.config.schema import TorchLearnerConfig
from art_cli.learners.optimizer import Adam
from art_cli.models.weights import Weights, clone_trainable
from art_cli.runtime.errors import LearnerError
from art_cli.tinker.server.adapter_learner import AdapterLearner
from art_cli.tinker.server.datums import Datum
from tests.support.models.tiny import tiny_weights

ADAM = Adam(learning_rate=1e-3, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.01)
Terms = dict[str, torch.Tensor]


def make_data(seed: int = 0) -> list[Datum]:
    """Four datums that share a beginning; targets are the next inputs but in one row of the third."""
    draw = np.random.default_rng(seed)
    prompt = draw.integers(0, 250, 20)
    data = []
    for number in range(4):
        ids = np.concatenate([prompt, draw.integers(0, 250, 5 + 3 * number)])
        targets = ids[1:, None].copy()
        if number == 2:
            targets[7] = 42
        shape = targets.shape
        numbers = {
            "weights": draw.normal(size=shape),
            "advantages": np.where(np.arange(len(targets)) < 19, 0.0, draw.normal())[:, None],
            "logprobs": draw.normal(-5.0, 0.7, shape),
        }
        data.append(Datum(inputs=ids[:-1], targets=targets, numbers=numbers))
    return data


def gspo(new: torch.Tensor, terms: Terms) -> torch.Tensor:
    counted = terms["advantages"] != 0
    ratio = (new - terms["logprobs"])[counted].mean().exp()
    bounded = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * terms["advantages"], bounded * terms["advantages"]).sum()


def ppo(new: torch.Tensor, terms: Terms) -> torch.Tensor:
    ratio = (new - terms["logprobs"]).exp()
    return -torch.minimum(ratio * terms["advantages"], ratio.clamp(0.8, 1.28) * terms["advantages"]).sum()


def cispo(new: torch.Tensor, terms: Terms) -> torch.Tensor:
    ratio = (new - terms["logprobs"]).exp()
    return -(ratio.clamp(0.7, 1.3).detach() * new * terms["advantages"]).sum()


def dro(new: torch.Tensor, terms: Terms) -> torch.Tensor:
    return -(new * terms["advantages"] - 0.5 * 0.05 * (new - terms["logprobs"]) ** 2).sum()


REFERENCES: dict[str, tuple[dict[str, float], Callable[[torch.Tensor, Terms], torch.Tensor], Sequence[str]]] = {
    "cross_entropy": ({}, lambda new, terms: (-new * terms["weights"]).sum(), ["weights"]),
    "importance_sampling": (
        {},
        lambda new, terms: -((new - terms["logprobs"]).exp() * terms["advantages"]).sum(),
        ["logprobs", "advantages"],
    ),
    "ppo": ({"clip_high_threshold": 1.28}, ppo, ["logprobs", "advantages"]),
    "cispo": ({"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, cispo, ["logprobs", "advantages"]),
    "dro": ({"beta": 0.05}, dro, ["logprobs", "advantages"]),
    "gspo": ({}, gspo, ["logprobs", "advantages"]),
}


def only(datum: Datum, names: Sequence[str]) -> Datum:
    return Datum(inputs=datum.inputs, targets=datum.targets, numbers={name: datum.numbers[name] for name in names})


def plain_logprobs(weights: Weights, datum: Datum) -> torch.Tensor:
    """[n, K] by the model's own forward, float32."""
    logits = weights.model(torch.from_numpy(datum.inputs)[None], use_cache=False).logits[0]
    return logits.log_softmax(-1).gather(1, torch.from_numpy(datum.targets))


def plain_step(weights: Weights, data: Sequence[Datum], loss: Callable[[torch.Tensor, Terms], torch.Tensor]) -> float:
    """One step of torch's own AdamW on the sum of the loss, and that sum."""
    parameters = [p for p in weights.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=ADAM.learning_rate, betas=ADAM.betas, eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    total = torch.zeros(())
    for datum in data:
        terms = {name: torch.from_numpy(values).float() for name, values in datum.numbers.items()}
        total = total + loss(plain_logprobs(weights, datum), terms)
    total.backward()
    optimizer.step()
    return float(total.detach())


def adapter_of(weights: Weights) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in get_peft_model_state_dict(weights.model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFERENCES)
def test_a_step_is_that_of_plain_pytorch(name: str) -> None:
    """One step each on the same weights; eps is 1e-12, so a gradient near zero could be a step of any sign.

    The adapter's B is random, so that no gradient is zero by construction.
    """
    settings, reference, numbers = REFERENCES[name]
    data = [only(datum, numbers) for datum in make_data()]
    weights = tiny_weights()
    plain = clone_trainable(weights)
    learner = AdapterLearner(weights, TorchLearnerConfig())

    passed = learner.run(data, name, settings, backward=True)
    norm = learner.update(ADAM, max_norm=0)
    total = plain_step(plain, data, reference)

    assert passed.loss == pytest.approx(total, rel=1e-5)
    assert norm > 0
    mine, theirs = adapter_of(weights), adapter_of(plain)
    gaps = {key: float((mine[key] - theirs[key]).abs().max()) for key in mine}
    assert max(gaps.values()) < 1e-6, gaps


def test_gradients_of_several_calls_add_up_to_that_of_one() -> None:
    data = [only(datum, ["weights"]) for datum in make_data()]
    together, apart = tiny_weights(), tiny_weights()
    reported: list[tuple[int, int]] = []
    one = AdapterLearner(together, TorchLearnerConfig(micro_batch_tokens=40))
    several = AdapterLearner(apart, TorchLearnerConfig())
    one.run(data, "cross_entropy", {}, backward=True, progress=lambda *numbers: reported.append(numbers))
    assert reported == [(number, 3) for number in (1, 2, 3)], "after each pack"
    for datum in data:
        several.run([datum], "cross_entropy", {}, backward=True)
        several.run([datum], "cross_entropy", {}, backward=False)  # adds nothing
    wanted = {name: p.grad for name, p in one.parameters.items()}
    for name, parameter in several.parameters.items():
        assert torch.allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6), name


def test_rows_may_have_several_targets() -> None:
    datum = make_data()[0]
    targets = np.stack([datum.targets[:, 0], np.arange(len(datum.inputs)), np.zeros(len(datum.inputs), int)], axis=1)
    asked = Datum(inputs=datum.inputs, targets=targets, numbers={"weights": np.full(targets.shape, 0.25)})
    weights = tiny_weights()
    passed = AdapterLearner(weights, TorchLearnerConfig()).run([asked], "cross_entropy", {}, backward=False)
    wanted = plain_logprobs(weights, asked).detach()
    assert np.abs(passed.logprobs[0] - wanted.numpy()).max() < 1e-5
    assert passed.loss == pytest.approx(float(-(wanted * 0.25).sum()), rel=1e-5)


def test_a_pass_that_fails_adds_no_gradient_and_a_bad_gradient_changes_no_weight() -> None:
    data = [only(datum, ["logprobs", "advantages"]) for datum in make_data()]
    bad = Datum(
        inputs=data[1].inputs,
        targets=data[1].targets,
        numbers={**data[1].numbers, "logprobs": np.full(data[1].targets.shape, -1e30)},
    )
    learner = AdapterLearner(tiny_weights(), TorchLearnerConfig())
    learner.run(data[:1], "importance_sampling", {}, backward=True)
    before = {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}
    with pytest.raises(LearnerError, match=r"data\[1\]: its loss is not finite"):
        learner.run([data[0], bad], "importance_sampling", {}, backward=True)
    assert all(torch.equal(learner.parameters[name].grad, grad) for name, grad in before.items())
    weights = adapter_of(learner.weights)
    next(iter(learner.parameters.values())).grad.fill_(math.nan)
    with pytest.raises(LearnerError, match="no weight was changed"):
        learner.update(ADAM, max_norm=1.0)
    assert all(torch.equal(weights[name], tensor) for name, tensor in adapter_of(learner.weights).items())


def test_a_saved_optimizer_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    data = [only(datum, ["weights"]) for datum in make_data()]
    learner, other = (AdapterLearner(tiny_weights(seed=seed), TorchLearnerConfig()) for seed in (0, 0))
    for _ in range(2):
        learner.run(data, "cross_entropy", {}, backward=True)
        learner.update(ADAM, max_norm=1.0)
    learner.save(tmp_path, optimizer=True)
    other.load(tmp_path, optimizer=True)
    for each in (learner, other):
        each.run(data, "cross_entropy", {}, backward=True)
        each.update(ADAM, max_norm=1.0)
    wanted = adapter_of(learner.weights)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in adapter_of(other.weights).items())
    assert other.num_updates == 3


def test_rows_that_are_left_out_cost_nothing_and_change_nothing() -> None:
    """Logprobs of the other rows and the gradient are those of weights of 0; the rows themselves answer 0."""
    datum = only(make_data()[0], ["weights"])
    rows = np.array([3, 4, 20])
    kept = np.isin(np.arange(len(datum.inputs)), rows)
    zeroed = Datum(
        inputs=datum.inputs, targets=datum.targets, numbers={"weights": datum.numbers["weights"] * kept[:, None]}
    )
    masked = Datum(inputs=datum.inputs, targets=datum.targets, numbers=datum.numbers, rows=rows)
    one, other = (AdapterLearner(tiny_weights(), TorchLearnerConfig()) for _ in range(2))
    expected, found = (
        learner.run([each], "cross_entropy", {}, backward=True) for learner, each in ((one, zeroed), (other, masked))
    )
    assert found.num_tokens == 3 and (found.logprobs[0][~kept] == 0).all()
    assert found.logprobs[0][kept] == pytest.approx(expected.logprobs[0][kept], abs=1e-5)
    for name, parameter in one.parameters.items():
        gradient = other.parameters[name].grad
        assert parameter.grad is not None and gradient is not None
        assert torch.allclose(gradient, parameter.grad, atol=1e-6, rtol=1e-4), name


def test_shares_are_factors_of_each_tokens_loss() -> None:
    datum = only(make_data()[1], ["logprobs", "advantages"])
    halved = Datum(
        inputs=datum.inputs,
        targets=datum.targets,
        numbers={**datum.numbers, "shares": np.full(datum.targets.shape, 0.5)},
    )
    learner = AdapterLearner(tiny_weights(), TorchLearnerConfig())
    whole, half = (learner.run([each], "cispo", {}, backward=False).loss for each in (datum, halved))
    assert half == pytest.approx(whole / 2, rel=1e-6)


def test_a_datum_without_a_mask_is_the_same_beside_one_that_has_a_mask() -> None:
    """In one pack and in a pack of its own: its ratio is over the tokens with an advantage."""
    names, losses = ["logprobs", "advantages"], []
    masked, plain = (only(datum, names) for datum in make_data()[:2])
    masked = replace(masked, numbers={**masked.numbers, "sequence_ratio_mask": np.ones(masked.targets.shape)})
    for tokens in (1, 1000):
        learner = AdapterLearner(tiny_weights(), TorchLearnerConfig(micro_batch_tokens=tokens))
        losses.append(learner.run([masked, plain], "gspo", {"clip_high_threshold": 9.0}, backward=True).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
