"""Samplers: clients' sampling sessions, on the base model, saved checkpoints, or copies of weights in training.

A request is decoded, checked, converted for the engine, sampled, and answered in JSON or protocol buffers. OpenPolicies
keeps a limited number of policies open; requests for other policies wait. A policy is opened on first use, and its
weights are proven before any sample is returned.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.runtime import threads
from art_cli.tinker.server import BackendLimits, Count, Positive, Seed, SequenceNumber, passes
from art_cli.tinker.server.base_model import Base, ClientLearner
from art_cli.tinker.server.checkpoint_store import Place, Store, parse
from art_cli.tinker.server.futures import SMALL, FutureAnswer
from art_cli.tinker.server.hosts import OpenPolicy, PolicyHost, SampledPolicy
from art_cli.tinker.server.passes import ModelInput
from art_cli.tinker.server.protobuf import messages

REFUSED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")
MAX_STOPS = 64
TOKEN_BYTES = 100  # memory per sampled token: id and two logprobs as Python numbers, plus text
ROOM_DEADLINE_S = 3600.0  # maximum wait for room
MAX_SAMPLERS = 1000  # sampling sessions per client
SAMPLE_DEADLINE_S = 3600.0  # maximum sampling time per request


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: Positive | None = None
    seed: Seed | None = None
    stop: str | list[str | Count] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0


class SampleRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Positive = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: SequenceNumber | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: Count = 0
    prompt_logprobs_last_n: Count | None = None
    record_stability_info: bool | None = None
    type: str = "sample"


def sampling_request(request: SampleRequest, base: Base, *, max_samples: int) -> Request:
    """Returns the request for the engine. Raises ChatError 400 for invalid requests."""
    for name in REFUSED:
        if getattr(request, name):
            raise invalid(f"{name}: not served here")
    if request.record_stability_info:
        raise invalid("record_stability_info: not served here, because stable_reinforce is not")
    asked, ids = request.sampling_params, passes.token_ids(request.prompt)
    if request.num_samples > max_samples:
        raise invalid(f"num_samples {request.num_samples}: between 1 and {max_samples}")
    if not ids or min(ids) < 0 or max(ids) >= base.vocabulary:
        raise invalid("prompt: it is empty, or holds a token that the model does not have")
    room = base.max_length - len(ids)
    if room < 1 or (asked.max_tokens is not None and asked.max_tokens > room):
        raise invalid(f"prompt: {len(ids)} tokens and max_tokens {asked.max_tokens}; the context is {base.max_length}")
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if len(stop) > MAX_STOPS or any(isinstance(each, str) and not 0 < len(each) <= 1000 for each in stop):
        raise invalid(f"sampling_params.stop: at most {MAX_STOPS}, none of them empty or over 1000 characters")
    sampling = Sampling(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(0, asked.top_k),
        max_tokens=room if asked.max_tokens is None else asked.max_tokens,
        stop=tuple(each for each in stop if isinstance(each, str)),
        stop_ids=tuple(each for each in stop if isinstance(each, int)),
        seed=None if asked.seed is None else asked.seed % 2**63,
        n=request.num_samples,
    )
    return Request(model="policy", prompt=ids, sampling=sampling, caps_tokens=True)


def _logprobs(choice: Any) -> list[float]:
    """Returns the policy's own logprobs at temperature 1, matching forward_backward."""
    found: list[float] = choice.logprobs if choice.raw_logprobs is None else choice.raw_logprobs
    return found


def _as_json(reply: Reply, scores: list[float] | None) -> dict[str, Any]:
    sequences = [
        {
            "stop_reason": "length" if choice.finish_reason == "length" else "stop",
            "tokens": choice.token_ids,
            "logprobs": _logprobs(choice),
        }
        for choice in reply.choices
    ]
    prompt = None if scores is None else [None if score != score else score for score in scores]
    return {"type": "sample", "sequences": sequences, "prompt_logprobs": prompt}


def _as_proto(reply: Reply, scores: list[float] | None) -> bytes:
    sequences = [
        messages.SampledSequence(
            stop_reason=int(choice.finish_reason == "length"),
            tokens=np.array(choice.token_ids, "<i4").tobytes(),
            logprobs=np.array(_logprobs(choice), "<f4").tobytes(),
        )
        for choice in reply.choices
    ]
    prompt = None if scores is None else np.array(scores, "<f4").tobytes()
    raw: bytes = messages.SampleResponse(sequences=sequences, prompt_logprobs=prompt).SerializeToString()
    return raw


class OpenPolicies:
    """Policies by key. The base model needs no room."""

    def __init__(self, host: PolicyHost) -> None:
        self.host = host
        self._policies: OrderedDict[str, SampledPolicy] = OrderedDict()  # least recently used first
        self._leaving: set[SampledPolicy] = set()  # dropped but still in use
        self._entering = asyncio.Lock()  # fair, so busy policies cannot starve others
        self._freed = asyncio.Event()

    def get(self, key: str, make: Callable[[], SampledPolicy]) -> SampledPolicy:
        if key not in self._policies:
            self._policies[key] = make()
        return self._policies[key]

    def add(self, policy: SampledPolicy) -> None:
        self._policies[policy.key] = policy

    @contextlib.asynccontextmanager
    async def using(self, policy: SampledPolicy, on_wait: Callable[[str], None]) -> AsyncIterator[OpenPolicy]:
        """Keeps the policy open during the block. `on_wait` gets the reason for waiting. Raises ChatError 503."""
        await self._enter(policy, on_wait)
        if not policy.is_base and self._policies.get(policy.key) is not policy:
            self._leaving.add(policy)  # dropped while this request waited for room
        try:
            async with policy.lock:
                if policy.opened is None:
                    policy.opened = await self.host.open(policy)
                opened = policy.opened
            yield opened
        finally:
            policy.num_users -= 1
            if policy in self._leaving and not policy.num_users:
                await self._end(policy)
            self._freed.set()

    def can_enter(self, policy: SampledPolicy) -> bool:
        """Returns True if a request for the policy can start without waiting."""
        return not self._entering.locked() and (self._has_room(policy) or self._idle() is not None)

    async def _enter(self, policy: SampledPolicy, on_wait: Callable[[str], None]) -> None:
        if policy.is_base:
            policy.num_users += 1
            return
        if self._entering.locked() or not self._has_room(policy):
            on_wait(f"{self.host.num_open} adapters are sampled from at once")
        try:
            async with asyncio.timeout(ROOM_DEADLINE_S), self._entering:
                while not self._has_room(policy):
                    self._freed.clear()
                    idle = self._idle()
                    if idle is None:
                        await self._freed.wait()
                    else:
                        await self._close(idle)
                policy.num_users += 1
        except TimeoutError:
            raise ChatError(503, f"no room to sample from another adapter within {ROOM_DEADLINE_S:g} s") from None
        on_wait("")
        if policy.key in self._policies:
            self._policies.move_to_end(policy.key)

    def _has_room(self, policy: SampledPolicy) -> bool:
        return _takes_room(policy) or sum(map(_takes_room, self._all())) < self.host.num_open

    def _idle(self) -> SampledPolicy | None:
        """Returns the least recently used open policy without users."""
        return next((each for each in self._all() if each.opened is not None and not each.num_users), None)

    def _all(self) -> list[SampledPolicy]:
        return [policy for policy in (*self._policies.values(), *self._leaving) if not policy.is_base]

    async def drop(self, policy: SampledPolicy) -> None:
        """Refuses new sampling requests for the policy. Running requests finish."""
        self._policies.pop(policy.key, None)
        if policy.num_users:
            self._leaving.add(policy)
        else:
            await self._end(policy)

    async def close(self) -> None:
        for policy in [*self._policies.values(), *self._leaving]:
            await self._end(policy)
        self._policies.clear()
        await self.host.close()

    async def _end(self, policy: SampledPolicy) -> None:
        self._leaving.discard(policy)
        await self._close(policy)
        policy.forget()
        self._freed.set()

    @staticmethod
    async def _close(policy: SampledPolicy) -> None:
        opened, policy.opened = policy.opened, None
        if opened is not None:
            await opened.close()


def _takes_room(policy: SampledPolicy) -> bool:
    return policy.opened is not None or policy.num_users > 0


@dataclass(eq=False)
class SamplingSession:
    id: str
    owner: str
    policy: SampledPolicy
    model_path: str | None
    model: str | None = None  # id of the model in training, for a copy of its weights


class Samplers:
    def __init__(self, base: Base, store: Store, host: PolicyHost, limits: BackendLimits) -> None:
        self._base, self._store, self._limits = base, store, limits
        self.samplers: OrderedDict[str, SamplingSession] = OrderedDict()
        self.policies = OpenPolicies(host)

    def get(self, id: str, owner: str) -> SamplingSession:
        """Returns the client's sampling session. Raises ChatError 404 for unknown sessions."""
        found = self.samplers.get(id)
        if found is None or found.owner != owner:
            raise ChatError(404, f"no sampling session {id[:200]!r}; it ended, or newer ones of its model replaced it")
        return found

    async def add(self, id: str, owner: str, at: Place | None) -> None:
        """Adds a sampling session; the client's oldest makes room. Raises ChatError 404 for unknown checkpoints."""
        if (known := self.samplers.get(id)) is not None:
            if known.owner != owner or known.model_path != (at.uri if at else None):
                raise invalid(f"{id}: another sampling session was made under this number")
            return
        self.samplers[id] = SamplingSession(id, owner, self._policy_of(at, owner), at.uri if at else None)
        for old in [sampler for sampler in self.samplers.values() if sampler.owner == owner][:-MAX_SAMPLERS]:
            await self._end(old)

    def _policy_of(self, at: Place | None, owner: str) -> SampledPolicy:
        if at is None:
            return self.policies.get("base", lambda: SampledPolicy("base"))
        path, notes = self._store.readable(at, owner), self._store.notes(at)  # verified when opened
        key = f"{at.uri}@{notes.created if notes is not None else 0.0}"  # checkpoints may be overwritten
        return self.policies.get(key, lambda: SampledPolicy(key, path))

    async def add_snapshot(self, id: str, owner: str, model: str, learner: ClientLearner) -> None:
        """Adds a sampling session for a copy of a model's weights. Raises DriftError if the engine's weights differ."""
        if id in self.samplers:
            raise invalid(f"{id}: another sampling session was made under this number")
        policy = await threads.compute(self.policies.host.copy, id, learner)
        self.policies.add(policy)
        try:
            # otherwise wait at the first request, so training of other clients is not delayed
            if self.policies.can_enter(policy):
                async with self.policies.using(policy, lambda reason: None):
                    pass  # opening proves the weights
        except BaseException:
            await self.policies.drop(policy)
            raise
        self.samplers[id] = SamplingSession(id, owner, policy, None, model)
        mine_now = [sampler for sampler in self.samplers.values() if sampler.model == model]
        for old in mine_now[: -self._limits.snapshots]:
            await self._end(old)

    async def forget(self, model: str) -> None:
        for sampler in [sampler for sampler in self.samplers.values() if sampler.model == model]:
            await self._end(sampler)

    async def end_session(self, session: str) -> None:
        for sampler in [each for each in self.samplers.values() if each.id.startswith(f"{session}:")]:
            await self._end(sampler)

    async def _end(self, sampler: SamplingSession) -> None:
        self.samplers.pop(sampler.id, None)
        is_used = any(each.policy is sampler.policy for each in self.samplers.values())
        if not (sampler.policy.is_base or is_used):
            await self.policies.drop(sampler.policy)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def prepare(self, request: SampleRequest, owner: str) -> tuple[SampledPolicy, Request]:
        """Returns the policy and the engine request. Raises ChatError for invalid requests."""
        if request.sampling_session_id is not None:
            policy = self.get(request.sampling_session_id, owner).policy
        else:
            self._base.check(request.base_model)
            policy = self._policy_of(None if request.model_path is None else parse(request.model_path), owner)
        return policy, sampling_request(request, self._base, max_samples=self._limits.samples)

    async def sample(
        self,
        policy: SampledPolicy,
        request: Request,
        *,
        last_n: int | None,
        wants_prompt: bool,
        on_wait: Callable[[str], None],
    ) -> FutureAnswer:
        """Returns samples, and logprobs of the last `last_n` prompt tokens, by default all. `on_wait` gets reasons."""
        assert isinstance(request.prompt, list)
        async with self.policies.using(policy, on_wait) as opened:
            scores = None
            if wants_prompt:  # [L]: the initial token and tokens before the last `last_n` have NaN
                scores = [float("nan"), *await opened.score(request.prompt)]
                hidden = 0 if last_n is None else max(0, len(scores) - last_n)
                scores[:hidden] = [float("nan")] * hidden
            async with asyncio.timeout(SAMPLE_DEADLINE_S):
                reply = await opened.reply(request)
        num_tokens = sum(len(choice.token_ids) for choice in reply.choices) + len(scores or ())
        size = SMALL + TOKEN_BYTES * num_tokens
        return FutureAnswer(lambda: _as_json(reply, scores), lambda: _as_proto(reply, scores), size)
