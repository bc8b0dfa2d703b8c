"""Caller: patience around one provider. Concurrency, rate limits, new tries with backoff and jitter, budget, ledger.

A failure that may pass is tried again after a delay that doubles each time, or after what the provider asks for. When a
provider asks for quiet, every call to it waits, not only the one that was told, and the log says for how long. A
provider whose quota is used up is asked no more: every call stops at once, with the time until then.
"""

import asyncio
import contextlib
import importlib.util
import logging
import random
import time
from collections.abc import Sequence

from art_cli.config.schema import JudgeModelConfig, no_litellm
from art_cli.errors import JudgeError, JudgeStopped, UsageError
from art_cli.judges.costs import Budget, Spent, find_price, takes_schema
from art_cli.judges.providers import Answer, CallFailed, Provider
from art_cli.judges.providers.waits import until
from art_cli.judges.text import count_tokens
from art_cli.secrets import Secrets
from art_cli.trajectory import Json

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
MAX_ASKED_DELAY_S = 600.0  # a provider that asks for more has no quota left, and is not waited for
SHOWN_DELAY_S = 5.0  # shortest wait that the log tells of
USED_UP_S = 60.0  # time for which a provider is not asked that says no more than that its quota is used up
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
        self._shown_until = 0.0  # monotonic time of the last end of a wait that the log told of
        self._num_open = self._num_sent = 0  # calls that are asked for, and those of them that are under way
        self._shut = asyncio.Event()  # set while no call can succeed; `_shut_because` says why
        self._shut_until, self._shut_because = 0.0, ""
        self._answered_at = 0.0
        self._completion_tokens = 0.0  # the most a call took so far

    async def ask(self, messages: Sequence[Json], schema: Json, *, num_attempts: int) -> Answer:
        """The model's answer. Raises JudgeError when the tries are used up, JudgeStopped when no call can succeed."""
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
        """Raises for a failure that no new try cures; shuts the provider where none of any call does."""
        asked_s = failure.retry_after_s
        if failure.kind == "used_up" or (asked_s or 0.0) > MAX_ASKED_DELAY_S:
            when = "" if asked_s is None else f" {until(asked_s)}"
            self._shut_because = f"{failure}; its quota is used up{when}; what is scored is saved"
            self._shut_until = time.monotonic() + (USED_UP_S if asked_s is None else asked_s)
            self._shut.set()
            raise JudgeStopped(self._shut_because) from failure
        if failure.kind == "stopped":
            raise JudgeStopped(f"{failure}; check the model, its key and judge.api_base") from failure
        if failure.kind in ("refused", "too_large"):
            raise JudgeError(str(failure)) from failure

    def _delay(self, tries: int, failure: CallFailed) -> float:
        """Seconds before the next try: jitter on a doubling delay, never less than what the provider asked for."""
        delay: float = random.uniform(0.5, 1.0) * min(MAX_DELAY_S, self._first_delay_s * 2**tries)
        if failure.retry_after_s is None:
            return delay
        self._quiet_until = max(self._quiet_until, time.monotonic() + failure.retry_after_s)
        return failure.retry_after_s + min(delay, 1.0)

    def _show_wait(self, who: str, seconds: float) -> None:
        """One line for a wait, unless it ends when the last one that was shown does."""
        end = time.monotonic() + seconds
        if seconds < SHOWN_DELAY_S or end < self._shown_until + SHOWN_DELAY_S:
            return
        self._shown_until = end
        log.info("%s; waiting %s, %d calls are held", who, until(seconds), self._num_open - self._num_sent)

    def _give_up(self, failure: CallFailed, tries: int, started: float) -> JudgeError:
        if failure.kind == "unreachable" and self._answered_at < started:
            return JudgeStopped(f"{failure} ({tries + 1} tries); start it, or check judge.api_base")
        return JudgeError(f"{failure} ({tries + 1} tries)")

    async def _ask_once(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        while True:
            await self._wait_for_quiet()
            async with self._slots:  # a call that waits has no place: other models of a panel may need it
                if self._quiet_until <= time.monotonic() and not self._shut.is_set():
                    return await self._ask_in_slot(messages, schema, num_attempts)

    async def _ask_in_slot(self, messages: Sequence[Json], schema: Json, num_attempts: int) -> Answer:
        tokens = self.expected_tokens(messages, num_attempts)
        usd = self._price.cost(*tokens) if self._price else 0.0
        async with self._budget.hold(Spent(usd, sum(tokens))):
            self._num_sent += 1
            try:
                answer = await self._send(messages, schema)
            finally:
                self._num_sent -= 1
            self._budget.charge(answer.usage)
        self._answered_at = time.monotonic()
        self._completion_tokens = max(self._completion_tokens, answer.usage.completion_tokens)
        self._be_quiet(min(answer.pause_s, MAX_DELAY_S))
        return answer

    def _be_quiet(self, seconds: float) -> None:
        """Holds later calls, as the headers of an answer ask."""
        if seconds > 0:
            self._quiet_until = max(self._quiet_until, time.monotonic() + seconds)
            self._show_wait(f"{self.member.model}: its rate limit is used up", seconds)

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
        """Sleeps; not on, once the provider is shut."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._shut.wait(), seconds)

    async def close(self) -> None:
        await self._provider.close()


def make_provider(member: JudgeModelConfig, secrets: Secrets) -> Provider:
    """The provider of a model; it neither connects nor imports a client before the first call."""
    if not member.needs_litellm:
        from art_cli.judges.providers.http import HttpProvider

        return HttpProvider(member, secrets)
    if importlib.util.find_spec("litellm") is None:
        raise UsageError(f"judge.model: {no_litellm(member)}")
    from art_cli.judges.providers.litellm import LitellmProvider

    return LitellmProvider(member, secrets)
