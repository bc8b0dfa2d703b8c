"""The interface between clients and engines, shared by the gateway, the embedded engine's server, and `art serve`.

    chat_errors.py        ChatError: a refused or failed request with its HTTP status
    requests.py           Request and Sampling
    replies.py            Reply, Choice, and Chunk
    wires/                one file per client protocol; converts JSON to Request, and Reply and Chunk to JSON and events
    chat_app.py           the ASGI application over any Backend; splits a request with several prompts
    api_keys.py           valid API keys; protects servers without a key from web pages
    reading.py            reads request bodies and parses JSON within limits
    client.py             HttpBackend: any OpenAI-compatible endpoint as a Backend
    anthropic_client.py   AnthropicBackend: any Anthropic Messages endpoint as a Backend
    proven_steps.py       maps steps to policy digests once the weights are proven
    control_tokens.py     keeps a template's control tokens out of user text
    http_server.py        runs the application on a local port, with deadlines for start, stop, and slow clients

The central type is `Backend`. The embedded engine samples in this process, and HttpBackend calls another server. The
gateway's RecordingBackend and serving's Dispatch wrap another Backend. Reply and Chunk always carry tokens, but the
wire renders only the fields that the client asked for.
"""

from collections.abc import AsyncGenerator
from typing import NamedTuple, Protocol

from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request


class Backend(Protocol):
    """Answers requests. `reply` and `stream` raise ChatError.

    Cancelling the awaiting task frees all resources of the request. This happens when the client disconnects.
    """

    def models(self) -> list[str]:
        """Returns the model names."""

    async def reply(self, request: Request) -> Reply:
        """Returns the complete reply: all choices with token ids and logprobs."""

    def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Streams the reply; callers close it (`aclosing`). The chunks together have the same tokens as `reply`."""


class EngineLoad(NamedTuple):
    """The load of an engine. Example: EngineLoad(running=30, waiting=4, room=32, memory=0.6)"""

    running: int  # requests in progress
    waiting: int  # queued requests
    room: int | None = None  # maximum number of concurrent requests, if known
    memory: float = 0.0  # used fraction of the KV cache; 0 if unknown
    computed: int = 0  # total prompt and reply tokens computed so far; 0 if unknown
