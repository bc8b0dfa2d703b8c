"""Preset: an algorithm selected by name in the configuration, with the knobs from its section."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.algorithms.objectives import Objective, PolicyTerms, clip_tokens
from art_cli.runs.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    from art_cli.learners.packs.logprob_reader import Reader

Knobs = TypeVar("Knobs", bound=loss_config.PresetConfig)
ClippedKnobs = TypeVar("ClippedKnobs", bound=loss_config.ClippedLossConfig)
ScaledKnobs = TypeVar("ScaledKnobs", bound=loss_config.ScaledLossConfig)


class Preset(Algorithm, Generic[Knobs]):
    """An algorithm with the knobs from its section. `max_tokens` is the maximum reply length."""

    section: ClassVar[type[loss_config.PresetConfig]]  # an experiment's options (loss_config.EXPERIMENTS)
    _policy: "Reader"  # set by `bind`
    _numbers: Mapping[str, float] = MappingProxyType({})  # reported by `numbers`

    def __init__(self, knobs: Knobs, max_tokens: int) -> None:
        self.knobs, self.max_tokens = knobs, max_tokens
        self.is_scaled = isinstance(knobs, loss_config.ScaledLossConfig) and knobs.scale_advantages
        self.compares_states = knobs.compares_states

    def bind(self, policy: "Reader", directory: Path) -> None:
        self._policy = policy

    def numbers(self) -> Mapping[str, float]:
        return self._numbers


class ScaledPreset(Preset[ScaledKnobs]):
    """A preset that may divide advantages by the group's standard deviation."""

    def credit(self, group: Sequence[ScoredTrajectory]) -> Sequence[float | None]:
        return advantages(rewards_of(group), scale=self.knobs.scale_advantages)


class ClippedPreset(Preset[ClippedKnobs]):
    """A preset with PPO's per-token surrogate, clipped symmetrically."""

    def objective(self, terms: PolicyTerms) -> Objective:
        return clip_tokens(terms, self.knobs.clip, self.knobs.clip)
