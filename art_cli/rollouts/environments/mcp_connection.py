"""Connections to an MCP server: a command over pipes, or a URL over streamable HTTP or the older SSE transport.

Limits apply to the size and duration of the server's answers. This module imports the `mcp` package and is therefore
imported only when a connection is opened.
"""

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TextIO

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from art_cli.rollouts.environments import Json
from art_cli.runtime.errors import UsageError, brief, describe, printable

LOGGERS = ("mcp.client.stdio", "mcp.client.sse", "mcp.client.streamable_http", "mcp.client.client", "client")
MAX_MESSAGE = 1 << 26  # maximum bytes of an HTTP answer; the mcp package limits SSE events to 1 MiB
MAX_TOOLS = 1_000_000  # maximum characters of all tools as JSON, because they are part of every prompt
MAX_NAME = 128  # maximum characters of a tool name, as in the protocol
MAX_PAGES = 50  # most pages of the server's list of tools


class ServerAddress(NamedTuple):
    """Example: ServerAddress("https://host/mcp", None, {"Authorization": "Bearer ..."}, "http", 60.0)"""

    url: str
    command: StdioServerParameters | None  # None if `url` is set
    headers: dict[str, str]
    transport: str  # "http" or "sse", for a URL
    timeout_s: float  # timeout for answers, for connecting, and for closing


def find_place(name: str, directory: str, args: Json) -> ServerAddress:
    """Returns the address of the server in the settings. Raises UsageError."""
    is_url = name.startswith(("http://", "https://"))
    for key in ("variables",) if is_url else ("headers", "transport"):
        if args[key]:
            kind = "a command" if is_url else "a URL"
            raise UsageError(f"rollout.environment.args.{key}: only {kind} takes it, and {name!r} is none")
    if not is_url:
        given = {each: _variable("variables", each) for each in args["variables"]}
        try:
            words = shlex.split(name)
        except ValueError as error:
            raise UsageError(f"rollout.environment mcp/{name}: not a command line: {error}") from None
        command = StdioServerParameters(command=words[0], args=words[1:], env=given, cwd=directory)
        return ServerAddress("", command, {}, "", args["timeout_s"])
    transport = args["transport"] or ("sse" if httpx2.URL(name).path.rstrip("/").endswith("/sse") else "http")
    if transport not in ("http", "sse"):
        raise UsageError(f"rollout.environment.args.transport: 'http' or 'sse', not {transport!r}")
    headers = {header: _variable("headers", each) for header, each in (args["headers"] or {}).items()}
    return ServerAddress(name, None, headers, transport, args["timeout_s"])


def _variable(key: str, name: Any) -> str:
    """Returns an environment variable's value. Raises UsageError if it is not set."""
    if not isinstance(name, str) or name not in os.environ:
        raise UsageError(f"rollout.environment.args.{key}: {printable(str(name), limit=80)} is not set")
    return os.environ[name]


@asynccontextmanager
async def connected(place: ServerAddress) -> AsyncIterator[Client]:
    """Yields a connected client. Raises any connection error, including TimeoutError."""
    loop = asyncio.get_running_loop()
    client = Client(_transport(place), read_timeout_seconds=place.timeout_s, cache=None)
    async with asyncio.timeout(place.timeout_s) as deadline:
        async with client:
            deadline.reschedule(None)
            try:
                yield client
            finally:
                with suppress(RuntimeError):  # the deadline has already passed
                    deadline.reschedule(loop.time() + place.timeout_s)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Shortens log records of the mcp package, which logs a traceback for each invalid line."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg, record.args = "MCP: %s: %s", (record.getMessage(), describe(record.exc_info[1]))
        record.exc_info = record.exc_text = None
    return True


def _transport(place: ServerAddress) -> Any:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_without_traceback)  # adding the same filter again has no effect
    if place.command is not None:
        return stdio_client(place.command, errlog=_errors())
    if place.transport == "http":
        return _streamable_http(place)
    return sse_client(place.url, httpx_client_factory=lambda headers=None, timeout=None, auth=None: _http_client(place))


def _errors() -> TextIO:
    """Returns the file for a command's errors: standard error, unless a notebook has replaced it by no file."""
    for stream in (sys.stderr, sys.__stderr__):
        with suppress(AttributeError, OSError, ValueError):
            if stream is not None and stream.fileno() >= 0:
                return stream
    raise UsageError("a command needs a standard error to write to")


@asynccontextmanager
async def _streamable_http(place: ServerAddress) -> AsyncIterator[Any]:
    async with (
        _http_client(place) as http,
        streamable_http_client(place.url, http_client=http, max_sse_event_size=MAX_MESSAGE) as streams,
    ):
        yield streams


def _http_client(place: ServerAddress) -> httpx2.AsyncClient:
    """Returns the HTTP client for a URL. Streams may be silent while the policy thinks; calls have a deadline."""
    return httpx2.AsyncClient(
        headers={**place.headers, "Accept-Encoding": "identity"},
        timeout=httpx2.Timeout(place.timeout_s, read=None),
        event_hooks={"response": [_limit]},
    )


async def _limit(response: httpx2.Response) -> None:
    """Limits the size of an answer, or of each event. Explains refused keys, which the mcp package does not."""
    if response.status_code in (401, 403):
        raise httpx2.RequestError(f"the server answers {response.status_code}; args.headers names the key's variable")
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise httpx2.DecodingError(f"content-encoding {encoding[:20]!r} was not asked for")
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream), "the answer of an asynchronous client"
        response.stream = _Limited(response.stream)


class _Limited(httpx2.AsyncByteStream):
    """Another stream's bytes, up to MAX_MESSAGE."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for piece in self._stream:
            num_bytes += len(piece)
            if num_bytes > MAX_MESSAGE:
                raise httpx2.ReadError(f"the answer is larger than {MAX_MESSAGE >> 20} MiB")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


async def list_tools(client: Client, chosen: list[str]) -> list[Json]:
    """Returns the `chosen` tools, or all tools for [], in OpenAI's format. Raises ValueError for unusable tools."""
    found: dict[str, Json] = {}
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            if chosen and tool.name not in chosen:
                continue
            if tool.name in found:
                raise ValueError(f"it has two tools {brief(tool.name)}")
            if not 0 < len(tool.name) <= MAX_NAME or not tool.name.isprintable() or " " in tool.name:
                shown = brief(tool.name)
                raise ValueError(f"{shown} is not a valid tool name; list the tools that the agent needs in args.tools")
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            found[tool.name] = {"type": "function", "function": function}
        if (cursor := page.next_cursor) is None:
            break
    else:
        raise ValueError(f"its list of tools has more than {MAX_PAGES} pages")
    try:
        size = len(json.dumps(list(found.values())))
    except (ValueError, RecursionError):
        raise ValueError("a tool's schema is nested too deeply") from None
    if size > MAX_TOOLS:
        raise ValueError(
            f"its tools are {size:,} characters of JSON; list the tools that the agent needs in args.tools"
        )
    return list(found.values())
