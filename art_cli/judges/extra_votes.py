"""Further rounds of votes on a group whose attempts its votes cannot tell apart (`judge.noise.ask_again`).

    judge.judge -> reliability not above the bound? -> judge.judge_again(2 rounds) -> ... -> distinct, or left out

The votes of all rounds count together. What is asked follows from the votes alone, so that a judge which keeps its
votes is asked for none of them twice after a kill. Looking several times finds a difference by chance a little more
often than one look at as many votes would: the reliability is not corrected for that.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from art_cli.judges import Judge, Verdict
from art_cli.runs.reliability import share_of_scores
from art_cli.runs.trajectory import EQUAL_REWARDS, AskedAgain, Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped, printable

log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A group's verdicts by all its rounds. `again` is each trajectory's share of the further ones, if there are
    any."""

    verdicts: Mapping[str, Verdict]
    again: AskedAgain | None


async def ask_again(judge: Judge, group: Sequence[Trajectory], verdicts: Mapping[str, Verdict]) -> Asked:
    """Returns the verdicts after as many further rounds as it takes to tell the attempts apart, or as are allowed.

    A round without a usable answer is the last one, and the votes before it count. Raises JudgeStopped.
    """
    if judge.noise is None or not judge.noise.ask_again:
        return Asked(verdicts, None)
    first, rounds = verdicts, 0
    while rounds < judge.noise.ask_again and is_hidden(verdicts, judge.noise.min_reliability):
        try:
            verdicts = await judge.judge_again(group, rounds + 2)
        except JudgeStopped:
            raise
        except JudgeError as error:
            log.warning("%s: a further round of votes failed: %s", printable(group[0].group_id), printable(str(error)))
            break
        rounds += 1
    return Asked(verdicts, _took(first, verdicts, rounds) if rounds else None)


def is_hidden(verdicts: Mapping[str, Verdict], min_reliability: float) -> bool:
    """Returns whether the votes' differences hide those of the attempts; False without variances.

    Votes that agree on equal rewards are no noise: another round would say the same.
    """
    known = [verdict.variance for verdict in verdicts.values() if verdict.variance is not None]
    if not known or len(known) < len(verdicts):
        return False
    variance = math.fsum(known) / len(known)
    if not EQUAL_REWARDS**2 < variance < math.inf:
        return False
    return share_of_scores([verdict.reward for verdict in verdicts.values()], variance) <= min_reliability


def _took(first: Mapping[str, Verdict], last: Mapping[str, Verdict], rounds: int) -> AskedAgain:
    """Returns what the rounds after the first took by the scores' numbers, in equal shares."""
    tokens = _tokens(last.values()) - _tokens(first.values())
    costs = _cost(first.values()), _cost(last.values())
    cost = None if costs[0] is None or costs[1] is None else max(costs[1] - costs[0], 0.0) / len(last)
    return AskedAgain(rounds=rounds, tokens=max(tokens, 0.0) / len(last), cost_usd=cost)


def _tokens(verdicts: Iterable[Verdict]) -> float:
    scores = [score for verdict in verdicts for score in verdict.scores]
    return math.fsum((score.prompt_tokens or 0.0) + (score.completion_tokens or 0.0) for score in scores)


def _cost(verdicts: Iterable[Verdict]) -> float | None:
    """Returns dollars, or None if a score that took tokens has no known cost."""
    scores = [score for verdict in verdicts for score in verdict.scores if score.prompt_tokens is not None]
    costs = [score.cost_usd for score in scores]
    return None if any(cost is None for cost in costs) else math.fsum(cost for cost in costs if cost is not None)
