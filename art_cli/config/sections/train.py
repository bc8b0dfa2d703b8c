"""The `train`, `sft` and `eval` sections: training, the warm-up before it, and evaluation."""

from art_cli.config.sections.base import Count, NonNegative, PositiveFloat, PositiveInt, Section, Seed


class TrainConfig(Section):
    """How the policy is updated, and what is kept."""

    steps: PositiveInt = 50
    """The number of steps of the whole run."""
    learning_rate: PositiveFloat = 1e-5
    """AdamW's learning rate, constant after the warm-up."""
    warmup_steps: Count = 0
    """The number of steps over which the learning rate grows from 0."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    updates_per_step: PositiveInt = 1
    """The number of optimizer steps on each batch of groups, which are divided between them."""
    max_staleness: Count = 0
    """By how many steps the policy that samples a token may be older than the policy that is trained on it. 0:
    on-policy, engine and learner take turns. 1 or more: later batches are sampled while the learner works; needs
    `loss.importance_cap`."""
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

    scenarios: str
    """The scenarios to evaluate on, written as `rollout.scenarios` is."""
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
