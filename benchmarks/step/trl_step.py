"""One optimizer step of TRL's GRPOTrainer on a recorded batch: the other side where training is measured alone.

Timed is its training_step for each micro-batch (_prepare_inputs, which slices the recorded batch, compute_loss,
backward), accelerate's clip and AdamW. Neither its generation and scoring nor its callbacks are.
"""

from typing import Any

from benchmarks.shared.sides import Memory
from benchmarks.step.batches import SETTINGS


class TrlStep:
    """TRL's trainer, given a recorded batch in place of what it would generate."""

    def __init__(self, model: Any, inputs: dict[str, Any], batch: int) -> None:
        """`inputs` is what its generation would give for the whole step; `batch` is the sequences of a micro-batch."""
        import torch

        self.inputs = inputs
        self.num = len(self.inputs["prompt_ids"])
        self.rounds = self.num // batch
        self.trainer: Any = _trainer(model, self.num, batch)
        self.trainer._generate_and_score_completions = lambda _: dict(self.inputs)
        self.trainer.current_gradient_accumulation_steps = self.rounds
        self.trainer.create_optimizer()
        self.trainer.model.train()
        self.count = torch.tensor(int(self.inputs["num_items_in_batch"]))
        self.memory = Memory()

    def step(self) -> None:
        self._accumulate()
        parameters, limit = self.trainer.model.parameters(), SETTINGS["max_grad_norm"]
        self.last_norm = float(self.trainer.accelerator.clip_grad_norm_(parameters, limit))
        self.trainer.optimizer.step()
        self.trainer.model.zero_grad()

    def norm(self) -> float:
        return self.last_norm

    def peak(self) -> float:
        return self.memory.peak()

    def gradient(self) -> dict[str, Any]:
        self._accumulate()
        named = self.trainer.model.named_parameters()
        taken = {name: p.grad.numpy().copy() for name, p in named if p.grad is not None}
        self.trainer.model.zero_grad()
        return taken

    def _accumulate(self) -> None:
        for index in range(self.rounds):
            self.trainer.accelerator.gradient_state._set_sync_gradients(index == self.rounds - 1)
            self.trainer.training_step(self.trainer.model, None, self.count)


def _trainer(model: Any, num: int, batch: int) -> Any:
    import tempfile
    import warnings

    import datasets
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    warnings.simplefilter("ignore")
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="trl-"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=num // batch,
        num_generations=8,
        num_iterations=1,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the batch, with one clip: our grpo
        learning_rate=SETTINGS["learning_rate"],
        max_grad_norm=SETTINGS["max_grad_norm"],
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "x"}] * num),
        processing_class=_tokenizer(),
    )


def _tokenizer() -> Any:
    """The smallest that TRL takes; the recorded batch is token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"x": 0, "<pad>": 1, "<eos>": 2}, unk_token="x"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
