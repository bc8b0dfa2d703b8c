"""The `tracker` section: receivers of metrics besides metrics.jsonl, one class for each tracker."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from art_cli.config.sections.base_config import Count, PositiveInt, Seconds, Section


class NoTrackerConfig(Section):
    """metrics.jsonl only."""

    name: Literal["none"] = "none"


class WandbTrackerConfig(Section):
    """Weights & Biases: every metric, rewards as a histogram, a table of samples for each step, checkpoints."""

    name: Literal["wandb"]
    project: str = "art"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team. null: the default of the key."""
    mode: Literal["online", "offline"] = "online"
    """offline: nothing is sent, and neither a key nor a network is needed."""
    checkpoint_every: Count = 0
    """Every so many steps, and after the last one, the checkpoint is sent as an artifact; 0: none is."""


class TensorBoardTrackerConfig(Section):
    """TensorBoard: every metric, rewards as a histogram, samples as text, in `tensorboard` of the run's directory."""

    name: Literal["tensorboard"]


class MlflowTrackerConfig(Section):
    """MLflow: every metric, the configuration as parameters, a table of samples for each step, checkpoints."""

    name: Literal["mlflow"]
    url: str | None = None
    """The tracking server or database. null: MLFLOW_TRACKING_URI, or else the SQLite file `mlflow.db` beside the run's
    directory."""
    experiment: str = "art"
    """The MLflow experiment, which is created if it does not exist."""
    checkpoint_every: Count = 0
    """Every so many steps, and after the last one, the checkpoint is stored as an artifact; 0: none is."""


class TrackioTrackerConfig(Section):
    """trackio: every metric, rewards as a histogram, samples as traces, on this machine or in a Space."""

    name: Literal["trackio"]
    project: str = "art"
    """The trackio project."""
    space: str | None = None
    """The Hugging Face Space that shows the run, "name" or "organisation/name". null: a file on this machine."""


class LangfuseTrackerConfig(Section):
    """Langfuse: a trace for each attempt, with generations and tools, its rewards as scores. The keys are in
    LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY."""

    name: Literal["langfuse"]
    url: str | None = None
    """The server. null: LANGFUSE_BASE_URL or LANGFUSE_HOST, or else https://cloud.langfuse.com."""
    max_groups: PositiveInt | None = None
    """The number of groups of each step, and of each evaluation, whose attempts are sent. null: all."""
    timeout_s: Seconds = 30.0
    """The longest time in seconds for one request, including its retries. Langfuse never gets a request that takes
    longer."""


class OtelTrackerConfig(Section):
    """OpenTelemetry: a trace for each attempt, sent over OTLP/HTTP. Keys are in OTEL_EXPORTER_OTLP_HEADERS."""

    name: Literal["otel"]
    url: str | None = None
    """The receiver. null: OTEL_EXPORTER_OTLP_ENDPOINT, or else http://localhost:4318."""
    max_groups: PositiveInt | None = None
    """The number of groups of each step, and of each evaluation, whose attempts are sent. null: all."""
    timeout_s: Seconds = 30.0
    """The longest time in seconds for one request, including its retries. The receiver never gets a request that takes
    longer."""


class OwnTrackerConfig(Section):
    """A user's own tracker: a class with log, log_trajectories and close (art_cli.reports.trackers.Tracker)."""

    name: Literal["entry"]
    """The name may be left out beside `entry`."""
    entry: str
    """ "file.py:Class", which is called as Class(run, **options) (docs/other-tools.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""


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
