"""Programs can read each other's keys, but cannot use them."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.support.processes.stage import Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")

# Attempt 0 calls from a grandchild in a separate session, and waits until attempt 1 is done. Attempt 1 reads every
# process it can, and makes calls with each key.
AGENT = """
import json, os, re, subprocess, sys, time, urllib.error, urllib.request
from pathlib import Path

def ask(key):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code

def readable():
    for process in Path("/proc").glob("[0-9]*"):
        for path in (process / "environ", process / "cmdline", *(process / "fd").glob("*")):
            try:
                if path.parent.name != "fd" or path.resolve().is_file():
                    yield path.read_bytes()[:10**6]
            except OSError:
                pass

def until(name):
    while not Path(name).exists():
        time.sleep(0.01)

own = os.environ["OPENAI_API_KEY"]
if len(sys.argv) > 1:
    Path("grandchild").write_text(str(ask(own)))
elif json.loads(input())["index"] == 0:
    Path("ready").touch()
    until("done")
    subprocess.Popen(["setsid", sys.executable, __file__, "again"])
    until("grandchild")
    time.sleep(0.1)
    print(json.dumps({"reward": 1, "metrics": {"own": ask(own), "grandchild": int(Path("grandchild").read_text())}}))
else:
    until("ready")
    found = set(re.findall(rb"OPENAI_API_KEY=([\\w-]{43})", b"\\0".join(readable()))) - {own.encode()}
    statuses = [ask(key.decode()) for key in found]
    ask(own)
    Path("done").touch()
    print(json.dumps({"reward": 1, "metadata": {"statuses": statuses}}))
"""


@pytest.mark.slow
async def test_a_program_that_uses_the_key_of_another_attempt_is_refused_and_told_of(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    stage = Stage(tmp_path)
    robbed, thief = await stage.play(num=2, entry=None, command=[sys.executable, "agent.py"], timeout_s=60)
    assert (robbed.error, robbed.returned_reward) == (None, 1.0)
    assert (robbed.metrics["own"], robbed.metrics["grandchild"]) == (200, 200)
    assert len(robbed.turns) == 2  # its own calls, and none of the thief's
    assert thief.error == "foreign_key: its program made a call with another attempt's key"
    assert 401 in thief.metadata["statuses"] and 200 not in thief.metadata["statuses"]


async def test_a_call_from_outside_every_attempt_is_taken_by_its_key(tmp_path: Path) -> None:
    """As from a container that the program has a daemon start: here it is this process that calls."""
    import httpx

    (tmp_path / "agent.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "Path('key.part').write_text(os.environ['OPENAI_API_KEY'])\nos.rename('key.part', 'key')\n"
        "while not Path('done').exists():\n    time.sleep(0.01)\nprint(1)\n"
    )
    stage = Stage(tmp_path)
    async with stage.open(entry=None, command=[sys.executable, "agent.py"], timeout_s=60) as runner:
        run = asyncio.create_task(runner.run(stage.plans(1), stage.finished.append))
        while not (tmp_path / "key").exists():
            await asyncio.sleep(0.01)
        headers = {"Authorization": f"Bearer {(tmp_path / 'key').read_text()}"}
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient() as client:
            reply = await client.post(f"{runner._gateway.base_url}/chat/completions", json=body, headers=headers)
        (tmp_path / "done").touch()
        await run
    assert reply.status_code == 200
    assert [(t.error, len(t.turns)) for t in stage.finished] == [(None, 1)]
