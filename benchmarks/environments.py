"""How many environments a tiny model plays end to end: every generator of reasoning-gym, every game of textarena.

    python -m benchmarks.environments [--library textarena] [--only TicTacToe-v0]

One attempt each at seed 0, through engine, gateway and runner as in training, by the random model `builtin:tiny` with a
longer context. An environment is played when the attempt ended by itself, with a reward and recorded turns, and without
an error or a limit. Those that cannot be opened here are listed with the reason that `art environments` gives.
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

from art_cli.builtin_models import tiny
from art_cli.config.compose import load_config
from art_cli.config.schema import EnvironmentConfig, RolloutConfig
from art_cli.environments import libraries
from art_cli.errors import ArtError, describe
from art_cli.learners import load_policy
from art_cli.loop.auto import resolve_auto
from art_cli.loop.sampler import Sampler, open_sampler
from art_cli.rollouts.runner import RolloutPlan, Runner
from art_cli.trajectory import Trajectory

CONTEXT = 32_768  # tokens; the longest games of random moves take some thousands
MAX_TURNS, MAX_TOKENS, TIMEOUT_S = 1000, 12, 500.0
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
        loaded = resolve_auto(load_config(path), "engine", "learner")
        weights = load_policy(loaded.config, str(base))
        async with open_sampler(loaded, weights, checkpoint=None, step=0, logs=directory) as sampler:
            for name, library in libraries().items():
                if only_library not in (None, name):
                    continue
                with contextlib.redirect_stdout(sys.stderr):
                    listed = list(library.listed())
                for each in listed:
                    if only in (None, each.name):
                        full = f"{name}/{each.name}"
                        row = await _row(sampler, directory, full) if not each.problem else None
                        rows.append(row or Row(full, f"not here: {each.problem}", None, 0, 0.0))
                        print(_line(rows[-1]), flush=True)
    return rows


async def _row(sampler: Sampler, directory: Path, name: str) -> Row:
    """One attempt at seed 0."""
    config = RolloutConfig(
        environment=EnvironmentConfig(name=name), processes=0, retries=0, max_turns=MAX_TURNS, timeout_s=TIMEOUT_S
    )
    scenario = {"id": "seed-0", "seed": 0}
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
    ending = trajectory.error or trajectory.limit or ("played" if trajectory.turns else "without a turn")
    return Row(name, ending, trajectory.returned_reward, len(trajectory.turns), time.perf_counter() - begin)


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
        num_played = sum(row.ending == "played" for row in own)
        print(f"{library}: {num_played} played end to end, of {len(there)} that can be opened here, of {num}")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
