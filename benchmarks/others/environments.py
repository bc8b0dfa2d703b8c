"""How many environments a tiny model plays end to end: every generator of reasoning-gym, every game of textarena.

    python -m benchmarks.others.environments [--library textarena] [--only TicTacToe-v0]

One attempt each, through engine, gateway and runner as in training, by the random model `builtin:tiny` with a longer
context. An environment is played when the attempt has recorded turns and a reward, and no error. Some games never end
by themselves when all that the players say is invalid. They end as in training, at `rollout.max_turns`. The seed is 0,
or the next one where the game was over before the trained seat had a move. Those that cannot be opened here are listed
with the reason that `art environments` gives.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import load_config
from art_cli.config.schema import EnvironmentConfig, RolloutConfig
from art_cli.learners import load_policy
from art_cli.loop.decide import decide_engine
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.models.builtin_models import tiny
from art_cli.rollouts.environments import libraries, library_named
from art_cli.rollouts.rollout_runner import RolloutPlan, Runner
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import ArtError, describe

CONTEXT = 32_768  # tokens; the longest games of random moves take some thousands
MAX_TURNS, MAX_TOKENS, TIMEOUT_S = 50, 8, 300.0  # the number of turns is the default of rollout.max_turns
NUM_SEEDS = 8  # as many seats as a game has by default, at most
SILENT = "over before the trained seat had a move"
ENDINGS = {
    "turn_limit": "played until rollout.max_turns",
    "context_length_exceeded": "played until its context was full",
}
CONFIG = """
name: environments
model: {{base: "{base}", max_length: {context}}}
rollout:
  environment: reasoning_gym/chain_sum
  max_turns: {turns}
  processes: 0
  sampling: {{max_tokens: {tokens}}}
"""


class Row(NamedTuple):
    """One environment. `ending` is "played", or why it was not."""

    name: str
    ending: str
    reward: float | None
    num_turns: int
    seconds: float


def build(directory: Path) -> None:
    """Writes builtin:tiny with a context of CONTEXT tokens."""
    tiny(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": CONTEXT}))


async def measure(only_library: str | None, only: str | None) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        base = directory / "base"
        build(base)
        path = directory / "config.yaml"
        path.write_text(CONFIG.format(base=base, context=CONTEXT, turns=MAX_TURNS, tokens=MAX_TOKENS))
        loaded = decide_engine(load_config(path))
        weights = load_policy(loaded.config, str(base))
        async with open_sampler(loaded, weights, checkpoint=None, step=0, logs=directory) as sampler:
            for name in libraries():
                if only_library not in (None, name):
                    continue
                with contextlib.redirect_stdout(sys.stderr):
                    listed = list(library_named(name).listed())
                for each in listed:
                    if only in (None, each.name):
                        full = f"{name}/{each.name}"
                        row = Row(full, f"not here: {each.problem}", None, 0, 0.0)
                        for seed in range(NUM_SEEDS if not each.problem else 0):
                            row = await _row(sampler, directory, full, seed)
                            if row.ending != SILENT:
                                break
                        rows.append(row)
                        print(_line(rows[-1]), flush=True)
    return rows


async def _row(sampler: Sampler, directory: Path, name: str, seed: int) -> Row:
    """One attempt."""
    config = RolloutConfig(
        environment=EnvironmentConfig(name=name), processes=0, retries=0, max_turns=MAX_TURNS, timeout_s=TIMEOUT_S
    )
    scenario = {"id": str(seed), "seed": seed}
    plan = RolloutPlan(trajectory_id=name, group_id=name, group_size=1, index=0, scenario=scenario, step=0)
    played: list[Trajectory] = []
    begin = time.perf_counter()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            async with Runner(config, directory, sampler.gateway) as runner:
                await runner.run([plan], played.append)
    except ArtError as error:
        return Row(name, describe(error), None, 0, time.perf_counter() - begin)
    trajectory = played[0]
    ending = trajectory.error or ENDINGS.get(trajectory.limit or "") or ("played" if trajectory.turns else SILENT)
    return Row(name, ending, trajectory.returned_reward, len(trajectory.turns), time.perf_counter() - begin)


def _has_ended(row: Row) -> bool:
    return row.ending == "played"


def _was_cut(row: Row) -> bool:
    return row.ending in ENDINGS.values()


def _line(row: Row) -> str:
    reward = "" if row.reward is None else f"{row.reward:.3g}"
    return f"{row.name:42s} {row.num_turns:4d} turns {reward:>8s} {row.seconds:6.1f} s  {row.ending}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library")
    parser.add_argument("--only")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    rows = asyncio.run(measure(arguments.library, arguments.only))
    print()
    for library, num in Counter(row.name.partition("/")[0] for row in rows).items():
        own = [row for row in rows if row.name.startswith(f"{library}/")]
        there = [row for row in own if not row.ending.startswith("not here")]
        ended, cut = (sum(map(test, own)) for test in (_has_ended, _was_cut))
        print(f"{library}: {ended + cut} played of {len(there)} that can be opened here, of {num}", end="")
        print(f"; {ended} to their own end, {cut} until a limit")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
