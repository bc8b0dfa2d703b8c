"""A night: scenarios, training, gates, canary, verdict. Each part is skipped if the night's report has it already."""

import contextlib
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.key_locations import show
from art_cli.config.schema import EvalConfig, ImproveConfig, ScenariosConfig
from art_cli.judges.source_judges import make_judges
from art_cli.loop import evaluate
from art_cli.loop.decide import decide_engine
from art_cli.loop.nights.canary_test import CanaryTest
from art_cli.loop.nights.traffic import count_unwritten, read_ratings, read_traffic, unlike
from art_cli.loop.policy_sampler import SharedEngines, open_sampler
from art_cli.loop.record import find_clash, follow
from art_cli.loop.stage_policy import find_policy, open_policy
from art_cli.loop.stop_rules import spent_before
from art_cli.loop.train import train
from art_cli.rollouts.scenario_files import RunScenarios, load_scenarios
from art_cli.runs.durable import lock_directory, read_object, remove, write_file, write_lines
from art_cli.runs.history import read_history
from art_cli.runs.manifest import digest_of, read_manifest, verify_checkpoint
from art_cli.runs.run_checkpoints import choose, fork, run_of
from art_cli.runs.run_dir import PAUSE, RunDir
from art_cli.runs.served import Canary, Served, changing, read_served, write_served
from art_cli.runs.storage.mirror import Mirror, NoMirror, mirrored
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import (
    ArtError,
    CheckpointError,
    DataError,
    Interrupted,
    Paused,
    RunError,
    UncertainCheckpoint,
    UsageError,
    one_line,
)
from art_cli.runtime.scratch import make_directory

log = logging.getLogger(__name__)

Outcome = Literal["", "promoted", "rolled back", "undecided", "gates missed", "no update", "failed"]
REPORT, SCENARIOS, HELD_OUT, GATES = "night.json", "scenarios.jsonl", "held_out.jsonl", "gates"
WEEK_S = 7 * 86_400.0
MAX_FAILURES, GIVE_UP_S = 3, 86_400.0  # a night is given up after so many tries, and not within a day
REMEMBERED = 30  # nights whose training scenarios are held out last
BASELINE, CANDIDATE = "baseline", "candidate"


class GateResult(msgspec.Struct, frozen=True):
    """Example: GateResult("tasks", "reward>=baseline-0.02", True, 0.04, -0.01, 0.09, 64)"""

    scenarios: str  # tasks, traffic or safety
    gate: str
    is_passed: bool
    mean: float | None = None  # the value that the gate bounds, with its interval
    low: float | None = None
    high: float | None = None
    num: int = 0  # scenarios


class Trial(msgspec.Struct):
    """What the canary has shown so far."""

    since: float  # seconds since the epoch
    num_promoted: int = 0  # ratings
    promoted: float = 0.0  # mean rating, 0 to 1
    num_candidate: int = 0
    candidate: float = 0.0
    num_capped: int = 0  # ratings left out, because their client or user had counted for its share

    @property
    def is_promising(self) -> bool:
        """Returns whether the candidate's mean is better by more than the standard error of the difference.

        Each mean counts a good and a bad rating more (Laplace), so a few ratings promise nothing.
        """
        nums = self.num_candidate, self.num_promoted
        means = [(n * mean + 1) / (n + 2) for n, mean in zip(nums, (self.candidate, self.promoted), strict=True)]
        variance = sum(mean * (1 - mean) / max(n, 1) for n, mean in zip(nums, means, strict=True))
        return means[0] - means[1] > math.sqrt(variance)


class Night(msgspec.Struct, kw_only=True):
    """night.json. An empty `outcome` is a night under way."""

    number: int
    started_at: float  # seconds since the epoch
    baseline: str  # the promoted checkpoint, relative to the run
    start: str = ""  # the checkpoint that training starts from; "": the baseline
    files: list[str]  # trajectory files of the gateway, relative to the run
    num_conversations: int
    num_scenarios: int  # from traffic, without the held-out ones
    num_held_out: int
    candidate: str = ""  # checkpoint, relative to the run
    gates: list[GateResult] = []
    trial: Trial | None = None
    outcome: Outcome = ""
    reason: str = ""
    seconds: float = 0.0  # of training and gates
    num_attempts: int = 0
    cost_usd: float | None = None  # of judges and endpoints, as far as prices are known
    num_failures: int = 0


@dataclass(frozen=True)
class Improved:
    """The result of `improve`: the night, if one is under way or ended now, and what to do next."""

    night: Night | None
    text: str


class Nights:
    """The nights of a run. Raises DataError for a report that art did not write."""

    def __init__(self, run: Path) -> None:
        self.run, self.root = run, run / "nights"

    def all(self) -> list[Night]:
        reports = sorted(self.root.glob(f"night_*/{REPORT}"))
        return [self._read(path) for path in reports]

    def path(self, number: int) -> Path:
        """Returns the night's directory, which exists afterwards."""
        path = self.root / f"night_{number:04d}"
        make_directory(path)
        return path

    def write(self, night: Night) -> None:
        data = msgspec.json.format(msgspec.json.encode(night), indent=2) + b"\n"
        write_file(self.path(night.number) / REPORT, data)

    def _read(self, path: Path) -> Night:
        try:
            return msgspec.convert(read_object(path, within=self.run), Night)
        except msgspec.ValidationError as error:
            raise DataError(f"not a report of art improve: {one_line(error)}", path) from None


async def improve(loaded: LoadedConfig) -> Improved:
    """Does what is due: begins or resumes a night, up to its canary, or reads the canary's feedback.

    With a store, the run's nights and the gateway's files are kept there too, and another machine goes on with them.

    Raises UsageError for gates that cannot hold, RunError if the run has no checkpoint or another process improves it,
    and the errors of training and evaluation; the next call tries again, and gives the night up after MAX_FAILURES
    tries and GIVE_UP_S.
    """
    config, nights = _section(loaded), Nights(loaded.config.runs / loaded.config.name)
    for name, text in config.gates.items():
        try:
            evaluate.check_gates([evaluate.parse_gate(text, (BASELINE, CANDIDATE))], CANDIDATE)
        except UsageError as error:
            raise UsageError(f"improve.gates.{name}: {str(error).removeprefix('--gate').lstrip(': ')}") from None
    run, store = RunDir(nights.run), loaded.config.store
    if store is None:
        _check_begun(run)
    make_directory(nights.root)
    keep, keeps_best = loaded.config.train.keep_checkpoints, loaded.config.train.keep_best
    lock = contextlib.nullcontext() if store is None else run.lock()  # a run in a store has one mirror
    with lock_directory(nights.root, nights.root / "lock"), lock:
        async with mirrored(run, store, keep=keep, keeps_best=keeps_best) as mirror:
            _check_begun(run)
            return await _improve(loaded, nights, mirror)


def _check_begun(run: RunDir) -> None:
    if not run.checkpoint_steps():
        raise RunError(f"{run.root}: no checkpoint to improve; `art train` makes the first one")


async def _improve(loaded: LoadedConfig, nights: Nights, mirror: Mirror | NoMirror) -> Improved:
    config, known = _section(loaded), nights.all()
    served = read_served(nights.run) or _first_served(nights.run)
    night = next((each for each in known if not each.outcome), None)
    if night is None:
        if why := _is_stopped(known, config):
            return Improved(None, why)
        begun = _begin(loaded, nights, known, served)
        if isinstance(begun, str):
            return Improved(None, begun)
        night = begun
    if night.trial is None:
        await _prepare(follow(loaded, RunDir(nights.run)), nights, night, served)
    mirror.check()
    if not night.outcome:
        _follow_canary(loaded, nights, night)
    return Improved(night, _told(night, config))


def roll_back(run: Path) -> Served:
    """Ends a canary, and serves the checkpoint that was promoted before, if there is one, also while a night trains.

    A checkpoint whose files are gone is passed over. The next `improve` ends the night under way. Raises RunError if
    there is neither, and CheckpointError if no earlier checkpoint is left.
    """
    _check_begun(RunDir(run))
    with changing(run):
        served = read_served(run)
        if served is None or not (served.previous or served.canary):
            raise RunError(f"{run}: no checkpoint to go back to: nothing was promoted, and no canary runs")
        previous = [*(served.previous or [served.checkpoint])]
        while len(previous) > 1 and not (run / previous[-1]).is_dir():
            log.warning("%s: not there any more; the one before it answers", run / previous.pop())
        last = previous.pop()
        served = Served(last, _digest(run / last), previous)
        write_served(run, served)
        return served


def directories(loaded: LoadedConfig) -> list[Path]:
    """Returns the gateway directories that `improve.traffic` names. Raises UsageError for one that is not there."""
    config, section = loaded.config, _section(loaded)
    own = config.gateway.directory or config.runs / config.name / "gateway"
    found = [loaded.directory / each.expanduser() for each in section.traffic or [own]]
    for path in found:
        if section.traffic and not path.is_dir():
            raise UsageError(f"improve.traffic: {path}: no such directory")
    return found


# --- the parts of a night ---------------------------------------------------------------------------------------------


def _first_served(run: Path) -> Served:
    found = choose(RunDir(run), "offered")
    served = Served(str(found.path.relative_to(run)), _digest(found.path))
    with changing(run):
        write_served(run, served)
    return served


def _is_stopped(known: Sequence[Night], config: ImproveConfig) -> str:
    last = known[-config.patience :]
    if len(last) < config.patience or any(night.outcome == "promoted" for night in last):
        return ""
    return (
        f"stopped: the last {config.patience} nights brought no promotion ({last[-1].outcome}: {last[-1].reason}); "
        "raise improve.patience to continue"
    )


def _begin(loaded: LoadedConfig, nights: Nights, known: Sequence[Night], served: Served) -> Night | str:
    """Returns the new night with its scenarios on disk, or why there is none."""
    config = _section(loaded)
    tested = [each for scenarios in _gated_sets(loaded, nights).values() for each in scenarios]
    traffic = read_traffic(
        config,
        directories(loaded),
        loaded.directory,
        read_before={
            (nights.run / file).resolve() for night in known if night.outcome != "failed" for file in night.files
        },
        tested=tested,
    )
    if len(traffic.scenarios) < config.min_scenarios:
        num, gateway = count_unwritten(directories(loaded)), loaded.config.gateway
        unwritten = (
            f"; {num} calls are not in a trajectory file yet: the gateway writes them when the oldest is "
            f"{gateway.rotate_s:g} s old (gateway.rotate_s), at {gateway.rotate_mb:g} MB (gateway.rotate_mb), and when "
            "it stops"
        )
        read = ", ".join(map(show, directories(loaded)))
        return (
            f"{len(traffic.scenarios)} new scenarios in {traffic.num_conversations} conversations of {read}; a night "
            f"needs {config.min_scenarios} (improve.min_scenarios){unwritten if num else ''}"
        )
    num_held_out = min(max(1, round(len(traffic.scenarios) * config.held_out)), len(traffic.scenarios) - 1)
    trained = [each for night in known[-REMEMBERED:] for each in _read_scenarios(nights.path(night.number) / SCENARIOS)]
    new = {str(each["id"]) for each in unlike(traffic.scenarios, trained)}
    chosen = {str(each["id"]) for each in sorted(traffic.scenarios, key=lambda s: str(s["id"]) in new)[-num_held_out:]}
    training = [each for each in traffic.scenarios if str(each["id"]) not in chosen]
    held_out = [each for each in traffic.scenarios if str(each["id"]) in chosen]
    number, num_own = known[-1].number + 1 if known else 1, round(len(training) * config.rehearsal)
    while (nights.root / f"night_{number:04d}" / "run").exists():  # its report was removed
        number += 1
    own = RunScenarios(loaded.config, loaded.directory).training
    ids = {str(scenario["id"]) for scenario in traffic.scenarios}
    start = (number - 1) * num_own
    rehearsed = [own[place % len(own)] for place in range(start, start + min(num_own, len(own)))]
    directory = nights.path(number)
    write_lines(directory / HELD_OUT, held_out)
    write_lines(directory / SCENARIOS, [*training, *(each for each in rehearsed if str(each["id"]) not in ids)])
    night = Night(
        number=number,
        started_at=time.time(),
        baseline=served.checkpoint,
        start=_start(nights, known, served),
        files=[os.path.relpath(path.resolve(), nights.run.resolve()) for path in traffic.files],
        num_conversations=traffic.num_conversations,
        num_scenarios=len(training),
        num_held_out=len(held_out),
    )
    nights.write(night)
    return night


def _start(nights: Nights, known: Sequence[Night], served: Served) -> str:
    """Returns the last candidate, if its canary ended undecided and promising.

    So a gain that is too small to show in one canary adds up over nights. Gates and canary compare with the promoted
    policy, wherever training starts.
    """
    last = next((each for each in reversed(known) if each.outcome != "no update"), None)
    if last is None or last.outcome != "undecided" or last.baseline != served.checkpoint or last.trial is None:
        return served.checkpoint
    is_kept = last.trial.is_promising and (nights.run / last.candidate).is_dir()
    return last.candidate if is_kept else served.checkpoint


async def _prepare(loaded: LoadedConfig, nights: Nights, night: Night, served: Served) -> None:
    """Trains and gates the candidate, and starts its canary."""
    begin = time.perf_counter()
    try:
        _end_if_stale(night, served)
        if not night.outcome and not night.candidate:
            await _train(loaded, nights, night)
        if not night.outcome and not night.gates:
            night.gates = await _gates(loaded, nights, night)
    except Interrupted:
        raise Interrupted("interrupted; nothing is lost: art improve resumes this night") from None
    except Paused as error:
        night.outcome, night.reason = "failed", f"a stop rule fired: {one_line(error)}"
    except ArtError as error:
        night.num_failures += 1
        if night.num_failures < MAX_FAILURES or time.time() - night.started_at < GIVE_UP_S:
            raise
        night.outcome, night.reason = "failed", one_line(error)
    finally:
        night.seconds += time.perf_counter() - begin
        nights.write(night)
    if missed := [each for each in night.gates if not each.is_passed]:
        night.outcome = "gates missed"
        night.reason = "; ".join(f"{each.scenarios}: {each.gate}, found {_shown(each)}" for each in missed)
    if not night.outcome:
        _start_canary(loaded, nights, night)
    nights.write(night)


def _end_if_stale(night: Night, served: Served | None) -> None:
    if served is None or served.checkpoint != night.baseline:
        night.outcome, night.reason = "rolled back", "its baseline is not promoted any more (art improve --rollback)"


async def _train(loaded: LoadedConfig, nights: Nights, night: Night) -> None:
    """Trains in a separate run. Training starts again if the configuration has changed since a kill or a failure."""
    config, directory = _section(loaded), nights.path(night.number)
    start = nights.run / (night.start or night.baseline)
    run, first = RunDir(directory / "run"), read_manifest(start).step
    own = _night_config(loaded, directory, steps=first + config.steps)
    if find_clash(run, own):
        log.warning("night %d trains from its first step again: the configuration has changed", night.number)
        remove(run.root)
    if not run.root.exists():
        source = run_of(start)
        if source is None:
            raise CheckpointError(f"{start}: not in a run")
        fork(source, run.root, step=first)
        if spent := spent_before(loaded.config.stop, read_history(run)):
            run.append_metrics(first, PAUSE, spent)
    result = await train(own)
    lines = [line.metrics for line in run.metrics() if line.split == "train" and line.step >= first]
    num_updates, num, num_failed = (
        round(sum(line.get(name, 0.0) for line in lines)) for name in ("num_updates", "num_trajectories", "num_failed")
    )
    night.num_attempts = num
    costs = [line["judge_usd"] for line in lines if "judge_usd" in line]
    night.cost_usd = sum(costs) if costs else None
    if not num_updates:
        why = result.closing["fault"] or f"no group of attempts differed in reward; {num_failed} of {num} failed"
        night.outcome, night.reason = "no update", why
    found = choose(run, "newest")
    if not night.outcome and _digest(found.path) == _digest(start):
        night.outcome, night.reason = "no update", "every update was taken back (train.max_kl)"
    night.candidate = str(found.path.relative_to(nights.run))
    nights.write(night)


def _night_config(loaded: LoadedConfig, directory: Path, *, steps: int) -> LoadedConfig:
    changes = {
        "runs": directory,
        "name": "run",
        "store": None,
        "eval": None,
        "improve": None,
        "rollout.scenarios": ScenariosConfig(source=str(directory / SCENARIOS)),
        "train.steps": steps,
        "train.decay": "none",
        "train.warmup_steps": 0,
    }
    for key, value in changes.items():
        loaded = loaded.with_value(key, value)
    return loaded


async def _gates(loaded: LoadedConfig, nights: Nights, night: Night) -> list[GateResult]:
    """Plays every set of scenarios with both policies, and checks the gates on their paired differences."""
    config, sets = _section(loaded), _gated_sets(loaded, nights)
    section = loaded.config.eval or EvalConfig()
    loaded = decide_engine(loaded.with_value("eval", section))
    directory = nights.path(night.number) / GATES
    make_directory(directory)
    played: dict[str, dict[str, list[Trajectory]]] = {}
    async with SharedEngines() as engines:
        for name, checkpoint in ((BASELINE, night.baseline), (CANDIDATE, night.candidate)):
            source = find_policy(loaded, nights.run / checkpoint)
            with open_policy(loaded, source) as policy:
                async with open_sampler(
                    loaded, policy, checkpoint=source.checkpoint, step=source.step, logs=directory, engines=engines
                ) as sampler:
                    played[name] = {
                        gated: await evaluate.play_evaluation(
                            sampler,
                            section,
                            {"": scenarios},
                            step=source.step,
                            path=directory / f"{gated}-{name}.jsonl",
                            title=f"night {night.number}: {gated}, {name}",
                        )
                        for gated, scenarios in sets.items()
                    }
    judge, results = make_judges(loaded.config, loaded.directory), list[GateResult]()
    try:
        for gated in sets:
            values = {}
            for name in played:
                attempts, against = played[name][gated], played[BASELINE][gated]
                judged = await evaluate.judged_rewards(loaded.config, judge, attempts, lambda against=against: against)  # type: ignore[misc]
                values[name] = evaluate.values_by_scenario(attempts)
                if judged.by_scenario:
                    values[name]["reward"] = values[name].get("reward", {}) | judged.by_scenario
            results.append(_checked(gated, config.gates[gated], values))  # type: ignore[index]
            log.info("night %d: %s: %s %s", night.number, gated, results[-1].gate, _shown(results[-1]))
    finally:
        await judge.close()
    return results


def _gated_sets(loaded: LoadedConfig, nights: Nights) -> dict[str, list[Json]]:
    """Returns the scenarios of each gate that the configuration has, and that has scenarios.

    A night under way counts as recent, however long ago it began. A failed night's conversations are read again.
    """
    config, known = _section(loaded), [night for night in nights.all() if night.outcome != "failed"]
    recent = [night for night in known if not night.outcome or night.started_at >= time.time() - WEEK_S]
    held_out = [each for night in recent for each in _read_scenarios(nights.path(night.number) / HELD_OUT)]
    sets = {
        "tasks": [] if loaded.config.eval is None else RunScenarios(loaded.config, loaded.directory).evaluation,
        "traffic": list({str(scenario["id"]): scenario for scenario in held_out}.values()),
        "safety": [] if config.safety is None else load_scenarios(config.safety, loaded.directory),
    }
    return {name: scenarios for name, scenarios in sets.items() if scenarios and name in config.gates}


def _checked(gated: str, text: str, values: Mapping[str, Mapping[str, Mapping[str, float]]]) -> GateResult:
    verdict = evaluate.check_policy(evaluate.parse_gate(text, [*values]), values, CANDIDATE)
    value = verdict.value
    if value is None:
        return GateResult(gated, text, False)
    return GateResult(gated, text, verdict.error is None, value.mean, value.low, value.high, value.num)


def _start_canary(loaded: LoadedConfig, nights: Nights, night: Night) -> None:
    """Serves the candidate to its share, unless its baseline was rolled back meanwhile."""
    with changing(nights.run):
        served = read_served(nights.run)
        _end_if_stale(night, served)
        if night.outcome or served is None:
            return
        if served.canary is None or served.canary.checkpoint != night.candidate:  # it is there after a kill
            digest, share = _digest(nights.run / night.candidate), _section(loaded).canary.share
            canary = Canary(night.candidate, digest, share, uuid.uuid4().hex)
            write_served(nights.run, msgspec.structs.replace(served, canary=canary))
    night.trial = Trial(time.time())


def _follow_canary(loaded: LoadedConfig, nights: Nights, night: Night) -> None:
    """Reads the feedback; promotes or rolls back if it decides. Raises RunError if served.json changed meanwhile."""
    config, trial = _section(loaded).canary, night.trial
    assert trial is not None, "a canary has begun"
    served = read_served(nights.run)
    if served is not None and served.checkpoint == night.candidate:  # killed after the promotion
        night.outcome, night.reason = "promoted", "its feedback is better"
    elif served is None or served.canary is None or served.canary.checkpoint != night.candidate:
        night.outcome, night.reason = "rolled back", "its canary was ended, by art improve --rollback or before a kill"
    if served is None or served.canary is None or night.outcome:
        nights.write(night)
        return
    test = CanaryTest(
        share=served.canary.share, error=config.error, margin=config.margin, client_share=config.client_share
    )
    policies = {"promoted": served.policy, "candidate": served.canary.policy}
    since = min(trial.since, time.time())  # earlier than noted, if the clock has been set back
    test.add_all(read_ratings(directories(loaded), config.metric, **policies, since=since))
    night.trial = Trial(
        since, test.promoted.num, test.promoted.mean, test.candidate.num, test.candidate.mean, test.num_capped
    )
    hours = (time.time() - since) / 3600
    if damage := _damage(nights.run / night.candidate):
        night.outcome, night.reason = "rolled back", f"it cannot be loaded any more: {damage}"
    elif test.verdict == "better":
        night.outcome, night.reason = "promoted", "its feedback is better"
    elif test.verdict == "worse":
        night.outcome, night.reason = "rolled back", "its feedback is worse"
    elif test.num >= config.max_ratings or hours >= config.max_hours:
        night.outcome = "undecided"
        night.reason = f"{test.num} ratings in {hours:.1f} hours did not show that it is better"
    elif test.is_behind(test.num / config.max_ratings):
        night.outcome = "undecided"
        night.reason = f"after {test.num} ratings its feedback was too little better, if at all"
    after = msgspec.structs.replace(served, canary=None)
    if night.outcome == "promoted":
        after = Served(served.canary.checkpoint, served.canary.policy, [*served.previous, served.checkpoint])
    if night.outcome:
        with changing(nights.run):
            if read_served(nights.run) != served:
                raise RunError(f"{nights.run}: art improve --rollback came between; run art improve again")
            write_served(nights.run, after)
    nights.write(night)


def _damage(checkpoint: Path) -> str:
    """Returns why a checkpoint cannot be loaded, "" if it can. Raises UncertainCheckpoint if it may be whole."""
    try:
        verify_checkpoint(checkpoint)
    except UncertainCheckpoint:
        raise
    except CheckpointError as error:
        return one_line(error)
    return ""


# --- words ------------------------------------------------------------------------------------------------------------


def _told(night: Night, config: ImproveConfig) -> str:
    parts = [f"night {night.number}: {night.num_scenarios} new scenarios, {night.num_held_out} more held out"]
    if night.start not in ("", night.baseline):
        parts.append(f"trained on from {night.start}")
    parts += [f"{each.scenarios} {_shown(each)}" for each in night.gates]
    if (trial := night.trial) is not None:
        rated = (
            f"{trial.candidate:.3f} ({trial.num_candidate} ratings) against {trial.promoted:.3f} ({trial.num_promoted})"
        )
        num = trial.num_candidate + trial.num_promoted
        parts.append(f"canary: {config.canary.metric} {rated if num else 'has no ratings yet'}")
    ending = f"{night.outcome}: {night.reason}" if night.outcome else "no verdict yet; run again when there is feedback"
    return f"{'; '.join(parts)}; {ending}"


def _shown(result: GateResult) -> str:
    if result.mean is None:
        return "no value"
    interval = "" if result.low is None or result.high is None else f" [{result.low:.3f}, {result.high:.3f}]"
    return f"{result.mean:+.3f}{interval}{'' if result.is_passed else ', missed'}"


def _section(loaded: LoadedConfig) -> ImproveConfig:
    assert loaded.config.improve is not None, "checked by the command"
    return loaded.config.improve


def _digest(checkpoint: Path) -> str:
    return digest_of(read_manifest(checkpoint))


def _read_scenarios(path: Path) -> list[Json]:
    return [msgspec.json.decode(line, type=dict) for line in path.read_bytes().splitlines()] if path.is_file() else []
