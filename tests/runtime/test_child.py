"""ChildProcess: how a program is ended, what is seen of it, and that nothing of it outlives its owner."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_cli.runtime.processes.child import TAIL_WIDTH, ChildProcess, describe_end, last_lines, run_program
from tests.support.processes.process_table import is_alive
from tests.support.processes.waiting import until, wait_until


@pytest.mark.parametrize(
    ("on_term", "status"), [("echo asked; exit 7", 7), ("echo asked", -signal.SIGKILL)], ids=["ends", "goes on"]
)
async def test_a_program_is_asked_to_end_and_killed_after_its_grace_period(
    tmp_path: Path, on_term: str, status: int
) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        program = f"trap '{on_term}' TERM; echo ready; while true; do sleep 0.05; done"
        child = await ChildProcess.start(["bash", "-c", program], stdout=file, grace_s=1.0 if status < 0 else 30.0)
    pid = await child.program_pid()
    await until(lambda: log.read_text() == "ready\n")
    begin = time.monotonic()
    await child.stop()
    assert (time.monotonic() - begin > 1.0) == (status < 0)
    assert await child.wait() == status and not is_alive(pid)
    assert log.read_text().startswith("ready\nasked\n")


async def test_a_program_that_does_not_exist_says_so() -> None:
    ended = await run_program(["/no/such/program"], b"")
    assert (ended.status, ended.stderr) == (127, b"/no/such/program: No such file or directory\n")


async def test_a_program_that_takes_too_long_is_gone_when_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await run_program(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], b"", timeout_s=2.0)
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_a_program_that_writes_without_an_end_fills_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("art_cli.runtime.processes.child.MAX_WRITTEN_BYTES", 2**20)
    with pytest.raises(OSError, match="it wrote more than 1 MiB of output"):
        await run_program(["sh", "-c", f"echo $$ > {tmp_path}/pid; yes"], b"", timeout_s=60)
    assert not is_alive(int((tmp_path / "pid").read_text()))


async def test_a_programs_output_comes_whole_and_it_dies_of_a_broken_pipe() -> None:
    """`yes` ends with `head`: it does not inherit that Python ignores SIGPIPE."""
    ended = await run_program(["bash", "-c", "cat; yes | head -1; echo ${PIPESTATUS[0]}; echo no >&2; exit 3"], b"in\n")
    assert ended == (3, b"in\ny\n141\n", b"no\n")


async def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    program = ["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"]
    starting = asyncio.create_task(ChildProcess.start(program))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.sleep(0.1)
    assert not (tmp_path / "pid").exists() or not is_alive(int((tmp_path / "pid").read_text()))


OWNER = """
import asyncio, os, sys, time
from art_cli.runtime.processes.child import ChildProcess

async def main():
    child = await ChildProcess.start(["sleep", "300"])
    print(await child.program_pid(), flush=True)
    if sys.argv[1] == "fork" and os.fork() == 0:  # it holds the owner's end of everything open
        os.closerange(0, 3)
        time.sleep(60)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_a_program_ends_with_an_owner_that_is_killed(kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, kind], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert is_alive(pid)
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), timeout_s=10)


def test_the_last_lines_are_those_of_this_start_without_secrets(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log, count=3) == ""
    log.write_text("before\n")
    start = log.stat().st_size
    assert last_lines(log, count=3, start=start) == ""
    with log.open("a") as file:
        file.write("one\nkey=s3cret\n" + "x" * 1000)
    assert last_lines(log, count=3, start=start, secrets=["s3cret", ""]) == f"  one\n  key=***\n  {'x' * TAIL_WIDTH}"
    assert last_lines(log, count=1, start=start) == f"  {'x' * TAIL_WIDTH}"


def test_how_a_process_ended_is_told_by_name() -> None:
    assert [describe_end(status) for status in (0, 3, -9, -200)] == [
        "exit status 0",
        "exit status 3",
        "killed by SIGKILL",
        "exit status -200",
    ]
