"""The seam that answers a request: what the gateway, the embedded engine's server and `art serve` share.

    errors.py      ChatError: a refused or failed request, with its HTTP status
    requests.py    what a client asks: Request, Sampling
    replies.py     what comes back: Reply, Choice, Chunk
    wires/         one file per client protocol: JSON to Request, Reply and Chunks to JSON and events
    app.py         the ASGI application over any Backend
    client.py      HttpBackend: any OpenAI-compatible endpoint as a Backend
    server.py      runs the application on a port of this machine, with a deadline for start and stop
    connection.py  one client's connection, with deadlines for a slow one

The seam is `Backend`. Three classes have this shape: the embedded engine (samples in this process), HttpBackend (asks
another server) and the gateway's recorder (wraps one of those two and writes down every turn). Tokens travel inside
Reply and Chunk whether or not the client asked for them; the application shows only what was asked.
"""

from collections.abc import AsyncIterator
from typing import Protocol

from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Request


class Backend(Protocol):
    """Answers requests. Both methods raise ChatError, which carries the HTTP status and OpenAI error body.

    Cancelling the awaiting task (the client went away) frees whatever the request held.
    """

    def models(self) -> list[str]:
        """The model names it answers to."""
        ...

    async def reply(self, request: Request) -> Reply:
        """The whole answer: every choice with its token ids and logprobs."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Chunk]:
        """The answer piece by piece; the chunks' tokens, put together, are those of `reply`."""
        ...
