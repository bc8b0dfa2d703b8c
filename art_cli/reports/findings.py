"""Findings: problems in a run, their first step, likely reasons, and cures. Pure functions of the history.

evaluation_fell   an evaluation is worse than the previous best, beyond the interval of the paired difference
training_fell     the latest training reward is below the best earlier training reward
no_signal         most groups in several steps have equal rewards
entropy_collapse  the policy became certain while the reward did not improve
hardly_moves      several updates hardly change any logprob, despite signal
frozen            recent groups have no signal, the policy is certain or no longer improves, and the reward is not at
                  its maximum
settled           all attempts at some scenarios sample the same tokens, for less than other attempts earn
stuck             reward and entropy did not change for long: no spread, or a noisy reward
failures          many rollouts fail in several steps
failing_pays      more rollouts fail than at first, while the others' reward rises: perhaps the policy fails on purpose
parted            reward and shadow score part, by a test with bounded false alarms (runs/parting.py);
                  or the judge agrees less with a person's labels (judges/files/run_labels.py)
judge_changed     judge replies name a new model
cascade_drifted   a cascade's judges order too few of the newest audited pairs alike (judges/cascade.py)

A reason is a metric that changed between the best policy and the worse policy (entropy, signal, gap, clipping, length,
failures, gradient), with a cure. This module contains the cures of all findings.

The best of many evaluations is partly luck. The interval's level is therefore divided by the number of compared pairs
(Bonferroni), so about 5 % of stable runs get a false finding. A reason is additional evidence; with a reason, the level
is divided by the number of earlier evaluations only.

Steps are numbered as in `art train`: "step 7" is update 7, and an evaluation at step 7 measures the resulting policy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, takewhile
from operator import methodcaller
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from art_cli.config.metric_names import JUDGED_BY
from art_cli.judges.agreement import Ratio
from art_cli.judges.cascade import MIN_AGREEMENT, recent_agreement
from art_cli.judges.files.run_labels import OrderedPair, describe_fall, find_fall
from art_cli.runs.history import Evaluated, History, UpdateNumbers
from art_cli.runs.intervals import LEVEL, mean_interval, student
from art_cli.runs.parting import Parting, anchors, describe_parting, find_parting, read_beside

FAILED = "failed."  # prefix of the metrics that count failures by kind
NEAR = 2  # number of updates averaged for a policy; more would hide a fast collapse

THAW = (
    "a fresh run (--fresh) with a smaller train.max_kl and loss.scale_advantages=false; then a warm-up on the best "
    "attempts (art sft --best-of)"
)
MORE_GROUPS = "more groups (rollout.groups_per_step) for a less noisy step"
REFINE = (
    "a fresh run (--fresh) with loss.scale_advantages=true, if rewards in a group differ little, or a warm-up on the "
    "best attempts (art sft --best-of)"
)
SLOWER = f"a smaller train.learning_rate, or {MORE_GROUPS}"
EXPLORE = "a smaller train.learning_rate, train.max_kl, loss.kl above 0, or a higher rollout.sampling.temperature"
UNSETTLE = (
    "read such an attempt (art view): what earns a part of the reward without the rest should earn less, and each step "
    "toward the rest something; a warm-up on attempts that earn all (art sft), or a higher rollout.sampling.temperature"
)
NOTHING_TO_LEARN = (
    "rollout.refill, scenarios neither solved nor hopeless (rollout.choose=adaptive), a larger rollout.group_size, "
    "rewards with more levels, or loss=ppo with groups of 1"
)
FASTER = "a larger train.learning_rate, ten times as large to begin with, or more train.epochs_per_step"
MEND_ROLLOUT = "read the errors in step_*/trajectories.jsonl; rollout.timeout_s and rollout.concurrency bound the rest"
SCORE_FAILURES = (
    "read the errors in step_*/trajectories.jsonl; name their classes in rollout.failures, so that such an attempt "
    "gets its group's lowest reward"
)
GENTLER = (
    "a smaller train.max_kl, train.max_grad_norm or train.learning_rate, train.clip_to_history=2, or train.decay=linear"
)
FEWER_UPDATES = "fewer train.epochs_per_step or train.updates_per_step, or a smaller train.learning_rate"
SAME_WEIGHTS = "model.dtype=float32, a smaller train.max_staleness, or train.max_logprob_gap to stop earlier"
MEND_REWARD = (
    "look at attempts with a high reward and a low shadow score (step_*/scored.jsonl): mend the reward where it can be "
    "had without the work, loss.kl above 0, or an earlier checkpoint"
)
CHECK_REWARD = (
    "read the best and the worst attempt of a group (art view): what they differ in must be what the reward pays for, "
    "and the same attempt must get the same reward again; then more groups (rollout.groups_per_step)"
)
MEASURE_JUDGE = (
    "art judge step_*/trajectories.jsonl --probe measures what judges now, and --gold its agreement; name a dated "
    "snapshot in judge.model, which the provider does not replace"
)
NEWER_JUDGE = "train the first judge on newer attempts (art reward), or raise judge.unsure"
LIMITS = "rollout.max_turns, rollout.sampling.max_tokens and model.max_length, or a lower rollout.limit_reward"
# (kind, metric, smallest value, text, cure) of metrics that matter once they double
DOUBLED = (
    ("gap", "logprob_gap", 0.01, "logprob gap rose from {:.2g} to {:.2g} nats", SAME_WEIGHTS),
    ("clip", "clip_fraction", 0.1, "clipped tokens rose from {:.1%} to {:.1%}", FEWER_UPDATES),
    ("kl", "kl", 0.05, "KL to the reference rose from {:.2g} to {:.2g} nats", GENTLER),
)

# Bonferroni factors for the number of compared pairs of evaluations and of training windows, because comparisons are
# repeated at each step. In simulations, runs of 24 to 300 steps then keep to LEVEL.
EVALUATION_LOOKS, TRAINING_LOOKS = 5, 30
WINDOWS = (5, 20)  # window sizes, in steps, for comparing mean training rewards
STREAK = 5  # number of consecutive steps in a lasting state, which must hold on average and in most steps
SURE = 3  # the same for metrics with hardly any noise
NO_SIGNAL, FAILURES = 0.8, 0.2  # shares of groups and of rollouts above which a lasting state is a finding
COLLAPSED = 0.25  # share of the initial entropy below which a policy has become certain
STILL = 0.5  # smallest reward increase that counts as progress, in standard deviations of the initial rewards
SOLVED = 0.95  # mean reward from which nothing is left to learn, if 1 is the usual maximum
# Smallest logprob change per trained token, in nats, for a policy that moves. Four epochs on 64 attempts of
# SmolLM2-135M with an adapter: 0.009 to 0.013 at the learning rate 1e-5, which learned nothing.
MOVES = 0.02
FROZEN = 2  # consecutive latest steps without signal in a frozen run
FROZEN_COMPARED = 3  # the same where a step compares its groups with each other, which can free a policy
NO_ENTROPY = 0.1  # nats per token of a policy with hardly any alternatives
SETTLED_STEPS, SETTLED_TIMES, SETTLED = 8, 3, 0.05  # of so many steps so many with settled groups, this mean share
MAX_POOLS = 3  # number of pools named in a finding
STUCK = 10  # consecutive steps without change of reward and entropy in a stuck run
STUCK_RISE = 0.2  # like STILL, for a stuck run
FLAT = 0.1  # relative entropy change that still counts as no change
EXPLAINED = ("no_signal", "hardly_moves", "failures")  # findings that explain a stuck run
SPREAD = 0.5  # share of groups without signal from which missing spread is the explanation
Window = Sequence[UpdateNumbers]
LOOKS = 200  # number of checks per doubling of the run's length; each check's time grows with the length


class Reason(msgspec.Struct, frozen=True):
    """A metric that changed with a fall. Example: Reason("entropy", "entropy fell from 0.59 to 0.11 nats", "...")"""

    kind: str
    text: str
    cure: str  # advice with configuration keys


def find_reasons(updates: Sequence[UpdateNumbers], best: int, step: int) -> list[Reason]:
    """Compares the updates up to step `best` with the updates up to `step`."""
    since = [update for update in updates if best < update.number <= step]
    if not since:
        return []
    before = [update for update in updates if best - NEAR < update.number <= best] or since[:1]
    first, now = [update for update in updates if update.number <= step][:NEAR], since[-NEAR:]
    spans = _Spans(first, before, now)
    found = [_entropy(spans), _signal(spans), *_doubled(spans), _length(spans), *_ended(spans)]
    return [reason for reason in found if reason is not None] + _gradient(updates, since)


class _Spans(NamedTuple):
    """The run's initial updates, the updates before the best policy, and the latest updates."""

    first: Sequence[UpdateNumbers]
    before: Sequence[UpdateNumbers]
    now: Sequence[UpdateNumbers]

    def means(self, of: Callable[[UpdateNumbers], float | None]) -> tuple[float, float, float] | None:
        """Returns the mean of each span, if all spans have the metric."""
        spans = [[value for update in span if (value := of(update)) is not None] for span in self]
        return (fmean(spans[0]), fmean(spans[1]), fmean(spans[2])) if all(spans) else None


def _entropy(spans: _Spans) -> Reason | None:
    """Halved since the best policy, a quarter of the initial entropy, or doubled."""
    if (means := spans.means(lambda update: update.get("entropy"))) is None:
        return None
    first, before, now = means
    if now <= before / 2:
        return Reason("entropy", f"entropy fell from {before:.2g} to {now:.2g} nats", EXPLORE)
    if now <= first / 4:
        return Reason("entropy", f"entropy fell from {first:.2g} nats at the start to {now:.2g}", EXPLORE)
    if now >= 2 * before and now - before >= 0.2:
        return Reason("entropy", f"entropy rose from {before:.2g} to {now:.2g} nats", GENTLER)
    return None


def _signal(spans: _Spans) -> Reason | None:
    means = spans.means(_silent_share)
    if means is None or means[2] < 0.5 or means[2] - means[1] < 0.25:  # a quarter: smaller differences may be chance
        return None
    text = f"{means[2]:.0%} of the groups without signal, {means[1]:.0%} before"
    return Reason("signal", text, NOTHING_TO_LEARN)


def _doubled(spans: _Spans) -> Iterator[Reason]:
    """Yields the metrics of DOUBLED that have at least doubled since the best policy."""
    for kind, name, least, text, cure in DOUBLED:
        means = spans.means(methodcaller("get", name))
        if means is not None and means[2] >= max(least, 2 * means[1]):
            yield Reason(kind, text.format(*means[1:]), cure)


def _length(spans: _Spans) -> Reason | None:
    means = spans.means(lambda update: update.per_attempt("tokens_sampled"))
    if means is None or means[1] <= 0 or 2 / 3 < means[2] / means[1] < 1.5:
        return None
    how = "grew" if means[2] > means[1] else "shrank"
    return Reason("length", f"sampled tokens of an attempt {how} from {means[1]:.3g} to {means[2]:.3g}", LIMITS)


def _ended(spans: _Spans) -> Iterator[Reason]:
    """Yields failures and limits if their share of the attempts rose by 0.05 or more."""
    for kind, name, text, also, cure in (
        ("failures", "num_failed", "failed rollouts", mostly(spans.now), MEND_ROLLOUT),
        ("limits", "num_limited", "rollouts at a limit", "", LIMITS),
    ):
        means = spans.means(methodcaller("per_attempt", name))
        if means is not None and means[2] - means[1] >= 0.05:
            yield Reason(kind, f"{text} rose from {means[1]:.0%} to {means[2]:.0%}{also}", cure)


def _gradient(updates: Sequence[UpdateNumbers], since: Sequence[UpdateNumbers]) -> list[Reason]:
    """Reports the largest gradient since the best policy, if it exceeds 5 times the run's median so far."""
    norms = [u.metrics["grad_norm"] for u in updates if "grad_norm" in u.metrics and u.number <= since[-1].number]
    latest = [(update.metrics["grad_norm"], update.number) for update in since if "grad_norm" in update.metrics]
    if not latest or (top := max(latest))[0] <= 5 * median(norms):
        return []
    return [Reason("gradient", f"gradient norm {top[0]:.2g} at step {top[1]}, median {median(norms):.2g}", GENTLER)]


def failed_kinds(updates: Sequence[UpdateNumbers]) -> dict[str, int]:
    """Failure kind -> number of attempts, most common kinds at the top."""
    counts = Counter[str]()
    for update in updates:
        counts.update({name.removeprefix(FAILED): round(num) for name, num in update.metrics.items()
                       if name.startswith(FAILED)})  # fmt: skip
    return dict(counts.most_common())


def mostly(updates: Sequence[UpdateNumbers]) -> str:
    """Example: ", mostly timeout"."""
    kinds = list(failed_kinds(updates))
    return f", mostly {kinds[0]}" if kinds else ""


class RunFinding(msgspec.Struct, frozen=True):
    """A problem and its steps.

    Example: RunFinding("evaluation_fell", 24, 24, "the evaluation at step 24 is 0.613, ...", [Reason(...)], "...")
    """

    kind: str
    step: int  # the earliest step with the problem
    until: int  # the latest step with the problem
    text: str
    reasons: list[Reason]
    cure: str  # advice without reasons

    @property
    def cures(self) -> list[str]:
        """Returns the distinct cures."""
        return list(dict.fromkeys([reason.cure for reason in self.reasons] or [self.cure]))

    def __str__(self) -> str:
        beside = "; ".join(reason.text for reason in self.reasons) or "no other number shows why"
        return f"{self.text} ({beside}); try: {'; '.join(self.cures)}"


def find(history: History, *, is_comparable: bool = True) -> list[RunFinding]:
    """Returns all findings of a history, ordered by their beginning.

    `is_comparable` is False if training rewards of different steps cannot be compared, as for a judge that only
    compares attempts within a group.
    """
    lasting = list(_lasting(history, is_comparable=is_comparable))
    found = [*_evaluations_fell(history), *lasting, *_parted(history), *_judge_changed(history.updates)]
    found += _cascade_drifted(history.updates)
    if is_comparable:
        found += [*_training_fell(history), *_stuck(history.updates, lasting)]
    found += _frozen(history.updates, lasting, is_comparable=is_comparable)
    return sorted(found, key=lambda finding: finding.step)


# --- evaluations ------------------------------------------------------------------------------------------------------


def _evaluations_fell(history: History) -> Iterator[RunFinding]:
    """Yields a finding each time that evaluations drop below the previous best."""
    best: Evaluated | None = None
    fall: RunFinding | None = None
    for num, point in enumerate(history.evaluations):
        if "reward" not in point.metrics:
            continue
        found = None
        if best is None or point.metrics["reward"] >= best.metrics["reward"]:
            best = point
        else:
            found = _compare(history, best, point, num)
        if fall and found:
            fall = msgspec.structs.replace(fall, until=point.step)
        else:
            yield from [fall] if fall else []
            fall = found
    yield from [fall] if fall else []


def _compare(history: History, best: Evaluated, point: Evaluated, num: int) -> RunFinding | None:
    """Checks whether `point`, after `num` earlier evaluations, is worse than the best."""
    common = sorted(best.rewards.keys() & point.rewards.keys())
    differences = [point.rewards[name] - best.rewards[name] for name in common]
    plain = mean_interval(differences)
    if plain is None or plain.high >= 0:
        return None
    reasons = find_reasons(history.updates, best.step, point.step)
    wide = mean_interval(differences, level=2 * LEVEL / (num if reasons else EVALUATION_LOOKS * num * (num + 1) / 2))
    if wide is None or wide.high >= 0:
        return None
    text = (
        f"the evaluation at step {point.step} is {point.metrics['reward']:.3f}, below {best.metrics['reward']:.3f} at "
        f"step {best.step}; difference {plain.mean:+.3f} [{plain.low:+.3f}, {plain.high:+.3f}]"
    )
    return RunFinding("evaluation_fell", point.step, point.step, text, reasons, _calmer(history))


# --- training rewards -------------------------------------------------------------------------------------------------


def _training_fell(history: History) -> Iterator[RunFinding]:
    """Yields a finding per fall below the best mean; a longer window skips what a shorter one found."""
    rewarded = [(update.number, update.metrics["reward_mean"]) for update in history.updates
                if "reward_mean" in update.metrics]  # fmt: skip
    values = [reward for _, reward in rewarded]
    sums = [0.0, *accumulate(values)]
    seen: set[int] = set()
    for width in WINDOWS:
        for first, last, top in _falls(values, sums, width):
            if seen.isdisjoint(range(first, last + 1)):
                seen.update(range(first, last + 1))
                yield _training_finding(history, rewarded, sums, width, (first, last, top))


def _falls(values: Sequence[float], sums: Sequence[float], width: int) -> Iterator[tuple[int, int, int]]:
    """Yields (first, last, top): windows ending at indices first to last are below the window ending at top."""
    top, begun, end = width - 1, None, 0

    def mean(at: int) -> float:
        return (sums[at + 1] - sums[at + 1 - width]) / width

    for at in range(2 * width - 1, len(values)):
        if mean(at - width) >= mean(top):
            top = at - width
        drop = mean(top) - mean(at)
        is_low = drop > 0 and drop > noise(values, at) * math.sqrt(2 / width) * _bound(at + 1, width)
        if is_low:
            begun, end = (at if begun is None else begun), at
        elif begun is not None:
            yield begun, end, top
            begun = None
    if begun is not None:
        yield begun, end, top


def noise(values: Sequence[float], at: int) -> float:
    """Returns the standard deviation of a step's reward around its trend, from successive differences up to `at`.

    Uses the middle half of the squared differences, divided by 2 and by 0.536, the corresponding value for a normal
    distribution. The few large differences of a collapse therefore have no effect.
    """
    squares = sorted((values[i + 1] - values[i]) ** 2 for i in range(max(0, at - 100), at))
    cut = len(squares) // 4
    middle = squares[cut : len(squares) - cut]
    return math.sqrt(fmean(middle) / 2 / 0.536)


def _bound(num: int, width: int) -> float:
    """Returns the chance difference between two windows of `num` steps, in standard errors (Bonferroni over pairs)."""
    return student(1 - LEVEL / (TRAINING_LOOKS * (num / width) ** 2), max(num // 3, 3))


def _training_finding(
    history: History,
    rewarded: Sequence[tuple[int, float]],
    sums: Sequence[float],
    width: int,
    fall: tuple[int, int, int],
) -> RunFinding:
    first, last, top = fall
    before, now = ((sums[at + 1] - sums[at + 1 - width]) / width for at in (top, first))
    step, best = rewarded[first][0], rewarded[top][0]
    text = (
        f"the training reward of steps {rewarded[first - width + 1][0]} to {step} is {now:.3f}, below {before:.3f} of "
        f"steps {rewarded[top - width + 1][0]} to {best}"
    )
    reasons = find_reasons(history.updates, rewarded[top - width // 2][0], step)  # since the middle of the best steps
    return RunFinding("training_fell", step, rewarded[last][0], text, reasons, _calmer(history))


def _calmer(history: History) -> str:
    """Returns the cure for a fall; prompt searches have no learning rate."""
    is_search = any("num_prompts" in update.metrics for update in history.updates)
    return MORE_GROUPS if is_search else SLOWER


# --- shadow rewards ---------------------------------------------------------------------------------------------------


def _parted(history: History) -> Iterator[RunFinding]:
    for anchor in anchors(history.updates):
        steps = read_beside(history.updates, anchor)
        if (alarm := find_parting(steps)) is not None:
            yield _parting(alarm, describe_parting(anchor, steps, alarm))


def judge_fell(labels: Sequence[OrderedPair]) -> list[RunFinding]:
    """Returns the finding that judge and person disagree, from the labels of the run's steps."""
    alarm = find_fall(labels)
    return [] if alarm is None else [_parting(alarm, describe_fall(labels, alarm))]


def _parting(alarm: Parting, text: str) -> RunFinding:
    return RunFinding("parted", alarm.onset, alarm.alarm, text, [], MEND_REWARD)


def _judge_changed(updates: Sequence[UpdateNumbers]) -> Iterator[RunFinding]:
    """Yields a finding for each step in which a judge's replies name a new model."""
    seen: set[str] = set()
    for update in updates:
        names = {name.removeprefix(JUDGED_BY) for name in update.metrics if name.startswith(JUDGED_BY)}
        if seen and (new := names - seen):
            text = f"the judge's replies name {', '.join(sorted(new))} at step {update.number}"
            before = (
                f"before they named {', '.join(sorted(seen))}, so rewards before and after come from different judges"
            )
            yield RunFinding("judge_changed", update.number, update.number, f"{text}; {before}", [], MEASURE_JUDGE)
        seen |= names


def _failing_pays(updates: Window) -> RunFinding | None:
    """Compares the latest updates with the first ones. Failed attempts have no reward, so the mean is the others'.

    A policy that fails on purpose in a few scenarios is found by the share of failing scenarios.
    """
    first, now = updates[:STREAK], updates[-STREAK:]
    rewards = [_mean(span, "reward_mean") for span in (first, now)]
    shares = {
        "failed rollouts": [_failed_share(span) for span in (first, now)],
        "scenarios of which most rollouts failed": [_mean(span, "failing_share") for span in (first, now)],
    }
    risen = [(name, its) for name, its in shares.items() if its[1] - its[0] >= FAILURES / 2]  # NaN: no
    if len(updates) < 2 * STREAK or not risen or not rewards[1] > rewards[0]:
        return None
    what, failed = risen[0]
    text = (
        f"{what} rose from {failed[0]:.0%} to {failed[1]:.0%} while the reward of the others rose from "
        f"{rewards[0]:.2g} to {rewards[1]:.2g}{mostly(now)}: failing may pay"
    )
    return RunFinding("failing_pays", *_ends(now), text, [], SCORE_FAILURES)


def _failed_share(window: Window) -> float:
    shares = [share for update in window if (share := update.per_attempt("num_failed")) is not None]
    return fmean(shares) if shares else math.nan


def _cascade_drifted(updates: Sequence[UpdateNumbers]) -> Iterator[RunFinding]:
    """Yields the first step after which the newest audited pairs of a cascade agree too rarely."""
    audited = list[Ratio]()
    for update in updates:
        if pairs := update.get("cascade_pairs"):
            audited.append(Ratio(pairs * (update.get("cascade_agreement") or 0.0), pairs))
            agreement = recent_agreement(audited)
            if agreement is not None and agreement < MIN_AGREEMENT:
                text = f"a cascade's judges order {agreement:.0%} of the audited pairs up to step {update.number} alike"
                yield RunFinding("cascade_drifted", update.number, update.number, text, [], NEWER_JUDGE)
                return


# --- lasting states ---------------------------------------------------------------------------------------------------


def _lasting(history: History, *, is_comparable: bool) -> Iterator[RunFinding]:
    updates = history.updates
    for span in _spans(updates, _holds(_silent_share, NO_SIGNAL)):
        if not _is_solved(span):
            share = fmean(_silent_share(update) or 0.0 for update in span)
            text = f"{share:.0%} of the groups of steps {_span(span)} had no signal: equal rewards within a group"
            yield RunFinding("no_signal", *_ends(span), text + _reward(span), [], NOTHING_TO_LEARN)
    for span in _spans(updates, _holds(lambda update: update.per_attempt("num_failed"), FAILURES)):
        share = fmean(update.per_attempt("num_failed") or 0.0 for update in span)
        text = f"{share:.0%} of the rollouts of steps {_span(span)} failed{mostly(span)}"
        yield RunFinding("failures", *_ends(span), text, [], MEND_ROLLOUT)
    if found := _failing_pays(updates):
        yield found
    first = updates[:STREAK]
    for span in _spans(updates, lambda window: _collapsed(first, window)) if is_comparable else ():
        text = (
            f"entropy fell from {_mean(first, 'entropy'):.2g} nats in steps {_span(first)} to "
            f"{_mean(span, 'entropy'):.2g} in steps {_span(span)}, and the reward did not change"
        )
        yield RunFinding("entropy_collapse", *_ends(span), text + _reward(span), [], EXPLORE)
    for span in _spans(updates, _settled, width=SETTLED_STEPS) if is_comparable else ():
        text = (
            f"the policy settled for a part of the reward: at {_mean(span, 'settled_share'):.0%} of the scenarios of "
            f"steps {_span(span)} all attempts sampled the same tokens, for less than other attempts earned"
        )
        yield RunFinding("settled", *_ends(span), text + _reward(span), [], UNSETTLE)
    for span in _spans(updates, lambda window: _rests(first, window, is_comparable=is_comparable), width=SURE):
        text = (
            f"the policy hardly moves in steps {_span(span)}: a step's updates change a trained token's logprob by "
            f"{_mean(span, 'logprob_change'):.2g} nats{_share_clipped(span)}, at learning rate "
            f"{_mean(span, 'learning_rate'):.1g}"
        )
        yield RunFinding("hardly_moves", *_ends(span), text + _reward(span), [], FASTER)


def _settled(window: Window) -> list[bool]:
    """Marks the steps with settled groups, if there are several of them."""
    shares = [update.get("settled_share") or 0.0 for update in window]
    is_found = sum(map(bool, shares)) >= SETTLED_TIMES and fmean(shares) >= SETTLED
    return [is_found and share > 0 for share in shares]


def _share_clipped(window: Window) -> str:
    share = _mean(window, "clip_fraction")  # NaN for custom algorithms without clipping
    return f" and clip {share:.1%} of the tokens" if share == share else ""


def _stuck(updates: Window, others: Sequence[RunFinding]) -> Iterator[RunFinding]:
    """Yields the latest steps if reward and entropy did not change, unless another finding explains it."""
    first = updates[:STREAK]
    spans = list(_spans(updates, lambda window: _is_flat(first, window), width=STUCK))
    if not spans or spans[-1][-1] is not updates[-1]:
        return  # still moving, or moving again
    span = spans[-1]
    begin, end = _ends(span)
    if any(finding.kind in EXPLAINED and finding.step <= end and finding.until >= begin for finding in others):
        return
    share, change = _mean(span, "no_signal_share"), _mean(span, "logprob_change")
    text = f"reward and entropy did not change in steps {_span(span)}{_reward(span)}: "
    if share >= SPREAD:
        text += f"the rewards of {share:.0%} of the groups have no spread"
        yield RunFinding("stuck", begin, end, text, [], NOTHING_TO_LEARN)
    else:
        moved = "" if math.isnan(change) else f" and the updates change a logprob by {change:.2g} nats"
        text += f"{1 - share:.0%} of the groups have spread{moved}, so the reward pays for what no update reaches"
        yield RunFinding("stuck", begin, end, text, [], CHECK_REWARD)


def _frozen(updates: Window, others: Sequence[RunFinding], *, is_comparable: bool) -> Iterator[RunFinding]:
    """Yields the latest steps if no group had signal and entropy is nearly 0, as in a short run.

    Of steps that compared groups with each other, the reward decides instead: it must not have risen.
    """
    silent = list(takewhile(lambda update: update.get("no_signal_share") == 1.0, reversed(updates)))[::-1]
    entropies = [update.metrics["entropy"] for update in updates if "entropy" in update.metrics]
    is_compared = any(update.get("num_updates") for update in silent)
    least = FROZEN_COMPARED if is_compared else FROZEN if is_comparable else math.inf
    if not least <= len(silent) < len(updates) or not entropies or not _mean(silent, "reward_mean") < SOLVED:
        return
    has_risen = _mean(silent[-1:], "reward_mean") > _mean(silent[:1], "reward_mean")
    if has_risen if is_compared else entropies[-1] > max(COLLAPSED * entropies[0], NO_ENTROPY):
        return
    begin, end = _ends(silent)
    if any(finding.kind == "entropy_collapse" and finding.until >= begin for finding in others):
        return
    pools = {name: value for name, value in silent[-1].metrics.items() if name.startswith("pool.") and value < SOLVED}
    lowest = ", ".join(f"{name} {pools[name]:.2f}" for name in sorted(pools, key=lambda name: pools[name])[:MAX_POOLS])
    text = (
        f"the policy {'no longer improves' if is_compared else 'has one answer left'}: no group of steps "
        f"{_span(silent)} had signal, because all its attempts got the same reward, and the entropy is "
        f"{entropies[-1]:.2g} nats{_reward(silent)}"
    )
    cure = REFINE if is_compared else THAW
    yield RunFinding("frozen", begin, end, text + (f"; stuck: {lowest}" if lowest else ""), [], cure)


def _silent_share(update: UpdateNumbers) -> float | None:
    """Returns the share of groups without signal; 0 if none had signal and the step compared them with each other."""
    share = update.get("no_signal_share")
    return 0.0 if share == 1.0 and update.get("num_updates") else share


def _is_flat(first: Window, window: Window) -> list[bool]:
    last = window[-STREAK:]
    before, now = _mean(first, "entropy"), _mean(last, "entropy")
    return [_stands_still(first, last, rise=STUCK_RISE) and abs(now - before) <= FLAT * before] * len(window)


def _holds(of: Callable[[UpdateNumbers], float | None], bound: float) -> Callable[[Window], list[bool]]:
    """Finds the updates above the bound, in a window whose mean and majority are above it."""

    def find_in(window: Window) -> list[bool]:
        values = [of(update) or 0.0 for update in window]
        is_high = [value > bound for value in values]
        return is_high if fmean(values) > bound and 2 * sum(is_high) > len(values) else [False] * len(values)

    return find_in


def _collapsed(first: Window, window: Window) -> list[bool]:
    """Marks the whole window if its entropy is a quarter of the initial entropy, without progress of the reward."""
    before, now = _mean(first, "entropy"), _mean(window, "entropy")
    return [before > 0 and now <= COLLAPSED * before and _stands_still(first, window)] * len(window)


def _rests(first: Window, window: Window, *, is_comparable: bool) -> list[bool]:
    """Marks the whole window if there is signal, a full rate and no update past the bound, but hardly any change."""
    change, rate = _mean(window, "logprob_change"), _mean(window, "learning_rate")
    rates = [update.metrics["learning_rate"] for update in [*first, *window] if "learning_rate" in update.metrics]
    is_full = bool(rates) and rate >= max(rates) / 2  # neither warm-up nor decay
    is_bounded = _mean(window, "update_share") < 1  # a larger rate would only be drawn back further
    rises = is_comparable and not _stands_still(first, window)
    is_excused = is_bounded or rises or _mean(window, "no_signal_share") >= NO_SIGNAL
    return [change < MOVES and is_full and not is_excused] * len(window)


def _stands_still(first: Window, window: Window, *, rise: float = STILL) -> bool:
    """Returns True if the reward did not rise since the initial window and is not at its maximum."""
    spread = _mean(first, "reward_std")
    least = rise * spread if spread > 0 else 0.0
    return not _is_solved(window) and _mean(window, "reward_mean") - _mean(first, "reward_mean") <= least


def _is_solved(window: Window) -> bool:
    return SOLVED <= _mean(window, "reward_mean") <= 1


def _mean(window: Window, name: str) -> float:
    """Returns the mean over the updates with this metric, or NaN."""
    values = [update.metrics[name] for update in window if name in update.metrics]
    return fmean(values) if values else math.nan


def _reward(window: Window) -> str:
    mean = _mean(window, "reward_mean")
    return "" if math.isnan(mean) else f", reward {mean:.3f}"


def _spans(updates: Window, find_in: Callable[[Window], list[bool]], *, width: int = STREAK) -> Iterator[Window]:
    """Yields the merged spans of consecutive windows in which `find_in` marks something."""
    begin, end = 0, 0
    for start in range(len(updates) - width + 1):
        is_found = find_in(updates[start : start + width])
        if not any(is_found):
            continue
        indices = [start + index for index, each in enumerate(is_found) if each]
        if indices[0] > end and end:
            yield updates[begin:end]
            begin, end = 0, 0
        begin, end = (begin if end else indices[0]), max(end, indices[-1] + 1)
    if end:
        yield updates[begin:end]


def _ends(span: Window) -> tuple[int, int]:
    return span[0].number, span[-1].number


def _span(span: Window) -> str:
    return "{} to {}".format(*_ends(span))


# --- while a run trains -----------------------------------------------------------------------------------------------


class RunWatch:
    """Watches a run during training: returns each new finding once, except findings already in `history`."""

    def __init__(self, history: History, *, is_comparable: bool) -> None:
        self.history, self._is_comparable = history, is_comparable
        self._reported = {_key(finding) for finding in find(history, is_comparable=is_comparable)}

    def add(self, record: UpdateNumbers | Evaluated) -> list[RunFinding]:
        """Returns the findings that begin with this record. Long runs are not checked at every step."""
        records: list[Any] = self.history.updates if isinstance(record, UpdateNumbers) else self.history.evaluations
        records.append(record)
        if len(records) % max(1, len(records) // LOOKS):
            return []
        found = find(self.history, is_comparable=self._is_comparable)
        new = [finding for finding in found if _key(finding) not in self._reported]
        self._reported.update(map(_key, new))
        return new


def _key(finding: RunFinding) -> tuple[str, int]:
    return finding.kind, finding.step
