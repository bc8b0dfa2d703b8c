"""Which call a retry replaces.

An SDK that gives up on a call sends it again, and says in a header how many times it has (`Request.num_retries`). The
call that it gave up on may have been answered all the same, with a reply that the rollout never saw. Of several equal
calls at once, such as the samples of a best-of-n, each retry replaces one, the likeliest:

    one that failed or that its client left      the SDK gave up for that reason
    else the oldest that is still in flight      it is the first to time out
    else the one that was answered last          its answer came too late
"""

from collections import deque
from typing import Literal

from art_cli.chat.requests import Request
from art_cli.rollouts.recorder import Recorded

MAX_CALLS = 1000  # different calls of one rollout that are remembered; an SDK retries within seconds
MAX_EQUAL = 128  # equal calls; as many as choices of one

State = Literal["in flight", "lost", "answered"]


class Attempted:
    """One call as it went so far."""

    def __init__(self) -> None:
        self.state: State = "in flight"
        self.recorded: Recorded | None = None  # what the recorder has of it
        self.is_abandoned = False

    def end(self) -> None:
        """The call is over; without an answer it is lost."""
        if self.state == "in flight":
            self.state = "lost"


class Retries:
    """The calls of one rollout that a retry may replace."""

    def __init__(self) -> None:
        self._calls: dict[tuple[bytes, int], deque[Attempted]] = {}  # body and number of retries -> in order

    def add(self, request: Request) -> Attempted:
        attempted = Attempted()
        if request.digest:
            equal = self._calls.setdefault((request.digest, request.num_retries), deque(maxlen=MAX_EQUAL))
            equal.append(attempted)
            if len(self._calls) > MAX_CALLS:
                del self._calls[next(iter(self._calls))]
        return attempted

    def replaced(self, request: Request) -> Attempted | None:
        """The call that this one is sent in place of; each is replaced once. None: it is no retry of a known one."""
        equal = self._calls.get((request.digest, request.num_retries - 1))
        if not equal:
            return None
        lost = [call for call in equal if call.state == "lost"]
        waiting = [call for call in equal if call.state == "in flight"]
        replaced = (lost or waiting or [equal[-1]])[0]
        equal.remove(replaced)
        return replaced
