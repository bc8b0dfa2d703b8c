"""AdamW with warm-up and gradient clipping, whose state is written as tensors and numbers, never pickled."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import SftConfig, TrainConfig
from art_cli.errors import CheckpointError

STATE_FILE = "optimizer.safetensors"
COUNTS_FILE = "optimizer.json"


class Counts(msgspec.Struct, kw_only=True):
    """optimizer.json. Example: Counts(num_steps=3, num_updates=6)"""

    num_steps: int = 0  # steps that changed weights: what warm-up counts
    num_updates: int = 0  # optimizer steps


class Optimizer:
    """AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101), over named parameters."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        learning_rate: float,
        warmup_steps: int,
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self.parameters = dict(parameters)
        self.learning_rate, self.warmup_steps, self.max_grad_norm = learning_rate, warmup_steps, max_grad_norm
        self.counts = Counts()
        self._adamw = torch.optim.AdamW(self.parameters.values(), lr=learning_rate, weight_decay=weight_decay)

    @classmethod
    def of(cls, parameters: Mapping[str, torch.nn.Parameter], config: TrainConfig | SftConfig) -> "Optimizer":
        """A new one with the knobs of that section."""
        return cls(
            parameters,
            learning_rate=config.learning_rate,
            warmup_steps=config.warmup_steps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

    def current_rate(self) -> float:
        """The learning rate of the current step: it grows evenly over `warmup_steps`, the first step's is not zero."""
        if self.counts.num_steps >= self.warmup_steps:
            return self.learning_rate
        return self.learning_rate * (self.counts.num_steps + 1) / self.warmup_steps

    def clip(self) -> float:
        """The norm of all gradients, which are then scaled down to `max_grad_norm` where it is above."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.max_grad_norm))

    def update(self) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = self.current_rate()
        self._adamw.step()
        self.counts.num_updates += 1
        self.clear()

    def clear(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    # --- state --------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The moments of each parameter, `<name>:<which>`; empty before the first update."""
        return {
            f"{name}:{which}": tensor
            for name, parameter in self.parameters.items()
            for which, tensor in self._adamw.state.get(parameter, {}).items()
        }

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Continues from what `tensors` gave. Raises ValueError: not of these parameters, or not of their shape."""
        self._adamw.state.clear()
        for key, tensor in tensors.items():
            name, _, which = key.rpartition(":")
            parameter = self.parameters.get(name)
            if parameter is None or (which != "step" and tensor.shape != parameter.shape):
                raise ValueError(f"optimizer state of {name} {list(tensor.shape)}, which this model does not have")
            # the step count stays on the CPU, where AdamW reads it without waiting for the device
            place = tensor.device if which == "step" else parameter.device
            self._adamw.state[parameter][which] = tensor.to(place)

    def reset(self) -> None:
        self._adamw.state.clear()
        self.counts = Counts()

    def snapshot(self) -> "Snapshot":
        """Everything an update changes, copied."""
        return Snapshot(
            {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            {name: tensor.clone() for name, tensor in self.tensors().items()},
            msgspec.structs.replace(self.counts),
        )

    def restore(self, snapshot: "Snapshot") -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(snapshot.parameters[name])
        self.set_tensors(snapshot.moments)
        self.counts = snapshot.counts

    def save(self, directory: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in self.tensors().items()}, directory / STATE_FILE)
        (directory / COUNTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.counts)))

    def load(self, directory: Path) -> None:
        """Raises CheckpointError: written for another model, or unreadable."""
        try:
            self.set_tensors(load_file(directory / STATE_FILE))
            self.counts = msgspec.json.decode((directory / COUNTS_FILE).read_bytes(), type=Counts)
        except Exception as error:
            raise CheckpointError(f"{directory}: optimizer state: {str(error).splitlines()[0]}") from error


class Snapshot(msgspec.Struct, frozen=True):
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    counts: Counts
