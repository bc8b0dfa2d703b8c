"""Judges through OpenAI or any OpenAI-compatible endpoint (`api_base`), spoken to with httpx alone."""

import asyncio
import json
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage, find_price
from art_cli.judges.providers import (
    LONG_ANSWER,
    MAX_ERROR,
    Answer,
    CallFailed,
    classify,
    content_text,
    one_line,
    read_count,
)
from art_cli.judges.providers.answer_limit import ENCODINGS, AnswerTooLarge, limit
from art_cli.judges.providers.keys import DEFAULT_KEY, openai_base
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.judges.text import count_tokens
from art_cli.secrets import Secrets
from art_cli.trajectory import Json

log = logging.getLogger(__name__)


class HttpProvider:
    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        assert not member.needs_litellm, member.model
        self._member, self._secrets = member, secrets
        self._base = (member.api_base or openai_base()).rstrip("/").removesuffix("/chat/completions")
        self._url = f"{self._base}/chat/completions"
        self._name = member.model.removeprefix("openai/")  # litellm's way of saying "as OpenAI does it"
        self._price = find_price(member)
        self._clients = _Clients()
        self._is_usage_odd = False  # the log has said so

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        body: Json = {"model": self._name, "messages": list(messages), **self._member.params}
        if schema is not None:
            strict = {"name": "verdict", "strict": True, "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": strict}
        started = time.monotonic()
        response = await self._post(body, timeout_s)
        if response.status_code != 200:
            text = response.content[:MAX_ERROR].decode(errors="replace")
            raise CallFailed(
                f"{self._where()} answered {response.status_code}: {one_line(text, self._secrets)}",
                classify(response.status_code, text),
                retry_after_s=retry_after(response.headers, text),
            )
        latency_s = time.monotonic() - started
        if len(response.content) < LONG_ANSWER:
            return self._read(response, messages, latency_s)
        return await asyncio.to_thread(self._read, response, messages, latency_s)

    async def _post(self, body: Json, timeout_s: float) -> httpx.Response:
        """The response, read whole before the deadline. A lost connection or a missed deadline can be tried again."""
        key = os.environ.get(self._member.api_key_env or DEFAULT_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= _account() if self._member.api_base is None else {}
        try:
            async with asyncio.timeout(timeout_s), self._clients.borrow() as client:
                return await client.post(self._url, json=body, headers=headers)
        except TimeoutError as error:
            raise CallFailed(f"{self._where()} did not answer within {timeout_s:g} s", "late") from error
        except httpx.ConnectError as error:
            raise CallFailed(f"{self._where()} cannot be reached: {self._line(error)}", "unreachable") from error
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise CallFailed(
                f"{self._where()}: {self._line(error)}; check judge.api_base and OPENAI_BASE_URL", "stopped"
            ) from error
        except AnswerTooLarge as error:
            raise CallFailed(f"{self._where()}: {error}", "too_large") from error
        except httpx.HTTPError as error:
            raise CallFailed(f"{self._where()}: connection lost: {self._line(error)}", "retry") from error

    def _read(self, response: httpx.Response, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            body = json.loads(response.content)
            choice = body["choices"][0]
            text = content_text(choice["message"].get("content"), self._secrets)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CallFailed(f"{self._where()} answered 200 with something else than a completion", "retry") from error
        reason = choice.get("finish_reason")
        return Answer(
            text=text,
            finish_reason=reason if isinstance(reason, str) else "",
            usage=self._usage(body.get("usage"), messages, text, latency_s),
            pause_s=quiet_time(response.headers),
        )

    def _usage(self, usage: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        """What the endpoint says it took; an estimate where it does not say, or says what cannot be."""
        usage = usage if isinstance(usage, dict) else {}
        prompt, completion = read_count(usage.get("prompt_tokens")), read_count(usage.get("completion_tokens"))
        if usage and None in (prompt, completion) and not self._is_usage_odd:
            self._is_usage_odd = True
            log.warning("%s: its usage is not a number of tokens; tokens and cost are estimated", self._where())
        if prompt is None:
            prompt = sum(count_tokens(str(message.get("content"))) for message in messages)
        if completion is None:
            completion = count_tokens(text)
        details = usage.get("prompt_tokens_details")
        cached = min(read_count(details.get("cached_tokens")) or 0, prompt) if isinstance(details, dict) else 0
        cost = self._price.cost(prompt, completion, cached) if self._price else None
        return Usage(1, prompt, completion, cost, latency_s)

    def _where(self) -> str:
        return f"{self._name} at {self._secrets.redact(self._base)}"

    def _line(self, error: Exception) -> str:
        return one_line(str(error) or type(error).__name__, self._secrets)

    async def close(self) -> None:
        await self._clients.close()


def _account() -> dict[str, str]:
    """Which of a user's organisations and projects at OpenAI pays, as OpenAI's own client reads it."""
    said = {
        "OpenAI-Organization": os.environ.get("OPENAI_ORGANIZATION") or os.environ.get("OPENAI_ORG_ID"),
        "OpenAI-Project": os.environ.get("OPENAI_PROJECT_ID"),
    }
    return {name: value for name, value in said.items() if value}


class _Clients:
    """A client, and so a connection, for each call at once.

    One client for all would search its whole pool at every step of every call: at 64 calls at once that takes longer
    than everything else together (httpcore 1.0, `_assign_requests_to_connections`).
    """

    def __init__(self) -> None:
        self._idle: list[httpx.AsyncClient] = []
        self._ssl: ssl.SSLContext | None = None  # made once: it reads a file of certificates
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client that no other call has; where the call fails, its connection is closed."""
        client = self._idle.pop() if self._idle else await self._make()
        try:
            yield client
        except BaseException:
            await client.aclose()
            raise
        self._idle.append(client)

    async def _make(self) -> httpx.AsyncClient:
        async with self._lock:
            if self._ssl is None:
                self._ssl = await asyncio.to_thread(_prepare)
        return httpx.AsyncClient(
            timeout=None,  # the caller's deadline covers every wait
            verify=self._ssl,
            headers={"Accept-Encoding": ENCODINGS},
            event_hooks={"response": [limit]},
        )

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()


def _prepare() -> ssl.SSLContext:
    """The certificates; what httpx imports for its first client is imported here, too: both hold an event loop."""
    import httpcore  # noqa: F401

    return httpx.create_ssl_context()
