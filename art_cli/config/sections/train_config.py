"""The `train`, `sft` and `eval` sections: training, the warm-up before it, and evaluation."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from art_cli.config.sections.base_config import (
    Count,
    Float,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    UnitInterval,
)
from art_cli.config.sections.scenarios_config import Scenarios

Beta = Annotated[Float, Field(ge=0, lt=1)]

# SmolLM2-135M-Instruct with an adapter of rank 16, picking one of two numbers: 1e-5 learns nothing in 4 steps, 2e-4
# goes from 0.28 to 0.86, and 1e-4 to 1e-3 all end at 0.97 to 1.0.
ADAPTER_RATE = 2e-4


class TrainConfig(Section):
    """How the policy is updated, and what is kept."""

    steps: PositiveInt = 50
    """The number of steps of the whole run."""
    learning_rate: PositiveFloat = 1e-5
    """AdamW's learning rate after the warm-up and before any decay. Without this key an adapter (`model.lora`) is
    trained with 2e-4, because at the rate that is right for whole weights it hardly moves."""
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
    epochs_per_step: PositiveInt = 4
    """How often each trajectory of a step is trained on. Every epoch makes `updates_per_step` optimizer steps. With 4 a
    policy learns from a fraction of the rollouts (benchmarks/LEARNING.md); 1 is for runs that wait for the training."""
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
    record_learned: bool = True
    """Whether each step writes `learned.jsonl`: the advantages, the learner's logprobs and the share of the loss of
    every trajectory that it trained on, which `art view` reads. It changes no weight."""
    seed: Seed = 0
    """The seed of the adapter, the order of scenarios and the sampling."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(knob, message) for each knob that is set and has no effect."""
        if "decay_to" in self.model_fields_set and self.decay == "none":
            yield "decay_to", "used with train.decay 'linear' or 'cosine' only"
        if self.decay != "none" and self.warmup_steps >= self.steps:
            yield "decay", f"the warm-up of {self.warmup_steps} steps leaves none of train.steps ({self.steps}) for it"


class SftConfig(Section):
    """A supervised warm-up before the first step; only what the assistant writes is trained on."""

    demos: str
    """A JSON-lines file of {"messages": [...], "tools": [...]}, or "file.py:function" that returns such objects. With
    `best_of`: scored trajectories, a file or the directory of a run."""
    best_of: PositiveInt | None = None
    """Learn from scored trajectories: from the best that many attempts of each group, with the tokens that the policy
    sampled. They must be better than the worst of their group, so a group with equal rewards is left out."""
    min_reward: Float | None = None
    """The lowest reward of an attempt that `best_of` takes, instead of the comparison with the worst of its group. So
    a group in which all succeeded is learned from too."""
    epochs: PositiveInt = 1
    """How often each example is trained on."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's learning rate after the warm-up steps and before any decay."""
    batch_size: PositiveInt = 16
    """The number of examples per optimizer step."""
    batch_tokens: PositiveInt | None = None
    """Instead of `batch_size`: about how many trained tokens an optimizer step has. Its examples are whole."""
    warmup_steps: Count = 0
    """The number of optimizer steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """How the learning rate falls from the end of the warm-up steps to the last update, as `train.decay`."""
    decay_to: UnitInterval = 0.0
    """The share of the learning rate that is left at the end of the decay."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    eval_demos: str | None = None
    """Examples that the loss is measured on and that are not trained on, written as `demos`."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Instead of `eval_demos`: the share of `demos` that the loss is measured on and that is never trained on. A hash
    of the transcript, or the id of an attempt's scenario, says which they are."""
    eval_every: PositiveInt | None = None
    """The number of updates between two evaluations. The first and the last weights are always evaluated. null: the
    updates of an epoch."""
    patience: PositiveInt | None = None
    """Stops when the evaluation loss has not fallen for that many evaluations, and in any case keeps the weights of the
    best evaluation. null: all updates are taken, and the last weights are kept."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """(knob, message) for each knob that is set and has no effect."""
        if self.min_reward is not None and self.best_of is None:
            yield "min_reward", "used with sft.best_of only"
        if self.batch_tokens is not None and "batch_size" in self.model_fields_set:
            yield "batch_tokens", "takes the place of sft.batch_size, which is set too; leave one of them out"
        if "decay_to" in self.model_fields_set and self.decay == "none":
            yield "decay_to", "used with sft.decay 'linear' or 'cosine' only"
        if self.eval_demos is not None and self.held_out is not None:
            yield "held_out", "takes the place of sft.eval_demos, which is set too; leave one of them out"
        if self.eval_demos is None and self.held_out is None:
            for knob in ("eval_every", "patience"):
                if getattr(self, knob) is not None:
                    yield knob, "used with an evaluation loss only; set sft.eval_demos or sft.held_out"


class EvalConfig(Section):
    """How the policy is evaluated while it is trained, and by `art eval`."""

    scenarios: Scenarios | None = None
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
