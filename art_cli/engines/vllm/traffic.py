"""Traffic: which requests may be in a vLLM server beside each other.

On a CPU vLLM 0.32 dies of a batch with LoRA that asks for a prompt's logprobs and holds another request: its logits of
all the prompt's tokens meet a mapping of one row a request ("einsum(): subscript b"). A prompt is therefore scored
alone there. https://github.com/vllm-project/vllm/issues/16668; this file can go when that is closed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Traffic:
    """Requests that share the server, and requests that are alone in it, in the order in which they come."""

    def __init__(self) -> None:
        self._entering = asyncio.Lock()  # fair
        self._num_shared = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        async with self._entering:
            self._num_shared += 1
            self._is_empty.clear()
        try:
            yield
        finally:
            self._num_shared -= 1
            if not self._num_shared:
                self._is_empty.set()

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        async with self._entering:
            await self._is_empty.wait()
            yield
