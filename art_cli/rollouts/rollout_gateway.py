"""The capturing OpenAI-compatible proxy: rollouts call it, an engine answers, and a Recorder per rollout records.

    open(trajectory_id) -> key      the rollout makes its calls with the key, over HTTP
    close(key) -> Recorder          from here on the key gets 401, and calls in flight are cancelled

A call whose client leaves before its end counts like any other. The text streamed until then was sampled and seen, so
it is recorded as a turn with the finish reason "cancelled".

An SDK that gives up on a call sends it again. The new call replaces the old one (recorder.py), and a reply to the old
one is marked as abandoned. The two count once against the limit on turns.

A policy that is a prompt is put into each recorded call on its way to the engine. What is recorded is what the agent
sent, so that a judge compares attempts without seeing which prompt made them.

A call with `Request.is_recorded` False is answered, and neither recorded nor counted: it only asks about a prompt, or
the policy plays another role. It has other seeds, so that the recorded calls sample as without it.

Nothing is kept of a rollout that is closed. The keys are random and never logged, and each is given to one rollout.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art_cli.chat import Backend, EngineLoad
from art_cli.chat.chat_app import build_app, closing_stream, error_response, wrong_key
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.http_server import serve
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.replies import Chunk, Reply, ReplyBuilder
from art_cli.chat.requests import Request, Sampling, cap_tokens, demands_format, force_sampling, with_defaults
from art_cli.chat.wires import WIRES, Wires
from art_cli.rollouts.command_rollout import Peers
from art_cli.rollouts.concurrency import CallCounts
from art_cli.rollouts.recorder import Attempted, Recorded, Recorder, Retries
from art_cli.runs.system_prompt import SystemPrompt

log = logging.getLogger(__name__)

TURN_LIMIT = "turn_limit"  # error codes of the two limits that a policy itself runs into
CONTEXT_LIMIT = "context_length_exceeded"
RATE_LIMITED = (429, 529)  # statuses of an endpoint that gets too many requests; 529 is Anthropic's
LOAD_TIMEOUT_S = 5.0  # longest wait for the engine's report of its load
MAX_UNREPORTED = 3  # failures in a row, after which it is not asked any more
COUNTS_TIMEOUT_S = 5.0  # longest wait for the counts of tokens that an endpoint sends behind a streamed answer
NUM_LOOKS = 8  # turns of the event loop in which the end of a client's connection cancels its call
OWN_CLIENT = (
    "Give each attempt a client of its own, with base_url=policy.base_url and api_key=policy.api_key, "
    "or use policy.client: attempts share their process's environment and globals"
)


class _Endpoint(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def step(self) -> int: ...


class Upstream(Protocol):
    """The part of an engine that the gateway needs."""

    @property
    def backend(self) -> Backend: ...
    @property
    def endpoint(self) -> _Endpoint: ...


class Gateway:
    """Stands between the rollouts of one run or evaluation and the engine."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        defaults: Sampling,
        seed: int,
        max_turns: int,
        is_forced: bool = False,
        enforces_formats: bool = True,
        wires: Wires = WIRES,
        on_first_reply: Callable[[], None] | None = None,
    ) -> None:
        """With `is_forced` the defaults' temperature, top_p and top_k replace those that calls set, and penalties and
        biases are refused.

        Without `enforces_formats` a call that demands a format or a tool call is refused, because the engine would
        ignore the demand.
        """
        self.enforces_formats = enforces_formats
        self.upstream = upstream
        self.is_forced = is_forced
        self.max_turns = max_turns
        self.seed = seed
        self.base_url = ""  # set while it is served
        self.proven = ProvenSteps()
        self.prompt: SystemPrompt | None = None  # the policy's, for attempts that are opened without one
        self.calls = CallCounts()  # since the runner took the last ones
        self._num_unreported = 0  # times in a row that the engine's load could not be had
        self.num_sampled = 0  # tokens sampled in all answered calls
        self.on_first_reply = on_first_reply  # called once, when the first call is answered
        self._defaults = defaults
        self._backends: dict[str, RecordingBackend] = {}  # key -> open rollout
        self.peers = Peers()  # CommandRollout registers the programs that it starts
        self.wires = wires
        app = build_app(
            lambda key: self._backends.get(key or ""),
            wires=wires,
            refuse_key=_unknown_key,
            policy_of=lambda name: self.proven.newest,
        )
        self.app = _RightfulCalls(app, self)

    @property
    def model(self) -> str:
        return self.upstream.endpoint.model

    async def name_policy(self, part: Reply | Chunk) -> None:
        """Sets the digest of the policy that sampled it; another server's reply keeps the one that came with it.

        Raises ChatError if the proof of its weights failed.
        """
        part.policy = await self.proven.digest(part.step)

    @property
    def step(self) -> int:
        """The step of the policy that answers now."""
        return self.upstream.endpoint.step

    async def load(self) -> EngineLoad | None:
        """Returns the engine's load, or None if it does not report it. After three failures it is not asked again."""
        report = getattr(self.upstream, "occupancy", None)
        if report is None or self._num_unreported == MAX_UNREPORTED:
            return None
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                load: EngineLoad | None = await report()
        except Exception as error:  # the boundary to an engine of the user's
            self._num_unreported += 1
            if self._num_unreported == MAX_UNREPORTED:
                log.warning("rollout.concurrency: the engine's load is not known: %s: %s", type(error).__name__, error)
            return None
        self._num_unreported = 0
        return load

    @contextlib.asynccontextmanager
    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
        """Yields the base URL for clients while it listens. Raises EngineError: the port is not free."""
        async with serve(self.app, host, port) as root:
            self.base_url = f"{root}/v1"
            yield self.base_url

    def open(
        self,
        trajectory_id: str,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
        max_turns: int | None = None,
        group_id: str | None = None,
        prompt: SystemPrompt | None = None,
    ) -> str:
        """Returns the key of one attempt at one rollout. Calls that set no temperature get `temperature`.

        The limits are the gateway's where they are None. The calls of one `group_id` go to the same server where the
        engine has several. They have the system message of `prompt`, by default the policy's.
        """
        key = secrets.token_urlsafe(32)
        defaults = self._defaults
        if temperature is not None:
            defaults = msgspec.structs.replace(defaults, temperature=temperature)
        if max_tokens is not None:
            defaults = msgspec.structs.replace(defaults, max_tokens=max_tokens)
        self._backends[key] = RecordingBackend(
            self, trajectory_id, defaults, group_id=group_id, max_turns=max_turns, prompt=prompt or self.prompt
        )
        return key

    def key_of(self, scope: Scope) -> str | None:
        return self.wires.key(scope["path"], Headers(scope=scope))

    async def accuse(self, scope: Scope) -> bool:
        """Returns whether the program of another attempt makes this call. If so, that attempt's record notes it."""
        if self.peers.is_empty or not (scope.get("client") and scope.get("server")):
            return False
        if (key := self.key_of(scope)) not in self._backends:
            return False
        thief = await asyncio.to_thread(self.peers.thief, key, scope["client"], scope["server"])
        if thief in self._backends:
            self._backends[thief].recorder.used_foreign_key = True
        return thief is not None

    def close(self, key: str) -> Recorder:
        """Returns the record of the rollout's calls, which ends here. Raises KeyError: not open."""
        backend = self._backends.pop(key)
        backend.close()
        return backend.recorder


class _RightfulCalls:
    """The application behind `Peers`: a call with another attempt's key gets the 401 of a wrong key."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and await self._gateway.accuse(scope):
            wire = self._gateway.wires.at(scope["path"], Headers(scope=scope))
            refusal = error_response(wrong_key(self._gateway.key_of(scope)), wire)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Call:
    """One call in flight, and the part of its answer that was streamed so far."""

    def __init__(self, request: Request, number: int, attempted: Attempted) -> None:
        self.request = request
        self.came_at = time.monotonic()
        self.number = number
        self.attempted = attempted
        self.task = asyncio.current_task()
        self.is_recorded = False
        self.builder = ReplyBuilder(request)


class RecordingBackend:
    """Answers one open rollout from the engine. Every answer is recorded before the rollout sees its end."""

    def __init__(
        self,
        gateway: Gateway,
        trajectory_id: str,
        defaults: Sampling,
        recorder: Recorder | None = None,
        *,
        group_id: str | None = None,
        max_turns: int | None = None,
        prompt: SystemPrompt | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self._prompt = prompt
        self._max_turns = gateway.max_turns if max_turns is None else max_turns
        self._gateway = gateway
        self._trajectory_id = trajectory_id
        self._group_id = group_id
        self._defaults = defaults
        self._num_admitted = 0
        self._num_unrecorded = 0
        self._num_replaced = 0  # ended calls that count in the recorder and that a retry replaced
        self._num_before_limit = 0  # calls admitted before the one that was refused for a limit
        self._in_flight: set[_Call] = set()
        self._aside_tasks: set[asyncio.Task[Any]] = set()  # those of unrecorded calls in flight
        self._retries = Retries()
        self._is_closed = False
        self._idle_since = time.monotonic()

    def models(self) -> list[str]:
        return [self._gateway.model]

    async def reply(self, request: Request) -> Reply:
        if not request.is_recorded:
            with self._unrecorded():
                reply = await self._gateway.upstream.backend.reply(self._aside(request))
                await self._gateway.name_policy(reply)
                return reply
        call = self._begin(request)
        with self._calling(call):
            reply = await self._gateway.upstream.backend.reply(self._prompted(call.request))
            await self._gateway.name_policy(reply)
            for _ in range(NUM_LOOKS):  # if the client has left by now, the call is cancelled here
                await asyncio.sleep(0)
            self._record(call, reply)
        return reply

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Yields the answer's chunks. The one that completes it comes when the answer is recorded.

        When the client leaves, the answer is recorded at once, and then the engine is waited for to stop it.
        """
        if not request.is_recorded:
            async with closing_stream(self._gateway.upstream.backend.stream(self._aside(request))) as chunks:
                with self._unrecorded():
                    async for chunk in chunks:
                        await self._gateway.name_policy(chunk)
                        yield chunk
            return
        call = self._begin(request)
        prompted = self._prompted(call.request)
        async with closing_stream(self._gateway.upstream.backend.stream(prompted)) as chunks:
            with self._calling(call):
                async for chunk in chunks:
                    await self._gateway.name_policy(chunk)
                    call.builder.add(chunk)
                    behind = list[Chunk]()
                    if call.builder.is_complete and not call.is_recorded:
                        behind = await self._counts(call, chunks)
                        self._record(call, call.builder.reply())
                    for each in (chunk, *behind):
                        yield each

    async def _counts(self, call: _Call, chunks: AsyncIterator[Chunk]) -> list[Chunk]:
        """Returns the chunks behind the end of an answer up to its counts of tokens, none if its tokens are known."""
        behind = list[Chunk]()
        reply = call.builder.reply()
        if reply.prompt_ids or reply.usage is not None:
            return behind
        try:
            async with asyncio.timeout(COUNTS_TIMEOUT_S):
                async for chunk in chunks:
                    await self._gateway.name_policy(chunk)
                    call.builder.add(chunk)
                    behind.append(chunk)
                    if chunk.usage is not None:
                        break
        except Exception as error:  # the boundary to the endpoint, whose answer is complete
            log.debug("no counts of tokens behind a streamed answer: %s: %s", type(error).__name__, error)
        return behind

    def close(self) -> None:
        """Cancels the calls in flight. The parts of their answers that were streamed are recorded."""
        for call in self._in_flight:
            if call.builder.partial_reply() is not None:
                self._leave(call)
        self._is_closed = True
        if not self._in_flight:
            self._gateway.calls.idle_s += time.monotonic() - self._idle_since
        for task in [call.task for call in self._in_flight if call.task is not None] + [*self._aside_tasks]:
            task.cancel()

    def remember(self, request: Request, recorded: Recorded) -> None:
        """Remembers a call that was recorded before this process began, so that a retry of it replaces it."""
        attempted = self._retries.add(request)
        attempted.state, attempted.recorded, attempted.is_counted = "answered", recorded, True

    def _begin(self, request: Request) -> _Call:
        if self._is_closed:
            raise _finished()
        number = self._num_admitted
        if (replaced := self._retries.replaced(request)) is not None:
            self._abandon(replaced)
        return _Call(self._admit(request), number, self._retries.add(request))

    def _admit(self, request: Request) -> Request:
        """Returns the request as the engine gets it. Without sampling settings it gets the run's and a seed."""
        num_in_flight = sum(not call.attempted.is_abandoned for call in self._in_flight)
        if self.recorder.num_calls - self._num_replaced + num_in_flight >= self._max_turns:
            self._limit(TURN_LIMIT, self._num_admitted)
            message = f"this rollout has made its {self._max_turns} model calls (rollout.max_turns)"
            raise ChatError(400, message, code=TURN_LIMIT)
        if not self._gateway.enforces_formats and demands_format(request):
            raise ChatError(400, "this engine enforces neither response_format nor a forced tool call; leave them out")
        if self._gateway.is_forced and (names := request.sampling.reshaping):
            raise invalid(
                f"{', '.join(names)}: a rollout in training samples from the policy itself, or what it learns from "
                "would be another distribution; leave it out",
                names[0],
                "unsupported_parameter",
            )
        number = self._num_admitted
        self._num_admitted += 1
        return self._sampled(self.recorder.as_sampled(request), self._trajectory_id, number)

    def _prompted(self, request: Request) -> Request:
        return request if self._prompt is None else self._prompt.apply(request)

    def _aside(self, request: Request) -> Request:
        """Returns an unrecorded request as the engine gets it."""
        if self._is_closed:
            raise _finished()
        number = self._num_unrecorded
        self._num_unrecorded += 1
        return self._sampled(request, f"{self._trajectory_id}/unrecorded", number)

    @contextlib.contextmanager
    def _unrecorded(self) -> Iterator[None]:
        """Counts an engine's failure as in recorded calls, and so a prompt that the context has no room for."""
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self._aside_tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_closed and task.uncancel() == 0:  # by `close`, and the client did not leave as well
                raise _finished() from None
            raise
        except ChatError as error:
            if error.status >= 500:
                self.recorder.fail(error.message)
            if error.code == CONTEXT_LIMIT:
                self._limit(CONTEXT_LIMIT, self._num_admitted)
            raise
        finally:
            self._aside_tasks.discard(task)

    def _sampled(self, request: Request, whose: str, number: int) -> Request:
        """With the run's sampling, and with a seed of the run where the call sets none."""
        request = cap_tokens(with_defaults(request, self._defaults), self._defaults.max_tokens)
        if self._gateway.is_forced:
            request = force_sampling(request, self._defaults)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=call_seed(self._gateway.seed, whose, number))
        return msgspec.structs.replace(request, sampling=sampling, group=self._group_id)

    @contextlib.contextmanager
    def _calling(self, call: _Call) -> Iterator[None]:
        """Keeps a call in flight. If the rollout ends first, it is cancelled, and its client gets an error."""
        assert call.task is not None, "calls run in tasks"
        begin = time.monotonic()
        if not self._in_flight:
            self._gateway.calls.idle_s += begin - self._idle_since
        self._in_flight.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if (
                self._is_closed and call.task.uncancel() == 0
            ):  # close() cancelled it, and the client did not leave as well
                raise _finished() from None
            self._leave(call)
            raise
        except GeneratorExit:  # the client left while a chunk was sent to it
            self._leave(call)
            raise
        except ChatError as error:
            is_limited = error.status in RATE_LIMITED
            self._gateway.calls.refused += is_limited
            if error.status >= 500 or is_limited:
                self.recorder.fail(error.message)
            if error.code == CONTEXT_LIMIT:
                self._limit(CONTEXT_LIMIT, call.number + 1)
            raise
        except Exception as error:  # the boundary to the engine: the application makes it a 500
            self.recorder.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            call.attempted.end()
            self._in_flight.discard(call)
            self._idle_since = time.monotonic()
            self._gateway.calls.busy_s += self._idle_since - begin

    def _leave(self, call: _Call) -> None:
        """Records a call whose client left before the end of the answer. The streamed part is a turn."""
        if self._is_closed or call.is_recorded:
            return
        call.is_recorded = True
        reply = call.builder.partial_reply()
        self._note(call, self.recorder.leave(call.request, reply))
        self._count_sampled(reply)

    def _record(self, call: _Call, reply: Reply) -> None:
        if self._is_closed:
            raise _finished()
        call.is_recorded = True
        call.attempted.state = "answered"
        self._note(call, self.recorder.record(call.request, reply))
        self._count_sampled(reply)

    def _limit(self, limit: str, num_before: int) -> None:
        self.recorder.limit = limit
        self._num_before_limit = num_before

    def _note(self, call: _Call, recorded: Recorded | None) -> None:
        if recorded is not None and call.number >= self._num_before_limit:
            self.recorder.limit = None  # a later call of the rollout was answered in spite of it
        call.attempted.recorded, call.attempted.is_counted = recorded, True
        self._gateway.calls.answered += 1
        for index in () if recorded is None else recorded.turns:
            turn = self.recorder.turns[index]
            self._gateway.calls.tokens += len(turn.prompt_ids) + len(turn.sampled_ids)
            self.recorder.spans.append((call.came_at, time.monotonic()))
        if call.attempted.is_abandoned:
            self._abandon(call.attempted)

    def _abandon(self, attempted: Attempted) -> None:
        """Marks a call that its client has given up on. If it is in flight, it is marked once it is recorded."""
        attempted.is_abandoned = True
        self._num_replaced += attempted.is_counted
        if attempted.recorded is not None:
            self.recorder.abandon(attempted.recorded)

    def _count_sampled(self, reply: Reply | None) -> None:
        if reply is not None:
            if self._gateway.on_first_reply is not None:
                self._gateway.on_first_reply()
                self._gateway.on_first_reply = None
            num_sampled = sum(len(choice.token_ids) for choice in reply.choices)
            self._gateway.num_sampled += num_sampled or (reply.usage[1] if reply.usage else 0)


def _unknown_key(key: str | None) -> ChatError:
    """Returns the refusal of a key of no running attempt. Most often the client came from another attempt."""
    error = wrong_key(key)
    if key is not None:
        error.message = f"{error.message}: no running attempt has it. {OWN_CLIENT}"
    return error


def _finished() -> ChatError:
    message = f"this rollout has finished. {OWN_CLIENT}"
    return ChatError(401, message, "authentication_error", None, "invalid_api_key")


def call_seed(run_seed: int, trajectory_id: str, number: int) -> int:
    """Returns the seed of one call of one rollout, whatever else runs. It has 31 bits, the most for some endpoints."""
    digest = hashlib.sha256(f"{run_seed}/{trajectory_id}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
