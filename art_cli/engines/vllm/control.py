"""Control calls to a vLLM server: health, adapters, scores, sleep. HTTP and JSON; client requests use another path.

Each call has a deadline. `Refused` is an error reported by the server. `Unreachable` means no answer; the call can be
repeated once a new server has started. Ready tracks whether a server answers: not now, yes, or never again.

LoadedAdapters decides which adapter a server samples from, its name, and when to unload old adapters. Every adapter
gets a name that is unique within the server (`policy@0007`). vLLM's prefix cache is keyed by name, so requests never
reuse keys and values from other weights. A request keeps its adapter until the end. A replaced adapter is unloaded once
idle.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import aiohttp
import msgspec

from art_cli.chat import EngineLoad
from art_cli.chat.client import AnswerTooLarge, HttpBackend, read_answer, read_error
from art_cli.chat.requests import Json
from art_cli.runtime.errors import CheckpointError, EngineError
from art_cli.runtime.secrets import Secrets

log = logging.getLogger(__name__)

METRICS_DEADLINE_S = 5.0  # late samples are useless
CALL_DEADLINE_S = 60.0
ADAPTER_DEADLINE_S = 300.0  # enough for a large model's adapter on a slow disk
SLEEP_DEADLINE_S = 300.0  # enough to move all weights to host memory
MAX_MESSAGE = 10_000  # characters shown from a server error
NUM_TOP = 20  # vLLM's own limit unless the user raises it (--max-logprobs)
FILES = ("adapter_config.json", "adapter_model.safetensors")
# vLLM gauges, one line per replica: vllm:num_requests_running{engine="0",model_name="m"} 3.0
_GAUGE = re.compile(
    r"(?m)^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)(?:\{.*\})? ([\d.e+-]+)$"
)
MakeBackend = Callable[[str, int], HttpBackend]  # (served name, step) -> client for this adapter


class Ready:
    """Whether the server answers: not now, yes, or never again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._decided = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""

    @property
    def is_set(self) -> bool:
        return self._decided.is_set() and not self._failed.is_set()

    def set(self) -> None:
        self._decided.set()

    def clear(self) -> None:
        self._decided.clear()

    def fail(self, message: str) -> None:
        """Records a permanent failure. Only the original message is kept."""
        self._failure = self._failure or message
        self._failed.set()
        self._decided.set()

    async def wait(self) -> None:
        """Returns when the server answers. Raises EngineError if it never will again, or is not back in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._decided.wait()
        except TimeoutError:
            raise EngineError(f"vllm: not back within {self._timeout_s:g} s (engine.start_timeout_s)") from None
        if self._failed.is_set():
            raise EngineError(self._failure)

    async def failure(self) -> NoReturn:
        await self._failed.wait()
        raise EngineError(self._failure)


class Unreachable(EngineError):
    """The server did not answer: it is gone or hangs."""


class Refused(EngineError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Scored(msgspec.Struct, frozen=True):
    """The server's logprobs for L tokens, in nats. Example: Scored(logprobs=[-3.6, -5.8], next={7: -0.2, 9: -1.9})"""

    logprobs: list[float]  # [L - 1] for every token except the initial one, at temperature 1; empty unless requested
    next: dict[int, float]  # likeliest next tokens: token id -> logprob at the requested temperature


class Control:
    """One server at `root` (`http://127.0.0.1:8000`)."""

    def __init__(self, root: str, key: str) -> None:
        self.root = root.rstrip("/")
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def is_healthy(self, *, timeout_s: float) -> bool:
        """Returns False if the server reports that its engine died. Raises Unreachable."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except Refused as refusal:
            if refusal.status == 503:
                return False
            raise
        return True

    async def models(self) -> list[str]:
        """Returns all served names, including adapters. The base model comes first."""
        answer = await self._call("GET", "/v1/models", timeout_s=CALL_DEADLINE_S)
        return [model["id"] for model in answer["data"]]

    async def load(self) -> EngineLoad | None:
        """Returns all replicas' requests, and the highest memory use; None without such metrics."""
        answer = await self._answer("GET", "/metrics", timeout_s=METRICS_DEADLINE_S)
        return parse_metrics(answer.decode("utf-8", "replace"))

    async def load_adapter(self, name: str, path: Path) -> None:
        body = {"lora_name": name, "lora_path": str(path)}
        await self._call("POST", "/v1/load_lora_adapter", body, timeout_s=ADAPTER_DEADLINE_S)

    async def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Failures are only logged, because a leftover adapter merely costs memory."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name}, timeout_s=CALL_DEADLINE_S)
        except EngineError as error:
            log.info("%s was not unloaded: %s", name, error)

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
        """Returns logprobs under `model`, through the server's prefix cache if `is_cached`.

        vLLM skips the prefix cache exactly when prompt logprobs are requested. `rank` selects a replica.
        """
        wanted: Json = {"logprobs": NUM_TOP, "return_tokens_as_token_ids": True}
        if not is_cached:
            wanted["prompt_logprobs"] = 0
        sampling = {"max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": 0}
        body = {"model": model, "prompt": token_ids, **sampling, **wanted}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer = await self._call("POST", "/v1/completions", body, timeout_s=timeout_s, headers=headers)
        try:
            return _scored(answer["choices"][0], token_ids)
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"{self.root}: no logprobs in its reply ({type(error).__name__}: {error})") from error

    async def sleep(self, level: int) -> None:
        """Frees GPU memory once the requests in flight are answered. The prefix cache is lost."""
        await self._call("POST", f"/sleep?level={level}&mode=wait", timeout_s=SLEEP_DEADLINE_S)

    async def wake(self, *, reload_base: bool) -> None:
        """Reclaims the memory. `reload_base` reads base weights from disk, after sleep level 2."""
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

    async def _call(self, method: str, path: str, body: Json | None = None, **options: Any) -> Json:
        return _json(await self._answer(method, path, body, **options))

    async def _answer(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        if self._is_closed:
            raise Unreachable(f"{self.root}{path}: the server was stopped")
        if self._session is None:
            # The server closes idle connections at any time.
            connector = aiohttp.TCPConnector(force_close=True)
            headers_always = {"Authorization": f"Bearer {self._key}"}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers_always, trust_env=False)
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
        return answer

    def _message(self, answer: bytes) -> str:
        text = (read_error(answer).message or answer[:300].decode(errors="replace")).strip()
        return Secrets([self._key or ""]).redact(text[: 2 * MAX_MESSAGE])[:MAX_MESSAGE] or "no reason given"


def parse_metrics(text: str) -> EngineLoad | None:
    """Returns the load from a server's answer in Prometheus format; None without request counts."""
    found: dict[str, list[float]] = {}
    for name, value in _GAUGE.findall(text):
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(value)):
                found.setdefault(name, []).append(number)
    running, waiting = (found.get(f"num_requests_{kind}") for kind in ("running", "waiting"))
    if running is None or waiting is None:
        return None
    return EngineLoad(round(sum(running)), round(sum(waiting)), memory=max(found.get("kv_cache_usage_perc", [0.0])))


def _json(answer: bytes) -> Json:
    """Returns the answer's JSON object; empty for anything else (vLLM answers "Success" in plain text)."""
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


class Adapter:
    """A served name, and how many requests use it."""

    def __init__(self, name: str, backend: HttpBackend, *, is_base: bool = False) -> None:
        self.name, self.backend, self.is_base = name, backend, is_base
        self.num_requests = 0


class LoadedAdapters:
    """An engine's adapters in one server: the base model initially, then the adapter from each `load`."""

    def __init__(
        self, control: Control, make_backend: MakeBackend, *, base: str, prefix: str, step: int, names: set[str]
    ) -> None:
        """`base` is the served name of the base model, `prefix` the common prefix of adapter names.

        `names` are the adapter names that the server has had so far. A new name is added and never used again.
        """
        self.control = control
        self.current = Adapter(base, make_backend(base, step), is_base=True)
        self._make_backend, self._prefix = make_backend, prefix
        self._names = names
        self._alive = {self.current}
        self._ends: set[asyncio.Task[None]] = set()  # adapters being unloaded

    @property
    def num_requests(self) -> int:
        return sum(adapter.num_requests for adapter in self._alive)

    async def load(self, path: Path, step: int) -> None:
        """Serves new requests from the adapter at `path`. Raises CheckpointError if it is missing; EngineError."""
        path = path.resolve()
        if missing := [name for name in FILES if not (path / name).is_file()]:
            raise CheckpointError(f"{path}: no {missing[0]}: not a LoRA adapter, and vLLM swaps adapters only")
        name = self._new_name(step)
        await self.control.load_adapter(name, path)
        old, self.current = self.current, Adapter(name, self._make_backend(name, step))
        self._alive.add(self.current)
        self._end_unused(old)

    @contextlib.contextmanager
    def lease(self) -> Iterator[HttpBackend]:
        """Yields the current adapter's client. The adapter is not unloaded in the meantime."""
        adapter = self.current
        adapter.num_requests += 1
        try:
            yield adapter.backend
        finally:
            adapter.num_requests -= 1
            self._end_unused(adapter)

    async def close(self, *, unload: bool) -> None:
        """Cancels requests in flight. `unload` restores a server that keeps running to its original state."""
        await asyncio.gather(*self._ends)
        for adapter in list(self._alive):
            await self._end(adapter, unload=unload)

    def _new_name(self, step: int) -> str:
        """Returns `policy@0007`, or `policy@0007.2` for the step's second adapter."""
        plain = f"{self._prefix}@{step:04d}"
        names = itertools.chain([plain], (f"{plain}.{number}" for number in itertools.count(2)))
        name = next(name for name in names if name not in self._names)
        self._names.add(name)
        return name

    def _end_unused(self, adapter: Adapter) -> None:
        if adapter is not self.current and adapter.num_requests == 0 and adapter in self._alive:
            task = asyncio.get_running_loop().create_task(self._end(adapter, unload=True))
            self._ends.add(task)
            task.add_done_callback(self._ends.discard)

    async def _end(self, adapter: Adapter, *, unload: bool) -> None:
        self._alive.discard(adapter)
        await adapter.backend.close()
        if unload and not adapter.is_base:
            await self.control.unload_adapter(adapter.name)
