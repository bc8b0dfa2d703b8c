"""Runs the user's agent: scenarios in, trajectories out.

The runner's unit of work is `Rollout.play`: (endpoint, key, scenario) -> outcome. Arguments and results are plain data,
so another process or another host can do the work. Policy holds the endpoint and the key.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy
    from art_cli.runs.outcome import Outcome


class Rollout(Protocol):
    """Plays many attempts concurrently. Cancelling `play` frees its resources."""

    async def play(self, policy: "Policy", scenario: dict[str, Any], *, is_alone: bool = False) -> "Outcome":
        """Returns the attempt's outcome.

        With `is_alone` the attempt gets a separate process, because the previous process died during this attempt.
        Raises AttemptError if this attempt failed, and RolloutError if every attempt would fail.
        """

    async def explain_timeout(self) -> str:
        """Returns the likely reason for slow attempts, to append to a message; empty if unknown."""

    async def close(self) -> None: ...
