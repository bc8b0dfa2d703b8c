"""Plan: plays and judges a run's first step, takes pilot steps on it and takes them back, and writes promise.json.

    claim -> open -> batch of step 0 -> doubts -> pilots -> settings -> forecast -> promise.json

What it plays is the step that `art train` goes on from, with the same seeds, and step 0 is the run's own checkpoint. A
pilot leaves nothing but its numbers. A plan that is asked again under the same configuration plays nothing.
"""

import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash
from art_cli.config.schema import NoTrackerConfig, RunConfig
from art_cli.judges import Judge
from art_cli.judges.agreement import VoteReliability, vote_reliability
from art_cli.judges.judge_groups import score
from art_cli.judges.judge_report import judge_windows
from art_cli.loop.auto import with_rate
from art_cli.loop.batches import Batch
from art_cli.loop.claim_run import Claim, claim_run
from art_cli.loop.open_run import Run, open_run
from art_cli.loop.record import claim_config
from art_cli.loop.startup import Startup
from art_cli.reports.doubts import by_length, find_doubts, limit_of, rewards, spread_share
from art_cli.runs.history import count_failures
from art_cli.runs.promise import Doubt, Extent, Measured, Memory, Pilot, Promise, forecast
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, prompt
from art_cli.runtime.errors import JudgeError, UsageError
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

RATES = (1.0, 0.5, 2.0, 0.25, 4.0)  # of the rate that the run would take, in the order of the pilots
MAX_PILOTS_S = 600.0  # after this time no further pilot begins
# KL(before || after) of a step, in nats per token, of policies that learn: below it hardly anything moves, above it a
# step goes further than its own attempts can justify. docs/plan.md has the runs behind both.
LEAST_KL, MOST_KL = 1e-4, 3e-2
MAX_GROWTH = 4  # largest factor by which more groups for each step are advised
RATE = "train.learning_rate"
QUANTILE = 0.99  # of the lengths seen, that a limit should let through
SHARE_OF_MEMORY = 0.9  # of the memory that is there, that training may take

OF_ROLLOUT = ("rollout", "metric", "none")  # judges that read what the rollout returned, and would read the same again

Groups = Sequence[Sequence[ScoredTrajectory]]


async def plan(loaded: LoadedConfig, *, repeats: int | None = None) -> tuple[RunDir, Promise]:
    """Returns the run and its promise, made or found. `repeats` is the number of verdicts on each group; None: 2 if
    they are free.

    Raises UsageError if the run has gone beyond its first step without one, and the errors of `train`.
    """
    is_open = loaded.config.train.learning_rate == "auto"
    quiet = {"tracker": NoTrackerConfig(), "trackers": []}  # `art train` sends the trajectories
    silent = dataclasses.replace(loaded, config=loaded.config.model_copy(update=quiet))
    async with claim_run(silent, is_fresh=False, startup=Startup()) as claim:
        found = claim.files.promise()
        if found is not None and found.config_hash == config_hash(claim.loaded.config):
            return claim.files, promise(found.measured, found.doubts, claim)
        newest = claim.files.newest_checkpoint()
        if newest is not None and newest[1].step > 0:
            raise UsageError(
                f"{claim.files.root}: trained to step {newest[1].step}, and a plan comes before the first; "
                "name=OTHER plans a new run"
            )
        async with open_run(claim) as run:
            run.interrupts.message = f"interrupted; what is complete is in {run.files.root}; art plan goes on with it"
            measured, doubts = await _measure(run, repeats)
            decided = dataclasses.replace(claim, loaded=run.loaded)
            made = promise(measured, doubts, decided)
            if is_open and RATE in made.settings:
                chosen = with_rate(run.loaded, float(made.settings[RATE]), f"the plan: {made.reasons[RATE]}")
                claim_config(run.files, chosen)
                made = msgspec.structs.replace(made, config_hash=config_hash(chosen.config))
            run.files.write_promise(made)
            return run.files, made


async def _measure(run: Run, repeats: int | None) -> tuple[Measured, list[Doubt]]:
    run.batches.allow(0)
    batch = await run.batches.take(0)
    log.info("plan: %d attempts are played and judged; pilots follow", sum(map(len, batch.groups)))
    repeated = await _judge_again(run, batch.groups, repeats)
    judges = [each.judge for each in judge_windows({1: run.files.scored_path(0)})]
    bias = next((judge.order_bias for judge in judges if judge.order_bias is not None), None)
    repeated = repeated or next((judge.reliability for judge in judges if judge.reliability is not None), None)
    doubts = find_doubts(batch.groups, run.data.training, repeats=repeated, bias=bias)
    measured = _sampled(run, batch, repeated)
    await run.sampler.engine.sleep()
    measured = await run.interrupts.off_loop(_piloted, run, batch.groups, measured)
    await run.sampler.engine.wake()
    run.interrupts.stop_if_any()
    begin = time.perf_counter()
    await run.sampler.load(run.files.checkpoint_path(0), 0)
    rest_s = measured.rest_s + time.perf_counter() - begin
    return msgspec.structs.replace(measured, rest_s=rest_s), doubts


# --- what was played --------------------------------------------------------------------------------------------------


async def _judge_again(run: Run, groups: Groups, repeats: int | None) -> VoteReliability | None:
    """Returns how far the judge repeats itself; None where it is not asked again, or could not."""
    judge, name = run.judge, run.config.judge.name
    finished = [[each for each in members if each.error is None] for members in groups]
    finished = [members for members in finished if len(members) > 1]
    if not finished or name in OF_ROLLOUT:
        return None
    if (num := repeats or (2 if judge.estimate(finished[0]) is None else 1)) < 2:
        return None
    try:
        return vote_reliability([await _votes(judge, members, num) for members in finished])
    except JudgeError as error:
        log.warning("plan: the judge was asked again, and %s", error)
        return None


async def _votes(judge: Judge, members: Sequence[ScoredTrajectory], num: int) -> list[list[float]]:
    """Returns `num` verdicts on each attempt, or as many rounds of votes from a judge that has such."""
    if judge.has_rounds:
        verdicts = await judge.judge_again(members, num)
        return [verdicts[each.id].scores[0].votes for each in members]
    again = [await score(judge, members) for _ in range(num - 1)]
    return [[each.reward or 0.0, *(verdicts[each.id].reward for verdicts in again)] for each in members]


def _sampled(run: Run, batch: Batch, repeated: VoteReliability | None) -> Measured:
    """Returns what the attempts themselves show."""
    played = run.files.trajectories(0)
    values = [each for each in rewards(batch.groups) if each]
    flat = [value for each in values for value in each]
    by_group: dict[str, int] = {}
    for each in played:
        by_group[each.group_id] = by_group.get(each.group_id, 0) + each.num_sampled
    return Measured(
        group_tokens=list(by_group.values()),
        num_attempts=len(played),
        sampling_s=busy(played),
        judging_s=batch.metrics["judge_s"],
        training_s=None,
        rest_s=0.0,
        judge_usd=run.judge.usage.cost_usd,
        reward_mean=fmean(flat) if flat else None,
        reward_best=fmean(max(each) for each in values) if values else None,
        spread_share=spread_share(batch.groups),
        repeats=None if repeated is None else repeated.one_vote.value,
        facts=_facts(batch.groups, played),
    )


def busy(played: Sequence[Trajectory]) -> float:
    """Returns the seconds in which at least one attempt was under way, whatever number of starts played them."""
    seconds, until = 0.0, 0.0
    for each in sorted(played, key=lambda each: each.started_at):
        end = each.started_at + each.duration_s
        seconds += max(0.0, end - max(each.started_at, until))
        until = max(until, end)
    return seconds


def _facts(groups: Groups, played: Sequence[Trajectory]) -> dict[str, str]:
    attempts = [each for members in groups for each in members]
    lengths = sorted(len(turn.sampled_ids) for each in played for turn in each.turns)
    limits = Counter(filter(None, map(limit_of, attempts)))
    facts = {"failures": str(count_failures(played))}
    if lengths:
        facts["replies"] = f"99 % have at most {_quantile(lengths)} tokens"
    if limits:
        facts["limits"] = ", ".join(f"{key} met by {num} of {len(attempts)}" for key, num in limits.most_common())
    if (found := by_length(groups)) is not None:
        facts["length"] = f"rank correlation with the reward {found.value:.2f} within groups (p = {found.p:.3f})"
    return facts


def _quantile(ordered: Sequence[int]) -> int:
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1]


# --- the pilots -------------------------------------------------------------------------------------------------------


def _piloted(run: Run, groups: Groups, measured: Measured) -> Measured:
    """Returns the measurements with those of the learner, whose state is that of step 0 again afterwards."""
    start, config, begin = run.files.checkpoint_path(0), run.config, time.perf_counter()
    with scratch("plan") as directory:
        run.learner.save(directory)
    rest_s = time.perf_counter() - begin
    if config.learner.weights != "here":
        pilots, scale, memory = [_pilot_elsewhere(run, groups, start)], None, None
    else:
        from art_cli.learners.pilot import Pilots  # torch

        piloting = Pilots(run.learner, groups, start)
        pilots, spent = list[Pilot](), time.monotonic()
        for factor in RATES:
            if not pilots or (pilots[0].kl is not None and time.monotonic() - spent < MAX_PILOTS_S):
                pilots.append(piloting.take(factor * config.train.rate))
        scale, memory = piloting.noise_scale(), piloting.memory(_longest_row(run))
    seconds = [pilot.seconds for pilot in pilots if pilot.seconds]
    warm = seconds[1:] or seconds  # the first one checks the packs, too
    return msgspec.structs.replace(
        measured,
        training_s=median(warm) if warm else None,
        rest_s=rest_s,
        pilots=sorted(pilots, key=lambda pilot: pilot.rate),
        noise_scale=scale,
        memory=memory,
    )


def _pilot_elsewhere(run: Run, groups: Groups, start: Path) -> Pilot:
    """Takes the run's own step with weights that are not in this process, so that only its time is known."""
    begin = time.perf_counter()
    metrics = run.learner.step(groups)
    seconds = time.perf_counter() - begin
    run.learner.load(start)
    clipped = metrics.clip_fraction
    return Pilot(run.config.train.rate, None, None if math.isnan(clipped) else clipped, seconds)


def _longest_row(run: Run) -> int:
    """Returns the tokens of the longest row that the limits allow, or of a whole micro-batch if that is more."""
    config, turns = run.config, [(each.turns, 0) for each in run.files.trajectories(0) if each.turns]
    own_prompt = max((len(prompt(*turn)) for turn in turns), default=1)
    row = min(run.policy.max_length, own_prompt + config.rollout.max_turns * config.rollout.sampling.max_tokens)
    return max(row, min(config.learner.micro_batch_tokens or 0, run.policy.max_length), 2)


# --- the settings -----------------------------------------------------------------------------------------------------


class Advice(NamedTuple):
    """Example: Advice("train.learning_rate", "0.0004", "a step moves the policy by 0.003 nats per token")"""

    key: str
    value: str
    reason: str


def advise(found: Measured, config: RunConfig) -> Iterator[Advice]:
    """Yields the settings that the measurements speak for. What they do not show is left as it is."""
    if (rate := _rate(found.pilots, config.train.rate)) is not None:
        yield rate
    groups, scale = config.rollout.groups_per_step, found.noise_scale
    if scale is not None and scale.low > groups:
        wanted = min(math.ceil(scale.low), MAX_GROWTH * groups)
        reason = f"the gradient is noise below {scale.low:.0f} groups, by the lower end of the noise scale's interval"
        yield Advice("rollout.groups_per_step", str(wanted), reason)
    memory = found.memory
    if memory is not None and not fits(memory):
        reason = f"{memory.gigabytes:.1f} GB are needed and {memory.there:.1f} GB there"
        if not config.learner.gradient_checkpointing:
            yield Advice("learner.gradient_checkpointing", "true", reason)
        else:
            yield Advice("rollout.sampling.max_tokens", str(config.rollout.sampling.max_tokens // 2), reason)


def fits(memory: Memory) -> bool:
    return memory.gigabytes <= SHARE_OF_MEMORY * memory.there


def _rate(pilots: Sequence[Pilot], own: float) -> Advice | None:
    """Returns the rate nearest to the run's own whose step moves the policy within the bounds; None: not measured."""
    known = {pilot.rate: pilot.kl for pilot in pilots if pilot.kl is not None}
    if not known or own not in known:
        return None
    inside = [rate for rate, kl in known.items() if LEAST_KL <= kl <= MOST_KL]
    moves = "a step moves the policy by {:.2g} nats per token"
    if inside:
        rate = min(inside, key=lambda rate: abs(math.log(rate / own)))
        reason = moves.format(known[rate])
        if rate != own:
            reason += f"; at {own:g} by {known[own]:.2g}, outside of {LEAST_KL:g} to {MOST_KL:g}"
        return Advice(RATE, f"{rate:.4g}", reason)
    is_slow = known[own] < LEAST_KL
    rate = max(known) if is_slow else min(known)
    how = "less than" if is_slow else "more than"
    bound = LEAST_KL if is_slow else MOST_KL
    return Advice(RATE, f"{rate:.4g}", f"{moves.format(known[rate])}; every rate tried moves it {how} {bound:g}")


# --- the promise ------------------------------------------------------------------------------------------------------


def promise(found: Measured, doubts: Sequence[Doubt], claim: Claim) -> Promise:
    """Returns what the measurements promise of the configuration's steps and evaluations."""
    config, data = claim.loaded.config, claim.data
    evaluations = attempts = 0
    if config.eval is not None:
        evaluations = len({*range(0, config.train.steps, config.eval.every), config.train.steps})
        attempts = len(data.evaluation) * config.eval.attempts
    usd_per_hour = max((rule.usd_per_hour for rule in config.stop), default=0.0)
    extent = Extent(config.train.steps, evaluations, attempts, usd_per_hour)
    advice = list(advise(found, config))
    memory = [
        Doubt("memory", f"a row of {found.memory.tokens:,} tokens: {each.reason}", f"{each.key}={each.value}")
        for each in advice
        if found.memory is not None and not fits(found.memory) and not each.key.startswith(("train.", "rollout.groups"))
    ]
    seconds, tokens, usd = forecast(found, extent)
    return Promise(
        config_hash=config_hash(config),
        measured=found,
        doubts=[*(doubt for doubt in doubts if doubt.kind != "memory"), *memory],
        settings={each.key: each.value for each in advice},
        reasons={each.key: each.reason for each in advice},
        steps=extent.steps,
        evaluations=extent.evaluations,
        seconds=seconds,
        tokens=tokens,
        usd=usd,
    )
