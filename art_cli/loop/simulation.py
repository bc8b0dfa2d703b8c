"""Simulation: how long the steps of a training take on an assumed machine, event by event. Pure: no files, no torch.

    Workload (what is played) + Rates (how fast) + Layout (how much at once) -> simulate -> a StepTimes for each step

It follows batches.py and train.py: attempts begin in order, `concurrency` at a time; complete groups are judged while
others are played; a step is trained on and published before one more than `max_staleness` ahead of it begins.

A replica decodes all its sequences together, one token of each per pass, and stops for the prompts that come in. So its
state is one number, the tokens that each sequence has got since the beginning, and a reply ends when that number has
grown by its length. An event per reply suffices, none per token. docs/simulation.md has the model and its limits.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np


class PlayedCall(NamedTuple):
    """One call of an attempt. Example: PlayedCall(wait_s=0.2, kept=800, prompt=150, shared=0, sampled=40)"""

    wait_s: float  # time of agent and tools since the wave before, or since the attempt began
    kept: int  # tokens of the prompt that the attempt's earlier calls had
    prompt: int  # the other tokens of the prompt
    shared: int  # of these, the tokens with which another attempt at the scenario begins too
    sampled: int


class Play(NamedTuple):
    """One attempt. Calls of one wave are made together, as by sub-agents; the next ones when all are answered."""

    waves: tuple[tuple[PlayedCall, ...], ...]
    end_s: float = 0.0  # time of the agent after the last reply

    @property
    def tokens(self) -> int:
        return sum(call.prompt + call.sampled for calls in self.waves for call in calls)


class PlayedGroup(NamedTuple):
    """The attempts at one scenario, and how long the judge takes for them."""

    plays: tuple[Play, ...]
    judge_s: float = 0.0


class Workload(NamedTuple):
    """The attempts that steps play: each step draws `groups_per_step` of the groups."""

    groups: tuple[PlayedGroup, ...]
    groups_per_step: int
    common: int = 0  # tokens with which every attempt begins, as a system prompt
    trained_share: float = 1.0  # tokens that an update computes, divided by the tokens of the step's attempts


class Rates(NamedTuple):
    """The speed of one replica and one learner process: seconds for each unit of work."""

    prompt_token_s: float
    pass_s: float  # of a pass that decodes one token of each sequence: this,
    sequence_s: float  # plus this for each sequence in it,
    cached_token_s: float = 0.0  # plus this for each token of their contexts
    call_s: float = 0.0  # time in which a call holds up all others of its replica: HTTP, chat template, recording
    agent_s: float = 0.0  # time in which a call holds up all others of its agent process
    trained_token_s: float = 0.0  # with all epochs
    update_s: float = 0.0  # part of an update that does not depend on its tokens
    exchange_s: float = 0.0  # part of an update that several processes share: gradients and weights between them
    rest_s: float = 0.0  # sleep, wake, checkpoint, loading it, its proof


class Layout(NamedTuple):
    """The number of things that go on at once."""

    concurrency: int = 128  # attempts
    replicas: int = 1
    slots: int = 128  # sequences that a replica decodes together
    learners: int = 1  # processes that divide an update
    agents: int = 1  # processes that run the agent's code, on all nodes together
    judges: int = 0  # groups judged at once; 0: any number
    max_staleness: int = 0  # steps that sampling is ahead of training
    is_shared: bool = False  # True: engine and learner compute on the same processors, each at half speed if both do


class StepTimes(NamedTuple):
    """The seconds of one step. Sampling and judging that began early overlap the step before."""

    sampling_s: float  # from the beginning of its first attempt to the end of its last one
    judging_s: float  # from then to the last verdict
    training_s: float
    rest_s: float
    total_s: float  # from the end of the step before to its own end


Done = Callable[[], None]


@dataclass
class _Server:
    """A replica, or the learner: works on its jobs together, in passes. A job is done after its number of passes."""

    rates: Rates
    slots: int
    busy_s: float = 0.0  # prompts and calls that it computes before the next pass
    cached: int = 0
    running: list[tuple[float, int, int, Done]] = field(default_factory=list)  # heap by the clock at the job's end
    waiting: deque[tuple["_Job", int, Done]] = field(default_factory=deque)
    groups: dict[int, set[tuple[int, int]]] = field(default_factory=dict)  # step -> groups whose beginning is cached
    version: int = 0  # of its next event
    clock: float = 0.0  # passes so far
    now: float = 0.0

    def add(self, job: "_Job", number: int, done: Done) -> None:
        if len(self.running) >= self.slots:
            self.waiting.append((job, number, done))
            return
        self.busy_s += job.busy_s
        self.cached += job.cached
        heapq.heappush(self.running, (self.clock + job.passes, number, job.cached, done))

    def advance(self, now: float, speed: float) -> None:
        left = (now - self.now) * speed
        first = min(left, self.busy_s)
        self.now, self.busy_s = now, self.busy_s - first
        if self.running and left > first:
            self.clock += (left - first) / self._pass_s()

    def next_end(self, speed: float) -> float:
        """Returns the time at which its next job is done."""
        return self.now + (self.busy_s + max(self.running[0][0] - self.clock, 0.0) * self._pass_s()) / speed

    def pop(self) -> Done:
        """Ends the job that is next, and lets one that waits begin."""
        self.clock, _, cached, done = heapq.heappop(self.running)
        self.cached -= cached
        if self.waiting:
            self.add(*self.waiting.popleft())
        return done

    def _pass_s(self) -> float:
        rates = self.rates
        return max(rates.pass_s + rates.sequence_s * len(self.running) + rates.cached_token_s * self.cached, 1e-12)


class _Job(NamedTuple):
    server: int
    busy_s: float
    passes: float
    cached: int = 0


@dataclass
class _Step:
    groups: list[PlayedGroup]
    owed: deque[tuple[int, Play]]  # attempts that have not begun, with the number of their group
    left: list[int]  # per group: attempts that are not over
    num_left: int  # groups without a verdict
    begun: float = 0.0
    played: float = -1.0  # end of the last attempt so far
    judged: float = 0.0  # last verdict so far


# A loop or an attempt. It yields the time at which it goes on, or jobs that are done before, or None: it is woken.
Process = Generator[float | list[_Job] | None, None, None]


class _Simulation:
    def __init__(self, workload: Workload, rates: Rates, layout: Layout, *, steps: int, seed: int) -> None:
        self._workload, self._rates, self._layout = workload, rates, layout
        self._now, self._speed, self._numbers = 0.0, 1.0, itertools.count()
        self._events: list[tuple[float, int, Done]] = []
        self._servers = [_Server(rates, layout.slots) for _ in range(layout.replicas)]
        self._servers.append(_Server(Rates(0.0, 1.0, 0.0), 1))  # the learner: a pass is a second
        self._loads = np.zeros(layout.replicas, np.int64)
        self._agents, self._judges = [0.0] * layout.agents, [0.0] * layout.judges  # heaps: when each is free
        self._gateway, self._free, self._num_begun = [0.0], layout.concurrency, 0
        self._steps = [_draw(workload, number, seed) for number in range(steps)]
        self._loop, self._is_waiting, self.times = self._train(), False, list[StepTimes]()

    def run(self) -> list[StepTimes]:
        self._go_on(self._loop)
        while len(self.times) < len(self._steps):
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        return self.times

    def _train(self) -> Process:
        end_of_last = 0.0
        for step in self._steps:
            self._begin()
            while step.num_left:
                self._is_waiting = True
                yield None
            begun = self._now
            seconds = update_seconds(self._workload, step.groups, self._rates, self._layout.learners)
            yield [_Job(self._layout.replicas, 0.0, seconds)]
            training_s = self._now - begun
            yield self._now + self._rates.rest_s
            sampling_s, judging_s = step.played - step.begun, step.judged - step.played
            total_s, end_of_last = self._now - end_of_last, self._now
            self.times.append(StepTimes(sampling_s, judging_s, training_s, self._rates.rest_s, total_s))

    def _begin(self) -> None:
        """Begins the steps that may begin, then as many attempts as there is room for.

        A step may begin when all attempts of the one before have begun and one of them has ended.
        """
        allowed = min(len(self.times) + self._layout.max_staleness + 1, len(self._steps))
        while self._num_begun < allowed:
            before = self._steps[self._num_begun - 1] if self._num_begun else None
            if before is not None and (before.owed or before.played < 0):
                break
            self._steps[self._num_begun].begun = self._now
            self._num_begun += 1
        for number in range(len(self.times), self._num_begun):
            step = self._steps[number]
            while self._free and step.owed:
                self._free -= 1
                self._go_on(self._play(number, *step.owed.popleft()))

    def _play(self, number: int, group: int, play: Play) -> Process:
        """An attempt, and the judge after the last one of a group."""
        replica = -1  # the last one that it was at
        for calls in play.waves:
            yield self._queue(self._agents, self._rates.agent_s) + calls[0].wait_s
            for _ in calls:
                yield self._queue(self._gateway, self._rates.call_s)
            jobs = [self._job(call, (number, group), replica) for call in calls]
            replica = jobs[-1].server
            yield jobs
            for job in jobs:
                self._loads[job.server] -= 1
        yield self._queue(self._agents, self._rates.agent_s) + play.end_s
        step = self._steps[number]
        step.played, self._free = self._now, self._free + 1
        self._begin()
        step.left[group] -= 1
        if not step.left[group]:
            yield self._queue(self._judges, step.groups[group].judge_s)
            step.judged = self._now
            step.num_left -= 1
            if self._is_waiting:
                self._is_waiting = False
                self._go_on(self._loop)

    def _job(self, call: PlayedCall, group: tuple[int, int], last: int) -> _Job:
        """Gives the call to the replica with the least to do, as vLLM does. Another one has not what the call keeps."""
        index = int(self._loads.argmin())
        index = last if last >= 0 and self._loads[last] == self._loads[index] else index
        cached, new = self._servers[index].groups.setdefault(group[0], set()), call.prompt
        if index != last:
            common = self._workload.common if cached else 0
            new += call.kept - (max(call.shared, common) if group in cached else common)
        cached.add(group)
        self._loads[index] += 1
        return _Job(index, new * self._rates.prompt_token_s, call.sampled, call.kept + call.prompt + call.sampled // 2)

    def _queue(self, free: list[float], seconds: float) -> float:
        """Returns when work that the first free one of several does will be done; at once, if there are none."""
        done = max(self._now, free[0] if free else 0.0) + seconds
        if free:
            heapq.heapreplace(free, done)
        return done

    def _go_on(self, process: Process) -> None:
        wanted = next(process, None)
        if isinstance(wanted, list):
            left = [len(wanted)]
            for job in wanted:
                server = self._servers[job.server]
                server.advance(self._now, self._speed)
                server.add(job, next(self._numbers), partial(self._job_done, process, left))
                self._schedule(job.server)
            self._share_processors()
        elif wanted is not None:
            self._at(wanted, partial(self._go_on, process))

    def _job_done(self, process: Process, left: list[int]) -> None:
        left[0] -= 1
        if not left[0]:
            self._go_on(process)

    def _at(self, time: float, happen: Done) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    def _schedule(self, index: int) -> None:
        server = self._servers[index]
        server.version += 1
        if server.running:
            self._at(server.next_end(self._speed), partial(self._done, index, server.version))

    def _done(self, index: int, version: int) -> None:
        server = self._servers[index]
        if version == server.version:  # else the server got other work after this event was planned
            server.advance(self._now, self._speed)
            done = server.pop()
            self._schedule(index)
            done()
            self._share_processors()

    def _share_processors(self) -> None:
        """Changes the speed of engine and learner where both compute on the same processors."""
        speed = 0.5 if self._layout.is_shared and self._servers[-1].running and self._loads.any() else 1.0
        if speed != self._speed:
            for server in self._servers:
                server.advance(self._now, self._speed)
            self._speed = speed
            for index in range(len(self._servers)):
                self._schedule(index)


def _draw(workload: Workload, number: int, seed: int) -> _Step:
    """Returns a step with groups of the workload, none of them more than once more often than another."""
    draw, groups = random.Random(f"{seed}/{number}"), list[PlayedGroup]()
    while missing := workload.groups_per_step - len(groups):
        groups += draw.sample(workload.groups, min(len(workload.groups), missing))
    owed = deque((index, play) for index, group in enumerate(groups) for play in group.plays)
    return _Step(groups, owed, [len(group.plays) for group in groups], len(groups))


def update_seconds(workload: Workload, groups: Sequence[PlayedGroup], rates: Rates, learners: int) -> float:
    """Returns the seconds of an update. Its tokens are divided among the processes, those of one attempt are not."""
    tokens = [play.tokens for group in groups for play in group.plays]
    most = workload.trained_share * max(sum(tokens) / learners, *tokens)
    return rates.update_s + rates.trained_token_s * most + (rates.exchange_s if learners > 1 else 0.0)


def simulate(workload: Workload, rates: Rates, layout: Layout, *, steps: int, seed: int = 0) -> list[StepTimes]:
    """Returns the times of the first `steps` steps. The same arguments give the same times."""
    return _Simulation(workload, rates, layout, steps=steps, seed=seed).run()
