"""Caller: schedules calls to a provider, with concurrency, rate limits, backoff with jitter, and a budget.

Transient failures are retried with exponential backoff, or after the provider's requested wait. A requested wait delays
all calls to the provider and is logged. After quota exhaustion no calls are made until the quota renews; every pending
call stops immediately.
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

FIRST_DELAY_S = 0.5  # first retry delay
MAX_DELAY_S = 60.0  # maximum retry delay, unless the provider requests more
MAX_ASKED_DELAY_S = 600.0  # maximum accepted wait; longer requests mean an exhausted quota
SHOWN_DELAY_S = 5.0  # waits shorter than this are not logged
USED_UP_S = 60.0  # pause after quota exhaustion, unless the provider reports a renewal time
MAX_LATE = 2  # maximum missed deadlines per call; each deadline is minutes long
# Initial estimate of completion tokens per attempt (a score and two sentences). Longer answers raise the estimate.
COMPLETION_TOKENS = 80


class Caller:
    """Makes calls to one model. `slots` limits concurrency and is shared by all callers of a judge."""

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
        self._quiet_until = 0.0  # monotonic time; calls are held until then
        self._shown_until = 0.0  # monotonic end of the last logged wait
        self._num_open = self._num_sent = 0  # pending calls, and calls in flight
        self._shut = asyncio.Event()  # set during quota exhaustion
        self._shut_until, self._shut_because = 0.0, ""
        self._answered_at = 0.0
        self._first = asyncio.Lock()
        self._completion_tokens = 0.0  # maximum seen so far

    async def ask(self, messages: Sequence[Json], schema: Json, *, num_attempts: int) -> Answer:
        """Returns the model's answer. Raises JudgeError after the last retry, JudgeStopped if no call can succeed."""
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
        """Raises for permanent failures. Shuts the provider on quota exhaustion."""
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
        """Seconds before the next retry: exponential backoff with jitter, at least the requested wait."""
        delay: float = random.uniform(0.5, 1.0) * min(MAX_DELAY_S, self._first_delay_s * 2**tries)
        if failure.retry_after_s is None:
            return delay
        self._quiet_until = max(self._quiet_until, time.monotonic() + failure.retry_after_s)
        return failure.retry_after_s + min(delay, 1.0)

    def _show_wait(self, who: str, seconds: float) -> None:
        """Logs a wait, unless it ends about when the last logged wait ends."""
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
                async with self._slots:  # waiting calls hold no slot, so other panel models can run
                    if self._quiet_until <= time.monotonic() and not self._shut.is_set():
                        return await self._ask_in_slot(messages, schema, num_attempts)

    @contextlib.asynccontextmanager
    async def _until_known(self) -> AsyncIterator[None]:
        """With a budget, makes single calls until the first answer shows the completion length, with reasoning."""
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
                if failure.kind == "late":  # the provider may still bill the call
                    self._budget.charge(Usage(1, *tokens, cost_usd=usd))
                raise
            finally:
                self._num_sent -= 1
            self._budget.charge(answer.usage)
        self._answered_at = time.monotonic()
        self._completion_tokens = max(self._completion_tokens, answer.usage.completion_tokens)
        if (seconds := min(answer.pause_s, MAX_DELAY_S)) > 0:  # requested by response headers
            self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)
            self._show_wait(f"{self.member.model}: its rate limit is used up", seconds)
        return answer

    async def _send(self, messages: Sequence[Json], schema: Json) -> Answer:
        """Makes one call. If the model rejects JSON schemas, stops sending them."""
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
        """Returns the estimated (prompt, completion) tokens for one call."""
        prompt = sum(count_tokens(str(message["content"])) for message in messages)
        return prompt, round(max(self._completion_tokens, COMPLETION_TOKENS * num_attempts))

    async def _wait_for_quiet(self) -> None:
        """Waits until calls are allowed. Raises JudgeStopped while the quota is exhausted."""
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
        """Sleeps, but wakes early on quota exhaustion."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shut.wait(), seconds)

    async def close(self) -> None:
        await self._provider.close()


def make_provider(member: JudgeModelConfig, secrets: Secrets) -> Provider:
    """Returns a model's provider, which connects lazily. Raises UsageError if litellm is required but missing."""
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
