"""The interface between clients and engines, shared by the gateway, the embedded engine's server, and `art serve`.

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
