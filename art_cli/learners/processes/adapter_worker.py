"""ServedAdapters: the adapters of clients in one process of several, called by adapter_pool.py. And what is sent.

Every process makes the same calls in the same order, and holds the same adapters. The first one writes checkpoints.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from art_cli.config.schema import LoraConfig, ModelConfig, Section, TorchLearnerConfig
from art_cli.learners.datums import Datum
from art_cli.learners.samples import Ints
from art_cli.learners.token_weights import Floats

Json = dict[str, Any]


class AdapterJob(Section):
    """What a process needs to hold adapters."""

    base: str
    """A hub id or directory."""
    model: ModelConfig
    learner: TorchLearnerConfig


class SentDatum(msgspec.Struct, kw_only=True):
    """A Datum as bytes; K targets a row."""

    inputs: bytes
    targets: bytes
    width: int  # K
    numbers: dict[str, bytes]
    rows: bytes | None = None


class SentPass(msgspec.Struct, kw_only=True):
    """What a pass gave, as bytes."""

    logprobs: list[bytes]
    loss: float
    num_tokens: int
    clip_fraction: float | None


def encode_data(data: Sequence[Datum]) -> str:
    sent = [
        SentDatum(
            inputs=each.inputs.astype("<i8").tobytes(),
            targets=each.targets.astype("<i8").tobytes(),
            width=each.targets.shape[1],
            numbers={name: values.astype("<f8").tobytes() for name, values in each.numbers.items()},
            rows=None if each.rows is None else each.rows.astype("<i8").tobytes(),
        )
        for each in data
    ]
    return msgspec.json.encode(sent).decode()


def decode_data(text: str) -> list[Datum]:
    return [
        Datum(
            inputs=_ints(each.inputs),
            targets=_ints(each.targets).reshape(-1, each.width),
            numbers={name: _floats(raw).reshape(-1, each.width) for name, raw in each.numbers.items()},
            rows=None if each.rows is None else _ints(each.rows),
        )
        for each in msgspec.json.decode(text, type=list[SentDatum])
    ]


def _ints(raw: bytes) -> Ints:
    return np.frombuffer(raw, "<i8").astype(np.int64)


def _floats(raw: bytes) -> Floats:
    return np.frombuffer(raw, "<f8").astype(np.float64)


class ServedAdapters:
    """Adapters by the ids that their caller gives them. Failures raise LearnerError or CheckpointError."""

    def __init__(self, job: AdapterJob, deadline_s: float) -> None:
        """Loads the base. `deadline_s` is the longest wait in a collective. Raises LearnerError: too few GPUs."""
        from art_cli.learners.adapter_learner import AdapterLearner
        from art_cli.learners.processes import process_group
        from art_cli.models.loading import load_weights

        device = process_group.device_of(job.learner.device)
        process_group.join(device, deadline_s)
        self._ranks = process_group.GroupRanks()
        self._weights = load_weights(job.model, job.base, device=str(device))
        self._config = job.learner
        self._learners: dict[str, AdapterLearner] = {}

    def add(self, id: str, lora: Json | None, seed: int) -> None:
        """A fresh adapter; without `lora` a copy of all weights."""
        from art_cli.learners.adapter_learner import AdapterLearner
        from art_cli.models.loading import clone_trainable, with_adapter

        if lora is None:
            weights = clone_trainable(self._weights)
        else:
            weights = with_adapter(self._weights, LoraConfig.model_validate(lora), seed)
        self._learners[id] = AdapterLearner(weights, self._config, ranks=self._ranks)

    def drop(self, id: str) -> None:
        del self._learners[id]

    def run(self, id: str, data: str, loss: str, settings: Mapping[str, float], backward: bool) -> Json:
        passed = self._learners[id].run(decode_data(data), loss, settings, backward=backward)
        sent = SentPass(
            logprobs=[row.astype("<f4").tobytes() for row in passed.logprobs],
            loss=passed.loss,
            num_tokens=passed.num_tokens,
            clip_fraction=passed.clip_fraction,
        )
        found: Json = msgspec.to_builtins(sent)
        return found

    def update(self, id: str, adam: list[Any], max_norm: float) -> float:
        from art_cli.learners.optimizer import Adam

        rate, betas, eps, decay = adam
        return self._learners[id].update(Adam(rate, (betas[0], betas[1]), eps, decay), max_norm=max_norm)

    def clear(self, id: str) -> None:
        self._learners[id].clear()

    def score(self, id: str, token_ids: list[int]) -> list[float]:
        return self._learners[id].score(token_ids)

    def save(self, id: str, directory: str, optimizer: bool) -> None:
        if self._ranks.rank == 0:
            self._learners[id].save(Path(directory), optimizer=optimizer)
        self._ranks.gather(True, bool)  # nobody changes a weight before it is written

    def load(self, id: str, directory: str, optimizer: bool) -> int:
        """The number of updates that the adapter has taken."""
        self._learners[id].load(Path(directory), optimizer=optimizer)
        return self._learners[id].num_updates
