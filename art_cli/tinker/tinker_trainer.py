"""RemoteTrainer: the adapter in training on a server of the Tinker protocol: made, trained, saved, given up.

Nothing is applied twice. The SDK numbers its requests, and a server runs each number once. A failure drops the training
client, and the next call makes one from the last saved state, as a new process does.

Samples become what such a server takes, and logprobs and norms are read from its answers. No torch.
"""

import logging
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from art_cli.config.schema import LoraConfig, TinkerEngineConfig, TrainConfig
from art_cli.learners.samples import Floats, Sample
from art_cli.learners.schedule import EPS
from art_cli.runtime.errors import LearnerError, RemoteError
from art_cli.tinker.client.remote_checkpoint import RemoteCheckpoint, read_lease, write_lease
from art_cli.tinker.client.remote_server import RemoteSession, find_server

log = logging.getLogger(__name__)

# numbers that a datum may bring beside its loss's, where the server's capabilities name them (server/passes.py)
MASK, SHARES = "mask", "shares"


def make_datum(types: Any, sample: Sample, *, can_mask: bool, **numbers: Floats) -> Any:
    """Returns the sample shifted by one, as the protocol has it, with one number for each trained token by name.

    Other tokens have 0. With `can_mask` they are left out, so that the server computes what the torch learner does;
    the sample is sent whole then, because its length decides on its pack. Without, it ends with its last target.
    """
    end = len(sample.token_ids) - 1 if can_mask else int(sample.targets[-1])
    inputs: dict[str, Any] = {"target_tokens": sample.token_ids[1 : end + 1].astype(np.int64)}
    if can_mask:
        numbers = {**numbers, MASK: np.ones(len(sample.targets))}
    for name, values in numbers.items():
        row = np.zeros(end, dtype=np.float32)
        row[sample.targets - 1] = np.nan_to_num(values)
        inputs[name] = row
    return types.Datum(model_input=types.ModelInput.from_ints(sample.token_ids[:end].tolist()), loss_fn_inputs=inputs)


def logprobs_of(answer: Any, samples: Sequence[Sample]) -> list[Floats]:
    """Returns [N] of each sample's targets. Raises RemoteError if the server gave something else."""
    outputs = answer.loss_fn_outputs
    found: list[Floats] = []
    if len(outputs) == len(samples):
        for output, sample in zip(outputs, samples, strict=True):
            row = np.asarray(output["logprobs"].to_numpy(), dtype=np.float64).ravel() if "logprobs" in output else None
            if row is None or len(row) not in (sample.targets[-1], len(sample.token_ids) - 1):
                break
            found.append(row[sample.targets - 1])
    if len(found) != len(samples) or not all(np.isfinite(row).all() for row in found):
        raise RemoteError("the server's answer lacks finite logprobs of each token that was sent")
    return found


def norm_of(answer: Any) -> float:
    """Returns the norm of the gradient before the clip; NaN if the server does not report it."""
    metrics = getattr(answer, "metrics", None) or {}
    for name, value in metrics.items():
        if name.partition(":")[0].rpartition("/")[2] == "grad_norm":  # SkyRL puts its own address before
            return float(value)
    return math.nan


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
ANY_RANK = 1  # the protocol wants a rank; a server that trains all weights has no use for it


class Counters(NamedTuple):
    """The part of a checkpoint besides the server's paths. Example: Counters(num_steps=3, num_updates=6)"""

    num_steps: int = 0  # policy steps that changed weights; the learning rate's warm-up counts these
    num_updates: int = 0  # optimizer steps
    norms: tuple[float, ...] = ()  # norms of the last gradients before clipping, the newest last


class RemoteTrainer:
    """Opens its session with the first call that needs one. Failures raise RemoteError."""

    def __init__(self, engine: TinkerEngineConfig, lora: LoraConfig | None, *, base: str, seed: int) -> None:
        """Raises RemoteError if the key of the server is missing."""
        self.server, self.timeout_s = find_server(engine), engine.timeout_s
        self.base, self.lora, self.seed = engine.base_model or base, lora, seed
        self.counters = Counters()
        self.saved: RemoteCheckpoint | None = (
            None  # the next training client begins with it, or if None with a new adapter
        )
        self.with_optimizer = True  # whether it goes on with the saved optimizer too
        self._connection: RemoteSession | None = None
        self._extra: frozenset[str] = frozenset()  # the keys that a datum may bring are known once there is a session
        self._client: Any = None  # the SDK's training client; if None, the next call makes one

    @property
    def types(self) -> Any:
        """The SDK's module of records."""
        return self.session.types

    @property
    def session(self) -> RemoteSession:
        if self._connection is None:
            found = self.server.find_model(self.base)
            if self.lora is None and found.is_lora:
                raise RemoteError(
                    f"{self.server.url}: it trains adapters; set model.lora, or start art backend there with "
                    "model.lora=null"
                )
            if self.lora is not None and not found.is_lora:
                raise RemoteError(f"{self.server.url}: it trains all weights, no adapters: set model.lora=null")
            self._extra = frozenset(found.loss_fn_inputs)
            self._connection = RemoteSession(self.server, timeout_s=self.timeout_s)
        return self._connection

    @property
    def client(self) -> Any:
        """The training client; where there is none, one of the last saved state, or of a new adapter."""
        if self._client is None:
            saved, session = self.saved, self.session
            if saved is not None:
                self._client = session.saved_trainer(saved.state, optimizer=self.with_optimizer)
                self.counters = Counters(saved.num_steps, saved.num_updates, saved.norms)
            else:
                attention, mlp = (True, True) if self.lora is None else parts_of(self.lora)
                rank = ANY_RANK if self.lora is None else self.lora.rank
                self._client = session.new_trainer(self.base, rank=rank, seed=self.seed, attention=attention, mlp=mlp)
                self.counters = Counters()
        return self._client

    # --- training -----------------------------------------------------------------------------------------------------

    def datum(self, sample: Sample, **numbers: Floats) -> Any:
        """Returns the sample as the server takes it."""
        return make_datum(self.types, sample, can_mask=MASK in self._extra, **numbers)

    @property
    def takes_shares(self) -> bool:
        """True if the server takes each token's share in the mean apart from its advantage."""
        assert self.session is not None
        return SHARES in self._extra

    def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] the logprobs of each sample's targets at the present weights."""
        data = [self.datum(sample, weights=np.ones(len(sample.targets))) for sample in samples]
        return logprobs_of(self.wait(self.client.forward(data, "cross_entropy"), "forward"), samples)

    def submit_update(self, config: TrainConfig, rate: float, limit: float) -> Any:
        """Returns the future of an optimizer step on the gradients so far, which are clipped to the norm `limit`."""
        adam = self.types.AdamParams(
            learning_rate=rate,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=EPS,
            weight_decay=config.weight_decay,
            grad_clip_norm=limit,
        )
        return self.client.optim_step(adam)

    def wait_for_update(self, future: Any) -> float:
        """Returns the norm of the gradient before the clip, once the step is taken; NaN if it is not reported."""
        norm = norm_of(self.wait(future, "optim_step"))
        self.counters = self.counters._replace(num_updates=self.counters.num_updates + 1)
        return norm

    def wait(self, future: Any, what: str) -> Any:
        return self.session.wait(future, what)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def save_state(self) -> str:
        """Returns the server's path of weights and optimizer as they are now."""
        return str(self.wait(self.client.save_state(self._new_name()), "saving the weights").path)

    def save(self) -> RemoteCheckpoint:
        """Has the server save its state, and weights to sample from."""
        client, name = self.client, self._new_name()
        futures = client.save_state(name), client.save_weights_for_sampler(name)
        state, sampler = (str(self.wait(future, "saving the weights").path) for future in futures)
        try:
            self.saved = RemoteCheckpoint(
                url=self.server.url,
                base_model=self.base,
                state=state,
                sampler=sampler,
                num_steps=self.counters.num_steps,
                num_updates=self.counters.num_updates,
                norms=self.counters.norms,
                api_key_env=self.server.key_name,
            )
        except ValueError as error:
            raise RemoteError(f"{self.server.url}: it saved the weights, and {error}") from None
        self.with_optimizer = True
        return self.saved

    def _new_name(self) -> str:
        return f"{self.counters.num_updates:06d}-{secrets.token_hex(6)}"  # no other save has it, so none is overwritten

    def go_on_from(self, saved: RemoteCheckpoint) -> None:
        """Drops the training client and makes one of what was saved, with its optimizer."""
        self.drop()
        self.saved, self.with_optimizer = saved, True
        assert self.client is not None

    def restart_from(self, state: str) -> None:
        """Goes on from the weights of a saved state, with a new optimizer and new counters."""
        self.drop()
        self.saved = RemoteCheckpoint(url=self.server.url, base_model=self.base, state=state, sampler=state)
        self.with_optimizer = False
        assert self.client is not None

    def drop(self) -> None:
        """Gives the training client up, with the gradients that it holds."""
        client, self._client = self._client, None
        if client is not None:
            self.server.tell("unload_model", {"model_id": str(client.model_id)})

    def lease(self, checkpoints: Path) -> None:
        """Notes beside a run's checkpoints which adapter it trains, for the process after a kill."""
        write_lease(checkpoints, self.server.url, str(self.client.model_id))

    def end_lease(self, checkpoints: Path) -> None:
        """Has the adapter unloaded that a process before this one has left."""
        if model_id := read_lease(checkpoints, self.server.url):
            self.server.tell("unload_model", {"model_id": model_id})

    def close(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            connection.close()


def parts_of(lora: LoraConfig) -> tuple[bool, bool]:
    """Returns whether attention and MLP get an adapter. Raises LearnerError if the protocol cannot name the modules."""
    if lora.targets == "all-linear":
        return True, True
    named = {lora.targets} if isinstance(lora.targets, str) else set(lora.targets)
    for choice, found in ((ATTENTION | MLP, (True, True)), (ATTENTION, (True, False)), (MLP, (False, True))):
        if named == choice:
            return found
    raise LearnerError(
        "model.lora.targets: a server of the Tinker protocol adapts all of attention, all of the MLP, or both: "
        "all-linear, or the names of one of them"
    )
