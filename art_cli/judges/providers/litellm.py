"""Judges through litellm, which knows every provider's address and dialect.

Imported at the first call, not before: that takes seconds.
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage, find_price
from art_cli.judges.providers import (
    MAX_ERROR,
    Answer,
    CallFailed,
    classify,
    content_text,
    one_line,
    read_count,
)
from art_cli.judges.providers.answer_limit import find_too_large, limit_transport
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.judges.text import count_tokens
from art_cli.secrets import Secrets
from art_cli.trajectory import Json

log = logging.getLogger(__name__)


class LitellmProvider:
    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        self._member, self._secrets = member, secrets
        self._price = find_price(member)
        self._is_usage_odd = False  # the log has said so

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        litellm = await asyncio.to_thread(import_litellm)
        arguments: Json = dict(self._member.params)
        if schema is not None:
            strict = {"name": "verdict", "strict": True, "schema": schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": strict}
        if self._member.api_key_env is not None:
            arguments["api_key"] = os.environ.get(self._member.api_key_env)
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                response = await litellm.acompletion(
                    model=self._member.model,
                    messages=list(messages),
                    timeout=timeout_s,
                    num_retries=0,
                    max_retries=0,
                    **arguments,
                )
        except TimeoutError as error:
            raise CallFailed(f"{self._member.model} did not answer within {timeout_s:g} s", "late") from error
        except Exception as error:  # the boundary to litellm, whose errors have one parent per provider's client
            raise self._explain(error) from error
        return await asyncio.to_thread(self._read, litellm, response, messages, time.monotonic() - started)

    def _explain(self, error: Exception) -> CallFailed:
        if too_large := find_too_large(error):
            return CallFailed(f"{self._member.model}: {too_large}", "too_large")
        status = getattr(error, "status_code", None)
        text = str(error)[:MAX_ERROR]
        message = f"{self._member.model}: {one_line(text, self._secrets)}"
        name = type(error).__name__
        if name == "UnsupportedParamsError" or "LLM Provider NOT provided" in text:
            return CallFailed(message, "stopped")
        if not isinstance(status, int):
            return CallFailed(f"{self._member.model}: {name}: {one_line(text, self._secrets)}", "retry")
        kind = "unreachable" if name == "APIConnectionError" else classify(status, text)
        return CallFailed(message, kind, retry_after_s=retry_after(_headers(error), text))

    def _read(self, litellm: Any, response: Any, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            text = content_text(_content(response), self._secrets)
        except TypeError as error:
            raise CallFailed(f"{self._member.model} answered with something else than a completion", "retry") from error
        headers = (getattr(response, "_hidden_params", None) or {}).get("additional_headers") or {}
        return Answer(
            text=text,
            finish_reason=str(response.choices[0].finish_reason)[:20],
            usage=self._usage(litellm, response, messages, text, latency_s),
            pause_s=quiet_time({str(k).removeprefix("llm_provider-"): str(v) for k, v in headers.items()}),
        )

    def _usage(self, litellm: Any, response: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        """What the provider says it took; an estimate, of its cost too, where it says what cannot be."""
        usage = getattr(response, "usage", None)
        said = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
        prompt, completion = map(read_count, said)
        is_odd = any(value and count is None for value, count in zip(said, (prompt, completion), strict=True))
        if is_odd and not self._is_usage_odd:
            self._is_usage_odd = True
            log.warning("%s: its usage is not a number of tokens; tokens and cost are estimated", self._member.model)
        prompt = prompt or sum(count_tokens(str(message.get("content"))) for message in messages)
        completion = completion or count_tokens(text)
        if self._member.price is None and not is_odd:
            cost = self._cost(litellm, response)
        else:
            cost = self._price.cost(prompt, completion) if self._price else None
        return Usage(1, prompt, completion, cost, latency_s)

    def _cost(self, litellm: Any, response: Any) -> float | None:
        """litellm's own reckoning (tiers, cached tokens and all); None: unknown."""
        try:
            cost = float(litellm.completion_cost(completion_response=response, model=self._member.model))
        except Exception:  # litellm raises a bare Exception for a model that its table lacks
            return None
        return cost if math.isfinite(cost) and cost >= 0 else None

    async def close(self) -> None:
        """litellm keeps its clients to itself, per process; nothing of ours is open."""


def import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import fetches a price table
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    _limit_answers()
    return litellm


def _limit_answers() -> None:
    """Holds every provider's answers to the limit, also where litellm makes a client of its own for it.

    litellm has one place that makes transports for the clients of its providers (litellm 1.106, `AsyncHTTPHandler`)
    and no setting for what they do with an answer, so the place is replaced until there is one. Not held to the limit:
    a provider spoken to through a vendor's own package, and all of them under DISABLE_AIOHTTP_TRANSPORT, where httpx
    makes the transport itself. What comes after is limited there too (`content_text`).
    """
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    handler: Any = AsyncHTTPHandler
    make = handler.create_async_transport
    if getattr(make, "is_limited", False):
        return

    def create_async_transport(*arguments: Any, **options: Any) -> Any:
        transport = make(*arguments, **options)
        return None if transport is None else limit_transport(transport)

    create_async_transport.is_limited = True  # type: ignore[attr-defined]
    handler.create_async_transport = staticmethod(create_async_transport)


def _content(response: Any) -> Any:
    """The reply's content. Raises TypeError where there is no reply in it."""
    try:
        return response.choices[0].message.content
    except (LookupError, AttributeError, TypeError) as error:
        raise TypeError("no choices") from error


def _headers(error: Exception) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}
