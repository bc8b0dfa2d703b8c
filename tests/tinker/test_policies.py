"""Room for policies: how many are open at once, who waits, who makes room, and what is closed when."""

import asyncio
from pathlib import Path
from typing import Any

from art_cli.chat.replies import Reply
from art_cli.chat.requests import Request
from art_cli.tinker.server.hosts import OpenPolicy, SampledPolicy
from art_cli.tinker.server.samplers import OpenPolicies


class Opened:
    def __init__(self, host: "Host", key: str) -> None:
        self.host, self.key = host, key
        host.open_keys.append(key)
        host.most = max(host.most, len(host.open_keys))

    async def score(self, token_ids: list[int]) -> list[float]:
        return []

    async def reply(self, request: Request) -> Reply:
        raise NotImplementedError

    async def close(self) -> None:
        self.host.open_keys.remove(self.key)


class Host:
    """Opens what it is asked to, and keeps count."""

    num_open = 2

    def __init__(self) -> None:
        self.open_keys: list[str] = []
        self.most = 0

    async def open(self, policy: SampledPolicy) -> OpenPolicy:
        await asyncio.sleep(0)
        return Opened(self, policy.key)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def policies_of(host: Host, names: str) -> tuple[OpenPolicies, dict[str, SampledPolicy]]:
    policies = OpenPolicies(host)  # type: ignore[arg-type]
    return policies, {name: policies.get(name, lambda name=name: SampledPolicy(name, Path(name))) for name in names}


async def test_never_more_are_open_than_there_is_room_for_and_everyone_gets_in() -> None:
    """Twenty users of five policies, two in constant use: all are served, and who waits is told why."""
    host, told, served = Host(), set(), []
    policies, made = policies_of(host, "abcde")

    async def use(name: str, rounds: int) -> None:
        for _ in range(rounds):
            async with policies.using(made[name], told.add) as opened:
                assert isinstance(opened, Opened) and opened.key == name
                await asyncio.sleep(0.001)
            served.append(name)

    async with asyncio.timeout(20):
        await asyncio.gather(*(use(name, 20) for name in "aabb"), *(use(name, 1) for name in "cde" * 5))
    assert host.most == 2 and len(served) == 95
    assert min(served.index(name) for name in "cde") < 40  # those in constant use did not keep the others out
    assert "2 adapters are sampled from at once" in told


async def test_a_policy_that_is_dropped_answers_what_it_has_begun_and_is_closed_then() -> None:
    host = Host()
    policies, made = policies_of(host, "ab")
    async with policies.using(made["a"], lambda reason: None):
        await policies.drop(made["a"])
        assert host.open_keys == ["a"]
    assert host.open_keys == []
    async with policies.using(made["b"], lambda reason: None):
        pass
    await policies.drop(made["b"])
    assert host.open_keys == []


async def test_a_policy_that_is_dropped_while_a_request_waits_for_room_is_closed_after_it() -> None:
    host = Host()
    policies, made = policies_of(host, "abc")

    async def use(name: str) -> list[str]:
        async with policies.using(made[name], lambda reason: None):
            return [*host.open_keys]

    async with policies.using(made["a"], lambda reason: None):
        async with policies.using(made["b"], lambda reason: None):
            waiting = asyncio.create_task(use("c"))
            await asyncio.sleep(0)
            await policies.drop(made["c"])
        assert await waiting == ["a", "c"]
        assert host.open_keys == ["a"]


async def test_a_request_that_is_cancelled_while_it_waits_takes_no_room() -> None:
    host = Host()
    policies, made = policies_of(host, "abc")

    async def use(name: str, until: asyncio.Event) -> None:
        async with policies.using(made[name], lambda reason: None):
            await until.wait()

    ends = asyncio.Event()
    busy = [asyncio.create_task(use(name, ends)) for name in "ab"]
    await asyncio.sleep(0.01)
    waiting = asyncio.create_task(use("c", ends))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait((waiting,))
    ends.set()
    await asyncio.gather(*busy)
    async with asyncio.timeout(5), policies.using(made["c"], lambda reason: None):
        assert "c" in host.open_keys and len(host.open_keys) == 2
