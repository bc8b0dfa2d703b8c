"""The `tracker` section: other receivers for metrics, with one class per tracker."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from art_cli.config.sections.base_config import Count, PositiveInt, Seconds, Section


class NoTrackerConfig(Section):
    """metrics.jsonl only."""

    name: Literal["none"] = "none"


class WandbTrackerConfig(Section):
    """Weights & Biases: every metric, reward histograms, sample tables, checkpoints."""

    name: Literal["wandb"]
    project: str = "art"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team. null: the key's default."""
    mode: Literal["online", "offline"] = "online"
    """offline: sends nothing, and needs neither key nor network."""
    checkpoint_every: Count = 0
    """Interval in steps for sending checkpoints as artifacts. Also sends the last checkpoint. 0: never."""


class TensorBoardTrackerConfig(Section):
    """TensorBoard: every metric, reward histograms, samples as text, in the run's `tensorboard`."""

    name: Literal["tensorboard"]


class MlflowTrackerConfig(Section):
    """MLflow: every metric, the configuration as parameters, sample tables, checkpoints."""

    name: Literal["mlflow"]
    url: str | None = None
    """The tracking server or database. null: MLFLOW_TRACKING_URI or, if unset, the SQLite file `mlflow.db` in the
    directory for runs."""
    experiment: str = "art"
    """The MLflow experiment, created if missing."""
    checkpoint_every: Count = 0
    """Interval in steps for storing checkpoints as artifacts. Also stores the last checkpoint. 0: never."""


class TrackioTrackerConfig(Section):
    """trackio: every metric, reward histograms, samples as traces, on this machine or in a Space."""

    name: Literal["trackio"]
    project: str = "art"
    """The trackio project."""
    space: str | None = None
    """The Hugging Face Space that shows the run, "name" or "organisation/name". null: a local file."""


class LangfuseTrackerConfig(Section):
    """Langfuse: a trace per attempt, with generations, tools, and rewards as scores. The keys are in
    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY."""

    name: Literal["langfuse"]
    url: str | None = None
    """The server. null: LANGFUSE_BASE_URL or LANGFUSE_HOST, or else https://cloud.langfuse.com."""
    max_groups: PositiveInt | None = None
    """The groups per step and evaluation whose attempts are sent. null: all."""
    timeout_s: Seconds = 30.0
    """The time limit in seconds for a request with its retries. Slower requests are lost."""


class OtelTrackerConfig(Section):
    """OpenTelemetry: a trace per attempt over OTLP/HTTP. Keys are in OTEL_EXPORTER_OTLP_HEADERS."""

    name: Literal["otel"]
    url: str | None = None
    """The receiver. null: OTEL_EXPORTER_OTLP_ENDPOINT, or else http://localhost:4318."""
    max_groups: PositiveInt | None = None
    """The groups per step and evaluation whose attempts are sent. null: all."""
    timeout_s: Seconds = 30.0
    """The time limit in seconds for a request with its retries. Slower requests are lost."""


class OwnTrackerConfig(Section):
    """Your own tracker: a class with log, log_trajectories and close (art_cli.reports.trackers.Tracker)."""

    name: Literal["entry"]
    """Optional."""
    entry: str
    """The class "file.py:Class", called as Class(run, **options) (docs/other-tools.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments for the class."""


TrackerConfig = Annotated[
    NoTrackerConfig
    | WandbTrackerConfig
    | TensorBoardTrackerConfig
    | MlflowTrackerConfig
    | TrackioTrackerConfig
    | LangfuseTrackerConfig
    | OtelTrackerConfig
    | OwnTrackerConfig,
    Field(discriminator="name"),
]
