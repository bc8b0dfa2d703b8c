"""VllmReplicas: samples from several vLLM servers as from one. Each replica is a VllmEngine.

    request -> Router: the group's replica -> VllmEngine -> its server
                         |  the server ended before it answered: the call is sent once more, to another replica

A step counts as loaded when every replica that answers has loaded it, and each of them scores the probe of weights.
A replica whose server ended is started again in the background. It gets calls again when it has loaded the current
adapter and scores the last probe as the others did. The engine has failed when every replica has failed for good.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from art_cli.chat import Backend
from art_cli.chat.chat_app import closing_stream
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request
from art_cli.config.sections.engine_config import VllmEngineConfig
from art_cli.engines import Endpoint, EngineSetup, proof
from art_cli.engines.vllm.arguments import divide
from art_cli.engines.vllm.chats import Chats
from art_cli.engines.vllm.ready import Ready
from art_cli.engines.vllm.routing import Router
from art_cli.engines.vllm.vllm_engine import VllmEngine
from art_cli.models.policy_spec import PolicySpec
from art_cli.runtime.errors import ArtError, DriftError, EngineError, first_of_group

log = logging.getLogger(__name__)
Result = TypeVar("Result")
Work = Callable[[VllmEngine], Awaitable[Result]]

MAX_SENDS = 2  # number of servers that one call is sent to; it may be the call that ends them


class Replica:
    """One server's engine, and whether calls go to it."""

    def __init__(self, number: int, engine: VllmEngine) -> None:
        self.number = number  # the first is 1, as in the name of its log
        self.engine = engine
        self.is_joined = False
        self.num_requests = 0  # requests in flight
        self.failure = ""  # why it will never answer again

    @property
    def can_answer(self) -> bool:
        return self.is_joined and self.engine.ready.is_set

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class _ServerEnded(Exception):
    """The replica's server ended before the work was done."""


class VllmReplicas:
    """Engine and Backend in one."""

    def __init__(self, config: VllmEngineConfig, model: PolicySpec, *, name: str, step: int = 0, logs: Path) -> None:
        """Raises EngineError: fewer GPUs than the replicas need, or what VllmEngine refuses."""
        self.endpoint = Endpoint(base_url=None, api_key="", model=name, step=step)
        chats = Chats(model)
        self.replicas = [
            Replica(number, VllmEngine(part, model, name=name, step=step, logs=logs, number=number, chats=chats))
            for number, part in enumerate(divide(config), 1)
        ]
        self.router = Router(len(self.replicas))
        self.num_moved = 0  # number of calls sent again to another replica
        self._config, self._dtype = config, model.dtype
        self._ready = Ready(config.start_timeout_s)  # whether at least one replica answers
        self._awake = asyncio.Event()
        self._steering = asyncio.Lock()
        self._loaded: tuple[Path, int] | None = None  # checkpoint and step
        self._proof: tuple[list[int], list[float]] | None = None  # the last probe of this step, and its scores
        self._followers: list[asyncio.Task[None]] = []

    @classmethod
    def of(cls, config: VllmEngineConfig, setup: EngineSetup) -> "VllmEngine | VllmReplicas":
        """The engine of a configuration: VllmEngine for a single server."""
        assert setup.policy is not None, "vLLM has to know which base model it serves"
        make = cls if config.num_servers > 1 else VllmEngine
        return make(config, setup.policy, name=setup.name, step=setup.step, logs=setup.logs)

    @property
    def backend(self) -> Backend:
        return self

    @property
    def num_replicas(self) -> int:
        return len(self.replicas)

    @property
    def num_answering(self) -> int:
        return sum(replica.can_answer for replica in self.replicas)

    # --- Engine -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        assert not self._followers, "started twice"
        self._awake.set()
        try:
            with first_of_group():
                async with asyncio.TaskGroup() as group:
                    for replica in self.replicas:
                        group.create_task(replica.engine.start())
        except BaseException:
            await self._close_engines()
            raise
        for replica in self.replicas:
            replica.is_joined = True
        self._ready.set()
        self._followers = [asyncio.create_task(self._follow(replica)) for replica in self.replicas]
        log.info("vllm: %d replicas answer", len(self.replicas))

    async def load(self, checkpoint: Path, step: int) -> None:
        """Raises CheckpointError: no adapter there; EngineError: a server refuses it, or all are gone for good."""

        def loaded(_: list[tuple[Replica, None]]) -> None:
            self._loaded, self._proof = (checkpoint, step), None

        await self._steer(lambda engine: engine.load(checkpoint, step), loaded)
        self.endpoint = msgspec.structs.replace(self.endpoint, step=step)

    async def score(self, token_ids: list[int]) -> list[float]:
        """The first replica's scores. Raises DriftError: another one's differ, or a prefix cache is stale."""

        def compare(scores: list[tuple[Replica, list[float]]]) -> None:
            (first, expected), *others = scores
            for replica, found in others:
                self._compare(replica, found, expected, f"replica {first.number}")
            self._proof = token_ids, expected

        return (await self._steer(lambda engine: engine.score(token_ids), compare))[0][1]

    def longest_prompt(self) -> None:
        """Unknown, because the tokenizer is the servers'."""

    async def sleep(self) -> None:
        self._awake.clear()  # no replica joins before the next `wake`
        async with self._steering:
            await self._all_left(lambda engine: engine.sleep())

    async def wake(self) -> None:
        async with self._steering:
            await self._all_left(lambda engine: engine.wake())
        self._awake.set()

    async def watch(self) -> NoReturn:
        """Returns never; raises EngineError once every replica has failed for good."""
        await self._ready.failure()

    async def close(self) -> None:
        for follower in self._followers:
            follower.cancel()
        if self._followers:
            await asyncio.wait(self._followers)
        self._ready.fail("the engine is closed")
        await self._close_engines()

    async def _close_engines(self) -> None:
        await _all([replica.engine.close() for replica in self.replicas])

    # --- Backend ------------------------------------------------------------------------------------------------------

    def models(self) -> list[str]:
        return [self.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        lost: list[Replica] = []
        while True:
            replica = await self._choose(request, lost)
            num_ends = replica.engine.num_ends
            try:
                with replica.lease():
                    return await replica.engine.reply(request)
            except ChatError as error:
                self._move(request, error, replica, num_ends, lost)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """As `reply`. A stream that has begun is not sent again, because the client has seen a part of it."""
        lost: list[Replica] = []
        has_begun = False
        while True:
            replica = await self._choose(request, lost)
            num_ends = replica.engine.num_ends
            try:
                with replica.lease():
                    async with closing_stream(replica.engine.stream(request)) as chunks:
                        async for chunk in chunks:
                            has_begun = True
                            yield chunk
                return
            except ChatError as error:
                if has_begun:
                    raise
                self._move(request, error, replica, num_ends, lost)

    async def _choose(self, request: Request, lost: list[Replica]) -> Replica:
        """The replica for the request, one that did not lose it if there is one. Waits until a replica answers."""
        while not (able := [replica for replica in self.replicas if replica.can_answer]):
            try:
                await self._ready.wait()
            except EngineError as error:
                raise ChatError(503, str(error).partition("\n")[0], code="engine_failed") from error
            await asyncio.sleep(0)  # the followers take note of an end in a turn of theirs
        able = [replica for replica in able if replica not in lost] or able
        able = [replica for replica in able if replica.engine.is_awake] or able
        number = self.router.choose(request, {replica.number - 1: replica.num_requests for replica in able})
        return self.replicas[number]

    def _move(self, request: Request, error: ChatError, replica: Replica, num_ends: int, lost: list[Replica]) -> None:
        """Returns if the call is to be sent again, else raises its error."""
        is_ended = replica.engine.num_ends > num_ends or error.code in ("upstream_unreachable", "engine_failed")
        lost.append(replica)
        if error.status < 500 or not is_ended or len(lost) >= MAX_SENDS:
            raise error
        self.num_moved += 1
        log.info("vllm: replica %d ended; its call of %s is sent again", replica.number, request.group or "a client")

    # --- all replicas -------------------------------------------------------------------------------------------------

    async def _steer(
        self, work: Work[Result], done: Callable[[list[tuple[Replica, Result]]], None]
    ) -> list[tuple[Replica, Result]]:
        """The result of `work` on every replica that answers. `done` gets them before another replica can join.

        A replica whose server ends meanwhile has none. If all end, the work is done again when one is back.
        """
        while True:
            await self._ready.wait()
            async with self._steering:
                able = [replica for replica in self.replicas if replica.can_answer]
                results = await _all([self._unless_ended(replica, work) for replica in able])
                found = [(replica, result[0]) for replica, result in zip(able, results, strict=True) if result]
                if found:
                    done(found)
                    return found
            await asyncio.sleep(0)  # the others get a turn, as in `_choose`

    async def _unless_ended(self, replica: Replica, work: Work[Result]) -> tuple[Result] | None:
        try:
            return (await _work(replica, work),)
        except _ServerEnded:
            return None

    async def _all_left(self, work: Work[None]) -> None:
        """Does the work on every replica that has not failed for good; waits for those that start again."""

        async def one(replica: Replica) -> None:
            try:
                await work(replica.engine)
            except EngineError:
                if not replica.engine.ready.failure_message:
                    raise

        await _all([one(replica) for replica in self.replicas if not replica.failure])

    # --- a replica that ends ------------------------------------------------------------------------------------------

    async def _follow(self, replica: Replica) -> None:
        """Takes the replica out when its server ends, and in again when a new one is proven."""
        try:
            while True:
                await replica.engine.ready.lost()
                self._leave(replica)
                await replica.engine.ready.wait_back()
                with contextlib.suppress(_ServerEnded):
                    await self._join(replica)
        except Exception as error:  # the boundary of this task: the replica is given up, whatever the reason
            replica.failure = str(error) if isinstance(error, ArtError) else f"{type(error).__name__}: {error}"
        self._leave(replica)
        await self._give_up(replica)

    def _leave(self, replica: Replica) -> None:
        if not replica.is_joined:
            return
        replica.is_joined = False
        num_left = sum(other.is_joined for other in self.replicas)
        log.warning("vllm: replica %d ended, %d of %d answer", replica.number, num_left, len(self.replicas))
        if num_left == 0:
            self._ready.clear()

    async def _join(self, replica: Replica) -> None:
        """Calls go to the replica again once it has the current adapter and scores the last probe as the others did.

        Raises EngineError: it cannot load it, or has other weights.
        """
        await self._awake.wait()
        async with self._steering:
            if (loaded := self._loaded) is not None and replica.engine.loaded != loaded:
                await _work(replica, lambda engine: engine.load(*loaded))
            if self._proof is not None:
                token_ids, expected = self._proof
                found = await _work(replica, lambda engine: engine.score(token_ids))
                self._compare(replica, found, expected, "the last proof")
            replica.is_joined = True
            self._ready.set()
        num_joined = sum(other.is_joined for other in self.replicas)
        log.warning("vllm: replica %d is back, %d of %d answer", replica.number, num_joined, len(self.replicas))

    async def _give_up(self, replica: Replica) -> None:
        """The last replica's failure is the engine's, and any other's is a warning."""
        if all(other.failure for other in self.replicas):
            self._ready.fail(f"all {len(self.replicas)} replicas have ended; the last one: {replica.failure}")
        else:
            log.warning("vllm: replica %d is given up: %s", replica.number, replica.failure)
        await replica.engine.close()

    def _compare(self, replica: Replica, found: list[float], expected: list[float], whose: str) -> None:
        gap, bound = proof.mean_gap(found, expected), proof.bound_of(self._dtype)
        if not gap <= bound:
            raise DriftError(
                f"step {self.endpoint.step}: vLLM's replica {replica.number} has other weights than {whose}: the "
                f"probe's logprobs differ by {gap:.2e} nats, bound {bound:.0e}"
            )


async def _work(replica: Replica, work: Work[Result]) -> Result:
    """The result of the work. Raises _ServerEnded as soon as the replica's server ends."""
    task = asyncio.ensure_future(work(replica.engine))
    lost = asyncio.ensure_future(replica.engine.ready.lost())
    try:
        await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and (task.exception() is None or not lost.done()):
            return task.result()
        raise _ServerEnded
    finally:
        for future in (task, lost):
            future.cancel()
        await asyncio.gather(task, lost, return_exceptions=True)


async def _all(works: list[Awaitable[Result]]) -> list[Result]:
    """The results once all have ended. Raises the first error among them."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
