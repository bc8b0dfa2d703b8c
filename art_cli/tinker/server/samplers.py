"""Samplers: the sampling sessions of clients: on the base, on saved checkpoints, on copies of weights in training.

A policy is opened when it is first sampled from (open_policies.py). It proves its weights before a client gets a
sample.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.requests import Request
from art_cli.runtime import threads
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base, ClientLearner
from art_cli.tinker.server.checkpoint_store import Place, Store, parse
from art_cli.tinker.server.futures import FutureAnswer
from art_cli.tinker.server.hosts import OpenPolicy, PolicyHost, SampledPolicy
from art_cli.tinker.server.open_policies import OpenPolicies
from art_cli.tinker.server.sample_requests import SampleRequest, sample_answer, sampling_request

MAX_SAMPLERS = 1000  # sampling sessions of one client
SAMPLE_DEADLINE_S = 3600.0  # longest time that one request is sampled


@dataclass(eq=False)
class SamplingSession:
    """One sampling session of a client."""

    id: str
    owner: str
    policy: SampledPolicy
    model_path: str | None
    model: str | None = None  # the model in training whose copy it samples from


class Samplers:
    def __init__(self, base: Base, store: Store, host: PolicyHost, limits: BackendLimits) -> None:
        self._base, self._store, self._limits = base, store, limits
        self.samplers: OrderedDict[str, SamplingSession] = OrderedDict()
        self.policies = OpenPolicies(host)

    def get(self, id: str, owner: str) -> SamplingSession:
        """Raises ChatError 404 if this client has no such sampling session."""
        found = self.samplers.get(id)
        if found is None or found.owner != owner:
            raise ChatError(404, f"no sampling session {id[:200]!r}; it ended, or newer ones of its model replaced it")
        return found

    async def add(self, id: str, owner: str, at: Place | None) -> None:
        """Makes a sampling session of a checkpoint, or of the base. The client's oldest one makes room.

        Raises ChatError 404 if there is no such checkpoint.
        """
        if (known := self.samplers.get(id)) is not None:
            if known.owner != owner or known.model_path != (at.uri if at else None):
                raise invalid(f"{id}: another sampling session was made under this number")
            return
        self.samplers[id] = SamplingSession(id, owner, self._policy_of(at, owner), at.uri if at else None)
        for old in [sampler for sampler in self.samplers.values() if sampler.owner == owner][:-MAX_SAMPLERS]:
            await self._end(old)

    def _policy_of(self, at: Place | None, owner: str) -> SampledPolicy:
        path = None if at is None else self._store.readable(at, owner)  # verified when it is opened
        key = "base" if at is None else f"{at.uri}@{self._written(at)}"  # a checkpoint may be overwritten
        return self.policies.get(key, lambda: SampledPolicy(key, path))

    def _written(self, at: Place) -> float:
        notes = self._store.notes(at)
        return notes.created if notes is not None else 0.0

    async def add_snapshot(self, id: str, owner: str, model: str, learner: ClientLearner) -> None:
        """Makes a sampling session of a copy of a model's weights. Raises DriftError if the engine has others."""
        policy = await threads.compute(self.policies.host.copy, id, learner)
        self.policies.add(policy)
        try:
            async with self.policies.using(policy, _drop_reason):
                pass  # opening it proves its weights
        except BaseException:
            await self.policies.drop(policy)
            raise
        self.samplers[id] = SamplingSession(id, owner, policy, None, model)
        mine_now = [sampler for sampler in self.samplers.values() if sampler.model == model]
        for old in mine_now[: -self._limits.snapshots]:
            await self._end(old)

    async def forget(self, model: str) -> None:
        """Ends the sampling sessions of a model that is unloaded."""
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

    async def close(self) -> None:
        await self.policies.close()

    # --- sampling -----------------------------------------------------------------------------------------------------

    def prepare(self, request: SampleRequest, owner: str) -> tuple[SampledPolicy, Request]:
        """Returns the policy and the request to sample. Raises ChatError with what is wrong with the request."""
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
        """Returns the samples, and if wanted the prompt's logprobs: of its last `last_n` tokens, or all if None.

        `on_wait` gets the reason while the request waits for room.
        """
        assert isinstance(request.prompt, list)
        async with self.policies.using(policy, on_wait) as opened:
            scores = await _prompt_scores(opened, request.prompt, last_n) if wants_prompt else None
            async with asyncio.timeout(SAMPLE_DEADLINE_S):
                reply = await opened.reply(request)
        return sample_answer(reply, scores)


async def _prompt_scores(opened: OpenPolicy, prompt: list[int], last_n: int | None) -> list[float]:
    """Returns [L] logprobs of the prompt's tokens. The first one's, and those before the last `last_n`, are NaN."""
    scores = [float("nan"), *await opened.score(prompt)]
    hidden = 0 if last_n is None else max(0, len(scores) - last_n)
    scores[:hidden] = [float("nan")] * hidden
    return scores


def _drop_reason(reason: str) -> None:
    """Drops the reason, for a request that has another reason for waiting."""
