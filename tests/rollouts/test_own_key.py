"""Attempts share a process's environment and globals. Their calls stay separate, or the user gets an explanation."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from art_cli.rollouts.function_rollout import SHARED_KEY, reading_own
from art_cli.rollouts.rollout_gateway import OWN_CLIENT
from tests.support.processes.stage import Stage

SET = """
import asyncio, os, threading, time
import openai
def set_environment(policy):
    os.environ["OPENAI_BASE_URL"] = policy.base_url
    os.environ["OPENAI_API_KEY"] = policy.api_key
def asked(policy, scenario):
    return {"model": policy.model, "messages": [{"role": "user", "content": str(scenario["index"])}]}
"""
# By the time an attempt reads the environment, all others have set it.
ASYNC = """
async def rollout(policy, scenario):
    set_environment(policy)
    await asyncio.sleep(0.2)
    for _ in range(2):
        client = openai.AsyncOpenAI(max_retries=0)
        await client.chat.completions.create(**asked(policy, scenario))
        await client.close()
    return 1.0
"""
PLAIN = """
def rollout(policy, scenario):
    set_environment(policy)
    time.sleep(0.2)
    for _ in range(2):
        with openai.OpenAI(max_retries=0) as client:
            client.chat.completions.create(**asked(policy, scenario))
    return 1.0
"""
TO_THREAD = """
def call(policy, scenario):
    for _ in range(2):
        with openai.OpenAI(max_retries=0) as client:
            client.chat.completions.create(**asked(policy, scenario))
async def rollout(policy, scenario):
    set_environment(policy)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(call, policy, scenario)
    return 1.0
"""
# A thread of a pool has no attempt's context: nobody can say whose code it runs.
POOL = """
def call(policy, scenario):
    with openai.OpenAI(max_retries=0) as client:
        client.chat.completions.create(**asked(policy, scenario))
async def rollout(policy, scenario):
    set_environment(policy)
    await asyncio.sleep(0.2)
    await asyncio.get_running_loop().run_in_executor(None, call, policy, scenario)
    return 1.0
"""
# One client for all: the first attempt's.
GLOBAL = """
client, lock = None, threading.Lock()
def rollout(policy, scenario):
    global client
    set_environment(policy)
    time.sleep(0.2)
    with lock:
        client = client or openai.OpenAI(max_retries=0, default_headers={"Connection": "close"})
    client.chat.completions.create(**asked(policy, scenario))
    return 1.0
"""


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "none")  # put back afterwards
    return Stage(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "processes"),
    [(ASYNC, 0), (ASYNC, 1), (PLAIN, 0), (PLAIN, 1), (TO_THREAD, 1)],
    ids=["async-here", "async", "def-here", "def", "to_thread"],
)
async def test_attempts_that_set_the_environment_at_once_each_read_their_own_key(
    stage: Stage, agent: str, processes: int
) -> None:
    """Before, 13 of 16 trajectories had no turns and reward 1."""
    played = await stage.play(SET + agent, num=6, processes=processes, timeout_s=100)
    assert [t.error for t in played] == [None] * 6
    for trajectory in played:
        assert len(trajectory.turns) == 2
        conversations = [trajectory.messages, *trajectory.branches]
        assert {conversation[0]["content"] for conversation in conversations} == {str(trajectory.index)}


@pytest.mark.slow
async def test_a_key_read_where_no_attempt_can_be_told_is_refused_with_the_cure(stage: Stage) -> None:
    played = await stage.play(SET + POOL, num=4, timeout_s=100)
    told = [trajectory for trajectory in played if trajectory.error is not None]
    for trajectory in told:
        assert trajectory.error is not None and OWN_CLIENT in trajectory.error
        assert not trajectory.turns
    assert len(told) >= 3  # the last attempt may have run alone, with its correct key
    stage.finished.clear()
    alone = await stage.play(SET + POOL, num=3, concurrency=1, timeout_s=100)
    assert [(t.error, len(t.turns)) for t in alone] == [(None, 1)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
async def test_attempts_that_share_a_client_are_told(
    stage: Stage, processes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls with a finished attempt's key are refused with an explanation; before that, a warning is logged."""
    caplog.set_level(logging.WARNING)
    played = await stage.play(SET + GLOBAL, num=6, processes=processes, timeout_s=100)
    silent = [trajectory for trajectory in played if not trajectory.turns]
    assert len(silent) == 5
    assert all(t.error is None or OWN_CLIENT in t.error for t in silent)
    assert caplog.text.count("made no model call, while others made calls. Create a client") == any(
        trajectory.error is None for trajectory in silent
    )


async def test_a_reward_without_a_call_among_others_with_calls_is_told_once(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    agent = """
async def rollout(policy, scenario):
    if scenario["index"] % 2:
        await policy.client.chat.completions.create(**asked(policy, scenario))
    return 1.0
"""
    caplog.set_level(logging.WARNING)
    played = await stage.play(SET + agent, num=6, processes=0)
    assert [t.error for t in played] == [None] * 6
    assert caplog.text.count("made no model call") == 1
    assert OWN_CLIENT in caplog.text
    caplog.clear()
    (stage.directory / "all").mkdir()
    await Stage(stage.directory / "all").play(
        "async def rollout(policy, scenario):\n    return 1.0\n", num=6, processes=0
    )
    assert caplog.text == ""


async def test_only_what_was_set_to_an_attempts_key_reads_as_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes copies of the environment for child processes; a value that is set later is unchanged."""
    for name in ("HELD", "KEPT"):
        monkeypatch.setenv(name, "before")
    have_set, seen = asyncio.Barrier(2), {}

    async def play(key: str) -> None:
        with reading_own(key):
            os.environ["HELD"] = key
            await have_set.wait()
            seen[key] = os.environ["HELD"], os.environ.copy()["HELD"], dict(os.environ)["HELD"], os.environ["KEPT"]
            await have_set.wait()
            if key == "key-a":
                seen["outside"] = await asyncio.get_running_loop().run_in_executor(None, os.getenv, "HELD")
            await have_set.wait()

    await asyncio.gather(asyncio.create_task(play("key-a")), asyncio.create_task(play("key-b")))
    assert seen == {key: (key, key, key, "before") for key in ("key-a", "key-b")} | {"outside": SHARED_KEY}
    os.environ["HELD"] = "after"
    with reading_own("key-a"):
        assert os.environ["HELD"] == "after"
