"""Rollouts in separate processes: arguments, results, and how processes end."""

import asyncio
import os
import subprocess
from pathlib import Path

import pytest

from art_cli.rollouts import process
from art_cli.runtime.errors import RolloutError, UsageError
from tests.support.processes.process_table import is_alive
from tests.support.processes.stage import ASK, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 1, 2])
async def test_what_it_returns_and_calls_is_the_same_in_any_number_of_processes(stage: Stage, processes: int) -> None:
    source = f"""
{ASK}
import os
from art_cli import Outcome
async def rollout(policy, scenario):
    reply = await ask(policy)
    if scenario["index"] == 2:
        raise ValueError("no")
    told = {{"pid": os.getpid(), "step": policy.step}}
    return Outcome(reward=scenario["index"], metrics={{"won": True}}, metadata=told)
"""
    played = await stage.play(source, num=6, processes=processes, concurrency=6)
    assert [t.returned_reward for t in played] == [0, 1, 0, 3, 4, 5]
    assert [t.failure for t in played if t.failure] == ["ValueError: no (rollout.py:13)"]
    assert all(len(t.turns) == 1 for t in played)
    assert all(t.metrics["won"] == 1 and t.metadata["step"] == 2 for t in played if not t.failure)
    pids = {t.metadata["pid"] for t in played if not t.failure}
    assert len(pids) == max(1, processes)
    assert (os.getpid() in pids) == (processes == 0)
    assert not any(is_alive(pid) for pid in pids - {os.getpid()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "said"), [("os._exit(3)", "status 3"), ("os.kill(os.getpid(), 11)", "signal 11")], ids=["exit", "fault"]
)
async def test_an_attempt_that_kills_its_process_is_played_again_in_a_new_one(
    stage: Stage, ending: str, said: str
) -> None:
    source = f"""
import asyncio, os
from pathlib import Path
first = Path({str(stage.directory / "first")!r})
async def rollout(policy, scenario):
    if not first.exists():
        first.touch()
        {ending}
    await asyncio.sleep(0.01)
    return 1
"""
    played = await stage.play(source, num=4)
    assert [t.returned_reward for t in played] == [1] * 4
    assert sum(t.metrics["num_retries"] for t in played) >= 1

    (stage.directory / "first").unlink()
    stage.finished.clear()
    (failed,) = await stage.play(source, num=1, retries=0)
    assert failed.error == f"process: its process ended ({said})"


async def test_a_rollout_that_outlives_its_time_is_cancelled_over_there(stage: Stage) -> None:
    source = f"""
import asyncio
from pathlib import Path
async def rollout(policy, scenario):
    try:
        await asyncio.sleep(60)
    finally:
        Path({str(stage.directory / "let_go")!r}).touch()
"""
    (trajectory,) = await stage.play(source, timeout_s=1.0)
    assert trajectory.error == "timeout: not finished after 1 s (rollout.timeout_s)"
    assert (stage.directory / "let_go").exists()


@pytest.mark.slow
async def test_one_that_blocks_is_told_so_and_its_process_ends_all_the_same(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "CLOSE_DEADLINE_S", 0.5)
    source = f"""
import os, time
from pathlib import Path
async def rollout(policy, scenario):
    Path({str(stage.directory / "pid")!r}).write_text(str(os.getpid()))
    time.sleep(60)
"""
    (trajectory,) = await stage.play(source, timeout_s=2.0)
    assert trajectory.error is not None
    assert trajectory.error.endswith("it blocks the event loop: await what waits, or make it a plain `def`")
    assert not is_alive(int((stage.directory / "pid").read_text()))


async def test_what_it_prints_goes_to_standard_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    source = """
import subprocess
async def rollout(policy, scenario):
    print("a thought")
    subprocess.run(["echo", "a program's"])
"""
    await stage.play(source)
    out, err = capsys.readouterr()
    assert out == ""
    assert "a thought\n" in err
    assert "a program's\n" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import nothing_such", UsageError, "rollout.py:1: ModuleNotFoundError: No module named 'nothing_such'"),
        ("def other(): ...", UsageError, "rollout.py has no 'rollout'"),
        ("def rollout(policy): ...", RolloutError, "must take (policy, scenario)"),
        ("import os; os._exit(4)", RolloutError, "its process ended (status 4) while it was imported"),
    ],
)
async def test_a_function_that_cannot_be_loaded_is_told_before_anything_is_played(
    stage: Stage, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        await stage.play(source, processes=2)
    assert message in str(raised.value)


async def test_an_import_that_takes_too_long_is_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_DEADLINE_S", 3.0)
    pid = stage.directory / "pid"
    source = (
        f"import os, time\nfrom pathlib import Path\nPath({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    with pytest.raises(RolloutError, match="not imported within 3 s"):
        await stage.play(source)
    assert not pid.exists() or not is_alive(int(pid.read_text()))


@pytest.mark.slow
async def test_a_process_that_died_is_there_again_though_the_import_takes_longer_than_an_attempt(stage: Stage) -> None:
    """The first attempt kills the process. Attempts during the import time out, and later attempts are played."""
    source = f"""
import os, time
from pathlib import Path
first = Path({str(stage.directory / "first")!r})
time.sleep(1.5)
async def rollout(policy, scenario):
    if not first.exists():
        first.touch()
        os._exit(3)
    return 1
"""
    played = await stage.play(source, num=6, retries=0, concurrency=1, timeout_s=1.0)
    assert [t.error for t in played[:2]] == [
        "process: its process ended (status 3)",
        "timeout: not finished after 1 s (rollout.timeout_s)",
    ]
    assert [t.returned_reward for t in played[-2:]] == [1, 1]


async def test_a_function_that_is_begun_is_loaded_while_the_event_loop_is_held_up(stage: Stage) -> None:
    (stage.directory / "rollout.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('loaded').touch()\ndef rollout(policy, scenario): ...\n"
    )
    rollout = process.ProcessRollout("rollout.py:rollout", directory=stage.directory, processes=2)
    await rollout.begin()
    wait = f"while [ ! -e {stage.directory / 'loaded'} ]; do sleep 0.02; done"
    subprocess.run(["sh", "-c", wait], check=True, timeout=60)  # nothing else runs in this process meanwhile
    await rollout.open()
    assert rollout.version
    await rollout.close()


async def test_a_function_that_is_begun_and_not_opened_ends_at_once(stage: Stage) -> None:
    pid = stage.directory / "pid"
    (stage.directory / "rollout.py").write_text(
        f"import os, threading\nfrom pathlib import Path\nPath({str(pid)!r}).write_text(str(os.getpid()))\n"
        "threading.Event().wait()\n"
    )
    rollout = process.ProcessRollout("rollout.py:rollout", directory=stage.directory)
    await rollout.begin()
    subprocess.run(["sh", "-c", f"while [ ! -s {pid} ]; do sleep 0.02; done"], check=True, timeout=60)
    async with asyncio.timeout(process.CLOSE_DEADLINE_S - 5):
        await rollout.close()
        await rollout.close()
    assert not is_alive(int(pid.read_text()))


async def test_what_a_begun_function_raises_is_raised_when_it_is_opened(stage: Stage) -> None:
    (stage.directory / "rollout.py").write_text("import os\nos._exit(3)\n")
    rollout = process.ProcessRollout("rollout.py:rollout", directory=stage.directory)
    await rollout.begin()
    with pytest.raises(RolloutError, match="status 3.* while it was imported"):
        await rollout.open()
