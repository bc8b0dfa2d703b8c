"""Evaluation: attempts, means, intervals, paired differences, judged contests and gates.

Every attempt at a scenario counts. A failed attempt is counted separately and has reward 0 in the comparison, because
an agent that crashes has not done its job.

If rollouts return no reward, a judge scores the attempts. A judge with an absolute scale, such as a function or a
reward model, scores each scenario's attempts, and the scenario's reward is the mean score.

A judge such as RULER compares attempts within a group, so two checkpoints are comparable only if both met the same
opponents. Each scenario's attempts are therefore judged together with reference attempts: the attempts of the first
evaluated policy. The reward is the share of comparisons won. Only the ranking within a group matters, so a judge may be
harsher in some calls.

Gates are bounds on an evaluation's means, or on differences from another policy:

    reward>=0.8               the mean
    reward.low>=0.3           the lower end of the mean's 95 % interval
    reward>=baseline-0.02     the paired difference from the first policy
    reward.low>=baseline      the lower end of the interval of that difference
    reward>=runs/a+0.1        the paired difference from the policy named runs/a

Impossible metric names are refused before playing, and misspelt names of an agent's metrics after four attempts.
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

IN_FLIGHT = 32  # number of scenarios judged at the same time; judges that make calls have their own limit
REFERENCE = "reference-"  # prefix of the ids of reference attempts while they are judged
BASELINE = "baseline"  # the first policy
SPENT = ("seconds", "tokens_in", "tokens_out", "cost_usd")
# counts that every rollout has
COUNTS = ("num_turns", "num_branches", "num_sampled", "num_cancelled", "num_abandoned", "num_retries")
OF_SOURCE = ("reward", "failed")  # also reported for each source as reward.NAME and failed.NAME
KNOWN = (*OF_SOURCE, *SPENT, *COUNTS)
NUM_EARLY = 4  # number of finished attempts after which metric names are checked
CLOSE = 0.8  # difflib ratio from which a name counts as a misspelling: "rewrad" has 0.83, "win" and "won" 0.67

_GATE = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=)\s*(.+?)\s*")
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


class JudgedRewards(NamedTuple):
    """Example: JudgedRewards({"game-1": 0.75}, is_contest=True)"""

    by_scenario: dict[str, float]  # {} if the rollouts returned rewards
    is_contest: bool  # True if any source's rewards are shares of comparisons won


async def judged_rewards(
    config: RunConfig, judge: Judge, trajectories: Sequence[Trajectory], references: Callable[[], Sequence[Trajectory]]
) -> JudgedRewards:
    """Returns the rewards of the sources that a judge scores. `references` reads reference attempts if needed."""
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
    """Returns the contents of the files named in config sections: code, command arguments, a judge's texts."""
    names = list[str]()
    for part in parts:
        names.append((getattr(part, "entry", None) or "").rpartition(":")[0])
        names += getattr(part, "command", None) or []
        names += [str(getattr(part, key, None) or "") for key in ("rubric", "instructions")]
    files = [loaded.directory / name for name in names]
    return [file.read_bytes() if file.is_file() else b"" for file in files]


def contests(config: RunConfig, trajectories: Sequence[Trajectory]) -> list[str]:
    """Returns the sources whose evaluations a judge decides; [""] for a run without sources."""
    return [name for name, part in config.by_source.items() if is_judged(part, of_source(trajectories, name))]


def of_source(trajectories: Sequence[Trajectory], source: str) -> list[Trajectory]:
    """Returns the attempts from one source; "" for a run without sources."""
    return [each for each in trajectories if (each.source or "") == source]


def is_judged(config: RunConfig, trajectories: Sequence[Trajectory]) -> bool:
    """Returns True if the judge gives an evaluation's reward, because the rollouts finished and returned none."""
    assert config.eval is not None, "no eval section"
    finished = [each for each in trajectories if _is_finished(each)]
    is_silent = bool(finished) and all(each.returned_reward is None for each in finished)
    return config.eval.judge and config.judge.name not in ("rollout", "none") and is_silent


def _is_finished(trajectory: Trajectory) -> bool:
    """Returns True if the rollout itself decided its reward; at a limit or a failure, `limit_reward` replaces it."""
    return trajectory.error is None and trajectory.ended_by is None


async def judge_contest(
    judge: Judge, attempts: Sequence[Trajectory], references: Sequence[Trajectory]
) -> dict[str, float]:
    """Returns the share of comparisons with reference attempts won, by scenario id.

    A tie counts half. A failed attempt loses to a successful one. References against themselves get 0.5 without a call
    to the judge. Scenarios without references are skipped, and so are references whose scenario has changed. Raises
    JudgeError if most scenarios could not be scored or the judge stopped working.
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
    """Returns `measure` of each scenario's attempts, judged together with `theirs`, by scenario id.

    Raises JudgeError if most scenarios could not be scored or the judge stopped working.
    """
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
    """Returns one group with new ids, because two policies at the same step use the same ids."""
    sides = [("attempt-", attempts), (REFERENCE, references)]
    named = [(f"{side}{number}", t) for side, members in sides for number, t in enumerate(members)]
    return [
        msgspec.structs.replace(trajectory, id=id, group_id=name, group_size=len(named), index=index)
        for index, (id, trajectory) in enumerate(named)
    ]


def _mean_reward(scored: Sequence[ScoredTrajectory]) -> float:
    return fmean(each.reward or 0.0 for each in scored)  # failed attempts have no reward and count as 0


def _share_won(scored: Sequence[ScoredTrajectory]) -> float:
    rewards: tuple[list[float], list[float]] = [], []  # rewards: attempts, references
    for each in scored:  # failed attempts have no reward
        rewards[each.id.startswith(REFERENCE)].append(float("-inf") if each.reward is None else each.reward)
    return fmean((ours > theirs) + (ours == theirs) / 2 for ours, theirs in product(*rewards))


class Estimate(NamedTuple):
    """A mean over scenarios and its 95 % interval. With fewer than three scenarios, the ends are None."""

    mean: float
    low: float | None
    high: float | None
    num: int  # scenarios

    @property
    def interval(self) -> str:
        """Example: "[-0.020, 0.130]", or "" without an interval."""
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
    """Returns the evaluation's trajectories. Attempts in `path` are not replayed; new attempts are appended to `path`.

    `scenarios` maps sources to scenarios. `watch` sees each new attempt once it is written; exceptions from `watch`
    propagate.
    """
    places = [GroupPlace(source, scenario) for source, its in scenarios.items() for scenario in its]
    plans = plan_places(places, step=step, group_size=config.attempts, prefix="e", temperature=config.temperature)
    wanted = {(plan.trajectory_id, plan.source): as_saved(plan.scenario) for plan in plans}
    # the file may contain attempts by another policy, or at scenarios that were changed or removed
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
    """Returns each source's reward and failures as additional metrics; {} without sources."""
    return {
        f"{metric}.{source}": its
        for metric in OF_SOURCE
        for source in config.rollout.sources
        if (its := {id: value for id, value in values.get(metric, {}).items() if id.startswith(f"{source}/")})
    }


def values_by_scenario(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """metric -> scenario id -> mean over attempts, for "reward", "failed" and the rollout's own metrics.

    "reward" is missing if finished attempts returned no reward; failures and limits alone would make it 0. The rule
    applies to each source separately.
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
            if name not in OF_SOURCE:  # the average must not mix a rollout's metric with ours of the same name
                seen[name][scenario].append(value)
    return _means(seen)


def _means(seen: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    return {
        metric: {scenario: sum(values) / len(values) for scenario, values in rows.items()}
        for metric, rows in seen.items()
    }


def spent_by_scenario(trajectories: Sequence[Trajectory], price: Price | None) -> dict[str, dict[str, float]]:
    """Returns the cost of an attempt like `values_by_scenario`: "seconds", "tokens_in", "tokens_out", "cost_usd".

    Tokens are summed over all calls, with full prompts. "cost_usd" requires a price.
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
    """Returns the mean over scenarios and the interval that `art report` uses."""
    assert values, "no values to estimate from"
    found = mean_interval(values)
    low, high = (None, None) if found is None else (found.low, found.high)
    return Estimate(fmean(values), low, high, len(values))


def paired_difference(values: Mapping[str, float], baseline: Mapping[str, float]) -> Estimate | None:
    """Returns the mean of value - baseline over the common scenarios, if any."""
    common = sorted(values.keys() & baseline.keys())
    return estimate([values[name] - baseline[name] for name in common]) if common else None


class Gate(NamedTuple):
    """A bound on a mean, on a difference of means, or on one end of either interval.

    Example: Gate("reward.low", ">=", -0.02, "runs/a")
    """

    metric: str
    operator: str
    bound: float
    baseline: str | None = None  # policy that the difference is taken from; None for a bound on the mean

    def __str__(self) -> str:
        offset = "" if self.baseline and not self.bound else f"{self.bound:{'+' if self.baseline else ''}g}"
        return f"{self.metric}{self.operator}{self.baseline or ''}{offset}"

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.operator == ">=" else value <= self.bound

    def check(self, value: float) -> None:
        """Raises GateError if the value misses the bound."""
        if not self.holds(value):
            raise GateError(f"gate missed: {self.metric} is {value:.4f}, not {self.operator} {self.bound:g}")


def parse_gate(text: str, policies: Sequence[str] = ()) -> Gate:
    """Parses `reward>=0.8`, or `reward>=NAME-0.02` with NAME from `policies` or "baseline" for the first policy.

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
    """Returns (policy, offset) for "NAME", "NAME-0.02" or "NAME + 0.1". A name may contain signs: long ones first."""
    names = {BASELINE: policies[0]} | {name: name for name in policies}
    for name in sorted(names, key=len, reverse=True):
        if text.startswith(name) and (rest := re.fullmatch(rf"(?:\s*([+-])\s*({_NUMBER}))?", text[len(name) :])):
            return names[name], float(f"{rest[1]}{rest[2]}") if rest[1] else 0.0
    return None


def check_gates(gates: Sequence[Gate], last: str, sources: Collection[str] = ()) -> None:
    """Raises UsageError if a gate for the policy `last` is known to be impossible before playing.

    `sources` are the run's sources. Without sources, attempts may report metrics named like a source's metrics.
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
    """Splits "reward.low" into ("reward", "low"), unless "reward.low" is itself a metric's name."""
    name, _, end = metric.rpartition(".")
    if not name or metric in names or end not in ("low", "high"):
        return metric, "mean"
    return name, "low" if end == "low" else "high"


def _is_known(metric: str) -> bool:
    """Returns True for metrics that art computes."""
    return metric in KNOWN or metric.partition(".")[0] in OF_SOURCE


class NameWatch:
    """Checks that the first finished attempts report the metrics named in the gates."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._wanted = sorted({gate.metric for gate in gates if not _is_known(split_end(gate.metric, ())[0])})
        self._seen: set[str] = set()
        self._num = 0

    def see(self, trajectory: Trajectory) -> None:
        """Raises UsageError at attempt NUM_EARLY if a metric is unknown but one with a similar name is reported."""
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


class GateVerdict(NamedTuple):
    """A gate's result. Example: GateVerdict(Gate("reward", ">=", 0.8), Estimate(0.9, 0.8, 1.0, 24), None)"""

    gate: Gate
    value: Estimate | None  # the policy's value or the difference from the gate's baseline, if known
    error: ArtError | None  # UsageError if the metric is missing from all attempts


def check_policy(gate: Gate, results: Mapping[str, Mapping[str, Mapping[str, float]]], policy: str) -> GateVerdict:
    """Checks the gate for a policy; `results` is policy -> metric -> scenario id -> value."""
    metric, end = split_end(gate.metric, results[policy])
    policies = (policy, gate.baseline or policy)
    for name in policies:
        if metric not in results[name]:
            there = ", ".join(sorted(results[name]))
            return GateVerdict(gate, None, UsageError(f"--gate: no metric {metric!r} of {name}; there are {there}"))
    ours, against = results[policy][metric], gate.baseline
    value = estimate([*ours.values()]) if against is None else paired_difference(ours, results[against][metric])
    if value is None:
        text = f"gate missed: {policy} and {against} share no scenario with {metric}"
        return GateVerdict(gate, None, GateError(text))
    for name in policies if metric == "reward" else ():
        if num := len(results[name]["failed"].keys() - results[name]["reward"].keys()):
            text = f"gate missed: {name}: {num} scenarios have no reward; they may be the hardest ones"
            return GateVerdict(gate, value, GateError(text))
    measured = getattr(value, end)
    if measured is None:
        text = f"gate missed: {policy}: {metric} has no interval, because it has fewer than 3 scenarios"
    elif gate.holds(measured):
        return GateVerdict(gate, value, None)
    elif gate.baseline is None:
        text = f"gate missed: {policy}: {gate.metric} is {measured:.4f}, not {gate.operator} {gate.bound:g}"
    else:
        which = "" if end == "mean" else f"its {end} end "
        text = (
            f"gate missed: {policy}: {metric} differs from {gate.baseline} by {value.mean:+.4f} {value.interval}, "
            f"{which}not {gate.operator} {gate.bound:+g}"
        )
    return GateVerdict(gate, value, GateError(text))
