"""Every way to knock at a server without its key. The doors are read from its router, so that a new route is tried too.

for knock in knocks(app.routes, key):
    answer = await ask(root, knock)             # over a connection of its own, byte for byte as written here
"""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from httptools import parse_url
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE")
UNKNOWN = ("/", "/nowhere", "/v1", "/docs", "/openapi.json", "/%00", "/*", "/v1/models/%2e%2e/%2e%2e/metrics")
WEBSOCKET = (
    (b"Connection", b"Upgrade"),
    (b"Upgrade", b"websocket"),
    (b"Sec-WebSocket-Version", b"13"),
    (b"Sec-WebSocket-Key", b"AAAAAAAAAAAAAAAAAAAAAA=="),
)
ANSWER_S = 30.0

Headers = tuple[tuple[bytes, bytes], ...]


class Knock(NamedTuple):
    """One request. Example: Knock("GET", "/metrics", "Bearer without a key", ((b"Authorization", b"Bearer"),))"""

    method: str
    target: str  # path and query, as it stands in the request's first line
    name: str  # of its headers
    headers: Headers


class Answer(NamedTuple):
    status: int  # 0: the connection was closed without an answer
    headers: dict[str, str]
    body: bytes
    rest: bytes  # what follows the answer in the same connection


def paths_of(routes: Iterable[BaseRoute], before: str = "") -> list[str]:
    """The path of every route, with a word for each of its parameters."""
    found = []
    for route in routes:
        if isinstance(route, Mount):
            found += paths_of(route.routes, before + route.path)
        else:
            assert isinstance(route, Route), f"{route}: a kind of route that no test knocks at"
            found.append(before + re.sub("{.*?}", "policy", route.path))
    return found


def disguises(path: str) -> list[str]:
    """The path written in other ways, which some servers take for the path and their check does not."""
    name = path.rpartition("/")[2]
    return [
        *(f"/{path}", f"{path}/", f"{path}//", f"/x/..{path}", f"/%2e%2e{path}", f"{path}/%2e%2e/{name}", f"{path}%2f"),
        *(path.upper(), f"{path};x", f"{path}%00", f"{path}%20", f"http://localhost{path}", f"/health/..{path}"),
    ]


def wrong_keys(key: str) -> dict[str, Headers]:
    """Headers by name, none of which may open a door of `key`."""
    good, longer = f"Bearer {key}".encode(), f"Bearer {key}x".encode()
    same_start = f"Bearer {key[:32]}{'y' * 8}".encode()
    name = b"Authorization"
    return {
        "none": (),
        "wrong": ((name, longer),),
        "wrong, same beginning": ((name, same_start),),
        "wrong, x-api-key": ((b"X-Api-Key", longer[7:]),),
        "empty": ((name, b""),),
        "Bearer without a key": ((name, b"Bearer"),),
        "empty x-api-key": ((b"X-Api-Key", b""),),
        "without Bearer": ((name, key.encode()),),
        "Basic": ((name, b"Basic " + key.encode()),),
        "twice, the wrong one first": ((name, longer), (name, good)),
        "twice, the right one first": ((name, good), (name, longer)),
        "both in one": ((name, good + b", " + longer),),
        "a cookie": ((b"Cookie", b"api_key=" + key.encode()),),
        "a websocket": WEBSOCKET,
    }


def malformed_keys(key: str) -> dict[str, Headers]:
    """Values of the key's header that parsers, logs and error texts have failed on."""
    values = {
        "NUL": b"Bearer " + key.encode() + b"\0",
        "1 MiB": b"Bearer " + b"k" * 2**20,
        "not UTF-8": b"Bearer \xff\xfe\x80",
        "UTF-8": "Bearer ключ-密鑰-🔑".encode(),
        "a surrogate": b"Bearer \xed\xa0\x80",
        "quotes": b"Bearer ' OR '1'='1\" -- `id` $(id) {{7*7}} %s %n <script>",
        "a path": b"Bearer ../../../../etc/passwd",
        "control": b"Bearer \x1b[2J\x07\x7f",
        "spaces": b"Bearer " + b" " * 60_000,
        "a line": b"Bearer x\n y",
        "scheme alone": b":" * 1000,
    }
    return {
        f"{name}, {where.decode()}": ((where, value),)
        for name, value in values.items()
        for where in (b"Authorization", b"X-Api-Key")
    }


def knocks(routes: Iterable[BaseRoute], key: str, *, open_paths: Sequence[str] = ()) -> Iterator[Knock]:
    """Each path of the router with each method and each wrong key, or the key in the query; disguises without a key."""
    known = paths_of(routes)
    assert len(known) > 1, "a router without routes"
    for method in METHODS:
        for path in [*(path for path in known if path not in open_paths), *UNKNOWN]:
            yield Knock(method, f"{path}?api_key={key}&key={key}&access_token={key}", "in the query", ())
            for name, headers in wrong_keys(key).items():
                yield Knock(method, path, name, headers)
        for path in known:
            for written in disguises(path):
                if path not in open_paths or not written.startswith("http"):  # the form in which proxies are asked
                    yield Knock(method, written, "none", ())


async def ask(root: str, knock: Knock, body: bytes = b"{}") -> Answer:
    """The answer to one request on a connection of its own."""
    head = f"{knock.method} {knock.target} HTTP/1.1\r\n".encode()
    given = (*_usual(body), *knock.headers)
    if (b"Connection", b"Upgrade") not in given:
        given += ((b"Connection", b"close"),)
    return await send(root, head + b"".join(name + b": " + value + b"\r\n" for name, value in given) + b"\r\n" + body)


async def send(root: str, data: bytes) -> Answer:
    """What comes back for these bytes until the server closes the connection, or for a second after an answer."""
    host, _, port = root.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    try:
        writer.write(data)
        async with asyncio.timeout(ANSWER_S):
            while not (received and _is_whole(received)) and (piece := await reader.read(2**16)):
                received += piece
        async with asyncio.timeout(0.05):  # a second answer, if there is one, is close behind
            while piece := await reader.read(2**16):
                received += piece
    except (ConnectionError, TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return _read(received)


def _is_whole(received: bytes) -> bool:
    answer = _read(received)
    return b"\r\n\r\n" in received and len(answer.body) >= int(answer.headers.get("content-length", 2**62))


def _read(received: bytes) -> Answer:
    head, _, rest = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not first:
        return Answer(0, {}, b"", b"")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    length = int(headers.get("content-length", len(rest)))
    return Answer(int(first.split()[1]), headers, rest[:length], rest[length:])


async def ask_app(app: ASGIApp, knock: Knock, body: bytes = b"{}") -> Answer:
    """The application's answer, without a connection. The scope is made as uvicorn makes it."""
    url = parse_url(knock.target.encode())
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": knock.method,
        "path": unquote(url.path.decode()),
        "raw_path": url.path,
        "query_string": url.query or b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(name.lower(), value) for name, value in (*_usual(body), *knock.headers)],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]), b"")


def _usual(body: bytes) -> Headers:
    return (
        *((b"Host", b"localhost"), (b"Content-Type", b"application/json")),
        (b"Content-Length", str(len(body)).encode()),
    )


def tells_nothing(answer: Answer, *secrets: Any) -> bool:
    """Whether an answer is without a defect's traces: no 5xx, file, address, type or value of the server's inside."""
    text = answer.body.decode(errors="replace")
    traces = ('File "', "Traceback", "site-packages", ".py", " object at 0x", "Error(", "<class", "\\x", *secrets)
    return answer.status < 500 and not any(str(trace) in text for trace in traces)
