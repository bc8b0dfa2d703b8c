"""Runs the user's agent: scenarios in, trajectories out.

scenarios.py   reads scenarios, and says which ones a step plays
policy.py      Policy: what a rollout function gets, and how what it returns is read
function.py    a Python function as a Rollout
process.py     that function in processes of its own, which is how it runs unless told otherwise
messages.py    how an attempt ended, as its process reports it
start.py       how such a process begins, in any Python
command.py     an external program as a Rollout
attempt.py     what can go wrong in one attempt, and which of it is worth another
runner.py      many rollouts at once: concurrency, timeouts, turn limits, retries; each becomes a Trajectory
progress.py    the counts of a run of rollouts, and their progress bar
gateway.py     the capturing OpenAI-compatible proxy; the per-rollout key says which trajectory a call belongs to
own_key.py     the key that an attempt reads from the environment is its own
peers.py       whose program makes a call
retries.py     which call a retry replaces
recorder.py    one rollout's calls as a prefix tree of turns and a tree of messages

The runner's unit of work is `Rollout.play`: (endpoint, key, scenario) -> outcome, plain data all of it, so that it
happens in another process and can on another host. Policy is that endpoint and key.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from art_cli.outcome import Outcome
    from art_cli.rollouts.policy import Policy


class Rollout(Protocol):
    """Plays attempts at scenarios, many at once. Cancelling a `play` frees what it holds."""

    async def play(self, policy: "Policy", scenario: dict[str, Any], *, is_alone: bool = False) -> "Outcome":
        """Raises AttemptError: this attempt failed; RolloutError: every attempt would.

        `is_alone`: no other attempt may share its process, because the last one died under it.
        """
        ...

    async def explain_timeout(self) -> str:
        """A guess at why an attempt has not ended, for its message; empty for none."""
        ...

    async def close(self) -> None: ...
