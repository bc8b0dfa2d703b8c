"""The loop's stages, each run alone on files, for `art generate`, `art step` and notebooks."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from art_cli.config.compose import LoadedConfig
from art_cli.engines import own_model
from art_cli.judges.judge_groups import judge_group
from art_cli.judges.reliability import reliability_numbers, with_reliability
from art_cli.judges.source_judges import make_judges, require_all_keys
from art_cli.loop import stage_policy
from art_cli.loop.decide import decide_engine
from art_cli.loop.interrupts import Interrupts
from art_cli.loop.owed_groups import group, owed, plan_places
from art_cli.loop.policy_sampler import Sampler, open_sampler
from art_cli.loop.record import follow
from art_cli.loop.references import check_ready
from art_cli.loop.scenario_choice import ScenarioChoice
from art_cli.loop.source_mix import SourceMix
from art_cli.models.policy_spec import PolicySpec
from art_cli.models.weights import Weights
from art_cli.rollouts.rollout_runner import RolloutPlan
from art_cli.rollouts.scenario_files import RunScenarios
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.history import count_failures, find_fault
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, as_saved
from art_cli.runtime import threads
from art_cli.runtime.errors import DriftError, LearnerError, UsageError

log = logging.getLogger(__name__)

OWN_MODEL = "own_model"  # metadata key of an attempt: the digest of the endpoint's model


class StepTaken(NamedTuple):
    """One policy update. Example: StepTaken(Path("step_0001"), 1, {"loss": 0.02, "reward_mean": 0.4})"""

    checkpoint: Path
    step: int  # policy step after the update
    metrics: dict[str, float]


def generate(
    loaded: LoadedConfig, output: Path, *, checkpoint: Path | None, step: int | None, which: Which = "offered"
) -> list[Trajectory]:
    """Plays one step's scenarios with a checkpoint. Returns all trajectories in `output`, old and new.

    `step` selects the scenarios, by default the checkpoint's next scenarios. Trajectories in `output` are not replayed;
    missing trajectories are appended as they finish. Raises UsageError if `output` has an attempt with the same id at
    another scenario, in a group of another size, or by another policy.
    """
    loaded, source = choose_policy(loaded, checkpoint, which)
    data, run = RunScenarios(loaded.config, loaded.directory), RunDir(loaded.config.runs / loaded.config.name)
    mix = SourceMix(loaded.config, run, data.training_by_source)
    step = source.step if step is None else step
    own, _ = mix.places(step)
    plans = plan_places(own, step=step, group_size=loaded.config.rollout.group_size)
    interrupts = Interrupts(f"interrupted; what is played is in {output}; the same command plays the rest")
    with interrupts.explained(), stage_policy.open_policy(loaded, source) as policy:
        return threads.run(_play(loaded, policy, source, output, plans, interrupts))


def choose_policy(
    loaded: LoadedConfig, checkpoint: Path | None, which: Which
) -> tuple[LoadedConfig, stage_policy.PolicySource]:
    """Chooses the engine and the policy to play with, and logs both.

    Raises UsageError if weights are named for an engine that brings a model, or if the rollouts lack something.
    """
    source = stage_policy.find_policy(loaded, checkpoint, which=which)
    check_ready(loaded, ("model", "rollout", "gateway", "engine"))
    return decide_engine(loaded, trained_in=[stage_policy.dtype_of(loaded, source)]), source


def next_scenarios(loaded: LoadedConfig, step: int, num: int) -> list[Json]:
    """Returns the next `num` scenarios (or fewer if there are fewer) that the run would choose from `step` on."""
    run = RunDir(loaded.config.runs / loaded.config.name)
    scenarios = RunScenarios(loaded.config, loaded.directory)
    choice, found = ScenarioChoice(loaded.config, run, scenarios.training), list[Json]()
    for later in range(step, step + num):
        found += [each for each in choice.scenarios(later) if each not in found]
        if len(found) >= num:
            break
    return found[:num]


async def _play(
    loaded: LoadedConfig,
    policy: Weights | PolicySpec | None,
    source: stage_policy.PolicySource,
    output: Path,
    plans: Sequence[RolloutPlan],
    interrupts: Interrupts,
) -> list[Trajectory]:
    model = own_model(loaded.config.engine, loaded.directory)
    with interrupts.handled(), LineWriter(output) as writer:
        # read after locking the file, because another writer may have just finished
        played = list(read_lines(output, Trajectory))

        def keep(trajectory: Trajectory) -> None:
            if model:
                trajectory.metadata = trajectory.metadata | {OWN_MODEL: model}
            writer.append(trajectory)
            played.append(trajectory)

        async with open_sampler(
            loaded, policy, checkpoint=source.checkpoint, step=source.step, logs=output.parent
        ) as sampler:
            _check_same(output, plans, played, sampler, model)
            missing = owed(plans, played)
            if len(missing) < len(plans):
                there = f"{len(plans) - len(missing)} of {len(plans)} attempts"
                log.info("%s: has %s already, which are not played again (another file gets new ones)", output, there)
            await sampler.play_shown(missing, keep, title="generate")
    return played


def _check_same(
    output: Path, plans: Sequence[RolloutPlan], played: Sequence[Trajectory], sampler: Sampler, model: str
) -> None:
    """Raises UsageError if an attempt in `output` has a plan's id but differs from the plan."""
    there = {each.id: each for each in played}
    for plan in plans:
        if (each := there.get(plan.trajectory_id)) is None:
            continue
        planned = (plan.source, as_saved(plan.scenario))
        differing = {
            "is at another scenario": (each.source or "", each.scenario) != planned,
            f"is one of {each.group_size} in its group": each.group_size != plan.group_size,
            "was sampled by another policy": sampler.is_of_another(each) or each.metadata.get(OWN_MODEL, "") != model,
        }
        for what, differs in differing.items():
            if differs:
                raise UsageError(f"{output}: its attempt {each.id} {what}; name another file")


async def judge(loaded: LoadedConfig, trajectories: Sequence[Trajectory]) -> list[ScoredTrajectory]:
    """Returns the complete groups, scored by the configured judge. Raises JudgeError if a group cannot be scored."""
    await asyncio.to_thread(require_all_keys, loaded.config, loaded.directory)
    judges = make_judges(loaded.config, loaded.directory)
    try:
        groups = [await judge_group(judges, members) for members in group(trajectories).values()]
    finally:
        await judges.close()
    return [scored for members in groups for scored in members]


def take_step(
    loaded: LoadedConfig, scored: Sequence[ScoredTrajectory], output: Path, *, checkpoint: Path | None
) -> StepTaken:
    """Takes the same step as `art train` on these trajectories, from `checkpoint`, and saves to `output`.

    Incomplete groups are ignored. Raises LearnerError, without saving, if there is nothing to learn.
    """
    stage_policy.check_output(output)
    check_ready(loaded, ("weights",))
    groups = [members for _, members in sorted(group(scored).items())]  # in planned order; judges finish in any order
    attempts = [each for members in groups for each in members]
    turns = [turn for each in attempts for turn in each.turns]
    source = stage_policy.find_sampler(loaded, checkpoint, turns)
    check_ready(loaded, ("model", "algorithm"))
    failures = count_failures(attempts)
    if not attempts:
        raise LearnerError(f"no group is complete, of {len(scored)} attempts; art generate plays what is missing")
    if not failures.is_all and not any(each.num_sampled for each in attempts):
        raise LearnerError("no token ids were recorded, so art step cannot train; art sft can")
    if (home := stage_policy.home_of(loaded, source)) is not None:
        loaded = follow(loaded, home)
    with stage_policy.open_base(loaded, source) as base:
        loaded = stage_policy.as_trained(loaded, source, base)
        with stage_policy.open_learner(loaded, source, base=base) as learner:
            try:
                groups = with_reliability(groups)
                numbers = learner.step(groups).known() | reliability_numbers(groups)
            except DriftError as error:
                newest = max(turns, key=lambda turn: turn.step)
                raise DriftError(
                    f"{error}; {stage_policy.sampler_of(newest)}, and this is step {source.step}"
                ) from error
            fault = find_fault(failures, is_called=True, num_without_signal=len(groups))
            if numbers["num_updates"] == 0 and fault is not None:
                raise LearnerError(f"no checkpoint is written: {fault}")
            stage_policy.save_learner(
                learner, output, loaded, base=base, step=source.step + 1, metrics=numbers, source=source
            )
    return StepTaken(output, source.step + 1, numbers)
