"""Plan: plays and judges a run's first step, tries pilot steps, undoes them, and writes promise.json.

    claim -> open -> batch of step 0 -> doubts -> pilots -> advice -> forecast -> promise.json

The played step is the step that `art train` continues from, with the same seeds, and checkpoint 0 is the run's own.
Pilots leave only numbers. Repeating a plan with the same configuration plays nothing.
"""

import asyncio
import dataclasses
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean, median, stdev
from typing import NamedTuple

import msgspec

from art_cli.chat.requests import Request, Sampling
from art_cli.config.compose import LoadedConfig
from art_cli.config.config_identity import config_hash, speed_hash
from art_cli.config.schema import NoTrackerConfig, RulerJudgeConfig, RunConfig
from art_cli.engines import Engine
from art_cli.judges.agreement import VoteReliability, vote_reliability
from art_cli.judges.blend import single_judges
from art_cli.judges.costs import find_price
from art_cli.judges.judge_report import judge_windows
from art_cli.judges.trial import judge_in_time
from art_cli.learners.prompt.prompt_learner import PromptLearner
from art_cli.loop.batches import Batch
from art_cli.loop.calibration import shared_prompt
from art_cli.loop.claim_run import Claim, claim_run
from art_cli.loop.evaluate import contests
from art_cli.loop.open_run import Run, open_run
from art_cli.loop.owed_groups import first_groups
from art_cli.loop.pilot import Pilots
from art_cli.loop.prompt_plan import reflect
from art_cli.loop.record import claim_config
from art_cli.loop.references import check_ready
from art_cli.loop.startup import Startup
from art_cli.reports.doubts import Groups, by_length, compared, find_doubts, limit_of, spread_share
from art_cli.reports.findings import MOVES
from art_cli.runs.history import count_failures
from art_cli.runs.intervals import share_interval
from art_cli.runs.promise import Doubt, Expected, Measured, Pilot, Promise, forecast
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, prompt
from art_cli.runtime.errors import JudgeError, LearnerError, UsageError, one_line
from art_cli.runtime.scratch import scratch

log = logging.getLogger(__name__)

RATE = "train.learning_rate"
RATES = (1.0, 0.5, 2.0, 0.25, 4.0)  # multiples of the run's own rate, in pilot order
NUM_ASKED = 8  # prompts recomputed to time a prompt
MAX_PILOTS_S = 600.0  # no pilot starts after this time
# Range of the binary KL(before || after) for a whole first step of a learning run, in nats per token. Tic-tac-toe
# learns best at 0.03, less at 0.007 and 0.1, hardly far above (docs/check.md). At the lower end a logprob changes by
# about MOVES, below which a policy hardly moves. The range is wide, so the run's own rate is replaced only if clearly
# wrong.
LEAST_KL, MOST_KL = MOVES**2 / 6, 0.07
SHARE_OF_MEMORY = 0.9  # largest share of memory for training
STARTING = ("torch and transformers", "model", "learner", "engine and agent")  # start-up parts before the first reply
OF_ROLLOUT = ("rollout", "metric", "none")  # judges that would read the same number again


async def plan(loaded: LoadedConfig, *, repeats: int | None = None, beside: PromptLearner | None = None) -> Promise:
    """Returns the run's promise, measured now or earlier. `repeats` is the number of verdicts per group.

    The default is 2 verdicts if they are free, otherwise 1. `beside` is a prompt search to compare costs with.

    Raises UsageError if the run is past step 1, and the errors of `train`.
    """
    check_ready(loaded, ("weights",))
    quiet = {"tracker": NoTrackerConfig(), "trackers": []}  # `art train` sends the trajectories
    silent = dataclasses.replace(loaded, config=loaded.config.model_copy(update=quiet))
    async with claim_run(silent, is_fresh=False, startup=Startup()) as claim:
        found, newest = claim.files.promise(), claim.files.newest_checkpoint()
        speed = speed_hash(loaded.config)
        hashes = (config_hash(claim.loaded.config), speed)
        is_asked = found is not None and (repeats or 0) <= found.measured.verdicts
        if found is not None and is_asked and (found.config_hash, found.speed_hash) == hashes:
            measured = found.measured
            if measured.judge_usd is None:  # the configuration may now have the price
                usd = _judge_usd(claim.loaded.config, first_groups(claim.files.scored(0), len(measured.group_tokens)))
                measured = msgspec.structs.replace(measured, judge_usd=usd)
            claim.files.write_promise(made := _promise(measured, found.doubts, claim, speed))
            return await _with_search(made, claim, beside)
        if newest is not None and newest[1].step > 0:
            where = f"{claim.files.root}: trained to step {newest[1].step}"
            raise UsageError(f"{where}, and a plan comes before the first; name=OTHER plans a new run")
        async with open_run(claim, resume_hint="art plan continues it") as run:
            measured, doubts = await _measure(run, repeats, found)
            parts = claim.startup.parts
            started = math.fsum(parts.get(part, 0.0) for part in STARTING)
            if found is not None and found.speed_hash != speed:
                measured.facts["played"] = "under earlier settings; the seconds of sampling and judging are theirs"
            measured = msgspec.structs.replace(measured, start_s=started, verdicts=repeats or 1)
            made = _promise(measured, doubts, dataclasses.replace(claim, loaded=run.loaded), speed)
            if loaded.config.train.learning_rate == "auto" and RATE in made.settings:
                chosen = run.loaded.with_value(RATE, float(made.settings[RATE]), f"art plan: {made.reasons[RATE]}")
                claim_config(run.files, chosen)
                made = msgspec.structs.replace(made, config_hash=config_hash(chosen.config))
            run.files.write_promise(made)
            return await _with_search(made, dataclasses.replace(claim, loaded=run.loaded), beside)


async def _with_search(made: Promise, claim: Claim, beside: PromptLearner | None) -> Promise:
    """Adds the cost of a prompt search. Its model is called once if the price is known."""
    if beside is None:
        return made
    found, known = made.measured, made.measured.reflection
    is_priced = known is not None and (known.usd is not None or not beside.payer.is_priced)
    if known is not None and known.model == beside.payer.title and is_priced:
        return made
    found = msgspec.structs.replace(found, reflection=await reflect(beside, claim.files, len(found.group_tokens)))
    made = msgspec.structs.replace(made, measured=found, prompt=_promise(found, [], claim).prompt)
    claim.files.write_promise(made)
    return made


async def _measure(run: Run, repeats: int | None, before: Promise | None) -> tuple[Measured, list[Doubt]]:
    """Returns the measurements and doubts. `before` is the previous promise."""
    num_judged = len(run.files.scored(0))
    run.batches.allow(0)
    batch = await run.batches.take(0)
    judging_s, num_attempts = batch.metrics["judge_s"], sum(map(len, batch.groups))
    if num_judged < num_attempts:  # earlier starts judged the rest
        judging_s *= num_attempts / (num_attempts - num_judged)
    elif before is not None:
        judging_s = before.measured.judging_s * len(batch.groups) / max(len(before.measured.group_tokens), 1)
    else:
        scores = [score for members in batch.groups for each in members for score in each.scores]
        judging_s = max((score.latency_s or 0.0 for score in scores), default=0.0)
    judges = [each.judge for each in judge_windows({1: run.files.scored_path(0)})]
    bias = next((judge.order_bias for judge in judges if judge.order_bias is not None), None)
    voted = next((judge.reliability for judge in judges if judge.reliability is not None), None)
    repeated = await _judge_again(run, batch.groups, repeats) or voted
    parts = run.data.by_source.items()
    scenarios = [{**scenario, "": source} for source, part in parts for scenario in part.training]
    doubts = find_doubts(batch.groups, scenarios, repeats=repeated, bias=bias)
    measured = _sampled(run, batch, repeated, judging_s)
    shared_s = await shared_prompt_s(run.sampler.engine, batch.groups[:NUM_ASKED])
    measured = msgspec.structs.replace(measured, shared_prompt_s=shared_s)
    await run.sampler.engine.sleep()
    measured = await run.interrupts.off_loop(_pilot, run, batch.groups, measured)
    run.interrupts.stop_if_any()
    await run.sampler.engine.wake()
    begin = time.perf_counter()
    await run.sampler.load(run.files.checkpoint_path(0), 0)
    return msgspec.structs.replace(measured, rest_s=measured.rest_s + time.perf_counter() - begin), doubts


async def _judge_again(run: Run, groups: Groups, repeats: int | None) -> VoteReliability | None:
    """Measures how well the judge repeats itself, if possible."""
    finished = [[each for each in members if each.error is None] for members in groups]
    silent = {source for source, part in run.config.by_source.items() if part.judge.name in OF_ROLLOUT}
    finished = [members for members in finished if len(members) > 1 and (members[0].source or "") not in silent]
    if not finished:
        return None
    num = repeats or (2 if all(run.judge.estimate(members) is None for members in finished) else 1)
    votes = [[[each.reward or 0.0] for each in members] for members in finished]
    try:
        for _ in range(num - 1):
            run.judge.reseed()
            for members, found in zip(finished, votes, strict=True):
                verdicts = await judge_in_time(run.judge.of(members), members)
                for each, rewards in zip(members, found, strict=True):
                    rewards.append(verdicts[each.id].reward)
    except JudgeError as error:
        log.warning("plan: the judge was asked again: %s", error)
        return None
    return vote_reliability(votes) if num > 1 else None


# --- played attempts -------------------------------------------------------------------------------------------------


def _sampled(run: Run, batch: Batch, repeated: VoteReliability | None, judging_s: float) -> Measured:
    """Measures the played attempts. `judging_s` is the judging time."""
    ids, tokens = {each.group_id for members in batch.groups for each in members}, Counter[str]()
    # an earlier plan may have played more groups
    played = [each for each in run.files.trajectories(0) if each.group_id in ids]
    values = [[each.reward for each in members if each.reward is not None] for members in compared(batch.groups)]
    values = [each for each in values if each]
    for each in played:
        tokens[each.group_id] += each.num_sampled
    first_call_s = before_calls(played)
    share = f"rewards differ within {spread_share(batch.groups):.0%} of the groups that are compared ({len(values)})"
    facts = ({"spread": share} if values else {}) | _base_success(played)
    if repeated is not None:
        facts["judge"] = f"repeats {max(repeated.one_vote.value, 0.0):.0%} of the differences when it is asked again"
    contested = contests(run.config, played) if run.config.eval is not None else []
    return Measured(
        group_tokens=list(tokens.values()),
        num_attempts=len(played),
        sampling_s=max(busy(played) - first_call_s, 0.0),
        first_call_s=first_call_s,
        judging_s=judging_s,
        judge_usd=_judge_usd(run.config, [each for members in batch.groups for each in members]),
        contests=contested,
        num_contested=sum((each.source or "") in contested for each in played),
        reward_mean=fmean(reward for each in values for reward in each) if values else None,
        reward_best=fmean(map(max, values)) if values else None,
        facts=facts | _facts(batch.groups, played),
    )


def _base_success(played: Sequence[Trajectory]) -> dict[str, str]:
    """Returns the share of attempts above 0. A group's attempts are similar and count as a single draw."""
    groups: dict[str, list[bool]] = {}
    for each in played:
        if each.error is not None or each.returned_reward is not None:
            groups.setdefault(each.group_id, []).append((each.returned_reward or 0.0) > 0)
    if all(each.returned_reward is None for each in played):
        return {}
    low, high = share_interval(fmean(map(fmean, groups.values())), len(groups))
    won, num = (sum(map(count, groups.values())) for count in (sum, len))
    return {"base": f"{won} of {num} attempts got more than 0, 95 % interval over the groups {low:.0%} to {high:.0%}"}


def _judge_usd(config: RunConfig, attempts: Sequence[ScoredTrajectory]) -> float | None:
    """Returns the verdicts' cost, using configured prices if no price was known then; None if a price is unknown."""
    rulers = [each for each in single_judges(config) if isinstance(each, RulerJudgeConfig)]
    prices = {each.model: find_price(each) for judge in rulers for each in (judge, *judge.panel)}
    usd = 0.0
    scores = (score for each in attempts for score in (*each.scores, *each.shadow))
    for score in (each for each in scores if each.prompt_tokens is not None):
        cost, price = score.cost_usd, prices.get(score.model or "")
        if cost is None and price is not None:
            cost = price.cost(score.prompt_tokens or 0.0, score.completion_tokens or 0.0)
        if cost is None:
            return None
        usd += cost
    return usd


def _facts(groups: Groups, played: Sequence[Trajectory]) -> dict[str, str]:
    attempts = [each for members in groups for each in members]
    lengths = sorted(len(turn.sampled_ids) for each in played for turn in each.turns)
    limits, facts = Counter(filter(None, map(limit_of, attempts))), {"failures": str(count_failures(played))}
    if lengths:
        facts["replies"] = f"99 % have at most {lengths[math.ceil(0.99 * len(lengths)) - 1]} tokens"
    if limits:
        facts["limits"] = ", ".join(f"{key} met by {num} of {len(attempts)}" for key, num in limits.most_common())
    if (found := by_length(groups)) is not None:
        facts["length"] = f"and reward: {found}"
    return facts


def busy(played: Sequence[Trajectory]) -> float:
    """Returns the seconds during which at least one attempt was running, over any number of starts."""
    seconds = until = 0.0
    for each in sorted(played, key=lambda each: each.started_at):
        end = each.started_at + each.duration_s
        seconds += max(0.0, end - max(each.started_at, until))
        until = max(until, end)
    return seconds


def before_calls(played: Sequence[Trajectory]) -> float:
    """Returns the extra seconds the first attempts spent loading before their first call.

    For attempts that start after the first call, the time before their own first call is the agent's work.
    """
    begins = {each.id: each.started_at + min(each.spans)[0] for each in played if each.spans}
    if not begins:
        return 0.0
    first = min(begins.values())
    later = [begins[each.id] - each.started_at for each in played if each.started_at >= first and each.spans]
    return max(first - min(each.started_at for each in played) - (median(later) if later else 0.0), 0.0)


async def shared_prompt_s(engine: Engine, groups: Groups) -> float:
    """Returns the engine's time for the prompt prefix that only a group's attempts share; 0 if unknown.

    Measured by asking for one token after one prompt per group, in parallel and with reversed prompts to avoid the
    cache.
    """
    common = shared_prompt([each for members in groups for each in members])
    own = [max(shared_prompt(members) - common, 0) for members in groups]
    called = [next((each for each in members if each.turns), None) for members in groups]
    firsts = [prompt(each.turns, 0)[::-1] for each in called if each is not None]
    if len(groups) == 1 or not any(own):
        return 0.0
    asked = [Request(model=engine.endpoint.model, sampling=Sampling(max_tokens=1), prompt=tokens) for tokens in firsts]
    begin = time.perf_counter()
    answers = await asyncio.gather(*map(engine.backend.reply, asked), return_exceptions=True)
    for failure in answers:
        if isinstance(failure, BaseException):
            log.info("plan: how long a prompt takes is not known: %s", failure)
            return 0.0
    return (time.perf_counter() - begin) * fmean(own) / sum(map(len, firsts))


# --- pilots and advice ------------------------------------------------------------------------------------------------


def _pilot(run: Run, groups: Groups, measured: Measured) -> Measured:
    """Adds the learner's measurements, then restores the learner to step 0."""
    start, rate, begin = run.files.checkpoint_path(0), run.config.train.rate, time.perf_counter()
    with scratch("plan") as directory:
        run.learner.save(directory)
    rest_s, scale, memory, pilots, obstacle = time.perf_counter() - begin, None, None, list[Pilot](), ""
    try:
        if run.config.learner.weights != "here":  # only the time of a remote step can be measured
            begin = time.perf_counter()
            if run.learner.step(groups).num_updates:
                pilots.append(Pilot(rate, None, None, time.perf_counter() - begin))
            run.learner.load(start)
        else:
            piloting, begin = Pilots(run.learner, groups, start), time.monotonic()
            for factor in RATES:
                if not pilots or (time.monotonic() - begin < MAX_PILOTS_S and not run.interrupts.num):
                    pilots.append(piloting.take(factor * rate))
            if not run.interrupts.num:
                scale, memory = piloting.noise_scale(), piloting.memory(_longest_row(run))
    except LearnerError as error:
        log.warning("pilots: %s", error)
        obstacle = one_line(error)
    seconds = [pilot.seconds for pilot in pilots if not pilot.is_failed][-4:]  # pilot 1 of 5 also checks packs
    first_s = max(0.0, pilots[0].seconds - median(seconds)) if seconds and not pilots[0].is_failed else 0.0
    return msgspec.structs.replace(
        measured,
        training_s=median(seconds) if seconds else None,
        first_training_s=first_s,
        pace=stdev(map(math.log, seconds)) if len(seconds) > 1 else 0.0,
        rest_s=rest_s,
        pilots=sorted(pilots, key=lambda pilot: pilot.rate),
        noise_scale=scale,
        memory=memory,
        obstacle=obstacle,
    )


def _longest_row(run: Run) -> int:
    """Returns the length of the longest allowed row in tokens."""
    assert run.policy is not None, "a plan is of weights"
    asked = max((len(prompt(each.turns, 0)) for each in run.files.trajectories(0) if each.turns), default=1)
    return min(run.policy.max_length, asked + run.config.rollout.longest_answer)


class Advice(NamedTuple):
    """Example: Advice("train.learning_rate", "0.0004", "a step moves the policy by 0.003 nats per token")"""

    key: str
    value: str
    reason: str


def advise(found: Measured, config: RunConfig) -> Iterator[Advice]:
    """Yields the settings supported by the measurements."""
    if (rate := choose_rate(found.pilots, config.train.rate)) is not None:
        yield rate
    groups, scale, memory = config.rollout.groups_per_step, found.noise_scale, found.memory
    if scale is not None and scale.high is not None and scale.high < groups:
        least = max(math.ceil(scale.high), config.train.updates_per_step)
        reason = f"above {scale.high:.0f} groups, the upper end of the noise scale, more add little to a step"
        if least < groups:
            yield Advice("rollout.groups_per_step", str(least), reason)
    if memory is not None and memory.gigabytes > SHARE_OF_MEMORY * memory.there:
        key, value = "learner.gradient_checkpointing", "true"
        if config.learner.model_dump().get("gradient_checkpointing"):
            key = "learner.micro_batch_tokens" if memory.is_packed else "model.max_length"  # the longest row
            value = str(max(memory.tokens // 2, 1))
        yield Advice(key, value, f"{memory.gigabytes:.1f} GB are needed and {memory.there:.1f} GB there")


def choose_rate(pilots: Sequence[Pilot], own: float) -> Advice | None:
    """Returns the rate nearest to the run's own rate whose step stays within the bounds; None if unknown.

    If all rates are too low, the largest is returned; if all are too high, the smallest.
    """
    known = {pilot.rate: pilot.kl for pilot in pilots if pilot.kl is not None and not pilot.is_failed}
    if not known:
        return None
    inside = [rate for rate, kl in known.items() if LEAST_KL <= kl <= MOST_KL]
    is_slow = known.get(own, MOST_KL) < LEAST_KL
    rate = min(inside, key=lambda rate: abs(math.log(rate / own)), default=max(known) if is_slow else min(known))
    reason = f"a step moves the policy by {known[rate]:.2g} nats per token"
    if own not in known:
        reason += f"; at {own:g} the step failed, or moved it without bound"
    elif not LEAST_KL <= known[own] <= MOST_KL:
        reason += f"; at {own:g} by {known[own]:.2g}, outside of {LEAST_KL:g} to {MOST_KL:g}"
    return Advice(RATE, f"{rate:.4g}", reason if inside else f"{reason}; no rate that was tried is within")


def _promise(found: Measured, doubts: Sequence[Doubt], claim: Claim, speed: str = "") -> Promise:
    """Returns the promise for the configuration's steps and evaluations."""
    config, advice = claim.loaded.config, list(advise(found, claim.loaded.config))
    evaluations, attempts, contested, prompts_s = 0, 0, 0.0, 0.0
    if config.eval is not None:
        evaluations = len({*range(0, config.train.steps, config.eval.every), config.train.steps})
        played = {name: len(part.evaluation) * config.eval.attempts for name, part in claim.data.by_source.items()}
        attempts = sum(played.values())
        # prompts per attempt, compared with a training step
        in_group = 1 / config.eval.attempts - 1 / config.rollout.group_size
        prompts_s = max(in_group, 0.0) * attempts * found.shared_prompt_s
        # From evaluation 2 on, the judge also sees evaluation 1's attempts.
        shown = sum(played.get(name, 0) for name in found.contests)
        contested = 2 * max(evaluations - 1, 0) * shown / max(found.num_contested, 1)
    usd_per_hour = max((rule.usd_per_hour for rule in config.stop), default=0.0)
    expected = partial(
        forecast,
        steps=config.train.steps,
        is_ahead=config.train.max_staleness > 0,
        evaluations=evaluations,
        eval_attempts=attempts,
        eval_prompts_s=prompts_s,
        usd_per_hour=usd_per_hour,
        contested=contested,
    )
    prompt, asked = dict[str, Expected](), found.reflection
    if asked is not None:
        search = msgspec.structs.replace(found, training_s=asked.seconds, first_training_s=0.0, rest_s=0.0)
        prompt = expected(search, learning_usd=asked.usd or 0.0)
        if asked.usd is None:
            prompt.pop("usd", None)
    return Promise(
        config_hash=config_hash(config),
        measured=found,
        doubts=list(doubts),
        settings={each.key: each.value for each in advice},
        reasons={each.key: each.reason for each in advice},
        steps=config.train.steps,
        evaluations=evaluations,
        contested=contested,
        usd_per_hour=usd_per_hour,
        speed_hash=speed,
        expected=expected(found),
        prompt=prompt,
    )
