"""Sends metrics to Weights & Biases. Resumes the W&B run of the same name and directory."""

import hashlib
from pathlib import Path
from typing import Any

from art_cli.config.schema import WandbTrackerConfig
from art_cli.errors import UsageError
from art_cli.run_dir import MetricsLine


class WandbTracker:
    def __init__(self, config: WandbTrackerConfig, *, name: str, root: Path, resolved: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError("tracker: wandb is not installed; pip install 'art-cli[wandb]'") from error
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            mode=config.mode,
            name=name,
            id=hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=str(root / "logs"),
            config=resolved,
        )

    def log(self, line: MetricsLine) -> None:
        numbers: dict[str, Any] = {f"{line.split}/{key}": value for key, value in line.metrics.items()}
        self._run.log({**numbers, "step": line.step})

    def close(self) -> None:
        self._run.finish()
