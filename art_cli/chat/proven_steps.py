"""ProvenSteps: maps a reply's step to its policy's digest, once the policy's weights are proven.

engines/proof.py defines the proof, and runs/manifest.py the digest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from art_cli.chat.chat_errors import ChatError

POLICY_HEADER = "x-art-policy"  # the reply's header with the digest of the weights that sampled it
PROOF_TIMEOUT_S = 600.0  # longest time a reply waits for the proof


class ProvenSteps:
    """Digests of an engine's proven policies by step. Replies wait until their step is proven."""

    def __init__(self) -> None:
        self.newest = ""  # digest of the policy that answers now, or "" if unknown
        self._digests: dict[int, str] = {}
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._failed: set[int] = set()

    def add(self, step: int, digest: str) -> None:
        """Sets the policy of a step, which is now the newest."""
        self.newest = self._digests[step] = digest
        self._failed.discard(step)

    def known(self, step: int) -> str:
        """Returns the digest of the step's policy, or "" if this engine has not proven it."""
        return self._digests.get(step, "")

    @contextlib.asynccontextmanager
    async def proving(self, step: int) -> AsyncIterator[None]:
        """Holds back replies of `step` while the block loads and proves it. If it raises, they become errors."""
        self._is_settled.clear()
        try:
            yield
        except BaseException:
            self._failed.add(step)
            raise
        finally:
            self._is_settled.set()

    async def digest(self, step: int) -> str:
        """Returns the digest for replies of `step`, "" if no proof was asked for. Raises ChatError without a proof."""
        if (known := self._digests.get(step)) is not None:
            return known
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._is_settled.wait()
        if step in self._failed or not self._is_settled.is_set():
            raise ChatError(503, "the weights that sampled this reply were not proven", code="unproven_policy")
        return self._digests.get(step, "")
