"""Poll: one model's votes on a set of attempts. From the cache where they were paid for, otherwise asked until usable.

An answer that cannot be used is sent back once with what is wrong with it; then the same question is asked anew under
other ids, `judge.attempts` times in all. Every usable answer is in the cache before anyone counts it, and every billed
call is in the ledger, the useless ones too.
"""

import asyncio
import functools
import logging
from collections.abc import Sequence
from weakref import WeakValueDictionary

from art_cli.config.schema import JudgeModelConfig, RulerJudgeConfig
from art_cli.errors import JudgeError
from art_cli.judges import votes
from art_cli.judges.cache import StoredVote, Usage, VerdictCache, make_key, patiently
from art_cli.judges.caller import Caller
from art_cli.judges.prompt import Prompt, schema, write_prompt
from art_cli.judges.provider import LONG_ANSWER, Answer
from art_cli.judges.transcript import Attempt
from art_cli.judges.verdict import Entry, VerdictError, parse_verdict
from art_cli.trajectory import Json

log = logging.getLogger(__name__)

MAX_SENT_BACK = 20_000  # characters of an unusable answer that are shown to the judge again


class Poll:
    """Asks one model. `total` counts what this process paid, `num_cached` the votes that were paid for before."""

    def __init__(
        self, config: RulerJudgeConfig, caller: Caller, cache: VerdictCache, *, instructions: str, job: str
    ) -> None:
        self.config, self.caller, self.member = config, caller, caller.member
        self._cache, self._instructions, self._job = cache, instructions, job
        self.total = Usage()
        self.num_cached = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def prompt(self, attempts: Sequence[Attempt], tools: Sequence[Json], *, seed: str, vote: int, ask: int) -> Prompt:
        """What vote number `vote` shows; asked anew, the order stays and the ids change."""
        order = votes.order(len(attempts), seed=seed, vote=vote)
        return write_prompt(
            attempts, order=order, tools=tools, instructions=self._instructions, seed=f"{seed}:{vote}:{ask}"
        )

    def stored(self, prompt: Prompt) -> StoredVote | None:
        """The vote on this first prompt, if it was paid for."""
        return self._cache.get(vote_key(self.member, prompt), len(prompt.ids))

    async def vote(
        self, attempts: Sequence[Attempt], tools: Sequence[Json], *, seed: str, vote: int, group_id: str
    ) -> StoredVote:
        """One usable answer on all the attempts. Raises JudgeError when none came."""
        first = self.prompt(attempts, tools, seed=seed, vote=vote, ask=0)
        key = vote_key(self.member, first)
        async with self._locks.setdefault(key, asyncio.Lock()):  # a group with the same content waits for this one
            if stored := await patiently(lambda: self._cache.get(key, len(attempts))):
                self.num_cached += 1
                return stored
            fresh = await self._ask_until_usable(first, attempts, tools, seed=seed, vote=vote, group_id=group_id)
            await patiently(lambda: self._cache.put(key, fresh))
            return fresh

    async def _ask_until_usable(
        self,
        first: Prompt,
        attempts: Sequence[Attempt],
        tools: Sequence[Json],
        *,
        seed: str,
        vote: int,
        group_id: str,
    ) -> StoredVote:
        usage = Usage()
        problem = ""
        for ask in range(self.config.attempts):
            prompt = self.prompt(attempts, tools, seed=seed, vote=vote, ask=ask) if ask else first
            entries, took, problem = await self._ask(prompt, group_id)
            usage += took
            if entries is not None:
                return StoredVote(entries, prompt.positions, usage)
        raise JudgeError(
            f"{self.member.model}: no usable verdict, asked {self.config.attempts} times; the last: {problem}"
        )

    async def _ask(self, prompt: Prompt, group_id: str) -> tuple[list[Entry] | None, Usage, str]:
        """The entries in the attempts' order (None: unusable), what was paid, and what is wrong with the answer."""
        messages = prompt.messages
        usage = Usage()
        problem = ""
        for _ in range(2):  # the question, and its answer sent back once
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
        self.total += answer.usage
        record = functools.partial(self._cache.record_call, job=self._job, model=self.member.model, group_id=group_id)
        await patiently(lambda: record(outcome=outcome[:200], usage=answer.usage))


async def _parse(text: str, ids: Sequence[str]) -> dict[str, Entry]:
    """`parse_verdict`, of a long answer in a thread."""
    if len(text) < LONG_ANSWER:
        return parse_verdict(text, ids)
    return await asyncio.to_thread(parse_verdict, text, ids)


def vote_key(member: JudgeModelConfig, prompt: Prompt) -> str:
    """The cache key of a vote: everything that decides its answer, and nothing that does not (no key, no price)."""
    return make_key(
        model=member.model,
        api_base=member.api_base,
        params=member.params,
        response_format=member.response_format,
        messages=prompt.messages,
    )


def _complaint(answer: Answer, error: VerdictError, ids: Sequence[str]) -> list[Json]:
    """The unusable answer and what is wrong with it, as the next two messages."""
    request = (
        f"This answer cannot be used: {'; '.join(error.problems[:10])}. Answer again with one JSON object and nothing "
        f"else, every attempt exactly once, by its id, with a score from 0 to 1: {', '.join(ids)}"
    )
    return [
        {"role": "assistant", "content": answer.text[:MAX_SENT_BACK] or "(nothing)"},
        {"role": "user", "content": request},
    ]
