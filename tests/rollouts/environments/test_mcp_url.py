"""MCP servers behind a URL: a real one over streamable HTTP and SSE, and servers that misbehave."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server import MCPServer
from mcp.types import EmbeddedResource, ImageContent, TextContent, TextResourceContents
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from art_cli.rollouts.environments import Settings, mcp_connection, open_environment
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import UsageError
from tests.rollouts.environments.test_mcp import played, scripted
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import tool_call

TASK = {"task": "Go.", "answer": "42"}
KEY = "Bearer k-123"


# --- a real server ----------------------------------------------------------------------------------------------------


def add(a: int, b: int) -> int:
    return a + b


def long(length: int) -> str:
    return "x" * length


def look() -> list[Any]:
    text = TextResourceContents(uri="file:///note", text="a note")
    return [
        ImageContent(type="image", data="AA==", mimeType="image/png"),
        EmbeddedResource(type="resource", resource=text),
        TextContent(type="text", text=""),
    ]


def hang(seconds: float) -> None:
    time.sleep(seconds)


def real_server() -> MCPServer:
    server = MCPServer("real")
    server.add_tool(add)
    for tool in (long, hang, look):
        server.add_tool(tool, structured_output=False)
    return server


class Keyed:
    """An application that asks for KEY."""

    def __init__(self, app: Starlette) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and Request(scope).headers.get("authorization") != KEY:
            await PlainTextResponse("no", 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)


@pytest.fixture(scope="module", params=["mcp", "sse"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a real server in a separate thread, which requires a key."""
    server = real_server()
    app = server.sse_app() if request.param == "sse" else server.streamable_http_app()
    running = uvicorn.Server(uvicorn.Config(Keyed(app), port=0, log_level="critical", timeout_graceful_shutdown=0))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}/{request.param}"
    running.should_exit = True
    thread.join(10)


@pytest.mark.slow
async def test_a_url_is_played_as_a_command_is(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamable HTTP, and SSE for URLs that end in /sse. The key is in a variable. A result of 10 MB is truncated;
    over SSE an oversized event fails the attempt.
    """
    monkeypatch.setenv("MCP_AUTHORIZATION", KEY)
    calls = [tool_call("add", a=17, b=25), tool_call("add", a="x", b=1), tool_call("look")]
    stage = Stage(tmp_path, scripted(*calls, "It is 42.", tool_call("long", length=10_000_000), "Long."))
    args = {"headers": {"Authorization": "MCP_AUTHORIZATION"}, "max_result": 500}
    right, cut = await played(stage, TASK, TASK, name=f"mcp/{url}", args=args)
    assert (right.error, right.returned_reward) == (None, 1.0)
    told = [str(message["content"]) for message in right.messages if message["role"] == "tool"]
    assert told[0] == "42" and "valid integer" in told[1]
    assert told[2].split("\n") == ["[image, which is not shown]", "a note", ""]
    assert right.metrics.items() >= {"tool_calls": 3, "tool_errors": 1}.items()
    if url.endswith("sse"):
        assert cut.error is not None and "long" in cut.error
    else:
        assert str(cut.messages[2]["content"]) == "x" * 500 + " [9999500 more characters]"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"headers": {"Authorization": "NOT_SET_AT_ALL"}}, "NOT_SET_AT_ALL is not set"),
        ({"headers": {"Authorization": ["x"]}}, "is not set"),
        ({"headers": "x"}, "HEADER: NAME_OF_A_VARIABLE"),
        ({"transport": "udp"}, "'http' or 'sse', not 'udp'"),
        ({"variables": ["HOME"]}, "only a command takes it"),
        ({"timeout_s": 0.0}, "above 0"),
        ({"max_result": -1}, "above 0"),
        ({"tools": [1]}, "a list of names"),
    ],
)
def test_settings_of_a_url_that_cannot_be_kept_to_are_refused_in_words(args: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as refusal:
        open_environment(Settings("mcp/http://127.0.0.1:1/mcp", args))
    assert words in str(refusal.value)


def test_a_server_that_refuses_the_key_is_named_with_the_cure(url: str) -> None:
    with pytest.raises(UsageError, match="answers 401; args.headers"):
        open_environment(Settings(f"mcp/{url}"))


@pytest.mark.slow
async def test_a_tool_that_hangs_fails_the_attempt_within_the_time(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_AUTHORIZATION", KEY)
    stage = Stage(tmp_path, scripted(tool_call("hang", seconds=10)))
    args = {"headers": {"Authorization": "MCP_AUTHORIZATION"}, "timeout_s": 2.0}
    (hung,) = await played(stage, TASK, name=f"mcp/{url}", args=args)
    assert hung.error is not None and "timed out" in hung.error


# --- servers that misbehave -------------------------------------------------------------------------------------------


def tools(*names: str, schema: Any = None) -> dict[str, Any]:
    return {"tools": [{"name": name, "inputSchema": schema or {"type": "object"}} for name in names]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


class Handler(BaseHTTPRequestHandler):
    """Answers JSON-RPC as the server's `listed` and `called` say: a result, or bytes that are the whole answer."""

    protocol_version = "HTTP/1.1"
    server: "Misbehaving"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = {"initialize": INITIALIZED, "tools/list": self.server.listed, "tools/call": self.server.called}
        if "id" not in asked:
            self._send(b"", 202)
        elif (result := results.get(asked["method"])) is None:
            unknown = {"code": -32601, "message": "no such method"}
            self._send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "error": unknown}).encode())
        elif result == "hang":
            self.server.is_over.wait(20)
        elif result == "close":
            self.close_connection = True
        elif isinstance(result, bytes):
            self._send(result)
        else:
            self._send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode())

    def do_GET(self) -> None:
        self._send(b"", 405)

    def _send(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


INITIALIZED = {
    "protocolVersion": "2025-06-18",
    "capabilities": {"tools": {}},
    "serverInfo": {"name": "x", "version": "1"},
}


class Misbehaving(ThreadingHTTPServer):
    daemon_threads = True
    listed: Any = None
    called: Any = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/mcp"

    def handle_error(self, *_: Any) -> None:
        """A client that leaves is expected."""


@pytest.fixture(scope="module")
def server() -> Iterator[Misbehaving]:
    with Misbehaving() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.is_over.set()
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ("hang", "timed out"),
        ("close", ""),
        (b"no json", ""),
        (b'{"jsonrpc": "2.0", "id": 1, "result": {"tools": ' + b"[" * 5000, ""),
        ({"tools": 5}, "tools"),
        ({"tools": [{"name": "x"}]}, "inputSchema"),
        ({"tools": [{"name": "x", "inputSchema": 5}]}, "inputSchema"),
        ({"tools": []}, "the server has no tools"),
        (tools("same", "same"), "two tools 'same'"),
        (tools("bad name\n"), "not a valid tool name"),
        (tools("x" * 200), "not a valid tool name"),
        ({**tools("x"), "nextCursor": "again"}, "two tools 'x'"),
        ({"tools": [], "nextCursor": "again"}, "more than 3 pages"),
        (tools("x", schema={"type": "object", "description": "y" * 1_100_000}), "list the tools that the agent needs"),
    ],
)
def test_a_server_whose_tools_cannot_be_offered_is_refused_in_words(
    server: Misbehaving, listed: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "MAX_PAGES", 3)
    server.listed = listed
    with pytest.raises(UsageError) as refusal:
        open_environment(Settings(f"mcp/{server.url}", {"timeout_s": 0.7 if listed == "hang" else 20.0}))
    assert words in str(refusal.value) and len(str(refusal.value)) < 2000


def test_an_address_without_a_server_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="cannot be played"):
        open_environment(Settings("mcp/http://127.0.0.1:1/mcp", {"timeout_s": 2.0}))


@pytest.mark.slow
@pytest.mark.parametrize("called", ["hang", "close", b"no json", {"content": 5}, {"content": [{"type": "text"}]}, {}])
async def test_a_server_that_breaks_in_the_middle_fails_the_attempt(
    tmp_path: Path, server: Misbehaving, called: Any
) -> None:
    server.listed, server.called = tools("go"), called
    (broken,) = await played_here(tmp_path, server, tool_call("go"))
    assert broken.error is not None and broken.error.startswith("EnvironmentFault: mcp/http")
    assert len(broken.error) < 2000


async def test_an_answer_without_an_end_is_not_read_to_it(
    tmp_path: Path, server: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_connection, "MAX_MESSAGE", 100_000)
    server.listed, server.called = tools("go"), {"content": [{"type": "text", "text": "x" * 200_000}]}
    (broken,) = await played_here(tmp_path, server, tool_call("go"))
    assert broken.error is not None and broken.error.startswith("EnvironmentFault: mcp/http")


@pytest.mark.slow
async def test_500_tools_with_deep_schemas_are_offered_as_they_are(tmp_path: Path, server: Misbehaving) -> None:
    """A schema is data for the policy's prompt. One deeper than the gateway reads is refused there, in words."""
    names = [f"tool.{number}/x" for number in range(500)]
    server.listed, server.called = tools(*names, schema=nested(10)), {"content": [{"type": "text", "text": "done"}]}
    (played_with,) = await played_here(tmp_path, server, tool_call(names[499]), "It is 42.")
    assert (played_with.error, played_with.returned_reward) == (None, 1.0)
    assert [tool["function"]["name"] for tool in played_with.tools] == names
    assert played_with.tools[7]["function"]["parameters"] == nested(10)
    server.listed = tools("deep", schema=nested(90))
    (refused,) = await played_here(tmp_path, server, "It is 42.")
    assert refused.error is not None and "nested" in refused.error


async def played_here(directory: Path, server: Misbehaving, *answers: Any) -> list[Trajectory]:
    stage = Stage(directory, scripted(*answers))
    return await played(
        stage, TASK, name=f"mcp/{server.url}", args={"timeout_s": 2.0 if server.called == "hang" else 20.0}
    )
