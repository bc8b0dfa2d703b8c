"""The table of samples that a tracker shows of a step: the best and the worst attempt of each group, as plain rows."""

from collections.abc import Iterator, Sequence
from typing import Any

from art_cli.chat.requests import text_of
from art_cli.formats.traces.spans import reward_of
from art_cli.runs.trajectory import Trajectory

MAX_ROWS = 32  # number of trajectories in a step's table
MAX_TEXT = 4_000  # characters of one cell
COLUMNS = ["step", "group", "trajectory", "reward", "returned reward", "turns", "tokens", "error", "prompt", "reply"]

Groups = Sequence[Sequence[Trajectory]]


def rows(step: int, groups: Groups) -> list[list[Any]]:
    """Returns at most MAX_ROWS rows with the values of COLUMNS."""
    return [_row(step, attempt) for attempt in chosen(groups)]


def chosen(groups: Groups) -> list[Trajectory]:
    """Returns the attempts of the table: of each group the best one, then the worst."""
    return [attempt for group in groups[: MAX_ROWS // 2] for attempt in _extremes(group)]


def rewards(groups: Groups) -> list[float]:
    """Returns the rewards of all attempts that have one."""
    return [reward for group in groups for attempt in group if (reward := reward_of(attempt)) is not None]


def _extremes(group: Sequence[Trajectory]) -> Iterator[Trajectory]:
    ranked = sorted(group, key=lambda attempt: float("-inf") if (r := reward_of(attempt)) is None else r)
    yield from ranked[:-2:-1]
    yield from ranked[:1] if len(ranked) > 1 else []


def _row(step: int, attempt: Trajectory) -> list[Any]:
    said = [(message.get("role"), text_of(message.get("content"))[:MAX_TEXT]) for message in attempt.messages]
    prompt = next((text for role, text in said if role == "user"), "")
    reply = next((text for role, text in reversed(said) if role == "assistant"), "")
    score = [reward_of(attempt), attempt.returned_reward]
    counts = [len(attempt.turns), attempt.num_sampled]
    return [step, attempt.group_id, attempt.id, *score, *counts, attempt.error, prompt, reply]
