"""What a rollout's call costs, from the user's code to the engine and back: processor time, by who spends it.

    python -m benchmarks.speed.calls                 # about two minutes on 2 cores
    python -m benchmarks.speed.calls --base DIR      # DIR: the demo's policy, made once; saves making it
    python -m benchmarks.speed.calls --profile       # and which functions the event loop's thread spends its time in

Figure 3: the games of the demo, played as `art train` plays them: two rollout processes with the ordinary openai
client, the capturing gateway, the embedded engine with the policy after its warm-up. Per call, in microseconds of
processor time: `rollouts` is the user's function and its client, in their processes; `gateway` is this process's event
loop: HTTP, template, tokenizer, records; `engine` is the rest of this process: the engine's thread with those of torch.
Medians over rounds; the first round, in which all of them warm up, is left out.
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import LoadedConfig, load_config
from art_cli.learners import load_policy
from art_cli.loop.decide import decide_engine
from art_cli.loop.owed_groups import plan_groups
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.rollouts.rollout_runner import Progress
from art_cli.rollouts.scenario_files import load_scenarios
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime import threads
from benchmarks.shared.sides import Row, table
from benchmarks.speed.loop import make_base
from benchmarks.speed.loop_shapes import SHAPES

TARGET_MS = 2.5  # processor milliseconds of a call in all


class Cost(NamedTuple):
    """Seconds of processor time, and of the clock, of one round."""

    rollouts: float
    gateway: float
    engine: float
    wall: float
    num_calls: int

    def per_call_us(self, name: str) -> float:
        return 1e6 * float(getattr(self, name)) / self.num_calls


def measure(base: Path, *, rounds: int, games: int, is_profiled: bool = False) -> list[Cost]:
    settings = [f"model.base={base}", "sft=null", f"rollout.groups_per_step={games // 8}"]
    loaded = decide_engine(load_config(SHAPES["tiny"].config, settings))
    return threads.run(_measure(loaded, rounds, is_profiled))


async def _measure(loaded: LoadedConfig, rounds: int, is_profiled: bool) -> list[Cost]:
    config = loaded.config
    scenarios = load_scenarios(config.rollout.scenarios, loaded.directory)
    weights = load_policy(config, str(config.model.base))
    profiler, found = cProfile.Profile(), []
    with tempfile.TemporaryDirectory(prefix="art-calls-") as logs:
        async with open_sampler(loaded, weights, checkpoint=None, step=0, logs=Path(logs)) as sampler:
            for number in range(rounds + 1):
                if is_profiled and number:
                    profiler.enable()
                found.append(await _play(sampler, scenarios[: config.rollout.groups_per_step], loaded, number))
                profiler.disable()
    if is_profiled:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    return found[1:]


async def _play(sampler: Sampler, scenarios: list[dict[str, object]], loaded: LoadedConfig, step: int) -> Cost:
    played: list[Trajectory] = []
    plans = plan_groups(scenarios, step=step, group_size=loaded.config.rollout.group_size)
    before = _clocks()
    await sampler.play(plans, played.append, Progress("games"))
    rollouts, gateway, process, wall = (now - then for now, then in zip(_clocks(), before, strict=True))
    failed = [trajectory.error for trajectory in played if trajectory.error]
    assert not failed, failed[0]
    num_calls = sum(len(trajectory.turns) for trajectory in played)
    return Cost(rollouts, gateway, process - gateway, wall, num_calls)


def _clocks() -> tuple[float, float, float, float]:
    """Processor seconds of the processes below this one, of this thread and of this process; the clock."""
    return _below(Path("/proc/self")), time.thread_time(), time.process_time(), time.perf_counter()


def _below(process: Path) -> float:
    """Processor seconds of all processes that this one has started, and those have."""
    found = 0.0
    for task in (process / "task").iterdir():
        for number in (task / "children").read_text().split():
            child = Path(f"/proc/{number}")
            found += (
                sum(float((each / "schedstat").read_text().split()[0]) for each in (child / "task").iterdir()) / 1e9
            )
            found += _below(child)
    return found


def rows(costs: list[Cost]) -> list[Row]:
    each = {
        name: statistics.median(cost.per_call_us(name) for cost in costs) for name in ("rollouts", "gateway", "engine")
    }
    total = statistics.median(sum(cost.per_call_us(name) for name in each) for cost in costs) / 1000
    rate = statistics.median(cost.num_calls / cost.wall for cost in costs)
    split = ", ".join(f"{name} {value:.0f} us" for name, value in each.items())
    calls = sum(cost.num_calls for cost in costs)
    return [
        Row("3", "processor time of a call of the demo", f"{total:.2f} ms", "", None, f"<= {TARGET_MS} ms", split),
        Row("3", "calls per second of the demo's sampling", f"{rate:.0f}", "", None, "", f"{calls} calls"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="directory of the demo's policy after its warm-up")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--games", type=int, default=256, help="number of games in a round")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="art-calls-") as scratch:
        base = given.base or make_base(SHAPES["tiny"], Path(scratch))
        print(table(rows(measure(base, rounds=given.rounds, games=given.games, is_profiled=given.profile))))


if __name__ == "__main__":
    main()
