"""Runs the user's agent: scenarios in, trajectories out.

scenario_files.py    training and evaluation scenarios, and their play order
adaptive.py          chooses the scenarios to play more often
policy.py            Policy, the argument of a rollout function, and how its result becomes an Outcome
function_rollout.py  a Python function as a Rollout; attempts share the process environment
process.py           runs the Python function in separate processes (the default)
process_worker.py    the worker process
bootstrap.py         starts a worker process in any Python
command_rollout.py   an external program as a Rollout
peers.py             finds the attempt whose program makes a call
attempt_errors.py    errors of an attempt, and which errors are retried
rollout_runner.py    plays many rollouts concurrently with timeouts, limits, retries, and progress
rollout_gateway.py   the capturing OpenAI-compatible proxy; the API key names the trajectory
recorder.py          one rollout's calls as trees of turns and messages
concurrency.py       adapts the number of concurrent rollouts to the engine's load

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
