"""Supervised training on transcripts: which tokens, which loss, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from art_cli.config.schema import EmbeddedEngineConfig, GrpoConfig, SftConfig, TorchLearnerConfig, TrainConfig
from art_cli.engines.embedded.embedded_engine import EmbeddedEngine
from art_cli.learners import LearnerSetup, SftProgress
from art_cli.learners.samples import bare_sample
from art_cli.learners.sft.examples import best_attempts, demo_samples, load_demos
from art_cli.learners.sft.sft_batches import SftBatches, even_bounds
from art_cli.learners.torch_learner import TorchLearner
from art_cli.models.tokenizer import stop_ids
from art_cli.models.weights import Weights
from art_cli.runs.durable import write_lines
from art_cli.runtime.errors import DataError, LearnerError
from tests.support.models.tiny import tiny_tokenizer, tiny_weights
from tests.support.models.warm_up import warm_up
from tests.support.records.trees import scored, turn

SUM = {
    "messages": [
        {"role": "system", "content": "add"},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "and 2+2"},
        {"role": "assistant", "content": "four"},
    ]
}
OTHER = {"messages": [{"role": "user", "content": "say b"}, {"role": "assistant", "content": "b"}]}


def learner(weights: Weights, **knobs: object) -> TorchLearner:
    shape = {name: knobs.pop(name) for name in list(knobs) if name in TorchLearnerConfig.model_fields}
    seed = knobs.pop("seed", 0)
    section = {"demos": "demos.jsonl", "learning_rate": 1e-3, "batch_size": 2, **knobs}
    return TorchLearner(
        weights,
        LearnerSetup(
            train=TrainConfig.model_validate({"learning_rate": 1e-5, "seed": seed}),
            loss=GrpoConfig(),
            learner=TorchLearnerConfig.model_validate({"micro_batch_tokens": 40, **shape}),
            sft=SftConfig.model_validate(section),
        ),
    )


def trained_text(demo: dict[str, object]) -> list[str]:
    tokenizer = tiny_tokenizer()
    samples = demo_samples(demo, tokenizer, name="demo 1", max_length=1000)
    return [tokenizer.decode(sample.token_ids[sample.targets]) for sample in samples]


def test_trains_each_reply_up_to_its_stop_token_and_nothing_else() -> None:
    assert trained_text(SUM) == ["2<|im_end|>four<|im_end|>"]


@pytest.mark.parametrize(
    ("eos", "template", "stops"),
    [("<|im_end|>", True, ["<|im_end|>"]), ("<|endoftext|>", True, ["<|endoftext|>", "<|im_end|>"]),
     ("<|endoftext|>", False, ["<|endoftext|>"])],
)  # fmt: skip
def test_a_reply_ends_where_the_template_ends_its_turn(eos: str, template: bool, stops: list[str]) -> None:
    """A base model's own end is <|endoftext|>, whatever template it is given: engine and warm-up end at <|im_end|>."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = eos
    if not template:
        tokenizer.chat_template = None
    assert tokenizer.convert_ids_to_tokens(stop_ids(tokenizer)) == stops
    if template:
        [sample] = demo_samples(SUM, tokenizer, name="", max_length=1000)
        assert tokenizer.decode(sample.token_ids[sample.targets]) == "2<|im_end|>four<|im_end|>"
        weights = tiny_weights()
        weights.tokenizer = tokenizer
        assert EmbeddedEngine(weights, name="x", config=EmbeddedEngineConfig())._stop_ids == stop_ids(tokenizer)


def test_the_ends_that_a_generation_configuration_names_are_enough() -> None:
    """Gemma's tokenizer ends with <eos>, its generation configuration names <end_of_turn> too."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    end, configuration = tokenizer.convert_tokens_to_ids("<|im_end|>"), SimpleNamespace(eos_token_id=[1, 258])
    assert stop_ids(tokenizer, configuration) == [1, tokenizer.eos_token_id, end] and end == 258


def test_trains_tool_calls_as_the_template_writes_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    demo = {"messages": [SUM["messages"][1], {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": []}
    assert trained_text(demo) == ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>']


def test_a_template_that_leaves_calls_out_is_refused() -> None:
    """It would teach an empty reply instead of the call."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "find", "arguments": "{}"}}
    demo = {"messages": [SUM["messages"][1], {"role": "assistant", "content": None, "tool_calls": [call]}]}
    with pytest.raises(LearnerError, match="demo 1, message 2: .* leaves out its tool calls.* model.chat_template"):
        demo_samples(demo, tokenizer, name="demo 1", max_length=1000)


def test_a_template_that_rewrites_history_gives_a_sample_per_reply() -> None:
    """Each reply is learnt after the prompt that it will be sampled after: here, one with old replies blanked."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{{ '...' if m.role == 'assistant' and not loop.last else m.content }}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    first, second = demo_samples(SUM, tokenizer, name="demo 1", max_length=1000)
    assert tokenizer.decode(first.token_ids).endswith("assistant\n2<|im_end|>")
    assert tokenizer.decode(second.token_ids[second.targets]) == "four<|im_end|>"
    assert "assistant\n...<|im_end|>" in tokenizer.decode(second.token_ids)


def test_loss_is_the_mean_cross_entropy_of_the_assistant_tokens() -> None:
    """Of all of the batch's tokens at once, whatever transcript they are of; the update is plain AdamW's."""
    weights, plain = tiny_weights(), tiny_weights()
    metrics = warm_up(learner(weights), [SUM, OTHER])
    logits, targets = [], []
    for demo in (SUM, OTHER):
        [sample] = demo_samples(demo, plain.tokenizer, name="", max_length=1000)
        out = plain.model(torch.tensor(sample.token_ids)[None]).logits[0]
        logits.append(out[sample.targets - 1])
        targets.append(torch.tensor(sample.token_ids[sample.targets]))
    loss = cross_entropy(torch.cat(logits), torch.cat(targets))
    trained = [parameter for parameter in plain.model.parameters() if parameter.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
    adamw.step()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert metrics["tokens_trained"] == 2 + 5 + 2
    for ours, theirs in zip(weights.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_sft_learns_its_transcripts_and_leaves_the_rl_optimizer_untouched() -> None:
    trained = learner(tiny_weights(), epochs=30, learning_rate=1e-2)
    metrics = warm_up(trained, [SUM, OTHER])
    assert metrics["loss"] < 0.3 * metrics["loss_first"]
    assert metrics["num_updates"] == 30
    assert trained.optimizer.counts.num_updates == 0
    assert trained.weights.version == 1


@pytest.mark.parametrize("seed", [0, -1], ids=["zero", "negative"])
def test_the_order_of_an_epoch_is_seeded(seed: int) -> None:
    numbers = {"epochs": 2, "batch_size": 1, "seed": seed}
    losses = [warm_up(learner(tiny_weights(), **numbers), [SUM, OTHER])["loss"] for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("demo", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({"messages": [*OTHER["messages"][:1], {"role": "assistant", "content": "b" * 2000}]}, "over the model's 1024"),
    ],
)
def test_refuses_a_transcript_it_cannot_train_on(demo: dict[str, object], message: str) -> None:
    with pytest.raises(LearnerError, match=f"demo 2.*{message}"):
        warm_up(learner(tiny_weights()), [SUM, demo])


def test_a_transcript_too_long_is_named_by_file_and_line(tmp_path: Path) -> None:
    long = {"messages": [*OTHER["messages"][:1], {"role": "assistant", "content": "b" * 2000}]}
    (tmp_path / "demos.jsonl").write_text(f"{json.dumps(SUM)}\n\n{json.dumps(long)}\n")
    with pytest.raises(LearnerError, match=r"demos.jsonl:3, message 2: .* over the model's 1024"):
        warm_up(learner(tiny_weights()), load_demos("demos.jsonl", tmp_path))


def test_reads_transcripts_and_names_the_line_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(SUM) + "\n")
    assert load_demos("demos.jsonl", tmp_path) == [{**SUM, "tools": [], "source": f"{path}:1"}]
    path.write_text(json.dumps(SUM) + "\n" + json.dumps({"messages": [{"role": "user"}]}) + "\n")
    with pytest.raises(DataError, match=r"demos.jsonl:2: no assistant message to learn from"):
        load_demos("demos.jsonl", tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_demos("nowhere.jsonl", tmp_path)


def test_reads_transcripts_from_a_function(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(f"def demos():\n    yield {SUM!r}\ndef broken():\n    return [{{}}]\n")
    assert load_demos("make.py:demos", tmp_path) == [{**SUM, "tools": [], "source": "make.py:demos, item 1"}]
    with pytest.raises(DataError, match="make.py:broken, item 1: .*messages"):
        load_demos("make.py:broken", tmp_path)


def test_batches_of_about_equal_numbers_of_tokens() -> None:
    assert even_bounds(np.array([5, 1, 1, 1]), 2).tolist() == [0, 1, 4]
    assert even_bounds(np.array([1, 1, 9]), 3).tolist() == [0, 1, 2, 3]
    assert even_bounds(np.array([9, 1, 1]), 3).tolist() == [0, 1, 2, 3]
    examples = [[bare_sample(np.arange(n + 1), np.arange(1, n + 1), str(n))] for n in range(1, 21)]
    batches = SftBatches(examples, SftConfig(demos="", batch_tokens=42, epochs=2), seed=0)
    assert batches.num_updates == 10  # 210 tokens in 5 batches, twice
    for first in (0, 5):
        dealt = [batches.batch(index) for index in range(first, first + 5)]
        assert sorted(s.trajectory_id for each in dealt for s in each) == sorted(map(str, range(1, 21)))
        assert all(22 <= sum(len(s.targets) for s in each) <= 62 for each in dealt)


def test_the_gradient_of_attempts_is_the_same_for_every_packing(tmp_path: Path) -> None:
    """Two attempts that share a beginning and branch: as trees, as rows, in large and small packs."""
    prompt, turns = list(range(5, 30)), []
    for token in (40, 50):
        turns.append([turn(prompt, [token, 41], temperature=0.8), turn([7], [8, 9], parent=0, kept=26)])
    write_lines(tmp_path / "scored.jsonl", [scored(each, 1.0, index=index) for index, each in enumerate(turns)])
    attempts = best_attempts(tmp_path / "scored.jsonl", 2, min_reward=1.0)
    moments = []
    for packing, size in (("tree", 40), ("tree", 500), ("rows", 40)):
        one = learner(tiny_weights(), packing=packing, micro_batch_tokens=size, epochs=2)
        one.begin_sft(attempts)
        one.take_sft(1)
        assert one.warm_up is not None
        moments.append(one.warm_up.optimizer.tensors())
    for other in moments[1:]:
        for name, tensor in moments[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_evaluation_loss_is_the_cross_entropy_of_what_is_not_trained() -> None:
    plain = tiny_weights()
    numbers = warm_up(learner(tiny_weights(), epochs=3, eval_every=2), [OTHER], [SUM])
    [sample] = demo_samples(SUM, plain.tokenizer, name="", max_length=1000)
    out = plain.model(torch.tensor(sample.token_ids)[None]).logits[0]
    loss = cross_entropy(out[sample.targets - 1], torch.tensor(sample.token_ids[sample.targets]))
    assert numbers["eval_loss_first"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert numbers["num_evaluations"] == 3  # after 0, 2 and 3 updates
    assert numbers["eval_loss"] != numbers["eval_loss_first"]


def test_an_early_stop_keeps_the_best_weights_and_can_be_resumed_anywhere(tmp_path: Path) -> None:
    """What is trained on contradicts what is evaluated, so the loss falls while both learn the format, then rises."""
    held_out = [{"messages": [OTHER["messages"][0], {"role": "assistant", "content": "a"}]}]
    knobs = {"epochs": 30, "learning_rate": 3e-3, "patience": 2, "eval_every": 1}

    reported: list[tuple[int, int]] = []

    def finish(one: TorchLearner) -> SftProgress:
        taken = one.take_sft(99, progress=lambda *numbers: reported.append(numbers))
        assert taken.is_done
        return taken

    whole = learner(tiny_weights(), **knobs)
    whole.begin_sft([OTHER], held_out)
    taken = finish(whole)
    best = int(taken.numbers["best_update"])
    assert 0 < best == taken.num_updates - 2
    assert [done for done, _ in reported] == sorted([*range(taken.num_updates), *range(taken.num_updates + 1)]), (
        "a pack of each update, and one of each evaluation"
    )
    assert taken.numbers["eval_loss"] == taken.numbers["eval_loss_best"] < taken.numbers["eval_loss_first"]
    short = learner(tiny_weights(), **knobs)
    short.begin_sft([OTHER], held_out)
    for cut in range(1, taken.num_updates):
        short.take_sft(1)
        if cut == best:
            for ours, theirs in zip(whole.parameters.values(), short.parameters.values(), strict=True):
                assert torch.equal(ours, theirs)
        if cut in (best, best + 1):
            (place := tmp_path / str(cut)).mkdir()
            short.save(place)
            again = learner(tiny_weights(), **knobs)
            again.begin_sft([OTHER], held_out)
            again.load(place)
            other = finish(again)
            assert {**other.numbers, "train_s": 0, "eval_s": 0} == {**taken.numbers, "train_s": 0, "eval_s": 0}
            for ours, theirs in zip(whole.parameters.values(), again.parameters.values(), strict=True):
                assert torch.equal(ours, theirs)


def test_the_rate_decays_to_the_last_update() -> None:
    one = learner(tiny_weights(), epochs=4, batch_size=1, warmup_steps=2, decay="linear", decay_to=0.5)
    one.begin_sft([OTHER])
    assert one.warm_up is not None
    used = []

    def note(adamw: torch.optim.Optimizer, *_: object) -> None:
        used.append(adamw.param_groups[0]["lr"] / 1e-3)

    watched = register_optimizer_step_pre_hook(note)
    for _ in range(4):
        one.take_sft(1)
    watched.remove()
    assert used == pytest.approx([0.5, 1, 1, 0.75])
    with pytest.raises(LearnerError, match="leave none of the 1 updates"):
        learner(tiny_weights(), warmup_steps=2, decay="linear").begin_sft([OTHER])
