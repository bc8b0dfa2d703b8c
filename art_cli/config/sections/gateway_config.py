"""The `gateway` section: where the capturing proxy listens, and what `art gateway` writes of its traffic."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from art_cli.config.sections.base_config import Int, PositiveFloat, PositiveInt, Seconds, Section


class RedactConfig(Section):
    """What `art gateway` replaces by "[redacted]" before it writes anything. API keys and passwords in URLs are always
    replaced. A call in which anything is replaced keeps its text and loses its token ids, which would tell it."""

    patterns: list[str] = []
    """Regular expressions (Python's) whose matches are replaced."""
    keys: list[str] = []
    """Names of JSON keys whose values are replaced, in any case: in the arguments of tool calls, and in messages that
    are or quote JSON."""

    @field_validator("patterns")
    @classmethod
    def _compiles(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            try:
                compiled = re.compile(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
            if compiled.search("") is not None:
                raise ValueError(f"{pattern!r} matches an empty text, and so everything")
        return patterns


class GatewayConfig(Section):
    """Where the capturing proxy listens for model calls. All other keys are only for `art gateway`
    (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """The address of this machine to listen on."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """0: any free port; in `art gateway` 8000."""
    directory: Path | None = None
    """Where the trajectories go. null: `gateway` in the run's directory."""
    idle_s: Seconds = 1800.0
    """How long after its last call a conversation is over. A later call begins a new one."""
    max_open: PositiveInt = 1000
    """The largest number of conversations in memory. With more, the one that is idle the longest is over."""
    max_open_mb: PositiveFloat = 256.0
    """The largest size of the conversations in memory, in MB. Above it, the one that is idle the longest is over."""
    rotate_mb: PositiveFloat = 64.0
    """The size in MB of recorded calls at which a file of trajectories is written."""
    rotate_s: Seconds = 86400.0
    """The age in seconds of the oldest recorded call at which a file of trajectories is written."""
    group_size: PositiveInt = 8
    """The largest number of attempts in one group. More attempts at one scenario are several groups."""
    redact: RedactConfig = RedactConfig()
