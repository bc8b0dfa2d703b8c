"""Invalid results, exceptions, and process crashes fail only their own attempt, immediately; its siblings continue."""

import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from art_cli.runs.run_dir import RunDir
from tests.support.attacks.hostile import assert_in_words
from tests.support.paths import LETTERS
from tests.support.processes import forked
from tests.support.processes.stage import Stage
from tests.support.standins.scripted import ScriptedBackend

TIMEOUT_S = 120.0  # per attempt: none of these may take this long
SOON_S = 45.0  # the machine may be busy


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, ScriptedBackend())


async def play(stage: Stage, source: str, num: int = 1, **options: object) -> list[str]:
    """The errors of the bad attempts, every second one, once it is sure that they came soon and all others are good."""
    begin = time.monotonic()
    played = await stage.play(source, num=2 * num + 2, timeout_s=TIMEOUT_S, **options)
    assert time.monotonic() - begin < SOON_S
    bad = played[1 : 2 * num : 2]
    assert [(t.returned_reward, t.error) for t in played if t not in bad] == [(1.0, None)] * (num + 2)
    assert all(t.returned_reward is None and t.turns == [] for t in bad)
    errors = [t.error or "" for t in bad]
    assert all("Traceback" not in error and 0 < len(error) <= 2000 for error in errors)
    assert all(error.encode() for error in errors)  # it can be written
    return errors


def check_starts(errors: list[str], starts: Iterable[str]) -> None:
    for error, start in zip(errors, starts, strict=True):
        assert error.startswith(start), (error, start)


def source_of(statements: Iterable[str], keyword: str = "async def") -> str:
    """A rollout whose attempts 1, 3, 5 and so on run a statement each, while the others take a moment."""
    wait = "await asyncio.sleep(0.2)" if keyword == "async def" else "time.sleep(0.2)"
    bad = "".join(
        f"    if scenario['index'] == {2 * number + 1}:\n        {statement}\n"
        for number, statement in enumerate(statements)
    )
    return f"""
import asyncio, decimal, fractions, math, os, sys, threading, time
from art_cli import Outcome

class Silent(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

class Ending(Exception):
    def __str__(self): raise SystemExit(3)
    __repr__ = __str__

class Odd:
    def __float__(self): raise KeyboardInterrupt
    def __repr__(self): raise Silent

class Wrong(Odd):
    __float__ = None

def looped():
    found = {{}}
    found["self"] = found
    return found

{keyword} rollout(policy, scenario):
{bad}
    {wait}
    return 1
"""


RETURNS = {
    "1e308": "reward: reward is 1e+308",
    "-1e308": "reward: reward is -1e+308",
    "10**400": "reward: reward is inf, not a finite number",
    "float('inf')": "reward: reward is inf",
    "decimal.Decimal('sNaN')": "reward: reward is Decimal, not a number",
    "decimal.Decimal('1e999')": "reward: reward is inf",
    "fractions.Fraction(10**400, 3)": "reward: reward is inf",
    "Odd()": "KeyboardInterrupt",
    "Outcome(reward=1, metrics={'m': 1e308})": "reward: metric 'm' is 1e+308",
    "Outcome(reward=1, metrics={'m': Odd()})": "KeyboardInterrupt",
    "Outcome(reward=1, metadata=looped())": "metadata: it cannot be written as JSON",
    "Outcome(reward=1, metadata={'t': chr(0xd800)})": "metadata: it cannot be written as JSON",
    "Outcome(reward=1, metadata={'t': 'x' * 2**25})": "metadata: it is 32.0 MiB as JSON; at most 16 are kept",
}


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
async def test_a_value_that_cannot_be_used_fails_its_attempt(stage: Stage, processes: int) -> None:
    statements = [f"return {value}" for value in RETURNS]
    errors = await play(stage, source_of(statements), len(statements), processes=processes)
    check_starts(errors, RETURNS.values())


@pytest.mark.slow
async def test_any_kind_of_number_is_a_reward(stage: Stage) -> None:
    rewards = {
        "decimal.Decimal('0.5')": 0.5,
        "fractions.Fraction(1, 4)": 0.25,
        "True": 1.0,
        "Outcome(reward=1, metrics={chr(0xd800): 2})": 1.0,
        "1e30": 1e30,
    }
    played = await stage.play(source_of(f"return {value}" for value in rewards), num=2 * len(rewards))
    assert [t.error for t in played] == [None] * len(played)
    assert [t.returned_reward for t in played[1::2]] == list(rewards.values())


RAISES = {
    "raise Silent": "Silent: its text cannot be had: RuntimeError in __str__ (rollout.py:",
    "raise Ending": "Ending: its text cannot be had: SystemExit in __str__ (rollout.py:",
    "raise ValueError(chr(0xd800))": "ValueError: ? (rollout.py:",
    "raise ValueError('x' * 10**8)": "ValueError: xxx",
    "raise type(chr(0x1f600), (Exception,), {'__module__': 5})('odd')": "\U0001f600: odd (rollout.py:",
    "raise GeneratorExit": "GeneratorExit: (rollout.py:",
    "raise SystemExit(3)": "SystemExit: 3 (rollout.py:",
    "sys.exit()": "SystemExit: (rollout.py:",
    "raise KeyboardInterrupt": "KeyboardInterrupt: (rollout.py:",
    "raise asyncio.CancelledError": "CancelledError",
    "raise StopIteration(1)": "",  # coroutines turn it into a RuntimeError
    "raise StopAsyncIteration": "",
    "raise BaseExceptionGroup('all', [KeyError('k'), SystemExit(1)])": "BaseExceptionGroup: all (2 sub-exceptions): "
    "KeyError: 'k' (rollout.py:",
    "raise AttributeError(\"'coroutine' object has no attribute 'choices'\")": "AttributeError: 'coroutine' object has "
    "no attribute 'choices'; is an `await` missing?",
    "raise RecursionError": "RecursionError",
    "raise MemoryError": "MemoryError",
}


@pytest.mark.slow
@pytest.mark.parametrize(("keyword", "processes"), [("def", 0), ("async def", 1)])
async def test_whatever_it_raises_fails_its_attempt_with_its_cause(stage: Stage, keyword: str, processes: int) -> None:
    errors = await play(stage, source_of(RAISES, keyword), len(RAISES), processes=processes)
    check_starts(errors, RAISES.values())
    assert not any("\n" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
async def test_the_loop_that_rollouts_share_cannot_be_stopped_by_one(stage: Stage, processes: int) -> None:
    statements = [
        "asyncio.get_event_loop().stop(); await asyncio.Event().wait()",
        "asyncio.get_running_loop().close()",
        "asyncio.get_running_loop().run_forever()",
    ]
    errors = await play(stage, source_of(statements), len(statements), processes=processes)
    check_starts(errors, ["RuntimeError: "] * len(statements))
    assert all("rollout.py:" in error for error in errors)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
async def test_what_a_task_of_it_raises_through_the_loop_fails_its_attempt(stage: Stage, processes: int) -> None:
    raised = ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "asyncio.CancelledError"]
    statements = [f"async def child(): raise {error}\n        await asyncio.create_task(child())" for error in raised]
    errors = await play(stage, source_of(statements), len(statements), processes=processes)
    check_starts(errors, [error.removeprefix("asyncio.") for error in raised])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("os._exit(3)", "process: its process ended (status 3)"),
        ("os.kill(os.getpid(), 9)", "process: its process ended (signal 9)"),
        ("os.closerange(3, 200)", "process: its process ended ("),
        ("sys.setrecursionlimit(10**9); deep()", "process: its process ended (signal 11)"),
    ],
    ids=["exit", "kill", "close", "stack"],
)
async def test_what_ends_its_process_is_played_alone_in_the_end_and_takes_no_sibling_along(
    stage: Stage, statement: str, kind: str
) -> None:
    deep = "def deep():\n    return [*map(lambda _: deep(), [1])]\n"
    check_starts(await play(stage, deep + source_of([statement]), processes=1), [kind])


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1])
async def test_a_call_with_another_attempts_key_fails_the_attempt_that_makes_it(stage: Stage, processes: int) -> None:
    """A finished attempt's key, one that never was, and one that is no text of a header."""
    source = """
import asyncio
keys = []
async def ask(policy, key):
    client = policy.client.with_options(max_retries=0, api_key=key)
    return await client.chat.completions.create(model=policy.model, messages=[{"role": "user", "content": "hi"}])
async def rollout(policy, scenario):
    if scenario["index"] == 0:
        keys.append(policy.api_key)
    if scenario["index"] in (1, 3, 5):
        await ask(policy, [keys[0], "x" * 43, chr(0xe9)][scenario["index"] // 2])
    await ask(policy, policy.api_key)
    return 1
"""
    errors = await play(stage, source, 3, processes=processes, concurrency=1)
    assert all("rollout.py:6" in error for error in errors)


PROGRAMS = {
    "print(1e308)": "reward: reward is 1e+308",
    "print('1e999')": "output: ",
    "print('1' + '0' * 400)": "",
    "print('[' * 10**5)": "output: ",
    "print('x' * 10**7)": "output: ",
    r"print('{\"reward\": 1, \"metadata\": {\"t\": \"\\ud800\"}}')": "output: ",
    "import os; os.write(1, bytes(range(256)))": "output: ",
    "import os; os._exit(3)": "exit: status 3",
    "import os; os.kill(os.getpid(), 9)": "exit: signal 9",
    "import sys; sys.stderr.buffer.write(b'\\xff' * 10**7); sys.exit(1)": "exit: status 1: ",
    "import os; os.close(1)": "output: ",
}


@pytest.mark.slow
async def test_whatever_a_program_does_fails_its_attempt(stage: Stage) -> None:
    (stage.directory / "agent.py").write_text(
        f"import json\nindex, statements = json.loads(input())['index'], {list(PROGRAMS)}\n"
        "exec(statements[index // 2] if index % 2 and index // 2 < len(statements) else 'print(1)')\n"
    )
    command = [sys.executable, "agent.py"]
    errors = await play(stage, "", len(PROGRAMS), entry=None, command=command)
    check_starts(errors, PROGRAMS.values())


async def test_a_program_that_loses_its_permission_fails_its_attempt(stage: Stage) -> None:
    """The first attempt takes its own program's permission away."""
    program = stage.directory / "agent.sh"
    program.write_text("#!/bin/sh\nchmod -x agent.sh\necho 1\n")
    program.chmod(0o700)
    first, second = await stage.play(num=2, concurrency=1, entry=None, command=["./agent.sh"])
    assert first.returned_reward == 1.0
    assert second.error is not None and "agent.sh" in second.error and "\n" not in second.error.strip()


# --- a whole run ------------------------------------------------------------------------------------------------------

FAMILY = """
import asyncio, itertools
from pathlib import Path
from art_cli import Outcome
numbers = itertools.count()
keys = []

class Silent(Exception):
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

async def ask(policy, key=None):
    client = policy.client.with_options(api_key=key or policy.api_key, max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    return (await client.chat.completions.create(model=policy.model, messages=messages)).choices[0].message.content

async def rollout(policy, scenario):
    number = next(numbers)
    if policy.step == 0:
        keys.append(policy.api_key)
        said = await ask(policy)
        if number % 2:
            return len(set(said or ""))
    match number % 12:
        case 0: return 1e308
        case 2: raise Silent
        case 4: raise GeneratorExit
        case 6: asyncio.get_running_loop().stop()
        case 8: return await ask(policy, keys[0])
        case 10: raise ValueError(chr(0xd800))
        case _: return await ask(policy, "x" * 43)
"""


@pytest.mark.slow
def test_a_run_trains_on_what_is_left_and_a_step_of_failures_alone_ends_in_words(tmp_path: Path) -> None:
    """Step 0: every second attempt is bad, each in its own way. Step 1: all are. The run ends, its curve drawn."""
    project = tmp_path / "project"
    shutil.copytree(LETTERS, project)
    (project / "rollout.py").write_text(FAMILY)
    settings = [f"runs={tmp_path}", "rollout.processes=1", "rollout.concurrency=1", "train.steps=2"]
    done = forked.run(["train", project / "config.yaml", *settings, "eval=null"], timeout=240)
    assert_in_words(done.returncode, done.stderr)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "letters")
    first, second = run.trajectories(0), run.trajectories(1)
    assert sorted((t.error or "").partition(":")[0] for t in first if t.error) == sorted(
        ["reward", "GeneratorExit", "RuntimeError", "AuthenticationError"]
    )
    assert sorted((t.failure or "").partition(":")[0] for t in first if t.failure) == ["Silent", "ValueError"]
    assert len(first) == len(second) == 12
    assert all(t.error or t.failure for t in second)
    numbers = run.metrics()[1].metrics
    assert (numbers["num_failed"] + numbers["num_policy_failed"], numbers["failed.AuthenticationError"]) == (12, 7)
    assert "failed 12 (mostly AuthenticationError)  limited 0" in done.stderr
    assert run.curve_path.exists()
