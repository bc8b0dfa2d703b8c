"""The algorithms that a configuration chooses by name (`loss=dapo`).

A new one is a class in the file of its family, with paper and equation, a line in PRESETS, and its knobs in
config/sections/loss_config.py. tests/learners/test_presets.py then holds its gradient and its resume.
"""

from pathlib import Path
from typing import Any

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.baselines import Gdpo, Maxrl, ReinforcePlusPlus, Rloo
from art_cli.learners.algorithms.distillation import Distill, Sdpo
from art_cli.learners.algorithms.gigpo import Gagpo, Gigpo
from art_cli.learners.algorithms.grpo import Cispo, Dapo, DrGrpo, Grpo, Gspo
from art_cli.learners.algorithms.ppo import Ppo
from art_cli.learners.algorithms.preset import Preset
from art_cli.learners.algorithms.user_algorithm import UserAlgorithm

PRESETS: dict[str, type[Preset[Any]]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "gigpo": Gigpo,
    "gagpo": Gagpo,
    "maxrl": Maxrl,
    "rloo": Rloo,
    "reinforce++": ReinforcePlusPlus,
    "gdpo": Gdpo,
    "distill": Distill,
    "sdpo": Sdpo,
    "ppo": Ppo,
}


def build_algorithm(
    config: loss_config.LossConfig | loss_config.AlgorithmConfig, *, max_tokens: int, directory: Path = Path()
) -> Algorithm:
    """The algorithm that a configuration names. `max_tokens` is the length limit of one reply.

    Raises UsageError: a user's class, relative to `directory`, that cannot be loaded.
    """
    if isinstance(config, loss_config.AlgorithmConfig):
        return UserAlgorithm(config.entry, config.options, directory)
    return PRESETS[config.name](config, max_tokens)
