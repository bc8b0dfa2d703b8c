"""AdapterReplicas: adapters of clients that several processes train, each of which holds the whole base.

    a pass: all data go to every process -> each runs its own packs -> gradients are added up, logprobs collected

The processes are Workers (workers.py); what they do is in adapter_worker.py. The weights here are the base's, from
which engines sample, and never change.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from art_cli.config.schema import LoraConfig, ModelConfig, TorchLearnerConfig
from art_cli.learners.adapter_learner import Passed
from art_cli.learners.datums import Datum
from art_cli.learners.optimizer import Adam
from art_cli.learners.processes.adapter_worker import AdapterJob, SentPass, encode_data
from art_cli.learners.processes.workers import Workers
from art_cli.models.loading import Weights
from art_cli.runtime.scratch import scratch

LoadPolicy = Callable[[Path], Weights]  # the base with the adapter of a directory


class AdapterReplicas:
    """The processes. Failures raise LearnerError."""

    def __init__(self, base: Weights, learner: TorchLearnerConfig, *, logs: Path | None) -> None:
        settings = {"base": base.base, "dtype": base.dtype_name, "lora": None, "quantize": base.quantize}
        model = ModelConfig.model_validate(settings)
        self.job = AdapterJob(base=base.base, model=model, learner=learner)
        self._workers = Workers(learner.processes, logs=logs)
        # every process must get the calls in the same order, because each pass waits for the others
        self._lock = threading.Lock()
        self._num_adapters = 0

    def start(self) -> None:
        """Returns when all processes have loaded the base."""
        self._workers.start()
        self._workers.call("open", {"adapters": self.job.model_dump(mode="json")})

    def new_adapter(self, lora: LoraConfig | None, seed: int, load_policy: LoadPolicy) -> "ReplicatedAdapter":
        """A fresh adapter; without `lora` a copy of all weights."""
        self._num_adapters += 1
        id = str(self._num_adapters)
        self.call("add", id=id, lora=None if lora is None else lora.model_dump(mode="json"), seed=seed)
        return ReplicatedAdapter(self, id, 0 if lora is None else lora.rank, load_policy)

    def call(self, method: str, **params: Any) -> Any:
        with self._lock:
            return self._workers.call("on_adapters", {"method": method, "params": params})

    def check(self) -> None:
        """Raises LearnerError: a process is dead."""
        self._workers.check()

    def close(self) -> None:
        self._workers.close()


class ReplicatedAdapter:
    """One of them, with the methods of an AdapterLearner."""

    def __init__(self, replicas: AdapterReplicas, id: str, rank: int, load_policy: LoadPolicy) -> None:
        self.rank, self.num_updates = rank, 0
        self._replicas, self._id, self._load_policy = replicas, id, load_policy

    def run(self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], *, backward: bool) -> Passed:
        found = msgspec.convert(
            self._call("run", data=encode_data(data), loss=loss, settings=dict(settings), backward=backward), SentPass
        )
        logprobs = [
            np.frombuffer(raw, "<f4").reshape(each.targets.shape)
            for raw, each in zip(found.logprobs, data, strict=True)
        ]
        return Passed(logprobs, found.loss, found.num_tokens, found.clip_fraction)

    def update(self, adam: Adam, *, max_norm: float) -> float:
        norm = float(self._call("update", adam=list(adam), max_norm=max_norm))
        self.num_updates += 1
        return norm

    def clear(self) -> None:
        self._call("clear")

    def score(self, token_ids: Sequence[int]) -> list[float]:
        return msgspec.convert(self._call("score", token_ids=list(token_ids)), list[float])

    def copy_weights(self) -> Weights:
        with scratch("adapter") as directory:
            self.save(directory, optimizer=False)
            return self._load_policy(directory)

    def save(self, directory: Path, *, optimizer: bool) -> None:
        self._call("save", directory=str(directory.resolve()), optimizer=optimizer)

    def load(self, directory: Path, *, optimizer: bool) -> None:
        self.num_updates = int(self._call("load", directory=str(directory.resolve()), optimizer=optimizer))

    def close(self) -> None:
        self._call("drop")

    def _call(self, method: str, **params: Any) -> Any:
        return self._replicas.call(method, id=self._id, **params)
