"""Judge models at OpenAI and OpenAI-compatible endpoints (`base_url`), and missing API keys."""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
from yarl import URL

from art_cli.chat.client import AnswerTooLarge, open_session, read_answer
from art_cli.config.schema import JudgeModelConfig
from art_cli.judges.costs import Usage
from art_cli.judges.providers import (
    ENCODINGS,
    LONG_ANSWER,
    MAX_BYTES,
    MAX_ERROR,
    MAX_MARKS,
    MAX_START,
    Answer,
    CallFailed,
    Provider,
    classify,
    read_count,
    status_of,
)
from art_cli.judges.providers.waits import quiet_time, retry_after
from art_cli.runs.trajectory import Json
from art_cli.runtime.secrets import Secrets

OPENAI = "https://api.openai.com/v1"
ADDRESS = "check judge.base_url and OPENAI_BASE_URL"
DEFAULT_KEY = "OPENAI_API_KEY"  # read by every OpenAI-compatible client


def openai_base() -> str:
    """Returns OpenAI's base URL, from the same environment variables as OpenAI's client and litellm."""
    said = os.environ.get("OPENAI_BASE_URL") or os.environ.get("OPENAI_API_BASE")
    return said or OPENAI


def missing_key(member: JudgeModelConfig) -> str | None:
    """Returns the missing variable, if known. Some providers take other credentials; then only a call can tell."""
    if member.api_key_env is not None:
        return None if os.environ.get(member.api_key_env) else member.api_key_env
    if member.is_rule or member.base_url is not None or "api_key" in member.params:
        return None
    if not member.needs_litellm:
        return None if os.environ.get(DEFAULT_KEY) else DEFAULT_KEY
    names = _names_missing(member.model)
    return " or ".join(names) if names and all(name.endswith("_API_KEY") for name in names) else None


def _names_missing(model: str) -> list[str]:
    """Returns missing variables according to litellm; empty for unknown models."""
    from art_cli.judges.providers.litellm import import_litellm

    try:
        found: Mapping[str, object] = import_litellm().validate_environment(model)
    except Exception:  # litellm may be missing, or may not know the model
        return []
    names = found.get("missing_keys")
    return [str(name) for name in names] if isinstance(names, list) else []


class _Response(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpProvider(Provider):
    def __init__(self, member: JudgeModelConfig, secrets: Secrets) -> None:
        assert not member.needs_litellm, member.model
        base = (member.base_url or openai_base()).rstrip("/").removesuffix("/chat/completions")
        self._url = f"{base}/chat/completions"
        self._model = member.model.removeprefix("openai/")  # litellm's way of saying "as OpenAI does it"
        self._session: aiohttp.ClientSession | None = None
        super().__init__(member, secrets, f"{self._model} at {secrets.redact(base)}")

    async def ask(self, messages: Sequence[Json], schema: Json | None, *, timeout_s: float) -> Answer:
        body: Json = {"model": self._model, "messages": list(messages), **self.options(schema)}
        started = time.monotonic()
        response = await self._post(body, timeout_s)
        if response.status != 200:
            text = response.body[:MAX_ERROR].decode(errors="replace")
            if 300 <= response.status < 400:
                text = f"it redirects to {response.headers.get('location')}"
            raise self._failure(response, response.status, text)
        latency_s = time.monotonic() - started
        if len(response.body) < LONG_ANSWER:
            return self._read(response, messages, latency_s)
        return await asyncio.to_thread(self._read, response, messages, latency_s)

    async def _post(self, body: Json, timeout_s: float) -> _Response:
        """Returns the complete response. Lost connections and missed deadlines are retryable."""
        try:
            data = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
            async with (
                asyncio.timeout(timeout_s),
                self._open().post(self._url, data=data, headers=self._headers(), allow_redirects=False) as response,
            ):
                answer = await read_answer(response, MAX_BYTES)
        except TimeoutError as error:
            raise CallFailed(f"{self.name} did not answer within {timeout_s:g} s", "late") from error
        except aiohttp.ClientConnectorError as error:
            raise CallFailed(f"{self.name} cannot be reached: {self._line(error)}", "unreachable") from error
        except ValueError as error:  # an invalid URL, or a key with invalid characters
            raise CallFailed(
                f"{self.name}: {self._line(error)}; check judge.base_url, OPENAI_BASE_URL and the key", "stopped"
            ) from error
        except AnswerTooLarge as error:
            raise CallFailed(f"{self.name}: {error}", "too_large") from error
        except aiohttp.ClientError as error:
            raise CallFailed(f"{self.name}: connection lost: {self._line(error)}", "retry") from error
        if sum(map(answer.count, (b"[", b"{", b","))) > MAX_MARKS:
            raise CallFailed(f"{self.name}: the answer has more than {MAX_MARKS:,} brackets and commas", "too_large")
        return _Response(response.status, response.headers, answer)

    def _headers(self) -> dict[str, str]:
        """Returns the authorization, unless the URL has it; for OpenAI also organization and project."""
        key = os.environ.get(self.member.api_key_env or DEFAULT_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key and URL(self._url).user is None else {}
        return headers | (_account() if self.member.base_url is None else {})

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(
                self._url,
                {"Content-Type": "application/json", "Accept-Encoding": ENCODINGS},
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # bounded by the call's deadline
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _read(self, response: _Response, messages: Sequence[Json], latency_s: float) -> Answer:
        try:
            body = json.loads(response.body)
            if error := body.get("error") or body["choices"][0].get("error"):  # OpenRouter answers so, with status 200
                raise self._failure(response, status_of(error), json.dumps(error))
            choice = body["choices"][0]
            text = self.read_text(choice["message"].get("content"))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            start = self.shown(response.body[:MAX_START].decode(errors="replace"))
            text = f"{self.name} answered 200, but not with a completion: {start}; {ADDRESS}"
            raise CallFailed(text, "retry") from error
        reason = choice.get("finish_reason")
        return Answer(
            text=text,
            finish_reason=reason if isinstance(reason, str) else "",
            usage=self._usage(body.get("usage"), messages, text, latency_s),
            model=self.read_model(body.get("model")),
            refusal=self.read_refusal(choice["message"].get("refusal"), reason),
            pause_s=quiet_time(response.headers),
        )

    def _failure(self, response: _Response, status: int, text: str) -> CallFailed:
        """Returns the error for `status`, which may be in the body of a response with status 200."""
        cure = f"; {ADDRESS}" if text.lstrip().startswith("<") else ""  # HTML, perhaps of a proxy
        return CallFailed(
            f"{self.name} answered {response.status}: {self.shown(text)}{cure}",
            classify(status, text),
            retry_after_s=retry_after(response.headers, text),
        )

    def _usage(self, usage: Any, messages: Sequence[Json], text: str, latency_s: float) -> Usage:
        usage = usage if isinstance(usage, dict) else {}
        said = usage.get("prompt_tokens"), usage.get("completion_tokens")
        prompt, completion, _ = self.read_tokens(said, messages, text)
        details = usage.get("prompt_tokens_details")
        cached = min(read_count(details.get("cached_tokens")) or 0, prompt) if isinstance(details, dict) else 0
        cost = self.price.cost(prompt, completion, cached) if self.price else None
        return Usage(1, prompt, completion, cost, latency_s)

    def _line(self, error: Exception) -> str:
        return self.shown(str(error) or type(error).__name__)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


def _account() -> dict[str, str]:
    """Returns the OpenAI organization and project from the same variables as OpenAI's client."""
    said = {
        "OpenAI-Organization": os.environ.get("OPENAI_ORGANIZATION") or os.environ.get("OPENAI_ORG_ID"),
        "OpenAI-Project": os.environ.get("OPENAI_PROJECT_ID"),
    }
    return {name: value for name, value in said.items() if value}
