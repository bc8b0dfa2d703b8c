"""Ready: whether a server answers: not now, yes, or never again."""

import asyncio
from typing import NoReturn

from art_cli.runtime.errors import EngineError


class Ready:
    """Whether the server answers: not now, yes, or never again."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._decided = asyncio.Event()
        self._failed = asyncio.Event()
        self._failure = ""

    @property
    def is_set(self) -> bool:
        return self._decided.is_set() and not self._failed.is_set()

    def set(self) -> None:
        self._decided.set()

    def clear(self) -> None:
        self._decided.clear()

    def fail(self, message: str) -> None:
        """Later failures do not replace the first one."""
        self._failure = self._failure or message
        self._failed.set()
        self._decided.set()

    async def wait(self) -> None:
        """Returns when there is an answer. Raises EngineError if there never will be again, or was none in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._decided.wait()
        except TimeoutError:
            raise EngineError(f"vllm: not back within {self._timeout_s:g} s (engine.start_timeout_s)") from None
        if self._failed.is_set():
            raise EngineError(self._failure)

    async def failure(self) -> NoReturn:
        await self._failed.wait()
        raise EngineError(self._failure)
