"""The configuration of `art reward`: the section `reward`, with the run's sections `model` and `learner`."""

from typing import Annotated

from pydantic import Field

from art_cli.config.sections.base_config import Float, PositiveFloat, PositiveInt, Section, Seed
from art_cli.config.sections.model_config import ModelConfig
from art_cli.config.sections.train_config import TorchLearnerConfig


class RewardConfig(Section):
    """The training of a reward model."""

    epochs: PositiveInt = 3
    """How often each group is trained on."""
    learning_rate: PositiveFloat | None = None
    """AdamW's learning rate, which falls to 0. null: the rate of `train.learning_rate: auto`."""
    head_learning_rate: PositiveFloat = 1e-2
    """The learning rate of the scalar head, which starts at 0."""
    groups_per_update: PositiveInt = 1
    """The groups per optimizer step."""
    held_out: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """The share of scenarios whose groups measure the agreement, never trained on."""
    seed: Seed = 0
    """The seed for the division of the data, their order and the adapter."""


class RewardRunConfig(Section):
    model: ModelConfig
    reward: RewardConfig = RewardConfig()
    learner: TorchLearnerConfig = TorchLearnerConfig()
