"""The counts of a run of rollouts, shown as a bar on a terminal, otherwise as a log line every ten seconds."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from art_cli.runs.trajectory import Trajectory
from art_cli.runtime.log import Bar, shown_bar

log = logging.getLogger(__name__)

REDRAW_S = 0.2
LINE_S = 10.0  # time between log lines where there is no terminal


@dataclass
class Progress:
    """Progress of a run of rollouts. A trajectory is counted after it was handed over."""

    title: str
    total: int = 0
    sampled: Callable[[], int] = lambda: 0  # tokens sampled so far, also in unfinished rollouts
    done: int = 0  # finished rollouts, failed ones included
    failed: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    started: float = field(default_factory=time.monotonic)
    is_handed_out: asyncio.Event = field(default_factory=asyncio.Event)  # every rollout is played or has a worker

    def begin(self, num: int, sampled: Callable[[], int]) -> None:
        """Notes that `num` further rollouts begin; `sampled` counts the tokens from here on."""
        self.total += num
        self.sampled, self.started = sampled, time.monotonic()

    def count(self, trajectory: Trajectory) -> None:
        self.done += 1
        self.failed += trajectory.error is not None
        if trajectory.error is None and trajectory.returned_reward is not None:
            self.reward_sum += trajectory.returned_reward
            self.num_rewards += 1

    @property
    def mean_reward(self) -> float | None:
        """The mean over rollouts that returned a reward; None before the first."""
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    @property
    def tokens_per_s(self) -> float:
        return self.sampled() / max(time.monotonic() - self.started, 1e-9)

    def facts(self) -> str:
        """Example: "reward 0.412  2 failed  1,280 tok/s"."""
        reward = [] if self.mean_reward is None else [f"reward {self.mean_reward:.3f}"]
        failed = [f"{self.failed} failed"] if self.failed else []
        return "  ".join([*reward, *failed, f"{self.tokens_per_s:,.0f} tok/s"])


@contextlib.asynccontextmanager
async def shown(progress: Progress) -> AsyncIterator[None]:
    """Shows the counts on stderr for as long as the block runs."""
    with shown_bar(progress.title) as bar:
        task = asyncio.create_task(_report(progress) if bar is None else _draw(progress, bar))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,), timeout=LINE_S)


async def _draw(progress: Progress, bar: Bar) -> None:
    while True:
        bar(progress.done, progress.total, progress.facts())
        await asyncio.sleep(REDRAW_S)


async def _report(progress: Progress) -> None:
    while True:
        await asyncio.sleep(LINE_S)
        log.info("%s: %d/%d rollouts  %s", progress.title, progress.done, progress.total, progress.facts())
