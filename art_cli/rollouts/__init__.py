"""Runs the user's agent: scenarios in, trajectories out.

scenario_files.py    scenarios to train on and to evaluate with, and their order of play
adaptive.py          the scenarios to play more often, and the groups to train on again
policy.py            Policy, which a rollout function gets, and the Outcome of what it returns
function_rollout.py  a Python function as a Rollout, with each attempt's key in the environment that they share
process.py           that function in separate processes, as it runs by default
bootstrap.py         starts such a process in any Python
command_rollout.py   an external program as a Rollout, and the attempt whose program makes a call
attempt_errors.py    errors of one attempt, those that are tried again, and its end as its process reports it
rollout_runner.py    many rollouts at once: timeouts, limits, retries, progress; each becomes a Trajectory
rollout_gateway.py   the capturing OpenAI-compatible proxy; a call's key names its trajectory
recorder.py          one rollout's calls as trees of turns and of messages, and the call that a retry replaces

The runner's unit of work is `Rollout.play`: (endpoint, key, scenario) -> outcome. All of it is plain data, so that the
work is done in another process and can be done on another host. Policy is that endpoint and key.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from art_cli.rollouts.policy import Policy
    from art_cli.runs.outcome import Outcome


class Rollout(Protocol):
    """Plays attempts at scenarios, many at once. Cancelling a `play` frees what it holds."""

    async def play(self, policy: "Policy", scenario: dict[str, Any], *, is_alone: bool = False) -> "Outcome":
        """Returns the attempt's outcome. Raises AttemptError: this attempt failed; RolloutError: every attempt would.

        With `is_alone` no other attempt shares its process, because the last process died during this attempt.
        """

    async def explain_timeout(self) -> str:
        """Returns why attempts time out, or take longer than they need, as the end of a message; empty if unknown."""

    async def close(self) -> None: ...
