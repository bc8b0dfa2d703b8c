"""The rule that finds the number of rollouts at once; Openings; a run with the engine.

benchmarks/forecasts/concurrency.py plays the rule against every fixed number on simulated engines.
"""

import asyncio
import dataclasses
import re
import shutil
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
from art_cli.rollouts.concurrency import FIRST, Concurrency, Openings
from art_cli.runs.run_dir import RunDir
from tests.support.paths import LETTERS
from tests.support.processes.stage import ASK, Stage
from tests.support.standins.scripted import ScriptedBackend

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
