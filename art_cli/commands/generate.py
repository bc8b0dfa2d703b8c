"""`art generate`: plays one step's scenarios with a checkpoint and writes the trajectories, nothing else.

The output is appended as rollouts finish; run again, it goes on with what is owed.
"""

import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from art_cli import threads
from art_cli.config.compose import LoadedConfig, load_config
from art_cli.config.references import check_ready
from art_cli.errors import UsageError
from art_cli.loop.choice import settle
from art_cli.loop.generate import owed, plan_groups
from art_cli.loop.policy import PolicySource, find_policy, open_policy
from art_cli.loop.sampler import open_sampler
from art_cli.model import Weights
from art_cli.rollouts.scenarios import ScenarioOrder, load_scenarios
from art_cli.run_dir import LineWriter, read_lines
from art_cli.trajectory import Trajectory

log = logging.getLogger(__name__)


def run(*, config: Path, overrides: Sequence[str], output: Path, checkpoint: Path | None, step: int | None) -> None:
    """Writes `output`; `step` chooses which scenarios (None: the checkpoint's own next ones)."""
    loaded = load_config(config, overrides)
    check_ready(loaded, ("model", "rollout", "gateway", "engine"))
    is_foreign = loaded.config.engine.name == "openai"
    if is_foreign and checkpoint is not None:
        raise UsageError(f"--checkpoint {checkpoint}: engine 'openai' samples from its own model; leave one out")
    source = PolicySource(None, 0) if is_foreign else find_policy(loaded, checkpoint)
    loaded = settle(loaded, "engine")
    log.info("policy: %s", source.checkpoint or ("the endpoint's own" if is_foreign else "the starting policy"))
    with contextlib.ExitStack() as stack:
        weights = None if is_foreign else stack.enter_context(open_policy(loaded, source))
        num = threads.run(_generate(loaded, weights, source, output, source.step if step is None else step))
    sys.stdout.write(f"{output}: {num} trajectories\n")


async def _generate(
    loaded: LoadedConfig, weights: Weights | None, source: PolicySource, output: Path, step: int
) -> int:
    config = loaded.config.rollout
    scenarios = load_scenarios(config.scenarios, loaded.directory)
    order = ScenarioOrder([s["id"] for s in scenarios], seed=loaded.config.train.seed, shuffle=config.shuffle)
    chosen = [scenarios[index] for index in order.groups(step, config.groups_per_step)]
    plans = plan_groups(chosen, step=source.step, group_size=config.group_size)
    with LineWriter(output) as writer:
        done = list(read_lines(output, Trajectory))  # once the file is held: another process may have just finished
        missing = owed(plans, done)
        async with open_sampler(
            loaded, weights, checkpoint=source.checkpoint, step=source.step, logs=output.parent
        ) as sampler:
            await sampler.play_shown(missing, writer.append, title="generate")
    return len(done) + len(missing)
