"""Packs run on any causal model that attends by softmax, and on all others sample by sample, with the same numbers."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from art_cli.config.schema import LoraConfig, TorchLearnerConfig
from art_cli.learners.packs import pack_runner
from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.learners.packs.packing import pack_samples
from art_cli.learners.packs.packing_check import PackingCheck
from art_cli.learners.samples import Sample, bare_sample
from art_cli.models.adapters import with_adapter
from art_cli.models.weights import Weights
from tests.support.models.gradients import Caught, learner, two_answers
from tests.support.models.tiny import tiny_tokenizer, tiny_weights
from tests.support.records.trees import logprobs_of

SHAPE = {
    "vocab_size": 265,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
PACKED: dict[str, Any] = {
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3 moe": transformers.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "llama": transformers.LlamaConfig(**SHAPE),
    "mistral, window": transformers.MistralConfig(**SHAPE, sliding_window=8),
    "gemma3, window": transformers.Gemma3TextConfig(
        **SHAPE, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": transformers.Phi3Config(**SHAPE),
    "gpt2": transformers.GPT2Config(
        vocab_size=265,
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    ),
}
PLAIN: dict[str, Any] = {
    "gemma2, soft caps": transformers.Gemma2Config(
        **SHAPE, head_dim=16, attn_logit_softcapping=1.0, final_logit_softcapping=2.0
    ),
    "granite, scaled logits": transformers.GraniteConfig(**SHAPE, logits_scaling=4.0),
    "gpt-oss, sinks": transformers.GptOssConfig(
        **SHAPE,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


class AttentionCalls(TorchDispatchMode):
    """Counts them while inside, those of backward passes left out."""

    num = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += function.overloadpacket is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return function(*args, **(kwargs or {}))


def weights_of(config: Any, dtype: torch.dtype = torch.float32) -> Weights:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    return Weights(model, tiny_tokenizer(), torch.device("cpu"), dtype, 256, "tiny", has_adapter=False)


def samples() -> list[Sample]:
    """Three sequences longer than the windows above that part at 10 and 14."""
    stem = list(range(2, 22))
    token_ids = [stem, [*stem[:10], *range(30, 45)], [*stem[:14], *range(50, 55)]]
    return [bare_sample(np.array(ids), np.arange(1, len(ids)), str(index)) for index, ids in enumerate(token_ids)]


def assert_runs_exactly(runner: PackRunner, *, share: bool, tolerance: float = 2e-5) -> None:
    [pack] = pack_samples(samples(), budget=1000, share=share)
    with runner.running(), torch.no_grad():
        logprobs = runner.run(pack).logprobs[torch.from_numpy(pack.terms.edges)]
    exact = torch.cat([logprobs_of(runner.weights, sample.token_ids.tolist()) for sample in pack.samples])
    torch.testing.assert_close(logprobs, exact.detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("config", PACKED.values(), ids=PACKED)
def test_packs_give_the_models_own_logprobs(config: Any) -> None:
    runner = PackRunner(weights_of(config), TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack
    assert_runs_exactly(runner, share=True)


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_models_that_packs_do_not_fit_run_sample_by_sample(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Found out by comparing, said once, and then right."""
    runner = PackRunner(weights_of(config), TorchLearnerConfig())
    with caplog.at_level(logging.WARNING):
        PackingCheck(runner).probe(samples()[0])
        PackingCheck(runner).probe(samples()[1])
    assert runner.can_pack is False
    assert sum("cannot run packs" in record.message for record in caplog.records) == 1
    assert_runs_exactly(runner, share=False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_packs_are_trees_where_that_saves_something(ranks: int) -> None:
    """Eight samples of 100 tokens: 2 shared are not worth a tree, 30 are. A name is a name."""
    for packing, shared, is_tree in (("auto", 2, False), ("auto", 30, True), ("tree", 2, True), ("rows", 30, False)):
        runner = PackRunner(weights_of(transformers.LlamaConfig(**SHAPE)), TorchLearnerConfig(packing=packing))
        runner.can_pack = True
        runner.ranks = SimpleNamespace(size=ranks, rank=0)  # of the processes, dealing asks no more
        some = [np.array([*[1] * shared, *[2 + index] * (100 - shared)]) for index in range(8)]
        packs = runner.deal([bare_sample(ids, np.array([99]), str(index)) for index, ids in enumerate(some)])
        assert sum(parent < 0 for pack in packs for parent in pack.segments.parents) == (
            len(packs) if is_tree else sum(len(pack.samples) for pack in packs)
        )


def test_a_pass_of_plain_rows_has_one_row() -> None:
    """Its logits are in memory whole, so a pack of many rows would hold the logits of all of them. A pack has no such
    bound but its budget."""
    runner = PackRunner(weights_of(transformers.LlamaConfig(**SHAPE)), TorchLearnerConfig(packing="rows"))
    for can_pack, expected in ((True, [3]), (False, [1, 1, 1])):
        runner.can_pack = can_pack
        assert [len(pack.samples) for pack in runner.pack(samples()[:3])] == expected


def test_plain_and_packed_give_the_same_gradient() -> None:
    """And a learner whose model cannot run packs trains all the same."""
    gradients = []
    for can_pack in (True, False):
        weights = tiny_weights()
        caught = Caught(learner(weights))
        caught.learner.runner.can_pack = can_pack
        metrics = caught.learner.step([two_answers(weights)])
        assert metrics.tokens_computed == (8 if can_pack else 12)
        gradients.append(caught.gradient)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # peft's, of experts
def test_a_mixture_of_experts_takes_steps_in_packs() -> None:
    """Its experts are not linear layers, so the adapter is on attention and routers alone. Packed and row by row, the
    gradient is the same, and a step moves every B, whose fresh adapter is zero."""
    gradients = []
    for can_pack in (True, False):
        weights = with_adapter(weights_of(PACKED["qwen3 moe"]), LoraConfig(rank=2, alpha=4), 0)
        caught = Caught(learner(weights))
        caught.learner.runner.can_pack = None if can_pack else False
        caught.learner.step([two_answers(weights)])
        assert caught.learner.runner.can_pack is can_pack  # decided by comparing, in the first case
        gradients.append(caught.gradient)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-7)
        assert "lora_A" in name or gradient.abs().max() > 0


def test_gradient_checkpointing_changes_no_gradient() -> None:
    """And leaves the model as the engine needs it: in eval mode, attending its own way. A number is one of tokens."""
    gradients = []
    for checkpointing, num_calls in ((False, 2), (True, 4), (8, 4), (9, 2)):  # two layers; the pack has 8 tokens
        weights = tiny_weights()
        caught = Caught(learner(weights, gradient_checkpointing=checkpointing))
        group = two_answers(weights)
        caught.learner.runner.can_pack = caught.learner.packing.has_compared = True
        with AttentionCalls() as calls:
            caught.learner.step([group])
        assert calls.num == num_calls  # once more in the backward pass
        assert not any(module.training for module in weights.model.modules())
        assert weights.model.config._attn_implementation == "sdpa"
        gradients.append(caught.gradient)
    for name, gradient in gradients[0].items():
        assert all(torch.equal(gradient, other[name]) for other in gradients[1:])


@pytest.mark.parametrize("can_pack", [True, False])
def test_gradient_checkpointing_keeps_the_layers_inputs_only(can_pack: bool) -> None:
    """What autograd saves between the passes, each storage once; of 8 layers only what stands between them stays."""
    saved = {}
    for checkpointing in (False, True):
        weights = tiny_weights(layers=8)
        runner = PackRunner(weights, TorchLearnerConfig(gradient_checkpointing=checkpointing))
        runner.can_pack = can_pack
        [pack] = pack_samples(samples(), budget=1000, share=can_pack)
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        frozen = {parameter.untyped_storage().data_ptr() for parameter in weights.model.parameters()}
        with runner.running():
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                scores = runner.run(pack)
            scores.logprobs.sum().backward()
        between = 0 if not checkpointing else 8 * 32 * 4 * len(pack.token_ids)  # held by checkpoints, not by autograd
        saved[checkpointing] = between + sum(size for place, size in sizes.items() if place not in frozen)
    assert saved[True] < saved[False] / 5, saved


def test_bfloat16_models_run_packs_within_their_rounding() -> None:
    runner = PackRunner(weights_of(transformers.LlamaConfig(**SHAPE), torch.bfloat16), TorchLearnerConfig())
    PackingCheck(runner).probe(samples()[0])
    assert runner.can_pack
    assert_runs_exactly(runner, share=True, tolerance=0.3)


def test_all_weights_train_where_there_is_no_adapter() -> None:
    """Tied embeddings get the gradient of both their uses: that of the plain model's cross entropy."""
    weights, plain = tiny_weights(lora_rank=None), tiny_weights(lora_rank=None)
    group = two_answers(weights)
    caught = Caught(learner(weights))
    caught.learner.step([group])
    loss = torch.zeros(())
    for trajectory, advantage in zip(group, (0.5**0.5, -(0.5**0.5)), strict=True):
        [only] = trajectory.turns
        logprobs = logprobs_of(plain, [*only.prompt_ids, *only.sampled_ids])[2:]
        loss = loss - advantage * (logprobs - logprobs.detach()).exp().sum() / 6
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(caught.gradient[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_small_model_trains_with_one_thread_and_a_larger_one_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for limit, expected in ((10**9, 1), (0, 2)):
            monkeypatch.setattr(pack_runner, "SMALL", limit)
            with PackRunner(tiny_weights(), TorchLearnerConfig()).running():
                assert torch.get_num_threads() == expected
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
