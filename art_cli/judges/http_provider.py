"""Judges through any OpenAI-compatible endpoint (`api_base`), spoken to with httpx alone."""

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.cache import Usage
from art_cli.judges.keys import Secrets
from art_cli.judges.prices import find_price
from art_cli.judges.provider import Answer, CallFailed, classify, one_line, quiet_time, retry_after
from art_cli.judges.shorten import count_tokens
from art_cli.judges.transcript import clean
from art_cli.trajectory import Json

DEFAULT_KEY = "OPENAI_API_KEY"  # what every OpenAI-compatible client reads


class HttpProvider:
    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        assert member.api_base is not None
        self._member, self._secrets = member, secrets
        base = member.api_base.rstrip("/").removesuffix("/chat/completions")
        self._url = f"{base}/chat/completions"
        self._name = member.model.removeprefix("openai/")  # litellm's way of saying "as OpenAI does it"
        self._price = find_price(member)
        self._clients = _Clients()

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        body: Json = {"model": self._name, "messages": list(messages), **self._member.params}
        if schema is not None:
            strict = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": strict}
        started = time.monotonic()
        response = await self._post(body, timeout_s)
        if response.status_code != 200:
            text = response.text
            raise CallFailed(
                f"{self._where()} answered {response.status_code}: {one_line(text, self._secrets)}",
                classify(response.status_code, text),
                retry_after_s=retry_after(response.headers),
            )
        return self._read(response, messages, time.monotonic() - started)

    async def _post(self, body: Json, timeout_s: float) -> httpx.Response:
        """The response, read whole before the deadline. A lost connection or a missed deadline can be tried again."""
        key = os.environ.get(self._member.api_key_env or DEFAULT_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with asyncio.timeout(timeout_s), self._clients.borrow() as client:
                return await client.post(self._url, json=body, headers=headers)
        except TimeoutError as error:
            raise CallFailed(f"{self._where()} did not answer within {timeout_s:g} s", "late") from error
        except httpx.ConnectError as error:
            raise CallFailed(f"{self._where()} cannot be reached: {self._line(error)}", "unreachable") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise CallFailed(f"{self._where()}: {self._line(error)}; check judge.api_base", "stopped") from error
        except httpx.HTTPError as error:
            raise CallFailed(f"{self._where()}: connection lost: {self._line(error)}", "retry") from error

    def _read(self, response: httpx.Response, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            body = response.json()
            choice = body["choices"][0]
            content = choice["message"].get("content")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CallFailed(f"{self._where()} answered 200 with something else than a completion", "retry") from error
        text = self._secrets.redact(_content_text(content))
        return Answer(
            text=text,
            finish_reason=str(choice.get("finish_reason")),
            usage=self._usage(body.get("usage"), messages, text, latency_s),
            pause_s=quiet_time(response.headers),
        )

    def _usage(self, usage: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        """What the endpoint says it took; an estimate where it does not say."""
        usage = usage if isinstance(usage, dict) else {}
        prompt = _count(usage.get("prompt_tokens"), sum(count_tokens(str(m.get("content"))) for m in messages))
        completion = _count(usage.get("completion_tokens"), count_tokens(text))
        details = usage.get("prompt_tokens_details")
        cached = min(_count(details.get("cached_tokens"), 0), prompt) if isinstance(details, dict) else 0
        cost = self._price.cost(prompt, completion, cached) if self._price else None
        return Usage(1, prompt, completion, cost, latency_s)

    def _where(self) -> str:
        return f"{self._name} at {self._secrets.redact(self._member.api_base or '')}"

    def _line(self, error: Exception) -> str:
        return one_line(str(error) or type(error).__name__, self._secrets)

    async def close(self) -> None:
        await self._clients.close()


class _Clients:
    """A client, and so a connection, for each call at once.

    One client for all would search its whole pool at every step of every call: at 64 calls at once that takes longer
    than everything else together (httpcore 1.0, `_assign_requests_to_connections`).
    """

    def __init__(self) -> None:
        self._idle: list[httpx.AsyncClient] = []
        self._ssl: ssl.SSLContext | None = None  # made once: it reads a file of certificates

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that no other call has; where the call fails, its connection is closed."""
        client = self._idle.pop() if self._idle else self._make()
        try:
            yield client
        except BaseException:
            await client.aclose()
            raise
        self._idle.append(client)

    def _make(self) -> httpx.AsyncClient:
        self._ssl = self._ssl or httpx.create_ssl_context()
        return httpx.AsyncClient(timeout=None, verify=self._ssl)  # the caller's deadline covers every wait

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def _content_text(content: Any) -> str:
    """An assistant message's content as one text; a list of parts is put together."""
    if isinstance(content, list):
        return "".join(clean(part.get("text")) for part in content if isinstance(part, dict))
    return clean(content)


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else otherwise
