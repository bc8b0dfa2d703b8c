"""The `loss` and `algorithm` sections: how scored groups become a gradient."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from art_cli.config.sections.base_config import (
    Count,
    Float,
    ImportedVariants,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    UnitInterval,
)
from art_cli.runtime.plugins import resolve


class TruncateConfig(Section):
    """Truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl): a token's weight is min(ρ,
    cap)."""

    name: Literal["truncate"]
    cap: PositiveFloat = 2.0
    """The largest weight of a token."""


class IcepopConfig(Section):
    """IcePop (Ring-1T 2025, arXiv:2510.18855): a token's weight is ρ; tokens with ρ out of bounds are left out."""

    name: Literal["icepop"]
    low: PositiveFloat = 0.5
    """The smallest ρ of a token that is trained on."""
    high: PositiveFloat = 5.0
    """The largest ρ of a token that is trained on."""

    @model_validator(mode="after")
    def _bounds_hold_1(self) -> Self:
        return _check_bounds(self, self.low, self.high)


class SequenceMaskConfig(Section):
    """Sequence masking (Liu et al. 2025, "When Speed Kills Stability"): samples whose geometric mean of ρ is out of
    bounds are left out; the weight of all other tokens is min(ρ, cap)."""

    name: Literal["sequence_mask"]
    low: PositiveFloat = 0.8
    """The smallest geometric mean of ρ of a sample that is trained on."""
    high: PositiveFloat = 1.25
    """The largest geometric mean of ρ of a sample that is trained on."""
    cap: PositiveFloat = 2.0
    """The largest weight of a token."""

    @model_validator(mode="after")
    def _bounds_hold_1(self) -> Self:
        return _check_bounds(self, self.low, self.high)


class DppoConfig(Section):
    """DPPO (Qi et al. 2026, arXiv:2602.04879): tokens whose probability moved further than delta, and that the update
    would move further, are left out; the weight of all other tokens is min(ρ, cap)."""

    name: Literal["dppo"]
    divergence: Literal["tv", "kl"] = "tv"
    """The measure of a token's change. tv: the difference of its probabilities. kl: KL(engine || learner) of the token
    against all others."""
    delta: PositiveFloat = 0.15
    """The largest divergence. For kl, a third of the default is usual."""
    cap: PositiveFloat = 20.0
    """The largest weight of a token."""


OffPolicyConfig = TruncateConfig | IcepopConfig | SequenceMaskConfig | DppoConfig
AnySection = TypeVar("AnySection", bound=Section)


def _check_bounds(section: AnySection, low: float, high: float) -> AnySection:
    if not low < 1 < high:
        raise ValueError(f"low {low:g} and high {high:g}: a ratio of 1, which is on-policy, must lie between them")
    return section


MeanOver = Literal["trained", "all"]


class BaseLossConfig(Section):
    compares_attempts: ClassVar[bool] = True  # whether an attempt's worth is relative to the others of its group
    compares_states: ClassVar[bool] = False  # whether it may depend on which replies answered equal states
    needs_explanations: ClassVar[bool] = False  # whether it learns from the judge's reasons

    kl: NonNegative = 0.0
    """The weight of KL(policy || reference), estimated by k3. The reference is the model without its adapter. 0:
    off."""
    off_policy: Annotated[OffPolicyConfig, Field(discriminator="name")] | None = None
    """The importance weights of tokens that an older policy sampled, or an engine that rounds differently. ρ is the
    token's probability under the learner at the start of the step, divided by its probability under the engine.
    null: no weights, and PPO's ratio is to the engine's probability."""
    echo: NonNegative = 0.0
    """The weight of the cross entropy of the environment's answers (tool outputs, further user messages), averaged
    over these tokens as the loss averages sampled ones (ECHO, Shrivastava et al. 2026, arXiv:2605.24517). Groups
    without signal are learned from too. 0: off."""
    mean_over: MeanOver = "all"
    """The trajectories over which the loss is averaged. `all`: every finished trajectory of the step, so that a step
    with little signal is small. `trained`: the trajectories of groups with signal, so that a step with little signal
    is as large as any other, and noisier."""
    entropy_floor: PositiveFloat | None = None
    """The mean entropy in nats per token below which the loss rewards entropy. The coefficient of the reward grows by
    `entropy_step` in each step below the floor and falls by as much in each other step (Skywork-OR1, arXiv:2505.22312).
    null: off."""
    entropy_step: PositiveFloat = 0.005
    """The change of the coefficient in one step."""
    clip_cov: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of an optimizer step's sampled tokens that get no gradient: those that lower entropy most, because
    their logprob and advantage are both far above the mean (Clip-Cov, arXiv:2505.22617). null: none."""
    kl_cov: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """The share of an optimizer step's sampled tokens, chosen as for `clip_cov`, that a KL penalty holds near their
    probability before the step (KL-Cov, arXiv:2505.22617, with 0.0002 to 0.002). null: none."""
    kl_cov_weight: PositiveFloat = 1.0
    """The weight of these tokens' KL(before the step || now), estimated by k3."""

    @property
    def needs_rewards(self) -> bool:
        """Whether the loss learns from rewards, so that every attempt must have one."""
        return True

    @property
    def compares_rewards_alone(self) -> bool:
        """Whether advantages compare a group's rewards and nothing else: equal ones teach nothing, and judge.noise can
        correct them."""
        return self.compares_attempts

    @property
    def parts(self) -> Collection[str]:
        """The names of the metrics that rewards are made of; without any, a reward is one number."""
        return ()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
        if "entropy_step" in self.model_fields_set and self.entropy_floor is None:
            yield "entropy_step", "used with entropy_floor only"
        if "kl_cov_weight" in self.model_fields_set and self.kl_cov is None:
            yield "kl_cov_weight", "used with kl_cov only"
        if self.kl_cov is not None and self.clip_cov is not None:
            yield "kl_cov", "holds back the tokens whose gradient clip_cov takes away; set one of the two"


class PresetConfig(BaseLossConfig):
    name: str


class ScaledLossConfig(PresetConfig):
    scale_advantages: bool = True
    """Divide advantages by the group's standard deviation."""


class ClippedLossConfig(PresetConfig):
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts from 1 - clip to 1 + clip."""


class GrpoConfig(ScaledLossConfig, ClippedLossConfig):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): PPO clip, mean over all sampled tokens of the step."""

    name: Literal["grpo"] = "grpo"


class DrGrpoConfig(ClippedLossConfig):
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no division by length or standard deviation."""

    name: Literal["dr_grpo"]
    max_tokens: PositiveInt | None = None
    """The constant each trajectory's sum is divided by. null: rollout.sampling.max_tokens."""


class DapoConfig(ScaledLossConfig):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, token-level mean, with `overlong: penalty`
    a soft penalty for overlong replies."""

    name: Literal["dapo"]
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 0.28
    """The ratio of new to old probability counts up to 1 + clip_high."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """The treatment of trajectories that a length limit cut off. keep: train on them. mask: leave them out. penalty:
    lower the reward near the limit."""
    overlong_buffer: PositiveInt = 256
    """The number of tokens before the limit over which the penalty grows from 0 to 1 (equation 13)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if "overlong_buffer" in self.model_fields_set and self.overlong != "penalty":
            yield "overlong_buffer", f"used with loss.overlong 'penalty' only, which is {self.overlong!r}"


def _of_tokens(config: BaseLossConfig) -> Iterator[tuple[str, str]]:
    """Yields the knobs that leave single tokens out, where they cannot: a ratio of whole samples moves all tokens."""
    if config.clip_cov is not None:
        yield "clip_cov", "leaves single tokens out, and here the ratio of a whole sample moves them all; try kl_cov"
    if isinstance(config.off_policy, IcepopConfig | DppoConfig):
        yield (
            "off_policy",
            "leaves single tokens out, and here the ratio of a whole sample moves them all; try truncate",
        )


class GspoConfig(ScaledLossConfig):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio of a whole sequence, its geometric mean over tokens."""

    name: Literal["gspo"]
    clip: PositiveFloat = 3e-4
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of new to old probability counts up to 1 + clip_high."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from _of_tokens(self)


class CispoConfig(ScaledLossConfig):
    """CISPO (MiniMax-M1 2025, arXiv:2506.13585): the clipped, detached ratio as a weight on the log-likelihood."""

    name: Literal["cispo"]
    clip: PositiveFloat = 1.0
    """The ratio of new to old probability counts down to 1 - clip. 1: no lower bound."""
    clip_high: PositiveFloat = 4.0
    """The ratio of new to old probability counts up to 1 + clip_high."""


class RlooConfig(ClippedLossConfig):
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): the baseline is the mean reward of the group's other attempts,
    and a whole trajectory is one action."""

    name: Literal["rloo"]
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability of a whole sample counts from 1 - clip to 1 + clip."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from _of_tokens(self)


class TeacherConfig(Section):
    """The model that teaches by its logprobs of the policy's tokens. It must have the policy's tokenizer."""

    model: str
    """A directory, a hub id, or a run or checkpoint of art. With `base_url`, the model's name on the server; with
    `protocol: tinker`, a base model of the server or saved weights (tinker://...)."""
    base_url: str | None = None
    """The teacher's server: http://127.0.0.1:8000/v1 of vLLM, or http://10.0.0.7:8100 of the Tinker protocol. null: the
    model is loaded on the learner's device, beside the policy."""
    protocol: Literal["vllm", "tinker"] = "vllm"
    """The server's protocol. tinker: that of `art backend`, which needs the extra art-cli[tinker]."""
    api_key_env: str | None = None
    """The variable, in the environment or in .env, that holds the server's key. null: no key is sent to vLLM, and
    TINKER_API_KEY holds that of a server of the Tinker protocol."""
    timeout_s: Seconds = 120.0
    """The longest time for one request to the server."""
    retries: Count = 5
    """The number of retries of a request after a rate limit, a server error, a lost connection or its deadline."""
    concurrency: PositiveInt = 16
    """The number of requests at once."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for each knob that is set and has no effect."""
        for knob in ("protocol", "api_key_env", "timeout_s", "retries", "concurrency"):
            if self.base_url is None and knob in self.model_fields_set:
                yield knob, "used with loss.teacher.base_url only: a model that is loaded here needs no requests"
        if self.base_url is not None and self.protocol == "tinker" and "retries" in self.model_fields_set:
            yield "retries", "used with protocol=vllm only: the SDK of the Tinker protocol asks again until timeout_s"


class TaughtLossConfig(ScaledLossConfig, ClippedLossConfig):
    reward_weight: NonNegative = 0.0
    """The weight of GRPO's advantage, which is added to the teacher's advantage of each token. 0: no rewards."""
    divergence: Literal["reverse_kl", "jensen_shannon"] = "reverse_kl"
    """The divergence that the teacher's advantages lower. reverse_kl: KL(policy || teacher), in which a token that
    the teacher never writes outweighs all others. jensen_shannon: twice the Jensen-Shannon divergence, in which no
    advantage is below -0.69."""

    @property
    def needs_rewards(self) -> bool:
        return self.reward_weight > 0

    @property
    def compares_rewards_alone(self) -> bool:
        return False

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if "scale_advantages" in self.model_fields_set and not self.needs_rewards:
            yield (
                "scale_advantages",
                "used with loss.reward_weight above 0 only: the teacher's advantages are not scaled",
            )


class DistillConfig(TaughtLossConfig):
    """On-policy distillation (Thinking Machines 2025): the advantage of a sampled token is log teacher - log policy."""

    name: Literal["distill"]
    teacher: TeacherConfig
    prefix_weight: NonNegative = 0.0
    """The additional weight of tokens before the policy departs from the teacher: they count up to 1 + this (IW-OPD,
    Xie et al. 2026, arXiv:2606.22600)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from ((f"teacher.{knob}", message) for knob, message in self.teacher.conflicts())


class PpoConfig(ClippedLossConfig):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347) and one advantage per turn, as in Turn-PPO (Li et al.
    2025, arXiv:2512.17008). Attempts are not compared with each other, so rollout.group_size may be 1."""

    compares_attempts: ClassVar[bool] = False

    name: Literal["ppo"]
    gamma: UnitInterval = 0.99
    """The discount of the reward for each turn that follows."""
    gae_lambda: UnitInterval = 0.9
    """The λ of generalized advantage estimation: 0 trusts the critic's value of the next turn, 1 the observed
    reward."""
    value_learning_rate: PositiveFloat = 1e-2
    """The learning rate of the critic's value head, in units of the reward. AdamW's other settings are those of
    `train`."""
    value_clip: PositiveFloat | None = 0.2
    """The largest change of a value toward its target in one step of several updates. null: no limit."""
    value_trunk: bool = False
    """Whether the critic's gradient also moves the policy's weights, and not only the value head."""
    value_coefficient: PositiveFloat = 0.5
    """The weight of the critic's error in the loss, with `value_trunk: true`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        if "mean_over" in self.model_fields_set:
            yield "mean_over", "has no effect here: with a critic every group has signal, so both means are the same"
        if "value_coefficient" in self.model_fields_set and not self.value_trunk:
            yield "value_coefficient", "used with loss.value_trunk=true only; else set loss.value_learning_rate"


EXPERIMENTS = {  # name -> the algorithm, whose `section` has its options; imported when it is named
    "gigpo": "art_cli.learners.algorithms.gigpo:Gigpo",
    "gagpo": "art_cli.learners.algorithms.gagpo:Gagpo",
    "maxrl": "art_cli.learners.algorithms.maxrl:Maxrl",
    "reinforce++": "art_cli.learners.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "gdpo": "art_cli.learners.algorithms.gdpo:Gdpo",
    "sdpo": "art_cli.learners.algorithms.sdpo:Sdpo",
}


def _section_of(name: str) -> type[PresetConfig]:
    section: type[PresetConfig] = resolve(EXPERIMENTS[name], base=Path()).section
    return section


Known = GrpoConfig | DrGrpoConfig | DapoConfig | GspoConfig | CispoConfig | RlooConfig | DistillConfig | PpoConfig
if TYPE_CHECKING:
    LossConfig = PresetConfig
else:
    LossConfig = Annotated[Known, ImportedVariants(EXPERIMENTS, _section_of)]


class AlgorithmConfig(BaseLossConfig):
    """A user's own algorithm, instead of a named loss."""

    compares_states: ClassVar[bool] = True

    entry: str
    """ "file.py:Class", a subclass of art_cli.learners.algorithms.Algorithm (docs/algorithms.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""
