"""AdamW with a schedule and gradient clipping, and the entropy floor's coefficient, stored without pickle.

The state is written as tensors and numbers.

A parameter is updated in place, with two exceptions, in which the update is computed on a copy. A parameter below
float32 has a copy in float32, because bfloat16 has 8 bits and would round most steps of 1e-5 on a weight of 0.02 away.
With CPU offload the copy and the state live on the CPU, which saves the GPU 8 bytes for each trained weight.

The entropy floor is a bonus for entropy whose coefficient grows while the policy's entropy is too low.
"""

import math
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

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of a parameter's moments
STATE_FILE = "optimizer.safetensors"
COUNTS_FILE = "optimizer.json"


class EntropyState(msgspec.Struct, frozen=True):
    """The state that one step leaves for the next. Example: EntropyState(coefficient=0.01, is_below=True)"""

    coefficient: float = 0.0
    is_below: bool = False  # whether the last measured entropy was below the floor

    @property
    def bonus(self) -> float:
        """The bonus per nat that the next step gives: nothing above the floor."""
        return self.coefficient if self.is_below else 0.0

    def after(self, entropy: float, *, floor: float, step: float) -> "EntropyState":
        """Returns the state after a step of that mean entropy in nats: the coefficient is a `step` larger or smaller.

        Skywork-OR1, He et al. 2025 (arXiv:2505.22312), adaptive entropy control: c' = c + step if entropy < floor,
        else c - step, here never below 0; the loss has -c * entropy where the entropy is at most the floor. The paper
        asks that of the step's own entropy, and this of the step's before, so that nothing is computed twice. A step
        whose entropy is NaN, because it trained no sampled token, changes nothing.
        """
        if math.isnan(entropy):
            return self
        grown = self.coefficient + (step if entropy < floor else -step)
        return EntropyState(max(0.0, grown), entropy <= floor)


class Counts(msgspec.Struct, kw_only=True):
    """optimizer.json: what a step leaves for the next besides tensors. Example: Counts(num_steps=3, num_updates=6)"""

    num_steps: int = 0  # policy steps that changed weights; warm-up counts these
    num_updates: int = 0  # optimizer steps
    norms: tuple[float, ...] = ()  # norms of the last WINDOW optimizer steps' gradients before clipping, newest last
    entropy: EntropyState = EntropyState()


class Adam(NamedTuple):
    """The settings of one update, in place of the configuration's."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


class Optimizer:
    """AdamW, Loshchilov and Hutter 2019 (arXiv:1711.05101), over named parameters.

    State lives on `device`, where updates are computed on copies of the parameters, or if None beside each one.
    `ranks` are the processes that hold the parameters' parts, or None if this process holds them whole.
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
        self._norm: float | None = None  # norm of the present gradients, once clipped
        self._copies = {
            name: torch.nn.Parameter(parameter.detach().to(device or parameter.device, _dtype(parameter), copy=True))
            for name, parameter in self.parameters.items()
            if device is not None or _is_low(parameter)
        }
        self._updated = {**self.parameters, **self._copies}  # the tensors that AdamW updates, by parameter
        self._adamw = torch.optim.AdamW(
            self._updated.values(),
            lr=self.config.rate,
            betas=(self.config.betas[0], self.config.betas[1]),
            eps=EPS,
            weight_decay=self.config.weight_decay,
        )

    def reserve(self) -> None:
        """Makes all moments that do not exist yet. Call it before a step's passes.

        AdamW would make them in its first update, out of memory that a pass has just freed. There they would keep large
        blocks from being given back to a GPU, and the engine that wakes next needs them.
        """
        for updated in self._updated.values():
            if not (state := self._adamw.state[updated]):
                state |= {name: torch.zeros_like(updated.detach()) for name in MOMENTS} | {"step": torch.tensor(0.0)}

    def current_rate(self) -> float:
        """Returns the learning rate of the current step."""
        return rate_of_step(self.config, self.counts.num_steps)

    def clip_limit(self) -> float:
        """Returns the norm that the next gradient may have."""
        return clip_limit(self.config, self.counts.norms)

    def clip(self, limit: float | None = None) -> float:
        """Returns the norm of all gradients before this call, which scales them down to the limit if it is larger.

        The limit is `clip_limit()` where none is given.
        """
        limit = self.clip_limit() if limit is None else limit
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), limit)
        self._norm = float(self.ranks.whole(norm))
        return self._norm

    def update(self, adam: Adam | None = None) -> None:
        """Moves the parameters by their gradients. `adam` replaces the configuration's settings."""
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
        """Returns a copy of the weights that the next update starts from, for `draw_back`."""
        for name, copy in self._copies.items():
            _refresh(copy, self.parameters[name])
        return {name: updated.detach().clone() for name, updated in self._updated.items()}

    @torch.no_grad()
    def draw_back(self, before: Mapping[str, Tensor], share: float) -> None:
        """Moves the weights that share of the way back to what `remember` gave. AdamW's moments stay as they are."""
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
        """Returns the moments of each parameter as `<name>:<which>`; empty before the first update.

        The float32 copy of a parameter below float32 is there as `<name>:copy`.
        """
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
        """Continues from what `tensors` gave. Raises ValueError if a parameter is unknown or of another shape."""
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
        """Drops all moments, and sets each copy to its parameter's present value."""
        self._adamw.state.clear()
        for name, copy in self._copies.items():
            copy.copy_(self.parameters[name])

    def snapshot(self) -> "Snapshot":
        """Returns a copy of everything that an update changes."""
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
        """Writes state and counts. All processes must call it; the first one writes."""
        tensors = self.ranks.collect(self.tensors())
        if self.ranks.rank > 0:
            return
        save_file(tensors, directory / STATE_FILE)
        (directory / COUNTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.counts)))

    def load(self, directory: Path) -> None:
        """Continues from what `save` wrote. Raises CheckpointError if it is unreadable or of another model."""
        try:
            self.set_tensors(load_file(directory / STATE_FILE))
            self.counts = msgspec.json.decode((directory / COUNTS_FILE).read_bytes(), type=Counts)
        except Exception as error:
            raise CheckpointError(f"{directory}: optimizer state: {str(error).splitlines()[0]}") from error


def _is_low(parameter: Tensor) -> bool:
    return parameter.dtype.itemsize < 4


def _dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype that its update is computed in."""
    return torch.float32 if _is_low(parameter) else parameter.dtype


@torch.no_grad()
def _refresh(copy: torch.nn.Parameter, parameter: torch.nn.Parameter) -> None:
    """Gives the copy the parameter's gradient, and the parameter's value wherever it is not the rounded copy.

    So weights that were loaded or restored since the last update take effect, and the copy keeps its extra precision.
    """
    value = parameter.detach().to(copy.device)
    copy.copy_(torch.where(copy.to(value.dtype) == value, copy, value.to(copy.dtype)))
    copy.grad = None if parameter.grad is None else parameter.grad.to(copy.device, copy.dtype)


class Snapshot(msgspec.Struct, frozen=True):
    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    counts: Counts
