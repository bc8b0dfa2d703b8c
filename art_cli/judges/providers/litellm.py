"""Judge models through litellm, and a size limit for answers.

litellm is imported on the first call, because its import takes seconds.

httpx and litellm buffer whole answers, and httpx decompresses whole chunks: 2 MB of gzip can become 4 GB. So requests
ask for uncompressed answers, and the stream wrapper installed by `limit_transport` aborts oversized answers before they
exhaust memory or block Python's json.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import httpx

from art_cli.chat.client import AnswerTooLarge
from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage
from art_cli.judges.providers import MAX_BYTES, MAX_ERROR, MAX_MARKS, Answer, CallFailed, Provider, classify, status_of
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.runs.trajectory import Json
from art_cli.runtime.secrets import Secrets


def limit_transport(transport: Any) -> Any:
    """Limits the answers of an httpx transport in place. The class stays the same, because litellm checks it."""
    handle = transport.handle_async_request

    async def handle_async_request(request: httpx.Request) -> httpx.Response:
        request.headers["Accept-Encoding"] = "identity"
        response: httpx.Response = await handle(request)
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            await response.aclose()
            raise httpx.DecodingError(f"content-encoding {encoding[:20]!r} was not asked for")
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Limited(response.stream)
        return response

    transport.handle_async_request = handle_async_request
    return transport


def find_cause(error: BaseException | None, *kinds: type[BaseException]) -> BaseException | None:
    """Returns the first error of these kinds in a cause chain, if any; litellm and HTTP clients wrap errors."""
    seen = 0
    while error is not None and not isinstance(error, kinds) and seen < 20:
        error, seen = error.__cause__ or error.__context__, seen + 1
    return error if isinstance(error, kinds) else None


class _Limited(httpx.AsyncByteStream):
    """A stream with size limits. Raises AnswerTooLarge."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = num_marks = 0
        async for piece in self._stream:
            num_bytes += len(piece)
            num_marks += sum(map(piece.count, (b"[", b"{", b",")))
            if num_bytes > MAX_BYTES:
                raise AnswerTooLarge(f"the answer is larger than {MAX_BYTES >> 20} MiB")
            if num_marks > MAX_MARKS:
                raise AnswerTooLarge(f"the answer has more than {MAX_MARKS:,} brackets and commas")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class LitellmProvider(Provider):
    """litellm owns its clients (one set per process), so there is nothing to close."""

    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        super().__init__(member, secrets, member.model)

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        litellm = await asyncio.to_thread(import_litellm)
        arguments = self.options(schema)
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
        except Exception as error:  # litellm's errors have no common base class
            raise self._explain(error) from error
        return await asyncio.to_thread(self._read, litellm, response, messages, time.monotonic() - started)

    def _explain(self, error: Exception) -> CallFailed:
        if too_large := find_cause(error, AnswerTooLarge):
            return CallFailed(f"{self.name}: {too_large}", "too_large")
        status = getattr(error, "status_code", None)
        text = str(error)[:MAX_ERROR]
        message = f"{self.name}: {self.shown(text)}"
        kind_of_error = type(error).__name__
        if kind_of_error == "UnsupportedParamsError" or "LLM Provider NOT provided" in text:
            return CallFailed(message, "stopped")
        if not isinstance(status, int):
            return CallFailed(f"{self.name}: {kind_of_error}: {self.shown(text)}", "retry")
        # litellm's APIConnectionError may also be an odd answer, and a refused connection an InternalServerError
        is_away = find_cause(error, aiohttp.ClientConnectorError, httpx.ConnectError)
        kind = "unreachable" if is_away else classify(status, text)
        return CallFailed(message, kind, retry_after_s=retry_after(_headers(error), text))

    def _read(self, litellm: Any, response: Any, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            choice = response.choices[0]
            text = self.read_text(choice.message.content)
        except (LookupError, AttributeError, TypeError) as error:
            raise CallFailed(f"{self.name} did not answer with a completion", "retry") from error
        if failed := (getattr(choice, "provider_specific_fields", None) or {}).get("error"):  # as OpenRouter answers
            said = str(failed)
            raise CallFailed(f"{self.name}: {self.shown(said)}", classify(status_of(failed), said))
        headers = (getattr(response, "_hidden_params", None) or {}).get("additional_headers") or {}
        fields, reason = getattr(choice.message, "provider_specific_fields", None) or {}, str(choice.finish_reason)[:20]
        return Answer(
            text=text,
            finish_reason=reason,
            usage=self._usage(litellm, response, messages, text, latency_s),
            model=self.read_model(getattr(response, "model", None)),
            refusal=self.read_refusal(getattr(choice.message, "refusal", None) or fields.get("refusal"), reason),
            pause_s=quiet_time({str(k).removeprefix("llm_provider-"): str(v) for k, v in headers.items()}),
        )

    def _usage(self, litellm: Any, response: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        usage = getattr(response, "usage", None)
        said = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        prompt, completion, is_sound = self.read_tokens(said, messages, text)
        cost = self._cost(litellm, response) if self.member.price is None and is_sound else None
        if cost is None and self.price:  # litellm may know the price but not the model
            cost = self.price.cost(prompt, completion)
        return Usage(1, prompt, completion, cost, latency_s)

    def _cost(self, litellm: Any, response: Any) -> float | None:
        """Returns litellm's cost with price tiers and cached tokens, if known."""
        try:
            cost = float(litellm.completion_cost(completion_response=response, model=self.member.model))
        except Exception:  # litellm raises a bare Exception for unknown models
            return None
        return cost if math.isfinite(cost) and cost >= 0 else None


def import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prevents a price table download on import
    import litellm

    litellm.suppress_debug_info = True
    litellm.telemetry = False
    _limit_answers()
    return litellm


def _limit_answers() -> None:
    """Installs the answer limit for all litellm clients.

    litellm creates transports in a single place (litellm 1.106, `AsyncHTTPHandler`) and has no setting for answer
    limits, so that method is replaced. Remove when litellm has a setting. Two kinds of calls bypass the limit:
    providers with vendor SDKs, and all calls under DISABLE_AIOHTTP_TRANSPORT, where httpx creates the transport.
    `read_text` truncates their text.
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


def _headers(error: Exception) -> Mapping[str, str]:
    response = getattr(error, "response", None)
    headers = getattr(error, "litellm_response_headers", None) or getattr(response, "headers", None) or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}
