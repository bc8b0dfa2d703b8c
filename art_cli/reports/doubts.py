"""Doubts: why the reward of a first step cannot be learned as it is, each with a cure. Pure: scored groups in.

failures        attempts fail
temperature     the attempts of a group are sampled without chance, so that they are all the same
limit           a limit ends attempts, and costs them their reward
too_hard        next to no attempt gets a reward
too_easy        next to all attempts get it
constant        the attempts of a group get equal rewards between the two
noise           another verdict on the same attempt, or the same attempt once more, is another reward
length          the order of the rewards is that of the lengths
leak            the rewarded replies stand in the prompt, and no others are rewarded
position        the reward follows the attempt's position in its group, which says nothing of the attempt
twice           a scenario is in the set more than once

Each bound is on the size of an effect and, where chance makes one, on its p-value in a permutation test within groups.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from art_cli.judges.agreement import Measure, VoteReliability, slope
from art_cli.reports.findings import FAILURES, LIMITS, MEND_ROLLOUT, NO_SIGNAL, NOTHING_TO_LEARN, SOLVED
from art_cli.runs.history import count_failures
from art_cli.runs.promise import Doubt
from art_cli.runs.trajectory import EQUAL_REWARDS, Json, ScoredTrajectory, has_signal
from art_cli.chat.requests import text_of

HOPELESS = 1 - SOLVED  # mean reward up to which nothing is solved, where 0 is the usual lowest one
LIMITED = 0.2  # share of attempts that a limit ends, from which it is asked what the limit costs
EXPLAINED = 0.8  # rank correlation within groups from which a number alone explains the reward
COSTS = 0.3  # the same for a limit, which only some attempts meet
POSITION = 0.5  # the same for positions, of which a fair judge's scores are independent
BIAS = 0.2  # score that the first place in a judge's prompt adds over the last, at least
P, SHUFFLES = 0.01, 999
REPEATS = 0.3  # share of a score's variance that must repeat when the judge is asked again
COPIES = 5  # fewest rewarded copies of the prompt that are no chance

Groups = Sequence[Sequence[ScoredTrajectory]]

EASIER = "easier scenarios (rollout.choose=adaptive), or a warm start: art sft CONFIG RUN --best-of, or `sft` on demos"
HARDER = "harder scenarios, or rollout.choose=adaptive, which leaves out what is solved"
CHANCE = "rollout.sampling.temperature=1 with rollout.sampling.force=true"
STEADY = "a reward without chance in it, judge.votes=4 for a language model, or more groups of the same scenario"
NOT_LENGTH = "a reward that is no count of words; for a language model a rubric that length does not matter"
NO_ANSWER = "the answer taken out of the prompt; if the task is to quote, there is nothing to mend"
SHUFFLED = "a judge that shows the attempts in a random order to each vote (judge=ruler), and judge.votes=2 or more"
ONCE = "each scenario once; rollout.shuffle plays all of them equally often anyway"


def find_doubts(
    groups: Groups,
    scenarios: Sequence[Json] = (),
    *,
    repeats: VoteReliability | None = None,
    bias: Measure | None = None,
) -> list[Doubt]:
    """Returns what stands against learning from such groups. `scenarios` are all of the training.

    `repeats` is how far the judge repeats itself, and `bias` its order bias, or None if they are not known.
    """
    causes = [*_failures(groups), *_temperature(groups), *_limit(groups)]
    found = causes or [*_spread(groups)]
    return [*found, *_noise(groups, repeats), *_length(groups), *_leak(groups), *_position(groups, bias),
            *_twice(scenarios)]  # fmt: skip


def rewards(groups: Groups) -> list[list[float]]:
    return [[each.reward for each in members if each.reward is not None] for members in groups]


def compared(groups: Groups) -> list[list[float]]:
    """Returns the rewards that are compared with each other: a group's, or all of them if each group is one attempt."""
    values = [each for each in rewards(groups) if each]
    return [[value for each in values for value in each]] if all(len(each) == 1 for each in values) else values


# --- what is sampled --------------------------------------------------------------------------------------------------


def _failures(groups: Groups) -> Iterator[Doubt]:
    failures = count_failures(each for members in groups for each in members)
    if failures.num > FAILURES * failures.num_played:
        yield Doubt("failures", str(failures), MEND_ROLLOUT)


def _temperature(groups: Groups) -> Iterator[Doubt]:
    attempts = [each for members in groups for each in members if len(members) > 1 and each.turns]
    cold = sum(all(turn.temperature == 0 for turn in each.turns) for each in attempts)
    if attempts and 2 * cold > len(attempts):
        text = f"{cold} of {len(attempts)} attempts were sampled at temperature 0, so that those of a group are equal"
        yield Doubt("temperature", text, CHANCE)


def limit_of(attempt: ScoredTrajectory) -> str:
    """Returns the key of the limit that ended an attempt or cut off one of its replies, or ""."""
    if attempt.limit is not None:
        return "rollout.max_turns" if attempt.limit == "turn_limit" else "model.max_length"
    is_cut = any(turn.finish_reason == "length" for turn in attempt.turns)
    return "rollout.sampling.max_tokens" if is_cut else ""


def _limit(groups: Groups) -> Iterator[Doubt]:
    """Yields a doubt if those that a limit ended get less than the others, or if it ended nearly all and none got
    anything."""
    attempts = [each for members in groups for each in members if each.reward is not None]
    limits = Counter(limit_of(each) for each in attempts)
    num, free = len(attempts), limits.pop("", 0)
    if not limits or num - free < LIMITED * num:
        return
    [(key, _)] = limits.most_common(1)
    text = f"{num - free} of {num} attempts met a limit, mostly {key}"
    values = [each.reward or 0.0 for each in attempts]
    if free < LIMITED * num:
        if not has_signal(values) and fmean(values) <= HOPELESS:
            yield Doubt("limit", f"{text}, and no attempt got a reward", f"a larger {key}; {LIMITS}")
        return
    pairs = [[(float(bool(limit_of(each))), each.reward or 0.0) for each in members if each.reward is not None]
             for members in _as_compared(groups)]  # fmt: skip
    found = correlate(pairs)
    if found is not None and found.value <= -COSTS and found.p <= P:
        text += f", and they got less than the others (rank correlation {found.value:.2f}, p = {found.p:.3f})"
        yield Doubt("limit", text, f"a larger {key}; {LIMITS}")


def _as_compared(groups: Groups) -> Groups:
    is_single = all(len(members) == 1 for members in groups)
    return [[each for members in groups for each in members]] if is_single else groups


# --- whether rewards differ -------------------------------------------------------------------------------------------


def spread_share(groups: Groups) -> float:
    """Returns the share of the groups whose rewards differ; 0 without rewards."""
    values = compared(groups)
    return fmean(has_signal(each) for each in values) if values else 0.0


def _spread(groups: Groups) -> Iterator[Doubt]:
    values = compared(groups)
    if not values or (share := spread_share(groups)) >= 1 - NO_SIGNAL:
        return
    mean = fmean(value for each in values for value in each)
    text = f"the rewards differ within {share:.0%} of {len(values)} groups, mean reward {mean:.3f}"
    if SOLVED <= mean <= 1:
        yield Doubt("too_easy", text, HARDER)
    elif mean <= HOPELESS:
        yield Doubt("too_hard", text, EASIER)
    else:
        yield Doubt("constant", text, NOTHING_TO_LEARN)


# --- what the rewards follow ------------------------------------------------------------------------------------------


class Correlation(NamedTuple):
    """A rank correlation within groups, with the p-value of a permutation test. Example: Correlation(0.92, 0.001)"""

    value: float
    p: float


def correlate(groups: Sequence[Sequence[tuple[float, float]]]) -> Correlation | None:
    """Returns Spearman's correlation of (x, y) pairs, ranked within each group and pooled; None if nothing varies.

    Under the null hypothesis all orders of the x of a group are alike; 999 of them are drawn.
    """
    ranked = [([*zip(*members, strict=True)]) for members in groups if len(members) > 1]
    pairs = [(_ranks(xs), _ranks(ys)) for xs, ys in ranked]
    spread_x, spread_y = (sum(slope(each[side], each[side]).denominator for each in pairs) for side in (0, 1))
    if not spread_x or not spread_y:
        return None

    def covary(xs_by_group: Sequence[Sequence[float]]) -> float:
        return sum(slope(xs, ys).numerator for xs, (_, ys) in zip(xs_by_group, pairs, strict=True))

    draw, seen = random.Random(0), covary([xs for xs, _ in pairs])
    shuffled = [covary([draw.sample(xs, len(xs)) for xs, _ in pairs]) for _ in range(SHUFFLES)]
    extreme = sum(abs(each) >= abs(seen) - EQUAL_REWARDS for each in shuffled)
    return Correlation(seen / (spread_x * spread_y) ** 0.5, (extreme + 1) / (SHUFFLES + 1))


def _ranks(values: Sequence[float]) -> list[float]:
    """Returns the rank of each value; equal values have the mean of their ranks."""
    ordered = sorted(values)
    return [(2 * ordered.index(value) + ordered.count(value) - 1) / 2 for value in values]


def by_length(groups: Groups) -> Correlation | None:
    pairs = [[(float(each.num_sampled), each.reward) for each in members if each.reward is not None]
             for members in groups]  # fmt: skip
    return correlate(pairs)


def _length(groups: Groups) -> Iterator[Doubt]:
    found = by_length(groups)
    if found is not None and abs(found.value) >= EXPLAINED and found.p <= P:
        how = "longer" if found.value > 0 else "shorter"
        text = f"the {how} of two attempts gets the higher reward (rank correlation {found.value:.2f}, p = {found.p:.3f})"
        yield Doubt("length", text, NOT_LENGTH)


def _position(groups: Groups, bias: Measure | None) -> Iterator[Doubt]:
    if bias is not None and abs(bias.value) >= BIAS and bias.low * bias.high > 0:
        text = f"the first place in the judge's prompt adds {bias.value:+.2f} over the last"
        yield Doubt("position", f"{text} [{bias.low:+.2f}, {bias.high:+.2f}]", SHUFFLED)
        return
    pairs = [[(float(each.index), each.reward) for each in members if each.reward is not None] for members in groups]
    found = correlate(pairs)
    if found is not None and abs(found.value) >= POSITION and found.p <= P:
        text = f"the reward follows the attempt's number in its group (rank correlation {found.value:.2f}"
        yield Doubt("position", f"{text}, p = {found.p:.3f}), which is chance", SHUFFLED)


def _leak(groups: Groups) -> Iterator[Doubt]:
    """Yields a doubt if nearly all replies that stand word for word in their prompt are rewarded, and no others."""
    known = [(_is_copy(each), each.reward) for members in groups for each in members if each.reward is not None]
    top, low = max((value for _, value in known), default=0.0), min((value for _, value in known), default=0.0)
    if top - low <= EQUAL_REWARDS:
        return
    copies = [(value - low) / (top - low) for is_copy, value in known if is_copy]
    others = [(value - low) / (top - low) for is_copy, value in known if not is_copy]
    if len(copies) >= COPIES and fmean(copies) >= SOLVED and (not others or fmean(others) <= HOPELESS):
        text = f"all replies with a reward stand word for word in their prompt, {len(copies)} of {len(known)}"
        yield Doubt("leak", text, NO_ANSWER)


def _is_copy(attempt: ScoredTrajectory) -> bool:
    said = [text_of(each.get("content")).strip() for each in attempt.messages if each.get("role") == "assistant"]
    given = [text_of(each.get("content")) for each in attempt.messages if each.get("role") != "assistant"]
    return bool(said and said[-1]) and any(said[-1] in text for text in given)


# --- whether they repeat ----------------------------------------------------------------------------------------------


def _noise(groups: Groups, repeats: VoteReliability | None) -> Iterator[Doubt]:
    if repeats is not None and repeats.one_vote.value < REPEATS:
        share = max(repeats.one_vote.value, 0.0)
        text = f"asked again, the judge repeats {share:.0%} of the differences between the attempts of a group"
        yield Doubt("noise", text, STEADY)
        return
    same: dict[str, list[float]] = defaultdict(list)
    for each in (each for members in groups for each in members if each.reward is not None):
        same[json.dumps([each.scenario, each.messages, each.branches], sort_keys=True)].append(each.reward or 0.0)
    pairs = [abs(a - b) > EQUAL_REWARDS for values in same.values() for a, b in zip(values, values[1:], strict=False)]
    if len(pairs) >= COPIES and 2 * sum(pairs) > len(pairs):
        text = f"equal attempts got different rewards, {sum(pairs)} of {len(pairs)} pairs"
        yield Doubt("noise", text, STEADY)


def _twice(scenarios: Sequence[Json]) -> Iterator[Doubt]:
    """Yields a doubt for contents that some scenarios share. Where most do, the id names what is played."""
    by_content: dict[str, list[str]] = defaultdict(list)
    for scenario in scenarios:
        content = {key: value for key, value in scenario.items() if key != "id"}
        by_content[json.dumps(content, sort_keys=True, default=str)].append(str(scenario.get("id")))
    alike = [ids for ids in by_content.values() if len(ids) > 1]
    num = sum(len(ids) - 1 for ids in alike)
    if num and 2 * sum(map(len, alike)) <= len(scenarios):
        text = f"{num} of {len(scenarios)} scenarios are there twice, such as {' and '.join(alike[0][:2])}"
        yield Doubt("twice", text, ONCE)
