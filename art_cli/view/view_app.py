"""The page and its answers over HTTP: a Starlette application behind PageGuard. Answers are computed in threads.

GET / and the page's files; GET /api/... (the routes below); POST /api/chat and .../label, a person's answer.

PageGuard refuses requests from other sites (chat/api_keys.py), and sends a content policy with each answer.
"""

import ipaddress
import socket
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from art_cli.chat.api_keys import check_sender, is_loopback
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.http_server import unless_disconnected
from art_cli.chat.reading import BodyLimit, read_body
from art_cli.runtime.errors import printable
from art_cli.runtime.worker_pool import Crowded, Overran, WorkerPool
from art_cli.view.group_rows import Query
from art_cli.view.page_answers import Answers, NotThere
from art_cli.view.rows import number_of

if TYPE_CHECKING:
    from art_cli.view.chat import ChatRelay

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
REFUSAL = b'{"error":"ask for this page by its own address, from no other site, and send application/json"}'
WAIT_S, RUN_S = 60.0, 60.0  # longest wait for a thread, and longest duration of an answer
NUM_THREADS = 4
MAX_LIMIT = 1000  # groups per answer
MAX_LABEL, LABEL_S = 2**16, 10.0  # bytes of a person's answer, and longest wait for it
FILES = {"": "index.html", "index.html": "index.html", "app.js": "app.js", "app.css": "app.css"}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
STEP = "/api/source/{s}/step/{n:int}/{split}"


class PageGuard:
    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._host = app, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                headers.setdefault("content-security-policy", POLICY)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        port = str(scope["server"][1])
        try:
            check_sender(scope["method"], Headers(scope=scope), is_own=partial(self._is_own, port))
        except ChatError as error:
            refusal = Response(REFUSAL, 415 if error.status == 415 else 403, media_type="application/json")
            await refusal(scope, receive, send_guarded)
        else:
            await self._app(scope, receive, send_guarded)

    def _is_own(self, port: str, name: str, given: str) -> bool:
        return given == (port if port != "80" else given or port) and is_own_name(name, self._host)


def is_own_name(name: str, host: str) -> bool:
    """Returns True if `name` is a server's listening on `host`; on all addresses, all of the machine's are."""
    if is_loopback(name) or name == host.lower():
        return True
    if host not in ("0.0.0.0", "::", ""):
        return False
    own = socket.gethostname().lower()
    return _is_address(name) or name in (own, f"{own}.local")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def build_app(answers: Answers, *, host: str, chat: "ChatRelay | None" = None) -> ASGIApp:
    """Returns the application for a server that listens on `host`."""
    routes = _Routes(answers, chat, is_private=is_loopback(host))

    def groups(q: dict[str, Any]) -> Any:
        return answers.groups(q["s"], q["n"], q["split"], read_query(q["query"]))

    app = Starlette(
        routes=[
            Route("/api/sources", routes.of(lambda q: answers.sources())),
            Route("/api/revision", routes.of(lambda q: answers.revision())),
            Route("/api/chat", routes.chat, methods=["POST"]),
            Route("/api/source/{s}", routes.of(lambda q: answers.source(q["s"]))),
            Route("/api/source/{s}/drawing", routes.drawing),
            Route("/api/source/{s}/judge/{n:int}", routes.of(lambda q: answers.judge(q["s"], q["n"]))),
            Route(f"{STEP}/groups", routes.of(groups)),
            Route(f"{STEP}/label", routes.label, methods=["GET", "POST"]),
            Route(f"{STEP}/histogram", routes.of(lambda q: answers.histogram(q["s"], q["n"], q["split"]))),
            Route(f"{STEP}/group/{{g:path}}", routes.of(lambda q: answers.group(q["s"], q["n"], q["split"], q["g"]))),
            Route("/api/source/{s}/trajectory/{t:path}", routes.of(lambda q: answers.trajectory(q["s"], q["t"]))),
            Route("/api/source/{s}/scenario/{id:path}", routes.of(lambda q: answers.scenario(q["s"], q["id"]))),
            Route("/{name}", routes.file),
            Route("/", routes.file),
        ],
        exception_handlers={HTTPException: _refuse, Exception: _fail},
    )
    app.router.redirect_slashes = False
    return PageGuard(app, host)


def read_query(query: Any) -> Query:
    """Returns the query for a list of groups; invalid values are ignored."""
    sort = query.get("sort", "index")
    return Query(
        sort=sort if sort in ("index", "reward", "spread", "errors", "length") else "index",
        is_descending=query.get("order") == "desc",
        text=query.get("text", "")[:1000],
        min=_number(query.get("min")),
        max=_number(query.get("max")),
        has_errors=query.get("errors") == "1",
        source=query.get("source", ""),
        offset=int(min(2**31, max(0, _number(query.get("offset")) or 0))),
        limit=int(min(MAX_LIMIT, max(0, _number(query.get("limit", "100")) or 0))),
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else number_of(float(text))
    except ValueError:
        return None


class _Routes:
    def __init__(self, answers: Answers, chat: "ChatRelay | None", *, is_private: bool) -> None:
        self._answers, self._chat, self._is_private = answers, chat, is_private
        self._workers = WorkerPool(size=NUM_THREADS, wait_s=WAIT_S, run_s=RUN_S)

    def of(self, make: Callable[[dict[str, Any]], Any]) -> Callable[[HttpRequest], Any]:
        """Returns a route that computes and encodes `make`'s answer in a thread."""

        async def route(http: HttpRequest) -> Response:
            asked = {**http.path_params, "query": http.query_params}
            return await self._answer(http, lambda: json_of(make(asked)))

        return route

    async def _answer(self, http: HttpRequest, make: Callable[[], bytes], kind: str = "application/json") -> Response:
        """Runs `make` in a thread, which is abandoned when the page disconnects."""
        try:
            return Response(await unless_disconnected(http.receive, self._workers.call(make)), media_type=kind)
        except ClientDisconnect:
            return Response(status_code=499)
        except NotThere as error:
            raise HTTPException(404, str(error)) from error
        except Overran:
            raise HTTPException(503, f"the answer takes longer than {RUN_S:.0f} s; ask for less") from None
        except Crowded:
            raise HTTPException(503, "too many questions at once; ask again") from None

    async def drawing(self, http: HttpRequest) -> Response:
        """Returns a drawing's page. Its policy is also sent as a header, with a sandbox."""
        response = await self._answer(http, lambda: self._answers.drawing(http.path_params["s"]).encode(), "text/html")
        text = bytes(response.body).decode()
        policy = text.partition('content="')[2].partition('"')[0]
        response.headers["content-security-policy"] = f"{policy}; frame-ancestors 'self'; sandbox allow-scripts"
        return response

    async def label(self, http: HttpRequest) -> Response:
        """Stores a person's answer, if sent from this machine, and returns the next pair."""
        if http.method == "POST" and not self._is_private:
            raise HTTPException(403, "labels are only taken where art view listens on this machine alone")
        try:
            answer = await read_body(http, BodyLimit(MAX_LABEL), LABEL_S) if http.method == "POST" else b""
        except ChatError as error:
            raise HTTPException(error.status, str(error)) from error
        asked = http.path_params
        make = partial(self._answers.labels, asked["s"], asked["n"], asked["split"], answer)
        return await self._answer(http, lambda: json_of(make()))

    async def chat(self, http: HttpRequest) -> Response:
        if self._chat is None:
            raise HTTPException(404, "start art view with --endpoint to talk to a model")
        return await self._chat.answer(http)

    async def file(self, http: HttpRequest) -> Response:
        name = FILES.get(http.path_params.get("name", ""))
        data = page_file(name) if name is not None else None
        if name is None or data is None:
            raise HTTPException(404, "no such page")
        return Response(data, media_type=TYPES[name[name.rindex(".") :]])


def page_file(name: str) -> bytes | None:
    place = files("art_cli.view") / "app" / name
    return place.read_bytes() if place.is_file() else None


def json_of(value: Any) -> bytes:
    """Returns the value as JSON; non-finite numbers become null."""
    return msgspec.json.encode(value)


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException), error
    sentence = printable(error.detail, limit=500)
    return Response(json_of({"error": sentence}), error.status_code, error.headers, media_type="application/json")


async def _fail(http: HttpRequest, error: Exception) -> Response:
    return Response(json_of({"error": "an internal error; the terminal of art view has the details"}), 500,
                    media_type="application/json")  # fmt: skip
