"""The seam that answers a request: what the gateway, the embedded engine's server and `art serve` share.

    chat_errors.py        ChatError: a refused or failed request, with its HTTP status
    requests.py           what a client asks: Request, Sampling
    replies.py            what comes back: Reply, Choice, Chunk
    wires/                one file per client protocol: JSON to Request, Reply and Chunks to JSON and events
    chat_app.py           the ASGI application over any Backend; a request with several prompts as requests with one
    api_keys.py           the valid API keys; keeps web pages out of a server without one
    reading.py            the body of a request, and its JSON within bounds
    client.py             HttpBackend: any OpenAI-compatible endpoint as a Backend
    anthropic_client.py   AnthropicBackend: any endpoint of Anthropic's Messages as a Backend
    proven_steps.py       names the policy of a reply by its step, once its weights are proven
    control_tokens.py     the template's control tokens, which no text of a conversation becomes
    http_server.py        runs the application on a port of this machine, with deadlines for start and stop, and for a
                          slow client

The seam is `Backend`. The embedded engine (samples in this process) and HttpBackend (asks another server) have this
shape, and so have the gateway's RecordingBackend and serving's Dispatch, which stand in front of one of those two.
Reply and Chunk carry tokens whether or not the client asked for them; the wire renders only what was asked for.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request


class Backend(Protocol):
    """Answers requests. `reply` and `stream` raise ChatError.

    Cancelling the awaiting task, as when the client goes away, frees everything that the request holds.
    """

    def models(self) -> list[str]:
        """Returns the names of its models."""

    async def reply(self, request: Request) -> Reply:
        """Returns the whole answer: every choice with its token ids and logprobs."""

    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """Returns the answer in pieces; the tokens of all chunks are those of `reply`."""


class EngineLoad(NamedTuple):
    """The requests of an engine and its room. Example: EngineLoad(running=30, waiting=4, room=32, memory=0.6)"""

    running: int  # requests that are being answered
    waiting: int  # requests that wait for room
    room: int | None = None  # requests that it answers at once, or None if unknown
    memory: float = 0.0  # share in use of the memory for keys and values; 0 if unknown
    computed: int = 0  # tokens of prompts and replies that it has computed so far; 0 if unknown
