"""Judges through litellm, which knows every provider's address and dialect.

Imported at the first call, not before: that takes seconds.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.cache import Usage
from art_cli.judges.keys import Secrets
from art_cli.judges.prices import find_price
from art_cli.judges.provider import Answer, CallFailed, classify, one_line, quiet_time, retry_after
from art_cli.judges.shorten import count_tokens
from art_cli.judges.transcript import clean
from art_cli.trajectory import Json


class LitellmProvider:
    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        self._member, self._secrets = member, secrets
        self._price = find_price(member)

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        litellm = await asyncio.to_thread(_import_litellm)
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
        return self._read(litellm, response, messages, time.monotonic() - started)

    def _explain(self, error: Exception) -> CallFailed:
        status = getattr(error, "status_code", None)
        text = str(error)
        message = f"{self._member.model}: {one_line(text, self._secrets)}"
        name = type(error).__name__
        if name == "UnsupportedParamsError" or "LLM Provider NOT provided" in text:
            return CallFailed(message, "stopped")
        if not isinstance(status, int):
            return CallFailed(f"{self._member.model}: {name}: {one_line(text, self._secrets)}", "retry")
        kind = "unreachable" if name == "APIConnectionError" else classify(status, text)
        return CallFailed(message, kind, retry_after_s=retry_after(_headers(error)))

    def _read(self, litellm: Any, response: Any, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            choice = response.choices[0]
            content = choice.message.content
        except (LookupError, AttributeError, TypeError) as error:
            raise CallFailed(f"{self._member.model} answered with something else than a completion", "retry") from error
        text = self._secrets.redact(clean(content))
        usage = getattr(response, "usage", None)
        prompt = getattr(usage, "prompt_tokens", None) or sum(count_tokens(str(m.get("content"))) for m in messages)
        completion = getattr(usage, "completion_tokens", None) or count_tokens(text)
        headers = (getattr(response, "_hidden_params", None) or {}).get("additional_headers") or {}
        return Answer(
            text=text,
            finish_reason=str(choice.finish_reason),
            usage=Usage(1, prompt, completion, self._cost(litellm, response, prompt, completion), latency_s),
            pause_s=quiet_time({str(k).removeprefix("llm_provider-"): str(v) for k, v in headers.items()}),
        )

    def _cost(self, litellm: Any, response: Any, prompt: int, completion: int) -> float | None:
        """The configured price's, or litellm's own reckoning (tiers, cached tokens and all); None: unknown."""
        if self._member.price is None:
            try:
                return float(litellm.completion_cost(completion_response=response, model=self._member.model))
            except Exception:  # litellm raises a bare Exception for a model that its table lacks
                return None
        return self._price.cost(prompt, completion) if self._price else None

    async def close(self) -> None:
        """litellm keeps its clients to itself, per process; nothing of ours is open."""


def _import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import fetches a price table
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    return litellm


def _headers(error: Exception) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}
