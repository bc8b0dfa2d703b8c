"""Opened: the run and its model, which all checks read; SourcePart: one source, with the results of its checks."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_cli.config.compose import LoadedConfig
from art_cli.judges import Judge
from art_cli.learners import Learner
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.weights import Weights
from art_cli.runs.trajectory import Json, Trajectory


@dataclass(frozen=True)
class Opened:
    """The run and, after the model check, its model."""

    loaded: LoadedConfig
    scratch: Path
    asks_judge: bool = True  # False with --no-judge
    asked: set[str] = field(default_factory=set)  # judges that were asked; sources may share a judge
    weights: Weights | None = None  # None if neither engine nor learner computes in this process
    policy: PolicySpec | None = None
    tokenizer: Any = None
    learner: Learner | None = None


@dataclass
class SourcePart:
    """One source ("" for the whole run), with results for later checks."""

    source: str
    loaded: LoadedConfig
    scenarios: list[Json] = field(default_factory=list)
    judge: Judge | None = None
    played: list[Trajectory] = field(default_factory=list)  # two attempts per source
    slowness: str = ""  # why these attempts took longer than they need
