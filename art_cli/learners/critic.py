"""Critic: a value head on the policy's trunk, with a separate optimizer, for PPO. The learner owns it.

It reads and writes `critic/` in a checkpoint directory, next to the adapter, which stays in PEFT's format.
"""

import logging
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from art_cli.config.schema import PpoConfig, TrainConfig
from art_cli.learners.optimizer import Optimizer
from art_cli.learners.packs.pack_runner import PackRunner, ValueHead
from art_cli.runtime.errors import CheckpointError, one_line

log = logging.getLogger(__name__)

STATE_DIRECTORY, HEAD_FILE = "critic", "value_head.safetensors"


class Critic:
    """One learner's value head, which adds values to the runner's scores."""

    def __init__(
        self, runner: PackRunner, knobs: PpoConfig, train: TrainConfig, *, device: torch.device | None = None
    ) -> None:
        """The optimizer's state lives on `device` (default: where the head is)."""
        self.ranks = runner.ranks
        width = runner.model.config.get_text_config().hidden_size
        self.head = ValueHead(width, moves_trunk=knobs.value_trunk, device=runner.weights.device)
        runner.value_head = self.head
        self.optimizer = Optimizer(
            dict(self.head.named_parameters()),
            train.model_copy(update={"learning_rate": knobs.value_learning_rate}),
            device=device,
        )

    def save(self, directory: Path) -> None:
        """Writes the critic's state. All processes must call it; rank 0 writes."""
        place = directory / STATE_DIRECTORY
        if self.ranks.rank == 0:
            place.mkdir(exist_ok=True)
            save_file({name: p.detach().cpu() for name, p in self.head.named_parameters()}, place / HEAD_FILE)
            self.optimizer.save(place)

    def load(self, directory: Path) -> None:
        """Restores saved state exactly; starts a new critic if the checkpoint has none.

        Raises CheckpointError if the state is unreadable or the model's width differs.
        """
        place = directory / STATE_DIRECTORY
        if not place.is_dir():
            self.head.reset()
            self.optimizer.reset()
            log.warning("%s: a checkpoint without a critic; its values start at 0", directory)
            return
        try:
            tensors = load_file(place / HEAD_FILE)
            if (found := len(tensors["weight"])) != (width := len(self.head.weight)):
                raise ValueError(f"reads hidden states of {found} numbers, and this model's have {width}")
            self.head.load_state_dict(tensors)
        except Exception as error:
            raise CheckpointError(f"{place / HEAD_FILE}: {one_line(error)}") from error
        self.optimizer.load(place)
