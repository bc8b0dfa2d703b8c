"""Per-step credit: finds replies in a group that answered equal states, and computes the value of each.

A step is one turn, in recording order. A reply that the rollout never saw is not a step unless a later turn continues
it.

    state    the rollout's key (policy.state); without a key, the whole prompt's token ids
    reward   r_t: the trajectory's reward at its last step, 0 before
    return   R_t = sum over k >= t of gamma^(k - t) r_k, so gamma^(T - t) times the trajectory's reward

Numbers in, numbers out. Per-turn lists follow the trajectory's turns.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from art_cli.learners.algorithms.credit import advantages, rewards_of
from art_cli.learners.samples import Credit, Ints, turn_row
from art_cli.runs.trajectory import ScoredTrajectory, Trajectory, Turn

State = str | bytes  # a rollout's key, or a prompt digest


class Step(NamedTuple):
    """One step in an episode. Example: Step(state="XO3456789", returned=0.95)"""

    state: State
    returned: float  # R_t, the discounted sum of rewards from step t on


Episode = Sequence[Step | None]  # one entry per turn; None if the rollout never saw the reply


def episodes_of(group: Sequence[ScoredTrajectory], *, gamma: float) -> list[Episode]:
    """Returns [G] the steps in each trajectory. A trajectory without turns has no steps."""
    return [_episode(each, reward, gamma) for each, reward in zip(group, rewards_of(group), strict=True)]


def step_advantages(episodes: Sequence[Episode], *, scale: bool) -> list[list[float]]:
    """Returns [G][turns] each step's return minus the group's mean return in the same state.

    GiGPO, Feng et al. 2025 (arXiv:2505.10978), equation 7: A^S(a_t) = (R_t - mean(R)) / F(R), over the steps in the
    same state as t (equation 6). F is their standard deviation if `scale` is set, otherwise 1. States with a single
    step, states with returns equal within 1e-8, and turns that are not steps give 0.
    """
    worth = [[0.0] * len(episode) for episode in episodes]
    for found in _steps_by_state(episodes).values():
        returns = [step.returned for _, _, step in found]
        for (row, column, _), value in zip(found, advantages(returns, scale=scale), strict=True):
            worth[row][column] = value
    return worth


def turn_credit(trajectory: Trajectory, worth: Sequence[float]) -> Credit:
    """Returns policy weights that assign each turn's value to the turn's sampled tokens."""
    return Credit(policy=[turn_row(turn, each, each) for turn, each in zip(trajectory.turns, worth, strict=True)])


def count_shared(group: Sequence[Trajectory]) -> tuple[int, int]:
    """Returns the group's step count, and the count of steps whose state occurs in several steps."""
    counts = Counter(state for trajectory in group for state in states_of(trajectory) if state is not None)
    return counts.total(), sum(count for count in counts.values() if count > 1)


def states_of(trajectory: Trajectory) -> list[State | None]:
    """Returns [turns] the state before each turn's reply; None if the rollout never saw the reply."""
    turns = trajectory.turns
    prompts, continued = _prompts(turns)
    return [
        None if turn.is_abandoned and not is_continued else turn.state or _digest(prompt)
        for turn, prompt, is_continued in zip(turns, prompts, continued, strict=True)
    ]


# --- episodes ---------------------------------------------------------------------------------------------------------


def _episode(trajectory: ScoredTrajectory, reward: float, gamma: float) -> Episode:
    """Builds the steps from last to first, because only the last step has a reward."""
    steps: list[Step | None] = []
    returned = reward
    for state in reversed(states_of(trajectory)):
        steps.append(None if state is None else Step(state, returned))
        returned *= 1 if state is None else gamma
    return steps[::-1]


def _steps_by_state(episodes: Sequence[Episode]) -> dict[State, list[tuple[int, int, Step]]]:
    """Maps each state to its steps, as (trajectory index, turn index, step)."""
    found: dict[State, list[tuple[int, int, Step]]] = {}
    for row, episode in enumerate(episodes):
        for column, step in enumerate(episode):
            if step is not None:
                found.setdefault(step.state, []).append((row, column, step))
    return found


# --- states -----------------------------------------------------------------------------------------------------------


def _prompts(turns: Sequence[Turn]) -> tuple[list[Ints], list[bool]]:
    """Returns each turn's whole prompt, and whether a later turn's prompt contains tokens sampled in the turn."""
    prompts: list[Ints] = []
    sequences: list[Ints] = []
    is_continued = [False] * len(turns)
    for turn in turns:
        added = np.asarray(turn.prompt_ids, dtype=np.int64)
        if turn.parent is not None:
            added = np.concatenate([sequences[turn.parent][: turn.kept], added])
            is_continued[turn.parent] |= turn.kept > len(prompts[turn.parent])
        prompts.append(added)
        sequences.append(np.concatenate([added, np.asarray(turn.sampled_ids, dtype=np.int64)]))
    return prompts, is_continued


def _digest(prompt: Ints) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
