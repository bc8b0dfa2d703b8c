"""Sends metrics, parameters, samples and checkpoints to MLflow: a server, or a SQLite file next to the runs.

The package mlflow-skinny is sufficient. A tag identifies the directory's MLflow run, which is resumed.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from art_cli.config.sections.tracker_config import MlflowTrackerConfig
from art_cli.reports.trackers import COLUMNS, AttemptsTracker, Groups, TrackedRun, rewards, rows
from art_cli.runs.run_dir import MetricsLine
from art_cli.runtime.errors import one_line

log = logging.getLogger(__name__)

TAG = "art.run"  # tag that identifies the run directory
TABLES = "mlflow.loggedArtifacts"  # tag that lists table artifacts for MLflow's page
MAX_NAME, MAX_VALUE, MAX_PARAMS = 250, 6_000, 100  # MLflow's limits per request
_UNNAMEABLE = re.compile(r"[^\w\-. /:]", re.ASCII)


class MlflowTracker(AttemptsTracker):
    def __init__(self, run: TrackedRun, config: MlflowTrackerConfig) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would report usage to its makers
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        logging.getLogger("mlflow.store.db").setLevel(logging.WARNING)  # it logs every migration
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._tracked, self._every, self._metric = run, config.checkpoint_every, Metric
        runs = run.root.resolve().parent
        uri = config.url or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(config.experiment, runs / "mlflow" if uri.startswith("sqlite:") else None)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        if found:
            self._id, self._tables = found[0].info.run_id, json.loads(found[0].data.tags.get(TABLES, "[]"))
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=run.name, tags={TAG: run.id})
        self._id, self._tables = made.info.run_id, []
        params = [Param(key[:MAX_NAME], value[:MAX_VALUE]) for key, value in _flat(run.config)]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def _experiment(self, name: str, artifacts: Path | None) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        where = None if artifacts is None else artifacts.as_uri()
        return str(self._client.create_experiment(name, artifact_location=where))

    def log(self, line: MetricsLine) -> None:
        time = round(line.time * 1000)
        metrics = [
            self._metric(named(f"{line.split}/{name}"), value, time, line.step) for name, value in line.metrics.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def log_attempts(self, split: str, step: int, groups: Groups) -> None:
        """Logs the samples as an MLflow table, and all rewards."""
        name = f"samples/{split}-{step:04d}.json"
        self._client.log_dict(self._id, {"columns": COLUMNS, "data": rows(step, groups)}, name)
        self._client.log_dict(self._id, {"rewards": rewards(groups)}, f"rewards/{split}-{step:04d}.json")
        if {"path": name, "type": "table"} not in self._tables:
            self._tables.append({"path": name, "type": "table"})
            tag = json.dumps(self._tables)
            if len(tag) <= MAX_VALUE:  # MLflow's limit for tags; later tables are plain artifacts
                self._client.set_tag(self._id, TABLES, tag)

    def log_checkpoint(self, step: int, path: Path) -> None:
        if not self._tracked.sends_checkpoint(step, self._every):
            return
        try:
            (path / "manifest.json").stat()  # MLflow treats a missing directory as empty
            self._client.log_artifacts(self._id, str(path), f"checkpoints/{path.name}")
        except OSError as error:  # pruned before it was sent
            log.warning("tracker mlflow: the checkpoint of step %d was not sent: %s", step, one_line(error))

    def close(self) -> None:
        self._client.set_terminated(self._id)


def named(name: str) -> str:
    """Returns a valid MLflow name: letters, digits, and _ - . / : and spaces."""
    return _UNNAMEABLE.sub("_", name)[:MAX_NAME]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the configuration as dotted keys, with lists as JSON."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield named(f"{prefix}{name}"), value if isinstance(value, str) else json.dumps(value)
