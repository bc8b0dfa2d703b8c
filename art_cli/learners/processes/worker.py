"""One process of a learner that has several, started by torchrun: `worker SOCKET LOGS`.

It answers the calls that workers.py makes to every process: `open` makes its TorchLearner, sharded over all of them;
the rest are the Learner's methods. It ends, whatever it is doing, when the process that calls it has ended.
"""

import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from art_cli.learners.processes.remote_calls import LEARNER, LOST
from art_cli.runtime import log, permissions
from art_cli.runtime.processes.process_server import run_and_exit, serve

if TYPE_CHECKING:
    from art_cli.learners import Progress
    from art_cli.learners.processes.adapter_pool import Adapters
    from art_cli.learners.processes.job import Job
    from art_cli.learners.torch_learner import TorchLearner

COLLECTIVE_DEADLINE_S = 300.0  # longest wait in a collective; ranks drift apart most while each reads the model
HEARTBEAT_S = 1.0
CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words for it

Json = dict[str, Any]


def main() -> None:
    address, logs = sys.argv[1:]
    rank = int(os.environ["RANK"])
    _write_to(Path(logs) / f"learner_{rank}.log")
    log.set_up(verbose=True)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    run_and_exit(serve(connection, ServedLearner(rank), heartbeat_s=HEARTBEAT_S), status_of=_status_of)


def _status_of(error: BaseException) -> int:
    """Returns LOST if the cause is another process, which ended before this one and closed its connections."""
    is_network = type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError")
    return LOST if is_network or any(words in str(error) for words in CLOSED) else 1


def _write_to(path: Path) -> None:
    """Sends all output of this process to a file from here on, whether Python writes it or C code."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, permissions.FILE)
    for number in (1, 2):
        os.dup2(file, number)


class ServedLearner:
    """This process's part of the learner. Its methods are those of a Learner (remote_calls.py), and those below."""

    _learner: "TorchLearner"
    _adapters: "Adapters"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[[str, "Progress"], str]:
        if name not in LEARNER:
            raise AttributeError(name)
        return partial(LEARNER[name].answer, self._learner)

    def identify(self) -> tuple[int, int]:
        """Returns its rank and its process id."""
        return self._rank, os.getpid()

    def open(self, adapters: Json | None = None, **job: Any) -> None:
        """Makes the learner of a job, or with `adapters` a holder of several clients' adapters."""
        if adapters is not None:
            from art_cli.learners.processes.adapter_pool import AdapterJob, Adapters

            self._adapters = Adapters(AdapterJob.model_validate(adapters), COLLECTIVE_DEADLINE_S)
            return
        from art_cli.learners.processes.job import Job

        self._learner = make_learner(Job.model_validate(job))

    def add_adapter(self, id: str, lora: Json | None, seed: int) -> None:
        self._adapters.add(id, lora, seed)

    def drop_adapter(self, id: str) -> None:
        del self._adapters.learners[id]

    def on_adapter(self, id: str, method: str, given: str, progress: "Progress") -> str:
        """Calls a method of an adapter's learner."""
        return self._adapters.methods[method].answer(self._adapters.learners[id], given, progress)


def make_learner(job: "Job") -> "TorchLearner":
    """Returns this process's part of the learner. Raises LearnerError if there are fewer GPUs than processes."""
    from art_cli.learners.processes import process_group
    from art_cli.learners.processes.sharding import FsdpRanks, make_mesh, shard
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.models.loading import load_weights

    device = process_group.device_of(job.learner.device)
    process_group.join(device, COLLECTIVE_DEADLINE_S)
    # loaded on the CPU, so that a GPU holds no more of the model than one layer and its own share
    weights = load_weights(job.model, job.base, device="cpu", seed=job.train.seed)
    mesh = make_mesh(device, nodes=job.learner.nodes if job.learner.shard == "node" else 1)
    shard(weights.model.get_base_model() if weights.has_adapter else weights.model, mesh)
    weights.device = device
    return TorchLearner(
        weights,
        train=job.train,
        loss=job.loss,
        directory=job.directory,
        learner=job.learner,
        sft=job.sft,
        sampling_max_tokens=job.sampling_max_tokens,
        ranks=FsdpRanks(),
    )


if __name__ == "__main__":
    main()
