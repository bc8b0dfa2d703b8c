"""Wire: a client protocol, from the request body to the last event of a streamed answer.

A wire converts between JSON and the records of requests.py and replies.py. The application (chat_app.py) receives the
body, asks a backend, and sends the wire's output. To add a protocol, write a class like `Wire` in a new file and add it
to WIRES, which the gateway and `art serve` read.
"""

from collections.abc import Iterator
from typing import Protocol

from starlette.datastructures import Headers

from art_cli.chat.chat_errors import ChatError
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request, Sampling
from art_cli.chat.wires.anthropic_messages import AnthropicCountTokens, AnthropicMessages
from art_cli.chat.wires.openai_chat import OpenAIChat
from art_cli.chat.wires.openai_completions import OpenAICompletions
from art_cli.chat.wires.openai_responses import OpenAIResponses


class Events(Protocol):
    """One streamed answer as server-sent events. Each method returns events, as bytes to send."""

    def render(self, chunk: Chunk) -> bytes:
        """Returns the events for a chunk, if the client asked for its content."""

    def finish(self) -> bytes:
        """Returns the final events of a successful stream."""

    def fail(self, error: ChatError) -> bytes:
        """Returns the final events after a failure during the stream."""


class Wire(Protocol):
    """A client protocol at one path. Stateless, so all requests share an instance.

    A protocol with several paths has several wires. A path that only asks about a prompt (such as its token count)
    parses to a Request with `is_recorded=False`, which the gateway answers without recording a turn.
    """

    @property
    def path(self) -> str:
        """The path that clients send POST requests to: "/v1/chat/completions"."""

    @property
    def header(self) -> str:
        """header that only this protocol's clients send, if any"""

    def key(self, headers: Headers) -> str | None:
        """Returns the client's API key."""

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        """Parses a body; `defaults` fill in sampling parameters. Raises ChatError 400 for an invalid body."""

    def render(self, request: Request, reply: Reply) -> bytes:
        """Returns a complete reply as JSON."""

    def stream(self, request: Request) -> Events:
        """Returns the renderer for a streamed reply."""

    def error(self, error: ChatError) -> bytes:
        """Returns an error as JSON."""

    def status(self, error: ChatError) -> int:
        """Returns the HTTP status: `error.status`, unless the protocol defines another status."""


class Wires:
    """The wires of a server by path. The first wire also handles paths without a wire."""

    def __init__(self, *wires: Wire) -> None:
        self._by_path = {wire.path: wire for wire in wires}
        self._default = wires[0]

    def __iter__(self) -> Iterator[Wire]:
        return iter(self._by_path.values())

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    def at(self, path: str, headers: Headers | None = None) -> Wire:
        """Returns the path's wire; for other paths, the first wire whose header the client sent."""
        if path in self or headers is None:
            return self._by_path.get(path, self._default)
        return next((wire for wire in self if wire.header in headers), self._default)

    def key(self, path: str, headers: Headers) -> str | None:
        """Returns the key of a request to `path`, as the path's wire reads it. Other paths accept any wire's form."""
        wires = [self._by_path[path]] if path in self else self
        return next((key for wire in wires if (key := wire.key(headers)) is not None), None)


WIRES = Wires(OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages(), AnthropicCountTokens())
