"""The algorithms that a configuration chooses by name (`loss=dapo`).

A new one is one file with its section and its algorithm, with paper and equation, as gigpo.py is, and a line in
EXPERIMENTS of config/sections/loss_config.py. tests/learners/test_presets.py then holds its gradient and its resume.
Those of PRESETS have proved themselves; their sections are in loss_config.py.
"""

from pathlib import Path
from typing import Any

from art_cli.config.sections import loss_config
from art_cli.learners.algorithms import Algorithm
from art_cli.learners.algorithms.distillation import Distill
from art_cli.learners.algorithms.grpo import Cispo, Dapo, DrGrpo, Grpo, Gspo, Rloo
from art_cli.learners.algorithms.ppo import Ppo
from art_cli.learners.algorithms.preset import Preset
from art_cli.learners.algorithms.user_algorithm import UserAlgorithm
from art_cli.runtime.plugins import resolve

PRESETS: dict[str, type[Preset[Any]]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "distill": Distill,
    "ppo": Ppo,
}


def build_algorithm(
    config: loss_config.LossConfig | loss_config.AlgorithmConfig, *, max_tokens: int, directory: Path = Path()
) -> Algorithm:
    """Returns the algorithm that a configuration names. `max_tokens` is the length limit of one reply.

    Raises UsageError if a user's class, whose file is relative to `directory`, cannot be loaded.
    """
    if isinstance(config, loss_config.AlgorithmConfig):
        return UserAlgorithm(config.entry, config.options, directory)
    preset = PRESETS.get(config.name) or resolve(loss_config.EXPERIMENTS[config.name], base=directory)
    return preset(config, max_tokens)
