"""The `loss` and `algorithm` sections: how scored groups become a gradient."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from art_cli.config.sections.base_config import (
    Count,
    ImportedVariants,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Seconds,
    Section,
    UnitInterval,
)
from art_cli.runtime.plugins import resolve

EXPERIMENTS = {  # name -> algorithm, imported on first use; its `section` has the options
    "gigpo": "art_cli.learners.algorithms.gigpo:Gigpo",
    "maxrl": "art_cli.learners.algorithms.maxrl:Maxrl",
    "reinforce++": "art_cli.learners.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "gdpo": "art_cli.learners.algorithms.gdpo:Gdpo",
    "sdpo": "art_cli.learners.algorithms.sdpo:Sdpo",
}


class TruncateConfig(Section):
    """Truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl): a token's weight is min(ρ,
    cap)."""

    name: Literal["truncate"]
    cap: PositiveFloat = 2.0
    """A token's largest weight."""


class IcepopConfig(Section):
    """IcePop (Ring-1T 2025, arXiv:2510.18855): a token's weight is ρ; tokens with ρ out of bounds are skipped."""

    name: Literal["icepop"]
    low: PositiveFloat = 0.5
    """The smallest trained ρ."""
    high: PositiveFloat = 5.0
    """The largest trained ρ."""

    @model_validator(mode="after")
    def _bounds_hold_1(self) -> Self:
        return _check_bounds(self, self.low, self.high)


class SequenceMaskConfig(Section):
    """Sequence masking (Liu et al. 2025, "When Speed Kills Stability"): samples whose geometric mean of ρ is out of
    bounds are skipped; other tokens have the weight min(ρ, cap)."""

    name: Literal["sequence_mask"]
    low: PositiveFloat = 0.8
    """The smallest trained geometric mean of ρ."""
    high: PositiveFloat = 1.25
    """The largest trained geometric mean of ρ."""
    cap: PositiveFloat = 2.0
    """A token's largest weight."""

    @model_validator(mode="after")
    def _bounds_hold_1(self) -> Self:
        return _check_bounds(self, self.low, self.high)


class DppoConfig(Section):
    """DPPO (Qi et al. 2026, arXiv:2602.04879): tokens whose probability moved beyond delta, and would move further, are
    skipped; other tokens have the weight min(ρ, cap)."""

    name: Literal["dppo"]
    divergence: Literal["tv", "kl"] = "tv"
    """A token's change. tv: the difference of its probabilities. kl: KL(engine || learner), the token against all
    others."""
    delta: PositiveFloat = 0.15
    """The largest divergence. For kl, a third of the default is usual."""
    cap: PositiveFloat = 20.0
    """A token's largest weight."""


OffPolicyConfig = TruncateConfig | IcepopConfig | SequenceMaskConfig | DppoConfig
AnySection = TypeVar("AnySection", bound=Section)


def _check_bounds(section: AnySection, low: float, high: float) -> AnySection:
    if not low < 1 < high:
        raise ValueError(f"low {low:g} and high {high:g}: a ratio of 1, which is on-policy, must lie between them")
    return section


MeanOver = Literal["trained", "all"]


class BaseLossConfig(Section):
    compares_attempts: ClassVar[bool] = True  # advantages are relative to the group
    compares_states: ClassVar[bool] = False  # advantages may depend on other replies to equal states
    needs_explanations: ClassVar[bool] = False  # learns from the judge's explanations

    kl: NonNegative = 0.0
    """The weight of KL(policy || reference), estimated by k3. The reference is the model without its adapter. 0:
    off."""
    off_policy: Annotated[OffPolicyConfig, Field(discriminator="name")] | None = None
    """Importance weights for tokens from an older policy, or from an engine with other rounding. ρ is the token's
    probability under the learner at the step's start, divided by the engine's. null: no weights, and PPO's ratio is to
    the engine's probability (of a whole sample: to the learner's at the step's start)."""
    echo: NonNegative = 0.0
    """The weight of the cross entropy of the environment's answers (tool outputs, later user messages), averaged over
    these tokens as the loss averages sampled tokens (ECHO, Shrivastava et al. 2026, arXiv:2605.24517). Groups without
    signal count too. 0: off."""
    mean_over: MeanOver = "all"
    """The averaged trajectories. `all`: every finished trajectory in the step; little signal makes a small step.
    `trained`: only groups with signal; such a step is full-sized and noisier."""

    @property
    def needs_rewards(self) -> bool:
        return True

    @property
    def compares_rewards_alone(self) -> bool:
        """True if advantages depend only on the group's rewards. Then equal rewards teach nothing, and judge.noise
        applies."""
        return self.compares_attempts

    @property
    def parts(self) -> Collection[str]:
        """Names of the metrics that form the reward; () for a single number."""
        return ()

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Yields (knob, message) for settings that have no effect."""
        return iter(())


class PresetConfig(BaseLossConfig):
    name: str


class ScaledLossConfig(PresetConfig):
    scale_advantages: bool = True
    """Divides advantages by the group's standard deviation."""


class ClippedLossConfig(PresetConfig):
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts from 1 - clip to 1 + clip."""


class GrpoConfig(ScaledLossConfig, ClippedLossConfig):
    """GRPO (Shao et al. 2024, arXiv:2402.03300): PPO clip, mean over all sampled tokens in the step."""

    name: Literal["grpo"] = "grpo"
    scale_advantages: bool = False
    """Divides advantages by the group's standard deviation, as the paper does. Then a group with one small reward
    counts as much as a group with one large reward, and a policy freezes on the first path that pays."""
    baseline: Literal["auto", "group", "shrunk"] = "auto"
    """What is subtracted from a reward. group: the group's mean. shrunk: the mean of the group's other rewards, drawn
    toward the mean of the step's other groups the more it is noise (Zeng et al. 2025, arXiv:2511.03710). Groups of few
    attempts then teach more. A group of equal rewards is compared with the other groups alone, so a policy leaves an
    answer that earns only a part of the reward. It needs rewards that compare across scenarios. auto:
    shrunk for steps of up to 16 attempts in four or more groups, if the judge does not rank and no setting weighs or
    replaces groups."""

    @property
    def compares_rewards_alone(self) -> bool:
        return self.baseline != "shrunk"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if self.baseline == "shrunk" and self.scale_advantages:
            yield "baseline", "'shrunk' compares groups, and scale_advantages divides each by its own deviation"


class DrGrpoConfig(ClippedLossConfig):
    """Dr. GRPO (Liu et al. 2025, arXiv:2503.20783): no division by length or standard deviation."""

    name: Literal["dr_grpo"]
    max_tokens: PositiveInt | None = None
    """The divisor for each trajectory's sum. null: rollout.sampling.max_tokens."""


class DapoConfig(ScaledLossConfig):
    """DAPO (Yu et al. 2025, arXiv:2503.14476): clip-higher, token-level mean, with `overlong: penalty`
    a soft penalty for overlong replies."""

    name: Literal["dapo"]
    clip: PositiveFloat = 0.2
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 0.28
    """The ratio of new to old probability counts up to 1 + clip_high."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Trajectories that a length limit cut off. keep: trains on them. mask: skips them. penalty: lowers the reward near
    the limit."""
    overlong_buffer: PositiveInt = 256
    """The tokens before the limit over which the penalty grows from 0 to 1 (equation 13)."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "overlong_buffer" in self.model_fields_set and self.overlong != "penalty":
            yield "overlong_buffer", f"used with loss.overlong 'penalty' only, which is {self.overlong!r}"


def _of_tokens(config: BaseLossConfig) -> Iterator[tuple[str, str]]:
    """Yields settings that mask tokens, for losses with one ratio per sample."""
    if isinstance(config.off_policy, IcepopConfig | DppoConfig):
        why = "leaves single tokens out, and here the ratio of a whole sample moves them all"
        yield "off_policy", f"{why}; try truncate"


class GspoConfig(ScaledLossConfig):
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): the ratio of a whole sequence, its geometric mean over tokens."""

    name: Literal["gspo"]
    clip: PositiveFloat = 3e-4
    """The ratio of new to old probability counts down to 1 - clip."""
    clip_high: PositiveFloat = 4e-4
    """The ratio of new to old probability counts up to 1 + clip_high."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _of_tokens(self)


class CispoConfig(ScaledLossConfig):
    """CISPO (MiniMax-M1 2025, arXiv:2506.13585): the clipped, detached ratio as a weight on the log-likelihood."""

    name: Literal["cispo"]
    clip: PositiveFloat = 1.0
    """The ratio of new to old probability counts down to 1 - clip. 1: no lower bound."""
    clip_high: PositiveFloat = 4.0
    """The ratio of new to old probability counts up to 1 + clip_high."""


class RlooConfig(ClippedLossConfig):
    """RLOO (Ahmadian et al. 2024, arXiv:2402.14740): the baseline is the other attempts' mean reward, and a whole
    trajectory is an action."""

    name: Literal["rloo"]
    clip: PositiveFloat = 0.2
    """A whole sample's ratio of new to old probability counts from 1 - clip to 1 + clip."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from _of_tokens(self)


class TeacherConfig(Section):
    """The model that teaches by its logprobs of the policy's tokens. It needs the policy's tokenizer."""

    model: str
    """A directory, hub id, or art run or checkpoint. With `base_url`, the server's name for the model; with `protocol:
    tinker`, a base model on the server or saved weights (tinker://...)."""
    base_url: str | None = None
    """The teacher's server: http://127.0.0.1:8000/v1 for vLLM, or http://10.0.0.7:8100 for the Tinker protocol. null:
    the teacher is loaded on the learner's device."""
    protocol: Literal["vllm", "tinker"] = "vllm"
    """The server's protocol. tinker: `art backend`'s; needs the extra art-cli[tinker]."""
    api_key_env: str | None = None
    """The variable with the server's key, in the environment or .env. null: no key for vLLM, TINKER_API_KEY for
    Tinker."""
    timeout_s: Seconds = 120.0
    """The time limit for a request."""
    retries: Count = 5
    """Retries after rate limits, server errors, lost connections and timeouts."""
    concurrency: PositiveInt = 16
    """The requests in parallel."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        for knob in ("protocol", "api_key_env", "timeout_s", "retries", "concurrency"):
            if self.base_url is None and knob in self.model_fields_set:
                yield knob, "used with loss.teacher.base_url only: a model that is loaded here needs no requests"
        if self.base_url is not None and self.protocol == "tinker" and "retries" in self.model_fields_set:
            yield "retries", "used with protocol=vllm only: the SDK of the Tinker protocol asks again until timeout_s"


class TaughtLossConfig(ScaledLossConfig, ClippedLossConfig):
    reward_weight: NonNegative = 0.0
    """The weight of GRPO's advantage, added to each token's teacher advantage. 0: no rewards."""
    divergence: Literal["reverse_kl", "jensen_shannon"] = "reverse_kl"
    """The divergence that the teacher's advantages lower. reverse_kl: KL(policy || teacher); a token that the teacher
    never writes outweighs all others. jensen_shannon: twice the Jensen-Shannon divergence, with advantages above
    -0.69."""

    @property
    def needs_rewards(self) -> bool:
        return self.reward_weight > 0

    @property
    def compares_rewards_alone(self) -> bool:
        return False

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "scale_advantages" in self.model_fields_set and not self.needs_rewards:
            why = "the teacher's advantages are not scaled"
            yield "scale_advantages", f"used with loss.reward_weight above 0 only: {why}"


class DistillConfig(TaughtLossConfig):
    """On-policy distillation (Thinking Machines 2025): a sampled token's advantage is log teacher - log policy."""

    name: Literal["distill"]
    teacher: TeacherConfig

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super().conflicts()
        yield from ((f"teacher.{knob}", message) for knob, message in self.teacher.conflicts())


class PpoConfig(ClippedLossConfig):
    """PPO with a critic (Schulman et al. 2017, arXiv:1707.06347) and an advantage per turn, as in Turn-PPO (Li et al.
    2025, arXiv:2512.17008). It does not compare attempts, so rollout.group_size may be 1."""

    compares_attempts: ClassVar[bool] = False

    name: Literal["ppo"]
    gamma: UnitInterval = 0.99
    """The reward's discount for each later turn."""
    gae_lambda: UnitInterval = 0.9
    """GAE's λ: 0 trusts the critic's value for the next turn, 1 the observed reward."""
    value_learning_rate: PositiveFloat = 1e-2
    """The learning rate of the critic's value head, in units of the reward. `train` has AdamW's other settings."""
    value_clip: PositiveFloat | None = 0.2
    """The largest change of a value toward its target in a step with several updates. null: no limit."""
    value_trunk: bool = False
    """Whether the critic's gradient also moves the policy's weights."""
    value_coefficient: PositiveFloat = 0.5
    """The weight of the critic's error in the loss, with `value_trunk: true`."""

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if "mean_over" in self.model_fields_set:
            yield "mean_over", "has no effect here: with a critic every group has signal, so both means are the same"
        if "value_coefficient" in self.model_fields_set and not self.value_trunk:
            yield "value_coefficient", "used with loss.value_trunk=true only; else set loss.value_learning_rate"


def _section_of(name: str) -> type[PresetConfig]:
    section: type[PresetConfig] = resolve(EXPERIMENTS[name], base=Path()).section
    return section


Known = GrpoConfig | DrGrpoConfig | DapoConfig | GspoConfig | CispoConfig | RlooConfig | DistillConfig | PpoConfig
if TYPE_CHECKING:
    LossConfig = PresetConfig
else:
    LossConfig = Annotated[Known, ImportedVariants(EXPERIMENTS, _section_of)]


class AlgorithmConfig(BaseLossConfig):
    """Your own algorithm, instead of a named loss."""

    compares_states: ClassVar[bool] = True

    entry: str
    """The class "file.py:Class", a subclass of art_cli.learners.algorithms.Algorithm (docs/algorithms.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments for the class."""
