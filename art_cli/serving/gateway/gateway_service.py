"""GatewayService: the capturing gateway on a port, from the first call to the last file, with its clients and backend.

    listen -> answer, record, rotate -> stopping: 503 for new calls; running calls finish -> the last file is written

SIGTERM and SIGINT stop the gateway; a second signal stops it immediately. After a kill, the next start continues from
the journal.

Clients manages API keys. A key identifies a client and optionally a conversation:

    KEY           a key; conversations are told apart by their messages
    KEY:NAME      the same client; all calls with this key belong to conversation NAME

The client chooses NAME. It reaches the application as header X-Art-Conversation, which clients may also send directly.

ClientBackend answers a client's calls through the engine and records each in its conversation. An answer ends when the
call is on disk. Calls that cannot be recorded get a 503, if possible before reaching the engine.
"""

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from art_cli.chat.api_keys import Keys
from art_cli.chat.chat_app import CONVERSATION_HEADER, READ_HERE_BYTES, AppSettings, build_app
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import Stopping, serve
from art_cli.chat.reading import BodyLimit, RequestReader
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, Sampling, with_defaults
from art_cli.chat.wires import WIRES
from art_cli.config.schema import GatewayConfig
from art_cli.engines import Engine
from art_cli.rollouts.rollout_gateway import Gateway, Upstream
from art_cli.runtime import threads
from art_cli.runtime.errors import ArtError, UsageError, printable
from art_cli.runtime.secrets import MIN_LENGTH, Secrets
from art_cli.runtime.state_key import RECORD_HEADER, read_text
from art_cli.serving.gateway.client_names import read_salt
from art_cli.serving.gateway.conversations import Conversation, Conversations, prefixes_of
from art_cli.serving.gateway.feedback_service import FeedbackService
from art_cli.serving.gateway.journal import Journal
from art_cli.serving.gateway.redaction import Redactor
from art_cli.serving.gateway.served_run import ServedRun
from art_cli.serving.middleware import Admission, Meter, Middleware

log = logging.getLogger(__name__)

ANYONE = "anyone"  # client name for all calls on a server without keys
SEPARATOR = ":"
CONCURRENCY = 1024  # calls in flight; additional calls get 429
SWEEPS = 10  # checks for idle conversations and due files per `gateway.idle_s`
LONGEST_SWEEP_S = 10.0
GRACE_S = 1  # timeout for closing connections, after calls had `drain_s`
NO_LIMIT = 2**31 - 1
Part = TypeVar("Part", Reply, Chunk)


class Clients(Keys):
    """The valid keys and their names in files. Without keys, all callers on this machine count as the same client."""

    def __init__(self, keys: Sequence[str], labels: Sequence[str] = ()) -> None:
        """`labels` are the keys' names. Raises UsageError for keys that are too short to redact."""
        super().__init__(keys)
        for number, key in enumerate(keys, 1):
            if len(key) < MIN_LENGTH:
                cure = f"shorter than {MIN_LENGTH} characters; take a longer one (ART_API_KEY, --api-key-file)"
                raise UsageError(f"key {number}: {cure}")
        self._single = [Keys([key]) for key in keys]
        self.labels = [*labels] or [f"key {number}" for number in range(1, len(keys) + 1)] or [ANYONE]

    def admits(self, key: str | None) -> bool:
        return self.label(key) is not None

    def label(self, key: str | None) -> str | None:
        """Returns the key's client; None for invalid keys."""
        if not self._single:
            return ANYONE
        base, _ = self.split(key)
        admitted = [keys.admits(base) for keys in self._single]  # checks all keys, so timing reveals nothing
        return next((label for label, is_its in zip(self.labels, admitted, strict=True) if is_its), None)

    def split(self, key: str | None) -> tuple[str | None, str]:
        """Splits a key into the actual key and the conversation name ("" without a name)."""
        if key is None or super().admits(key) and self._single:
            return key, ""
        base, _, name = key.partition(SEPARATOR)
        return base, name


class NamedConversations:
    """Turns the name in a key into a header, and drops X-Art-Record: a client must not switch recording off."""

    def __init__(self, app: ASGIApp, clients: Clients) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = [(name, value) for name, value in scope["headers"] if name != RECORD_HEADER.lower().encode()]
        scope = {**scope, "headers": kept}
        headers = Headers(scope=scope)
        _, name = self._clients.split(WIRES.key(scope["path"], headers))
        if name and CONVERSATION_HEADER not in headers:
            header = (CONVERSATION_HEADER.lower().encode(), quote(read_text(name)).encode())
            scope = {**scope, "headers": [*scope["headers"], header]}
        await self._app(scope, receive, send)


class ClientBackend:
    """The calls of a client. Files call it `client` ("key 2")."""

    def __init__(
        self,
        client: str,
        upstream: Upstream,
        conversations: Conversations,
        journal: Journal,
        redactor: Redactor,
        reader: RequestReader,
        is_blind: bool = False,
    ) -> None:
        self._is_blind = is_blind
        self._client, self._upstream, self._reader = client, upstream, reader
        self._conversations, self._journal, self._redactor = conversations, journal, redactor
        self.num_calls = 0  # number of answered and recorded calls

    def models(self) -> list[str]:
        return [self._upstream.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        with self._failures_logged():
            if not request.is_recorded:
                return self._shown(await self._upstream.backend.reply(with_defaults(request, Sampling())))
            async with self._recorded(request) as (request, conversation):
                reply = await conversation.backend.reply(request)
                await self._journal.sync()
            return self._shown(msgspec.structs.replace(reply, id=_reply_id(request)))

    async def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        with self._failures_logged():
            if not request.is_recorded:
                plain = self._upstream.backend.stream(with_defaults(request, Sampling()))
                async with contextlib.aclosing(plain) as chunks:
                    async for chunk in chunks:
                        yield self._shown(chunk)
                return
            async with self._recorded(request) as (request, conversation):
                num_before = conversation.recorder.num_entries
                async with contextlib.aclosing(conversation.backend.stream(request)) as chunks:
                    async for chunk in chunks:
                        if conversation.recorder.num_entries != num_before:
                            await self._journal.sync()
                            num_before = conversation.recorder.num_entries
                        chunk.id = _reply_id(request)
                        yield self._shown(chunk)

    @contextlib.asynccontextmanager
    async def _recorded(self, request: Request) -> AsyncIterator[tuple[Request, Conversation]]:
        """Yields the call's conversation, and the request with the id by which feedback will name the reply."""
        self._journal.check_room()
        if not request.id:  # the endpoint's own ids may repeat
            request = msgspec.structs.replace(request, id=uuid.uuid4().hex)
        # the recorder reuses the redactor's cache
        is_long = self._redactor.num_new_bytes(request) > READ_HERE_BYTES
        redact = self._redactor.request
        redacted = await self._reader.read(redact, request) if is_long else redact(request)
        prefixes = await self._prefixes(redacted)
        with self._conversations.calling(self._client, request, redacted, prefixes) as conversation:
            yield request, conversation
        self.num_calls += 1

    def _shown(self, part: Part) -> Part:
        """Returns what the client gets. Recorded parts must not change, so replies are copied before."""
        part.policy = "" if self._is_blind else part.policy
        return part

    async def _prefixes(self, redacted: Request) -> list[bytes]:
        """Returns the digests of the history, computed in a thread if its calls' arguments are long."""
        messages = redacted.messages or []
        calls = [call for message in messages for call in message.get("tool_calls") or ()]
        if sum(len((call.get("function") or {}).get("arguments") or "") for call in calls) <= READ_HERE_BYTES:
            return prefixes_of(self._client, messages)
        return await self._reader.read(prefixes_of, self._client, messages)

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Logs calls that the engine failed to answer or whose client disconnected."""
        try:
            yield
        except ChatError as error:
            if error.status >= 500:
                log.warning("%s: a call failed: %s", self._client, printable(error.message, limit=500))
            raise


def _reply_id(request: Request) -> str:
    return f"{'cmpl' if request.messages is None else 'chatcmpl'}-{request.id}"


class Totals(NamedTuple):
    """The results of a gateway. Example: Totals(num_calls=310, num_trajectories=120, num_exact=118, num_files=2)"""

    num_calls: int
    num_trajectories: int
    num_exact: int  # trajectories with token ids and logprobs for every call
    num_files: int


class GatewayService:
    """Records calls to a started engine in an open journal."""

    def __init__(
        self,
        engine: Engine | ServedRun,
        journal: Journal,
        config: GatewayConfig,
        *,
        clients: Clients,
        secrets_known: Secrets,
        policy: str = "",
        is_blind: bool = False,
        enforces_formats: bool = True,
        drain_s: float = 30.0,
        max_body_bytes: int = BodyLimit().num_bytes,
    ) -> None:
        """`secrets_known` are the clients' and endpoint's keys, which must not reach any file. `policy` is the digest
        of the engine's proven weights. With `is_blind`, clients are not told which policy answered, so that their
        feedback cannot depend on it."""
        self._engine, self._journal, self._config = engine, journal, config
        self.admission = Admission(concurrency=CONCURRENCY, queue=0)
        self.stopping = Stopping(drain_s, refuse=self.admission.drain, num_running=lambda: self.admission.num_in_flight)
        redactor = Redactor(config.redact, secrets_known, salt=read_salt(journal.directory))
        gateway = Gateway(
            engine,
            defaults=Sampling(),
            seed=secrets.randbits(31),  # changes after a restart, so samples do not repeat
            max_turns=NO_LIMIT,
            enforces_formats=enforces_formats,
        )
        gateway.proven.add(engine.endpoint.step, policy)
        self.conversations = Conversations(gateway, journal, redactor, config)
        reader = RequestReader()
        self._backends = {
            label: ClientBackend(label, engine, self.conversations, journal, redactor, reader, is_blind)
            for label in clients.labels
        }
        self._feedback = FeedbackService(journal, redactor, self.admission, config.feedback, clients.label)
        self._meter = Meter()
        self._meter.in_flight.set_function(lambda: self.admission.num_in_flight)
        self._meter.ready.set_function(lambda: self.admission.state == "open")
        app = build_app(
            lambda key: self._backends.get(clients.label(key) or ""),
            AppSettings(
                body_limit=lambda: BodyLimit(max_body_bytes, "art gateway --max-body sets this limit"),
                policy_of=lambda name: gateway.proven.newest,
            ),
            more=[self._meter.route, *self._feedback.routes],
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
        """Serves until stopped. `on_ready` receives the root URL, `http://127.0.0.1:8000`.

        Raises EngineError if the address is unavailable or the engine fails, and OSError if the last file cannot be
        written. The next start then writes this file.
        """
        self.conversations.restore(self._journal.outline())
        with self._feedback.opened(), threads.calling(self.stopping.stop):  # also while writing the last file
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
        """Ends idle conversations and writes due files. If writing fails, it is retried."""
        while True:
            await asyncio.sleep(min(LONGEST_SWEEP_S, self._config.idle_s / SWEEPS, self._config.rotate_s / SWEEPS))
            self.conversations.end_idle()
            if not self._journal.is_due(time.time()):
                continue
            try:
                await self._journal.rotate(self.conversations.open.keys())
            except (OSError, ArtError) as error:
                log.error("no trajectories were written; the calls stay in the journal: %s", error)
