"""RemoteTrainer: creates, trains, saves and drops an adapter on a Tinker server.

No update is applied twice. The SDK numbers its requests, and a server runs each number once. After a failure the
training client is dropped, and the next call creates a client from the last saved state, like a new process does.

Also converts samples to the protocol's data, and reads logprobs and norms from answers. No torch.
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

# optional datum inputs, supported if the server's capabilities list them (server/passes.py)
MASK, SHARES = "mask", "shares"
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
ANY_RANK = 1  # the protocol requires a rank; servers that train all weights ignore it


def make_datum(types: Any, sample: Sample, *, can_mask: bool, **numbers: Floats) -> Any:
    """Returns the sample in the protocol's format (shifted by one), with the named numbers for each trained token.

    Other tokens have 0. With `can_mask` they are masked, so the server computes the same as the torch learner. The
    whole sample is sent in this case, because the packing depends on sample lengths. Otherwise the datum stops at the
    last target.
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
    """Returns [N] logprobs of each sample's targets. Raises RemoteError for invalid answers."""
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
    """Returns the gradient norm before clipping; NaN if the server does not report the norm."""
    metrics = getattr(answer, "metrics", None) or {}
    for name, value in metrics.items():
        if name.partition(":")[0].rpartition("/")[2] == "grad_norm":  # SkyRL adds an address prefix
            return float(value)
    return math.nan


class Counters(NamedTuple):
    """A checkpoint's counters. Example: Counters(num_steps=3, num_updates=6)"""

    num_steps: int = 0  # policy steps that changed weights; the learning rate's warm-up counts these
    num_updates: int = 0  # optimizer steps
    norms: tuple[float, ...] = ()  # recent gradient norms before clipping, newest last


class RemoteTrainer:
    """Opens the session on demand. Failures raise RemoteError."""

    def __init__(self, engine: TinkerEngineConfig, lora: LoraConfig | None, *, base: str, seed: int) -> None:
        """Raises RemoteError if the server's key is missing."""
        self.server, self.timeout_s = find_server(engine), engine.timeout_s
        self.base, self.lora, self.seed = engine.base_model or base, lora, seed
        self.counters = Counters()
        self.saved: RemoteCheckpoint | None = None  # start of the next training client; None for a new adapter
        self.with_optimizer = True  # also restore the saved optimizer
        self._connection: RemoteSession | None = None
        self._extra: frozenset[str] = frozenset()  # optional datum inputs, known once a session is open
        self._client: Any = None  # the SDK's training client, created on demand

    @property
    def types(self) -> Any:
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
        """The training client. Created from the last saved state, or with a new adapter."""
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
        return make_datum(self.types, sample, can_mask=MASK in self._extra, **numbers)

    @property
    def takes_shares(self) -> bool:
        """True if the server accepts mean shares separately from advantages."""
        assert self.session is not None
        return SHARES in self._extra

    def forward(self, samples: Sequence[Sample]) -> list[Floats]:
        """Returns [N] logprobs of each sample's targets under the current weights."""
        data = [self.datum(sample, weights=np.ones(len(sample.targets))) for sample in samples]
        return logprobs_of(self.wait(self.client.forward(data, "cross_entropy"), "forward"), samples)

    def submit_update(self, config: TrainConfig, rate: float, limit: float) -> Any:
        """Returns the future of an optimizer step with the accumulated gradients, clipped to the norm `limit`."""
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
        """Waits for the step and returns the gradient norm before clipping; NaN if not reported."""
        norm = norm_of(self.wait(future, "optim_step"))
        self.counters = self.counters._replace(num_updates=self.counters.num_updates + 1)
        return norm

    def wait(self, future: Any, what: str) -> Any:
        return self.session.wait(future, what)

    # --- saving -------------------------------------------------------------------------------------------------------

    def save_state(self) -> str:
        """Saves weights and optimizer; returns the server's path."""
        return str(self.wait(self.client.save_state(self._new_name()), "saving the weights").path)

    def save(self) -> RemoteCheckpoint:
        """Saves the training state and sampler weights on the server."""
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
        return f"{self.counters.num_updates:06d}-{secrets.token_hex(6)}"  # unique, so saves never overwrite each other

    def go_on_from(self, saved: RemoteCheckpoint) -> None:
        """Replaces the training client by a saved one, including its optimizer."""
        self.drop()
        self.saved, self.with_optimizer = saved, True
        assert self.client is not None

    def restart_from(self, state: str) -> None:
        """Continues from saved weights with a new optimizer and new counters."""
        self.drop()
        self.saved = RemoteCheckpoint(url=self.server.url, base_model=self.base, state=state, sampler=state)
        self.with_optimizer = False
        assert self.client is not None

    def drop(self) -> None:
        """Drops the training client and its accumulated gradients."""
        client, self._client = self._client, None
        if client is not None:
            self.server.tell("unload_model", {"model_id": str(client.model_id)})

    def lease(self, checkpoints: Path) -> None:
        """Records which adapter the run trains, for cleanup after a kill."""
        write_lease(checkpoints, self.server.url, str(self.client.model_id))

    def end_lease(self, checkpoints: Path) -> None:
        """Unloads an adapter left by a previous process."""
        if model_id := read_lease(checkpoints, self.server.url):
            self.server.tell("unload_model", {"model_id": model_id})

    def close(self) -> None:
        connection, self._connection, self._client = self._connection, None, None
        if connection is not None:
            connection.close()


def parts_of(lora: LoraConfig) -> tuple[bool, bool]:
    """Returns whether attention and MLP get an adapter. Raises LearnerError for unsupported module names."""
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
