"""ParallelLearner: a learner in several processes, on one machine or on several nodes, seen from the training loop.

It holds no weights. Each method calls all its processes (workers.py), which are TorchLearners with one model divided
among them (worker.py, sharding.py). Records are sent in the form in which they are written to disk. A checkpoint has
the same format as that of a learner in one process, and either continues from the other's.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import msgspec

from art_cli.learners import Progress, SftProgress, StepMetrics
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.nodes.node_address import Address
from art_cli.learners.processes.nodes.node_identity import identity_of
from art_cli.learners.processes.nodes.node_secret import read_secret
from art_cli.learners.processes.nodes.rendezvous import Meeting, Rendezvous
from art_cli.learners.processes.workers import Workers
from art_cli.runs.trajectory import ScoredTrajectory
from art_cli.runtime.errors import LearnerError

Answer = TypeVar("Answer")


class ParallelLearner:
    """The Learner protocol over Workers, which are started by the first call that needs them."""

    def __init__(self, job: Job, workers: Workers) -> None:
        self.job, self.workers = job, workers
        self._is_open = False

    def step(self, groups: Sequence[Sequence[ScoredTrajectory]], *, progress: Progress | None = None) -> StepMetrics:
        written = msgspec.json.encode(groups).decode()
        return self._call("step", {"groups": written}, StepMetrics, progress=progress)

    def write_learned(self, path: Path) -> None:
        self._call("write_learned", {"path": str(path.resolve())}, NoneType)

    def begin_sft(self, examples: Sequence[dict[str, Any]], evaluated: Sequence[dict[str, Any]] = ()) -> int:
        return self._call("begin_sft", {"examples": examples, "evaluated": evaluated}, int)

    def take_sft(self, num_updates: int) -> SftProgress:
        return self._call("take_sft", {"num_updates": num_updates}, SftProgress)

    def end_sft(self) -> None:
        self._call("end_sft", {}, NoneType)

    def score(self, token_ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        return self._call("score", {"token_ids": list(token_ids), "temperature": temperature}, list[float])

    def save(self, directory: Path) -> None:
        self._call("save", {"directory": str(directory.resolve())}, NoneType)

    def load(self, directory: Path) -> None:
        self._call("load", {"directory": str(directory.resolve())}, NoneType)

    def start(self) -> None:
        if not self.workers.pids:
            self.workers.start()

    def check(self) -> None:
        self.workers.check()

    def close(self) -> None:
        self.workers.close()

    def _call(
        self, method: str, params: dict[str, Any], kind: type[Answer], *, progress: Progress | None = None
    ) -> Answer:
        if not self._is_open:
            self.start()
            self.workers.call("open", self.job.model_dump(mode="json"))
            self._is_open = True
        answer = self.workers.call(method, params, progress=progress)
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise LearnerError(f"the learner's processes gave a wrong answer to {method}: {error}") from error


def parallel_learner(job: Job, *, logs: Path | None) -> ParallelLearner:
    """The learner of that job. Its processes write their logs to `logs`, or to a temporary directory if it is None.

    Raises UsageError: other machines could reach the rendezvous, and there is no secret.
    """
    rendezvous = None
    if job.learner.nodes > 1:
        assert job.learner.rendezvous is not None, "checked by the configuration"
        address = Address.parse(job.learner.rendezvous)
        rendezvous = Rendezvous(
            Meeting(
                address=address,
                nodes=job.learner.nodes,
                secret=read_secret(address),
                identity=partial(identity_of, job),
                dtype=job.model.dtype,
                deadline_s=job.learner.join_timeout_s,
            )
        )
    return ParallelLearner(job, Workers(job.learner.processes, logs=logs, rendezvous=rendezvous))
