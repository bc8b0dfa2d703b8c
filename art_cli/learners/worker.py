"""One process of a learner that has several, started by torchrun: `worker SOCKET LOGS PARENT`.

It answers the requests that workers.py sends to every process: `open` makes its TorchLearner, sharded over all of them;
the rest are the Learner's methods. While it works on one it says every second that it runs. It ends, whatever it is
doing, when the process that sends them has.
"""

import os
import queue
import select
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from art_cli import log, private
from art_cli.errors import ArtError, LearnerError
from art_cli.trajectory import ScoredTrajectory

if TYPE_CHECKING:
    import torch

    from art_cli.learners.parallel import Job
    from art_cli.learners.torch_learner import TorchLearner

COLLECTIVE_DEADLINE_S = 300.0  # in which all processes meet; they part for longest while each reads the model
BEAT_EVERY_S = 1.0  # also how soon it sees that its parent has gone

Json = dict[str, Any]


def main() -> None:
    address, logs, parent = sys.argv[1:]
    rank = int(os.environ["RANK"])
    _write_to(Path(logs) / f"learner_{rank}.log")
    log.set_up()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    wire = Wire(connection, parent=int(parent))
    wire.send({"rank": rank, "pid": os.getpid()})
    Worker(wire).serve()


def _write_to(path: Path) -> None:
    """Whatever this process says from here on, in Python or below it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, private.FILE)
    for number in (1, 2):
        os.dup2(file, number)


class Wire:
    """The connection to the process that owns this one; a thread of its own reads it and sees its end at once.

    That thread also says that this process runs, while a request is not answered yet: nobody listens at other times.
    """

    def __init__(self, connection: socket.socket, *, parent: int) -> None:
        self.requests: queue.Queue[Json] = queue.Queue()
        self._connection, self._parent = connection, parent
        self._sending = threading.Lock()
        self._is_working = False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, message: Json, *, is_last: bool = False) -> None:
        """`is_last`: the answer to a request."""
        with self._sending:
            self._is_working = self._is_working and not is_last
            self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def _beat(self) -> None:
        if self._sending.acquire(blocking=False):  # otherwise it is saying something
            try:
                if self._is_working:
                    self._connection.sendall(b'{"beat":true}\n')
            finally:
                self._sending.release()

    def _read(self) -> None:
        """Until the other end says "end", or is gone: then torchrun sees a failure, and kills whoever cannot end."""
        buffer, status = b"", 1
        try:
            while self._is_wanted():
                self._beat()
                if select.select([self._connection], [], [], BEAT_EVERY_S)[0]:
                    received = self._connection.recv(1 << 20)
                    if not received:
                        break
                    *lines, buffer = (buffer + received).split(b"\n")
                    for request in map(msgspec.json.decode, lines):
                        if request["method"] == "end":
                            status = 0
                            return
                        self._is_working = True
                        self.requests.put(request)
        finally:
            os._exit(status)  # in the middle of whatever: nothing of it is wanted any more

    def _is_wanted(self) -> bool:
        """A child that the parent forked may hold the connection open after it."""
        try:
            os.kill(self._parent, 0)
        except ProcessLookupError:
            return False
        return True


class Worker:
    """Its learner and the methods that are asked for."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.learner: TorchLearner | None = None

    def serve(self) -> None:
        """Answers until the wire ends the process. What is no ArtError ends it with a traceback in its log."""
        while True:
            request = self.wire.requests.get()
            try:
                answer = {"result": getattr(self, f"do_{request['method']}")(**request["params"])}
            except ArtError as error:
                answer = {"error": [type(error).__name__, str(error)]}
            self.wire.send(answer, is_last=True)

    def do_open(self, **job: Any) -> None:
        from art_cli.learners.parallel import Job

        self.learner = make_learner(Job.model_validate(job))

    def do_step(self, groups: list[list[Json]]) -> dict[str, float]:
        trajectories = msgspec.convert(groups, list[list[ScoredTrajectory]])
        return self._learner.step(trajectories, progress=self._progress).known()

    def do_sft(self, demos: list[Json]) -> dict[str, float]:
        return self._learner.sft(demos, progress=self._progress)

    def do_begin_sft(self, demos: list[Json]) -> int:
        return self._learner.begin_sft(demos)

    def do_take_sft(self, num_updates: int) -> dict[str, float]:
        return self._learner.take_sft(num_updates, progress=self._progress)

    def do_end_sft(self) -> None:
        self._learner.end_sft()

    def do_score(self, token_ids: list[int], temperature: float) -> list[float]:
        return self._learner.score(token_ids, temperature=temperature)

    def do_save(self, directory: str) -> None:
        self._learner.save(Path(directory))

    def do_load(self, directory: str) -> None:
        self._learner.load(Path(directory))

    @property
    def _learner(self) -> "TorchLearner":
        assert self.learner is not None, "open comes first"
        return self.learner

    def _progress(self, done: int, total: int) -> None:
        self.wire.send({"progress": [done, total]})


def make_learner(job: "Job") -> "TorchLearner":
    """This process's part of the learner. Raises LearnerError: fewer GPUs than processes."""
    import torch.distributed as dist

    from art_cli.learners.sharding import FsdpRanks, make_mesh, shard
    from art_cli.learners.torch_learner import TorchLearner
    from art_cli.model import load_weights

    device = _device(job.learner.device)
    if not dist.is_initialized():
        backends = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backends, timeout=timedelta(seconds=COLLECTIVE_DEADLINE_S))
    # on the CPU first: a GPU need hold no more of it at a time than one layer and its own share
    weights = load_weights(job.model, job.base, device="cpu", seed=job.train.seed)
    shard(weights.model.get_base_model() if weights.has_adapter else weights.model, make_mesh(device))
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


def _device(name: str) -> "torch.device":
    """The CPU, which all processes share, or a GPU of this process's own. Raises LearnerError: not enough of them."""
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    size, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus < size:
        raise LearnerError(f"learner.processes is {size}, and there are {gpus} GPUs: each process needs one of its own")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    main()
