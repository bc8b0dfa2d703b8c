"""A learner over several nodes: the step of one process, by processes that another command has started.

Nodes are real processes on this machine's loopback: `art join` as a child, the first node in this process.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from art_cli.config.compose import load_config
from art_cli.learners.processes.job import Job, make_job
from art_cli.learners.processes.workers import ParallelLearner, Workers, parallel_learner
from art_cli.learners.torch_learner import TorchLearner
from art_cli.loop.decide import decide_by_base
from art_cli.runs.durable import read_lines
from art_cli.runs.manifest import verify_checkpoint
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import LearnedTrajectory
from art_cli.runtime.errors import LearnerError
from tests.learners.test_parallel_learner import (
    ADAPTER,
    DEMOS,
    MOMENTS,
    alone,
    check_alike,
    distance,
    played,
    saved,
)
from tests.letters.build import build
from tests.support.models.warm_up import warm_up
from tests.support.paths import LETTERS, ROOT
from tests.support.processes import forked
from tests.support.processes.process_table import descendants, is_alive
from tests.support.processes.waiting import wait_until
from tests.support.servers.ports import free_port

SECRET = "0123456789abcdef0123456789abcdef"
CONFIG = """
name: nodes
model: {{base: base, lora: {{rank: 4, alpha: 8}}}}
rollout: {{entry: "rollout.py:rollout", scenarios: scenarios.jsonl, sampling: {{max_tokens: 16}}}}
train: {{learning_rate: 1.0e-3, epochs_per_step: 1, max_logprob_gap: 100.0}}
sft: {{demos: demos.jsonl, batch_size: 2}}
engine: embedded
learner:
  {{name: torch, device: cpu, micro_batch_tokens: 60, nodes: 2, rendezvous: "127.0.0.1:{port}", join_timeout_s: 240}}
"""

# Written into sitecustomize.py: every class that an unpickler looks up ends the process, so that none can be read.
NO_PICKLES = """
import sys

def refuse(event, arguments):
    if event == "pickle.find_class" and "torch.distributed" in sys.modules:
        import os, traceback
        traceback.print_stack()
        os._exit(99)

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration and a base model, as each node has one."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "base").mkdir()
    build(directory / "base")
    return directory


@pytest.fixture(autouse=True)
def own_port(project: Path) -> None:
    """Each test has a port of its own: processes that the test before it killed may hold theirs a while longer."""
    (project / "config.yaml").write_text(CONFIG.format(port=free_port()))


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ART_NODES_SECRET", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that every number of processes computes in the same order


def job_of(project: Path, *overrides: str) -> Job:
    base = str(project / "base")
    decided = decide_by_base(load_config(project / "config.yaml", list(overrides)), base, recorded="float32")
    return make_job(decided.config, base, directory=project, dtype="float32")


class Node:
    """`art join` as a child."""

    def __init__(self, project: Path, *overrides: str) -> None:
        command = ["join", project / "config.yaml", "--wait", "240", *overrides]
        self.child = forked.Forked(command, stderr=forked.PIPE, stdout=forked.DEVNULL)

    def end(self, timeout_s: float = 60.0) -> tuple[int, str]:
        """Its exit code and what it said."""
        _, said = self.child.communicate(timeout=timeout_s)
        return self.child.returncode, said

    def kill(self) -> None:
        self.child.kill()
        if self.child.stderr is not None and not self.child.stderr.closed:
            self.child.communicate()


def worker_pid(above: int, rank: int) -> int:
    """The learner's process of that rank below a process."""
    for pid in descendants(above):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if b"art_cli.learners.processes.worker" in words and f"RANK={rank}".encode() in environment:
                return pid
    raise AssertionError(f"no process of rank {rank}")


@contextlib.contextmanager
def joined(project: Path, logs: Path, *overrides: str) -> Iterator[tuple[ParallelLearner, Node]]:
    """A learner whose second node is a child of this process, and takes the learning rate from it."""
    node = Node(project, *overrides, "train.learning_rate=auto")
    learner = parallel_learner(job_of(project, *overrides), logs=logs)
    try:
        yield learner, node
    finally:
        learner.close()
        node.kill()


def two_steps(learner: TorchLearner | ParallelLearner, base: Path, path: Path) -> Path:
    """A checkpoint after two steps, the second after a load; what the first one learned is written beside it."""
    path.mkdir()
    learner.step(played(base, seed=1))
    learner.write_learned(path / "learned.jsonl")
    learner.load(saved(learner, path / "halfway"))
    learner.step(played(base, seed=2))
    return saved(learner, path / "end")


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_of_two_processes_take_the_steps_of_one_process_and_read_no_pickle(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node holds the whole model. The other one sees no file of the run: checkpoints are sent to it.

    Then the other node is killed outright: the learner names it, and its processes end.
    """
    (tmp_path / "sitecustomize.py").write_text(NO_PICKLES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    one = alone(job_of(project))
    reference = two_steps(one, project / "base", tmp_path / "one")
    with joined(project, tmp_path / "logs", "learner.processes=2") as (learner, node):
        path = two_steps(learner, project / "base", tmp_path / "nodes")
        assert learner.score(range(3, 40)) == pytest.approx(one.score(range(3, 40)), abs=1e-4)
        assert distance(reference / ADAPTER, path / ADAPTER) < 1e-6
        assert distance(reference / MOMENTS, path / MOMENTS) < 1e-5
        lines = [list(read_lines(tmp_path / name / "learned.jsonl", LearnedTrajectory)) for name in ("one", "nodes")]
        check_alike(*lines)
        numbers = [warm_up(each, DEMOS[1:], DEMOS[:1]) for each in (one, learner)]
        assert numbers[1]["eval_loss"] == pytest.approx(numbers[0]["eval_loss"], rel=1e-4)
        below = descendants(node.child.pid)
        node.child.kill()
        with pytest.raises(LearnerError, match=r"^learner node 1 \(127.0.0.1\) of 2 is gone; nothing is"):
            while True:
                learner.check()
                time.sleep(0.1)
        wait_until(lambda: not any(is_alive(pid) for pid in below))


@pytest.mark.slow
def test_two_nodes_with_one_copy_are_two_processes_bit_for_bit_and_a_killed_one_is_named_on_both_machines(
    project: Path, tmp_path: Path
) -> None:
    """With learner.shard=all, ranks are ranks: the same sums in the same order, wherever they run.

    Then a process is stopped and killed, so that it dies in the middle of a step that the first node waits in.
    """
    workers = Workers(2, logs=tmp_path / "logs of processes")
    try:
        here = job_of(
            project, "learner.nodes=1", "learner.rendezvous=null", "learner.processes=2", "~learner.join_timeout_s"
        )
        reference = two_steps(ParallelLearner(here, workers), project / "base", tmp_path / "processes")
    finally:
        workers.close()
    with joined(project, tmp_path / "logs", "learner.shard=all") as (learner, node):
        path = two_steps(learner, project / "base", tmp_path / "nodes")
        for name in (ADAPTER, MOMENTS, "optimizer.json"):
            assert (path / name).read_bytes() == (reference / name).read_bytes(), name
        victim = worker_pid(node.child.pid, 1)
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (victim, signal.SIGKILL)).start()
        died = r"learner process 1 of 2 died \(killed by SIGKILL\)"
        with pytest.raises(LearnerError, match=rf"^node 1 \(127.0.0.1\): {died}; nothing is lost.*same commands"):
            learner.step(played(project / "base"))
        with pytest.raises(LearnerError, match=died):
            learner.check()
        learner.close()
        code, said = node.end()
        assert code == 1 and re.search(died, said) and "Traceback" not in said, said


@pytest.mark.slow
def test_a_run_that_loses_its_own_process_ends_on_both_nodes_and_the_same_commands_finish_it(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    nodes = ("learner=torch", "learner.device=cpu", "learner.nodes=2", f"learner.rendezvous={address}", "eval=null")
    files = RunDir(tmp_path / "letters")
    command = ["train", LETTERS / "config.yaml", f"runs={tmp_path}"]
    command += [*nodes, "engine=embedded", "train.steps=3"]

    def started() -> tuple[Node, forked.Forked]:
        node = Node(LETTERS, *nodes)
        return node, forked.Forked(command, stdout=forked.PIPE, stderr=forked.PIPE)

    node, run = started()
    try:
        wait_until(lambda: any(line.split == "train" for line in files.metrics()), 240, while_running=run)
        os.kill(worker_pid(run.pid, 0), signal.SIGKILL)
        _, said = run.communicate(timeout=120)
        died = "learner process 0 of 2 died (killed by SIGKILL)"
        assert run.returncode == 1 and "error: " in said and died in said, said  # in a step or between two
        code, said = node.end()
        assert code == 1 and f"ended: {died}" in said, said
        steps = files.checkpoint_steps()
        assert [verify_checkpoint(files.checkpoint_path(step)).step for step in steps] == steps
        assert not list(files.root.rglob("*.tmp*"))
        node, run = started()
        _, said = run.communicate(timeout=240)
        assert run.returncode == 0, said
        code, said = node.end()
        assert code == 0 and "has closed its learner" in said, said
        assert [line.step for line in files.metrics() if line.split == "train"] == [0, 1, 2]
        trajectories = [each.id for step in range(3) for each in files.trajectories(step)]
        assert len(trajectories) == len(set(trajectories)) == 36
    finally:
        node.kill()
        run.kill()
        run.communicate()
