"""A learner, started, rehearsed and watched for an open run."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import NoReturn

from art_cli.config.schema import RunConfig
from art_cli.learners import Learner
from art_cli.loop.interrupts import Interrupts
from art_cli.models.policy_spec import PolicySpec
from art_cli.runtime import threads
from art_cli.runtime.errors import first_of_group

log = logging.getLogger(__name__)

REHEARSING = ("cuda",)  # devices with fixed memory; on a CPU the longest row would take minutes
WATCH_EVERY_S = 1.0  # interval between checks that the learner's processes are alive


@contextlib.asynccontextmanager
async def running_learner(
    learner: Learner, config: RunConfig, policy: PolicySpec | None, interrupts: Interrupts
) -> AsyncIterator[None]:
    """Starts the learner for the block; raises LearnerError in the block if a learner process dies."""
    with contextlib.closing(learner):
        await asyncio.sleep(0)  # an interrupt during loading stops the run here, before threads start
        await threads.call_in_thread(learner.start)  # interrupts stop the wait for other nodes
        async with _watched(learner):
            if policy is not None and config.learner.trains_weights:
                await _rehearse(learner, config, policy, interrupts)
            yield


@contextlib.asynccontextmanager
async def _watched(learner: Learner) -> AsyncIterator[None]:
    """Raises LearnerError in the block as soon as a learner process dies."""

    async def watch() -> NoReturn:
        while True:
            await asyncio.to_thread(learner.check)
            await asyncio.sleep(WATCH_EVERY_S)

    with first_of_group():
        async with asyncio.TaskGroup() as group:
            task = group.create_task(watch())
            yield
            task.cancel()


async def _rehearse(learner: Learner, config: RunConfig, policy: PolicySpec, interrupts: Interrupts) -> None:
    """Tries the longest allowed row on a GPU, so that lacking memory shows now instead of hours later.

    Raises OutOfMemory. Prompts are not included if `model.max_length` is missing.
    """
    if (policy.learner_device or "").partition(":")[0] not in REHEARSING:
        return
    longest = policy.max_length
    if config.model.max_length is None:
        longest = min(longest, config.rollout.longest_answer)
    gigabytes = await interrupts.off_loop(learner.rehearse, longest)
    interrupts.stop_if_any()
    took = "" if gigabytes is None else f", {gigabytes:.1f} GB at its peak"
    log.info("learner: a row of %d tokens fits, as long as the limits allow%s", longest, took)
