"""The `train`, `sft`, `eval`, `stop` and `learner` sections: training, warm-up, evaluation, stop rules, the trainer.

A rule of `stop` pauses a run, or warns, by any metric, by its hours, or by its cost. `learner` has one class for each
learner.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, field_validator, model_validator

from art_cli.config.sections.base_config import (
    MAX_PROCESSES,
    Count,
    Device,
    Float,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    UnitInterval,
    WeightsAt,
)
from art_cli.config.sections.judge_config import JudgeModelConfig, PriceConfig, ShadowName
from art_cli.config.sections.rollout_config import Scenarios

MAX_NODES = 256


class BaseLearnerConfig(Section):
    trains_weights: ClassVar[bool] = True  # False: a step changes the prompt
    imports_first: ClassVar[bool] = False  # True: it patches torch and transformers when it is imported
    device: Device = "auto"
    """The torch device. auto: the GPU if there is one."""
    micro_batch_tokens: PositiveInt | None = None
    """The number of tokens in one forward pass. More tokens take more memory; the gradient is the same. null: 8192 on a
    GPU, and 1024 on a CPU, where more is slower (but as many as a tree needs)."""
    gradient_checkpointing: bool | PositiveInt | Literal["auto"] = "auto"
    """true: activations are recomputed in the backward pass, which takes far less memory and a third more time. A
    number: only in forward passes of at least that many tokens. auto: on a GPU the number of tokens whose activations
    fill half of what weights and engine leave of it; on a CPU false. The gradient is the same."""
    offload_optimizer: bool = False
    """true: AdamW's state is in the host's memory, and updates are computed on the CPU. This saves 8 bytes of GPU
    memory per trained weight. The update is the same."""
    packing: Literal["auto", "tree", "rows"] = "auto"
    """tree: tokens that samples share are computed once. rows: one row per sample. auto: tree if it saves some
    percent of the tokens, which is nearly always the case. The gradient is the same."""
    processes: Annotated[PositiveInt, Field(le=MAX_PROCESSES)] = 1
    """The number of processes that share the packs of an update and shard the model (FSDP2), each on another GPU, or
    all on the CPU. The gradient is the same. With more than one, the engine has a separate copy of the weights."""
    nodes: Annotated[PositiveInt, Field(le=MAX_NODES)] = 1
    """The number of machines that share the packs of an update, each with `processes` processes. This machine is the
    first; each other one runs `art join CONFIG`. The gradient is the same."""
    rendezvous: str | None = None
    """HOST:PORT at which the nodes meet: an address of the machine that runs `art train`, and a free port there.
    Used with `nodes` above 1."""
    shard: Literal["node", "all"] = "node"
    """The processes over which the model is sharded. node: each node holds the whole model, and only gradients go
    between nodes. all: one copy over all processes of all nodes, for a model that one node cannot hold; every
    layer's weights then go over the network in each pass."""
    join_timeout_s: Seconds = 600.0
    """The longest wait for the other nodes."""

    @property
    def num_ranks(self) -> int:
        """The number of processes on all machines together."""
        return self.nodes * self.processes

    @property
    def weights(self) -> WeightsAt:
        """The place of the weights that it trains."""
        return "here" if self.num_ranks == 1 else "process"

    @field_validator("rendezvous")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is not None:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
                raise ValueError("HOST:PORT, such as 10.0.0.4:29500")
        return address


class AutoLearnerConfig(BaseLearnerConfig):
    """The torch learner: auto is another name for torch, which trains packs."""

    name: Literal["auto"] = "auto"


class TorchLearnerConfig(BaseLearnerConfig):
    """torch and PEFT, on a CPU or one GPU."""

    name: Literal["torch"] = "torch"


class UnslothLearnerConfig(BaseLearnerConfig):
    """The torch learner with a policy that Unsloth loads: LoRA adapters on a base in 16 or 4 bits."""

    imports_first = True

    name: Literal["unsloth"]


class TinkerLearnerConfig(Section):
    """The server of `engine: tinker`, which holds the weights and trains them."""

    device: ClassVar[str] = "auto"  # where a policy is loaded all the same, as `art export` does
    processes: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    num_ranks: ClassVar[int] = 1
    weights: ClassVar[WeightsAt] = "server"
    trains_weights: ClassVar[bool] = True
    imports_first: ClassVar[bool] = False

    name: Literal["tinker"]

    @model_validator(mode="before")
    @classmethod
    def _has_no_processes(cls, given: Any) -> Any:
        if isinstance(given, dict) and (named := [key for key in ("nodes", "processes", "rendezvous") if key in given]):
            keys = " and ".join(f"learner.{key}" for key in named)
            raise ValueError(
                f"'tinker' trains on a server, where {keys} has no effect; leave it out, or train with learner=torch"
            )
        return given


PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=40)]


class PromptLearnerConfig(Section):
    """The policy is a prompt: a step is a round of reflective prompt search, and no weight changes. It works for any
    engine, also an endpoint whose model cannot be trained (docs/prompt.md)."""

    device: ClassVar[str] = "auto"  # where the engine's model is loaded, if it is one of this machine
    processes: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    num_ranks: ClassVar[int] = 1
    weights: ClassVar[WeightsAt] = "process"  # the engine has them alone
    trains_weights: ClassVar[bool] = False
    imports_first: ClassVar[bool] = False

    name: Literal["prompt"]
    parts: dict[PartName, Path] = {}
    """Text files with the prompt's parts, by name and in order: {role: role.txt, rules: rules.txt}. Each round changes
    one part. {}: one part, `instructions`, that begins empty."""
    place: Literal["after", "instead"] = "after"
    """The place of the prompt in each call of the agent. after: behind the system message that the agent sends, or as
    one if it sends none. instead: in the place of that message."""
    model: str | None = None
    """The model that reads attempts and writes the next prompt, named as `judge.model`. null: the judge's model, with
    the judge's other settings for it."""
    base_url: str | None = None
    """As `judge.base_url`."""
    api_key_env: str | None = None
    """As `judge.api_key_env`."""
    params: dict[str, JsonValue] = {}
    """As `judge.params`."""
    price: PriceConfig | None = None
    """As `judge.price`."""

    @property
    def member(self) -> JudgeModelConfig | None:
        """The model that reflects, or None if it is the judge's."""
        if self.model is None:
            return None
        keys = ("model", "base_url", "api_key_env", "params", "price")
        return JudgeModelConfig.model_validate({key: getattr(self, key) for key in keys} | {"response_format": "text"})

    @model_validator(mode="after")
    def _names_a_model(self) -> Self:
        unused = [name for name in ("base_url", "api_key_env", "params", "price") if getattr(self, name)]
        if self.model is None and unused:
            raise ValueError(f"used with learner.model only: {', '.join(unused)}")
        if self.model is not None and self.model.startswith("builtin:"):
            raise ValueError(f"{self.model} writes no text; name a model")
        if self.place == "instead" and not self.parts:
            raise ValueError("place: instead takes the agent's system message away; name what it begins with in parts")
        return self


def _named(learner: Section) -> Section:
    if not isinstance(learner, AutoLearnerConfig):
        return learner
    return TorchLearnerConfig.model_validate(learner.model_dump(exclude={"name"}, exclude_unset=True))


LearnerConfig = Annotated[
    AutoLearnerConfig | TorchLearnerConfig | UnslothLearnerConfig | TinkerLearnerConfig | PromptLearnerConfig,
    Field(discriminator="name"),
    AfterValidator(_named),
]


BOUNDS = ("above", "below", "below_best_by")


class StopRule(Section):
    """One of four kinds: a `metric` with a bound, `parts_from`, `hours`, or `usd`."""

    metric: str | None = None
    """A metric of a training step, by its name in metrics.jsonl, such as `reward_mean`, `no_signal_share`, `entropy`,
    `logprob_gap`, `truncated_share` or `metrics.NAME` for one that rollouts report; or of an evaluation:
    `eval.reward`."""
    above: Float | None = None
    """The rule fires when the metric is above this."""
    below: Float | None = None
    """The rule fires when the metric is below this."""
    below_best_by: PositiveFloat | None = None
    """The rule fires when the metric is at least this much below its best value in the run. With `for_steps`, means
    over that many steps in a row are compared."""
    for_steps: PositiveInt = 1
    """The number of steps in a row in which the metric must be above or below; for `eval.` metrics, of evaluations.
    Steps without the metric do not count."""
    parts_from: ShadowName | None = None
    """The name of a judge of the `shadow` section. The rule fires when the reward parts from that judge's score, by a
    sequential test that compares with the first ten steps and is wrong in at most 1 % of runs."""
    hours: PositiveFloat | None = None
    """The rule fires at the end of the step at which all starts of the run together have taken this many hours."""
    usd: PositiveFloat | None = None
    """The rule fires at the end of the step at which the judges' calls in all starts of the run together have cost this
    many dollars. `judge.budget_usd`, in contrast, stops before the call that would exceed it."""
    usd_per_hour: NonNegative = 0.0
    """The price of an hour of the machine, which `usd` then includes."""
    then: Literal["pause", "warn"] = "pause"
    """pause: the run ends with its checkpoint and exit code 1, and the same command resumes it. The rule then starts
    over: it counts later steps only, or as many further hours or dollars. warn: a warning is logged each time the
    rule begins to hold."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [kind for kind in ("metric", "hours", "usd", "parts_from") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError("set exactly one of 'metric', 'hours', 'usd' and 'parts_from'")
        num_bounds = sum(getattr(self, bound) is not None for bound in BOUNDS)
        if self.metric is not None and num_bounds != 1:
            raise ValueError("set exactly one of 'above', 'below' and 'below_best_by' beside 'metric'")
        return self

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
        for knob in (*BOUNDS, "for_steps") if self.metric is None else ():
            if knob in self.model_fields_set and getattr(self, knob) is not None:
                yield knob, "used with 'metric' only"
        if self.usd_per_hour and self.usd is None:
            yield "usd_per_hour", "used with 'usd' only"

    def __str__(self) -> str:
        """Example: "no_signal_share above 0.9 for 5 steps"."""
        if self.parts_from is not None:
            return f"reward parts from shadow {self.parts_from}"
        if self.hours is not None:
            return f"{self.hours:g} hours"
        if self.usd is not None:
            return f"${self.usd:g}" + (f" at ${self.usd_per_hour:g} an hour" if self.usd_per_hour else "")
        kind = "evaluations" if str(self.metric).startswith("eval.") else "steps"
        if self.below_best_by is not None:
            over = f", the mean of {self.for_steps} {kind}," if self.for_steps > 1 else ""
            return f"{self.metric}{over} {self.below_best_by:g} below its best"
        bound = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.metric} {bound}" + (f" for {self.for_steps} {kind}" if self.for_steps > 1 else "")


Beta = Annotated[Float, Field(ge=0, lt=1)]


class TrainConfig(Section):
    """The updates of the policy, and the checkpoints that are kept."""

    steps: PositiveInt = 50
    """The number of steps of the run."""
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """AdamW's learning rate after the warm-up and before any decay. auto: by the width of the model, and for an
    adapter (`model.lora`), which needs about ten times as much, by its `alpha`. For example 4e-4 for an adapter on a
    model of width 576, 1e-4 at 3,584; after `art plan` by what pilot steps at five rates showed. A run keeps the rate
    that auto came to at its first step."""
    warmup_steps: Count = 0
    """The number of steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """The decay of the learning rate from the end of the warm-up to `train.steps`: none, linear, or half a cosine.
    Steps in which no group has signal do not count. If `train.steps` of a run is changed, its later steps follow the
    new schedule."""
    decay_to: UnitInterval = 0.0
    """The final learning rate, at `train.steps`, as a share of `learning_rate`."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's betas, the decay rates of its means of the gradient and of the squared gradient."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    clip_to_history: PositiveFloat | None = None
    """The multiple of the median gradient norm of the last 32 optimizer steps to which a larger gradient is clipped, if
    that is below `max_grad_norm`; from the fifth optimizer step on. 2.0 clips only rare large gradients. null: off."""
    updates_per_step: PositiveInt = 1
    """The number of optimizer steps on each batch of groups, which are divided between them."""
    epochs_per_step: PositiveInt = 4
    """The number of times that each trajectory of a step is trained on. Every epoch makes `updates_per_step` optimizer
    steps. With 4 a policy needs a fraction of the rollouts (benchmarks/results/LEARNING.md); 1 is for runs that are
    limited by
    training."""
    max_kl: PositiveFloat | None = None
    """The largest movement of the policy in a step: KL(before || after) in nats per token, estimated by k3 on the
    trained tokens. An update that exceeds it is halved until it does not, and is the step's last. It takes one more
    forward pass. null: neither measured nor bounded."""
    max_staleness: Count = 0
    """The largest age in steps of the policy that sampled a token, relative to the policy that is trained on it. 0:
    on-policy; engine and learner take turns. 1 or more: later batches are sampled while the learner works, which needs
    `loss.off_policy`."""
    max_logprob_gap: PositiveFloat = 0.1
    """The largest mean difference in nats between the engine's and the learner's logprobs. Above it an on-policy run
    stops, because the two no longer have the same weights."""
    keep_checkpoints: PositiveInt = 3
    """The number of newest checkpoints that are kept, in addition to that of step 0."""
    keep_best: bool = True
    """Whether the checkpoint with the highest evaluated `reward` (the latest of equals) is kept too, and is the one
    that commands take of a run. false: they take the newest. Training always goes on from the newest checkpoint."""
    record_learned: bool = True
    """Whether each step writes `learned.jsonl`, which `art view` reads: the advantages, the learner's
    logprobs and the share of the loss of every trained trajectory. It changes no weight."""
    seed: Seed = 0
    """The seed of the adapter, the order of scenarios and the sampling."""

    @property
    def rate(self) -> float:
        """The learning rate once it is decided (loop/decide.py)."""
        assert self.learning_rate != "auto", "train.learning_rate is decided when the base model is known"
        return self.learning_rate

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
        if "decay_to" in self.model_fields_set and self.decay == "none":
            yield "decay_to", "used with train.decay 'linear' or 'cosine' only"
        if self.decay != "none" and self.warmup_steps >= self.steps:
            yield "decay", f"the warm-up of {self.warmup_steps} steps leaves none of train.steps ({self.steps}) for it"


class SftConfig(Section):
    """A supervised warm-up before the first step. Only the assistant's messages are trained on."""

    demos: str
    """A JSON-lines file of {"messages": [...], "tools": [...]}, or "file.py:function" that returns such objects. With
    `best_of`, a file of scored trajectories or the directory of a run."""
    best_of: PositiveInt | None = None
    """The number of best attempts of each group of scored trajectories to learn from, with the tokens that the policy
    sampled. An attempt must be better than the worst of its group, so a group with equal rewards is left out."""
    min_reward: Float | None = None
    """The lowest reward of an attempt that `best_of` takes, instead of the comparison with the worst of its group.
    Groups in which all attempts succeeded are then learned from too."""
    epochs: PositiveInt = 1
    """The number of times that each example is trained on."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's learning rate after the warm-up steps and before any decay."""
    batch_size: PositiveInt = 16
    """The number of examples per optimizer step."""
    batch_tokens: PositiveInt | None = None
    """The approximate number of trained tokens per optimizer step, instead of `batch_size`. Examples are never
    divided."""
    warmup_steps: Count = 0
    """The number of optimizer steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """The decay of the learning rate from the end of the warm-up steps to the last update, like `train.decay`."""
    decay_to: UnitInterval = 0.0
    """The learning rate at the end of the decay, as a share of `learning_rate`."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """The norm to which a larger gradient is clipped."""
    eval_demos: str | None = None
    """Examples on which the loss is measured and that are not trained on, written like `demos`."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of `demos` on which the loss is measured and that is never trained on, instead of `eval_demos`. It is
    selected by a hash of the transcript, or of the id of the attempt's scenario."""
    eval_every: PositiveInt | None = None
    """The number of updates between evaluations. The first and the last weights are always evaluated. null: one
    epoch."""
    patience: PositiveInt | None = None
    """The number of evaluations without a lower loss after which the warm-up stops; the weights of the best
    evaluation are kept. null: all updates are made, and the last weights are kept."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
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


ONE_OF_BOTH = "set exactly one of 'scenarios' (a file or function) and 'held_out' (a share)"


class EvalConfig(Section):
    """The evaluation of the policy during training and by `art eval`."""

    scenarios: Scenarios | None = None
    """The scenarios to evaluate on, written like `rollout.scenarios`."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of `rollout.scenarios` to evaluate on, which is never trained on, instead of `scenarios`. It is
    selected by a hash of the id, so that scenarios that are added later move no other."""
    every: PositiveInt = 10
    """The number of steps between evaluations. The first and the last policy are always evaluated."""
    attempts: PositiveInt = 1
    """The number of attempts per scenario."""
    temperature: NonNegative | None = None
    """The sampling temperature. null: that of `rollout.sampling`."""
    judge: bool = True
    """Whether a judge gives the reward if rollouts return none. It compares each policy's attempts with those of the
    first evaluated policy, and `reward` is the share that it prefers. false: such evaluations have no reward."""

    @model_validator(mode="after")
    def _one_of_scenarios_and_held_out(self) -> Self:
        if self.scenarios is not None and self.held_out is not None:
            raise ValueError(ONE_OF_BOTH)
        return self
