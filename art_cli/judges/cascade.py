"""CascadeJudge: a cheap judge scores every group, and an expensive judge replaces its scores in some of them.

The expensive judge is asked in two cases:

    unsure   The group's doubt is among the largest share `unsure` of the doubts seen so far, and fewer than this share
             of the groups so far were asked for doubt. So later groups are never needed, and a policy whose groups
             all become doubtful does not raise the cost. After a restart, both start again.
    audit    A hash of the group's id draws it. The lot is independent of the doubt, so the pairs of these groups
             measure the agreement of both judges.

A group's doubt is the mean of sigmoid(-|difference|) over its pairs: the expected share of pairs in the wrong order if
scores are log-odds, as those of `art reward` are (Bradley and Terry 1952). With `first.activation: sigmoid` and an
expensive judge that does not rank, a score v is the expected reward, and the doubt is the mean of v (1 - v): no reward
in [0, 1] with this mean has a larger variance (Bhatia and Davis 2000). So groups that are surely all right or all wrong
are not asked about.

All rewards of a group come from one judge. Only in this second case are both judges' rewards on one scale, and compare
across groups.
"""

import math
from bisect import bisect_right, insort
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from art_cli.config.checks import ranks
from art_cli.config.schema import CascadeJudgeConfig, RunConfig
from art_cli.judges import Judge, Verdict, make_key
from art_cli.judges.agreement import Ratio, pairwise
from art_cli.judges.blend import SeveralJudges, make_each
from art_cli.judges.costs import CostEstimate
from art_cli.judges.shadow_judges import is_chosen, named_score
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory

FIRST = "cascade.first"  # name of the cheap judge's score, which every trajectory has
THEN = "cascade.then"  # name of the expensive judge's score if the judge gives none
MIN_PAIRS = 200  # newest audited pairs over which the agreement is measured: plus or minus 6 points at 0.8
MIN_AGREEMENT = 0.8  # share of pairs in the same order below which the cheap judge has drifted


class CascadeJudge(SeveralJudges):
    title = "cascade"

    def __init__(
        self, config: CascadeJudgeConfig, directory: Path, *, job: str = "", judges: Mapping[str, Judge] | None = None
    ) -> None:
        super().__init__(judges or make_each(config, directory, job))
        self.config, self.compares = config, ranks(config)
        self._doubts = list[float]()  # of all groups with pairs, ascending
        self._num_unsure = 0  # groups asked for doubt

    @property
    def settings(self) -> str:
        parts = {name: judge.settings for name, judge in self.judges.items()}
        return make_key(cascade=parts, unsure=self.config.unsure, audit=self.config.audit)[:12]

    async def judge(self, group: Sequence[Trajectory]) -> Mapping[str, Verdict]:
        """Returns the expensive judge's rewards if it was asked, otherwise the cheap judge's. Raises either's error."""
        first = await self.judges["first"].judge(group)
        firsts = {id: named_score(FIRST, verdict) for id, verdict in first.items()}
        if not self._is_unsure([first[each.id].reward for each in group]) and not is_audit(group, self.config):
            return {id: Verdict(reward=each.reward, scores=[firsts[id]]) for id, each in first.items()}
        then = await self.judges["then"].judge(group)
        scores = {id: each.scores or [named_score(THEN, each)] for id, each in then.items()}
        return {id: Verdict(reward=each.reward, scores=[firsts[id], *scores[id]]) for id, each in then.items()}

    def _is_unsure(self, rewards: Sequence[float]) -> bool:
        doubt = pair_doubt(rewards) if self.compares else value_doubt(rewards)
        if doubt is None:
            return False
        insort(self._doubts, doubt)
        allowed = math.floor(self.config.unsure * len(self._doubts))
        if self._num_unsure >= allowed or len(self._doubts) - bisect_right(self._doubts, doubt) >= allowed:
            return False
        self._num_unsure += 1
        return True

    def estimate(self, group: Sequence[Trajectory]) -> CostEstimate | None:
        """Returns the expensive judge's cost for a share `unsure` + `audit` of groups, drawn by lot; 0 for others."""
        share = self.config.unsure + self.config.audit
        expected = self.judges["then"].estimate(group)
        return expected if expected is None or not group or is_chosen("estimate", group[0], share) else CostEstimate()


def value_doubt(rewards: Sequence[float]) -> float | None:
    """Returns the mean over expected rewards v in [0, 1] of v (1 - v), at most 0.25; None without attempts."""
    return fmean(value * (1 - value) for value in rewards) if rewards else None


def pair_doubt(rewards: Sequence[float]) -> float | None:
    """Returns the expected share of pairs in the wrong order, at most 0.5; None without pairs."""
    doubts = [1 / (1 + math.exp(min(abs(one - other), 700.0))) for one, other in combinations(rewards, 2)]
    return fmean(doubts) if doubts else None


def is_audit(group: Sequence[Trajectory], config: CascadeJudgeConfig) -> bool:
    """Returns whether the lot draws this group. Stable across restarts."""
    return len(group) > 1 and is_chosen("cascade", group[0], config.audit)


def recent_agreement(newest_last: Sequence[Ratio]) -> float | None:
    """Returns the share of pairs in the same order over the newest MIN_PAIRS pairs or more; None for fewer pairs."""
    agreed = compared = 0.0
    for ratio in reversed(newest_last):
        agreed, compared = agreed + ratio.numerator, compared + ratio.denominator
        if compared >= MIN_PAIRS:
            return agreed / compared
    return None


def cascade_numbers(groups: Sequence[Sequence[ScoredTrajectory]], config: RunConfig) -> dict[str, float]:
    """Returns `cascade_asked`, the share of groups that the expensive judge scored, and of the audited groups
    `cascade_pairs`, the pairs that it orders, and `cascade_agreement`, their share in the cheap judge's order.
    """
    judges = {name: part.judge for name, part in config.by_source.items()}
    num_groups, num_asked, audited = 0, 0, Ratio(0.0, 0.0)
    for members in groups:
        found = [each for each in members if each.reward is not None and each.scores and each.scores[0].judge == FIRST]
        num_groups += bool(found)
        if not found or len(found[0].scores) == 1:
            continue
        num_asked += 1
        judge = judges.get(found[0].source or "")
        if isinstance(judge, CascadeJudgeConfig) and is_audit(found, judge):
            agreed = pairwise([each.scores[0].score for each in found], [each.reward or 0.0 for each in found])
            audited = Ratio(audited.numerator + agreed.numerator, audited.denominator + agreed.denominator)
    numbers = {"cascade_asked": num_asked / num_groups} if num_groups else {}
    if audited.denominator:
        numbers |= {"cascade_pairs": audited.denominator, "cascade_agreement": audited.numerator / audited.denominator}
    return numbers
