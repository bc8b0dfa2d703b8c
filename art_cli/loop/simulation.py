"""Simulation: the duration of a training step on an assumed machine, event by event. Pure: no files, no torch.

    PlayedStep (the workload) + Rates (speeds) + RunLayout (concurrency) -> simulate -> StepTimes

It follows batches.py and train.py: attempts begin in order, `concurrency` at a time; complete groups are judged while
others are played; then the learner works, then the weights are published.

The engine decodes all sequences together, one token per sequence and pass, and pauses for incoming prompts. Its state
is the number of passes so far: a reply ends when this number has increased by the reply's length. One event per reply
is enough. Replicas share the work evenly. docs/check.md lists the model's limits.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator
from typing import NamedTuple


class PlayedCall(NamedTuple):
    """One call, or several parallel calls, for example from sub-agents. Example: PlayedCall(0.2, 800, 150, 40)"""

    wait_s: float  # agent and tool time since the previous call or the attempt's start
    cached: int  # prompt tokens computed earlier
    prompt: int  # remaining prompt tokens
    sampled: int  # tokens of the longest reply
    num: int = 1  # number of calls


class Play(NamedTuple):
    """One attempt."""

    calls: tuple[PlayedCall, ...]
    end_s: float = 0.0  # agent time after the last reply
    tokens: int = 0  # tokens of all prompts and replies


class PlayedGroup(NamedTuple):
    """A scenario's attempts, and the judge's seconds for the group."""

    plays: tuple[Play, ...]
    judge_s: float = 0.0


class PlayedStep(NamedTuple):
    """A step's groups."""

    groups: tuple[PlayedGroup, ...]
    trained: int = 0  # tokens computed by the learner, over all epochs

    @property
    def plays(self) -> list[Play]:
        return [play for group in self.groups for play in group.plays]


class Rates(NamedTuple):
    """Seconds per unit of work, for a single replica and a single learner process."""

    prompt_token_s: float
    pass_s: float  # base cost of a pass, which decodes one token per sequence,
    sequence_s: float  # plus this for each sequence in the pass,
    cached_token_s: float = 0.0  # plus this for each context token
    call_s: float = 0.0  # time for which a call blocks the gateway: HTTP, chat template, recording
    agent_s: float = 0.0  # time for which a call blocks its agent process
    trained_token_s: float = 0.0
    exchange_s: float = 0.0  # communication between learner processes in an update: gradients and weights
    rest_s: float = 0.0  # sleep, wake, checkpoint, loading and proving


class RunLayout(NamedTuple):
    """The number of things that run in parallel."""

    concurrency: int = 128  # attempts
    replicas: int = 1
    slots: int = 128  # sequences that a replica decodes together
    learners: int = 1  # processes that share an update
    agents: int = 1  # processes that run the agent's code, on all nodes
    judges: int = 0  # groups judged in parallel; 0: unlimited


class StepTimes(NamedTuple):
    """The seconds of a step's consecutive parts."""

    sampling_s: float
    judging_s: float  # from the end of the last attempt to the last verdict
    training_s: float
    rest_s: float


def simulate(step: PlayedStep, rates: Rates, layout: RunLayout) -> StepTimes:
    """Returns the step's times. Deterministic."""
    batch = _Batch(step, rates, layout)
    batch.run()
    tokens = [play.tokens for play in step.plays]
    # the share of the busiest process; an attempt's tokens stay together
    share = max(1 / layout.learners, max(tokens) / max(sum(tokens), 1))
    training_s = rates.trained_token_s * step.trained * share + rates.exchange_s * (layout.learners > 1)
    return StepTimes(batch.played, max(batch.judged - batch.played, 0.0), training_s, rates.rest_s)


def call_seconds(step: PlayedStep, rates: Rates, layout: RunLayout) -> list[float]:
    """Returns each call's duration, ordered by attempt and call."""
    batch = _Batch(step, rates, layout)
    batch.run()
    return list(itertools.chain(*batch.call_s))


def longest_alone(step: PlayedStep, rates: Rates) -> float:
    """Returns the seconds of the longest attempt on an otherwise idle machine."""
    pass_s = rates.pass_s + rates.sequence_s
    return max(
        play.end_s + sum(c.wait_s + c.prompt * rates.prompt_token_s + c.sampled * pass_s for c in play.calls)
        for play in step.plays
    )


# An attempt. It yields the time of its next event, or a call to wait for.
_Process = Generator[float | PlayedCall, None, None]


class _Batch:
    """A step in progress. `played` is the time of the last attempt, `judged` the time of the last verdict."""

    def __init__(self, step: PlayedStep, rates: Rates, layout: RunLayout) -> None:
        self._step, self._rates, self._layout = step, rates, layout
        self._now = self.played = self.judged = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, _Process]] = []  # heap by time
        # heaps of the times at which each worker becomes free
        self._gateway, self._agents, self._judges = [0.0], [0.0] * layout.agents, [0.0] * layout.judges
        self._left = [len(group.plays) for group in step.groups]
        self._owed = iter([(index, play) for index, group in enumerate(step.groups) for play in group.plays])
        self.call_s = [[0.0] * len(play.calls) for play in step.plays]
        self._call_s = iter(self.call_s)
        self._clock = self._busy_s = 0.0  # passes so far, and seconds of prompts to compute before the next pass
        self._num = self._context = 0  # sequences being decoded, and their context tokens
        self._running: list[tuple[float, int, PlayedCall, _Process]] = []  # heap by the clock value at the call's end
        self._waiting = deque[tuple[PlayedCall, _Process]]()

    def run(self) -> None:
        self._begin(self._layout.concurrency)
        while self._events or self._running:
            answered = math.inf
            if self._running:
                left = max(self._running[0][0] - self._clock, 0.0)
                answered = self._now + self._busy_s + left * self._pass_s()
            if self._events and self._events[0][0] <= answered:
                time, _, process = heapq.heappop(self._events)
                self._advance(time)
            else:
                self._advance(answered)
                process = self._answer()
            self._go_on(process)

    def _begin(self, num: int) -> None:
        for index, play in itertools.islice(self._owed, num):
            self._go_on(self._play(index, play))

    def _play(self, group: int, play: Play) -> _Process:
        """Plays an attempt, judges the group if the attempt completes it, and starts the next attempt."""
        rates, replicas, call_s = self._rates, self._layout.replicas, next(self._call_s)
        for number, call in enumerate(play.calls):
            yield self._queue(self._agents, rates.agent_s) + call.wait_s
            asked = self._now
            yield self._queue(self._gateway, call.num * rates.call_s)
            # each replica must compute prefixes cached by another replica
            prompt_s = (call.prompt + (1 - 1 / replicas) * call.cached) * rates.prompt_token_s
            self._busy_s += prompt_s / replicas
            if prompt_s > self._busy_s:  # other replicas continue with their passes
                yield self._now + prompt_s
            yield call
            call_s[number] = self._now - asked
        yield self._queue(self._agents, rates.agent_s) + play.end_s
        self.played = self._now
        self._left[group] -= 1
        if not self._left[group]:
            self.judged = max(self.judged, self._queue(self._judges, self._step.groups[group].judge_s))
        self._begin(1)

    def _queue(self, free: list[float], seconds: float) -> float:
        """Assigns work to the next free worker and returns its finishing time. Without workers, it starts now."""
        done = max(self._now, free[0] if free else 0.0) + seconds
        if free:
            heapq.heapreplace(free, done)
        return done

    def _go_on(self, process: _Process) -> None:
        wanted = next(process, None)
        if isinstance(wanted, PlayedCall):
            self._admit(wanted, process)
        elif wanted is not None:
            heapq.heappush(self._events, (wanted, next(self._numbers), process))

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _admit(self, call: PlayedCall, process: _Process) -> None:
        if not self._has_room(call):
            self._waiting.append((call, process))
            return
        self._count(call, 1)
        heapq.heappush(self._running, (self._clock + call.sampled, next(self._numbers), call, process))

    def _has_room(self, call: PlayedCall) -> bool:
        return not self._running or self._num + call.num <= self._layout.replicas * self._layout.slots

    def _answer(self) -> _Process:
        """Returns the attempt whose call is answered, and admits waiting calls."""
        self._clock, _, call, process = heapq.heappop(self._running)
        self._count(call, -1)
        while self._waiting and self._has_room(self._waiting[0][0]):
            self._admit(*self._waiting.popleft())
        return process

    def _advance(self, now: float) -> None:
        left, self._now = now - self._now, now
        prompt_s = min(left, self._busy_s)
        self._busy_s -= prompt_s
        if self._running:
            self._clock += (left - prompt_s) / self._pass_s()

    def _count(self, call: PlayedCall, sign: int) -> None:
        self._num += sign * call.num
        self._context += sign * (call.cached + call.prompt + call.num * call.sampled // 2)

    def _pass_s(self) -> float:
        """Returns the duration of a pass, with sequences spread evenly over the replicas."""
        rates, used = self._rates, max(min(self._layout.replicas, self._num), 1)
        work = rates.sequence_s * self._num + rates.cached_token_s * self._context
        return max(rates.pass_s + work / used, 1e-12)
