"""Caller: decides when a provider is called: concurrency, rate limits, new tries with backoff and jitter, budget.

A call whose failure may pass is tried again after a delay that doubles each time, or after the time that the provider
asks for. When a provider asks to wait, every call to it waits, not only the one that got the answer, and the log has
the time. A provider whose quota is used up is not called again until the quota is renewed: every call stops at once.
"""

import asyncio
import contextlib
import importlib.util
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence

from art_cli.config.schema import JudgeModelConfig, no_litellm
from art_cli.judges.costs import Budget, Spent, Usage, find_price, takes_schema
from art_cli.judges.judge_text import count_tokens
from art_cli.judges.providers import Answer, CallFailed, Provider
from art_cli.judges.providers.waits import until
from art_cli.runs.trajectory import Json
from art_cli.runtime.errors import JudgeError, JudgeStopped, UsageError
from art_cli.runtime.secrets import Secrets

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5  # shortest delay before a new try
MAX_DELAY_S = 60.0  # longest delay before a new try, unless the provider asks for more
MAX_ASKED_DELAY_S = 600.0  # longest wait that a provider may ask for; one that asks for more has no quota left
SHOWN_DELAY_S = 5.0  # shortest wait that is logged
USED_UP_S = 60.0  # seconds without calls after a used-up quota, unless the provider reports when it is renewed
MAX_LATE = 2  # missed deadlines after which a call is given up, because each is minutes long
# Expected completion tokens of one attempt's entry: a score and a sentence or two. Calls that take more raise it.
COMPLETION_TOKENS = 80


class Caller:
    """Asks one model. `slots` bounds the calls in flight and is shared by all callers of a judge."""

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
        self._shown_until = 0.0  # monotonic time at which the last logged wait ends
        self._num_open = self._num_sent = 0  # calls asked for, and those of them in flight
        self._shut = asyncio.Event()  # set while no call can succeed, for the reason in `_shut_because`
        self._shut_until, self._shut_because = 0.0, ""
        self._answered_at = 0.0
        self._first = asyncio.Lock()
        self._completion_tokens = 0.0  # most completion tokens that a call took so far

    async def ask(self, messages: Sequence[Json], schema: Json, *, num_attempts: int) -> Answer:
        """Returns the model's answer. Raises JudgeError after the last try, JudgeStopped when no call can succeed."""
        self._num_open += 1
        try:
            return await self._ask_patiently(messages, schema, num_attempts)
        finally:
            self._num_open -= 1

    async def _ask_patiently(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        started, num_late = time.monotonic(), 0
        for tries in range(self._retries + 1):
            try:
                return await self._ask_once(messages, schema, num_attempts)
            except CallFailed as failure:
                num_late += failure.kind == "late"
                self._raise_if_final(failure)
                if tries == self._retries or num_late > MAX_LATE:
                    raise self._give_up(failure, tries, started) from failure
                delay = self._delay(tries, failure)
                self._show_wait(str(failure), delay)
                log.debug("%s; trying again in %.1f s", failure, delay)
                await self._pause(delay)
        raise AssertionError("unreachable: the last try returns or raises")

    def _raise_if_final(self, failure: CallFailed) -> None:
        """Raises for a failure that no new try cures; shuts the provider if its quota is used up."""
        asked_s = failure.retry_after_s
        if failure.kind == "used_up" or (asked_s or 0.0) > MAX_ASKED_DELAY_S:
            when = "" if asked_s is None else f" {until(asked_s)}"
            self._shut_because = f"{failure}; its quota is used up{when}; what is scored is saved"
            self._shut_until = time.monotonic() + (USED_UP_S if asked_s is None else asked_s)
            self._shut.set()
            raise JudgeStopped(self._shut_because) from failure
        if failure.kind == "stopped":
            raise JudgeStopped(f"{failure}; check the model, its key and judge.base_url") from failure
        if failure.kind in ("refused", "too_large"):
            raise JudgeError(str(failure)) from failure

    def _delay(self, tries: int, failure: CallFailed) -> float:
        """Seconds before the next try: a doubling delay with jitter, never less than the provider asked for."""
        delay: float = random.uniform(0.5, 1.0) * min(MAX_DELAY_S, self._first_delay_s * 2**tries)
        if failure.retry_after_s is None:
            return delay
        self._quiet_until = max(self._quiet_until, time.monotonic() + failure.retry_after_s)
        return failure.retry_after_s + min(delay, 1.0)

    def _show_wait(self, who: str, seconds: float) -> None:
        """Logs a wait, unless it ends at about the same time as the last wait that was logged."""
        end = time.monotonic() + seconds
        if seconds < SHOWN_DELAY_S or end < self._shown_until + SHOWN_DELAY_S:
            return
        self._shown_until = end
        log.info("%s; waiting %s, %d calls are held", who, until(seconds), self._num_open - self._num_sent)

    def _give_up(self, failure: CallFailed, tries: int, started: float) -> JudgeError:
        if failure.kind == "unreachable" and self._answered_at < started:
            return JudgeStopped(f"{failure} ({tries + 1} tries); start it, or check judge.base_url")
        return JudgeError(f"{failure} ({tries + 1} tries)")

    async def _ask_once(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        async with self._until_known():
            while True:
                await self._wait_for_quiet()
                async with self._slots:  # a waiting call gives its slot back, as other models of a panel may use it
                    if self._quiet_until <= time.monotonic() and not self._shut.is_set():
                        return await self._ask_in_slot(messages, schema, num_attempts)

    @contextlib.asynccontextmanager
    async def _until_known(self) -> AsyncIterator[None]:
        """With a budget, calls go one by one until an answer shows how much the model writes, thoughts and all."""
        if self._completion_tokens or not self._budget.is_limited:
            yield
            return
        async with self._first:
            if not self._completion_tokens:
                yield
                return
        yield

    async def _ask_in_slot(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        tokens = self.expected_tokens(messages, num_attempts)
        usd = self._price.cost(*tokens) if self._price else 0.0
        async with self._budget.hold(Spent(usd, sum(tokens))):
            self._num_sent += 1
            try:
                answer = await self._send(messages, schema)
            except CallFailed as failure:
                if failure.kind == "late":  # its provider may bill it all the same
                    self._budget.charge(Usage(1, *tokens, cost_usd=usd))
                raise
            finally:
                self._num_sent -= 1
            self._budget.charge(answer.usage)
        self._answered_at = time.monotonic()
        self._completion_tokens = max(self._completion_tokens, answer.usage.completion_tokens)
        self._be_quiet(min(answer.pause_s, MAX_DELAY_S))
        return answer

    def _be_quiet(self, seconds: float) -> None:
        """Makes later calls wait, as the headers of an answer ask."""
        if seconds > 0:
            self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)
            self._show_wait(f"{self.member.model}: its rate limit is used up", seconds)

    async def _send(self, messages: Sequence[Json], schema: Json) -> Answer:
        """One call. A model that refuses the schema is asked without it, from then on always."""
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
        """Returns the estimated (prompt, completion) tokens of one call."""
        prompt = sum(count_tokens(str(message["content"])) for message in messages)
        return prompt, round(max(self._completion_tokens, COMPLETION_TOKENS * num_attempts))

    async def _wait_for_quiet(self) -> None:
        """Raises JudgeStopped while the provider is shut."""
        while True:
            if self._shut.is_set():
                if time.monotonic() < self._shut_until:
                    raise JudgeStopped(self._shut_because)
                self._shut.clear()
            rest = self._quiet_until - time.monotonic()
            if rest <= 0:
                return
            await self._pause(rest)

    async def _pause(self, seconds: float) -> None:
        """Sleeps, until the provider is shut at the latest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shut.wait(), seconds)

    async def close(self) -> None:
        await self._provider.close()


def make_provider(member: JudgeModelConfig, secrets: Secrets) -> Provider:
    """Returns the provider of a model, which connects at the first call. Raises UsageError if litellm is missing."""
    if member.is_rule:
        from art_cli.judges.providers.rule import RuleProvider

        return RuleProvider(member, secrets, member.model)
    if not member.needs_litellm:
        from art_cli.judges.providers.http import HttpProvider

        return HttpProvider(member, secrets)
    if importlib.util.find_spec("litellm") is None:
        raise UsageError(f"judge.model: {no_litellm(member)}")
    from art_cli.judges.providers.litellm import LitellmProvider

    return LitellmProvider(member, secrets)
