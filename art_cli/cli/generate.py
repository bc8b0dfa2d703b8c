"""`art generate`: plays one step's scenarios with a checkpoint and writes the trajectories.

It appends finished trajectories, and plays only missing ones when run again. --format writes another tool's traces.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Option

from art_cli.cli import Checkpoint, Config, Json, Last, Overrides, print_result, which_checkpoint
from art_cli.runtime.errors import RolloutError, UsageError, no_such_option

if TYPE_CHECKING:
    from art_cli.runs.history import Failures
    from art_cli.runs.trajectory import Trajectory


def run(
    config: Config,
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="Appended to.", show_default=False)],
    overrides: Overrides = None,
    checkpoint: Checkpoint = None,
    is_last: Last = False,
    step: Annotated[int | None, Option("--step", min=0, help="Play this step's scenarios.")] = None,
    form: Annotated[str | None, Option("--format", metavar="NAME", help="openai or openenv.")] = None,
    as_json: Json = False,
) -> None:
    """Play scenarios, and record trajectories.

    Plays one step's scenarios. The same command later plays only missing attempts; with --format it finds the earlier
    attempts in NAME.art.jsonl. Exit code 1 if every attempt failed, if no attempt called the model, or if no group has
    signal and the loss compares the rollouts' rewards.

    \b
    art generate config.yaml -o trajectories.jsonl
    art generate config.yaml -o trajectories.jsonl --checkpoint runs/mine/checkpoints/step_0004
    art generate config.yaml -o traces.jsonl --format openenv
    """
    from art_cli.config.compose import load_config
    from art_cli.formats import WRITERS, write_traces
    from art_cli.loop.stages import generate
    from art_cli.runs.history import count_failures, find_fault

    if form is not None and form not in WRITERS:
        raise UsageError(f"--format: {no_such_option('format', form, list(WRITERS))}")
    own = output if form is None else output.with_name(f"{output.stem}.art.jsonl")
    if form is not None and os.path.lexists(output) and not own.exists():
        raise UsageError(f"{output}: there is a file already that --format did not write; name another one with -o")
    loaded = load_config(config, overrides or [])
    played = generate(loaded, own, checkpoint=checkpoint, step=step, which=which_checkpoint(False, is_last))
    if form is not None:
        write_traces(played, output, form)
    failures, rewards = count_failures(played), _rewards(played)
    row: dict[str, object] = {"output": str(output), "trajectories": failures.num_played, "failed": failures.num}
    row |= {"commonest_cause": failures.cause or None, "num_alike": failures.num_alike, "reward_mean": rewards.mean}
    row |= {"groups": rewards.num_groups, "groups_without_signal": rewards.num_without_signal}
    print_result(row, _as_text(output, failures, rewards), as_json)
    learns_by = loaded.config.learns_by
    compares = learns_by.compares_rewards_alone and not learns_by.echo
    compares = compares and all(part.judge.name == "rollout" for part in loaded.config.by_source.values())
    num_without = rewards.num_without_signal if rewards.num_without_signal == rewards.num_groups else 0
    is_called = not all(trajectory.is_silent for trajectory in played)
    fault = find_fault(failures, is_called=is_called, num_without_signal=num_without if compares else 0)
    if fault is not None:
        raise RolloutError(f"{output}: {fault}")


class _Rewards(NamedTuple):
    """The rollouts' rewards. Example: _Rewards(0.25, 12, 3)"""

    mean: float | None  # None if no rollout returned a reward
    num_groups: int  # groups with several attempts; 0 without rewards
    num_without_signal: int


def _rewards(played: "Sequence[Trajectory]") -> _Rewards:
    from art_cli.loop.owed_groups import group
    from art_cli.runs.trajectory import has_signal

    def known(members: "Sequence[Trajectory]") -> list[float]:
        rewards = [each.returned_reward for each in members if each.error is None]
        return [reward for reward in rewards if reward is not None]

    rewards = known(played)
    if not rewards:
        return _Rewards(None, 0, 0)
    groups = [known(members) for members in group(played).values() if len(members) > 1]
    return _Rewards(fmean(rewards), len(groups), sum(not has_signal(each) for each in groups))


def _as_text(output: Path, failures: "Failures", rewards: _Rewards) -> str:
    words = [f"{failures.num_played} trajectories"]
    if rewards.mean is not None:
        words.append(f"mean reward {rewards.mean:.3f}")
    if rewards.num_groups:
        words.append(f"{rewards.num_without_signal} of {rewards.num_groups} groups without signal (equal rewards)")
    return f"{output}: {', '.join(words)}" + (f"; {failures}" if failures.num else "") + "\n"
