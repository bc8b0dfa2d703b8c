"""Follows a run: as it writes a new checkpoint (or evaluates a better one), the policy changes to it."""

import asyncio
import logging

from art_cli import checkpoints
from art_cli.errors import ArtError
from art_cli.run_dir import RunDir
from art_cli.serving.meter import Meter
from art_cli.serving.policies import ServedPolicy
from art_cli.serving.source import of_checkpoint
from art_cli.threads import call_in_thread

log = logging.getLogger(__name__)

POLL_S = 1.0


async def follow(policy: ServedPolicy, run: RunDir, meter: Meter, *, best: bool) -> None:
    """Never returns. What cannot be loaded is passed over with a line, once; the policy stays what it is."""
    passed_over: set[int] = set()
    while True:
        await asyncio.sleep(POLL_S)
        step = await call_in_thread(_wanted, run, best)
        if step is None or step == policy.source.step or step in passed_over:
            continue
        try:
            await _change(policy, run, best)
            meter.changes.labels(policy.source.name).inc()
            log.info("%s: answers from step %d now", policy.source.name, policy.source.step)
        except ArtError as error:
            log.warning("%s: stays at step %d: %s", policy.source.name, policy.source.step, error)
        if policy.source.step != step:
            passed_over.add(step)


async def _change(policy: ServedPolicy, run: RunDir, best: bool) -> None:
    """To the newest (or best) checkpoint that verifies, which may be the one that it has."""
    found = await call_in_thread(lambda: checkpoints.newest(run, best=best))
    if found.step != policy.source.step:
        old = policy.source
        await policy.change(
            of_checkpoint(found, name=old.name, base=old.base if old.adapter else None, dtype=old.dtype)
        )


def _wanted(run: RunDir, best: bool) -> int | None:
    """The step to be at by the directory's names and the metrics alone, without reading a checkpoint."""
    steps = run.checkpoint_steps()
    if best:
        return checkpoints.best_step(run)
    return steps[-1] if steps else None
