"""The `tracker` section: where metrics go besides metrics.jsonl, one class for each tracker."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from art_cli.config.sections.base import Section


class NoTrackerConfig(Section):
    """metrics.jsonl only."""

    name: Literal["none"] = "none"


class WandbTrackerConfig(Section):
    """Weights & Biases besides metrics.jsonl: every metric, and a table of samples for each step."""

    name: Literal["wandb"]
    project: str = "art"
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team. null: the default one of the key."""
    mode: Literal["online", "offline"] = "online"
    """offline: nothing is sent, and neither a key nor a network is needed."""


class OwnTrackerConfig(Section):
    """A user's own tracker: a class with the methods log, log_trajectories and close (art_cli.trackers.Tracker)."""

    name: Literal["entry"]
    """May be left out beside `entry`."""
    entry: str
    """ "file.py:Class", made as Class(run, **options) (docs/trackers.md)."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments that the class is made with."""


TrackerConfig = Annotated[NoTrackerConfig | WandbTrackerConfig | OwnTrackerConfig, Field(discriminator="name")]
