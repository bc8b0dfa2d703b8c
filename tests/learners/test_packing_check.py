"""On a run's first batch packs are held against plain rows: logprobs and gradient, and rows win where they differ."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from art_cli.config.schema import GrpoConfig, TorchLearnerConfig
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing_check import PackingCheck, _compare, compare_batch
from art_cli.learners.samples import bare_sample
from art_cli.models.decoder import layers, maths
from art_cli.models.decoder.forward import BOUNDS, LIMIT, Gap, bound_of
from tests.learners.test_pack_runner import samples, weights_of
from tests.support.models.gradients import Caught, learner, reference_gradient, two_answers
from tests.support.models.tiny import tiny_config, tiny_weights


def runner_of(weights: Any) -> PackRunner:
    runner = PackRunner(weights, TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack
    return runner


@pytest.mark.parametrize("lora_rank", [4, None])
def test_exact_packs_hold_to_rounding(lora_rank: int | None) -> None:
    """24 + 24 + 18 trained tokens and those before them; nothing is left behind in any `.grad`."""
    weights = tiny_weights(lora_rank=lora_rank)
    gap = compare_batch(runner_of(weights), samples())
    assert gap.num_tokens == sum(len(sample.targets) + sample.targets[0] - 1 for sample in samples())
    assert gap.found.logprob < 1e-5 and gap.found.gradient < 1e-5
    assert gap.is_small
    assert all(parameter.grad is None for parameter in weights.model.parameters())


@pytest.mark.parametrize("long", [0.0, float("inf")], ids=["added into the weights", "apart"])
def test_packs_by_mkl_hold_with_the_adapter_added_into_the_weights_and_apart(
    long: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (maths, layers):
        monkeypatch.setattr(module, "prefers_onednn", lambda: False)
    monkeypatch.setattr(layers, "LONG", long)
    gap = compare_batch(runner_of(tiny_weights()), samples())
    assert gap.found.logprob < 1e-5 and gap.found.gradient < 1e-5


def test_trees_are_compared_also_where_the_first_batch_has_none_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later batch may have them, and is not compared any more."""
    runner, parents, run = runner_of(tiny_weights()), [], PackRunner.run

    def keep(self: PackRunner, pack: Any) -> Any:
        parents.extend(pack.segments.parents)
        return run(self, pack)

    monkeypatch.setattr(PackRunner, "run", keep)
    ids = [np.array([1, *[2 + index] * 60]) for index in range(4)]
    little = [bare_sample(each, np.array([60]), str(index)) for index, each in enumerate(ids)]
    assert all(parent < 0 for pack in runner.pack(little) for parent in pack.segments.parents)
    assert compare_batch(runner, little).is_small
    assert any(parent >= 0 for parent in parents)


def test_bfloat16_packs_hold_within_its_bounds() -> None:
    gap = compare_batch(runner_of(weights_of(tiny_config(), torch.bfloat16)), samples())
    assert gap.is_small
    assert gap.found.gradient > 1e-5


def test_rounding_alone_takes_no_bfloat16_model_from_its_packs() -> None:
    """Logits five times as large: packs are further away than the table says, and so is the model, rounded."""
    weights = tiny_weights(layers=4)
    for name, parameter in weights.model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16() * (5 if name.endswith("model.norm.weight") else 1)
    weights.dtype = torch.bfloat16
    runner = runner_of(weights)
    gap = compare_batch(runner, samples())
    assert not gap.found.is_within(BOUNDS[torch.bfloat16]) and gap.is_small
    PackingCheck(runner).compare(samples())
    assert runner.can_pack


def test_a_policy_that_is_sure_of_its_tokens_keeps_its_packs() -> None:
    """Logits 200 times as large: 1 - p of its own tokens is rounding, and so is their gradient."""
    weights = tiny_weights(layers=4)
    for name, parameter in weights.model.named_parameters():
        if name.endswith("model.norm.weight"):
            parameter.data *= 200
    ids = torch.tensor([[1, *range(3, 40)]])
    with torch.no_grad():
        for _ in range(12):
            ids = torch.cat([ids, weights.model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    batch = [bare_sample(ids[0].numpy(), np.arange(38, 50), str(index)) for index in range(2)]
    runner = runner_of(weights)
    own = _compare(runner, runner.pack(batch))
    assert own.found.gradient > own.bound.gradient, "its own tokens alone would take the packs away"
    assert compare_batch(runner, batch).is_small


def test_a_bound_is_the_tables_or_what_rounding_moves_and_never_past_the_limit() -> None:
    """The model's own movement is measured only where the table does not do; 8 of them are admitted."""
    table = BOUNDS[torch.bfloat16]
    assert bound_of(torch.bfloat16, Gap(0.01, 0.01), pytest.fail) == table
    assert bound_of(torch.bfloat16, Gap(0.05, 0.01), lambda: Gap(0.01, 0.001)) == Gap(0.08, table.gradient)
    assert bound_of(torch.bfloat16, Gap(9.0, 9.0), lambda: Gap(1.0, 1.0)) == LIMIT


def test_a_gradient_that_ignores_the_tree_is_found_out_in_bfloat16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    break_backward(monkeypatch)
    assert not compare_batch(runner_of(weights_of(tiny_config(), torch.bfloat16)), samples()).is_small


def break_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with the right values and a wrong gradient: that of attention which sees every earlier token."""
    from art_cli.learners.packs import tree_attention

    right = tree_attention._BlockAttention.apply

    def wrong(query: Any, key: Any, value: Any, blocks: Any, scale: float) -> Any:
        groups = query.shape[1] // key.shape[1]
        wide = [tensor.repeat_interleave(groups, dim=1) for tensor in (key, value)]
        causal = F.scaled_dot_product_attention(query, *wide, is_causal=True, scale=scale)
        return causal + (right(query, key, value, blocks, scale) - causal).detach()

    monkeypatch.setattr(tree_attention._BlockAttention, "apply", wrong)


def test_a_gradient_that_ignores_the_tree_is_found_out_though_the_logprobs_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_backward(monkeypatch)
    gap = compare_batch(runner_of(tiny_weights()), samples())
    assert gap.found.logprob < 1e-4
    assert gap.found.gradient > 0.01 and not gap.is_small


def test_the_first_batch_falls_back_to_rows_and_says_so_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tiny_weights()
    groups = [two_answers(weights)]
    expected = reference_gradient(weights, groups, GrpoConfig())
    break_backward(monkeypatch)
    caught = Caught(learner(weights, max_grad_norm=1e9))
    with caplog.at_level(logging.INFO):
        metrics = caught.learner.step(groups)
        caught.learner.step(groups)
    [said] = [record.message for record in caplog.records if "plain rows" in record.message]
    assert said.startswith("packs do not hold against plain rows: logprobs differ by ")
    assert "(bound 0.001)" in said and "training one sample at a time" in said
    assert metrics.tokens_computed == metrics.tokens_flat == 12 and metrics.packed == 0
    for name, gradient in expected.items():
        torch.testing.assert_close(caught.gradient[name], gradient.float(), rtol=1e-4, atol=1e-7)


def test_where_packs_hold_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    weights = tiny_weights()
    trained = learner(weights)
    with caplog.at_level(logging.DEBUG, logger="art_cli"):
        for _ in range(2):
            metrics = trained.step([two_answers(weights)])
    assert len([record for record in caplog.records if "packs hold against plain rows" in record.message]) == 1
    assert metrics.tokens_computed == 8 and metrics.packed == 1
