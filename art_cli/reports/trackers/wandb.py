"""Sends metrics, samples, rewards and checkpoints to Weights & Biases. Resumes the directory's W&B run.

Terminal, machine and code data are not sent. In offline mode, or if the server is unreachable at the start, everything
is written to the run's `logs/wandb`, for `wandb sync`.
"""

import logging
from pathlib import Path
from typing import Any

from art_cli.config.sections.tracker_config import WandbTrackerConfig
from art_cli.reports.trackers import COLUMNS, AttemptsTracker, Groups, TrackedRun, rewards, rows
from art_cli.runs.run_dir import MetricsLine
from art_cli.runtime.errors import one_line

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 20.0  # longest wait for W&B's server, below the run's 30 s for trackers


class WandbTracker(AttemptsTracker):
    def __init__(self, run: TrackedRun, config: WandbTrackerConfig) -> None:
        import wandb

        self._wandb, self._tracked, self._config = wandb, run, config
        wandb.setup(wandb.Settings(silent=True))  # otherwise it asks for a missing key on a terminal, and waits
        try:
            self._run = self._open(config.mode)
        except wandb.Error as error:
            if config.mode == "offline":
                raise
            where = run.root / "logs/wandb"
            log.warning("tracker wandb: %s; it writes to %s instead, and wandb sync sends it", one_line(error), where)
            wandb.teardown()  # its process still holds the failed run
            self._run = self._open("offline")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            log.info("tracker wandb: %s", self._run.url)

    def _open(self, mode: str) -> Any:
        settings = self._wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_save_requirements=False,
            host="",  # the machine's name, which the settings above do not disable
            x_transaction_log_flush_interval=1.0,  # a kill loses this many seconds of logs, instead of 15
        )
        return self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=mode,
            name=self._tracked.name,
            id=self._tracked.id,
            resume="allow",
            dir=str(self._tracked.root / "logs"),
            config=self._tracked.config,
            settings=settings,
        )

    def log(self, line: MetricsLine) -> None:
        numbers: dict[str, Any] = {f"{line.split}/{key}": value for key, value in line.metrics.items()}
        self._run.log({**numbers, "step": line.step})

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        """Logs a histogram of rewards, and a table of each group's best and worst attempts."""
        shown: dict[str, Any] = {f"{split}/samples": self._wandb.Table(columns=COLUMNS, data=rows(step, groups))}
        if found := rewards(groups):
            shown[f"{split}/rewards"] = self._wandb.Histogram(found)
        self._run.log({**shown, "step": step})

    def log_checkpoint(self, step: int, path: Path) -> None:
        """Logs the checkpoint as an artifact version. W&B copies it immediately, so pruning is safe."""
        if not self._tracked.sends_checkpoint(step, self._config.checkpoint_every):
            return
        artifact = self._wandb.Artifact(f"{self._tracked.name}-checkpoint", type="model", metadata={"step": step})
        try:
            artifact.add_dir(str(path))
        except (OSError, ValueError) as error:  # pruned before it was sent
            log.warning("tracker wandb: the checkpoint of step %d was not sent: %s", step, one_line(error))
            return
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def close(self) -> None:
        self._run.finish()
