"""Extra rounds of votes for a group whose attempts the first votes cannot tell apart (`judge.noise.ask_again`).

    judge.judge -> reliability at or below the bound? -> judge.judge_again(2 rounds) -> ... -> distinct, or left out

The votes of all rounds count together. The votes alone decide whether to ask again, so a judge that caches its votes
repeats no call after a kill. Looking several times finds a difference by chance slightly more often than a single look
at all votes. The reliability is not corrected for this.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from art_cli.judges import Judge, Verdict
from art_cli.judges.reliability import share_of_scores
from art_cli.runs.trajectory import EQUAL_REWARDS, AskedAgain, Trajectory
from art_cli.runtime.errors import JudgeError, JudgeStopped, printable

log = logging.getLogger(__name__)


class AllVotes(NamedTuple):
    """A group's verdicts from all rounds, and the extra rounds' cost per trajectory."""

    verdicts: Mapping[str, Verdict]
    extra: AskedAgain | None  # None without extra rounds


async def ask_extra_rounds(judge: Judge, group: Sequence[Trajectory], verdicts: Mapping[str, Verdict]) -> AllVotes:
    """Asks for extra rounds until the votes tell the attempts apart or the configured number is used up.

    `verdicts` are from the first round. A failed extra round is the last, and the earlier votes count. Raises
    JudgeStopped.
    """
    if judge.noise is None or not judge.noise.ask_again:
        return AllVotes(verdicts, None)
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
    return AllVotes(verdicts, _extra_share(first, verdicts, rounds) if rounds else None)


def is_hidden(verdicts: Mapping[str, Verdict], min_reliability: float) -> bool:
    """Returns whether the noise of the votes hides the differences between the attempts; False without variances.

    Votes that agree on equal rewards are not noisy, because another round would give the same votes.
    """
    known = [verdict.variance for verdict in verdicts.values() if verdict.variance is not None]
    if not known or len(known) < len(verdicts):
        return False
    variance = math.fsum(known) / len(known)
    if not EQUAL_REWARDS**2 < variance < math.inf:
        return False
    return share_of_scores([verdict.reward for verdict in verdicts.values()], variance) <= min_reliability


def _extra_share(first: Mapping[str, Verdict], last: Mapping[str, Verdict], rounds: int) -> AskedAgain:
    """Splits the tokens and the cost of the extra rounds equally between the trajectories."""
    tokens = _tokens(last.values()) - _tokens(first.values())
    costs = _cost(first.values()), _cost(last.values())
    cost = None if costs[0] is None or costs[1] is None else max(costs[1] - costs[0], 0.0) / len(last)
    return AskedAgain(rounds=rounds, tokens=max(tokens, 0.0) / len(last), cost_usd=cost)


def _tokens(verdicts: Iterable[Verdict]) -> float:
    scores = [score for verdict in verdicts for score in verdict.scores]
    return math.fsum((score.prompt_tokens or 0.0) + (score.completion_tokens or 0.0) for score in scores)


def _cost(verdicts: Iterable[Verdict]) -> float | None:
    """Returns dollars; None when a cost is unknown although tokens are known."""
    scores = [score for verdict in verdicts for score in verdict.scores if score.prompt_tokens is not None]
    costs = [score.cost_usd for score in scores]
    return None if any(cost is None for cost in costs) else math.fsum(cost for cost in costs if cost is not None)
