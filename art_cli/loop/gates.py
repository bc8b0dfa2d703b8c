"""Gates: bounds that an evaluation must keep: on means, or on differences from another policy.

    reward>=0.8               the mean
    reward>=baseline-0.02     the paired difference from the first policy
    reward>=runs/a+0.1        the paired difference from the policy of that name

A name that no metric can have is refused before anything is played. A name that no attempt reports is refused after
the first attempts.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from art_cli.loop.evaluate import estimate, paired_difference
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import GateError, UsageError

log = logging.getLogger(__name__)

BASELINE = "baseline"  # the first policy
SPENT = ("seconds", "tokens_in", "tokens_out", "cost_usd")
# Counts of every rollout, whatever it returns
COUNTS = ("num_turns", "num_branches", "num_sampled", "num_cancelled", "num_abandoned", "num_retries")
KNOWN = ("reward", "failed", *SPENT, *COUNTS)
NUM_EARLY = 4  # number of finished attempts after which the names of metrics are checked
CLOSE = 0.8  # difflib ratio from which a name counts as a misspelling: "rewrad" has 0.83, "win" and "won" 0.67

_GATE = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(>=|<=)\s*(.+?)\s*")
_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


class Gate(NamedTuple):
    """A bound that a mean must keep, or a difference of means. Example: Gate("reward", ">=", -0.02, "runs/a")"""

    metric: str
    operator: str
    bound: float
    baseline: str | None = None  # policy that the difference is taken from, or None if the bound is on the mean

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.operator == ">=" else value <= self.bound

    def check(self, value: float, *, of: str = "") -> None:
        """Raises GateError: the value misses the bound. `of` names the policy or file that has the value."""
        if not self.holds(value):
            name = f"{of}: {self.metric}" if of else self.metric
            raise GateError(f"gate missed: {name} is {value:.4f}, not {self.operator} {self.bound:g}")


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


def check_gates(gates: Sequence[Gate], last: str) -> None:
    """Raises UsageError: a gate cannot hold, as far as is known before playing; `last` is the policy it is for."""
    for gate in gates:
        if gate.baseline == last:
            raise UsageError(
                f"--gate {gate.metric}: {last} is compared with itself; name the policy to compare with before it, "
                f"for example --checkpoint base"
            )
        if gate.metric not in KNOWN and (near := get_close_matches(gate.metric, KNOWN, 1, CLOSE)):
            raise UsageError(f"--gate: no metric {gate.metric!r}; did you mean {near[0]!r}?")


class NameWatch:
    """Checks the first finished attempts for the metrics that the gates name."""

    def __init__(self, gates: Sequence[Gate]) -> None:
        self._wanted = sorted({gate.metric for gate in gates} - set(KNOWN))
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
        for name in self._wanted:
            if name not in self._seen:
                there = ", ".join(sorted(self._seen | {"reward", "failed", *SPENT}))
                if near := get_close_matches(name, sorted(self._seen), 1, CLOSE):
                    raise UsageError(f"--gate: no attempt reports {name!r}; did you mean {near[0]!r}?")
                log.warning("--gate: none of the first %d attempts reports %r; there are %s", self._num, name, there)


def check_policy(gate: Gate, results: Mapping[str, Mapping[str, Mapping[str, float]]], policy: str) -> None:
    """Checks the gate for a policy; `results` is policy -> metric -> scenario id -> value.

    Raises GateError: the policy misses the gate; UsageError: there is no such metric.
    """
    for name in (policy, gate.baseline or policy):
        if gate.metric not in results[name]:
            there = ", ".join(sorted(results[name]))
            raise UsageError(f"--gate: no metric {gate.metric!r} of {name}; there are {there}")
    ours = results[policy][gate.metric]
    if gate.baseline is None:
        gate.check(estimate(list(ours.values())).mean, of=policy)
        return
    difference = paired_difference(ours, results[gate.baseline][gate.metric])
    if difference is None:
        raise GateError(f"gate missed: {policy} and {gate.baseline} share no scenario with {gate.metric}")
    if not gate.holds(difference.mean):
        raise GateError(
            f"gate missed: {policy}: {gate.metric} differs from {gate.baseline} by {difference.mean:+.4f} "
            f"[{difference.low:+.4f}, {difference.high:+.4f}], not {gate.operator} {gate.bound:+g}"
        )
