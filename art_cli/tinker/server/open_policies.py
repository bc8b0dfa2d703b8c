"""OpenPolicies: the policies that are open for sampling, a few at once. A request for another one waits."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from art_cli.chat.chat_errors import ChatError
from art_cli.tinker.server.hosts import OpenPolicy, PolicyHost, SampledPolicy

ROOM_DEADLINE_S = 3600.0  # longest wait for room


class OpenPolicies:
    """Policies by their keys. The base needs no room."""

    def __init__(self, host: PolicyHost) -> None:
        self.host = host
        self._policies: OrderedDict[str, SampledPolicy] = OrderedDict()  # the ones used last come last
        self._leaving: set[SampledPolicy] = set()  # dropped, and still in use
        self._entering = asyncio.Lock()  # fair, so that policies in constant use cannot keep others out
        self._freed = asyncio.Event()

    def get(self, key: str, make: Callable[[], SampledPolicy]) -> SampledPolicy:
        if key not in self._policies:
            self._policies[key] = make()
        return self._policies[key]

    def add(self, policy: SampledPolicy) -> None:
        self._policies[policy.key] = policy

    @contextlib.asynccontextmanager
    async def using(self, policy: SampledPolicy, on_wait: Callable[[str], None]) -> AsyncIterator[OpenPolicy]:
        """Holds the policy open for the block. `on_wait` gets the reason where it has to wait for room.

        Raises ChatError 503 if there was no room in time.
        """
        await self._enter(policy, on_wait)
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

    async def _enter(self, policy: SampledPolicy, on_wait: Callable[[str], None]) -> None:
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
        return policy.is_base or _takes_room(policy) or sum(map(_takes_room, self._all())) < self.host.num_open

    def _idle(self) -> SampledPolicy | None:
        """Returns the open policy that is not in use and was not used for longest."""
        return next((each for each in self._all() if each.opened is not None and not each.num_users), None)

    def _all(self) -> list[SampledPolicy]:
        return [policy for policy in (*self._policies.values(), *self._leaving) if not policy.is_base]

    async def drop(self, policy: SampledPolicy) -> None:
        """Lets no more requests sample from it. Requests that sample from it now are answered first."""
        self._policies.pop(policy.key, None)
        if policy.num_users:
            self._leaving.add(policy)
        else:
            await self._end(policy)

    async def close(self) -> None:
        """Closes all, also those in use."""
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
