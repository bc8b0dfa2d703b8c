"""How a step is computed: runs of slots, shared spans, fused layers; each against the plain way."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from art_cli.engines.embedded.attention import MAX_PAIRS, MIN_SHARED, Costs, _attend_normed, plan_chunk_runs, plan_runs
from art_cli.engines.embedded.model_runner import ForwardRunner
from art_cli.engines.embedded.scheduler import PromptChunk, Scheduler, TokenSequence
from art_cli.models.decoder.forward import BLOCK, SHARE, Decoder, MergedDecoder
from art_cli.models.weights import Weights
from tests.support.models.tiny import tiny_config, tiny_weights

CPU = torch.device("cpu")
COSTS = Costs(call=2000, shared=2000)

slot_lists = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 4000), st.integers(0, 4000)), min_size=1, max_size=40
)  # (distance to the slot before, length, tokens shared with it)


@given(slot_lists)
def test_every_decoding_slot_is_in_one_run_that_reads_all_it_needs(rows: list[tuple[int, int, int]]) -> None:
    slots = np.cumsum([distance for distance, _, _ in rows]) - 1
    lengths = np.array([length for _, length, _ in rows])
    before = np.concatenate([lengths[:1], lengths[:-1]])
    shared = np.minimum(np.array([common for _, _, common in rows]), np.minimum(lengths, before) - 1)
    shared[0] = 0
    covered = []
    for run in plan_runs(slots, lengths, shared, COSTS, CPU):
        covered += range(run.first, run.last)
        members = range(run.last - run.first) if run.members is None else run.members.tolist()
        assert [run.start + member for member in members] == slots[run.first : run.last].tolist()
        assert run.positions[list(members), 0].tolist() == (lengths[run.first : run.last] - 1).tolist()
        assert run.length == lengths[run.first : run.last].max() and run.stop == slots[run.last - 1] + 1
        assert run.is_even == (set(run.positions.flatten().tolist()) == {run.length - 1})
        if run.shared:
            assert run.shared >= MIN_SHARED and run.last - run.first > 1
            assert run.shared <= shared[run.first + 1 : run.last].min()
    assert covered == list(range(len(rows)))


def test_neighbours_are_read_together_and_far_ones_apart() -> None:
    """Slots 0 to 7 of 100 tokens: one run. Slot 90 behind them: 83 slots of 100 tokens to read past are too many."""
    slots, lengths = np.array([*range(8), 90]), np.full(9, 100)
    runs = plan_runs(slots, lengths, np.zeros(9, np.int64), COSTS, CPU)
    assert [(run.start, run.stop) for run in runs] == [(0, 8), (90, 91)]
    assert COSTS.call < 83 * 100


def test_attempts_of_a_group_read_their_prompt_once() -> None:
    """Two groups of 4 and a single sequence; all share 70 tokens, members of a group share 1,000."""
    shared = np.array([0, 1000, 1000, 1000, 70, 1000, 1000, 1000, 0])
    runs = plan_runs(np.arange(9), np.full(9, 1100), shared, COSTS, CPU)
    assert [(run.first, run.last, run.shared) for run in runs] == [(0, 4, 1000), (4, 8, 1000), (8, 9, 0)]


chunk_lists = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 300), st.integers(1, 200)), min_size=1, max_size=30
)  # (distance to the slot before, tokens before the chunk, tokens in it)


@given(chunk_lists)
def test_every_chunk_is_in_one_run_at_its_own_positions(rows: list[tuple[int, int, int]]) -> None:
    slots = np.cumsum([distance for distance, _, _ in rows]) - 1
    chunks = [PromptChunk(int(slot), start, num, True) for slot, (_, start, num) in zip(slots, rows, strict=True)]
    left = list(chunks)
    for run in plan_chunk_runs(chunks, CPU):
        where = torch.stack([run.places // run.width + run.start, run.positions.view(-1)[run.places]], dim=1).tolist()
        while where:
            chunk = left.pop(0)
            assert where[: chunk.num] == [[chunk.slot, chunk.start + place] for place in range(chunk.num)]
            where = where[chunk.num :]
            assert run.length >= chunk.start + chunk.num and run.width >= chunk.num
            assert run.chunk in (None, chunk)
    assert not left


def test_short_turns_are_joined_and_long_prompts_are_not() -> None:
    """8 turns of 30 tokens after 100 others; 3 prompts of 250 tokens, each 250 * 250 pairs."""
    short = [PromptChunk(slot, 100, 30, True) for slot in range(8)]
    long = [PromptChunk(slot, 0, 250, True) for slot in range(8, 11)]
    runs = plan_chunk_runs(short + long, CPU)
    assert [(run.start, run.stop) for run in runs] == [(0, 8), (8, 9), (9, 10), (10, 11)]
    assert MAX_PAIRS < 250 * 250


def play(weights: Weights, prompts: list[list[int]], num: int, *, kind: Any = MergedDecoder) -> list[TokenSequence]:
    """Greedy replies through scheduler and runner, on layers of that kind; None: the model's own."""
    runner = ForwardRunner(weights)
    assert runner.decoder_kind is (MergedDecoder if kind else None)
    runner.decoder_kind = kind
    scheduler = Scheduler(max_slots=24, prefill_tokens=500, max_length=1024, max_tokens=100_000)
    sequences = [TokenSequence(np.array(prompt), len(prompt) + num) for prompt in prompts]
    for sequence in sequences:
        scheduler.add(sequence)
    while (plan := scheduler.plan()) is not None:
        logits = runner.forward(plan)
        values, ids = logits.log_softmax(-1).max(-1)
        scheduler.commit(plan, ids.numpy(), values.numpy(), values.numpy(), np.zeros(len(ids), np.bool_))
    return sequences


def assert_as_a_full_forward(weights: Weights, sequences: list[TokenSequence]) -> None:
    for sequence in sequences:
        ids = torch.tensor([[*sequence.prompt.tolist(), *sequence.sampled.tolist()]])
        with torch.no_grad():
            rows = weights.model(ids).logits[0, len(sequence.prompt) - 1 : -1].log_softmax(-1)
        values, best = rows.max(-1)
        assert sequence.sampled.tolist() == best.tolist()
        assert np.abs(sequence.logprobs - values.numpy()).max() < 1e-5


GROUPS = [[*range(200), *range(100), tail] for tail in range(9)] + [[7] * 40, [9] * 300]


def test_shared_spans_give_what_a_full_forward_gives() -> None:
    """20 attempts diverge after 950 tokens: sharing saves 19 * 950 reads, and costs 10,240."""
    weights = tiny_weights()
    attempts = [[*range(250), *range(250), *range(250), *range(200), tail] for tail in range(20)]
    assert Costs.of(token_bytes=2 * 2 * 16 * 4).shared == 10240 < 19 * 950
    assert_as_a_full_forward(weights, play(weights, attempts, 6))


def test_normalisers_are_the_same_from_torchs_kernel_and_from_plain_products() -> None:
    """Values twice as wide as keys are not the kernel's; their halves are the values themselves."""
    query, keys, values = (torch.randn(3, 2, num, 16) for num in (5, 40, 40))
    mask = torch.zeros(3, 1, 1, 40).masked_fill_(torch.arange(40) > 30, float("-inf"))
    out, norm = _attend_normed(query, keys, values, mask, None)
    plain_out, plain_norm = _attend_normed(query, keys, torch.cat((values, values), dim=-1), mask, None)
    torch.testing.assert_close(norm, plain_norm)
    torch.testing.assert_close(torch.cat((out, out), dim=-1), plain_out)
    scores = query @ keys.transpose(-1, -2) / 16**0.5
    torch.testing.assert_close(norm, scores[..., :31].logsumexp(-1, keepdim=True))


@pytest.mark.parametrize("kind", [MergedDecoder, Decoder])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_both_decoders_give_what_the_models_own_layers_give(name: str, kind: Any) -> None:
    """With adapters of random A and B, norms of random weight. Mistral looks back 50 tokens; Qwen2 has biases."""
    weights = adapted_weights(name)
    assert_as_a_full_forward(weights, play(weights, GROUPS, 4, kind=kind))


def test_rows_of_several_blocks_give_what_a_full_forward_gives() -> None:
    weights, ids = tiny_weights(), [place * 37 % 97 for place in range(2 * BLOCK + 3)]
    runner = ForwardRunner(weights)
    assert runner.decoder_kind is MergedDecoder
    with torch.no_grad():
        rows = weights.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(runner.score(ids)), expected, rtol=0, atol=1e-5)


def test_weights_are_copied_if_an_eighth_of_the_memory_holds_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = tiny_weights()
    num_bytes = sum(parameter.nbytes for parameter in weights.model.parameters())
    monkeypatch.setattr("art_cli.models.decoder.forward.memory_size", lambda: 8 * num_bytes)
    assert ForwardRunner(weights).decoder_kind is MergedDecoder
    monkeypatch.setattr("art_cli.models.decoder.forward.memory_size", lambda: 8 * num_bytes - 8)
    with caplog.at_level("DEBUG", logger="art_cli"):
        assert ForwardRunner(weights).decoder_kind is Decoder
    assert (
        "MergedDecoder is not used: 0.00 GB of weights to copy, above 0.00 GB, an eighth of the memory" in caplog.text
    )


def test_the_room_for_keys_and_values_is_that_of_the_machine_not_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ForwardRunner(tiny_weights())
    monkeypatch.setattr(
        "art_cli.engines.embedded.model_runner.memory_size", lambda: 8 * 1000 * runner.bytes_per_token()
    )
    assert runner.token_budget() == 1000


def test_the_smallest_real_model_is_copied_on_a_machine_of_8_gb() -> None:
    """SmolLM2-135M has 538 MB of float32 weights, and an adapter of rank 16 on all linear layers 19.5 MB."""
    assert SHARE * 8e9 > 538.06e6 + 19.5e6


def adapted_weights(name: str) -> Weights:
    import peft

    shape = {key: getattr(tiny_config(), key) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "initializer_range")}  # fmt: skip
    if name == "Mistral":
        shape["sliding_window"] = 50
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**shape))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or "norm" in parameter_name:
            torch.nn.init.normal_(parameter, mean=0.5)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    return Weights(model, None, CPU, torch.float32, 1024, name, has_adapter=True)


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    """A known class name with an unknown computation."""

    def forward(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 0.5
        return output


def test_a_model_that_the_fused_layers_do_not_reproduce_runs_itself(caplog: pytest.LogCaptureFixture) -> None:
    known = adapted_weights("Llama").model.get_base_model().config
    model = LlamaForCausalLM(known).eval()
    weights = Weights(model, None, CPU, torch.float32, 1024, "other", has_adapter=False)
    assert_as_a_full_forward(weights, play(weights, [[1, 2, 3]], 4, kind=None))
    assert "differ" in caplog.text


def sharp_weights() -> Weights:
    """Keys and queries ten times as long, in 8 layers: one rounding of an embedding moves logprobs by 4e-3 nats."""
    weights = tiny_weights(seed=1, layers=8)
    for name, parameter in weights.model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.data *= 10
    return weights


def wide_weights() -> Weights:
    """Logits of up to 100."""
    weights = tiny_weights()
    weights.model.get_base_model().model.norm.weight.data *= 30
    with torch.no_grad():
        assert weights.model(torch.arange(12)[None]).logits.abs().max() > 80
    return weights


def test_layers_that_are_right_are_used_however_far_rounding_moves_the_model(caplog: pytest.LogCaptureFixture) -> None:
    """Sharp attention: the gap is 40 times the 1e-4 that others keep to, and one of the model to itself, rounded."""
    for weights in (sharp_weights(), wide_weights()):
        runner = ForwardRunner(weights)
        assert runner.decoder_kind is MergedDecoder and runner._is_right(Decoder)
    assert "differs" not in caplog.text


class Damaged(MergedDecoder):
    """A decoder built from the wrong model."""

    source: Any

    def __init__(self, model: Any) -> None:
        super().__init__(self.source)


def damage_adapter(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 0.5


def damage_norm(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm.weight.data *= 0.8


def damage_layer(model: Any) -> None:
    torch.nn.init.zeros_(model.model.layers[-1].mlp.down_proj.base_layer.weight)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [damage_adapter, damage_norm, damage_layer])
@pytest.mark.parametrize("make", [tiny_weights, sharp_weights, wide_weights])
def test_layers_with_a_mistake_are_not_used(make: Callable[[], Weights], damage: Callable[[Any], None]) -> None:
    weights = make()
    runner = ForwardRunner(weights)
    Damaged.source = copy.deepcopy(weights.model.get_base_model())
    assert runner._is_right(Damaged)
    damage(Damaged.source)
    assert not runner._is_right(Damaged)


def test_new_adapter_tensors_are_used_at_the_next_version() -> None:
    """Parameters are replaced, not written into: the views taken before must not stay."""
    weights = adapted_weights("Qwen3")
    runner = ForwardRunner(weights)
    probe = list(range(30))
    before = runner.score(probe)
    for name, parameter in weights.model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    weights.version += 1
    with torch.no_grad():
        rows = weights.model(torch.tensor([probe])).logits[0, :-1].log_softmax(-1)
    expected = rows.gather(1, torch.tensor(probe[1:])[:, None])[:, 0].tolist()
    assert runner.score(probe) == pytest.approx(expected, abs=1e-5)
    assert before != pytest.approx(expected, abs=1e-2)


def test_below_float32_fused_layers_round_as_the_model_does() -> None:
    """bfloat16 base, float32 adapters: logprobs of a full forward within bfloat16's rounding of the logits."""
    weights = adapted_weights("Qwen3")
    for name, parameter in weights.model.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.to(torch.bfloat16)
    weights = Weights(weights.model, None, CPU, torch.bfloat16, 1024, "bf16", has_adapter=True)
    runner, probe = ForwardRunner(weights), list(range(60))
    assert runner.decoder_kind is Decoder
    with torch.no_grad():
        rows = weights.model(torch.tensor([probe])).logits[0, :-1].float().log_softmax(-1)
    expected = rows.gather(1, torch.tensor(probe[1:])[:, None])[:, 0].tolist()
    assert runner.score(probe) == pytest.approx(expected, abs=0.1)
