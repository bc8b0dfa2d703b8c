"""The capturing OpenAI-compatible proxy: rollouts call it, an engine answers, and one Recorder per attempt records.

    open(trajectory_id) -> key      the attempt calls the gateway with this key
    close(key) -> Recorder          later calls with the key get a 401, and calls in flight are cancelled

If a client leaves before the end of the answer, the streamed text is recorded as a turn with the finish reason
"cancelled". The call counts like any other call.

An SDK's retry replaces the earlier call (recorder.py); both count once against the limit on turns. If the policy is a
prompt, the record has only the agent's own messages, so a judge cannot see which prompt an attempt used.

Calls with `Request.is_recorded` False are answered, but not recorded or counted. They ask about a prompt, or the policy
plays another role. Their seeds come from a separate sequence, so the recorded calls sample the same with and without
them.

A closed attempt leaves no state. Keys are random, never logged, and never reused.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Protocol

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art_cli.chat import Backend, EngineLoad
from art_cli.chat.chat_app import AppSettings, build_app, error_response, wrong_key
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.http_server import serve
from art_cli.chat.proven_steps import ProvenSteps
from art_cli.chat.replies import Chunk, Reply, ReplyBuilder
from art_cli.chat.requests import Request, Sampling, cap_tokens, demands_format, force_sampling, with_defaults
from art_cli.chat.wires import WIRES
from art_cli.rollouts.call_counts import CallCounts
from art_cli.rollouts.peers import Peers
from art_cli.rollouts.recorder import Attempted, Recorded, Recorder, Retries

log = logging.getLogger(__name__)

TURN_LIMIT = "turn_limit"  # error codes of the two limits that depend on the policy
CONTEXT_LIMIT = "context_length_exceeded"
RATE_LIMITED = (429, 529)  # status codes for rate limits; Anthropic uses 529
LOAD_TIMEOUT_S = 5.0  # longest wait for the engine to report its load
MAX_UNREPORTED = 3  # consecutive failures after which the gateway stops asking for the load
COUNTS_TIMEOUT_S = 5.0  # longest wait for token counts after a streamed answer
NUM_LOOKS = 8  # event-loop iterations in which a disconnect can still cancel a call
OWN_CLIENT = (
    "Create a client for each attempt, with base_url=policy.base_url and api_key=policy.api_key, "
    "or use policy.client: attempts share their process's environment and globals"
)


class PolicyPrompt(Protocol):
    """A policy's system prompt, put into each call on its way to the engine (runs/system_prompt.py)."""

    def apply(self, request: Request) -> Request: ...


class _Endpoint(Protocol):
    @property
    def model(self) -> str: ...
    @property
    def step(self) -> int: ...


class Upstream(Protocol):
    """The engine interface that the gateway needs."""

    @property
    def backend(self) -> Backend: ...
    @property
    def endpoint(self) -> _Endpoint: ...


class Gateway:
    """Connects the rollouts of one run or evaluation to the engine."""

    def __init__(
        self,
        upstream: Upstream,
        *,
        defaults: Sampling,
        seed: int,
        max_turns: int,
        is_forced: bool = False,
        enforces_formats: bool = True,
        on_first_reply: Callable[[], None] | None = None,
    ) -> None:
        """`is_forced` replaces the temperature, top_p, and top_k of each call by the defaults, and refuses penalties
        and biases.

        Without `enforces_formats` the gateway refuses calls that demand a format or a tool call, because the engine
        would ignore the demand.
        """
        self.enforces_formats = enforces_formats
        self.upstream = upstream
        self.is_forced = is_forced
        self.max_turns = max_turns
        self.seed = seed
        self.base_url = ""  # set by `serve`
        self.proven = ProvenSteps()
        self.prompt: PolicyPrompt | None = None  # for attempts that are opened without a prompt
        self.calls = CallCounts()  # since the runner took the last ones
        self._num_unreported = 0  # consecutive failures to report the load
        self.num_sampled = 0  # tokens sampled for all answered calls
        self.on_first_reply = on_first_reply  # called once, after the first answered call
        self._defaults = defaults
        self._backends: dict[str, RecordingBackend] = {}  # key -> open rollout
        self.peers = Peers()  # CommandRollout registers its programs here
        app = build_app(
            lambda key: self._backends.get(key or ""),
            AppSettings(refuse_key=_unknown_key, policy_of=lambda name: self.proven.newest),
        )
        self.app = KeyOwnerMiddleware(app, self)

    @property
    def model(self) -> str:
        return self.upstream.endpoint.model

    async def name_policy(self, part: Reply | Chunk) -> None:
        """Sets the policy digest of the step that sampled this part. Raises ChatError if it is not proven."""
        part.policy = part.policy or await self.proven.digest(part.step)

    @property
    def step(self) -> int:
        """The step of the policy that answers now."""
        return self.upstream.endpoint.step

    async def load(self) -> EngineLoad | None:
        """Returns the engine's load if the engine reports it. After three failures the gateway stops asking."""
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
        """Yields the base URL for clients while the gateway listens. Raises EngineError if the port is in use."""
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
        prompt: PolicyPrompt | None = None,
    ) -> str:
        """Returns the key for a new attempt.

        `temperature`, `max_tokens`, and `max_turns` override the gateway's defaults. An engine with several servers
        sends all calls of a `group_id` to the same server. `prompt` overrides the policy's prompt.
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
        return WIRES.key(scope["path"], Headers(scope=scope))

    async def check_caller(self, scope: Scope) -> bool:
        """Returns False if another attempt's program makes this call, and marks that attempt's record."""
        if self.peers.is_empty or not (scope.get("client") and scope.get("server")):
            return True
        if (key := self.key_of(scope)) not in self._backends:
            return True
        owner = await asyncio.to_thread(self.peers.owner_of, scope["client"], scope["server"], expected=key)
        if owner in (key, None):
            return True
        if owner in self._backends:
            self._backends[owner].recorder.used_foreign_key = True
        return False

    def count(self, reply: Reply) -> None:
        if self.on_first_reply is not None:
            self.on_first_reply()
            self.on_first_reply = None
        num_sampled = sum(len(choice.token_ids) for choice in reply.choices)
        self.num_sampled += num_sampled or (reply.usage[1] if reply.usage else 0)

    def close(self, key: str) -> Recorder:
        """Returns the record of the rollout's calls, which ends here. Raises KeyError: not open."""
        backend = self._backends.pop(key)
        backend.close()
        return backend.recorder


class KeyOwnerMiddleware:
    """Checks calls against `Peers`. A call with another attempt's key gets the same 401 as an unknown key."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not await self._gateway.check_caller(scope):
            wire = WIRES.at(scope["path"], Headers(scope=scope))
            refusal = error_response(wrong_key(self._gateway.key_of(scope)), wire)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class _Call:
    """One call of an attempt. A call in flight ends in one of three ways:

        answered  `_record` has recorded the reply
        left      the client left first; `_leave` has recorded the streamed part
        failed    the engine refused the call or failed, or `RecordingBackend.close` cancelled the call

    A call aside (`Request.is_recorded` is False) ends in the same ways, but is never recorded.
    """

    def __init__(self, request: Request, sent: Request, num_admitted: int, attempted: Attempted) -> None:
        self.request = request  # recorded form: with sampling settings and seed, without the policy's prompt
        self.sent = sent  # as the engine gets it
        self.num_admitted = num_admitted  # number of the attempt's calls so far, without calls aside
        self.attempted = attempted
        self.came_at = time.monotonic()
        self.is_recorded = False
        self.builder = ReplyBuilder(request)
        task = asyncio.current_task()
        assert task is not None, "calls run in tasks"
        self.task = task


class RecordingBackend:
    """Answers an attempt's calls from the engine. Each answer is recorded before the client receives all of it."""

    def __init__(
        self,
        gateway: Gateway,
        trajectory_id: str,
        defaults: Sampling,
        recorder: Recorder | None = None,
        *,
        group_id: str | None = None,
        max_turns: int | None = None,
        prompt: PolicyPrompt | None = None,
    ) -> None:
        self.recorder = recorder or Recorder()
        self._prompt = prompt
        self._max_turns = gateway.max_turns if max_turns is None else max_turns
        self._gateway = gateway
        self._trajectory_id = trajectory_id
        self._group_id = group_id
        self._defaults = defaults
        self._num_admitted = 0  # recorded calls
        self._num_aside = 0  # calls that are not recorded
        self._num_replaced = 0  # answered calls that a retry replaced; these don't count against the limit on turns
        self._num_before_limit = 0  # calls admitted before a limit refused a call
        self._in_flight: set[_Call] = set()
        self._retries = Retries()
        self._is_closed = False
        self._idle_since = time.monotonic()

    def models(self) -> list[str]:
        return [self._gateway.model]

    async def reply(self, request: Request) -> Reply:
        call, engine = self._begin(request), self._gateway.upstream.backend
        with self._calling(call):
            reply = await engine.reply(call.sent)
            await self._gateway.name_policy(reply)
            if request.is_recorded:
                for _ in range(NUM_LOOKS):  # if the client has left by now, the call is cancelled here
                    await asyncio.sleep(0)
                self._record(call, reply)
        return reply

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Yields the answer's chunks. The answer is recorded before its last chunk, or when the client leaves."""
        call, engine = self._begin(request), self._gateway.upstream.backend
        async with contextlib.aclosing(engine.stream(call.sent)) as chunks:
            with self._calling(call):
                async for chunk in chunks:
                    await self._gateway.name_policy(chunk)
                    call.builder.add(chunk)
                    behind = list[Chunk]()
                    if request.is_recorded and call.builder.is_complete and not call.is_recorded:
                        behind = await self._read_counts(call, chunks)
                        self._record(call, call.builder.reply())
                    for each in (chunk, *behind):
                        yield each

    async def _read_counts(self, call: _Call, chunks: AsyncGenerator[Chunk]) -> list[Chunk]:
        """Returns the chunks that follow the answer's end, up to the token counts. Skipped if token ids are known."""
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
        """Cancels the calls in flight, and records the streamed parts of their answers."""
        for call in self._in_flight:
            if call.builder.partial_reply() is not None:
                self._leave(call)
        self._is_closed = True
        if self._is_idle():
            self._gateway.calls.idle_s += time.monotonic() - self._idle_since
        for call in self._in_flight:
            call.task.cancel()

    def remember(self, request: Request, recorded: Recorded) -> None:
        """Adds a call from an earlier process. Retries can then replace the call."""
        attempted = self._retries.add(request)
        attempted.state, attempted.recorded, attempted.is_counted = "answered", recorded, True

    def _begin(self, request: Request) -> _Call:
        """Admits a call. Adds the run's sampling settings and a seed to its request."""
        if self._is_closed:
            raise _finished()
        if not request.is_recorded:
            sampled = self._sampled(request, f"{self._trajectory_id}/unrecorded", self._num_aside)
            self._num_aside += 1
            return _Call(sampled, sampled, self._num_admitted, Attempted())
        if (replaced := self._retries.replaced(request)) is not None:
            self._abandon(replaced)
        self._check(request)
        sampled = self._sampled(self.recorder.as_sampled(request), self._trajectory_id, self._num_admitted)
        self._num_admitted += 1
        sent = sampled if self._prompt is None else self._prompt.apply(sampled)
        return _Call(sampled, sent, self._num_admitted, self._retries.add(request))

    def _check(self, request: Request) -> None:
        """Raises ChatError if the call exceeds the limit on turns or needs a feature that the engine lacks."""
        num_in_flight = sum(call.request.is_recorded and not call.attempted.is_abandoned for call in self._in_flight)
        if self.recorder.num_calls - self._num_replaced + num_in_flight >= self._max_turns:
            self.recorder.limit, self._num_before_limit = TURN_LIMIT, self._num_admitted
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

    def _sampled(self, request: Request, whose: str, number: int) -> Request:
        request = cap_tokens(with_defaults(request, self._defaults), self._defaults.max_tokens)
        if self._gateway.is_forced:
            request = force_sampling(request, self._defaults)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=call_seed(self._gateway.seed, whose, number))
        return msgspec.structs.replace(request, sampling=sampling, group=self._group_id)

    @contextlib.contextmanager
    def _calling(self, call: _Call) -> Iterator[None]:
        """Keeps a call in flight. If the attempt ends first, the call is cancelled and its client gets an error."""
        begin, is_own = time.monotonic(), call.request.is_recorded
        if is_own and self._is_idle():
            self._gateway.calls.idle_s += begin - self._idle_since
        self._in_flight.add(call)
        try:
            yield
        except asyncio.CancelledError:
            if self._is_closed and call.task.uncancel() == 0:  # only `close` cancelled it, the client has not left
                raise _finished() from None
            self._leave(call)
            raise
        except GeneratorExit:  # the client left while the server was sending a chunk
            self._leave(call)
            raise
        except ChatError as error:
            is_limited = is_own and error.status in RATE_LIMITED
            self._gateway.calls.refused += is_limited
            if error.status >= 500 or is_limited:
                self.recorder.upstream_error = error.message
            if error.code == CONTEXT_LIMIT:
                self.recorder.limit = CONTEXT_LIMIT
                self._num_before_limit = call.num_admitted if is_own else self._num_admitted
            raise
        except Exception as error:  # the boundary to the engine: the application makes it a 500
            if is_own:
                self.recorder.upstream_error = f"{type(error).__name__}: {error}"
            raise
        finally:
            call.attempted.end()
            self._in_flight.discard(call)
            if is_own:
                self._idle_since = time.monotonic()
                self._gateway.calls.busy_s += self._idle_since - begin

    def _is_idle(self) -> bool:
        return not any(call.request.is_recorded for call in self._in_flight)

    def _record(self, call: _Call, reply: Reply) -> None:
        if self._is_closed:
            raise _finished()
        call.is_recorded = True
        call.attempted.state = "answered"
        self._count(call, self.recorder.record(call.request, reply), reply)

    def _leave(self, call: _Call) -> None:
        if self._is_closed or call.is_recorded or not call.request.is_recorded:
            return
        call.is_recorded = True
        reply = call.builder.partial_reply()
        self._count(call, self.recorder.leave(call.request, reply), reply)

    def _count(self, call: _Call, recorded: Recorded | None, reply: Reply | None) -> None:
        if recorded is not None and call.num_admitted > self._num_before_limit:
            self.recorder.limit = None  # the policy continued after the limit
        call.attempted.recorded, call.attempted.is_counted = recorded, True
        self._gateway.calls.answered += 1
        for index in () if recorded is None else recorded.turns:
            turn = self.recorder.turns[index]
            self._gateway.calls.tokens += len(turn.prompt_ids) + len(turn.sampled_ids)
            self.recorder.spans.append((call.came_at, time.monotonic()))
        if call.attempted.is_abandoned:
            self._abandon(call.attempted)
        if reply is not None:
            self._gateway.count(reply)

    def _abandon(self, attempted: Attempted) -> None:
        """Marks an abandoned call. A call in flight is marked again after recording."""
        attempted.is_abandoned = True
        self._num_replaced += attempted.is_counted
        if attempted.recorded is not None:
            self.recorder.abandon(attempted.recorded)


def _unknown_key(key: str | None) -> ChatError:
    """Returns the error for an unknown key. The usual cause is a client that was created by another attempt."""
    error = wrong_key(key)
    if key is not None:
        error.message = f"{error.message}: no running attempt has it. {OWN_CLIENT}"
    return error


def _finished() -> ChatError:
    message = f"this rollout has finished. {OWN_CLIENT}"
    return ChatError(401, message, "authentication_error", None, "invalid_api_key")


def call_seed(run_seed: int, trajectory_id: str, number: int) -> int:
    """Returns a deterministic seed for one call. Seeds have 31 bits because some endpoints accept no more."""
    digest = hashlib.sha256(f"{run_seed}/{trajectory_id}/{number}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
