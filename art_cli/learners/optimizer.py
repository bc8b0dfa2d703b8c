"""AdamW with schedule and gradient clipping. State is stored without pickle.

Checkpoints hold the state as tensors and numbers.

Parameters are updated in place, with two exceptions that update a copy. A parameter below float32 has a float32 copy,
because bfloat16 has 8 bits of precision and would round away most steps of 1e-5 on a weight of 0.02. With CPU offload
the copy and the state live on the CPU, which saves 8 bytes of GPU memory per trained weight.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from art_cli.config.schema import TrainConfig
from art_cli.learners.packs.ranks import Ranks
from art_cli.learners.schedule import EPS, WINDOW, clip_limit, rate_of_step
from art_cli.runtime.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names for a parameter's moments
STATE_FILE = "optimizer.safetensors"
COUNTS_FILE = "optimizer.json"


class Counts(msgspec.Struct, kw_only=True):
    """optimizer.json: non-tensor state between steps. Example: Counts(num_steps=3, num_updates=6)"""

    num_steps: int = 0  # policy steps that changed weights; warm-up counts these
    num_updates: int = 0  # optimizer steps
    norms: tuple[float, ...] = ()  # gradient norms before clipping for the last WINDOW optimizer steps, newest last


class Adam(NamedTuple):
    """Settings for one update, overriding the configuration."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Optimizer:
    """AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101), over named parameters.

    With `device`, state lives there and updates run on copies of the parameters. Otherwise state lives with the
    parameter. `ranks` are the processes across which parameters are sharded (default: this process holds whole
    parameters).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        config: TrainConfig,
        *,
        device: torch.device | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.ranks = ranks or Ranks()
        self.counts = Counts()
        self._norm: float | None = None  # norm of the current gradients, once clipped
        self._copies = {
            name: torch.nn.Parameter(parameter.detach().to(device or parameter.device, _dtype(parameter), copy=True))
            for name, parameter in self.parameters.items()
            if device is not None or _is_low(parameter)
        }
        self._updated = {**self.parameters, **self._copies}  # tensors that AdamW updates, by parameter name
        self._adamw = torch.optim.AdamW(
            self._updated.values(),
            lr=self.config.rate,
            betas=(self.config.betas[0], self.config.betas[1]),
            eps=EPS,
            weight_decay=self.config.weight_decay,
        )

    def reserve(self) -> None:
        """Allocates all missing moments. Call it before a step's passes.

        Otherwise AdamW would allocate them during its initial update, in memory that a pass has just freed. Large
        blocks could then not be returned to the GPU for the engine that wakes next. Moments of zero updates are not
        saved.
        """
        for updated in self._updated.values():
            if not (state := self._adamw.state[updated]):
                state |= {name: torch.zeros_like(updated.detach()) for name in MOMENTS} | {"step": torch.tensor(0.0)}

    def current_rate(self) -> float:
        """Returns the current step's learning rate."""
        return rate_of_step(self.config, self.counts.num_steps)

    def clip_limit(self) -> float:
        """Returns the next gradient's norm limit."""
        return clip_limit(self.config, self.counts.norms)

    def clip(self, limit: float | None = None) -> float:
        """Scales gradients down to `limit` (default: `clip_limit()`), and returns the norm before scaling."""
        limit = self.clip_limit() if limit is None else limit
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self._norm = float(self.ranks.whole(norm))
        return self._norm

    def update(self, adam: Adam | None = None) -> None:
        """Applies the gradients to the parameters. `adam` overrides the configured settings."""
        for group in self._adamw.param_groups:
            group["lr"] = self.current_rate() if adam is None else adam.learning_rate
            if adam is not None:
                group.update(betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
        for name, copy in self._copies.items():
            _refresh(copy, self.parameters[name])
        self._adamw.step()
        with torch.no_grad():
            for name, copy in self._copies.items():
                self.parameters[name].copy_(copy)
        self.counts.num_updates += 1
        if self._norm is not None:
            self.counts.norms = (*self.counts.norms, self._norm)[-WINDOW:]
        self.clear()

    def remember(self) -> dict[str, Tensor]:
        """Returns a copy of the weights before the next update, for `draw_back`."""
        for name, copy in self._copies.items():
            _refresh(copy, self.parameters[name])
        return {name: updated.detach().clone() for name, updated in self._updated.items()}

    @torch.no_grad()
    def draw_back(self, before: Mapping[str, Tensor], share: float) -> None:
        """Moves the weights by this share back toward the copy made by `remember`. AdamW's moments stay as they are."""
        for name, updated in self._updated.items():
            updated.lerp_(before[name], share)
        for name, copy in self._copies.items():
            self.parameters[name].copy_(copy)

    def clear(self) -> None:
        self._norm = None
        for parameter in (*self.parameters.values(), *self._copies.values()):
            parameter.grad = None

    # --- state --------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Returns moments as `<name>:<moment>`, and float32 copies as `<name>:copy`; empty before any update."""
        tensors = {
            f"{name}:{which}": tensor
            for name, updated in self._updated.items()
            if (state := self._adamw.state.get(updated, {})) and state["step"] > 0
            for which, tensor in state.items()
        }
        if tensors:
            tensors |= {f"{n}:copy": copy.detach() for n, copy in self._copies.items() if _is_low(self.parameters[n])}
        return tensors

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores `tensors()` output. Raises ValueError for an unknown parameter or a shape mismatch."""
        self._forget()
        for key, tensor in tensors.items():
            name, _, which = key.rpartition(":")
            parameter = self.parameters.get(name)
            if parameter is None or (which != "step" and tensor.shape != parameter.shape):
                raise ValueError(f"optimizer state of {name} {list(tensor.shape)}, which this model does not have")
            if which == "copy":
                if name in self._copies:
                    self._copies[name].data.copy_(self.ranks.part(tensor, self._copies[name].data))
                continue
            # the step count stays on the CPU, where AdamW reads it without waiting for the device
            updated = self._updated[name]
            self._adamw.state[updated][which] = tensor if which == "step" else self.ranks.part(tensor, updated)

    def reset(self) -> None:
        self._forget()
        self.counts = Counts()

    @torch.no_grad()
    def _forget(self) -> None:
        """Drops all moments and resets the copies to the current parameter values."""
        self._adamw.state.clear()
        for name, copy in self._copies.items():
            copy.copy_(self.parameters[name])

    def snapshot(self) -> "Snapshot":
        """Returns a copy of all state that an update changes, on the CPU."""
        return Snapshot(
            {name: _copied_to_cpu(parameter.detach()) for name, parameter in self.parameters.items()},
            {name: _copied_to_cpu(tensor) for name, tensor in self.tensors().items()},
            msgspec.structs.replace(self.counts),
        )

    def restore(self, snapshot: "Snapshot") -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(snapshot.parameters[name])
        self.set_tensors(snapshot.moments)
        self.counts = snapshot.counts

    def save(self, directory: Path) -> None:
        """Writes state and counts. All processes must call it; rank 0 writes."""
        tensors = self.ranks.collect(self.tensors())
        if self.ranks.rank > 0:
            return
        save_file(tensors, directory / STATE_FILE)
        (directory / COUNTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.counts)))

    def load(self, directory: Path) -> None:
        """Restores saved state. Raises CheckpointError if the state is unreadable or belongs to a different model."""
        try:
            self.set_tensors(load_file(directory / STATE_FILE))
            self.counts = msgspec.json.decode((directory / COUNTS_FILE).read_bytes(), type=Counts)
        except Exception as error:
            raise CheckpointError(f"{directory}: optimizer state: {str(error).splitlines()[0]}") from error


def _copied_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _is_low(parameter: Tensor) -> bool:
    return parameter.dtype.itemsize < 4


def _dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype used to compute the parameter's update."""
    return torch.float32 if _is_low(parameter) else parameter.dtype


@torch.no_grad()
def _refresh(copy: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Updates the copy: takes over the parameter's gradient, and its value wherever the rounded copy differs from it.

    Weights loaded or restored since the last update thus take effect, and the copy keeps its extra precision.
    """
    value = parameter.detach().to(copy.device)
    copy.copy_(torch.where(copy.to(value.dtype) == value, copy, value.to(copy.dtype)))
    copy.grad = None if parameter.grad is None else parameter.grad.to(copy.device, copy.dtype)


class Snapshot(msgspec.Struct, frozen=True):
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    counts: Counts
