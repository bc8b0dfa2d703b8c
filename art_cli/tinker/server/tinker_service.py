"""BackendService: a base model on a port, from loading to the last request, with its ASGI application.

    load -> listen -> ... -> stopping: running requests finish, waiting requests fail, no partial saves -> closed

SIGTERM and SIGINT stop the service; a second signal stops it immediately.

The application contains routes, client authentication, and error answers. Keys are checked before routes, so strangers
cannot discover what is served. Every client error gets an explanation. Unsupported features are refused by name.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from art_cli.chat.api_keys import Keys, check_sender
from art_cli.chat.chat_app import gone
from art_cli.chat.chat_errors import ChatError, invalid
from art_cli.chat.http_server import Stopping, serve
from art_cli.config.schema import EngineConfig
from art_cli.runtime import threads
from art_cli.runtime.errors import ArtError, is_full_disk, one_line
from art_cli.runtime.threads import call_in_thread
from art_cli.tinker.server import BackendLimits
from art_cli.tinker.server.base_model import Base
from art_cli.tinker.server.checkpoint_store import Store
from art_cli.tinker.server.futures import Futures
from art_cli.tinker.server.hosts import make_host
from art_cli.tinker.server.models import Models
from art_cli.tinker.server.routes import Routes
from art_cli.tinker.server.samplers import Samplers
from art_cli.tinker.server.sessions import ANYONE, BackendState, owner_of
from art_cli.tinker.server.wire import PROTO, reply

log = logging.getLogger(__name__)

ROOT = "/api/v1"
ANY = ("GET", "POST", "PUT", "DELETE")
CHECKPOINT = "/training_runs/{id}/checkpoints/{kind}/{name}"
OPEN = re.compile(rf"/health|{ROOT}/downloads/[0-9a-f]+")  # download addresses are secret
KINDS_OF_BODY = ("application/json", PROTO)
CHECK_S = 2.0  # interval between checks that learner processes are alive
SWEEP_S = 30.0  # interval between cleanups of expired sessions and checkpoints
NO_ACCOUNTS = "audit logs, billing and storage usage belong to a hosted service; this server has no accounts"
NO_PROJECTS = "this server has no projects; load any of the client's checkpoints by its path"
REFUSED = {
    "/sessions/{id}/trace_export": "traces of sessions are not kept here",
    "/sessions/{id}/project": NO_PROJECTS,
    "/copy_weights": NO_PROJECTS,
    "/create_custom_loss": "custom losses run in the client: forward_backward_custom with a function",
    "/auth/token": "this server has no accounts; the key alone is enough",
    "/audit": NO_ACCOUNTS,
    "/billing/{rest:path}": NO_ACCOUNTS,
    "/retrieve_futures": "results are asked for one by one: retrieve_future",
    "/join_sampling_session": "a copied sampling client numbers its requests by chance",
}

Answerer = Callable[[Request, str], Awaitable[Response]]


def build_app(state: BackendState, keys: Keys) -> Starlette:
    routes = Routes(state)
    table: list[tuple[str, str, Answerer]] = [
        ("GET", "/healthz", routes.healthz),
        ("GET", "/get_server_capabilities", routes.capabilities),
        ("POST", "/client/config", routes.client_config),
        ("POST", "/client/dynamic_config", routes.dynamic_config),
        ("POST", "/telemetry", routes.telemetry),
        ("POST", "/create_session", routes.create_session),
        ("POST", "/session_heartbeat", routes.heartbeat),
        ("POST", "/sessions/search", routes.search_sessions),
        ("GET", "/sessions", routes.list_sessions),
        ("GET", "/sessions/{id}", routes.get_session),
        ("POST", "/sessions/{id}/finish", routes.finish_session),
        ("POST", "/create_model", routes.create_model),
        ("POST", "/get_info", routes.get_info),
        ("POST", "/unload_model", routes.unload_model),
        ("POST", "/forward", partial(routes.run_pass, backward=False)),
        ("POST", "/forward_backward", partial(routes.run_pass, backward=True)),
        ("POST", "/optim_step", routes.optim_step),
        ("POST", "/save_weights", partial(routes.save, kind="weights")),
        ("POST", "/save_weights_for_sampler", partial(routes.save, kind="sampler_weights")),
        ("POST", "/save_weights_external", partial(routes.save, kind="external_weights")),
        ("POST", "/load_weights", routes.load_weights),
        ("POST", "/weights_info", routes.weights_info),
        ("GET", "/training_runs", routes.list_runs),
        ("GET", "/training_runs/{id}", routes.get_run),
        ("GET", "/training_runs/{id}/checkpoints", routes.list_checkpoints),
        ("GET", "/checkpoints", routes.list_all_checkpoints),
        ("DELETE", CHECKPOINT, routes.delete_checkpoint),
        ("POST", f"{CHECKPOINT}/publish", routes.publish),
        ("DELETE", f"{CHECKPOINT}/publish", routes.publish),
        ("PUT", f"{CHECKPOINT}/ttl", routes.set_ttl),
        ("GET", f"{CHECKPOINT}/archive", routes.archive),
        ("GET", f"{CHECKPOINT}/external_weights_urls", routes.external_urls),
        ("POST", "/create_sampling_session", routes.create_sampling_session),
        ("GET", "/samplers/{id}", routes.get_sampler),
        ("POST", "/asample", routes.asample),
        ("POST", "/retrieve_future", routes.retrieve),
        ("POST", "/cancel_future", routes.cancel),
    ]
    answered = [Route(ROOT + path, partial(_answer, work), methods=[method]) for method, path, work in table]
    refused = [Route(ROOT + path, partial(_answer, _refusal(why)), methods=ANY) for path, why in REFUSED.items()]
    health = Route("/health", partial(_answer, routes.healthz), methods=["GET"])
    download = Route(f"{ROOT}/downloads/{{token}}", routes.download, methods=["GET"])
    app = Starlette(
        routes=[*answered, *refused, download, health],
        middleware=[Middleware(_Doorkeeper, keys=keys)],
        exception_handlers={
            ChatError: _refuse,
            ArtError: _refuse,
            HTTPException: _no_route,
            ClientDisconnect: gone,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    return app


def _refusal(why: str) -> Answerer:
    async def refuse(http: Request, owner: str) -> Response:
        raise invalid(f"{http.url.path} is not served: {why}")

    return refuse


class _Doorkeeper:
    """Refuses requests without a valid key, except OPEN; without keys, web pages and other machines."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        try:
            http.state.owner = self._owner(http)
        except ChatError as error:
            await reply({"detail": error.message}, error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _owner(self, http: Request) -> str:
        """Returns the client's name. Raises ChatError for invalid or conflicting keys (401) and for web pages (403)."""
        if not self._keys:
            check_sender(http.method, http.headers, KINDS_OF_BODY)
            return ANYONE
        if OPEN.fullmatch(http.scope["path"]) and http.method in ("GET", "HEAD"):
            return ANYONE
        sent = http.headers.getlist("x-api-key")
        for value in http.headers.getlist("authorization"):
            scheme, _, bearer = value.partition(" ")
            sent += [bearer] if scheme.lower() == "bearer" else []
        if len(set(sent)) != 1 or not self._keys.admits(sent[0]):
            raise ChatError(401, "this server needs its own key in X-API-Key: TINKER_API_KEY of the client")
        return owner_of(sent[0])


async def _answer(work: Answerer, http: Request) -> Response:
    return await work(http, http.state.owner)


async def _refuse(http: Request, error: Exception) -> Response:
    if not isinstance(error, ChatError):
        return reply({"detail": one_line(error)}, 400)
    headers = {"retry-after": error.retry_after} if error.retry_after else None
    return reply({"detail": error.message}, error.status, headers)


async def _no_route(http: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    what = "no such path" if status == 404 else "not this method"
    return reply({"detail": f"{http.method} {http.url.path[:200]}: {what} here"}, status)


async def _bug(http: Request, error: Exception) -> Response:
    if is_full_disk(error):
        log.error("%s %s: no space left on the disk of the checkpoints", http.method, http.url.path)
        return reply({"detail": "no space left on the server's disk: free some there"}, 507)
    log.error("%s %s failed", http.method, http.url.path, exc_info=error)
    return reply({"detail": f"this is a bug in art: {type(error).__name__}"}, 500)


class BackendService:
    def __init__(
        self, base: Base, *, root: Path, engine: EngineConfig, keys: Keys, limits: BackendLimits, logs: Path
    ) -> None:
        weights = base.weights
        self.base, self.limits, self._logs = base, limits, logs
        self.futures = Futures(pending=limits.pending, pending_bytes=limits.pending_bytes)
        store = Store(root, base=weights.base, dtype=weights.dtype_name, quota=limits.quota_bytes)
        self.host = make_host(base, engine, limits, logs)
        self.samplers = Samplers(base, store, self.host, limits)
        self.models = Models(base, store, self.samplers, self.futures, limits)
        self.state = BackendState(base, store, self.models, self.samplers, self.futures, limits)
        self.app = build_app(self.state, keys)
        self.stopping = Stopping(limits.drain_s, refuse=lambda: None, num_running=lambda: self.futures.num_open)

    async def run(self, host: str, port: int, on_ready: Callable[[str], None]) -> None:
        """Serves until a signal arrives; `on_ready` gets the root URL. Raises EngineError."""
        try:
            await call_in_thread(self.base.start, self._logs)
            await self.host.start()
            async with serve(self.app, host, port, grace_s=1) as root:
                with threads.calling(self.stopping.stop):
                    try:
                        on_ready(root)
                        await self.stopping.ends_before(self._watch())
                    finally:
                        self.futures.refuse()
                        await self.stopping.drain(self._finish())
                        await self.futures.close()
        finally:
            await self.samplers.policies.close()
            await call_in_thread(self.base.close)

    async def _finish(self) -> None:
        await self.models.close()
        await self.futures.finish()

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as group:
            for work in (self.host.watch(), self._watch_learner(), self._sweep()):
                group.create_task(work)

    async def _watch_learner(self) -> NoReturn:
        """Raises LearnerError if a learner process is dead. Its adapters are then lost."""
        while True:
            await call_in_thread(self.base.check_alive)
            await asyncio.sleep(CHECK_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await call_in_thread(self.state.store.sweep)
            except (OSError, ArtError) as error:
                log.warning("what expired cannot be deleted: %s", error)
            for session in self.state.sessions.expired():
                log.info("session %s sent nothing for %g s; its models go", session.id, self.limits.session_s)
                try:
                    await self.state.end(session)
                except Exception:  # boundary to a client's session: an error must not stop the server
                    log.exception("session %s did not end as it should", session.id)
