"""AdapterReplicas: client adapters trained by several processes. Each process has a full copy of the base model.

    a pass: all data go to every process -> each process runs its packs -> gradients are summed, logprobs collected

The processes are Workers (learners/processes/workers.py) with AdapterLearners. All processes make the same calls in the
same order and have the same adapters; the first process writes checkpoints. The weights in this module are the constant
base weights, used for sampling.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_cli.config.schema import LoraConfig, ModelConfig, Section, TorchLearnerConfig
from art_cli.learners import Progress
from art_cli.learners.optimizer import Adam
from art_cli.learners.processes.group_ranks import GroupRanks, device_of, join
from art_cli.learners.processes.remote_calls import RemoteMethod, remote_methods
from art_cli.learners.processes.workers import Workers
from art_cli.models.adapters import with_adapter
from art_cli.models.loading import load_weights
from art_cli.models.weights import Weights, clone_trainable
from art_cli.runtime.scratch import scratch
from art_cli.tinker.server.adapter_learner import AdapterLearner

LoadPolicy = Callable[[Path], Weights]  # loads the base with the adapter from a directory


class AdapterJob(Section):
    """Settings that a process needs for its adapters."""

    base: str
    """A hub id or directory."""
    model: ModelConfig
    learner: TorchLearnerConfig


class AdapterReplicas:
    """The processes. Failures raise LearnerError."""

    def __init__(
        self, base: Weights, learner: TorchLearnerConfig, *, chat_template: Path | None, logs: Path | None
    ) -> None:
        settings = {"base": base.base, "dtype": base.dtype_name, "lora": None, "quantize": base.quantize}
        model = ModelConfig.model_validate(settings | {"chat_template": chat_template})
        self.job = AdapterJob(base=base.base, model=model, learner=learner)
        self._workers = Workers(learner.processes, logs=logs)
        # Every process needs the calls in the same order, because each pass waits for the other processes.
        self._lock = threading.Lock()
        self._num_adapters = 0

    def start(self) -> None:
        """Returns when all processes have loaded the base model."""
        self._workers.start()
        self._workers.call("open", {"adapters": self.job.model_dump(mode="json")})

    def new_adapter(self, lora: LoraConfig | None, seed: int, load_policy: LoadPolicy) -> "ReplicatedAdapter":
        """Returns a new adapter, or a copy of all weights when `lora` is None."""
        self._num_adapters += 1
        id = str(self._num_adapters)
        self.call("add_adapter", id=id, lora=None if lora is None else lora.model_dump(mode="json"), seed=seed)
        return ReplicatedAdapter(self, id, 0 if lora is None else lora.rank, load_policy)

    def call(self, method: str, /, *, progress: Progress | None = None, **params: Any) -> Any:
        with self._lock:
            return self._workers.call(method, params, progress=progress)

    def check(self) -> None:
        """Raises LearnerError if a process is dead."""
        self._workers.check()

    def close(self) -> None:
        self._workers.close()


class ReplicatedAdapter:
    """An adapter in AdapterReplicas, with the methods of AdapterLearner."""

    run = RemoteMethod(AdapterLearner.run)
    clear = RemoteMethod(AdapterLearner.clear)
    score = RemoteMethod(AdapterLearner.score)
    measure = RemoteMethod(AdapterLearner.measure)
    save = RemoteMethod(AdapterLearner.save)
    _update = RemoteMethod(AdapterLearner.update)
    _load = RemoteMethod(AdapterLearner.load)

    def __init__(self, replicas: AdapterReplicas, id: str, rank: int, load_policy: LoadPolicy) -> None:
        self.rank, self.num_updates = rank, 0
        self._replicas, self._id, self._load_policy = replicas, id, load_policy

    def call(self, method: str, given: str, progress: Progress | None) -> str:
        result: str = self._replicas.call("on_adapter", id=self._id, method=method, given=given, progress=progress)
        return result

    def update(self, adam: Adam, *, max_norm: float) -> float:
        norm = self._update(adam, max_norm=max_norm)
        self.num_updates += 1
        return norm

    def load(self, directory: Path, *, optimizer: bool) -> int:
        self.num_updates = self._load(directory, optimizer=optimizer)
        return self.num_updates

    def copy_weights(self) -> Weights:
        with scratch("adapter") as directory:
            self.save(directory, optimizer=False)
            return self._load_policy(directory)

    def close(self) -> None:
        self._replicas.call("drop_adapter", id=self._id)


class AdapterLearners:
    """The adapters in one of the processes. The worker calls them (learners/processes/worker.py)."""

    methods = remote_methods(ReplicatedAdapter)

    def __init__(self, settings: dict[str, Any], deadline_s: float) -> None:
        """Loads an AdapterJob's base model. `deadline_s` limits collectives. Raises LearnerError without GPUs."""
        job = AdapterJob.model_validate(settings)
        device = device_of(job.learner.device)
        join(device, deadline_s)
        self.learners: dict[str, AdapterLearner] = {}
        self._ranks, self._config = GroupRanks(), job.learner
        self._weights = load_weights(job.model, job.base, device=str(device))

    def add(self, id: str, lora: dict[str, Any] | None, seed: int) -> None:
        """Adds a new adapter, or a copy of all weights when `lora` is None."""
        if lora is None:
            weights = clone_trainable(self._weights)
        else:
            weights = with_adapter(self._weights, LoraConfig.model_validate(lora), seed)
        self.learners[id] = AdapterLearner(weights, self._config, ranks=self._ranks)

    def drop(self, id: str) -> None:
        del self.learners[id]

    def answer(self, id: str, method: str, given: str, progress: Progress) -> str:
        return self.methods[method].answer(self.learners[id], given, progress)
