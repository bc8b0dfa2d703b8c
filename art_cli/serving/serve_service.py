"""Service: policies on a port, from the first load to the last request.

    listen -> load -> ready -> ... -> stopping: 503 for new requests; running requests finish or time out -> closed

The service listens before it loads. /health answers immediately, and /ready reports when requests are admitted. The
service ends when an engine fails. SIGTERM and SIGINT stop it; a second signal ends it without waiting for running
requests.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat.api_keys import Keys
from art_cli.chat.chat_app import AppSettings, build_app, error_response
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import Stopping, Timeouts, cancel, serve
from art_cli.chat.reading import BODY_TIMEOUT_S, BodyLimit
from art_cli.chat.wires import WIRES
from art_cli.runs.run_checkpoints import Which
from art_cli.runtime import threads
from art_cli.serving.dispatch import Dispatch
from art_cli.serving.middleware import FEEDBACK_PATHS, READY, Admission, Meter, Middleware
from art_cli.serving.served_policies import Policies, ServedPolicy, follow

log = logging.getLogger(__name__)

GRACE_S = 1  # timeout for closing connections, after requests had `drain_s`
ESCAPED = 6  # maximum JSON bytes per character: \u0041
ASIDE_BYTES = 2 * 2**20  # extra room in a body for response schemas, and for reasoning that chat templates drop


@dataclass(frozen=True)
class Limits:
    concurrency: int = 256  # requests at the engine
    queue: int = 1024  # additional requests in flight
    max_body_bytes: int = BodyLimit().num_bytes
    body_timeout_s: float = BODY_TIMEOUT_S
    drain_s: float = 30.0  # maximum wait for running requests when the service stops
    timeouts: Timeouts = field(default_factory=Timeouts)


class Service:
    """Serves `policies`. With `follows`, each policy follows this checkpoint of its run. With `is_processed`, clients
    get logprobs of the actual sampling distribution."""

    def __init__(
        self,
        policies: Policies,
        *,
        keys: Keys,
        limits: Limits,
        follows: Which | None = None,
        logs_content: bool = False,
        is_processed: bool = False,
    ) -> None:
        self.policies, self.keys, self.limits = policies, keys, limits
        self.admission = Admission(concurrency=limits.concurrency, queue=limits.queue)
        self.meter = self._metered()
        self._follows = follows
        self._stopping = Stopping(
            limits.drain_s, refuse=self.admission.drain, num_running=lambda: self.admission.num_in_flight
        )
        dispatch = Dispatch(policies, self.admission, self.meter, logs_content=logs_content)
        app = build_app(
            lambda key: dispatch,  # the middleware has checked the key
            AppSettings(
                body_limit=self._body_limit,
                body_timeout_s=limits.body_timeout_s,
                is_processed=is_processed,
                policy_of=lambda name: policies.served[name].proven.newest,
            ),
            more=[
                *(Route(path, self._ready, methods=["GET"]) for path in READY),
                self.meter.route,
                *(Route(path, _no_feedback, methods=["POST"]) for path in FEEDBACK_PATHS),
            ],
        )
        self.app = Middleware(app, keys, self.admission, self.meter)

    def _metered(self) -> Meter:
        meter, admission = Meter(), self.admission
        meter.in_flight.set_function(lambda: admission.num_in_flight)
        meter.answering.set_function(lambda: admission.num_answering)
        meter.ready.set_function(lambda: admission.state == "open")
        for name, policy in self.policies.served.items():
            meter.step.labels(name).set_function(partial(_step_of, policy))
        return meter

    async def run(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serves until `stop`; `on_ready` gets the root URL. Raises EngineError, and ArtError for a policy."""
        async with serve(self.app, host, port, timeouts=self.limits.timeouts, grace_s=GRACE_S) as root:
            with threads.calling(self._stopping.stop):
                try:
                    if await self._stopping.ends_before(self.policies.start()) and not self._stopping.is_stopped:
                        self.admission.open()
                        on_ready(root)
                        log.info("ready: calls are answered at %s/v1", root)
                        async with self._followers():
                            await self._stopping.ends_before(self.policies.watch())
                    await self._stopping.drain(self.admission.emptied())
                finally:
                    await self.policies.close()

    def stop(self) -> None:
        """Refuses new requests, waits for running requests, then stops. A second call skips the waiting."""
        self._stopping.stop()

    # --- lifecycle ----------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _followers(self) -> AsyncIterator[None]:
        tasks = []
        for policy in self.policies.served.values() if self._follows else ():
            assert self._follows and policy.source.run is not None, "only a run can be followed"
            work = follow(policy, policy.source.run, self.meter, which=self._follows)
            tasks.append(asyncio.create_task(work))
        try:
            yield
        finally:
            await cancel(*tasks)

    def _body_limit(self) -> BodyLimit:
        """Returns the user's limit, or a lower limit that still fits the longest possible prompt."""
        letters = [policy.longest_prompt() for policy in self.policies.served.values()]
        most = self.limits.max_body_bytes
        known = [number for number in letters if number is not None]
        needed = ESCAPED * max(known, default=0) + ASIDE_BYTES
        if len(known) < len(letters) or needed >= most:
            return BodyLimit(most, "art serve --max-body sets this limit")
        return BodyLimit(needed, "no longer prompt fits the model's context")

    # --- more routes --------------------------------------------------------------------------------------------------

    async def _ready(self, http: HttpRequest) -> Response:
        if self.admission.state != "open":
            error = ChatError(503, f"not ready: {self.admission.state}", code=self.admission.state)
            return error_response(error, WIRES.at(http.url.path, http.headers))
        models = [
            {"id": name, "step": policy.source.step} | ({"policy": digest} if (digest := policy.proven.newest) else {})
            for name, policy in self.policies.served.items()
        ]
        body = msgspec.json.encode({"status": "ready", "models": models})
        return Response(body, media_type="application/json")


async def _no_feedback(http: HttpRequest) -> Response:
    message = "art serve records no calls that could be rated; art gateway CONFIG --follow does"
    raise ChatError(404, message, code="not_recorded")


def _step_of(policy: ServedPolicy) -> float:
    return policy.source.step
