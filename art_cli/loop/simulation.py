"""Simulation: how long one step of a training takes on an assumed machine, event by event. Pure: no files, no torch.

    PlayedStep (what is played) + Rates (how fast) + RunLayout (how much at once) -> simulate -> StepTimes

It follows batches.py and train.py: attempts begin in order, `concurrency` at a time; complete groups are judged while
others are played; then the learner works, then the weights are published.

The engine decodes all sequences together, one token of each per pass, and stops for the prompts that come in. So its
state is one number, the passes so far, and a reply ends when that number has grown by its length. An event per reply
suffices, none per token. Several replicas share the work evenly. docs/plan.md has the limits of the model.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator
from typing import NamedTuple


class PlayedCall(NamedTuple):
    """One call, or several that are made together, as by sub-agents. Example: PlayedCall(0.2, 800, 150, 40)"""

    wait_s: float  # time of agent and tools since the call before, or since the attempt began
    cached: int  # tokens of its prompt that the engine has computed before
    prompt: int  # the other tokens of its prompt
    sampled: int  # tokens of the longest reply
    num: int = 1  # number of calls


class Play(NamedTuple):
    """One attempt."""

    calls: tuple[PlayedCall, ...]
    end_s: float = 0.0  # time of the agent after the last reply
    tokens: int = 0  # number of tokens of all prompts and replies


class PlayedGroup(NamedTuple):
    """The attempts at one scenario, and how long the judge takes for them."""

    plays: tuple[Play, ...]
    judge_s: float = 0.0


class PlayedStep(NamedTuple):
    """The groups of one step."""

    groups: tuple[PlayedGroup, ...]
    trained: int = 0  # tokens that the learner computes, in all epochs

    @property
    def plays(self) -> list[Play]:
        return [play for group in self.groups for play in group.plays]


class Rates(NamedTuple):
    """The speed of one replica and one learner process: seconds for each unit of work."""

    prompt_token_s: float
    pass_s: float  # of a pass that decodes one token of each sequence: this,
    sequence_s: float  # plus this for each sequence in it,
    cached_token_s: float = 0.0  # plus this for each token of their contexts
    call_s: float = 0.0  # time in which a call holds up all others: HTTP, chat template, recording
    agent_s: float = 0.0  # time in which a call holds up all others of its agent process
    trained_token_s: float = 0.0
    exchange_s: float = 0.0  # part of an update that several processes share: gradients and weights between them
    rest_s: float = 0.0  # sleep, wake, checkpoint, loading it, its proof


class RunLayout(NamedTuple):
    """The number of things that go on at once."""

    concurrency: int = 128  # attempts
    replicas: int = 1
    slots: int = 128  # sequences that a replica decodes together
    learners: int = 1  # processes that divide an update
    agents: int = 1  # processes that run the agent's code, on all nodes together
    judges: int = 0  # groups judged at once; 0: any number


class StepTimes(NamedTuple):
    """The seconds of one step's parts, which follow each other."""

    sampling_s: float
    judging_s: float  # from the end of the last attempt to the last verdict
    training_s: float
    rest_s: float


def simulate(step: PlayedStep, rates: Rates, layout: RunLayout) -> StepTimes:
    """Returns the times of the step. The same arguments give the same times."""
    batch = _Batch(step, rates, layout)
    batch.run()
    tokens = [play.tokens for play in step.plays]
    # the process that has most to do; the tokens of one attempt stay together
    share = max(1 / layout.learners, max(tokens) / max(sum(tokens), 1))
    training_s = rates.trained_token_s * step.trained * share + rates.exchange_s * (layout.learners > 1)
    return StepTimes(batch.played, max(batch.judged - batch.played, 0.0), training_s, rates.rest_s)


def call_seconds(step: PlayedStep, rates: Rates, layout: RunLayout) -> list[float]:
    """Returns how long each call takes, in the order of the attempts and of their calls."""
    batch = _Batch(step, rates, layout)
    batch.run()
    return list(itertools.chain(*batch.call_s))


def longest_alone(step: PlayedStep, rates: Rates) -> float:
    """Returns the seconds of the longest attempt on a machine that plays nothing else."""
    pass_s = rates.pass_s + rates.sequence_s
    return max(
        play.end_s + sum(c.wait_s + c.prompt * rates.prompt_token_s + c.sampled * pass_s for c in play.calls)
        for play in step.plays
    )


# An attempt. It yields the time at which it goes on, or a call that is answered before.
_Process = Generator[float | PlayedCall, None, None]


class _Batch:
    """The attempts of a step under way. `played` and `judged` are the times of the last attempt and verdict."""

    def __init__(self, step: PlayedStep, rates: Rates, layout: RunLayout) -> None:
        self._step, self._rates, self._layout = step, rates, layout
        self._now = self.played = self.judged = 0.0
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, _Process]] = []  # heap by time
        # heaps of the times at which each is free
        self._gateway, self._agents, self._judges = [0.0], [0.0] * layout.agents, [0.0] * layout.judges
        self._left = [len(group.plays) for group in step.groups]
        self._owed = iter([(index, play) for index, group in enumerate(step.groups) for play in group.plays])
        self.call_s = [[0.0] * len(play.calls) for play in step.plays]
        self._call_s = iter(self.call_s)
        self._clock = self._busy_s = 0.0  # passes so far, and prompts to compute before the next one
        self._num = self._context = 0  # sequences that are decoded, and the tokens of their contexts
        self._running: list[tuple[float, int, PlayedCall, _Process]] = []  # heap by the clock at the call's end
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
        """Plays an attempt, then the judge after the last one of its group, and the next attempt."""
        rates, replicas, call_s = self._rates, self._layout.replicas, next(self._call_s)
        for number, call in enumerate(play.calls):
            yield self._queue(self._agents, rates.agent_s) + call.wait_s
            asked = self._now
            yield self._queue(self._gateway, call.num * rates.call_s)
            # what another replica has cached is computed again
            prompt_s = (call.prompt + (1 - 1 / replicas) * call.cached) * rates.prompt_token_s
            self._busy_s += prompt_s / replicas
            if prompt_s > self._busy_s:  # other replicas go on with their passes
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
        """Returns when work that the first free one of several does will be done; at once, if there are none."""
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
        """Returns the attempt whose call is answered, and lets calls that wait begin."""
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
        """Returns the seconds of a pass, with the sequences spread evenly over the replicas."""
        rates, used = self._rates, max(min(self._layout.replicas, self._num), 1)
        work = rates.sequence_s * self._num + rates.cached_token_s * self._context
        return max(rates.pass_s + work / used, 1e-12)
