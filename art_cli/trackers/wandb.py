"""Sends metrics and samples of trajectories to Weights & Biases. Resumes the W&B run of the same name and directory."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from art_cli.chat.requests import text_of
from art_cli.config.sections.tracker import WandbTrackerConfig
from art_cli.errors import UsageError
from art_cli.run_dir import MetricsLine
from art_cli.trackers import TrackedRun
from art_cli.trajectory import ScoredTrajectory

MAX_ROWS = 32  # number of trajectories in a step's table
MAX_TEXT = 4_000  # characters of one cell
COLUMNS = ["step", "group", "trajectory", "reward", "returned reward", "turns", "tokens", "error", "prompt", "reply"]


class WandbTracker:
    def __init__(self, run: TrackedRun, config: WandbTrackerConfig) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError("tracker: wandb is not installed; pip install 'art-cli[wandb]'") from error
        self._table = wandb.Table
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=run.name,
            id=hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.root / "logs"),
            config=run.config,
        )

    def log(self, line: MetricsLine) -> None:
        numbers: dict[str, Any] = {f"{line.split}/{key}": value for key, value in line.metrics.items()}
        self._run.log({**numbers, "step": line.step})

    def log_trajectories(self, step: int, groups: Sequence[Sequence[ScoredTrajectory]]) -> None:
        """A table of the best and the worst attempt of each group, for as many groups as MAX_ROWS has room for."""
        rows = [_row(step, trajectory) for group in groups[: MAX_ROWS // 2] for trajectory in _extremes(group)]
        self._run.log({"train/samples": self._table(columns=COLUMNS, data=rows), "step": step})

    def close(self) -> None:
        self._run.finish()


def _extremes(group: Sequence[ScoredTrajectory]) -> Iterator[ScoredTrajectory]:
    ranked = sorted(group, key=lambda trajectory: float("-inf") if trajectory.reward is None else trajectory.reward)
    yield from ranked[:-2:-1]
    yield from ranked[:1] if len(ranked) > 1 else []


def _row(step: int, trajectory: ScoredTrajectory) -> list[Any]:
    said = [(message.get("role"), text_of(message.get("content"))[:MAX_TEXT]) for message in trajectory.messages]
    prompt = next((text for role, text in said if role == "user"), "")
    reply = next((text for role, text in reversed(said) if role == "assistant"), "")
    score = [trajectory.reward, trajectory.returned_reward]
    counts = [len(trajectory.turns), trajectory.num_sampled]
    return [step, trajectory.group_id, trajectory.id, *score, *counts, trajectory.error, prompt, reply]
