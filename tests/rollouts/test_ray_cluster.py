"""Rollouts on a real Ray cluster of two nodes on this machine, which the tests of this file share."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import pytest_asyncio

from art_cli.chat.requests import Sampling
from art_cli.config.schema import RolloutConfig
from art_cli.rollouts.cluster.cluster_rollout import ClusterRollout
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import RolloutError
from tests.support.others.ray_cluster import LocalCluster
from tests.support.standins.scripted import Engine, ScriptedBackend

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ROLLOUT = """
import asyncio, json, os, sys, time, urllib.request
from art_cli import Outcome
import neighbour

class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.handle = open(os.devnull)
    def __reduce__(self):
        raise RuntimeError("no pickle of this")

def call(policy):  # by the standard library, whose import takes the processes no time
    body = json.dumps({"model": policy.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + policy.api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(policy.base_url + "/chat/completions", body, headers)
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).read()

async def ask(policy):
    await asyncio.to_thread(call, policy)

async def rollout(policy, scenario):
    if scenario["do"] == "block":
        time.sleep(5)
    await ask(policy)
    match scenario["do"]:
        case "tell":
            here = os.path.dirname(os.path.abspath(__file__))
            files = sorted(os.path.join(place, name).removeprefix(here) for place, _, names in os.walk(here)
                           for name in names if "__pycache__" not in place)
            told = {"files": files, "named": os.environ.get("ART_TEST_NAMED"), "url": policy.base_url,
                    "secret": os.environ.get("ART_TEST_SECRET"), "key": policy.api_key, "step": policy.step,
                    "parent": os.getppid(), "word": neighbour.WORD}
            return Outcome(reward=scenario["index"], metrics={"won": True}, metadata=told)
        case "exit":
            os._exit(7)
        case "exit once":
            flag = os.path.join(scenario["shared"], f"exited-{scenario['index']}")
            if not os.path.exists(flag):
                open(flag, "w").close()
                os._exit(7)
            return 1.0
        case "raise":
            raise Unpicklable("not to be pickled", 2)
        case "print":
            print("x" * 10_000_000)
            print("the end")
            return 1.0
        case "nan":
            return float("nan")
        case "huge":
            return Outcome(reward=1.0, metadata={"text": "x" * 17_000_000})
        case "deep":
            deep = []
            for _ in range(300):
                deep = [deep]
            return Outcome(reward=1.0, metadata={"deep": deep})
        case "wait":
            name = os.path.join(scenario["shared"], f"{scenario['index']}-{os.getpid()}")
            with open(name + ".part", "w") as file:
                file.write(policy.api_key)
            os.rename(name + ".part", name)
            while not os.path.exists(os.path.join(scenario["shared"], "go")):
                await asyncio.sleep(0.05)
            await ask(policy)
            return float(scenario["index"])
"""


class Ray:
    """The cluster, its nodes, and a rollout that is open on it."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.backend = ScriptedBackend()
        self.gateway = Gateway(Engine(self.backend, step=2), defaults=Sampling(), seed=0, max_turns=50)
        self.rollout: ClusterRollout

    def config(self, **options: Any) -> RolloutConfig:
        cluster = {"address": self.cluster.address, **options.pop("cluster", {})}
        return RolloutConfig(entry="rollout.py:rollout", scenarios="none", cluster=cluster, **options)

    def make(self, **options: Any) -> ClusterRollout:
        config = self.config(**options)
        played = {"entry": config.entry, "environment": None, "command": None}
        return ClusterRollout(config, played, directory=self.directory, runs=self.directory / "runs")

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[ClusterRollout]:
        rollout = self.make(**options)
        try:
            facts = await rollout.connect()
            async with self.gateway.serve(facts.host) as url:
                rollout.open(facts.host, urlsplit(url).port)
                yield rollout
        finally:
            await rollout.close()

    async def play(self, do: str, *, num: int = 1, shared: Path | None = None, **options: Any) -> list[Trajectory]:
        """The attempts at a scenario, in the order of their plans."""
        runner = Runner(self.config(**options), self.directory, self.gateway, backoff_s=0, cluster=self.rollout)
        await runner.__aenter__()  # and no exit, which would close the rollout
        finished: list[Trajectory] = []
        plans = [
            RolloutPlan(
                trajectory_id=f"{do}-{index}",
                group_id=do,
                group_size=num,
                index=index,
                scenario={"id": do, "do": do, "index": index, "shared": str(shared)},
                step=2,
            )
            for index in range(num)
        ]
        await runner.run(plans, finished.append)
        assert len({each.id for each in finished}) == num == len(finished)
        return sorted(finished, key=lambda trajectory: trajectory.index)


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "2")  # after as many seconds Ray gives a cluster up
        with LocalCluster(1, 1) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ray(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ray]:
    """A rollout that is open on both nodes."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "rollout.py").write_text(ROLLOUT)
    (directory / "neighbour.py").write_text("WORD = 'near'")
    for name in (".env", "runs/mine/config.json", "data/large.bin", "data/small.txt", "data/other.csv", ".git/config"):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x" * (30_000 if "large" in name else 10))
    staged = Ray(cluster, directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ART_TEST_SECRET", "only on this machine")
        patch.setenv("ART_TEST_NAMED", "for the nodes too")
        settings = {"env": ["ART_TEST_NAMED"], "exclude": ["*.csv"], "max_file_mb": 0.02}
        async with staged.open(processes=2, cluster=settings) as staged.rollout:
            yield staged


async def test_attempts_are_played_on_the_nodes_with_the_code_and_the_variables_that_they_may_have(ray: Ray) -> None:
    played = await ray.play("tell", num=6)
    assert [t.error for t in played] == [None] * 6
    assert [(t.returned_reward, t.metrics["won"], len(t.turns)) for t in played] == [(i, 1, 1) for i in range(6)]
    told = [t.metadata for t in played]
    assert told[0]["files"] == ["/data/small.txt", "/neighbour.py", "/rollout.py"]
    assert {(each["word"], each["named"], each["secret"], each["step"]) for each in told} == {
        ("near", "for the nodes too", None, 2)
    }
    assert len({each["key"] for each in told}) == 6
    assert {urlsplit(each["url"]).hostname for each in told} == {ray.cluster.address.partition(":")[0]}
    assert ray.gateway._backends == {}
    async with httpx.AsyncClient() as client:
        for key in (told[0]["key"], "none"):
            answer = await client.get(f"{told[0]['url']}/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401


@pytest.mark.parametrize(
    ("do", "said"),
    [
        ("raise", "Unpicklable: not to be pickled (rollout.py:44)"),
        ("nan", "reward: reward is nan, not a finite number"),
        ("huge", "metadata: it is 16.2 MiB as JSON; at most 16 are kept: write it to a file"),
        ("deep", "metadata: it cannot be written as JSON: it is nested more than 200 deep"),
    ],
)
async def test_what_goes_wrong_on_a_node_is_said_as_it_is_here(ray: Ray, do: str, said: str) -> None:
    [played] = await ray.play(do)
    assert (played.error or played.failure) == said and played.metrics["num_retries"] == 0
    assert len(played.turns) == 1


async def test_an_attempt_that_kills_its_process_is_played_again_and_in_the_end_fails_alone(
    ray: Ray, tmp_path: Path
) -> None:
    [once] = await ray.play("exit once", shared=tmp_path)
    assert (once.error, once.returned_reward, once.metrics["num_retries"], len(once.turns)) == (None, 1.0, 1, 1)
    always = await ray.play("exit", retries=1)
    assert always[0].error is not None and always[0].error.startswith("process: its process ended (status 7)")
    assert always[0].metrics["num_retries"] == 1


async def test_output_without_end_is_cut_and_named(ray: Ray, capfd: pytest.CaptureFixture[str]) -> None:
    [played] = await ray.play("print")
    assert played.returned_reward == 1.0
    printed = ""
    async with asyncio.timeout(20):
        while "more characters were printed" not in printed:
            await asyncio.sleep(0.1)
            printed += capfd.readouterr().err
    assert 1000 < len(printed) < 200_000 and "(raylet)" not in printed


async def test_an_attempt_that_blocks_ends_at_its_timeout_with_the_cause(ray: Ray) -> None:
    [played] = await ray.play("block", timeout_s=1, retries=0)
    assert played.error is not None and played.error.startswith("timeout: not finished after 1 s")
    assert "blocks the event loop" in played.error


async def test_a_node_that_dies_costs_only_its_attempts_which_are_played_again_with_new_keys(
    ray: Ray, tmp_path: Path
) -> None:
    playing = asyncio.create_task(ray.play("wait", num=8, shared=tmp_path, retries=0))
    async with asyncio.timeout(30):
        while len(list(tmp_path.glob("*[0-9]"))) < 8:
            await asyncio.sleep(0.05)
    first = {path.name: path.read_text() for path in tmp_path.glob("*[0-9]")}
    assert len({name.partition("-")[2] for name in first}) == 2  # the processes of both nodes
    ray.cluster.kill(1)
    async with asyncio.timeout(60):
        while len(again := {path.name for path in tmp_path.glob("*[0-9]")} - first.keys()) < 4:
            await asyncio.sleep(0.05)
    moved = {name.partition("-")[0] for name in again}
    late = {key for name, key in first.items() if name.partition("-")[0] in moved}
    async with httpx.AsyncClient(base_url=ray.gateway.base_url) as client:
        for key in late:  # a node that is cut off, and not dead, may call on
            answer = await client.get("/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 401
    (tmp_path / "go").touch()
    played = await playing
    assert [(t.error, t.returned_reward, len(t.turns)) for t in played] == [(None, i, 2) for i in range(8)]
    assert {str(t.index) for t in played if t.metrics["num_retries"]} == moved
    assert ray.gateway._backends == {}  # a finished attempt leaves no state


async def test_a_full_cluster_is_waited_for_and_then_the_run_stops_with_a_line(ray: Ray) -> None:
    waiting = ray.make(processes=1, cluster={"resources": {"sandbox": 1}, "wait_s": 1})
    try:
        await waiting.connect()
        with pytest.raises(RolloutError, match="no place in the cluster was free for 1 s .*run the same command again"):
            await waiting.ready()
    finally:
        await waiting.close()


async def test_without_the_whole_cluster_the_run_stops_with_a_line(ray: Ray, tmp_path: Path) -> None:
    playing = asyncio.create_task(ray.play("wait", num=4, shared=tmp_path))
    async with asyncio.timeout(30):
        while len(list(tmp_path.glob("*[0-9]"))) < 4:
            await asyncio.sleep(0.05)
    await asyncio.to_thread(ray.cluster.stop)
    with pytest.raises(RolloutError, match=r"nothing answers at .*: Connection refused"):
        await asyncio.wait_for(playing, 60)
