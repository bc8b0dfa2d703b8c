"""One optimizer step of the loop that one writes by hand with transformers and PEFT: the plain side of a training step.

Rows of a prompt and its reply in micro-batches, the logits of the reply alone, GRPO's loss, backward, clip, AdamW.
"""

from typing import Any

from benchmarks.shared.sides import Memory
from benchmarks.step.batches import SETTINGS

CLIP = 0.2


class PeftStep:
    def __init__(self, model: Any, inputs: dict[str, Any], batch: int) -> None:
        """`inputs` is what TRL's generation would give (benchmarks/step/learner.py); `batch`: rows of a micro-batch."""
        import torch

        self.model, self.inputs, self.batch = model.train(), inputs, batch
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=SETTINGS["learning_rate"])
        self.last_norm = 0.0
        self.memory = Memory()

    def step(self) -> None:
        import torch

        for start in range(0, len(self.inputs["prompt_ids"]), self.batch):
            self._loss(slice(start, start + self.batch)).backward()
        self.last_norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, SETTINGS["max_grad_norm"]))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def norm(self) -> float:
        return self.last_norm

    def peak(self) -> float:
        return self.memory.peak()

    def _loss(self, rows: slice) -> Any:
        import torch
        from torch.nn import functional as F

        prompts, replies = self.inputs["prompt_ids"][rows], self.inputs["completion_ids"][rows]
        masks = [self.inputs[f"{part}_mask"][rows] for part in ("prompt", "completion")]
        logits = self.model(
            input_ids=torch.cat([prompts, replies], 1),
            attention_mask=torch.cat(masks, 1),
            use_cache=False,
            logits_to_keep=replies.shape[1] + 1,
        ).logits[:, :-1]
        logprobs = -F.cross_entropy(logits.flatten(0, 1), replies.flatten(), reduction="none").view_as(replies)
        ratios, advantages = (logprobs - logprobs.detach()).exp(), self.inputs["advantages"][rows, None]
        gains = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
        return -(gains * masks[1]).sum() / self.inputs["num_items_in_batch"]
