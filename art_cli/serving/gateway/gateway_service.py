"""GatewayService: the capturing gateway on a port, from the first call to the last file.

    listen -> answer, record, rotate -> stopping: 503 for new calls, those in flight end -> the last file is written

SIGTERM and SIGINT stop it; a second signal ends it without waiting for calls in flight. A kill needs no end: the next
start goes on with what the journal holds.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from art_cli.chat.chat_app import build_app
from art_cli.chat.http_server import serve
from art_cli.chat.reading import RequestReader
from art_cli.chat.request_body import BodyLimit
from art_cli.chat.requests import Sampling
from art_cli.config.schema import GatewayConfig
from art_cli.engines import Engine
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runtime import signals
from art_cli.runtime.errors import ArtError
from art_cli.runtime.secrets import Secrets
from art_cli.serving.admission import Admission
from art_cli.serving.gateway.client_backend import ClientBackend
from art_cli.serving.gateway.clients import Clients, NamedConversations
from art_cli.serving.gateway.conversations import Conversations
from art_cli.serving.gateway.journal import Journal
from art_cli.serving.gateway.redaction import Redactor
from art_cli.serving.meter import CONTENT_TYPE, Meter
from art_cli.serving.middleware import Middleware
from art_cli.serving.stopping import Stopping

log = logging.getLogger(__name__)

CONCURRENCY = 1024  # calls in flight; more get 429
SWEEPS = 10  # times in `gateway.idle_s` that idle conversations and due files are looked for
LONGEST_SWEEP_S = 10.0
GRACE_S = 1  # longest wait for connections to close; calls have had `drain_s` before
NO_LIMIT = 2**31 - 1


class Totals(NamedTuple):
    """The output of one gateway. Example: Totals(num_calls=310, num_trajectories=120, num_exact=118, num_files=2)"""

    num_calls: int
    num_trajectories: int
    num_exact: int  # trajectories in which every call has token ids and logprobs
    num_files: int


class GatewayService:
    """Records the calls to a started engine in the files of an opened journal."""

    def __init__(
        self,
        engine: Engine,
        journal: Journal,
        config: GatewayConfig,
        *,
        clients: Clients,
        secrets_known: Secrets,
        enforces_formats: bool = True,
        drain_s: float = 30.0,
        max_body_bytes: int = BodyLimit().num_bytes,
    ) -> None:
        """`secrets_known`: the keys of the clients and of the endpoint, which no file may hold."""
        self._engine, self._journal, self._config = engine, journal, config
        self.admission = Admission(concurrency=CONCURRENCY, queue=0)
        self.stopping = Stopping(drain_s, refuse=self.admission.drain, num_running=lambda: self.admission.num_in_flight)
        redactor = Redactor(config.redact, secrets_known)
        gateway = Gateway(
            engine,
            defaults=Sampling(),
            seed=secrets.randbits(31),  # another one after a restart, so that no call is sampled as one before it
            max_turns=NO_LIMIT,
            enforces_formats=enforces_formats,
        )
        self.conversations = Conversations(gateway, journal, redactor, config)
        reader = RequestReader()
        self._backends = {
            label: ClientBackend(label, engine, self.conversations, journal, redactor, reader)
            for label in clients.labels
        }
        self._meter = Meter()
        self._meter.in_flight.set_function(lambda: self.admission.num_in_flight)
        self._meter.ready.set_function(lambda: self.admission.state == "open")
        app = build_app(
            lambda key: self._backends.get(clients.label(key) or ""),
            body_limit=lambda: BodyLimit(max_body_bytes, "art gateway --max-body sets this limit"),
            more=[Route("/metrics", self._metrics, methods=["GET"])],
        )
        self.app = Middleware(NamedConversations(app, clients), clients, self.admission, self._meter)

    @property
    def totals(self) -> Totals:
        written = self._journal.written
        return Totals(
            num_calls=sum(backend.num_calls for backend in self._backends.values()),
            num_trajectories=sum(each.num for each in written),
            num_exact=sum(each.num_exact for each in written),
            num_files=len(written),
        )

    async def run(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serves until it is stopped; `on_ready` gets the root, `http://127.0.0.1:8000`.

        Raises EngineError: the address is not available, or the engine failed; OSError: the last file cannot be
        written, and the next start writes it.
        """
        self.conversations.restore(self._journal.outline())
        with signals.calling(self.stopping.stop):  # also while the last file is written
            async with serve(self.app, host, port, grace_s=GRACE_S) as root:
                self.admission.open()
                on_ready(root)
                try:
                    await self.stopping.ends_before(self._watch())
                    await self.stopping.drain(self.admission.emptied())
                finally:
                    self.admission.drain()
            await asyncio.to_thread(self._journal.finish)

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._engine.watch())
            group.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Ends idle conversations and writes files when they are due. A file that cannot be written is tried again."""
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_S, self._config.idle_s / SWEEPS, self._config.rotate_s / SWEEPS))
            self.conversations.end_idle()
            if not self._journal.is_due(time.time()):
                continue
            try:
                await self._journal.rotate(self.conversations.open.keys())
            except (OSError, ArtError) as error:
                log.error("no trajectories were written; the calls stay in the journal: %s", error)

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self._meter.render(), media_type=CONTENT_TYPE)
