"""Judges through litellm, which knows every provider's address and dialect.

litellm is imported at the first call, not before, because that takes seconds.
"""

import asyncio
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage
from art_cli.judges.providers import MAX_ERROR, Answer, CallFailed, Provider, classify
from art_cli.judges.providers.answer_limit import find_too_large, limit_transport
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.runs.trajectory import Json
from art_cli.runtime.secrets import Secrets


class LitellmProvider(Provider):
    """litellm keeps its clients to itself, one set per process, so that there is nothing to close."""

    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        super().__init__(member, secrets, member.model)

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        litellm = await asyncio.to_thread(import_litellm)
        arguments: Json = dict(self.member.params)
        if schema is not None:
            strict = {"name": "verdict", "strict": True, "schema": schema}
            arguments["response_format"] = {"type": "json_schema", "json_schema": strict}
        if self.member.api_key_env is not None:
            arguments["api_key"] = os.environ.get(self.member.api_key_env)
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                response = await litellm.acompletion(
                    model=self.member.model,
                    messages=list(messages),
                    timeout=timeout_s,
                    num_retries=0,
                    max_retries=0,
                    **arguments,
                )
        except TimeoutError as error:
            raise CallFailed(f"{self.name} did not answer within {timeout_s:g} s", "late") from error
        except Exception as error:  # the boundary to litellm, whose errors have one base class per provider's client
            raise self._explain(error) from error
        return await asyncio.to_thread(self._read, litellm, response, messages, time.monotonic() - started)

    def _explain(self, error: Exception) -> CallFailed:
        if too_large := find_too_large(error):
            return CallFailed(f"{self.name}: {too_large}", "too_large")
        status = getattr(error, "status_code", None)
        text = str(error)[:MAX_ERROR]
        message = f"{self.name}: {self.shown(text)}"
        kind_of_error = type(error).__name__
        if kind_of_error == "UnsupportedParamsError" or "LLM Provider NOT provided" in text:
            return CallFailed(message, "stopped")
        if not isinstance(status, int):
            return CallFailed(f"{self.name}: {kind_of_error}: {self.shown(text)}", "retry")
        kind = "unreachable" if kind_of_error == "APIConnectionError" else classify(status, text)
        return CallFailed(message, kind, retry_after_s=retry_after(_headers(error), text))

    def _read(self, litellm: Any, response: Any, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            text = self.read_text(_content(response))
        except TypeError as error:
            raise CallFailed(f"{self.name} answered with something else than a completion", "retry") from error
        headers = (getattr(response, "_hidden_params", None) or {}).get("additional_headers") or {}
        return Answer(
            text=text,
            finish_reason=str(response.choices[0].finish_reason)[:20],
            usage=self._usage(litellm, response, messages, text, latency_s),
            pause_s=quiet_time({str(k).removeprefix("llm_provider-"): str(v) for k, v in headers.items()}),
        )

    def _usage(self, litellm: Any, response: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        usage = getattr(response, "usage", None)
        said = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        prompt, completion, is_sound = self.read_tokens(said, messages, text)
        if self.member.price is None and is_sound:
            cost = self._cost(litellm, response)
        else:
            cost = self.price.cost(prompt, completion) if self.price else None
        return Usage(1, prompt, completion, cost, latency_s)

    def _cost(self, litellm: Any, response: Any) -> float | None:
        """Returns litellm's own calculation, with price tiers and cached tokens, or None if it has none."""
        try:
            cost = float(litellm.completion_cost(completion_response=response, model=self.member.model))
        except Exception:  # litellm raises a bare Exception for a model that its table lacks
            return None
        return cost if math.isfinite(cost) and cost >= 0 else None


def import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import fetches a price table
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    _limit_answers()
    return litellm


def _limit_answers() -> None:
    """Holds every provider's answers to the limit, also where litellm makes another client for it.

    litellm has one place that makes transports for the clients of its providers (litellm 1.106, `AsyncHTTPHandler`)
    and no setting for what they do with an answer, so that place is replaced until there is one. Two kinds of calls
    escape the limit: those of a provider that is reached through a vendor's own package, and all calls under
    DISABLE_AIOHTTP_TRANSPORT, where httpx makes the transport itself. Their text is cut afterwards (`read_text`).
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
    """Returns the reply's content. Raises TypeError when the response holds no reply."""
    try:
        return response.choices[0].message.content
    except (LookupError, AttributeError, TypeError) as error:
        raise TypeError("no choices") from error


def _headers(error: Exception) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}
