"""Runner: plays many rollouts concurrently and turns each one into a Trajectory. Handles timeouts, retries, progress.

The caller plans the rollouts and writes their trajectories. The runner does not depend on steps, judges, or files. A
failed rollout becomes a trajectory with `error` set. Only an error that would affect every rollout stops the run.
Transport failures are retried. Reaching a limit on turns or context is not a failure, because it depends on the policy:
the reward is the rollout's return value, or `limit_reward`. The same holds for an exception in the rollout's code that
follows from a reply (`rollout.failures`): the trajectory has `failure` set instead of `error`.
Progress is shown as a bar on a terminal, and otherwise as log lines at growing intervals.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from art_cli.config.schema import RolloutConfig
from art_cli.rollouts import Rollout
from art_cli.rollouts.attempt_errors import NODE, AttemptError
from art_cli.rollouts.call_counts import CallCounts
from art_cli.rollouts.cluster.cluster_rollout import ClusterRollout
from art_cli.rollouts.command_rollout import CommandRollout
from art_cli.rollouts.concurrency import SAMPLE_S, Concurrency, Openings
from art_cli.rollouts.function_rollout import load_function, what_to_load
from art_cli.rollouts.peers import Peers
from art_cli.rollouts.policy import Policy
from art_cli.rollouts.process import ProcessRollout
from art_cli.rollouts.recorder import Recorder
from art_cli.rollouts.rollout_gateway import OWN_CLIENT, Gateway
from art_cli.runs.outcome import Outcome
from art_cli.runs.system_prompt import SystemPrompt
from art_cli.runs.trajectory import Json, Trajectory
from art_cli.runtime.errors import RolloutError, first_of_group, naming_source
from art_cli.runtime.log import Bar, shown_bar
from art_cli.runtime.secrets import find_secrets
from art_cli.runtime.threads import end

log = logging.getLogger(__name__)

REDRAW_S = 0.2
LINE_S, MAX_LINE_S = 10.0, 300.0  # first and longest interval of log lines without a terminal; each is doubled
OnFinished = Callable[[Trajectory], Awaitable[None] | None]
MAX_MOVES = 10  # how often an attempt whose machine is lost is played again in addition to `rollout.retries`
BACKOFF_S = 0.5  # pause before the second try; doubled for each further one
NUM_ALIKE = 16  # the agent is broken when this many first rollouts all fail in the same way
# Errors that are the user's fault even after a limit: an invalid return value or a timeout.
NEVER_A_LIMIT = frozenset({"timeout", "reward", "metadata", "foreign_key"})
WRITE_TIMEOUT_S = 30.0  # longest wait for a trajectory to be written when the run is cancelled


@dataclass
class Progress:
    """Counts of a set of rollouts. A trajectory is counted after the caller has received it."""

    title: str
    total: int = 0
    sampled: Callable[[], int] = lambda: 0  # tokens sampled so far, also in unfinished rollouts
    done: int = 0  # finished rollouts, failed ones included
    failed: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0
    started: float = field(default_factory=time.monotonic)
    # every rollout is finished or assigned to a worker
    is_handed_out: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, num: int, sampled: Callable[[], int]) -> None:
        """Adds `num` rollouts to the total. `sampled` returns the tokens sampled since this call."""
        self.total += num
        self.sampled, self.started = sampled, time.monotonic()

    def count(self, trajectory: Trajectory) -> None:
        self.done += 1
        self.failed += trajectory.error is not None or bool(trajectory.failure)
        if trajectory.error is None and trajectory.returned_reward is not None:
            self.reward_sum += trajectory.returned_reward
            self.num_rewards += 1

    @property
    def mean_reward(self) -> float | None:
        return self.reward_sum / self.num_rewards if self.num_rewards else None

    @property
    def elapsed_s(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def facts(self) -> str:
        """Example: "reward 0.412 so far  2 failed  8,960 tokens, 128 tok/s". Attempts that give up early end first."""
        so_far = " so far" if self.done < self.total else ""
        reward = [] if self.mean_reward is None else [f"reward {self.mean_reward:.3f}{so_far}"]
        failed = [f"{self.failed} failed"] if self.failed else []
        rate = self.sampled() / self.elapsed_s
        tokens = f"{self.sampled():,} tokens, {rate:,.{0 if rate >= 10 else 1}f} tok/s"
        return "  ".join([*reward, *failed, tokens])


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
    wait_s = LINE_S
    while True:
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, MAX_LINE_S)
        facts = f"{progress.done}/{progress.total} rollouts  {progress.facts()}"
        log.info("%s: %s  after %.0f s", progress.title, facts, progress.elapsed_s)


class RolloutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout to play. Example: attempt 5 of 8 at scenario "easy-3", the third of step 2."""

    trajectory_id: str
    group_id: str
    group_size: int
    index: int  # position in the group, from 0
    scenario: Json
    step: int  # the training step, or the step of the evaluated policy
    temperature: float | None = None  # None means rollout.sampling.temperature
    prompt: SystemPrompt | None = None  # None means the policy's, if the policy is a prompt
    source: str = ""  # key in rollout.sources, or "" without sources


class _Attempt(NamedTuple):
    """One try: the recorded calls and the outcome or error."""

    recorder: Recorder
    outcome: Outcome
    error: AttemptError | None
    failure: str | None = None  # the policy's own failure


@contextlib.asynccontextmanager
async def begin_rollouts(config: RolloutConfig, directory: Path) -> AsyncIterator[dict[str, ProcessRollout]]:
    """Yields by source the rollouts that have processes, which begin to load them, and closes them."""
    begun = {
        name: process_rollout(part, directory, processes=part.processes)
        for name, part in config.by_source.items()
        if part.cluster is None and part.command is None and part.processes
    }
    try:
        for rollout in begun.values():
            await rollout.begin()
        yield begun
    finally:
        for rollout in begun.values():
            await rollout.close()


async def open_rollout(
    config: RolloutConfig,
    directory: Path,
    peers: Peers,
    cluster: ClusterRollout | None = None,
    begun: ProcessRollout | None = None,
) -> Rollout:
    """Returns the user's rollout, loaded; it registers its programs in `peers`. Raises UsageError, RolloutError."""
    if cluster is not None:
        await cluster.ready()
        return cluster
    if config.command is not None:
        return CommandRollout(config.command, directory=directory, env=config.env, peers=peers)
    if config.processes == 0:
        entry, environment = what_to_load(config)
        return load_function(entry, directory, environment)
    rollout = begun or process_rollout(config, directory, processes=config.processes)
    await rollout.open()
    return rollout


def process_rollout(config: RolloutConfig, directory: Path, *, processes: int = 1) -> ProcessRollout:
    """Returns the function or the environment in separate processes, to be opened by the caller."""
    entry, environment = what_to_load(config)
    return ProcessRollout(
        entry, directory=directory, processes=processes, python=config.python, environment=environment
    )


class _Agent:
    """A source's agent, its limits, and checks on the first attempts."""

    def __init__(self, config: RolloutConfig, rollout: Rollout) -> None:
        self.config, self.rollout = config, rollout
        self.failures = _AgentWatch()
        self.silence = _SilenceWatch(is_told=config.environment is not None)  # there the trained seat may never move


class Runner:
    """Plays rollouts against a running gateway. Use it as `async with Runner(...) as runner`."""

    def __init__(
        self,
        config: RolloutConfig,
        directory: Path,
        gateway: Gateway,
        *,
        backoff_s: float = BACKOFF_S,
        cluster: ClusterRollout | None = None,
        begun: Mapping[str, ProcessRollout] | None = None,
    ) -> None:
        """`cluster` plays the rollouts on its nodes. `begun` comes from `begin_rollouts`; entering loads the others."""
        self._cluster = cluster
        self._config = config
        self._begun = begun or {}
        self._gateway = gateway
        self._directory = directory
        self._agents: dict[str, _Agent] = {}  # by source
        self._backoff_s = backoff_s
        self._secrets = find_secrets(os.environ)
        self.openings = Openings(config.most_at_once)  # shared by all runs
        self.concurrency: Concurrency | None = None  # unset if the configuration fixes the number
        self._following: asyncio.Task[None] | None = None
        self.is_watched = True  # False once failures and silence are not the agent's fault

    async def __aenter__(self) -> Self:
        try:
            for name, config in self._config.by_source.items():
                with naming_source(name):
                    rollout = await open_rollout(
                        config, self._directory, self._gateway.peers, self._cluster, self._begun.get(name)
                    )
                self._agents[name] = _Agent(config, rollout)
        except BaseException:
            await self._close()
            raise
        if self._config.concurrency == "auto":
            self.concurrency = Concurrency(await self._gateway.load())
            self.openings = Openings(self.concurrency.number)
            self._following = asyncio.create_task(self._follow(self.concurrency))
        return self

    async def _follow(self, concurrency: Concurrency) -> None:
        """Adapts the openings to the engine's load until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            calls, self._gateway.calls = self._gateway.calls, CallCounts()
            if in_flight := self.openings.num_taken:
                load = await self._gateway.load()
                self.openings.resize(concurrency.note(in_flight, load, calls))

    async def __aexit__(self, *exc: object) -> None:
        if self._following is not None:
            await end(self._following, timeout_s=WRITE_TIMEOUT_S)
        await self._close()

    async def _close(self) -> None:
        for agent in self._agents.values():
            await agent.rollout.close()

    async def explain_slowness(self) -> str:
        """Returns the likely reason for slow attempts; empty if unknown."""
        return "".join([await agent.rollout.explain_timeout() for agent in self._agents.values()]).removeprefix("; ")

    async def run(
        self, plans: Sequence[RolloutPlan], on_finished: OnFinished, progress: Progress | None = None
    ) -> Progress:
        """Plays the plans in order, with as many concurrent attempts as there are openings. Returns `progress`.

        Each trajectory is passed to `on_finished` and counted when that call returns. On cancellation, pending writes
        finish and running attempts are dropped. Raises RolloutError if every rollout would fail.
        """
        progress = progress or Progress("rollouts")
        before = self._gateway.num_sampled
        progress.begin(len(plans), sampled=lambda: self._gateway.num_sampled - before)
        waiting = iter(plans)
        try:
            with first_of_group():
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(self._config.most_at_once, len(plans))):
                        workers.create_task(self._work(waiting, on_finished, progress))
        finally:
            progress.is_handed_out.set()
        return progress

    async def _work(self, waiting: Iterator[RolloutPlan], on_finished: OnFinished, progress: Progress) -> None:
        while True:
            async with self.openings:
                if (plan := next(waiting, None)) is None:
                    break
                trajectory = await self._play(plan)
            await _hand_over(trajectory, on_finished)
            progress.count(trajectory)
            if self.is_watched:
                with naming_source(plan.source):
                    self._agents[plan.source].silence.check(trajectory)
                    self._agents[plan.source].failures.check(trajectory)
        progress.is_handed_out.set()

    async def _play(self, plan: RolloutPlan) -> Trajectory:
        started_at, begin = time.time(), time.monotonic()
        attempt, num_retries = await self._attempts(plan)
        recorder, outcome, error, failure = attempt
        return Trajectory(
            id=plan.trajectory_id,
            group_id=plan.group_id,
            group_size=plan.group_size,
            index=plan.index,
            step=plan.step,
            scenario=plan.scenario,
            messages=recorder.messages,
            branches=recorder.branches,
            tools=recorder.tools,
            turns=recorder.turns,
            spans=[(round(came - begin, 4), round(answered - begin, 4)) for came, answered in recorder.spans],
            metrics={**recorder.metrics(), "num_retries": num_retries, **outcome.metrics},
            metadata=outcome.metadata,
            returned_reward=outcome.reward,
            error=None if error is None else str(error),
            limit=recorder.limit,
            failure=failure or msgspec.UNSET,
            started_at=started_at,
            duration_s=time.monotonic() - begin,
            source=plan.source or msgspec.UNSET,
        )

    async def _attempts(self, plan: RolloutPlan) -> tuple[_Attempt, int]:
        """Returns the first try without a transport failure, or the last try before the deadline, and the number of
        retries. The error of a retry that met the deadline names the failure before it, which is the cause.
        """
        loop, config = asyncio.get_running_loop(), self._agents[plan.source].config
        deadline = loop.time() + config.timeout_s
        is_alone, earlier = False, None
        number = num_moves = 0  # tries that failed, and tries whose machine was lost, not the attempt's fault
        while True:
            if self._cluster is not None:
                deadline += await self._cluster.ready()
            attempt = _add_earlier(await self._attempt(plan, deadline, is_alone=is_alone), earlier)
            earlier = attempt.error
            is_last = number + 1 >= config.retries  # whether the next try is the last
            is_alone = is_last and attempt.error is not None and attempt.error.kind == "process"
            pause = self._backoff_s * 2**number
            if attempt.error is None or not attempt.error.is_transport or loop.time() + pause >= deadline:
                break
            if attempt.error.kind == NODE and num_moves < MAX_MOVES:
                num_moves += 1
            elif number < config.retries:
                number += 1
            else:
                break
            await asyncio.sleep(pause)
        return attempt, number + num_moves

    async def _attempt(self, plan: RolloutPlan, deadline: float, *, is_alone: bool) -> _Attempt:
        """Makes one try with a new key and a new recorder."""
        agent = self._agents[plan.source]
        own = agent.config if plan.source else None  # the gateway's limits apply without sources
        key = self._gateway.open(
            plan.trajectory_id,
            temperature=plan.temperature,
            group_id=plan.group_id,
            prompt=plan.prompt,
            max_tokens=None if own is None else own.sampling.max_tokens,
            max_turns=None if own is None else own.max_turns,
        )
        policy = Policy(
            base_url=self._gateway.base_url, api_key=key, model=self._gateway.model, step=self._gateway.step
        )
        outcome, error, is_late = Outcome(), None, False
        try:
            async with asyncio.timeout_at(deadline):
                with naming_source(plan.source):
                    outcome = await agent.rollout.play(policy, plan.scenario, is_alone=is_alone)
        except AttemptError as failed:
            error = failed
        except TimeoutError:
            is_late = True
        finally:
            recorder = self._gateway.close(key)
        if is_late:
            guess = await agent.rollout.explain_timeout()
            error = AttemptError(
                "timeout", f"not finished after {agent.config.timeout_s:g} s (rollout.timeout_s){guess}"
            )
        attempt = _Attempt(recorder, outcome, self._judge_error(recorder, error, key))
        if recorder.num_calls == 0:  # an oversized first prompt is not the policy's fault
            return attempt
        if recorder.limit is None:
            return _judge_failure(attempt, agent.config)
        return _judge_limit(attempt, agent.config.limit_reward)

    def _judge_error(self, recorder: Recorder, error: AttemptError | None, key: str) -> AttemptError | None:
        """Returns the error to record. The gateway's record of the calls explains more than the rollout's exception."""
        if recorder.used_foreign_key:
            return AttemptError("foreign_key", "its program made a call with another attempt's key")
        if error is None or error.kind == "timeout":
            return error
        is_transport = error.is_transport or recorder.upstream_error is not None
        message = self._secrets.redact(error.message).replace(key, "***")  # errors may quote a request with its key
        return AttemptError(error.kind, message, is_transport=is_transport, classes=error.classes)


def _judge_failure(attempt: _Attempt, config: RolloutConfig) -> _Attempt:
    """Makes an error that followed from the policy's reply its failure. The reward is `limit_reward`."""
    error = attempt.error
    if error is None or error.is_transport or not {*error.classes} & {*config.failures}:
        return attempt
    outcome = replace(attempt.outcome, reward=config.limit_reward)
    return _Attempt(attempt.recorder, outcome, None, failure=str(error))


def _judge_limit(attempt: _Attempt, limit_reward: float) -> _Attempt:
    """Removes an error that followed a limit. The reward is the returned value or `limit_reward`."""
    error, outcome = attempt.error, attempt.outcome
    if error is not None and (error.is_transport or error.kind in NEVER_A_LIMIT):
        return attempt
    if outcome.reward is None:
        outcome = replace(outcome, reward=limit_reward)
    return _Attempt(attempt.recorder, outcome, None)


def _add_earlier(attempt: _Attempt, earlier: AttemptError | None) -> _Attempt:
    """Adds the failure of the try before to the error of a try that ran out of time."""
    if earlier is None or attempt.error is None or attempt.error.kind != "timeout":
        return attempt
    message = f"{attempt.error.message}; the try before it failed: {earlier}"
    return attempt._replace(error=AttemptError("timeout", message))


async def _hand_over(trajectory: Trajectory, on_finished: OnFinished) -> None:
    """Passes the trajectory to `on_finished` and waits for the write, even on cancellation."""
    result = on_finished(trajectory)
    if not inspect.isawaitable(result):
        return
    writing = asyncio.ensure_future(result)
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait((writing,), timeout=WRITE_TIMEOUT_S)
        if writing.done() and not writing.cancelled():
            writing.exception()  # retrieves the exception; the run has already ended for another reason
        raise


class _AgentWatch:
    """Stops a run whose first rollouts all fail in the same way."""

    def __init__(self) -> None:
        self._alike: tuple[str, str] | None = None
        self._num = 0
        self._is_proven = False  # a rollout succeeded or failed in a different way

    def check(self, trajectory: Trajectory) -> None:
        """Raises RolloutError when NUM_ALIKE have failed alike."""
        if self._is_proven:
            return
        error = trajectory.error or trajectory.failure
        alike = None
        if error:  # the error's kind and source line are equal for all rollouts with the same bug
            place = re.search(r"\(([^()]+:\d+)\)$", error)
            alike = error.partition(":")[0], place[1] if place else ""
        if alike is None or self._alike not in (None, alike):
            self._is_proven = True
            return
        self._alike = alike
        self._num += 1
        if self._num >= NUM_ALIKE:
            raise RolloutError(f"the first {self._num} rollouts all failed alike, the last with {error}")


class _SilenceWatch:
    """Warns about rollouts with a reward but no call, while others make calls, which may be theirs."""

    def __init__(self, *, is_told: bool) -> None:
        self._has_calls = self._has_silent = False
        self._is_told = is_told

    def check(self, trajectory: Trajectory) -> None:
        """Logs one warning. This is not an error, because a rollout may intentionally make no call."""
        self._has_calls |= not trajectory.is_silent
        self._has_silent |= trajectory.is_silent and trajectory.error is None and trajectory.returned_reward is not None
        if self._has_calls and self._has_silent and not self._is_told:
            self._is_told = True
            log.warning("a rollout returned a reward and made no model call, while others made calls. %s", OWN_CLIENT)
