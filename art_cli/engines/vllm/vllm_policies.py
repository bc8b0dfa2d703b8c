"""VllmPolicies: several policies in one vLLM server, an adapter each.

    VllmPolicies.open(adapter) -> VllmPolicy: scores, replies; close() unloads it

VllmPolicies is a VllmEngine that never loads. Its server is restarted once if it dies, and policies reload
their adapters on next use. Every load uses a new name, so prefix caches are never stale.
"""

import asyncio
import contextlib
import itertools
import math
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.client import HttpBackend
from art_cli.chat.replies import Choice, Reply
from art_cli.chat.requests import Request
from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines.proof import WeightProof
from art_cli.engines.vllm.control import FILES, LoadedAdapters, Unreachable
from art_cli.engines.vllm.shared_server import MAX_RESTARTS
from art_cli.engines.vllm.vllm_engine import NOTICE_S, VllmEngine, complete_logprobs, until
from art_cli.engines.vllm.vllm_server import OwnServer
from art_cli.models.policy_spec import PolicySpec
from art_cli.runs.manifest import Probe
from art_cli.runtime.errors import CheckpointError, EngineError

Result = TypeVar("Result")


class VllmPolicies(VllmEngine):
    """One server for several policies."""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, logs: Path) -> None:
        super().__init__(config, model, name="policy", logs=logs)
        self.max_length, self.timeout_s = model.max_length, config.timeout_s
        self._numbers = itertools.count(1)
        # Clients sample and score concurrently all the time, and the GPU of a server at an address is unknown.
        self._scores_alone = not (isinstance(self._server, OwnServer) and self._server.has_gpu)
        self.policies: set[VllmPolicy] = set()  # open policies
        self.proof = WeightProof()
        self._own = secrets.token_hex(4)  # distinguishes our names from leftovers in a running server

    async def open(self, adapter: Path | None, probe: Probe) -> "VllmPolicy":
        """Returns the policy for an adapter directory, which must exist until `close`, or for the base model.

        Raises CheckpointError without an adapter; DriftError if the server has different weights; EngineError if
        the server rejects the adapter or is permanently gone.
        """
        if adapter is not None and (missing := [name for name in FILES if not (adapter / name).is_file()]):
            raise CheckpointError(f"{adapter}: no {missing[0]}: not a LoRA adapter")
        policy = VllmPolicy(self, adapter, probe)
        await policy.ask(_nothing)
        return policy

    async def close(self) -> None:
        """Stops an own server. A running server is restored to its original state."""
        for policy in list(self.policies):
            await policy.close(unload=not self._shared.is_own)
        await super().close()

    def new_name(self) -> str:
        return f"policy-{self._own}@{next(self._numbers):04d}"

    async def is_lost(self, adapters: LoadedAdapters) -> bool:
        """Returns True if the server died during a failed call. Always False for a server at an address."""
        if not self.pid:
            return False
        with contextlib.suppress(EngineError):
            await until(partial(self._is_lost, adapters), NOTICE_S, "it lives")
            return True
        return False


class VllmPolicy:
    """One adapter in the server, or the base model. Its weights are proven after each load into a server."""

    def __init__(self, server: VllmPolicies, adapter: Path | None, probe: Probe) -> None:
        self._server, self._adapter, self._probe = server, adapter, probe
        self._loaded: tuple[LoadedAdapters, HttpBackend] | None = None  # the server with this policy, and its client
        self._loading = asyncio.Lock()

    async def score(self, token_ids: list[int]) -> list[float]:
        """Returns [L - 1] logprobs in nats for every token except the initial one, at temperature 1, uncached."""
        return await self.ask(partial(self._score, token_ids=token_ids))

    async def reply(self, request: Request) -> Reply:
        """Samples a reply to token ids, including every token's logprob under the policy (`raw_logprobs`)."""
        assert isinstance(request.prompt, list), "clients' prompts are token ids"
        asked = self._bounded(request, request.prompt)

        async def reply(client: HttpBackend, adapters: LoadedAdapters) -> Reply:
            async with self._server.sampling():
                return await client.reply(asked)

        found = await self.ask(reply)
        for choice in found.choices:
            complete_logprobs(asked, choice)
        unknown = [choice for choice in found.choices if choice.raw_logprobs is None]
        await asyncio.gather(*(self._score_choice(request.prompt, choice) for choice in unknown))
        _check(found)
        return found

    async def close(self, *, unload: bool = True) -> None:
        """Unloads the policy, unless its server is already gone."""
        self._server.policies.discard(self)
        if self._loaded is None:
            return
        (there, client), self._loaded = self._loaded, None
        await client.close()
        if unload and self._adapter is not None:
            await there.control.unload_adapter(client.model)

    async def ask(self, work: Callable[[HttpBackend, LoadedAdapters], Awaitable[Result]]) -> Result:
        """Returns the result of `work`, again after a restart of the server. Raises EngineError or ChatError."""
        for number in range(MAX_RESTARTS + 1):
            adapters = await self._server.ready_adapters()
            try:
                return await work(await self._ready(adapters), adapters)
            except (Unreachable, ChatError) as error:
                is_refused = isinstance(error, ChatError) and error.status < 500
                if is_refused or number == MAX_RESTARTS or not await self._server.is_lost(adapters):
                    raise
        raise AssertionError("the last round returns or raises")

    async def _ready(self, adapters: LoadedAdapters) -> HttpBackend:
        """Returns this policy's client in the given server, loading the adapter if necessary."""
        async with self._loading:
            if self._loaded is not None:
                there, client = self._loaded
                if there is adapters:
                    return client
                self._loaded = None
                await client.close()
            self._server.policies.add(self)
            client = self._server.make_backend(await self._load(adapters), 0)
            self._loaded = adapters, client
            try:
                found = await self._score(client, adapters, self._probe.tokens)
                self._server.proof.check([found], self._probe, dtype=self._server.dtype)
            except BaseException:
                await self.close()
                raise
            return client

    async def _score(self, client: HttpBackend, adapters: LoadedAdapters, token_ids: list[int]) -> list[float]:
        timeout_s = self._server.timeout_s
        async with self._server.scoring():
            found = await adapters.control.score(client.model, token_ids, is_cached=False, timeout_s=timeout_s)
        return found.logprobs

    async def _load(self, adapters: LoadedAdapters) -> str:
        if self._adapter is None:
            return adapters.current.name
        name = self._server.new_name()
        await adapters.control.load_adapter(name, self._adapter.resolve())
        return name

    async def _score_choice(self, prompt: list[int], choice: Choice) -> None:
        """Adds the policy's own logprobs, which vLLM omits at other temperatures or with cuts."""
        scores = await self.score([*prompt, *choice.token_ids])
        choice.raw_logprobs = scores[len(prompt) - 1 :]

    def _bounded(self, request: Request, prompt: list[int]) -> Request:
        """Limits the reply so that it can be scored within the context, because scoring samples a token."""
        sampling, room = request.sampling, self._server.max_length - len(prompt)
        if sampling.temperature not in (0, 1) or sampling.top_p < 1 or sampling.top_k:
            room -= 1
        bound = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if bound < 1:
            raise ChatError(400, f"prompt: {len(prompt)} tokens leave no room in the context")
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(sampling, max_tokens=bound))


async def _nothing(client: HttpBackend, adapters: LoadedAdapters) -> None:
    """Makes the policy ready without using it."""


def _check(reply: Reply) -> None:
    """Raises EngineError if tokens and logprobs do not match."""
    for choice in reply.choices:
        logprobs = choice.raw_logprobs or []
        if len(logprobs) != len(choice.token_ids) or not all(map(math.isfinite, logprobs)):
            raise EngineError(
                f"vLLM gave {len(choice.token_ids)} tokens and {len(logprobs)} logprobs; is its logprobs-mode "
                "processed_logprobs?"
            )
