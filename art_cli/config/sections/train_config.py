"""The `train`, `sft`, `eval`, `stop` and `learner` sections. `learner` has one class per learner."""

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
BOUNDS = ("above", "below", "below_best_by")
ONE_OF_BOTH = "set exactly one of 'scenarios' (a file or function) and 'held_out' (a share)"


class BaseLearnerConfig(Section):
    trains_weights: ClassVar[bool] = True  # False: a step changes the prompt
    imports_first: ClassVar[bool] = False  # True: its import patches torch and transformers
    device: Device = "auto"
    """The torch device. auto: a GPU if available, else the CPU."""
    micro_batch_tokens: PositiveInt | None = None
    """The tokens per forward pass. More tokens need more memory; the gradient is the same. null: 8192 on a GPU, and
    1024 on a CPU, where more is slower (but enough for a tree)."""
    gradient_checkpointing: bool | PositiveInt | Literal["auto"] = "auto"
    """true: activations are recomputed in the backward pass, with far less memory and a third more time. A number: only
    in forward passes with at least this number of tokens. auto: on a GPU, when activations fill half of the free
    memory; on a CPU, false. The gradient is the same."""
    offload_optimizer: bool = False
    """true: AdamW's state is in host memory, and the CPU computes updates. It saves 8 bytes of GPU memory per trained
    weight. The update is the same."""
    packing: Literal["auto", "tree", "rows"] = "auto"
    """tree: shared tokens are computed once. rows: a row per sample. auto: tree if it saves some percent, which is
    nearly always. The gradient is the same."""
    processes: Annotated[PositiveInt, Field(le=MAX_PROCESSES)] = 1
    """Number of processes that share an update's packs and shard the model (FSDP2), with one GPU per process, or on the
    CPU. The gradient is the same. With several, the engine has a separate copy of the weights."""
    nodes: Annotated[PositiveInt, Field(le=MAX_NODES)] = 1
    """The machines that share an update's packs, each with `processes` processes. The others run
    `art join CONFIG`. The gradient is the same."""
    rendezvous: str | None = None
    """HOST:PORT where nodes meet: an address of the machine with `art train`, and a free port. Used with `nodes` above
    1."""
    shard: Literal["node", "all"] = "node"
    """The sharding of the model. node: every node has the whole model, and only gradients cross the network. all: all
    nodes share one copy, for models larger than a node; every pass sends all weights over the network."""
    join_timeout_s: Seconds = 600.0
    """The longest wait for other nodes."""

    @property
    def num_ranks(self) -> int:
        """Number of processes on all machines."""
        return self.nodes * self.processes

    @property
    def weights(self) -> WeightsAt:
        """Place of the trained weights."""
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
    """The torch learner with Unsloth: LoRA adapters on a base in 16 or 4 bits."""

    imports_first = True

    name: Literal["unsloth"]


class _NoTorchLearnerConfig(Section):
    """A learner that does not train in processes on this machine."""

    device: ClassVar[str] = "auto"  # for other uses of the model, such as `art export`
    processes: ClassVar[int] = 1
    nodes: ClassVar[int] = 1
    num_ranks: ClassVar[int] = 1
    imports_first: ClassVar[bool] = False


class TinkerLearnerConfig(_NoTorchLearnerConfig):
    """The server in `engine: tinker` trains the weights."""

    weights: ClassVar[WeightsAt] = "server"
    trains_weights: ClassVar[bool] = True

    name: Literal["tinker"]

    @model_validator(mode="before")
    @classmethod
    def _has_no_processes(cls, given: Any) -> Any:
        if isinstance(given, dict) and (named := [key for key in ("nodes", "processes", "rendezvous") if key in given]):
            keys = " and ".join(f"learner.{key}" for key in named)
            raise ValueError(
                f"'tinker' trains on a server, where {keys} has no effect; remove it, or train with learner=torch"
            )
        return given


PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$", max_length=40)]


class PromptLearnerConfig(_NoTorchLearnerConfig):
    """The policy is a prompt: a step is a round of reflective prompt search, and no weight changes. It works with any
    engine, also with endpoints that cannot be trained (docs/teachers.md)."""

    weights: ClassVar[WeightsAt] = "process"  # the engine's
    trains_weights: ClassVar[bool] = False

    name: Literal["prompt"]
    parts: dict[PartName, Path] = {}
    """Text files with the prompt's parts, by name and in order: {role: role.txt, rules: rules.txt}. Each round changes
    one part. {}: an empty part `instructions`."""
    place: Literal["after", "instead"] = "after"
    """The prompt's place in each call. after: behind the agent's system message, or as the system message. instead:
    replaces it."""
    model: str | None = None
    """The model that reads attempts and writes the next prompt, named as in `judge.model`. null: the judge's model with
    its settings."""
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
        """The reflecting model. null: the judge's model."""
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


class StopRule(Section):
    """One of four kinds: a `metric` with a bound, `parts_from`, `hours`, or `usd`."""

    metric: str | None = None
    """A metric by its name in metrics.jsonl, such as `reward_mean`, `no_signal_share`, `entropy`, `logprob_gap`,
    `truncated_share`, a rollout's `metrics.NAME`, or an evaluation's `eval.reward`."""
    above: Float | None = None
    """The rule fires when the metric is above this."""
    below: Float | None = None
    """The rule fires when the metric is below this."""
    below_best_by: PositiveFloat | None = None
    """The rule fires when the metric is this much or more below its best value in the run. With `for_steps`, means over
    this number of steps are compared."""
    for_steps: PositiveInt = 1
    """The steps in a row (for `eval.` metrics evaluations) in which the metric must be above or below. Steps without
    the metric do not count."""
    parts_from: ShadowName | None = None
    """A judge in the `shadow` section. The rule fires when reward and shadow score diverge. The sequential test
    compares later steps with steps 1 to 10, with a false alarm in at most 1 % of runs."""
    hours: PositiveFloat | None = None
    """The rule fires after the step in which all starts together exceed these hours."""
    usd: PositiveFloat | None = None
    """The rule fires after the step in which judge calls in all starts together exceed these dollars.
    `judge.budget_usd` stops before the call."""
    usd_per_hour: NonNegative = 0.0
    """The machine's price per hour, which `usd` then includes."""
    then: Literal["pause", "warn"] = "pause"
    """pause: the run saves a checkpoint and ends with exit code 1; running the command again resumes it. The rule then
    starts over: it counts later steps only, or the same hours or dollars again. warn: logs a warning each time the rule
    begins to hold."""

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        kinds = [kind for kind in ("metric", "hours", "usd", "parts_from") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError("set exactly one of 'metric', 'hours', 'usd' and 'parts_from'")
        num_bounds = sum(getattr(self, bound) is not None for bound in BOUNDS)
        if self.metric is not None and num_bounds != 1:
            raise ValueError("set exactly one of 'above', 'below' and 'below_best_by' next to 'metric'")
        return self

    def conflicts(self) -> Iterator[tuple[str, str]]:
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
    """The policy's updates and checkpoints."""

    steps: PositiveInt = 50
    """The run's steps."""
    learning_rate: PositiveFloat | Literal["auto"] = "auto"
    """AdamW's learning rate between warm-up and decay. auto: by the model's width, and for an adapter (`model.lora`),
    which needs about ten times as much, by its `alpha`: 4e-4 for an adapter at width 576, 1e-4 at 3,584; after `art
    plan` by its pilot steps at five rates. A run keeps the rate from its first step."""
    warmup_steps: Count = 0
    """The steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """The decay from the warm-up's end to `train.steps`: none, linear, or half a cosine. Steps without signal do not
    count. If `train.steps` changes, later steps follow the new schedule."""
    decay_to: UnitInterval = 0.0
    """The final learning rate as a share of `learning_rate`."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    """AdamW's betas, the decay rates for its means of gradient and squared gradient."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """A larger gradient is clipped to this norm."""
    clip_to_history: PositiveFloat | None = None
    """A gradient above this multiple of the median norm over the last 32 optimizer steps is clipped to it, if below
    `max_grad_norm`; from the fifth optimizer step on. 2.0 clips only rare large gradients. null: off."""
    updates_per_step: PositiveInt = 1
    """The optimizer steps per batch of groups, which they divide."""
    epochs_per_step: PositiveInt = 4
    """How often a step trains on each trajectory. Every epoch makes `updates_per_step` optimizer steps. With 4 a policy
    needs a fraction of the rollouts (benchmarks/results/LEARNING.md); 1 is for runs that training limits."""
    max_kl: PositiveFloat | Literal["auto"] | None = "auto"
    """The policy's largest movement in a step whose groups all have signal: KL(before || after) in nats per trained
    token, between that token and any other (DPPO's binary KL, arXiv:2602.04879). With signal in a quarter of the
    groups, the bound is a quarter (unless `loss.mean_over` is `trained`). A larger update is shortened until it fits,
    and is the step's last. Near the bound this costs a forward pass. auto: 0.05 for a learner that holds the weights,
    null for a server's. null: neither measured nor bounded."""
    max_staleness: Count = 0
    """The largest age in steps of the policy that sampled a token. 0: on-policy; engine and learner take turns. 1 or
    more: later batches are sampled while the learner works; needs `loss.off_policy`."""
    max_logprob_gap: PositiveFloat = 0.1
    """The largest mean difference in nats between engine and learner logprobs. Above it an on-policy run stops, because
    the weights differ."""
    keep_checkpoints: PositiveInt = 3
    """The newest checkpoints kept, in addition to step 0."""
    keep_best: bool = True
    """Whether the checkpoint with the highest evaluated `reward` (the latest, if equal) is kept, and taken by every
    command that takes a run. false: commands take the newest. A run always resumes from its newest checkpoint."""
    record_learned: bool = True
    """Whether each step writes `learned.jsonl` for `art view`: every trained trajectory's advantages, learner logprobs
    and share of the loss. Weights do not change."""
    seed: Seed = 0
    """The seed for adapter, scenario order and sampling."""

    @property
    def rate(self) -> float:
        """The learning rate; loop/decide.py replaces "auto" before."""
        assert self.learning_rate != "auto", "train.learning_rate is decided when the base model is known"
        return self.learning_rate

    @property
    def kl_bound(self) -> float | None:
        """The bound on a step's KL; None without a bound. loop/decide.py replaces "auto" before."""
        return None if self.max_kl == "auto" else self.max_kl

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "decay_to" in self.model_fields_set and self.decay == "none":
            yield "decay_to", "used with train.decay 'linear' or 'cosine' only"
        if self.decay != "none" and self.warmup_steps >= self.steps:
            yield "decay", f"the warm-up of {self.warmup_steps} steps leaves none of train.steps ({self.steps}) for it"


class SftConfig(Section):
    """A supervised warm-up before the first step, on the assistant's messages."""

    demos: str
    """A JSON-lines file with {"messages": [...], "tools": [...]}, or "file.py:function" that returns such objects. With
    `best_of`, a file of scored trajectories or a run's directory."""
    best_of: PositiveInt | None = None
    """Learns from each scored group's best attempts, this many, with their sampled tokens. An attempt must beat its
    group's worst, so groups with equal rewards give none."""
    min_reward: Float | None = None
    """The lowest reward for `best_of`, instead of the comparison with the worst. All-successful groups then count
    too."""
    epochs: PositiveInt = 1
    """How often each example is trained on."""
    learning_rate: PositiveFloat = 1e-4
    """AdamW's learning rate between warm-up and decay."""
    batch_size: PositiveInt = 16
    """The examples per optimizer step."""
    batch_tokens: PositiveInt | None = None
    """The approximate trained tokens per optimizer step, instead of `batch_size`. Examples are never divided."""
    warmup_steps: Count = 0
    """The optimizer steps over which the learning rate grows from 0."""
    decay: Literal["none", "linear", "cosine"] = "none"
    """The decay from the warm-up steps' end to the last update, like `train.decay`."""
    decay_to: UnitInterval = 0.0
    """The learning rate at the end of the decay, as a share of `learning_rate`."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """A larger gradient is clipped to this norm."""
    eval_demos: str | None = None
    """Examples for measuring the loss, never trained on, written like `demos`."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of `demos` for measuring the loss, never trained on, instead of `eval_demos`. A hash of the transcript
    or scenario id selects it."""
    eval_every: PositiveInt | None = None
    """The updates between evaluations. The first and last weights are always evaluated. null: an epoch."""
    patience: PositiveInt | None = None
    """Stops after this many evaluations without improvement, and keeps the best evaluated weights. null: makes all
    updates and keeps the last weights."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
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
    """Evaluation during training and by `art eval`."""

    scenarios: Scenarios | None = None
    """The scenarios for evaluations, written like `rollout.scenarios`."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of `rollout.scenarios` for evaluations, never trained on, instead of `scenarios`. A hash of the id
    selects it, so new scenarios move no other."""
    every: PositiveInt = 10
    """The steps between evaluations. The first and last policy are always evaluated."""
    attempts: PositiveInt = 1
    """The attempts per scenario."""
    temperature: NonNegative | None = None
    """The sampling temperature. null: `rollout.sampling`'s."""
    judge: bool = True
    """Whether a judge gives the reward if rollouts return none. It compares attempts with the first evaluated policy's,
    and `reward` is the share of wins. false: no reward."""

    @model_validator(mode="after")
    def _one_of_scenarios_and_held_out(self) -> Self:
        if self.scenarios is not None and self.held_out is not None:
            raise ValueError(ONE_OF_BOTH)
        return self
