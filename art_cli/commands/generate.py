"""`art generate`: plays one step's scenarios with a checkpoint and writes the trajectories, nothing else.

The output is appended as rollouts finish; run again, it goes on with what is owed.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from art_cli.config.compose import load_config
from art_cli.errors import RolloutError
from art_cli.loop.failures import Failures, count_failures
from art_cli.loop.stages import generate


def run(
    *,
    config: Path,
    overrides: Sequence[str],
    output: Path,
    checkpoint: Path | None,
    step: int | None,
    as_json: bool = False,
) -> None:
    """Writes `output` and says how many attempts failed. Raises RolloutError: all of them did."""
    played = generate(load_config(config, overrides), output, checkpoint=checkpoint, step=step)
    failures = count_failures(played)
    sys.stdout.write(_as_json(output, failures) if as_json else _as_text(output, failures))
    if failures.is_all:
        raise RolloutError(f"{output}: every attempt failed: {failures}")


def _as_json(output: Path, failures: Failures) -> str:
    row = {"output": str(output), "trajectories": failures.num_played, "failed": failures.num}
    return json.dumps({**row, "commonest_cause": failures.cause or None, "num_alike": failures.num_alike}) + "\n"


def _as_text(output: Path, failures: Failures) -> str:
    return f"{output}: {failures.num_played} trajectories" + (f"; {failures}" if failures.num else "") + "\n"
