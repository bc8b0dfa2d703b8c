"""Trains language-model agents by reinforcement learning, from a YAML file and one Python function.

Names for rollouts and notebooks, imported on first use:

    from art_cli import Outcome                                        # in rollout.py
    art_cli.train(art_cli.load("config.yaml", "train.steps=3"))        # in a notebook, see docs/how-it-works.md
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from art_cli.api import generate, judge, load, step, train
    from art_cli.config.compose import LoadedConfig, load_config
    from art_cli.config.schema import RunConfig
    from art_cli.judges import Judge, Verdict
    from art_cli.judges.ruler.ruler_judge import ruler_score_group
    from art_cli.judges.trl_rewards import trl_judge
    from art_cli.loop.stages import StepTaken
    from art_cli.loop.train import TrainResult
    from art_cli.rollouts.policy import Policy
    from art_cli.runs.outcome import Outcome
    from art_cli.runs.trajectory import Score, ScoredTrajectory, Trajectory, Turn
    from art_cli.runtime.errors import ArtError

_HOMES = {
    name: home
    for home, names in {
        "config.compose": ("LoadedConfig", "load_config"),
        "config.schema": ("RunConfig",),
        "runtime.errors": ("ArtError",),
        "judges": ("Judge", "Verdict"),
        "judges.ruler.ruler_judge": ("ruler_score_group",),
        "judges.trl_rewards": ("trl_judge",),
        "loop.stages": ("StepTaken",),
        "loop.train": ("TrainResult",),
        "api": ("generate", "judge", "load", "step", "train"),
        "runs.outcome": ("Outcome",),
        "rollouts.policy": ("Policy",),
        "runs.trajectory": ("Score", "ScoredTrajectory", "Trajectory", "Turn"),
    }.items()
    for name in names
}

__all__ = [
    "ArtError",
    "Judge",
    "LoadedConfig",
    "Outcome",
    "Policy",
    "RunConfig",
    "Score",
    "ScoredTrajectory",
    "StepTaken",
    "TrainResult",
    "Trajectory",
    "Turn",
    "Verdict",
    "generate",
    "judge",
    "load",
    "load_config",
    "ruler_score_group",
    "step",
    "train",
    "trl_judge",
]


def __getattr__(name: str) -> Any:
    if name == "small_models":  # imported by older copies of recipes
        return import_module("art_cli.models.builtin_models")
    if name not in _HOMES:
        raise AttributeError(f"module 'art_cli' has no attribute {name!r}")
    return getattr(import_module(f"art_cli.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
