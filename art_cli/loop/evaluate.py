"""Evaluation: the attempts at its scenarios, means, intervals, paired differences, a judge's contests, gates.

Every attempt at a scenario counts. A failed attempt has reward 0 in the comparison, because an agent that crashes has
not done its job, and is counted separately.

Where rollouts return no reward, a judge gives it. One whose rewards are on one scale, such as a function or a reward
model, scores each scenario's attempts, and the reward is their mean.

A judge such as RULER compares the attempts of one group, so its scores of two checkpoints are comparable only if both
met the same opponents. There each scenario's attempts are judged in one group with the reference attempts, which are
those of the first policy that was evaluated. The reward is the share of comparisons won. Only the order of scores
within a group counts, so a judge that is harsher in one call than in another changes nothing.

Gates are bounds that an evaluation must keep, on means or on differences from another policy:

    reward>=0.8               the mean
    reward.low>=0.3           the lower end of the mean's 95 % interval
    reward>=baseline-0.02     the paired difference from the first policy
    reward.low>=baseline      the lower end of the interval of that difference
    reward>=runs/a+0.1        the paired difference from the policy of that name

A name that no metric can have is refused before anything is played. A name that no attempt reports is refused after
the first attempts.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from art_cli.config.compose import LoadedConfig
from art_cli.config.metric_names import why_no_source
from art_cli.config.schema import EvalConfig, RunConfig
from art_cli.judges import Judge
from art_cli.judges.costs import Price
from art_cli.judges.judge_groups import judge_groups
from art_cli.loop.owed_groups import GroupPlace, owed, plan_places
from art_cli.loop.policy_sampler import Sampler
from art_cli.runs.durable import LineWriter, read_lines
from art_cli.runs.intervals import mean_interval
from art_cli.runs.trajectory import Json, ScoredTrajectory, Trajectory, as_saved
from art_cli.runtime.errors import ArtError, GateError, JudgeError, UsageError

log = logging.getLogger(__name__)

IN_FLIGHT = 32  # number of scenarios judged at once; a judge that makes calls bounds those itself
REFERENCE = "reference-"  # prefix of the ids of reference attempts while they are judged


class JudgedRewards(NamedTuple):
    """Example: JudgedRewards({"game-1": 0.75}, is_contest=True)"""

    by_scenario: dict[str, float]  # {} if the rollouts returned rewards
    is_contest: bool  # True: in a source at least these are shares of comparisons won


async def judged_rewards(
    config: RunConfig,
    judge: Judge,
    trajectories: Sequence[Trajectory],
    references: Callable[[], Sequence[Trajectory]],
) -> JudgedRewards:
    """Returns the rewards in the sources whose judge gives them.

    `references` reads the attempts to compare with, once a source needs them.
    """
    found = JudgedRewards({}, False)
    for name, part in config.by_source.items():
        ours = of_source(trajectories, name)
        if not is_judged(part, ours):
            continue
        if judge.of(ours).compares:
            rewards = await judge_contest(judge, ours, of_source(references(), name))
        else:
            rewards = await judge_scenarios(judge, _by_scenario(ours), _mean_reward)
        found = JudgedRewards(found.by_scenario | rewards, found.is_contest or judge.of(ours).compares)
    return found


def code_of(loaded: LoadedConfig, parts: Sequence[Any]) -> list[bytes]:
    """Returns the files that each section of the configuration names: code, words of a command, a judge's texts."""
    names = list[str]()
    for part in parts:
        names.append((getattr(part, "entry", None) or "").rpartition(":")[0])
        names += getattr(part, "command", None) or []
        names += [str(getattr(part, key, None) or "") for key in ("rubric", "instructions")]
    files = [loaded.directory / name for name in names]
    return [file.read_bytes() if file.is_file() else b"" for file in files]


def is_contest(config: RunConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if a judge gives the reward of at least one source."""
    return bool(contests(config, trajectories))


def contests(config: RunConfig, trajectories: Sequence[Trajectory]) -> list[str]:
    """Returns the sources whose evaluations a judge decides; [""] is that of a run without sources."""
    return [name for name, part in config.by_source.items() if is_judged(part, of_source(trajectories, name))]


def of_source(trajectories: Sequence[Trajectory], source: str) -> list[Trajectory]:
    """Returns those of one source; "" is that of a run without sources."""
    return [each for each in trajectories if (each.source or "") == source]


def is_judged(config: RunConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if the judge gives an evaluation's reward, because the rollouts finished and returned none."""
    assert config.eval is not None, "no eval section"
    finished = [each for each in trajectories if _is_finished(each)]
    is_silent = bool(finished) and all(each.returned_reward is None for each in finished)
    return config.eval.judge and config.judge.name not in ("rollout", "none") and is_silent


def _is_finished(trajectory: Trajectory) -> bool:
    """Whether the rollout itself said what its reward is, or that it has none; at a limit `limit_reward` stands in."""
    return trajectory.error is None and trajectory.limit is None


async def judge_contest(
    judge: Judge, attempts: Sequence[Trajectory], references: Sequence[Trajectory]
) -> dict[str, float]:
    """Returns, by scenario id, the share of comparisons with reference attempts that its attempts win.

    A tie counts half. A failed attempt loses to one that did not fail. References against themselves get 0.5
    everywhere, without asking the judge. A scenario without references is left out, and so are references at a
    scenario whose content has changed. Raises JudgeError: most scenarios could not be scored, or no further one can be.
    """
    asked = {each.scenario_id: as_saved(each.scenario) for each in attempts}
    theirs = _by_scenario([each for each in references if as_saved(each.scenario) == asked.get(each.scenario_id)])
    ours = {name: members for name, members in _by_scenario(attempts).items() if name in theirs}
    if {trajectory.id for trajectory in attempts} == {t.id for t in references} and attempts == references:
        return dict.fromkeys(ours, 0.5)
    return await judge_scenarios(judge, ours, _share_won, theirs)


async def judge_scenarios(
    judge: Judge,
    ours: Mapping[str, Sequence[Trajectory]],
    measure: Callable[[Sequence[ScoredTrajectory]], float],
    theirs: Mapping[str, Sequence[Trajectory]] | None = None,
) -> dict[str, float]:
    """Returns by scenario id what `measure` makes of its attempts, judged in one group with `theirs`. Raises
    JudgeError: most scenarios could not be scored, or no further one can be."""
    found: dict[str, float] = {}

    def keep(scored: list[ScoredTrajectory]) -> None:
        found[scored[0].group_id] = measure(scored)

    groups = ((name, partial(_mix, name, members, (theirs or {}).get(name, ()))) for name, members in ours.items())
    tally = await judge_groups(judge, groups, keep, in_flight=IN_FLIGHT)
    if tally.stopped or len(tally.owed) > tally.num_scored:
        reason = tally.stopped or next(iter(tally.owed.values()))
        raise JudgeError(f"evaluation: {len(ours) - len(found)} of {len(ours)} scenarios were not judged ({reason})")
    return found


def _by_scenario(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    by_scenario: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_scenario[trajectory.scenario_id].append(trajectory)
    return by_scenario


def _mix(name: str, attempts: Sequence[Trajectory], references: Sequence[Trajectory]) -> list[Trajectory]:
    """Returns one group of both, with new ids, because two policies at the same step have the same ids."""
    sides = [("attempt-", attempts), (REFERENCE, references)]
    named = [(f"{side}{number}", t) for side, members in sides for number, t in enumerate(members)]
    return [
        msgspec.structs.replace(trajectory, id=id, group_id=name, group_size=len(named), index=index)
        for index, (id, trajectory) in enumerate(named)
    ]


def _mean_reward(scored: Sequence[ScoredTrajectory]) -> float:
    return fmean(each.reward or 0.0 for each in scored)  # a failed attempt has no reward, and counts as 0


def _share_won(scored: Sequence[ScoredTrajectory]) -> float:
    rewards: tuple[list[float], list[float]] = [], []  # those of the attempts, and those of the references
    for each in scored:  # a failed attempt has no reward
        rewards[each.id.startswith(REFERENCE)].append(float("-inf") if each.reward is None else each.reward)
    return fmean((ours > theirs) + (ours == theirs) / 2 for ours, theirs in product(*rewards))


class Estimate(NamedTuple):
    """A mean over scenarios with its 95 % interval. The ends are None for fewer than three scenarios."""

    mean: float
    low: float | None
    high: float | None
    num: int  # scenarios

    @property
    def interval(self) -> str:
        """Example: "[-0.020, 0.130]", or "" if there is none."""
        return "" if self.low is None or self.high is None else f"[{self.low:.3f}, {self.high:.3f}]"


async def play_evaluation(
    sampler: Sampler,
    config: EvalConfig,
    scenarios: Mapping[str, Sequence[Json]],
    *,
    step: int,
    path: Path,
    title: str,
    watch: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Returns the evaluation's trajectories. Those in `path` are not played again; new ones are appended there.

    `scenarios` are by source.

    `watch` is called with each new one after it is written. An exception of it ends the evaluation.
    """
    places = [GroupPlace(source, scenario) for source, its in scenarios.items() for scenario in its]
    plans = plan_places(places, step=step, group_size=config.attempts, prefix="e", temperature=config.temperature)
    wanted = {(plan.trajectory_id, plan.source): as_saved(plan.scenario) for plan in plans}
    # the file may hold attempts of another policy, or at scenarios that were changed or are no longer evaluated on
    found = (each for each in read_lines(path, Trajectory) if not sampler.is_of_another(each))
    done = [each for each in found if wanted.get((each.id, each.source or "")) == each.scenario]
    if done:
        log.info("%s: %d of %d attempts are in %s already", title, len(done), len(plans), path)
    missing = owed(plans, done)
    if missing:
        with LineWriter(path) as writer:

            def keep(trajectory: Trajectory) -> None:
                writer.append(trajectory)
                done.append(trajectory)
                if watch is not None:
                    watch(trajectory)

            await sampler.play_shown(missing, keep, title=title)
    return done


def values_of_sources(values: Mapping[str, Mapping[str, float]], config: RunConfig) -> dict[str, dict[str, float]]:
    """Returns the reward and the failures of each source as further metrics; {} without sources."""
    return {
        f"{metric}.{source}": its
        for metric in OF_SOURCE
        for source in config.rollout.sources
        if (its := {id: value for id, value in values.get(metric, {}).items() if id.startswith(f"{source}/")})
    }


def values_by_scenario(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """metric -> scenario id -> mean over its attempts; "reward" and "failed" besides the rollout's own metrics.

    There is no "reward" if attempts finished and none returned one, because failures and limits alone would make it 0.
    With sources this holds for each.
    """
    finished = {each.source for each in trajectories if _is_finished(each)}
    rewarded = {each.source for each in trajectories if _is_finished(each) and each.returned_reward is not None}
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        scenario = trajectory.scenario_id
        failed = trajectory.error is not None
        has_reward = trajectory.source not in finished - rewarded
        seen["failed"][scenario].append(float(failed))
        if has_reward and (failed or trajectory.returned_reward is not None):
            seen["reward"][scenario].append(0.0 if failed else trajectory.returned_reward or 0.0)
        for name, value in trajectory.metrics.items():
            if name not in OF_SOURCE:  # a rollout's own metric of that name would be averaged into ours
                seen[name][scenario].append(value)
    return _means(seen)


def _means(seen: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    return {
        metric: {scenario: sum(values) / len(values) for scenario, values in rows.items()}
        for metric, rows in seen.items()
    }


def spent_by_scenario(trajectories: Sequence[Trajectory], price: Price | None) -> dict[str, dict[str, float]]:
    """Returns the cost of an attempt as `values_by_scenario` does: "seconds", "tokens_in", "tokens_out", "cost_usd".

    Tokens are summed over all calls; each call's prompt counts whole. There is no "cost_usd" without a price.
    """
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trajectory in trajectories:
        scenario = trajectory.scenario_id
        tokens_in = sum(turn.kept + len(turn.prompt_ids) for turn in trajectory.turns)
        tokens_in += round(trajectory.metrics.get("num_prompt", 0))
        tokens_out = trajectory.num_sampled + round(trajectory.metrics.get("num_completion", 0))
        spent = {"seconds": trajectory.duration_s, "tokens_in": float(tokens_in), "tokens_out": float(tokens_out)}
        if price is not None:
            spent["cost_usd"] = price.cost(tokens_in, tokens_out)
        for name, value in spent.items():
            seen[name][scenario].append(value)
    return _means(seen)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean over scenarios with its interval, as `art report` has it."""
    assert values, "no values to estimate from"
    found = mean_interval(values)
    low, high = (None, None) if found is None else (found.low, found.high)
    return Estimate(fmean(values), low, high, len(values))


def paired_difference(values: Mapping[str, float], baseline: Mapping[str, float]) -> Estimate | None:
    """Returns the mean of value - baseline over the scenarios that both have; None if they share none."""
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[name] - baseline[name] for name in common]) if common else None


BASELINE = "baseline"  # the first policy
SPENT = ("seconds", "tokens_in", "tokens_out", "cost_usd")
# Counts of every rollout, whatever it returns
COUNTS = ("num_turns", "num_branches", "num_sampled", "num_cancelled", "num_abandoned", "num_retries")
OF_SOURCE = ("reward", "failed")  # these are also reported for each source: reward.NAME, failed.NAME
KNOWN = (*OF_SOURCE, *SPENT, *COUNTS)
NUM_EARLY = 4  # number of finished attempts after which the names of metrics are checked
CLOSE = 0.8  # difflib ratio from which a name counts as a misspelling: "rewrad" has 0.83, "win" and "won" 0.67

_GATE = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=)\s*(.+?)\s*")
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


class Gate(NamedTuple):
    """A bound that a mean must keep, or a difference of means, or an end of the interval of either.

    Example: Gate("reward.low", ">=", -0.02, "runs/a")
    """

    metric: str
    operator: str
    bound: float
    baseline: str | None = None  # policy that the difference is taken from, or None if the bound is on the mean

    def __str__(self) -> str:
        offset = "" if self.baseline and not self.bound else f"{self.bound:{'+' if self.baseline else ''}g}"
        return f"{self.metric}{self.operator}{self.baseline or ''}{offset}"

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.operator == ">=" else value <= self.bound

    def check(self, value: float) -> None:
        """Raises GateError: the value misses the bound."""
        if not self.holds(value):
            raise GateError(f"gate missed: {self.metric} is {value:.4f}, not {self.operator} {self.bound:g}")


def parse_gate(text: str, policies: Sequence[str] = ()) -> Gate:
    """`reward>=0.8`, or `reward>=NAME-0.02` where NAME is one of `policies`, or "baseline" for the first of them.

    Raises UsageError.
    """
    match = _GATE.fullmatch(text)
    if match and re.fullmatch(f"-?{_NUMBER}", match[3]):
        return Gate(match[1], match[2], float(match[3]))
    if match and policies and (against := _parse_difference(match[3], policies)):
        return Gate(match[1], match[2], against[1], against[0])
    with_names = f" or METRIC>=NAME-NUMBER, NAME being {BASELINE}, {', '.join(policies)}" if policies else ""
    raise UsageError(f"--gate {text!r}: expected METRIC>=NUMBER or METRIC<=NUMBER, for example reward>=0.8{with_names}")


def _parse_difference(text: str, policies: Sequence[str]) -> tuple[str, float] | None:
    """Returns (policy, offset) of "NAME", "NAME-0.02" or "NAME + 0.1".

    Names may hold signs, so long ones are tried first.
    """
    names = {BASELINE: policies[0]} | {name: name for name in policies}
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name) and (rest := re.fullmatch(rf"(?:\s*([+-])\s*({_NUMBER}))?", text[len(name) :])):
            return names[name], float(f"{rest[1]}{rest[2]}") if rest[1] else 0.0
    return None


def check_gates(gates: Sequence[Gate], last: str, sources: Collection[str] = ()) -> None:
    """Raises UsageError: a gate cannot hold, as far as is known before playing; `last` is the policy it is for.

    `sources` are those of the run. Without any, attempts may report a metric of such a name themselves.
    """
    for gate in gates:
        if gate.baseline == last:
            raise UsageError(
                f"--gate {gate.metric}: {last} is compared with itself; name the policy to compare with before it, "
                f"for example --checkpoint base"
            )
        metric, _ = split_end(gate.metric, [f"{name}.{source}" for name in OF_SOURCE for source in sources])
        if sources and (reason := why_no_source(metric, sources)):
            raise UsageError(f"--gate {metric}: {reason}")
        if not _is_known(metric) and (near := get_close_matches(metric, KNOWN, 1, CLOSE)):
            raise UsageError(f"--gate: no metric {metric!r}; did you mean {near[0]!r}?")


def split_end(metric: str, names: Collection[str]) -> tuple[str, Literal["mean", "low", "high"]]:
    """Returns ("reward", "low") for "reward.low", unless that is one of the metrics' names."""
    name, _, end = metric.rpartition(".")
    if not name or metric in names or end not in ("low", "high"):
        return metric, "mean"
    return name, "low" if end == "low" else "high"


def _is_known(metric: str) -> bool:
    """Returns True if no attempt reports that metric itself."""
    return metric in KNOWN or metric.partition(".")[0] in OF_SOURCE


class NameWatch:
    """Checks the first finished attempts for the metrics that the gates name."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._wanted = sorted({gate.metric for gate in gates if not _is_known(split_end(gate.metric, ())[0])})
        self._seen: set[str] = set()
        self._num = 0

    def see(self, trajectory: Trajectory) -> None:
        """Raises UsageError at the NUM_EARLY-th attempt: none has a gate's name, and one has a similar name."""
        if trajectory.error is not None or not self._wanted:
            return
        self._num += 1
        self._seen |= set(trajectory.metrics)
        if self._num != NUM_EARLY:
            return
        for name in (split_end(wanted, self._seen)[0] for wanted in self._wanted):
            if name not in self._seen:
                there = ", ".join(sorted(self._seen | {"reward", "failed", *SPENT}))
                if near := get_close_matches(name, sorted(self._seen), 1, CLOSE):
                    raise UsageError(f"--gate: no attempt reports {name!r}; did you mean {near[0]!r}?")
                log.warning("--gate: none of the first %d attempts reports %r; there are %s", self._num, name, there)


class Verdict(NamedTuple):
    """A gate and what it found. Example: Verdict(Gate("reward", ">=", 0.8), Estimate(0.9, 0.8, 1.0, 24), None)"""

    gate: Gate
    value: Estimate | None  # of the policy, or its difference from the gate's baseline; None if there is none
    error: ArtError | None  # GateError, or UsageError for a metric that no attempt has; None if the gate holds


def check_policy(gate: Gate, results: Mapping[str, Mapping[str, Mapping[str, float]]], policy: str) -> Verdict:
    """Checks the gate for a policy; `results` is policy -> metric -> scenario id -> value."""
    metric, end = split_end(gate.metric, results[policy])
    policies = (policy, gate.baseline or policy)
    for name in policies:
        if metric not in results[name]:
            there = ", ".join(sorted(results[name]))
            return Verdict(gate, None, UsageError(f"--gate: no metric {metric!r} of {name}; there are {there}"))
    ours, against = results[policy][metric], gate.baseline
    value = estimate([*ours.values()]) if against is None else paired_difference(ours, results[against][metric])
    if value is None:
        text = f"gate missed: {policy} and {against} share no scenario with {metric}"
        return Verdict(gate, None, GateError(text))
    for name in policies if metric == "reward" else ():
        if num := len(results[name]["failed"].keys() - results[name]["reward"].keys()):
            text = f"gate missed: {name}: {num} scenarios have no reward; they may be the hardest ones"
            return Verdict(gate, value, GateError(text))
    measured = getattr(value, end)
    if measured is None:
        text = f"gate missed: {policy}: {metric} has no interval, because it has fewer than 3 scenarios"
    elif gate.holds(measured):
        return Verdict(gate, value, None)
    elif gate.baseline is None:
        text = f"gate missed: {policy}: {gate.metric} is {measured:.4f}, not {gate.operator} {gate.bound:g}"
    else:
        which = "" if end == "mean" else f"its {end} end "
        text = (
            f"gate missed: {policy}: {metric} differs from {gate.baseline} by {value.mean:+.4f} {value.interval}, "
            f"{which}not {gate.operator} {gate.bound:+g}"
        )
    return Verdict(gate, value, GateError(text))
