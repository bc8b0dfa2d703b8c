"""Sends metrics, samples, rewards and checkpoints to Weights & Biases. Resumes the W&B run of the same directory.

Nothing of the terminal, the machine or the code is sent along. In offline mode, and where the server cannot be reached
at the start, everything is in `logs/wandb` of the run, where `wandb sync` finds it.
"""

import logging
from pathlib import Path
from typing import Any

from art_cli.config.sections.tracker_config import WandbTrackerConfig
from art_cli.reports.trackers import COLUMNS, AttemptsTracker, Groups, TrackedRun, rewards, rows
from art_cli.runs.run_dir import MetricsLine
from art_cli.runtime.errors import one_line

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 20.0  # longest wait for W&B's server at the start, below the 30 s that the run waits for its trackers


class WandbTracker(AttemptsTracker):
    def __init__(self, run: TrackedRun, config: WandbTrackerConfig) -> None:
        import wandb

        self._wandb, self._tracked, self._config = wandb, run, config
        wandb.setup(wandb.Settings(silent=True))  # else it asks a terminal for a missing key, and waits
        try:
            self._run = self._open(config.mode)
        except wandb.Error as error:
            if config.mode == "offline":
                raise
            where = run.root / "logs/wandb"
            log.warning("tracker wandb: %s; it writes to %s instead, and wandb sync sends it", one_line(error), where)
            wandb.teardown()  # its process still holds the run that it could not begin
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
            host="",  # the name of the machine, which the settings before do not turn off
            x_transaction_log_flush_interval=1.0,  # a killed run loses what was logged in as many seconds, not 15
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
        """A histogram of the rewards, and a table of the best and the worst attempt of each group."""
        shown: dict[str, Any] = {f"{split}/samples": self._wandb.Table(columns=COLUMNS, data=rows(step, groups))}
        if found := rewards(groups):
            shown[f"{split}/rewards"] = self._wandb.Histogram(found)
        self._run.log({**shown, "step": step})

    def log_checkpoint(self, step: int, path: Path) -> None:
        """The checkpoint as a version of one artifact. W&B copies it at once, so that it may be pruned afterwards."""
        if not self._tracked.sends_checkpoint(step, self._config.checkpoint_every):
            return
        artifact = self._wandb.Artifact(f"{self._tracked.name}-checkpoint", type="model", metadata={"step": step})
        try:
            artifact.add_dir(str(path))
        except (OSError, ValueError) as error:  # it was pruned while this tracker was behind
            log.warning("tracker wandb: the checkpoint of step %d was not sent: %s", step, one_line(error))
            return
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])

    def close(self) -> None:
        self._run.finish()
