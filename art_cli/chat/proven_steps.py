"""ProvenSteps: which policy a reply came from, by the step that its engine names, once its weights are proven.

engines/proof.py has the proof, and runs/manifest.py the digest.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from art_cli.chat.chat_errors import ChatError

POLICY_HEADER = "x-art-policy"  # the reply's header with the digest of the weights that sampled it
PROOF_TIMEOUT_S = 600.0  # longest wait of a reply for the proof of its weights


class ProvenSteps:
    """The digests of the policies that one engine has proven, by step. No reply of a step gets by before its proof."""

    def __init__(self) -> None:
        self.newest = ""  # digest of the policy that answers now, or "" if unknown
        self._digests: dict[int, str] = {}
        self._is_settled = asyncio.Event()
        self._is_settled.set()
        self._failed: set[int] = set()

    def add(self, step: int, digest: str) -> None:
        """Names the policy of a step, which answers now."""
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
        """Returns the digest of the policy that sampled a reply at `step`, or "" if no proof was left for it.

        Raises ChatError if its proof failed, or has not ended in time.
        """
        if (known := self._digests.get(step)) is not None:
            return known
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._is_settled.wait()
        if step in self._failed or not self._is_settled.is_set():
            raise ChatError(503, "the weights that sampled this reply were not proven", code="unproven_policy")
        return self._digests.get(step, "")
