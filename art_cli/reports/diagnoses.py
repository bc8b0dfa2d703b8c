"""Changes in a run beside a fall of its reward: entropy, signal, gap, clipping, length, failures, gradient.

Each reason is a number that changed between the best policy and the policy that fell, with what to try. The cures of
all findings stand here.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from art_cli.runs.history import UpdateNumbers

NEAR = 2  # number of updates whose means stand for a policy; more would hide how fast a collapse goes

SLOWER = "a smaller train.learning_rate, or more groups (rollout.groups_per_step) for a less noisy step"
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
LIMITS = "rollout.max_turns, rollout.sampling.max_tokens and model.max_length, or a lower rollout.limit_reward"
CURES = (
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
    if means is None or means[2] < 0.5:
        return None
    text = f"{means[2]:.0%} of the groups without signal, {min(means[:2]):.0%} before"
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
