"""Doubts: reasons why a reward cannot be learned as it is, with cures. Pure functions of a step's scored groups.

Each bound limits an effect size; random effects also need a small p-value in a permutation test within groups.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from art_cli.chat.requests import text_of
from art_cli.judges.agreement import Measure, VoteReliability, slope
from art_cli.reports.findings import FAILURES, LIMITS, MEND_ROLLOUT, NO_SIGNAL, NOTHING_TO_LEARN, SOLVED
from art_cli.runs.history import count_failures
from art_cli.runs.promise import Doubt
from art_cli.runs.trajectory import EQUAL_REWARDS, Json, ScoredTrajectory, has_signal

HOPELESS = 1 - SOLVED  # mean reward up to which nothing is solved, if 0 is the usual minimum
LIMITED = 0.2  # share of attempts stopped by a limit, above which the limit's cost is tested
COSTS = -0.3  # rank correlation between limit and reward, below which the limit costs reward
EXPLAINED = 0.8  # rank correlation with length, above which length alone explains the reward
POSITION = 0.5  # rank correlation with the attempt's number, which should not influence a fair judge
BIAS = 0.2  # score advantage of the leading prompt position over the last position
P, SHUFFLES = 0.01, 999
REPEATS = 0.3  # share of a score's variance that must repeat in a second judgment
PAIRS = 5  # minimum number of cases for a finding

Group = Sequence[ScoredTrajectory]
Groups = Sequence[Group]
CURES = {
    "failures": MEND_ROLLOUT,
    "temperature": "rollout.sampling.temperature=1 with rollout.sampling.force=true",
    "limit": LIMITS,
    "too_hard": "easier scenarios (rollout.choose=adaptive), or a warm start: art sft CONFIG RUN --best-of, or `sft`",
    "too_easy": "harder scenarios, or rollout.choose=adaptive, which leaves out what is solved",
    "constant": NOTHING_TO_LEARN,
    "noise": "a reward without chance in it; for a language model judge.votes=4 and judge.noise",
    "length": "a reward that does not count words; for a language model, a rubric that ignores length",
    "leak": "the answer taken out of the prompt; where the task is to quote, there is nothing to mend",
    "position": "a judge that shows the attempts in a random order (judge=ruler), with judge.votes=2 or more",
    "twice": "each scenario once; rollout.shuffle plays all of them equally often anyway",
}
Found = Iterator[tuple[str, str]]  # (kind, text)


def find_doubts(
    groups: Groups,
    scenarios: Sequence[Json] = (),
    *,
    repeats: VoteReliability | None = None,
    bias: Measure | None = None,
) -> list[Doubt]:
    """Returns the doubts about these groups. `repeats`: the judge's repeatability; `bias`: its order bias, if known."""
    rewarded = [[each for each in members if each.reward is not None] for members in groups]
    found = [*_sampling(groups), *_limit(rewarded)]
    found = found or [*_spread(rewarded)]  # the doubts above explain these
    found += [*_noise(rewarded, repeats), *_length(rewarded), *_leak(rewarded), *_position(rewarded, bias)]
    return [Doubt(kind, text, CURES[kind]) for kind, text in [*found, *_twice(scenarios)]]


def _sampling(groups: Groups) -> Found:
    failures = count_failures(each for members in groups for each in members)
    if failures.num > FAILURES * failures.num_played:
        yield "failures", str(failures)
    attempts = [each for members in groups for each in members if len(members) > 1 and each.turns]
    cold = sum(all(turn.temperature == 0 for turn in each.turns) for each in attempts)
    if attempts and 2 * cold > len(attempts):
        text = f"{cold} of {len(attempts)} attempts were sampled at temperature 0, so attempts of a group are equal"
        yield "temperature", text


def limit_of(attempt: ScoredTrajectory) -> str:
    """Returns the key of the limit that stopped an attempt or cut off a reply, or ""."""
    if attempt.limit is not None:
        return "rollout.max_turns" if attempt.limit == "turn_limit" else "model.max_length"
    is_cut = any(turn.finish_reason == "length" for turn in attempt.turns)
    return "rollout.sampling.max_tokens" if is_cut else ""


def _limit(groups: Groups) -> Found:
    """Finds a limit that lowers rewards, or a limit hit by nearly all attempts without any reward."""
    limits = Counter(limit_of(each) for members in groups for each in members)
    free = limits.pop("", 0)
    num, values = free + limits.total(), [_reward(each) for members in groups for each in members]
    if not limits or limits.total() < LIMITED * num:
        return
    text = f"{limits.total()} of {num} attempts met a limit, mostly {limits.most_common(1)[0][0]}"
    if free < LIMITED * num:
        if not has_signal(values) and fmean(values) <= HOPELESS:
            yield "limit", f"{text}, and no attempt got a reward"
        return
    found = correlate([[(float(bool(limit_of(e))), _reward(e)) for e in members] for members in compared(groups)])
    if found is not None and found.value <= COSTS and found.p <= P:
        yield "limit", f"{text}, and they got less than the others ({found})"


def compared(groups: Groups) -> Groups:
    """Returns the attempts to compare: by group, or all together if every group is a single attempt."""
    is_single = all(len(members) < 2 for members in groups)
    return [[each for members in groups for each in members]] if is_single else [each for each in groups if each]


def spread_share(groups: Groups) -> float:
    """Returns the share of groups with different rewards; 0 without rewards."""
    values = [[_reward(each) for each in members if each.reward is not None] for members in compared(groups)]
    return fmean(map(has_signal, values)) if values else 0.0


def _spread(groups: Groups) -> Found:
    values = [_reward(each) for members in groups for each in members]
    share = spread_share(groups)
    if not values or share >= 1 - NO_SIGNAL:
        return
    kind = "too_easy" if SOLVED <= fmean(values) <= 1 else "too_hard" if fmean(values) <= HOPELESS else "constant"
    yield kind, f"the rewards differ within {share:.0%} of the groups, mean reward {fmean(values):.3f}"


def _reward(attempt: ScoredTrajectory) -> float:
    return attempt.reward or 0.0


# --- correlations of the rewards --------------------------------------------------------------------------------------


class Correlation(NamedTuple):
    """A rank correlation within groups, with a permutation test's p-value. Example: Correlation(0.92, 0.001)"""

    value: float
    p: float

    def __str__(self) -> str:
        return f"rank correlation {self.value:.2f}, p = {self.p:.3f}"


def correlate(groups: Sequence[Sequence[tuple[float, float]]]) -> Correlation | None:
    """Returns Spearman's correlation of (x, y) pairs, ranked within groups and pooled; None without variation.

    The null distribution is estimated from 999 random orders of x within groups.
    """
    ranked = [[_ranks(side) for side in zip(*members, strict=True)] for members in groups if len(members) > 1]
    spread_x, spread_y = (sum(slope(each[at], each[at]).denominator for each in ranked) for at in (0, 1))
    if not spread_x or not spread_y:
        return None
    draw = random.Random(0)
    seen = sum(slope(xs, ys).numerator for xs, ys in ranked)
    by_chance = [sum(slope(draw.sample(xs, len(xs)), ys).numerator for xs, ys in ranked) for _ in range(SHUFFLES)]
    extreme = sum(abs(each) >= abs(seen) - EQUAL_REWARDS for each in by_chance)
    return Correlation(seen / (spread_x * spread_y) ** 0.5, (extreme + 1) / (SHUFFLES + 1))


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value; ties get their mean rank."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def by_length(groups: Groups) -> Correlation | None:
    """Returns the correlation between attempts' sampled tokens and rewards."""
    known = [[each for each in members if each.reward is not None] for members in groups]
    return correlate([[(float(each.num_sampled), _reward(each)) for each in members] for members in known])


def _length(groups: Groups) -> Found:
    found = by_length(groups)
    if found is not None and abs(found.value) >= EXPLAINED and found.p <= P:
        yield "length", f"the {'longer' if found.value > 0 else 'shorter'} attempt gets the higher reward ({found})"


def _position(groups: Groups, bias: Measure | None) -> Found:
    if bias is not None and abs(bias.value) >= BIAS and bias.stands_out:
        text = f"the first place in the judge's prompt adds {bias.value:+.2f} over the last"
        yield "position", f"{text} [{bias.low:+.2f}, {bias.high:+.2f}]"
        return
    found = correlate([[(float(each.index), _reward(each)) for each in members] for members in groups])
    if found is not None and abs(found.value) >= POSITION and found.p <= P:
        yield "position", f"the reward follows the attempt's number in its group, which is chance ({found})"


def _leak(groups: Groups) -> Found:
    """Finds rewards given to nearly all replies copied from the prompt and to hardly any other reply."""
    known = [(_is_copy(each), _reward(each)) for members in groups for each in members]
    top, low = max((value for _, value in known), default=0.0), min((value for _, value in known), default=0.0)
    if top - low <= EQUAL_REWARDS:
        return
    copies, others = ([(value - low) / (top - low) for each, value in known if each == is_copy]
                      for is_copy in (True, False))  # fmt: skip
    if len(copies) >= PAIRS and fmean(copies) >= SOLVED and fmean(others or [0.0]) <= HOPELESS:
        yield "leak", f"the {len(copies)} replies copied word for word from their prompt get the reward, no others"


def _is_copy(attempt: ScoredTrajectory) -> bool:
    texts = [(each.get("role") == "assistant", text_of(each.get("content")).strip()) for each in attempt.messages]
    said = [text for is_reply, text in texts if is_reply]
    return bool(said and said[-1]) and any(said[-1] in text for is_reply, text in texts if not is_reply)


def _noise(groups: Groups, repeats: VoteReliability | None) -> Found:
    if repeats is not None and repeats.one_vote.value < REPEATS:
        share = max(repeats.one_vote.value, 0.0)
        yield "noise", f"asked again, the judge repeats {share:.0%} of the differences between attempts of a group"
        return
    same: dict[str, list[float]] = defaultdict(list)
    for each in (each for members in groups for each in members):
        same[json.dumps([each.scenario, each.messages, each.branches], sort_keys=True)].append(_reward(each))
    pairs = [abs(a - b) > EQUAL_REWARDS for values in same.values() for a, b in zip(values, values[1:], strict=False)]
    if sum(pairs) >= max(PAIRS, len(pairs) / 4):
        yield "noise", f"{sum(pairs)} of {len(pairs)} pairs of equal attempts got different rewards"


def _twice(scenarios: Sequence[Json]) -> Found:
    """Finds scenarios with equal content. If most are equal, the id itself is the content, for example a seed."""
    by_content: dict[str, list[str]] = defaultdict(list)
    for each in scenarios:
        content = {key: value for key, value in each.items() if key != "id"}
        by_content[json.dumps(content, sort_keys=True, default=str)].append(str(each.get("id")))
    alike = [ids for ids in by_content.values() if len(ids) > 1]
    if alike and 2 * sum(map(len, alike)) <= len(scenarios):
        num = sum(map(len, alike)) - len(alike)
        yield "twice", f"{num} of {len(scenarios)} scenarios repeat another one, such as {alike[0][1]} {alike[0][0]}"
