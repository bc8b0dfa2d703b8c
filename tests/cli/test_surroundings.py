"""The surroundings of a command: an output that is not UTF-8, a company's proxy, few open files, YAML's surprises."""

import contextlib
import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli.app import report
from art_cli.config.compose import load_config
from art_cli.rollouts.command_rollout import CommandRollout
from art_cli.rollouts.function_rollout import FunctionRollout
from art_cli.rollouts.policy import Policy
from art_cli.runtime.errors import ConfigError, message_of
from tests.support.paths import LETTERS

REFUSING_PROXY = "http://127.0.0.1:9"  # the discard port, where nothing listens


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_letter_that_the_output_lacks_ends_no_command(encoding: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "art_cli", "init", str(tmp_path / "d\u00e9\u65e5"), "--recipe", "blank"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert b"a bug in art" not in done.stderr


class _Gateway(BaseHTTPRequestHandler):
    """A gateway that answers every call with one word."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def behind_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    """A policy whose gateway answers, in an environment whose proxy does not."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, REFUSING_PROXY)
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.setenv("no_proxy", "intern.example")
    server = HTTPServer(("127.0.0.1", 0), _Gateway)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Policy(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", model="m", step=0)
    server.shutdown()
    server.server_close()
    thread.join(10)


async def test_an_agents_own_client_reaches_the_gateway_past_a_proxy(behind_proxy: Policy) -> None:
    async def rollout(policy: Policy, scenario: Any) -> float:
        import openai

        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key, max_retries=0) as client:
            asked = [{"role": "user", "content": "?"}]
            reply = await client.chat.completions.create(model=policy.model, messages=asked)  # type: ignore[call-overload]
        return float(reply.choices[0].message.content == "yes")

    played = FunctionRollout(rollout, entry="here", root=Path())
    outcome = await played.play(behind_proxy, {"id": "a"})
    await played.close()
    assert outcome.reward == 1.0
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "intern.example,127.0.0.1"


async def test_a_programs_own_client_reaches_the_gateway_past_a_proxy(behind_proxy: Policy, tmp_path: Path) -> None:
    program = (
        "import json, os, urllib.request as r\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "q = r.Request(url, b'{}', {'Content-Type': 'application/json'})\n"
        "print(json.dumps({'reward': float('yes' in r.urlopen(q, timeout=20).read().decode())}))\n"
    )
    command = [sys.executable, "-c", program]
    played = CommandRollout(command, directory=tmp_path, env=["HTTP_PROXY", "http_proxy"])
    assert (await played.play(behind_proxy, {"id": "a"})).reward == 1.0


def test_too_many_open_files_names_the_limit_and_the_key() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for text in (message_of(error), report(error)[0][0], message_of(RuntimeError(f"connect: {error}"))):
        assert "ulimit -n" in text and "rollout.concurrency" in text


def test_a_command_raises_the_soft_limit_of_open_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(7)[1]));"
        "sys.argv = ['art', '--help'];"
        "from art_cli.cli import app; app._exit = lambda code: print(resource.getrlimit(7)[0]); app.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert int(done.stdout.split()[-1]) == min(65_536, hard if hard != resource.RLIM_INFINITY else 65_536), done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train: {steps: 010}", "010 as the number 8"),
        ("train: {seed: 1:30}", "1:30 as the number 90"),
        ("name: 12:30:45", "12:30:45 as the number 45045"),
        ("train: {learning_rate: 1:30.5}", "1:30.5 as the number 90.5"),
        ("rollout: {environment: {name: a/b, args: {start: 0777}}}", "0777 as the number 511"),
    ],
)
def test_a_number_of_another_base_is_refused_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"# a comment\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "config.yaml")
    assert said in str(refused.value) and "config.yaml:2" in str(refused.value)


def test_a_word_that_becomes_true_or_false_is_told_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    text = (LETTERS / "config.yaml").read_text()
    path = LETTERS / "words.yaml"
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        path.write_text(text + "\nwandb_or_not: &w [no, 'no', 010x, 1:2:3x, NO, 0, 00.5, 2024-01-01]\n")
        stack.callback(path.unlink)
        with pytest.raises(ConfigError, match="wandb_or_not"):
            load_config(path)
    said = [record.getMessage() for record in caplog.records if "YAML reads" in record.getMessage()]
    assert len(said) == 2 and all("false" in line and "words.yaml:" in line for line in said), said
