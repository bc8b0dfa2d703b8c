"""ParallelLearner: a learner in several processes, on one machine or on several nodes, seen from the training loop.

It holds no weights. Each method (remote_calls.py) calls all its processes (workers.py), which are TorchLearners with
one model divided among them (worker.py, sharding.py). A checkpoint has the same format as that of a learner in one
process, and either continues from the other's.
"""

from functools import partial
from pathlib import Path

from art_cli.learners import Progress
from art_cli.learners.processes.job import Job
from art_cli.learners.processes.nodes.node_address import Address
from art_cli.learners.processes.nodes.node_identity import identity_of
from art_cli.learners.processes.nodes.node_secret import read_secret
from art_cli.learners.processes.nodes.rendezvous import Meeting, Rendezvous
from art_cli.learners.processes.remote_calls import RemoteLearner
from art_cli.learners.processes.workers import Workers


class ParallelLearner(RemoteLearner):
    """The Learner protocol over Workers, which are started by the first call that needs them."""

    def __init__(self, job: Job, workers: Workers) -> None:
        self.job, self.workers = job, workers
        self._is_open = False

    def call(self, method: str, given: str, progress: Progress | None) -> str:
        if not self._is_open:
            self.start()
            self.workers.call("open", self.job.model_dump(mode="json"))
            self._is_open = True
        result: str = self.workers.call(method, {"given": given}, progress=progress)
        return result

    def start(self) -> None:
        if not self.workers.pids:
            self.workers.start()

    def check(self) -> None:
        self.workers.check()

    def close(self) -> None:
        self.workers.close()


def parallel_learner(job: Job, *, logs: Path | None) -> ParallelLearner:
    """Returns the learner of a job, whose logs go to `logs`, or to a temporary directory if that is None.

    Raises UsageError if other machines could reach the rendezvous and there is no secret.
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
