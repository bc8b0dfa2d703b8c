"""Follows a run: when another checkpoint is the one that is meant, a new or a better one, the policy changes to it."""

import asyncio
import logging

from art_cli.runs import run_checkpoints
from art_cli.runs.run_checkpoints import Which
from art_cli.runs.run_dir import RunDir
from art_cli.runtime.errors import ArtError
from art_cli.runtime.threads import call_in_thread
from art_cli.serving.meter import Meter
from art_cli.serving.served_model import of_checkpoint
from art_cli.serving.served_policies import ServedPolicy

log = logging.getLogger(__name__)

POLL_S = 1.0


async def follow(policy: ServedPolicy, run: RunDir, meter: Meter, *, which: Which) -> None:
    """Never returns. A checkpoint that cannot be loaded is logged once and skipped; the policy stays as it is."""
    skipped: set[int] = set()
    while True:
        await asyncio.sleep(POLL_S)
        step = await call_in_thread(_wanted, run, which)
        if step is None or step == policy.source.step or step in skipped:
            continue
        try:
            await _change(policy, run, which)
            meter.changes.labels(policy.source.name).inc()
            log.info("%s: answers from step %d now", policy.source.name, policy.source.step)
        except ArtError as error:
            log.warning("%s: stays at step %d: %s", policy.source.name, policy.source.step, error)
        if policy.source.step != step:
            skipped.add(step)


async def _change(policy: ServedPolicy, run: RunDir, which: Which) -> None:
    """Changes to the checkpoint that is meant and verifies, unless the policy has it already."""
    found = await call_in_thread(lambda: run_checkpoints.choose(run, which))
    if found.step != policy.source.step:
        old = policy.source
        await policy.change(
            of_checkpoint(found, name=old.name, base=old.base if old.adapter else None, dtype=old.dtype)
        )


def _wanted(run: RunDir, which: Which) -> int | None:
    """Returns the step that is meant, by directory names and metrics alone; no checkpoint is read."""
    return next(iter(run_checkpoints.wanted_steps(run, which)), None)
