"""The calls that steer a server: health, adapters, scores, sleep. HTTP and JSON; requests of clients go elsewhere.

Each call has a deadline. `Refused` is the server's own error. `Unreachable` means that it did not answer; the call may
be made again when a new server has started.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from art_cli.chat.endpoint_answers import AnswerTooLarge, read_answer, read_error
from art_cli.runtime.errors import EngineError
from art_cli.runtime.secrets import Secrets

Json = dict[str, Any]

CALL_DEADLINE_S = 60.0
ADAPTER_DEADLINE_S = 300.0  # enough for an adapter of a large model on a slow disk
SLEEP_DEADLINE_S = 300.0  # enough to move all weights to the host's memory
MAX_MESSAGE = 10_000  # characters shown of the server's error
NUM_TOP = 20  # vLLM's own limit unless the user raises it (--max-logprobs)


class Unreachable(EngineError):
    """The server did not answer: it is gone, or hangs."""


class Refused(EngineError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Scored(msgspec.Struct, frozen=True):
    """The server's logprobs of L given tokens, in nats.

    Example: Scored(logprobs=[-3.6, -5.8], next={7: -0.2, 9: -1.9})
    """

    logprobs: list[float]  # [L - 1] each token after the first, at temperature 1; empty where not asked for
    next: dict[int, float]  # likeliest tokens after the last: token id -> logprob at the temperature asked for


class Control:
    """One server at `root` (`http://127.0.0.1:8000`)."""

    def __init__(self, root: str, key: str) -> None:
        self.root = root.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Returns whether it can answer; False if it reports that it no longer can. Raises Unreachable."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except Refused as refusal:
            if refusal.status == 503:
                return False
            raise
        return True

    async def models(self) -> list[str]:
        """Returns the names that it serves, with adapters. The base model's name is first."""
        answer = await self._call("GET", "/v1/models", timeout_s=CALL_DEADLINE_S)
        return [model["id"] for model in answer["data"]]

    async def load_adapter(self, name: str, path: Path) -> None:
        body = {"lora_name": name, "lora_path": str(path)}
        await self._call("POST", "/v1/load_lora_adapter", body, timeout_s=ADAPTER_DEADLINE_S)

    async def unload_adapter(self, name: str) -> None:
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=CALL_DEADLINE_S)

    async def score(
        self,
        model: str,
        token_ids: list[int],
        *,
        is_cached: bool,
        timeout_s: float,
        temperature: float = 1.0,
        rank: int | None = None,
    ) -> Scored:
        """Returns the tokens' logprobs under `model`, through the server's prefix cache if `is_cached`.

        vLLM computes a prompt without its cache whenever the prompt's logprobs are asked for, and only then. `rank` is
        the replica that computes them, or None for any.
        """
        body: Json = {
            "model": model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "logprobs": NUM_TOP,
            "return_tokens_as_token_ids": True,
        }
        if not is_cached:
            body["prompt_logprobs"] = 0
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = await self._call("POST", "/v1/completions", body, timeout_s=timeout_s, headers=headers)
        try:
            return _scored(answer["choices"][0], token_ids)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.root}: no logprobs in its reply ({type(error).__name__}: {error})") from error

    async def sleep(self, level: int) -> None:
        """Frees the GPU's memory once the requests in flight are answered. The prefix cache is lost."""
        await self._call("POST", f"/sleep?level={level}&mode=wait", timeout_s=SLEEP_DEADLINE_S)

    async def wake(self, *, reload_base: bool) -> None:
        """Takes the memory again. `reload_base` reads the base weights from the disk, after a sleep of level 2."""
        if not reload_base:
            await self._call("POST", "/wake_up", timeout_s=SLEEP_DEADLINE_S)
            return
        await self._call("POST", "/wake_up?tags=weights", timeout_s=SLEEP_DEADLINE_S)
        await self._call("POST", "/collective_rpc", {"method": "reload_weights"}, timeout_s=SLEEP_DEADLINE_S)
        await self._call("POST", "/wake_up?tags=kv_cache", timeout_s=SLEEP_DEADLINE_S)

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        if self._is_closed:
            raise Unreachable(f"{self.root}{path}: the server was stopped")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    force_close=True
                ),  # because the server closes idle connections at any time
                headers={"Authorization": f"Bearer {self._key}"},
                trust_env=False,
            )
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self.root + path, json=body, headers=headers, timeout=timeout
            ) as response:
                answer = await read_answer(response)
        except TimeoutError as error:
            raise Unreachable(f"{self.root}{path}: no answer within {timeout_s:.0f} s") from error
        except AnswerTooLarge as error:
            raise EngineError(f"{self.root}{path}: {error}") from error
        except aiohttp.ClientError as error:
            raise Unreachable(f"{self.root}{path}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise Refused(f"{self.root}{path}: {response.status}: {self._message(answer)}", response.status)
        return _json(answer)

    def _message(self, answer: bytes) -> str:
        text = (read_error(answer).message or answer[:300].decode(errors="replace")).strip()
        return Secrets([self._key or ""]).redact(text[: 2 * MAX_MESSAGE])[:MAX_MESSAGE] or "no reason given"


def _json(answer: bytes) -> Json:
    """Returns the answer's JSON object; empty if it is something else (vLLM answers "Success" in plain text)."""
    try:
        fields = msgspec.json.decode(answer)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _scored(choice: Json, token_ids: list[int]) -> Scored:
    top = choice["logprobs"]["top_logprobs"][0]
    given = choice.get("prompt_logprobs") or [None]
    after_first = zip(token_ids[1:], given[1:], strict=False)
    return Scored(
        logprobs=[float(found[str(token_id)]["logprob"]) for token_id, found in after_first],
        next={int(token.removeprefix("token_id:")): float(logprob) for token, logprob in top.items()},
    )
