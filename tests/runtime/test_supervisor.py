"""Nothing that a rollout started is left when it is over, whatever sessions it has made and whoever is killed."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from art_cli.runtime.processes.child import ChildProcess
from tests.support.processes.stage import Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

# Four that try to get away: a child, one with a session of its own, a daemon, and one that forks on and on.
FUGITIVES = """
import os, sys, time
from pathlib import Path

def told(name):
    Path(name + ".pid").write_text(str(os.getpid()))

def begin(run):
    if os.fork() == 0:
        try:
            run()
            time.sleep(300)
        finally:
            os._exit(0)

def session():
    os.setsid()
    told("session")

def daemon():
    os.setsid()
    if os.fork():
        os._exit(0)
    os.setsid()
    os.closerange(0, 100)
    told("daemon")

def hopper():
    os.setsid()
    told("hopper")
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
        told("hopper")

def scatter():
    begin(lambda: told("child"))
    begin(session)
    begin(daemon)
    begin(hopper)
    while not all(Path(name + ".pid").exists() for name in ("child", "session", "daemon", "hopper")):
        time.sleep(0.01)
"""


def left(directory: Path) -> list[str]:
    """The command lines of the processes that run in the directory."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdigit() and Path(os.readlink(process / "cwd")) == directory:
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()[:80]!r}")
    return found


def until_none_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 30
    while found := left(directory):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "fugitives.py").write_text(FUGITIVES)
    return tmp_path.resolve()


ENDINGS = {
    "outcome": "print(1)",
    "exit": "sys.exit(5)",
    "signal": "os.kill(os.getpid(), 11)",
    "group": "os.killpg(0, 15)",
    "timeout": "time.sleep(300)",
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
async def test_nothing_a_program_started_is_left_when_its_attempt_is_over(directory: Path, ending: str) -> None:
    (directory / "agent.py").write_text(f"from fugitives import *\nscatter()\n{ENDINGS[ending]}\n")
    stage = Stage(directory)
    timeout_s = 10 if ending == "timeout" else 60
    (trajectory,) = await stage.play(entry=None, command=[sys.executable, "agent.py"], timeout_s=timeout_s, retries=0)
    expected = {"exit": "exit: status 5", "signal": "exit: signal 11", "group": "exit: signal 15"}
    assert (trajectory.error or "").startswith(expected.get(ending, trajectory.error or ""))
    assert (trajectory.returned_reward == 1) == (ending == "outcome")
    assert len(list(directory.glob("*.pid"))) == 4
    until_none_is_left(directory)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["return 1", "os._exit(3)", "os.closerange(3, 200)"])
async def test_nothing_a_function_started_is_left_when_its_process_is_over(directory: Path, ending: str) -> None:
    source = f"from fugitives import *\nos.chdir({str(directory)!r})\ndef rollout(policy, scenario):\n"
    await Stage(directory).play(source + f"    scatter()\n    {ending}\n", retries=0)
    assert len(list(directory.glob("*.pid"))) == 4
    until_none_is_left(directory)


OWNER = """
import asyncio, sys
from pathlib import Path
from art_cli.rollouts.command_rollout import CommandRollout
from art_cli.rollouts.policy import Policy
from art_cli.rollouts.process import ProcessRollout

async def main():
    directory = Path(sys.argv[1])
    if sys.argv[2] == "command":
        rollout = CommandRollout([sys.executable, "agent.py"], directory=directory)
    else:
        rollout = ProcessRollout("agent.py:rollout", directory=directory)
    await rollout.play(Policy(base_url="http://127.0.0.1:1/v1", api_key="k", model="m", step=0), {"id": "s"})

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["command", "function"])
def test_nothing_is_left_when_the_run_itself_is_killed(directory: Path, kind: str) -> None:
    """SIGKILL of the owner while its attempt is under way, so that nothing of it can clean up."""
    work = "os.chdir(Path(__file__).parent)\n    scatter()\n    Path('begun').touch()\n    time.sleep(300)"
    end = "rollout(None, None)\n" if kind == "command" else ""
    source = f"from fugitives import *\ndef rollout(policy, scenario):\n    {work}\n{end}"
    (directory / "agent.py").write_text(source)
    with subprocess.Popen([sys.executable, "-c", OWNER, str(directory), kind]) as owner:
        deadline = time.monotonic() + 60
        while not (directory / "begun").exists():
            assert owner.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        owner.send_signal(signal.SIGKILL)
    until_none_is_left(directory)


@pytest.mark.parametrize(
    ("program", "status"),
    [("exit 7", 7), ("kill -9 $$", -9), ("kill -15 $$", -15), ("true", 0), ("exec nothing-such", 127)],
)
async def test_it_ends_as_its_program_did(program: str, status: int) -> None:
    child = await ChildProcess.start(["sh", "-c", program], stderr=asyncio.subprocess.DEVNULL)
    assert await asyncio.wait_for(child.wait(), 30) == status
    await child.stop()
