"""Findings: what went wrong in a run, since when, reasons in the numbers beside it, and cures. Pure: a history in.

evaluation_fell   an evaluation lies below the best one before it, by more than the interval of their paired difference
training_fell     the training reward of the last steps lies below that of the best steps before
no_signal         most groups of several steps say nothing, because their attempts got equal rewards
entropy_collapse  the policy became sure, and its reward stood still meanwhile
hardly_moves      the updates of several steps change hardly any logprob, though there is signal
frozen            no group of the newest steps says anything, the policy is sure, and its reward is not at the top
stuck             reward and entropy stood still for long: for want of spread, or because the reward is noise
failures          many rollouts of several steps fail
parted            reward and a shadow judge's score part, by a test whose false alarms are bounded (runs/parting.py);
                  or the judge comes to agree less with a person's labels (judges/files/run_labels.py)
judge_changed     the replies of a judge name another model than before

A reason is a number that changed between the best policy and the policy that fell (entropy, signal, gap, clipping,
length, failures, gradient), with what to try. The cures of all findings stand here.

The best of many evaluations is good by luck too. So the level of the interval is divided by the number of pairs that
were compared (Bonferroni), and of runs that never change about 5 % are accused. A reason beside the fall is evidence of
its own; then the level is divided by the number of earlier evaluations only.

Steps are numbered as `art train` shows them: "step 7" is the seventh update, and an evaluation at step 7 is of the
policy that it made.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, takewhile
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from art_cli.config.metric_names import JUDGED_BY
from art_cli.judges.files.run_labels import OrderedPair, describe_fall, find_fall
from art_cli.runs.history import Evaluated, History, UpdateNumbers
from art_cli.runs.intervals import LEVEL, mean_interval, student
from art_cli.runs.parting import Parting, anchors, describe_parting, find_parting, read_beside

NEAR = 2  # number of updates whose means stand for a policy; more would hide how fast a collapse goes

THAW = (
    "a fresh run (--fresh) with a smaller train.learning_rate or train.epochs_per_step=1; then loss.entropy_floor; "
    "then a warm-up on the best attempts (art sft --best-of)"
)
MORE_GROUPS = "more groups (rollout.groups_per_step) for a less noisy step"
SLOWER = f"a smaller train.learning_rate, or {MORE_GROUPS}"
EXPLORE = (
    "loss.entropy_floor, a smaller train.learning_rate, train.max_kl, loss.kl above 0, or a higher "
    "rollout.sampling.temperature"
)
NOTHING_TO_LEARN = (
    "rollout.refill, scenarios neither solved nor hopeless (rollout.choose=adaptive), a larger rollout.group_size, "
    "rewards with more levels, or loss=ppo with groups of 1"
)
FASTER = "a larger train.learning_rate, ten times as large to begin with, or more train.epochs_per_step"
MEND_ROLLOUT = "read the errors in step_*/trajectories.jsonl; rollout.timeout_s and rollout.concurrency bound the rest"
GENTLER = (
    "train.max_kl, train.clip_to_history=2, a smaller train.max_grad_norm or train.learning_rate, or train.decay=linear"
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
LIMITS = "rollout.max_turns, rollout.sampling.max_tokens and model.max_length, or a lower rollout.limit_reward"
CURES = (
    THAW,
    SLOWER,
    FASTER,
    EXPLORE,
    NOTHING_TO_LEARN,
    MEND_ROLLOUT,
    GENTLER,
    FEWER_UPDATES,
    SAME_WEIGHTS,
    LIMITS,
    MEND_REWARD,
    CHECK_REWARD,
    MEASURE_JUDGE,
)


class Reason(msgspec.Struct, frozen=True):
    """A number that changed beside a fall. Example: Reason("entropy", "entropy fell from 0.59 to 0.11 nats", "...")"""

    kind: str
    text: str
    cure: str  # advice, with the keys of the configuration to change


def find_reasons(updates: Sequence[UpdateNumbers], best: int, step: int) -> list[Reason]:
    """Returns the changes between the updates up to step `best` and those up to `step`."""
    since = [update for update in updates if best < update.number <= step]
    if not since:
        return []
    before = [update for update in updates if best - NEAR < update.number <= best] or since[:1]
    first, now = [update for update in updates if update.number <= step][:NEAR], since[-NEAR:]
    spans = _Spans(first, before, now)
    checks = (_entropy, _signal, _gap, _clip, _kl, _length, _failures, _limits)
    return [reason for check in checks if (reason := check(spans)) is not None] + _gradient(updates, since)


class _Spans(NamedTuple):
    """The first updates of the run, those before the best policy, and the latest ones."""

    first: Sequence[UpdateNumbers]
    before: Sequence[UpdateNumbers]
    now: Sequence[UpdateNumbers]

    def means(self, of: Callable[[UpdateNumbers], float | None]) -> tuple[float, float, float] | None:
        """Returns the mean of each span, or None if one of them has no such number."""
        spans = [[value for update in span if (value := of(update)) is not None] for span in self]
        return (fmean(spans[0]), fmean(spans[1]), fmean(spans[2])) if all(spans) else None


def _entropy(spans: _Spans) -> Reason | None:
    """Halved since the best policy, a quarter of the run's start, or doubled."""
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
    means = spans.means(lambda update: update.get("no_signal_share"))
    if means is None or means[2] < 0.5 or means[2] - means[1] < 0.25:  # a quarter: a few groups differ by chance
        return None
    text = f"{means[2]:.0%} of the groups without signal, {means[1]:.0%} before"
    return Reason("signal", text, NOTHING_TO_LEARN)


def _doubled(spans: _Spans, of: Callable[[UpdateNumbers], float | None], least: float) -> tuple[float, float] | None:
    """The means before the best policy and now, where the number is now at least `least` and twice what it was."""
    means = spans.means(of)
    return None if means is None or means[2] < least or means[2] < 2 * means[1] else means[1:]


def _gap(spans: _Spans) -> Reason | None:
    if (rise := _doubled(spans, lambda update: update.get("logprob_gap"), 0.01)) is None:
        return None
    return Reason("gap", "logprob gap rose from {:.2g} to {:.2g} nats".format(*rise), SAME_WEIGHTS)


def _clip(spans: _Spans) -> Reason | None:
    if (rise := _doubled(spans, lambda update: update.get("clip_fraction"), 0.1)) is None:
        return None
    return Reason("clip", "clipped tokens rose from {:.1%} to {:.1%}".format(*rise), FEWER_UPDATES)


def _kl(spans: _Spans) -> Reason | None:
    if (rise := _doubled(spans, lambda update: update.get("kl"), 0.05)) is None:
        return None
    return Reason("kl", "KL to the reference rose from {:.2g} to {:.2g} nats".format(*rise), GENTLER)


def _length(spans: _Spans) -> Reason | None:
    means = spans.means(lambda update: update.per_attempt("tokens_sampled"))
    if means is None or means[1] <= 0 or 2 / 3 < means[2] / means[1] < 1.5:
        return None
    how = "grew" if means[2] > means[1] else "shrank"
    return Reason("length", f"sampled tokens of an attempt {how} from {means[1]:.3g} to {means[2]:.3g}", LIMITS)


def _failures(spans: _Spans) -> Reason | None:
    means = spans.means(lambda update: update.per_attempt("num_failed"))
    if means is None or means[2] - means[1] < 0.05:
        return None
    text = f"failed rollouts rose from {means[1]:.0%} to {means[2]:.0%}{mostly(spans.now)}"
    return Reason("failures", text, MEND_ROLLOUT)


def _limits(spans: _Spans) -> Reason | None:
    means = spans.means(lambda update: update.per_attempt("num_limited"))
    if means is None or means[2] - means[1] < 0.05:
        return None
    return Reason("limits", f"rollouts at a limit rose from {means[1]:.0%} to {means[2]:.0%}", LIMITS)


def _gradient(updates: Sequence[UpdateNumbers], since: Sequence[UpdateNumbers]) -> list[Reason]:
    """The largest gradient since the best policy, if it is more than 5 times the median of the run up to there."""
    norms = [u.metrics["grad_norm"] for u in updates if "grad_norm" in u.metrics and u.number <= since[-1].number]
    latest = [(update.metrics["grad_norm"], update.number) for update in since if "grad_norm" in update.metrics]
    if not latest or (top := max(latest))[0] <= 5 * median(norms):
        return []
    return [Reason("gradient", f"gradient norm {top[0]:.2g} at step {top[1]}, median {median(norms):.2g}", GENTLER)]


def mostly(updates: Sequence[UpdateNumbers]) -> str:
    """Example: ", mostly timeout"."""
    counts: dict[str, float] = {}
    for update in updates:
        for name, num in update.metrics.items():
            if name.startswith("failed."):
                counts[name.removeprefix("failed.")] = counts.get(name.removeprefix("failed."), 0.0) + num
    return f", mostly {max(counts, key=lambda kind: counts[kind])}" if counts else ""


# What the number of compared pairs of evaluations, and of windows of training rewards, is multiplied by, because they
# are compared again at each step. Simulated: runs of 24 to 300 steps then keep to LEVEL.
EVALUATION_LOOKS, TRAINING_LOOKS = 5, 30
WINDOWS = (5, 20)  # numbers of steps whose mean training reward is compared with the best such mean before
STREAK = 5  # number of neighbouring steps whose mean makes a lasting state, if it holds in most of them as well
SURE = 3  # the same for a number that has next to no noise
NO_SIGNAL, FAILURES = 0.8, 0.2  # shares of groups and of rollouts above which a lasting state is a finding
COLLAPSED = 0.25  # share of the first steps' entropy that a policy has left which has become sure
STILL = 0.5  # smallest rise of the reward, in standard deviations of the first steps' rewards, that is progress
SOLVED = 0.95  # mean reward, where 1 is the usual largest one, from which nothing is left to learn
# Nats by which a step's updates change a trained token's logprob, of a policy that moves. Four epochs on 64 attempts of
# SmolLM2-135M with an adapter: 0.009 to 0.013 at the learning rate 1e-5, which learned nothing.
MOVES = 0.02
FROZEN = 2  # number of newest steps without any signal after which a run is frozen
NO_ENTROPY = 0.1  # nats per token, of a policy that has next to no second opinion
MAX_POOLS = 3  # number of pools that a finding names
STUCK = 10  # number of neighbouring steps in which neither reward nor entropy moves, of a run that is stuck
STUCK_RISE = 0.2  # like STILL, of a run that is stuck
FLAT = 0.1  # share of the first steps' entropy by which one that does not move may differ
EXPLAINED = ("no_signal", "hardly_moves", "failures")  # findings that say why a run is stuck
SPREAD = 0.5  # share of groups without signal from which the want of spread is to blame


class RunFinding(msgspec.Struct, frozen=True):
    """One thing that went wrong, and its steps.

    Example: RunFinding("evaluation_fell", 24, 24, "the evaluation at step 24 is 0.613, ...", [Reason(...)], "...")
    """

    kind: str
    step: int  # the first step that shows it
    until: int  # the last step that shows it
    text: str
    reasons: list[Reason]
    cure: str  # advice where no reason gives one

    @property
    def cures(self) -> list[str]:
        """Returns what to try, each once."""
        return list(dict.fromkeys([reason.cure for reason in self.reasons] or [self.cure]))

    def __str__(self) -> str:
        beside = "; ".join(reason.text for reason in self.reasons) or "no other number shows why"
        return f"{self.text} ({beside}); try: {'; '.join(self.cures)}"


def find(history: History, *, is_comparable: bool = True) -> list[RunFinding]:
    """Returns all findings of a history, by their first step.

    `is_comparable`: whether training rewards of different steps can be compared. Those of a judge that only compares
    the attempts of a group cannot.
    """
    lasting = list(_lasting(history, is_comparable=is_comparable))
    found = [*_evaluations_fell(history), *lasting, *_parted(history), *_judge_changed(history.updates)]
    if is_comparable:
        found += [*_training_fell(history), *_stuck(history.updates, lasting), *_frozen(history.updates, lasting)]
    return sorted(found, key=lambda finding: finding.step)


# --- evaluations ------------------------------------------------------------------------------------------------------


def _evaluations_fell(history: History) -> Iterator[RunFinding]:
    """Yields a finding for each time that evaluations begin to lie below the best one before them."""
    best: Evaluated | None = None
    fall: RunFinding | None = None
    for num, point in enumerate(history.evaluations):
        if "reward" not in point.metrics:
            continue
        if best is None or point.metrics["reward"] >= best.metrics["reward"]:
            best = point
            yield from [fall] if fall else []
            fall = None
        elif (found := _compare(history, best, point, num)) is None:
            yield from [fall] if fall else []
            fall = None
        else:
            fall = msgspec.structs.replace(fall, until=point.step) if fall else found
    yield from [fall] if fall else []


def _compare(history: History, best: Evaluated, point: Evaluated, num: int) -> RunFinding | None:
    """Returns the finding that `point`, which comes after `num` evaluations, lies below the best of them."""
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
    """Yields a finding for each time that the mean of the last steps begins to lie below the best mean before.

    What a shorter window of steps finds is left out for a longer one.
    """
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
    """Yields (first, last, top): the windows that end at indices first to last lie below the one that ends at top."""
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
    """The standard deviation of a step's reward around its trend, from the differences of neighbours up to `at`.

    The mean of the middle half of the squared differences, over 2 and over what that is for a normal distribution
    (0.536): a collapse, which is a few large differences, does not raise it.
    """
    squares = sorted((values[i + 1] - values[i]) ** 2 for i in range(max(0, at - 100), at))
    cut = len(squares) // 4
    middle = squares[cut : len(squares) - cut]
    return math.sqrt(fmean(middle) / 2 / 0.536)


def _bound(num: int, width: int) -> float:
    """Returns the standard errors by which two windows of `num` steps may differ by chance: Bonferroni over pairs."""
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
    """Returns the cure of a fall; a search for a prompt has no learning rate."""
    is_search = any("num_prompts" in update.metrics for update in history.updates)
    return MORE_GROUPS if is_search else SLOWER


# --- shadow rewards ---------------------------------------------------------------------------------------------------


def _parted(history: History) -> Iterator[RunFinding]:
    for anchor in anchors(history.updates):
        steps = read_beside(history.updates, anchor)
        if (alarm := find_parting(steps)) is not None:
            yield _parting(alarm, describe_parting(anchor, steps, alarm))


def judge_fell(labels: Sequence[OrderedPair]) -> list[RunFinding]:
    """Returns the finding that judge and person part, by the labels of a run's steps."""
    alarm = find_fall(labels)
    return [] if alarm is None else [_parting(alarm, describe_fall(labels, alarm))]


def _parting(alarm: Parting, text: str) -> RunFinding:
    return RunFinding("parted", alarm.onset, alarm.alarm, text, [], MEND_REWARD)


def _judge_changed(updates: Sequence[UpdateNumbers]) -> Iterator[RunFinding]:
    """Yields a finding for each step in which a judge's replies name a model that they did not name before."""
    seen: set[str] = set()
    for update in updates:
        names = {name.removeprefix(JUDGED_BY) for name in update.metrics if name.startswith(JUDGED_BY)}
        if seen and (new := names - seen):
            text = f"the judge's replies name {', '.join(sorted(new))} at step {update.number}"
            before = (
                f"before they named {', '.join(sorted(seen))}, so that rewards before and after differ in their judge"
            )
            yield RunFinding("judge_changed", update.number, update.number, f"{text}; {before}", [], MEASURE_JUDGE)
        seen |= names


# --- lasting states ---------------------------------------------------------------------------------------------------


def _lasting(history: History, *, is_comparable: bool) -> Iterator[RunFinding]:
    updates = history.updates
    for span in _spans(updates, _holds(lambda update: update.get("no_signal_share"), NO_SIGNAL)):
        if not _is_solved(span):
            share = fmean(update.get("no_signal_share") or 0.0 for update in span)
            text = f"{share:.0%} of the groups of steps {_span(span)} had no signal: equal rewards within a group"
            yield RunFinding("no_signal", *_ends(span), text + _reward(span), [], NOTHING_TO_LEARN)
    for span in _spans(updates, _holds(lambda update: update.per_attempt("num_failed"), FAILURES)):
        share = fmean(update.per_attempt("num_failed") or 0.0 for update in span)
        text = f"{share:.0%} of the rollouts of steps {_span(span)} failed{mostly(span)}"
        yield RunFinding("failures", *_ends(span), text, [], MEND_ROLLOUT)
    first = updates[:STREAK]
    for span in _spans(updates, lambda window: _collapsed(first, window)) if is_comparable else ():
        text = (
            f"entropy fell from {_mean(first, 'entropy'):.2g} nats in steps {_span(first)} to "
            f"{_mean(span, 'entropy'):.2g} in steps {_span(span)}, and the reward stood still"
        )
        yield RunFinding("entropy_collapse", *_ends(span), text + _reward(span), [], EXPLORE)
    for span in _spans(updates, lambda window: _rests(first, window, is_comparable=is_comparable), width=SURE):
        text = (
            f"the policy hardly moves in steps {_span(span)}: a step's updates change a trained token's logprob by "
            f"{_mean(span, 'logprob_change'):.2g} nats{_share_clipped(span)}, at learning rate "
            f"{_mean(span, 'learning_rate'):.1g}"
        )
        yield RunFinding("hardly_moves", *_ends(span), text + _reward(span), [], FASTER)


Window = Sequence[UpdateNumbers]


def _share_clipped(window: Window) -> str:
    share = _mean(window, "clip_fraction")  # NaN where an algorithm of one's own has no clip
    return f" and clip {share:.1%} of the tokens" if share == share else ""


def _stuck(updates: Window, others: Sequence[RunFinding]) -> Iterator[RunFinding]:
    """Yields the newest steps if reward and entropy stood still in them, unless another finding tells why."""
    first = updates[:STREAK]
    spans = list(_spans(updates, lambda window: _is_flat(first, window), width=STUCK))
    if not spans or spans[-1][-1] is not updates[-1]:
        return  # it moves, or has moved since
    span = spans[-1]
    begin, end = _ends(span)
    if any(finding.kind in EXPLAINED and finding.step <= end and finding.until >= begin for finding in others):
        return
    share, change = _mean(span, "no_signal_share"), _mean(span, "logprob_change")
    text = f"reward and entropy stood still in steps {_span(span)}{_reward(span)}: "
    if share >= SPREAD:
        text += f"the rewards of {share:.0%} of the groups have no spread"
        yield RunFinding("stuck", begin, end, text, [], NOTHING_TO_LEARN)
    else:
        moved = "" if math.isnan(change) else f" and the updates change a logprob by {change:.2g} nats"
        text += f"{1 - share:.0%} of the groups have spread{moved}, so the reward pays for what no update reaches"
        yield RunFinding("stuck", begin, end, text, [], CHECK_REWARD)


def _frozen(updates: Window, others: Sequence[RunFinding]) -> Iterator[RunFinding]:
    """Yields the newest steps if none of their groups has signal and the entropy is nearly gone, as in a short run."""
    silent = list(takewhile(lambda update: update.get("no_signal_share") == 1.0, reversed(updates)))[::-1]
    entropies = [update.metrics["entropy"] for update in updates if "entropy" in update.metrics]
    if not FROZEN <= len(silent) < len(updates) or not entropies or not _mean(silent, "reward_mean") < SOLVED:
        return
    if entropies[-1] > max(COLLAPSED * entropies[0], NO_ENTROPY):
        return
    begin, end = _ends(silent)
    if any(finding.kind == "entropy_collapse" and finding.until >= begin for finding in others):
        return
    pools = {name: value for name, value in silent[-1].metrics.items() if name.startswith("pool.") and value < SOLVED}
    lowest = ", ".join(f"{name} {pools[name]:.2f}" for name in sorted(pools, key=lambda name: pools[name])[:MAX_POOLS])
    text = (
        f"the policy has one answer left: no group of steps {_span(silent)} had signal, because all its attempts got "
        f"the same reward, and the entropy is {entropies[-1]:.2g} nats{_reward(silent)}"
    )
    yield RunFinding("frozen", begin, end, text + (f"; stuck: {lowest}" if lowest else ""), [], THAW)


def _is_flat(first: Window, window: Window) -> list[bool]:
    last = window[-STREAK:]
    before, now = _mean(first, "entropy"), _mean(last, "entropy")
    return [_stands_still(first, last, rise=STUCK_RISE) and abs(now - before) <= FLAT * before] * len(window)


def _holds(of: Callable[[UpdateNumbers], float | None], bound: float) -> Callable[[Window], list[bool]]:
    """Finds the updates above the bound, in a window whose mean and most of whose updates are above it."""

    def find_in(window: Window) -> list[bool]:
        values = [of(update) or 0.0 for update in window]
        is_high = [value > bound for value in values]
        return is_high if fmean(values) > bound and 2 * sum(is_high) > len(values) else [False] * len(values)

    return find_in


def _collapsed(first: Window, window: Window) -> list[bool]:
    """All updates of a window, if its entropy is a quarter of the first one's without progress of the reward."""
    before, now = _mean(first, "entropy"), _mean(window, "entropy")
    return [before > 0 and now <= COLLAPSED * before and _stands_still(first, window)] * len(window)


def _rests(first: Window, window: Window, *, is_comparable: bool) -> list[bool]:
    """Returns all updates of a window that have signal and a full learning rate, and yet change next to nothing."""
    change, rate = _mean(window, "logprob_change"), _mean(window, "learning_rate")
    rates = [update.metrics["learning_rate"] for update in [*first, *window] if "learning_rate" in update.metrics]
    is_full = bool(rates) and rate >= max(rates) / 2  # neither warmed up nor decayed
    is_excused = _mean(window, "no_signal_share") >= NO_SIGNAL or (is_comparable and not _stands_still(first, window))
    return [change < MOVES and is_full and not is_excused] * len(window)


def _stands_still(first: Window, window: Window, *, rise: float = STILL) -> bool:
    """Whether the reward did not rise since the first window as it does in a run that learns, and is not at its top."""
    spread = _mean(first, "reward_std")
    least = rise * spread if spread > 0 else 0.0
    return not _is_solved(window) and _mean(window, "reward_mean") - _mean(first, "reward_mean") <= least


def _is_solved(window: Window) -> bool:
    return SOLVED <= _mean(window, "reward_mean") <= 1


def _mean(window: Window, name: str) -> float:
    """Returns the mean over the updates that have the number; NaN where none has."""
    values = [update.metrics[name] for update in window if name in update.metrics]
    return fmean(values) if values else math.nan


def _reward(window: Window) -> str:
    mean = _mean(window, "reward_mean")
    return "" if math.isnan(mean) else f", reward {mean:.3f}"


def _spans(updates: Window, find_in: Callable[[Window], list[bool]], *, width: int = STREAK) -> Iterator[Window]:
    """The runs of neighbouring updates of windows in which something is found, from the first one found to the last."""
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


def _span(streak: Sequence[UpdateNumbers]) -> str:
    return f"{streak[0].number} to {streak[-1].number}"


# --- while a run trains -----------------------------------------------------------------------------------------------


LOOKS = 200  # looks at a run of twice as many steps and more, which take time that grows with its length


class RunWatch:
    """Watch over a run while it trains: returns each finding once, when it begins, but none of those in `history`."""

    def __init__(self, history: History, *, is_comparable: bool) -> None:
        self.history, self._is_comparable = history, is_comparable
        self._reported = {_key(finding) for finding in find(history, is_comparable=is_comparable)}

    def add(self, record: UpdateNumbers | Evaluated) -> list[RunFinding]:
        """Returns the findings that begin with this record. A long run is looked at less often than at each step."""
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
