"""Concurrency on simulated engines of several shapes, against every fixed number; Openings; a run with the engine."""

import asyncio
import dataclasses
import heapq
import itertools
import random
import re
import shutil
from collections import OrderedDict, deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from art_cli.chat import EngineLoad
from art_cli.chat.chat_errors import ChatError
from art_cli.chat.requests import Request
from art_cli.config.compose import load_config
from art_cli.config.sections.rollout_config import MAX_AT_ONCE
from art_cli.engines.vllm.control import parse_metrics
from art_cli.loop.train import train
from art_cli.rollouts.call_counts import CallCounts
from art_cli.rollouts.concurrency import FIRST, SAMPLE_S, Concurrency, Openings
from art_cli.runs.run_dir import RunDir
from tests.support.paths import LETTERS
from tests.support.processes.stage import ASK, Stage
from tests.support.standins.scripted import ScriptedBackend

# --- a simulated engine and its agents --------------------------------------------------------------------------------


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


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_within_5_percent_of_the_best_fixed_number(name: str) -> None:
    """Rollouts/s of 3,000 rollouts after the first 1,000, in simulated time."""
    best = 0.0
    for number in FIXED:
        world = World(SHAPES[name], number)
        world.rate(300)
        best = max(best, world.rate(1500))
    world = adaptive(SHAPES[name])
    world.rate(1000)
    assert world.rate(3000) > 0.95 * best


@pytest.mark.slow
def test_a_machine_that_is_ten_times_slower_gets_the_same_number() -> None:
    """With slower engine and tools and ten times as many samples, the numbers differ by at most a step."""
    numbers = []
    for pace in (1.0, 10.0):
        world = adaptive(dataclasses.replace(SHAPES["very slow tools"], pace=pace))
        world.rate(600)
        numbers.append(sum(world.rate(100) and world.number for _ in range(10)) / 10)
    assert numbers[0] == pytest.approx(numbers[1], rel=0.25)


@pytest.mark.slow
def test_tools_that_are_the_narrow_place_do_not_let_the_number_grow_without_end() -> None:
    """8 tools serve whoever comes; 16 rollouts use them fully."""
    world = adaptive(SHAPES["few tools"])
    world.rate(2000)
    assert world.number <= 8 * SHAPES["few tools"].room


# --- the rule alone ---------------------------------------------------------------------------------------------------


def feed(flow: Concurrency, load: EngineLoad | None, calls: CallCounts, num: int = 1) -> int:
    """Notes this many windows of four samples, with the allowed number of rollouts."""
    for _ in range(4 * num):
        flow.note(flow.number, load, calls)
    return flow.number


def test_it_begins_with_the_room_of_the_engine() -> None:
    assert [Concurrency(EngineLoad(0, 0, room)).number for room in (3, 5000)] == [3, MAX_AT_ONCE]
    assert Concurrency(EngineLoad(0, 0)).number == Concurrency(None).number == FIRST


def test_it_never_leaves_its_bounds() -> None:
    idle, busy = CallCounts(answered=1024, busy_s=1, idle_s=999), CallCounts(answered=1024, busy_s=1000, idle_s=1)
    flow = Concurrency(EngineLoad(0, 0, 512))
    numbers = [feed(flow, EngineLoad(1 + flow.number // 100, 0, 512), idle) for _ in range(12)]
    assert max(numbers) == MAX_AT_ONCE and sorted(numbers) == numbers
    flow = Concurrency(EngineLoad(0, 0, 1))
    assert {feed(flow, EngineLoad(1, 50, 1), busy) for _ in range(12)} == {1, 2}  # one waits
    flow = Concurrency(None)
    assert min(feed(flow, None, CallCounts(refused=1024)) for _ in range(30)) == 1


def test_a_step_changes_the_number_at_most_by_half() -> None:
    flow = Concurrency(EngineLoad(0, 0, 100))
    before = flow.number
    for _ in range(20):
        now = feed(flow, EngineLoad(1, 0, 100), CallCounts(answered=1024, busy_s=1, idle_s=99))
        assert before <= now <= 1.5 * before + 1
        before = now


def test_refusals_lower_it_and_answers_raise_it_again() -> None:
    """A foreign endpoint's 429s: the number falls to 0.7 of itself for each window with refusals, and recovers at the
    end.
    """
    flow, refused, answered = Concurrency(None), CallCounts(10, refused=600), CallCounts(answered=1024, busy_s=1)
    assert [feed(flow, None, refused) for _ in range(3)] == [89, 62, 43]
    assert feed(flow, None, CallCounts(answered=1024, refused=1, busy_s=1), 4) == 43  # too few to lower it, or to raise
    numbers = [feed(flow, None, answered) for _ in range(40)]
    assert numbers == sorted(numbers) and numbers[-1] == FIRST


def test_a_full_memory_lowers_it() -> None:
    load, calls = EngineLoad(100, 0, memory=0.99), CallCounts(answered=1024, busy_s=1)
    assert feed(Concurrency(EngineLoad(0, 0)), load, calls, 2) < FIRST
    assert feed(Concurrency(EngineLoad(0, 0)), load._replace(memory=0.9), calls, 6) == FIRST


def test_the_end_of_a_step_teaches_nothing() -> None:
    """Neither its idle places, nor the tokens that the engine computes in it."""
    flow, calls = Concurrency(EngineLoad(0, 0, 32)), CallCounts(answered=64, tokens=100, busy_s=1, idle_s=99)
    computed = 0
    for _ in range(100):
        flow.note(5, EngineLoad(1, 0, 32), dataclasses.replace(calls))
    assert flow.number == 32
    for _ in range(40):  # tokens that are read again at the end of each step, and in no counted moment
        flow.note(5, EngineLoad(1, 0, 32, computed=(computed := computed + 5000)), dataclasses.replace(calls))
        for _ in range(4):
            load = EngineLoad(1, 0, 32, computed=(computed := computed + 100))
            flow.note(flow.number, load, dataclasses.replace(calls))
    assert flow.number > 64


def test_places_that_are_few_for_long_sequences_are_followed() -> None:
    """32 slots at first, 8 when the sequences are long."""
    flow = Concurrency(EngineLoad(0, 0, 32))
    for _ in range(20):
        feed(flow, EngineLoad(8, flow.number - 8, 8), CallCounts(answered=64, busy_s=1))
    assert 8 <= flow.number <= 12


# --- openings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [(3, 3, 3), (2, 6, 1), (8, 1, 5), (1, 9, 9), (5, 2, 1)])
async def test_no_more_than_the_number_enter(numbers: tuple[int, ...]) -> None:
    """After each change the number of admitted rollouts is the allowed number, or all that were admitted before."""
    openings, leave, order = Openings(numbers[0]), asyncio.Semaphore(0), []

    async def visit(index: int) -> None:
        async with openings:
            order.append(index)
            await leave.acquire()

    visitors = [asyncio.create_task(visit(index)) for index in range(60)]
    for number in numbers:
        openings.resize(number)
        for _ in range(12):
            inside = openings.num_taken
            leave.release()
            for _ in range(10):
                await asyncio.sleep(0)
            assert openings.num_taken <= max(number, inside - 1)
        assert openings.num_taken == number
    assert order == sorted(order)  # first come, first served
    for _ in range(100):
        leave.release()
    async with asyncio.timeout(10):
        await asyncio.gather(*visitors)
    assert openings.num_taken == 0 and len(order) == 60


async def test_a_cancelled_visitor_takes_no_opening_with_it() -> None:
    openings = Openings(2)
    async with openings, openings:
        waiting = [asyncio.create_task(openings.__aenter__()) for _ in range(5)]
        await asyncio.sleep(0)
        openings.resize(1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    for _ in range(3):
        async with asyncio.timeout(1), openings:
            assert openings.num_taken == 1


# --- with a real engine -----------------------------------------------------------------------------------------------

AGENT = """
import asyncio
async def rollout(policy, scenario):
    for _ in range(2):
        await policy.client.chat.completions.create(
            model=policy.model, messages=[{"role": "user", "content": str(scenario["id"])}]
        )
        await asyncio.sleep(0.4)
    return 1.0
"""


def play(directory: Path, concurrency: str) -> tuple[dict[str, float], list[tuple[object, ...]]]:
    """The metrics of a step with an engine of 4 slots, and its rollouts: what each was and was asked first."""
    shutil.copytree(LETTERS, directory)
    (directory / "rollout.py").write_text(AGENT)
    settings = [f"runs={directory}/runs", "train.steps=1", "eval=null", "rollout.group_size=16", "engine=embedded"]
    settings += ["engine.max_batch=4", f"rollout.concurrency={concurrency}"]
    root = asyncio.run(train(load_config(directory / "config.yaml", settings))).root
    played = sorted(RunDir(root).trajectories(0), key=lambda each: each.id)
    return RunDir(root).metrics()[0].metrics, [
        (each.id, each.index, each.scenario, each.turns[0].prompt_ids, each.error) for each in played
    ]


@pytest.mark.slow
def test_a_run_finds_more_rollouts_than_slots_for_an_agent_that_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollouts equal the rollouts of a run with a fixed number, which reports none."""
    caplog.set_level("INFO")
    metrics, rollouts = play(tmp_path / "auto", "auto")
    assert 4 < metrics["rollouts_at_once"] <= 48
    (line,) = [record.message for record in caplog.records if "auto is" in record.message]
    assert re.fullmatch(
        r"rollout.concurrency: auto is \d+ \(the engine answers 4 requests at once; "
        r"rollouts are without a call [5-9]\d% of their time\)",
        line,
    )
    fixed_metrics, fixed = play(tmp_path / "fixed", "48")
    assert rollouts == fixed and len(fixed) == 48
    assert "rollouts_at_once" not in fixed_metrics


@pytest.mark.slow
async def test_calls_are_counted(tmp_path: Path) -> None:
    """Two turns of 10 rollouts; each rollout has one refused call first. Time without a call is the agent's time."""
    is_refused = itertools.cycle([True, False, False])

    def answer(request: Request) -> str:
        if next(is_refused):
            raise ChatError(429, "slower", retry_after="0")
        return "ok"

    source = """
import asyncio
async def rollout(policy, scenario):
    for _ in range(2):
        await policy.client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}])
        await asyncio.sleep(0.1)
    return 1.0
"""
    (tmp_path / "rollout.py").write_text(source)
    stage = Stage(tmp_path, ScriptedBackend(answer))
    async with stage.open(processes=0, concurrency=1) as runner:
        await runner.run(stage.plans(10), stage.finished.append)
        calls = runner._gateway.calls
    assert (calls.answered, calls.refused) == (20, 10)
    assert calls.tokens == sum(len(t.prompt_ids) + len(t.sampled_ids) for each in stage.finished for t in each.turns)
    assert calls.idle_s >= 20 * 0.1 and calls.busy_s > 0
    assert calls.busy_s + calls.idle_s <= sum(each.duration_s for each in stage.finished)


async def test_an_engine_whose_load_cannot_be_read_is_asked_three_times(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    num_asked = 0

    async def occupancy() -> EngineLoad:
        nonlocal num_asked
        num_asked += 1
        raise RuntimeError("no load here")

    (tmp_path / "rollout.py").write_text(ASK + "async def rollout(policy, scenario):\n    return 1.0\n")
    async with Stage(tmp_path).open(concurrency=1) as runner:
        gateway = runner._gateway
        gateway.upstream.occupancy = occupancy
        assert [await gateway.load() for _ in range(4)] == [None] * 4
    assert num_asked == 3
    assert caplog.text.count("the engine's load is not known: RuntimeError: no load here") == 1


async def test_a_rollout_that_only_met_a_rate_limit_is_played_again(tmp_path: Path) -> None:
    answers = iter(["limited", "ok"])

    def answer(request: Request) -> str:
        if next(answers) == "limited":
            raise ChatError(429, "slower")
        return "ok"

    stage = Stage(tmp_path, ScriptedBackend(answer))
    (played,) = await stage.play(ASK + "async def rollout(policy, scenario):\n    await ask(policy)\n    return 1.0\n")
    assert (played.error, played.metrics["num_retries"]) == (None, 1)


# --- metrics of vLLM --------------------------------------------------------------------------------------------------


def test_loads_of_replicas_are_summed() -> None:
    text = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} 7"} 3.0
vllm:num_requests_running{engine="1",model_name="a} 7"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a} 7"} 1.0
vllm:num_requests_waiting{engine="1",model_name="a} 7"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 90.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 7.5e-01
"""
    assert parse_metrics(text) == EngineLoad(7, 1, memory=0.75)


@pytest.mark.parametrize(
    "text",
    ["", "not metrics", "vllm:num_requests_running 1.0", "vllm:num_requests_running NaN\nvllm:num_requests_waiting Inf",
     "vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1e999", "vllm:num_requests_running -\n" * 1000],
)  # fmt: skip
def test_other_metrics_are_no_load(text: str) -> None:
    assert parse_metrics(text) is None
