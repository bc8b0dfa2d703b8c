"""A real Ray cluster on this machine, in processes of its own: `python -m tests.support.others.ray_cluster NODE ...`.

NODE is a node's number of processors; the first node is the one that drivers join. It prints the cluster's address,
then reads commands: `kill 1` ends a node as a lost machine does, `add 1` adds one, the end of its input ends it.
"""

import os
import shutil
import subprocess
import sys
import tempfile

from tests.support.paths import ROOT

STORE = 80 * 2**20  # bytes of a node's object store, near the least that Ray takes


class LocalCluster:
    """The cluster, seen from a test. Example: with LocalCluster(1, 1) as cluster: cluster.kill(1)"""

    def __init__(self, *nodes: int) -> None:
        self._nodes = nodes
        self.address = ""

    def __enter__(self) -> "LocalCluster":
        self._directory = tempfile.mkdtemp(prefix="art-ray-", dir="/tmp")  # a short path, because sockets lie in it
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, self._nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "RAY_TMPDIR": self._directory},
        )
        self.address = self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self, node: int) -> None:
        self._tell(f"kill {node}")

    def add(self, processors: int) -> None:
        self._tell(f"add {processors}")

    def stop(self) -> None:
        """The whole cluster is gone."""
        if self._process.poll() is None:
            assert self._process.stdin and self._process.stdout
            self._process.stdin.close()
            self._process.stdout.read()
            self._process.wait(60)
            self._process.stdout.close()

    def _tell(self, command: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError("the cluster ended")


def main() -> None:
    from ray.cluster_utils import Cluster

    first, *others = map(int, sys.argv[1:])
    settings = {"num_cpus": first, "include_dashboard": False, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=settings)
    nodes = [cluster.head_node, *(cluster.add_node(num_cpus=number, object_store_memory=STORE) for number in others)]
    print(f"> {cluster.address}", flush=True)
    for line in sys.stdin:
        command, number = line.split()
        if command == "kill":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(number), object_store_memory=STORE))
        print("> done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
