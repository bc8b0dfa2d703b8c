"""Voter: one model's scores for the attempts of a group.

A vote comes from the cache when it was paid for before. Otherwise the model is asked until its answer is usable: an
unusable answer is sent back once with what is wrong with it, then the same question is asked anew under other ids,
`judge.attempts` times in all. Every usable answer is in the cache before it counts, and every billed call is in the
ledger, also those whose answer was useless. Attempts that do not fit in one call are judged in parts.
"""

import asyncio
import functools
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from art_cli.config.schema import JudgeModelConfig, RulerJudgeConfig
from art_cli.judges import make_key
from art_cli.judges.costs import CostEstimate, Usage, find_price
from art_cli.judges.providers import LONG_ANSWER, Answer
from art_cli.judges.providers.caller import Caller
from art_cli.judges.ruler import votes
from art_cli.judges.ruler.group import JudgedGroup
from art_cli.judges.ruler.prompt import JudgePrompt, schema, write_prompt
from art_cli.judges.ruler.verdict import Entry, VerdictError, parse_verdict
from art_cli.judges.ruler.verdict_cache import StoredVote, VerdictCache, patiently
from art_cli.judges.ruler.votes import AffineMap
from art_cli.runs.trajectory import Json, Score
from art_cli.runtime.errors import JudgeError, JudgeStopped

log = logging.getLogger(__name__)

MAX_SENT_BACK = 20_000  # characters of an unusable answer that the judge is shown again

T = TypeVar("T")


@dataclass(frozen=True)
class AttemptVotes:
    """One model's k votes on one attempt: scores, positions in the prompt, explanations, mean seconds of a vote."""

    votes: list[float]  # [k]
    positions: list[int]  # [k]
    explanations: list[str | None]  # [k]
    latency_s: float

    def rescaled(self, scale: AffineMap) -> "AttemptVotes":
        return replace(self, votes=[scale(vote) for vote in self.votes])


class Voter:
    """Asks one model. `usage` counts what this process paid, `num_cached` the votes that were paid for before."""

    def __init__(
        self, config: RulerJudgeConfig, caller: Caller, cache: VerdictCache, *, instructions: str, job: str
    ) -> None:
        self.caller, self.member = caller, caller.member
        self._config, self._cache, self._instructions, self._job = config, cache, instructions, job
        self.usage = Usage()
        self.num_cached = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- scores -------------------------------------------------------------------------------------------------------

    async def score(self, group: JudgedGroup, *, settings: str, num_rounds: int = 1) -> list[Score]:
        """Returns [A] this model's score of each attempt; `settings` goes into every score. Raises JudgeError.

        With several rounds by the votes of all of them. Those of the rounds before the last come from the cache.
        """
        first, *others = group.parts(self._config.max_group)
        scored, usage = await self._ask_about(group, first, num_rounds)
        found = dict(zip(first, scored, strict=True))
        if others:
            usage += await self._add_parts(group, first, others, found, num_rounds)
        return [self._write_score(found[index], usage, group, settings) for index in range(len(group.attempts))]

    async def _add_parts(
        self,
        group: JudgedGroup,
        first: Sequence[int],
        others: Sequence[list[int]],
        found: dict[int, AttemptVotes],
        num_rounds: int,
    ) -> Usage:
        """Adds the votes on all other parts to `found`, on the scale of the first part. Returns what they took.

        The first round chooses the anchors of every round, so that the parts and their questions stay the same.
        """
        count = votes.num_anchors(self._config.max_group)
        reference = [
            votes.aggregate(found[index].votes[: self._config.votes], self._config.aggregate) for index in first
        ]
        anchors = [first[rank] for rank in votes.choose_anchors(reference, count)]
        usage = Usage()
        asked = await all_of([self._ask_about(group, [*anchors, *part], num_rounds) for part in others])
        for part, (marked, took) in zip(others, asked, strict=True):
            usage += took
            here = [self._aggregate(each) for each in marked[:count]]
            scale = votes.fit(here, [self._aggregate(found[index]) for index in anchors])
            found |= {index: each.rescaled(scale) for index, each in zip(part, marked[count:], strict=True)}
        scale = votes.into_range([vote for each in found.values() for vote in each.votes])
        found |= {index: each.rescaled(scale) for index, each in found.items()}
        return usage

    async def _ask_about(
        self, group: JudgedGroup, indices: Sequence[int], num_rounds: int
    ) -> tuple[list[AttemptVotes], Usage]:
        """Returns [len(indices)] the votes on these attempts, all shown together, and what they took."""
        num_before = self._config.votes * (num_rounds - 1)
        cast = await all_of(
            [
                self._vote(group, indices, vote, is_known=vote < num_before)
                for vote in range(self._config.votes * num_rounds)
            ]
        )
        usage = sum((vote.usage for vote in cast), Usage())
        return [
            AttemptVotes(
                votes=[vote.entries[at].score for vote in cast],
                positions=[vote.positions[at] for vote in cast],
                explanations=[vote.entries[at].explanation for vote in cast],
                latency_s=usage.latency_s / len(cast),
            )
            for at in range(len(indices))
        ], usage

    def _aggregate(self, attempt: AttemptVotes) -> float:
        return votes.aggregate(attempt.votes, self._config.aggregate)

    def _write_score(self, attempt: AttemptVotes, usage: Usage, group: JudgedGroup, settings: str) -> Score:
        score = min(1.0, max(0.0, self._aggregate(attempt)))
        nearest = min(range(len(attempt.votes)), key=lambda vote: abs(attempt.votes[vote] - score))
        return Score(
            judge="ruler",
            model=self.member.model,
            score=score,
            explanation=attempt.explanations[nearest],
            votes=attempt.votes,
            spread=votes.spread(attempt.votes),
            positions=attempt.positions,
            cost_usd=None if usage.cost_usd is None else usage.cost_usd / group.num_trajectories,
            prompt_tokens=usage.prompt_tokens / group.num_trajectories,
            completion_tokens=usage.completion_tokens / group.num_trajectories,
            latency_s=attempt.latency_s,
            settings=settings,
        )

    # --- one vote -----------------------------------------------------------------------------------------------------

    async def _vote(
        self, group: JudgedGroup, indices: Sequence[int], vote: int, *, is_known: bool = False
    ) -> StoredVote:
        """Returns one usable answer on all these attempts. Raises JudgeError when none came.

        `is_known`: an earlier round of this group has it, so that it is not counted as one paid for by others.
        """
        first = self._prompt(group, indices, vote, ask=0)
        key = vote_key(self.member, first)
        async with self._locks.setdefault(key, asyncio.Lock()):  # a group with the same content waits for this one
            if stored := await patiently(lambda: self._cache.get(key, len(indices))):
                self.num_cached += not is_known
                return stored
            fresh = await self._ask_until_usable(group, indices, vote, first)
            await patiently(lambda: self._cache.put(key, fresh))
            return fresh

    def _prompt(self, group: JudgedGroup, indices: Sequence[int], vote: int, *, ask: int) -> JudgePrompt:
        """Returns the prompt of vote number `vote`. Asked anew, it keeps the order and changes the ids."""
        order = votes.order(len(indices), seed=group.seed, vote=vote)
        return write_prompt(
            [group.attempts[index] for index in indices],
            order=order,
            tools=group.tools,
            instructions=self._instructions,
            seed=f"{group.seed}:{vote}:{ask}",
        )

    async def _ask_until_usable(
        self, group: JudgedGroup, indices: Sequence[int], vote: int, first: JudgePrompt
    ) -> StoredVote:
        usage = Usage()
        problem = ""
        for ask in range(self._config.attempts):
            prompt = self._prompt(group, indices, vote, ask=ask) if ask else first
            entries, took, problem = await self._ask(prompt, group.group_id)
            usage += took
            if entries is not None:
                return StoredVote(entries, prompt.positions, usage)
        raise JudgeError(
            f"{self.member.model}: no usable verdict, asked {self._config.attempts} times; the last: {problem}"
        )

    async def _ask(self, prompt: JudgePrompt, group_id: str) -> tuple[list[Entry] | None, Usage, str]:
        """Returns the attempts' entries in order (None if unusable), what was paid, and what is wrong with the
        answer."""
        messages = prompt.messages
        usage = Usage()
        problem = ""
        for _ in range(2):  # the question, then its answer sent back once
            answer = await self.caller.ask(messages, schema(prompt.ids), num_attempts=len(prompt.ids))
            usage += answer.usage
            try:
                found = await _parse(answer.text, prompt.ids)
            except VerdictError as error:
                problem = str(error) + (" (the answer was cut off)" if answer.finish_reason == "length" else "")
                await self._record(answer, group_id, problem)
                log.debug("%s: %s: %s", group_id, self.member.model, problem)
                messages = [*prompt.messages, *_complaint(answer, error, prompt.ids)]
            else:
                await self._record(answer, group_id, "verdict")
                return [found[name] for name in prompt.ids], usage, ""
        return None, usage, problem

    async def _record(self, answer: Answer, group_id: str, outcome: str) -> None:
        self.usage += answer.usage
        record = functools.partial(self._cache.record_call, job=self._job, model=self.member.model, group_id=group_id)
        await patiently(lambda: record(outcome=outcome[:200], usage=answer.usage))

    # --- costs --------------------------------------------------------------------------------------------------------

    def estimate(self, group: JudgedGroup) -> CostEstimate:
        """Returns the cost of the votes on this group now. The parts of a large group are estimated with any
        anchors."""
        total = CostEstimate()
        for part in group.parts_by_example(self._config.max_group):
            for vote in range(self._config.votes):
                prompt = self._prompt(group, part, vote, ask=0)
                if self._cache.get(vote_key(self.member, prompt), len(prompt.ids)):
                    total += CostEstimate(cached=1)
                    continue
                tokens = self.caller.expected_tokens(prompt.messages, len(part))
                price = find_price(self.member)
                total += CostEstimate(1, 0, *tokens, price.cost(*tokens) if price else None)
        return total


async def all_of(waits: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results. A failure is raised once the others are in, because what is under way is paid for.

    Of several failures a JudgeStopped comes first.
    """
    results = await asyncio.gather(*waits, return_exceptions=True)
    failures = [result for result in results if isinstance(result, BaseException)]
    for failure in sorted(failures, key=lambda failure: not isinstance(failure, JudgeStopped)):
        raise failure
    return [result for result in results if not isinstance(result, BaseException)]


async def _parse(text: str, ids: Sequence[str]) -> dict[str, Entry]:
    """`parse_verdict`, in a thread when the answer is long."""
    if len(text) < LONG_ANSWER:
        return parse_verdict(text, ids)
    return await asyncio.to_thread(parse_verdict, text, ids)


def vote_key(member: JudgeModelConfig, prompt: JudgePrompt) -> str:
    """Returns the cache key of a vote: everything that decides its answer, and nothing that does not (no key, no
    price)."""
    return make_key(
        model=member.model,
        api_base=member.base_url,
        params=member.params,
        response_format=member.response_format,
        messages=prompt.messages,
    )


def _complaint(answer: Answer, error: VerdictError, ids: Sequence[str]) -> list[Json]:
    """Returns the unusable answer and what is wrong with it, as the next two messages."""
    request = (
        f"This answer cannot be used: {'; '.join(error.problems[:10])}. Answer again with one JSON object and nothing "
        f"else, every attempt exactly once, by its id, with a score from 0 to 1: {', '.join(ids)}"
    )
    return [
        {"role": "assistant", "content": answer.text[:MAX_SENT_BACK] or "(nothing)"},
        {"role": "user", "content": request},
    ]
