"""Wire: one client protocol, from the request's body to the last event of a streamed answer.

    openai_shared.py       what OpenAI's protocols share: key, error body, sampling parameters, usage
    openai_chat.py         OpenAIChat: POST /v1/chat/completions
    openai_completions.py  OpenAICompletions: POST /v1/completions
    openai_responses.py    OpenAIResponses: POST /v1/responses, and the replies that it keeps
    responses_items.py     items of OpenAI's Responses as chat messages, and back
    anthropic_messages.py  AnthropicMessages, AnthropicCountTokens: POST /v1/messages, /v1/messages/count_tokens

A wire translates between JSON and the records of requests.py and replies.py. It answers nothing by itself: the
application (chat_app.py) receives the body, asks a backend and sends what the wire has written. To add a protocol,
write a class of the shape `Wire` in a new file here and name it in WIRES. The gateway and `art serve` read
that table.
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
        """Returns the events of one chunk; empty when the chunk holds nothing that the client asked for."""

    def finish(self) -> bytes:
        """Returns the last events of a stream that ended well."""

    def fail(self, error: ChatError) -> bytes:
        """Returns the last events of a stream that broke after it had begun."""


class Wire(Protocol):
    """One client protocol at one path. It holds no state, so that all requests share it.

    A protocol with several paths is several wires. A path that only asks about a prompt (a count of its tokens) parses
    its body to a Request with `is_recorded=False`: the gateway answers it and writes no turn down.
    """

    @property
    def path(self) -> str:
        """The path that clients send POST requests to: "/v1/chat/completions"."""

    @property
    def header(self) -> str:
        """A header that only clients of this protocol send; "" where there is none."""

    def key(self, headers: Headers) -> str | None:
        """Returns the API key that the client sent; None when it sent none."""

    def parse(self, body: bytes, defaults: Sampling) -> Request:
        """Returns the request in a body; `defaults` fill the sampling parameters that the client left out.

        Raises ChatError with status 400 when the body is not a request that this endpoint understands.
        """

    def render(self, request: Request, reply: Reply) -> bytes:
        """Returns the JSON body of a whole reply."""

    def stream(self, request: Request) -> Events:
        """Returns the renderer of one streamed reply."""

    def error(self, error: ChatError) -> bytes:
        """Returns the JSON body of a refusal or failure."""

    def status(self, error: ChatError) -> int:
        """Returns its HTTP status: `error.status`, unless the protocol has another one for this failure."""


class Wires:
    """The wires that one server speaks, found by path. The first one also speaks for paths that belong to no wire."""

    def __init__(self, *wires: Wire) -> None:
        self._by_path = {wire.path: wire for wire in wires}
        self._default = wires[0]

    def __iter__(self) -> Iterator[Wire]:
        return iter(self._by_path.values())

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    def at(self, path: str, headers: Headers | None = None) -> Wire:
        """Returns the path's wire; of a path that belongs to none, the first wire whose own header the client sent."""
        if path in self or headers is None:
            return self._by_path.get(path, self._default)
        return next((wire for wire in self if wire.header in headers), self._default)

    def key(self, path: str, headers: Headers) -> str | None:
        """Returns the key of a request to `path`: where the path's wire has it, or any wire for a path without one."""
        wires = [self._by_path[path]] if path in self else self
        return next((key for wire in wires if (key := wire.key(headers)) is not None), None)


WIRES = Wires(OpenAIChat(), OpenAICompletions(), OpenAIResponses(), AnthropicMessages(), AnthropicCountTokens())
