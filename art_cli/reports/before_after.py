"""A held-out conversation before and after training: the scenario with the largest rise in reward.

    read_before_after(RunDir) -> BeforeAfter -> pages/conversation_text.py

Both attempts come from saved evaluations. No weights are read and nothing is played.
"""

from collections.abc import Iterable

import msgspec

from art_cli.judges.ruler.attempt_tree import Conversation, read_conversation
from art_cli.runs.durable import read_lines
from art_cli.runs.run_dir import RunDir
from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.errors import RunError


class PlayedAttempt(msgspec.Struct, frozen=True):
    """An attempt in an evaluation. Example: PlayedAttempt(step=8, reward=1.0, messages=(...))"""

    step: int
    reward: float | None  # reward returned by the rollout
    messages: Conversation  # messages after the common beginning


class BeforeAfter(msgspec.Struct, frozen=True):
    """Two attempts at the same scenario. `shared` are the messages at the start of both conversations."""

    scenario: str
    shared: Conversation
    before: PlayedAttempt
    after: PlayedAttempt


def read_before_after(run: RunDir) -> BeforeAfter:
    """Returns attempts from the initial and the best evaluation. Raises RunError without two evaluations.

    Picks the scenario with the largest rise in reward; ties and missing rewards go to the earliest scenario.
    """
    means = run.evaluations()
    steps = sorted(step for step in means if run.eval_path(step).exists())
    if len(steps) < 2:
        raise RunError(f"{run.root}: no two evaluations whose attempts are kept (eval.every)")
    first, last = steps[0], max(steps[1:], key=lambda step: (means[step].get("reward", 0.0), step))
    before, after = _by_scenario(run, first), _by_scenario(run, last)
    both = [scenario for scenario in before if scenario in after]
    if not both:
        raise RunError(f"{run.root}: the evaluations of steps {first} and {last} have no scenario in common")
    scenario = max(both, key=lambda each: _reward(after[each]) - _reward(before[each]))
    old, new = (read_conversation(found[scenario].messages) for found in (before, after))
    num_shared = next((at for at, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), len(old))
    return BeforeAfter(
        scenario,
        old[:num_shared],
        PlayedAttempt(first, before[scenario].returned_reward, old[num_shared:]),
        PlayedAttempt(last, after[scenario].returned_reward, new[num_shared:]),
    )


def _by_scenario(run: RunDir, step: int) -> dict[str, Trajectory]:
    """Returns a successful attempt for each scenario: the earliest."""
    found: dict[str, Trajectory] = {}
    lines: Iterable[Trajectory] = read_lines(run.eval_path(step), Trajectory)
    for trajectory in lines:
        if trajectory.error is None:
            found.setdefault(trajectory.scenario_id, trajectory)
    return found


def _reward(trajectory: Trajectory) -> float:
    return trajectory.returned_reward or 0.0
