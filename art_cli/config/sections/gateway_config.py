"""The `gateway` section: the address of the capturing proxy, and the files that `art gateway` writes."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from art_cli.config.sections.base_config import Int, PositiveFloat, PositiveInt, Seconds, Section


class RedactConfig(Section):
    """Texts that `art gateway` replaces by "[redacted]" before it writes anything. API keys and passwords in URLs are
    always replaced. A call with replaced text loses its token ids, because they would reveal it."""

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
    """The address at which the capturing proxy listens for model calls. All other keys are for `art gateway` only
    (docs/gateway.md)."""

    host: str = "127.0.0.1"
    """The address of this machine to listen on."""
    port: Annotated[Int, Field(ge=0, le=65535)] = 0
    """The port to listen on. 0: any free port, or 8000 in `art gateway`."""
    directory: Path | None = None
    """The directory for trajectories. null: `gateway` in the run's directory."""
    idle_s: Seconds = 1800.0
    """The time in seconds after its last call at which a conversation ends. A later call begins a new one."""
    max_open: PositiveInt = 1000
    """The largest number of conversations in memory. Above it, the conversation that is idle the longest ends."""
    max_open_mb: PositiveFloat = 256.0
    """The largest size in MB of the conversations in memory. Above it, the one that is idle the longest ends."""
    rotate_mb: PositiveFloat = 64.0
    """The size in MB of recorded calls at which a file of trajectories is written."""
    rotate_s: Seconds = 86400.0
    """The age in seconds of the oldest recorded call at which a file of trajectories is written."""
    group_size: PositiveInt = 8
    """The largest number of attempts in one group. Further attempts at the scenario form another group."""
    redact: RedactConfig = RedactConfig()
