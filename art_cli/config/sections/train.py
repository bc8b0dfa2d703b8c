"""The `train`, `sft` and `eval` sections: training, the warm-up before it, and evaluation."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from art_cli.config.sections.base import (
    Count,
    Float,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    UnitInterval,
)

Beta = Annotated[Float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """How the policy is updated, and what is kept."""

    steps: PositiveInt = 50
    """The number of steps of the whole run."""
    learning_rate: PositiveFloat = 1e-5
    """AdamW's learning rate after the warm-up and before any decay."""
    warmup_steps: Count = 0
    """The number of steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls from the end of the warm-up to `train.steps`: not at all, evenly, or as half a
    cosine. Steps in which no group has signal do not count. A run that goes on with other `train.steps` has the rates
    of the longer or shorter schedule from there on."""
    decay_to: UnitInterval = 0.0
    """The share of the learning rate that is left at `train.steps`."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's betas: how slowly its means of the gradient and of the squared gradient change."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    clip_to_history: PositiveFloat | None = None
    """A gradient is clipped to this multiple of the median norm of the last 32 optimizer steps, where that is less than
    `max_grad_norm`; from the fifth optimizer step on. 2.0 cuts rare large gradients only. null: off."""
    updates_per_step: PositiveInt = 1
    """The number of optimizer steps on each batch of groups, which are divided between them."""
    epochs_per_step: PositiveInt = 1
    """How often each trajectory of a step is trained on. Every epoch makes `updates_per_step` optimizer steps."""
    max_kl: PositiveFloat | None = None
    """How far a step may move the policy: KL(before || after) in nats per token, estimated on the sampled tokens that
    are trained (k3). An update that passes it is halved until it does not, and is the step's last. It takes a forward
    pass more. null: neither measured nor bounded."""
    max_staleness: Count = 0
    """By how many steps the policy that samples a token may be older than the policy that is trained on it. 0:
    on-policy, engine and learner take turns. 1 or more: later batches are sampled while the learner works; needs
    `loss.off_policy`."""
    max_logprob_gap: PositiveFloat = 0.1
    """The mean difference in nats between the engine's and the learner's logprobs at which an on-policy run stops,
    because they no longer hold the same weights."""
    keep_checkpoints: PositiveInt = 3
    """The number of newest checkpoints that are kept. Step 0 is kept besides."""
    keep_best: bool = True
    """Whether the checkpoint with the highest evaluated `reward`, of equals the latest, is kept besides and is the one
    that `art serve RUN`, `art export RUN` and `art eval --checkpoint RUN` take. false: they take the newest. A run is
    always resumed from its newest."""
    seed: Seed = 0
    """The seed of the adapter, the order of scenarios and the sampling."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(knob, message) for each knob that is set and has no effect."""
        if "decay_to" in self.model_fields_set and self.decay == "none":
            yield "decay_to", "used with train.decay 'linear' or 'cosine' only"
        if self.decay != "none" and self.warmup_steps >= self.steps:
            yield "decay", f"the warm-up of {self.warmup_steps} steps leaves none of train.steps ({self.steps}) for it"


class SftConfig(Section):
    """A warm-up on chat transcripts before the first step; only the assistant's tokens are trained on."""

    demos: str
    """A JSON-lines file of {"messages": [...], "tools": [...]}, or "file.py:function" that returns such objects."""
    epochs: PositiveInt = 1
    """How often each transcript is trained on."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's learning rate, constant after the warm-up steps."""
    batch_size: PositiveInt = 16
    """The number of transcripts per optimizer step."""
    warmup_steps: Count = 0
    """The number of optimizer steps over which the learning rate grows from 0."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""


class EvalConfig(Section):
    """How the policy is evaluated while it is trained, and by `art eval`."""

    scenarios: str | None = None
    """The scenarios to evaluate on, written as `rollout.scenarios` is."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Instead of `scenarios`: the share of `rollout.scenarios` to evaluate on, which is never trained on. A hash of the
    id says which they are, so that scenarios that are added later move no other."""
    every: PositiveInt = 10
    """The number of steps between evaluations. The first and the last policy are always evaluated."""
    attempts: PositiveInt = 1
    """The number of attempts per scenario."""
    temperature: NonNegative | None = None
    """The sampling temperature. null: that of `rollout.sampling`."""
    judge: bool = True
    """Whether a judge gives the reward where rollouts return none. It compares each policy's attempts with those of the
    first policy that was evaluated, and `reward` is the share that it prefers. false: such evaluations have no
    reward."""

    @model_validator(mode="after")
    def _one_of_scenarios_and_held_out(self) -> Self:
        if (self.scenarios is None) == (self.held_out is None):
            raise ValueError("set exactly one of 'scenarios' (a file or function) and 'held_out' (a share)")
        return self
