"""MovingAverage: an average of the policy's weights over past steps, for losses that use it as the teacher.

It reads and writes `teacher/` in a checkpoint directory, next to the adapter, which stays in PEFT's format.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.learners.packs.pack_runner import PackRunner
from art_cli.models.saved_weights import fitting

log = logging.getLogger(__name__)

STATE_DIRECTORY, AVERAGE_FILE = "teacher", "average.safetensors"


class MovingAverage:
    """average <- (1 - rate) average + rate weights, in float32, after every step. It starts as the policy.

    Only trained weights are averaged; the teacher shares all other weights with the policy. Each learner process
    averages its part of the weights.
    """

    def __init__(self, runner: PackRunner, rate: float) -> None:
        """`rate` is in (0, 1]. At 1 the average is the policy itself."""
        self._weights, self._ranks, self._rate = runner.weights, runner.ranks, rate
        self._parameters = {name: p for name, p in runner.weights.model.named_parameters() if p.requires_grad}
        self._averages: dict[str, Tensor] | None = None  # created by the initial `installed`

    @torch.no_grad()
    def follow(self) -> None:
        """Moves the average toward the current weights."""
        assert self._averages is not None, "the average teaches a step before it follows that step"
        with self._weights.lock:
            for name, average in self._averages.items():
                average.lerp_(self._parameters[name].detach().float(), self._rate)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Uses the average as the model's weights inside the block, then restores the original weights exactly."""
        if self._averages is None:
            self._averages = {name: p.detach().to(torch.float32, copy=True) for name, p in self._parameters.items()}
            yield
            return
        with self._weights.lock:
            kept = {name: p.detach().clone() for name, p in self._parameters.items()}
            try:
                self._put(self._averages)
                yield
            finally:
                self._put(kept)

    @torch.no_grad()
    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)
        self._weights.version += 1

    def save(self, directory: Path) -> None:
        """Writes the average. All processes must call it; rank 0 writes."""
        if self._averages is None:
            return
        tensors = {name: self._ranks.whole(tensor).cpu().contiguous() for name, tensor in self._averages.items()}
        if self._ranks.rank == 0:
            (directory / STATE_DIRECTORY).mkdir(exist_ok=True)
            save_file(tensors, directory / STATE_DIRECTORY / AVERAGE_FILE)

    def load(self, directory: Path) -> None:
        """Restores the average, or starts as the weights without one. Raises CheckpointError if unreadable or unfit."""
        self._averages = None
        path = directory / STATE_DIRECTORY / AVERAGE_FILE
        if not path.is_file():
            log.info("%s: no moving average; the teacher begins as the policy", directory)
            return
        with fitting(path):
            tensors = load_file(path)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            if shapes != {name: p.shape for name, p in self._parameters.items()}:
                raise ValueError("the average belongs to other weights")
        parameters = self._parameters
        self._averages = {name: self._ranks.part(tensor, parameters[name]) for name, tensor in tensors.items()}
