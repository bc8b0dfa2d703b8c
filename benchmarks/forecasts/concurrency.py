"""The number of rollouts at once that `rollout.concurrency: auto` finds, against every fixed number.

    python -m benchmarks.forecasts.concurrency

Engines and agents of ten shapes are simulated. For each, the table shows the rate with `auto` as a share of the rate
with the best fixed number; exit code 1 where a share is below 95 %. It also plays a machine that is ten times slower,
which gets about the same number.
"""

import dataclasses
import heapq
import random
import sys
from collections import OrderedDict, deque
from dataclasses import dataclass

from art_cli.chat import EngineLoad
from art_cli.rollouts.call_counts import CallCounts
from art_cli.rollouts.concurrency import SAMPLE_S, Concurrency

LEAST = 0.95  # share of the best fixed number's rate


@dataclass
class Shape:
    """Times in seconds, lengths in tokens. A step of the engine samples one token of each request that it answers."""

    room: int = 32
    step_s: float = 0.02  # of a step, whatever it computes
    token_s: float = 0.001  # of each token in it, sampled or read
    turns: int = 1
    tool_s: float = 0.0  # mean time between two turns
    reply: tuple[int, int] = (20, 60)  # shortest and longest
    prompt: tuple[int, int] = (100, 100)
    memory: float = float("inf")  # tokens with keys and values; requests that do not fit begin again
    shows_room: bool = True
    workers: int = 10**9  # tools that run at once
    pace: float = 1.0  # factor of all times


class Rollout:
    def __init__(self, shape: Shape, chance: random.Random, now: float) -> None:
        self.left, self.length = shape.turns, chance.randint(*shape.prompt)
        self.since = now  # time of the last request or answer
        self.known = self.computed = self.sampled = self.wanted = 0


class World:
    """Plays rollouts endlessly, with `number` in flight; `flow` adapts the number."""

    def __init__(self, shape: Shape, number: int, flow: Concurrency | None = None, seed: int = 0) -> None:
        self.shape, self.number, self.flow = shape, number, flow
        self.now, self.in_flight, self.done = 0.0, 0, 0
        self.calls = CallCounts()
        self.chance = random.Random(seed)
        self.waiting: deque[Rollout] = deque()
        self.running: list[Rollout] = []
        self.cached: OrderedDict[int, Rollout] = OrderedDict()  # idle places that keep a conversation
        self.at_tools: list[tuple[float, int, Rollout]] = []
        self.in_line: deque[Rollout] = deque()  # for a tool
        self.sampled_at = 0.0
        self.computed = 0

    def load(self) -> EngineLoad:
        used = sum(each.length + each.sampled for each in self.running) / self.shape.memory
        shown = (self.shape.room, used, self.computed) if self.shape.shows_room else (None, used, 0)
        return EngineLoad(len(self.running), len(self.waiting), *shown)

    def rate(self, rollouts: int) -> float:
        """Rollouts per second until so many more have ended."""
        begin, target = self.now, self.done + rollouts
        while self.done < target:
            self._step()
        return rollouts / (self.now - begin)

    def _step(self) -> None:
        while self.in_flight < self.number:
            self.in_flight += 1
            self._ask(Rollout(self.shape, self.chance, self.now))
        while self.at_tools and self.at_tools[0][0] <= self.now:
            self._ask(heapq.heappop(self.at_tools)[2])
            self._use_tools()
        self._admit()
        if not self.running:
            self._pass(self.at_tools[0][0] - self.now)
            return
        num_read = 0
        for each in self.running:
            num_read += each.length - each.computed
            each.computed = each.length
            each.sampled += 1
        self.computed += num_read + len(self.running)
        self._pass(self.shape.pace * (self.shape.step_s + self.shape.token_s * (num_read + len(self.running))))
        for each in [each for each in self.running if each.sampled == each.wanted]:
            self._answer(each)

    def _pass(self, seconds: float) -> None:
        self.now += seconds
        if self.flow is not None and self.now >= self.sampled_at + SAMPLE_S:
            self.number = self.flow.note(self.in_flight, self.load(), self.calls)
            self.sampled_at, self.calls = self.now, CallCounts()

    def _ask(self, rollout: Rollout) -> None:
        self.calls.idle_s += self.now - rollout.since
        rollout.since = self.now
        rollout.sampled, rollout.wanted = 0, self.chance.randint(*self.shape.reply)
        self.waiting.append(rollout)

    def _admit(self) -> None:
        used = sum(each.length + each.sampled for each in self.running)
        while len(self.running) > 1 and used > self.shape.memory:  # as vLLM: the newest begins again
            last = self.running.pop()
            used -= last.length + last.sampled
            last.sampled = last.computed = 0
            self.waiting.appendleft(last)
        while self.waiting and len(self.running) < self.shape.room:
            if self.running and used + self.waiting[0].length > self.shape.memory:
                break
            rollout = self.waiting.popleft()
            used += rollout.length
            if self.cached.pop(id(rollout), None) is None:
                rollout.computed = 0
            self.running.append(rollout)
            self._evict(used)

    def _evict(self, used: int) -> None:
        """Where the number of places is known, each keeps a conversation; elsewhere the memory does."""
        while self.cached and (
            len(self.running) + len(self.cached) > self.shape.room
            if self.shape.shows_room
            else used + sum(each.length for each in self.cached.values()) > self.shape.memory
        ):
            self.cached.popitem(last=False)

    def _answer(self, rollout: Rollout) -> None:
        self.running.remove(rollout)
        self.calls.answered += 1
        self.calls.busy_s += self.now - rollout.since
        rollout.since = self.now
        self.calls.tokens += rollout.length - rollout.known + rollout.sampled
        rollout.left -= 1
        rollout.length += rollout.sampled
        rollout.computed = rollout.known = rollout.length
        rollout.sampled = 0
        if rollout.left:
            self.cached[id(rollout)] = rollout
            self.in_line.append(rollout)
            self._use_tools()
        else:
            self.done += 1
            self.in_flight -= 1

    def _use_tools(self) -> None:
        while self.in_line and len(self.at_tools) < self.shape.workers:
            seconds = self.shape.pace * self.shape.tool_s * self.chance.uniform(0.5, 1.5)
            rollout = self.in_line.popleft()
            heapq.heappush(self.at_tools, (self.now + seconds, id(rollout), rollout))


SHAPES = {
    "one turn": Shape(),
    "one turn, long replies": Shape(reply=(20, 600), room=64),
    "slow tools": Shape(turns=4, tool_s=3.0),
    "very slow tools": Shape(turns=4, tool_s=20.0, room=16),
    "short tools and long prompts": Shape(turns=6, tool_s=0.5, prompt=(100, 2000), token_s=0.0002),
    "a GPU": Shape(room=256, step_s=0.02, token_s=0.00001, turns=4, tool_s=2.0, reply=(50, 400)),
    "a GPU whose room is unknown": Shape(
        room=256, step_s=0.02, token_s=0.00001, turns=4, tool_s=2.0, reply=(50, 400), shows_room=False
    ),
    "few tools": Shape(turns=4, tool_s=4.0, workers=8),
    "little memory": Shape(room=256, shows_room=False, memory=20_000, reply=(50, 200), token_s=0.0001),
    "little memory and tools": Shape(
        room=256, shows_room=False, memory=20_000, reply=(50, 200), token_s=0.0001, turns=3, tool_s=5.0
    ),
}
FIXED = (8, 16, 32, 64, 96, 128, 256, 512)


def adaptive(shape: Shape) -> World:
    flow = Concurrency(EngineLoad(0, 0, shape.room if shape.shows_room else None))
    return World(shape, flow.number, flow)


def best_fixed(shape: Shape) -> float:
    """Returns the highest rate of the fixed numbers, in rollouts per second of simulated time."""
    rates = []
    for number in FIXED:
        world = World(shape, number)
        world.rate(300)
        rates.append(world.rate(1500))
    return max(rates)


def number_at(pace: float) -> float:
    """Returns the mean number of rollouts at once on a machine whose times are all multiplied by `pace`."""
    world = adaptive(dataclasses.replace(SHAPES["very slow tools"], pace=pace))
    world.rate(600)
    return sum(world.rate(100) and world.number for _ in range(10)) / 10


def main() -> None:
    print("| engine and agent | rollouts at once | share of the best fixed number's rate |\n|---|---|---|")
    shares = []
    for name, shape in SHAPES.items():
        world = adaptive(shape)
        world.rate(1000)
        shares.append(world.rate(3000) / best_fixed(shape))
        print(f"| {name} | {world.number} | {shares[-1]:.2f} |", flush=True)
    print(f"\nrollouts at once: {number_at(1.0):.0f}; where all takes ten times as long: {number_at(10.0):.0f}")
    sys.exit(min(shares) < LEAST)


if __name__ == "__main__":
    main()
