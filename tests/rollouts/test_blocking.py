"""An `async def` rollout that waits without `await`: its attempts are played one after another, and it is told so."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from art_cli.rollouts.function_rollout import FunctionRollout
from art_cli.rollouts.policy import Policy
from tests.support.servers.chat_server import ChatServer, chatting

Art = Callable[..., tuple[int, str, str]]
REPLY_S, CALLS = 0.3, 4
FETCH = f"""
import asyncio, time, urllib.request

def fetch(url):
    for _ in range({CALLS}):
        urllib.request.urlopen(urllib.request.Request(url, b"")).read()

def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
"""
BLOCKING = "async def rollout(policy, scenario):\n    fetch(policy.base_url)\n    return 1.0"
SLEEPING = "async def rollout(policy, scenario):\n    time.sleep(1.0)\n    return 1.0"
AWAITING = "async def rollout(policy, scenario):\n    await asyncio.to_thread(fetch, policy.base_url)\n    return 1.0"
COMPUTING = """async def rollout(policy, scenario):
    for _ in range(3):
        compute(0.2)
        await asyncio.sleep(0.05)
    return 1.0"""
BETWEEN = """async def rollout(policy, scenario):
    await asyncio.to_thread(fetch, policy.base_url)
    time.sleep(0.3)
    return 1.0"""
SHORT = "async def rollout(policy, scenario):\n    time.sleep(0.3)\n    return 1.0"
PLAIN = "def rollout(policy, scenario):\n    fetch(policy.base_url)\n    return 1.0"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server on loopback that answers each request after REPLY_S."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(REPLY_S)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}/v1"
        http.shutdown()


@contextlib.contextmanager
def load(num: int) -> Iterator[None]:
    """Computes in this many processes during the block."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


async def play_two(source: str, url: str) -> str:
    """Returns the explanation for a rollout of this code after two concurrent attempts."""
    names: dict[str, Any] = {}
    exec(FETCH + source, names)
    rollout = FunctionRollout(names["rollout"], entry="mine.py:rollout", root=Path("/"))
    try:
        await asyncio.gather(
            *(rollout.play(Policy(base_url=url, api_key=f"key-{n}", model="m", step=0), {"id": "a"}) for n in range(2))
        )
        return await rollout.explain_timeout()
    finally:
        await rollout.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "is_told", "is_busy"),
    [
        (BLOCKING, True, False),
        (SLEEPING, True, False),
        (AWAITING, False, False),
        (PLAIN, False, False),
        (BLOCKING, True, True),
        (COMPUTING, False, True),
        (BETWEEN, False, True),
    ],
    ids=["blocking", "sleeping", "awaiting", "plain", "blocking-busy", "computing-busy", "between-busy"],
)
async def test_who_waits_without_await_is_told_so_on_a_quiet_and_on_a_busy_machine(
    url: str, source: str, is_told: bool, is_busy: bool
) -> None:
    """`between` stands still for 0.6 of about 1.8 seconds, which is not most of the time."""
    with load(2 * (os.cpu_count() or 1) if is_busy else 0):
        said = await play_two(source, url)
    assert ("its event loop was blocked for " in said) == is_told
    assert said == "" or said.endswith(" s: await what waits, or make it a plain `def`")


async def test_attempts_of_less_than_a_second_say_nothing(url: str) -> None:
    assert await play_two(SHORT, url) == ""


CONFIG = """
name: mine
engine: {{name: openai, base_url: "{url}", model: m}}
learner: {{name: prompt, model: m, base_url: "{url}"}}
model: {{base: "m"}}
rollout: {{entry: "rollout.py:rollout", scenarios: scenarios.jsonl, group_size: 2, groups_per_step: 1}}
judge: {{name: rollout}}
train: {{steps: 1}}
"""
ROLLOUT = """
from openai import AsyncOpenAI, OpenAI

async def rollout(policy, scenario):
    for _ in range(3):
        asked = {{"model": policy.model, "messages": [{{"role": "user", "content": "hi"}}]}}
        {call}
    return 1.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "is_found"),
    [
        ("OpenAI(base_url=policy.base_url, api_key=policy.api_key).chat.completions.create(**asked)", True),
        ("await policy.client.chat.completions.create(**asked)", False),
    ],
    ids=["blocking", "async"],
)
def test_art_check_finds_a_blocking_client_in_an_async_rollout(
    art: Art, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, is_found: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-test")

    def answer(body: dict[str, Any], number: int) -> str:
        time.sleep(0.4)
        return "hello"

    with chatting(ChatServer(answer)) as server:
        (tmp_path / "config.yaml").write_text(CONFIG.format(url=server.api_base))
        (tmp_path / "rollout.py").write_text(ROLLOUT.format(call=call))
        (tmp_path / "scenarios.jsonl").write_text('{"id": "a"}\n')
        _, out, err = art("check", tmp_path / "config.yaml")
    assert "rollout    3 turns" in out, out + err
    assert ("its event loop was blocked for " in out) == is_found
