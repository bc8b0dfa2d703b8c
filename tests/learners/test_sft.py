"""Supervised training on transcripts: which tokens, which loss, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from art_cli.config.schema import GrpoConfig, SftConfig, TorchLearnerConfig, TrainConfig
from art_cli.errors import DataError, LearnerError
from art_cli.learners.demos import demo_samples, load_demos
from art_cli.learners.torch_learner import TorchLearner
from art_cli.model import Weights
from tests.support.tiny import tiny_tokenizer, tiny_weights
from tests.support.warm_up import warm_up

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
    section = {"demos": "demos.jsonl", "learning_rate": 1e-3, "batch_size": 2, **knobs}
    return TorchLearner(
        weights,
        train=TrainConfig(),
        loss=GrpoConfig(),
        learner=TorchLearnerConfig(micro_batch_tokens=40),
        sft=SftConfig.model_validate(section),
    )


def trained_text(demo: dict[str, object]) -> list[str]:
    tokenizer = tiny_tokenizer()
    samples = demo_samples(demo, tokenizer, name="demo 1", max_length=1000)
    return [tokenizer.decode(sample.token_ids[sample.targets]) for sample in samples]


def test_trains_each_reply_up_to_its_stop_token_and_nothing_else() -> None:
    assert trained_text(SUM) == ["2<|im_end|>four<|im_end|>"]


def test_trains_tool_calls_as_the_template_writes_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    demo = {"messages": [SUM["messages"][1], {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": []}
    assert trained_text(demo) == ['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>']


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


def test_sft_learns_its_transcripts_and_leaves_the_rl_optimizer_untouched() -> None:
    trained = learner(tiny_weights(), epochs=30, learning_rate=1e-2)
    metrics = warm_up(trained, [SUM, OTHER])
    assert metrics["loss"] < 0.3 * metrics["loss_first"]
    assert metrics["num_updates"] == 30
    assert trained.optimizer.counts.num_updates == 0
    assert trained.weights.version == 1


def test_the_order_of_an_epoch_is_seeded() -> None:
    losses = [warm_up(learner(tiny_weights(), epochs=2, batch_size=1), [SUM, OTHER])["loss"] for _ in range(2)]
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


def test_reads_transcripts_and_names_the_line_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(json.dumps(SUM) + "\n")
    assert load_demos("demos.jsonl", tmp_path) == [{**SUM, "tools": []}]
    path.write_text(json.dumps(SUM) + "\n" + json.dumps({"messages": [{"role": "user"}]}) + "\n")
    with pytest.raises(DataError, match=r"demos.jsonl:2: no assistant message to learn from"):
        load_demos("demos.jsonl", tmp_path)
    with pytest.raises(DataError, match="no such file"):
        load_demos("nowhere.jsonl", tmp_path)


def test_reads_transcripts_from_a_function(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(f"def demos():\n    yield {SUM!r}\ndef broken():\n    return [{{}}]\n")
    assert load_demos("make.py:demos", tmp_path) == [{**SUM, "tools": []}]
    with pytest.raises(DataError, match="make.py:broken, item 1: .*messages"):
        load_demos("make.py:broken", tmp_path)
