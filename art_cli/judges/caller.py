"""Caller: patience around one provider. Concurrency, rate limits, new tries with backoff and jitter, budget, ledger.

A failure that may pass is tried again after a delay that doubles each time, or after what the provider asks for. When a
provider asks for quiet, every call to it waits, not only the one that was told.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

from art_cli.config.schema import JudgeModelConfig
from art_cli.errors import JudgeError, JudgeStopped
from art_cli.judges.budget import Budget
from art_cli.judges.cache import Spent
from art_cli.judges.prices import find_price, takes_schema
from art_cli.judges.provider import Answer, CallFailed, Provider
from art_cli.judges.shorten import count_tokens
from art_cli.trajectory import Json

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
MAX_ASKED_DELAY_S = 600.0  # a provider that asks for more is not waited for
MAX_LATE = 2  # deadlines that may pass before a call is given up: each is minutes long
COMPLETION_TOKENS = 80  # of one attempt's entry: a score and a sentence or two; corrected by what calls really take


class Caller:
    """Asks one model. `slots` is shared by all callers of a judge: calls at once."""

    def __init__(
        self,
        member: JudgeModelConfig,
        provider: Provider,
        *,
        slots: asyncio.Semaphore,
        budget: Budget,
        timeout_s: float,
        retries: int,
        first_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self.member, self._provider = member, provider
        self._slots, self._budget = slots, budget
        self._timeout_s, self._retries, self._first_delay_s = timeout_s, retries, first_delay_s
        self._price = find_price(member)
        self._wants_schema = member.response_format == "json_schema" or (
            member.response_format == "auto" and takes_schema(member.model) is not False
        )
        self._quiet_until = 0.0  # monotonic time before which no call goes out
        self._answered_at = 0.0
        self._completion_tokens = 0.0  # the most a call took so far

    async def ask(self, messages: Sequence[Json], schema: Json, *, num_attempts: int) -> Answer:
        """The model's answer. Raises JudgeError when the tries are used up, JudgeStopped when no call can succeed."""
        started, num_late = time.monotonic(), 0
        for tries in range(self._retries + 1):
            try:
                return await self._ask_once(messages, schema, num_attempts)
            except CallFailed as failure:
                num_late += failure.kind == "late"
                if failure.kind == "stopped":
                    raise JudgeStopped(f"{failure}; check the model, its key and judge.api_base") from failure
                if failure.kind == "refused":
                    raise JudgeError(str(failure)) from failure
                delay = self._delay(tries, failure)
                if tries == self._retries or num_late > MAX_LATE or delay > MAX_ASKED_DELAY_S:
                    raise self._give_up(failure, tries, started) from failure
                log.debug("%s; trying again in %.1f s", failure, delay)
                await asyncio.sleep(delay)
        raise AssertionError("unreachable: the last try returns or raises")

    def _delay(self, tries: int, failure: CallFailed) -> float:
        """Seconds before the next try: jitter on a doubling delay, never less than what the provider asked for."""
        delay: float = random.uniform(0.5, 1.0) * min(MAX_DELAY_S, self._first_delay_s * 2**tries)
        if failure.retry_after_s is None:
            return delay
        self._quiet_until = max(self._quiet_until, time.monotonic() + min(failure.retry_after_s, MAX_ASKED_DELAY_S))
        return failure.retry_after_s + min(delay, 1.0)

    def _give_up(self, failure: CallFailed, tries: int, started: float) -> JudgeError:
        if failure.kind == "unreachable" and self._answered_at < started:
            return JudgeStopped(f"{failure} ({tries + 1} tries); start it, or check judge.api_base")
        return JudgeError(f"{failure} ({tries + 1} tries)")

    async def _ask_once(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        async with self._slots:
            await self._wait_for_quiet()
            tokens = self.expected_tokens(messages, num_attempts)
            usd = self._price.cost(*tokens) if self._price else 0.0
            async with self._budget.hold(Spent(usd, sum(tokens))):
                answer = await self._send(messages, schema)
                self._budget.settle(answer.usage)
        self._answered_at = time.monotonic()
        self._completion_tokens = max(self._completion_tokens, answer.usage.completion_tokens)
        self._quiet_until = max(self._quiet_until, time.monotonic() + min(answer.pause_s, MAX_DELAY_S))
        return answer

    async def _send(self, messages: Sequence[Json], schema: Json) -> Answer:
        """One call. A model whose schema is refused is asked without, and from then on never with it."""
        if not self._wants_schema:
            return await self._provider.ask(messages, None, timeout_s=self._timeout_s)
        try:
            return await self._provider.ask(messages, schema, timeout_s=self._timeout_s)
        except CallFailed as failure:
            if failure.kind != "refused" or self.member.response_format != "auto":
                raise
            answer = await self._provider.ask(messages, None, timeout_s=self._timeout_s)
            self._wants_schema = False
            log.info("%s takes no JSON schema; its answers are read out of their text", self.member.model)
            return answer

    def expected_tokens(self, messages: Sequence[Json], num_attempts: int) -> tuple[int, int]:
        """An estimate of (prompt, completion) tokens of one call."""
        prompt = sum(count_tokens(str(message["content"])) for message in messages)
        return prompt, round(max(self._completion_tokens, COMPLETION_TOKENS * num_attempts))

    async def _wait_for_quiet(self) -> None:
        while (rest := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(rest)

    async def close(self) -> None:
        await self._provider.close()
