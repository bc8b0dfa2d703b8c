"""What a rollout costs more on the nodes of a Ray cluster than in local processes, and what a node's death costs.

    python -m benchmarks.speed.ray_rollouts [--attempts 300] [--repeats 5]

A Ray cluster of three nodes on this machine, with a processor each, against three local processes. Both play the same
attempts through the same gateway, in turn, each repeat; the model answers at once, so what is measured is the way of an
attempt and of its calls. Then a round in which a node is killed when a third of its attempts are done.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from art_cli.chat.requests import Sampling
from art_cli.config.schema import RolloutConfig
from art_cli.rollouts.cluster.cluster_rollout import ClusterRollout
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import threads
from tests.support.others.ray_cluster import LocalCluster
from tests.support.standins.scripted import Engine, ScriptedBackend

NUM_NODES = 3
KILLED = 2  # the node that is lost; this process is on node 0
ROLLOUT = """
async def rollout(policy, scenario):
    messages = [{"role": "user", "content": "hi"}]
    for _ in range(scenario["calls"]):
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        messages += [said, {"role": "user", "content": "on"}]
    return 1.0
"""


class Sides(NamedTuple):
    local: Runner
    cluster: Runner


@asynccontextmanager
async def opened(directory: Path, address: str, concurrency: int) -> AsyncIterator[Sides]:
    common = {"entry": "rollout.py:rollout", "scenarios": "none", "processes": NUM_NODES, "concurrency": concurrency}
    here, there = RolloutConfig(**common), RolloutConfig(**common, cluster={"address": address})  # type: ignore[arg-type]
    played = {"entry": "rollout.py:rollout", "environment": None, "command": None}
    gateway = Gateway(Engine(ScriptedBackend()), defaults=Sampling(), seed=0, max_turns=50)
    rollout = ClusterRollout(there, played, directory=directory, runs=directory / "runs")
    try:
        facts = await rollout.connect()
        async with gateway.serve(facts.host) as url:
            rollout.open(facts.host, urlsplit(url).port)
            async with (
                Runner(here, directory, gateway) as local,
                Runner(there, directory, gateway, cluster=rollout) as on,
            ):
                yield Sides(local, on)
    finally:
        await rollout.close()


async def play(
    runner: Runner, attempts: int, calls: int, kill: LocalCluster | None = None
) -> tuple[float, list[Trajectory]]:
    """Seconds, and the trajectories. `kill` loses a node when a third of them are done."""
    done: list[Trajectory] = []
    killing: list[asyncio.Task[None]] = []

    def on_finished(trajectory: Trajectory) -> None:
        done.append(trajectory)
        if kill is not None and len(done) == attempts // 3:
            killing.append(asyncio.create_task(asyncio.to_thread(kill.kill, KILLED)))

    plans = [
        RolloutPlan(
            trajectory_id=f"t{index}",
            group_id="g",
            group_size=attempts,
            index=index,
            scenario={"id": "s", "calls": calls},
            step=0,
        )
        for index in range(attempts)
    ]
    begin = time.perf_counter()
    await runner.run(plans, on_finished)
    seconds = time.perf_counter() - begin
    await asyncio.gather(*killing)
    failed = [trajectory.error for trajectory in done if trajectory.error]
    assert not failed, failed[:3]
    assert {trajectory.id for trajectory in done} == {plan.trajectory_id for plan in plans} and len(done) == attempts
    assert all(len(trajectory.turns) == calls for trajectory in done)
    return seconds, done


async def measure(attempts: int, repeats: int, concurrency: int) -> None:
    with tempfile.TemporaryDirectory(prefix="art-bench-") as made, LocalCluster(*[1] * NUM_NODES) as cluster:
        directory = Path(made)
        (directory / "rollout.py").write_text(ROLLOUT)
        async with opened(directory, cluster.address, concurrency) as sides:
            print("| calls | local ms | cluster ms | ratio | more ms per rollout |\n|---|---|---|---|---|")
            for calls in (1, 4):
                for runner in sides:  # every process has imported its packages and has open connections
                    await play(runner, 4 * concurrency, calls)
                rounds = [[(await play(runner, attempts, calls))[0] for runner in sides] for _ in range(repeats)]
                print(_row(calls, attempts, rounds))
            await _report_death(sides.cluster, cluster, attempts)


def _row(calls: int, attempts: int, rounds: list[list[float]]) -> str:
    local, there = ([1000 * seconds / attempts for seconds in side] for side in zip(*rounds, strict=True))
    ratio = statistics.median(b / a for a, b in zip(local, there, strict=True))
    more = statistics.median(b - a for a, b in zip(local, there, strict=True))
    return f"| {calls} | {statistics.median(local):.2f} | {statistics.median(there):.2f} | {ratio:.2f} | {more:+.2f} |"


async def _report_death(runner: Runner, cluster: LocalCluster, attempts: int) -> None:
    usual, _ = await play(runner, attempts, 4)
    seconds, done = await play(runner, attempts, 4, kill=cluster)
    moved = sum(trajectory.metrics["num_retries"] > 0 for trajectory in done)
    print(
        f"\nOne of {NUM_NODES} nodes killed after a third: {len(done)} of {attempts} attempts there, each once, "
        f"{moved} played again; {seconds:.1f} s against {usual:.1f} s without."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    threads.run(measure(options.attempts, options.repeats, options.concurrency))


if __name__ == "__main__":
    main()
