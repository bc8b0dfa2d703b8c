"""What judging would take, before anything is spent: calls, tokens, dollars. Makes no call."""

from collections.abc import Sequence
from dataclasses import dataclass

from art_cli.judges.docket import Docket, read_docket
from art_cli.judges.poll import Poll
from art_cli.judges.prices import find_price
from art_cli.judges.ruler import RulerJudge
from art_cli.trajectory import Trajectory


@dataclass(frozen=True)
class Estimate:
    """Calls still to make and what they would take; `cached` votes cost nothing. `usd` None: a price is unknown.

    Completion tokens are reckoned for the verdict alone: what a model thinks before it comes on top.
    """

    calls: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float | None = 0.0

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(
            self.calls + other.calls,
            self.cached + other.cached,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            None if self.usd is None or other.usd is None else self.usd + other.usd,
        )


def estimate(judge: RulerJudge, group: Sequence[Trajectory]) -> Estimate:
    """What judging this group would take now. Parts of a large group are reckoned by example."""
    total = Estimate()
    if not group:
        return total
    docket = read_docket(group, judge.config)
    for poll in judge.polls:
        for part in docket.parts_by_example(judge.config.max_group):
            for vote in range(judge.config.votes):
                total += _estimate_vote(poll, docket, part, vote)
    return total


def _estimate_vote(poll: Poll, docket: Docket, places: Sequence[int], vote: int) -> Estimate:
    attempts = [docket.attempts[place] for place in places]
    prompt = poll.prompt(attempts, docket.tools, seed=docket.seed, vote=vote, ask=0)
    if poll.stored(prompt):
        return Estimate(cached=1)
    tokens = poll.caller.expected_tokens(prompt.messages, len(attempts))
    price = find_price(poll.member)
    return Estimate(1, 0, *tokens, price.cost(*tokens) if price else None)
