"""ClientBackend: answers one client's calls from the engine, each in its conversation, and records them.

An answer ends when its call is on the disk. What cannot be recorded is not answered: it is a 503, if possible before
the engine is asked.
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

from art_cli.chat.chat_app import READ_HERE_BYTES, closing_stream
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.reading import RequestReader
from art_cli.chat.replies import Chunk, Reply
from art_cli.chat.requests import Json, Request, Sampling, with_defaults
from art_cli.rollouts.rollout_gateway import Upstream
from art_cli.runtime.errors import printable
from art_cli.serving.gateway.conversations import Conversations
from art_cli.serving.gateway.journal import Journal
from art_cli.serving.gateway.redaction import Redactor

log = logging.getLogger(__name__)


class ClientBackend:
    """The calls of one client, which the files name `client` ("key 2")."""

    def __init__(
        self,
        client: str,
        upstream: Upstream,
        conversations: Conversations,
        journal: Journal,
        redactor: Redactor,
        reader: RequestReader,
    ) -> None:
        self._client, self._upstream, self._reader = client, upstream, reader
        self._conversations, self._journal, self._redactor = conversations, journal, redactor
        self.num_calls = 0  # answered and recorded

    def models(self) -> list[str]:
        return [self._upstream.endpoint.model]

    async def reply(self, request: Request) -> Reply:
        with self._failures_logged():
            if not request.is_recorded:
                return await self._upstream.backend.reply(with_defaults(request, Sampling()))
            self._journal.check_room()
            redacted = await self._redacted(request)
            with self._conversations.calling(self._client, request, redacted) as conversation:
                reply = await conversation.backend.reply(request)
                await self._journal.sync()
            self.num_calls += 1
            return reply

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        with self._failures_logged():
            if not request.is_recorded:
                plain = self._upstream.backend.stream(with_defaults(request, Sampling()))
                async with closing_stream(plain) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            self._journal.check_room()
            redacted = await self._redacted(request)
            with self._conversations.calling(self._client, request, redacted) as conversation:
                num_before = conversation.recorder.num_entries
                async with closing_stream(conversation.backend.stream(request)) as chunks:
                    async for chunk in chunks:
                        if conversation.recorder.num_entries != num_before:
                            await self._journal.sync()
                            num_before = conversation.recorder.num_entries
                        yield chunk
            self.num_calls += 1

    async def _redacted(self, request: Request) -> list[Json] | None:
        """Returns the messages redacted, in a thread if they are long, or None for a plain completion."""
        if request.messages is None:
            return None
        if self._redactor.num_new_bytes(request.messages) <= READ_HERE_BYTES:
            return self._redactor.messages(request.messages)
        return await self._reader.read(self._redactor.messages, request.messages)

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        """Logs one line for a call that the engine failed to answer, or whose client left."""
        try:
            yield
        except ChatError as error:
            if error.status >= 500:
                log.warning("%s: a call failed: %s", self._client, printable(error.message, limit=500))
            raise
