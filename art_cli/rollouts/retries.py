"""The call that a retry replaces.

An SDK that gives up on a call sends it again, and counts in a header how many times it has (`Request.num_retries`). The
first call may have been answered all the same, with a reply that the rollout never saw. Where several calls are equal,
such as the samples of a best-of-n, each retry replaces the likeliest one:

    one that failed or whose client left         the SDK gave up for that reason
    else the oldest that is still in flight      it is the first to time out
    else the one that was answered last          its answer came too late
"""

from collections import deque
from typing import Literal

from art_cli.chat.requests import Request
from art_cli.rollouts.recorder import Recorded

MAX_CALLS = 1000  # number of different calls remembered for a rollout; an SDK retries within seconds
MAX_EQUAL = 128  # number of equal calls remembered, as many as one call may have choices

State = Literal["in flight", "lost", "answered"]


class Attempted:
    """One call and what came of it so far."""

    def __init__(self) -> None:
        self.state: State = "in flight"
        self.recorded: Recorded | None = None  # its turns and conversations, once they are recorded
        self.is_abandoned = False

    def end(self) -> None:
        """Records the end of a call. Without an answer it is lost."""
        if self.state == "in flight":
            self.state = "lost"


class Retries:
    """The calls of one rollout that a retry may replace."""

    def __init__(self) -> None:
        self._calls: dict[
            tuple[bytes, int], deque[Attempted]
        ] = {}  # digest and number of retries -> equal calls, oldest first

    def add(self, request: Request) -> Attempted:
        attempted = Attempted()
        if request.digest:
            equal = self._calls.setdefault((request.digest, request.num_retries), deque(maxlen=MAX_EQUAL))
            equal.append(attempted)
            if len(self._calls) > MAX_CALLS:
                del self._calls[next(iter(self._calls))]
        return attempted

    def replaced(self, request: Request) -> Attempted | None:
        """Returns the call that this one replaces, or None if it is no retry of a known one. It is replaced once."""
        equal = self._calls.get((request.digest, request.num_retries - 1))
        if not equal:
            return None
        lost = [call for call in equal if call.state == "lost"]
        waiting = [call for call in equal if call.state == "in flight"]
        replaced = (lost or waiting or [equal[-1]])[0]
        equal.remove(replaced)
        return replaced
