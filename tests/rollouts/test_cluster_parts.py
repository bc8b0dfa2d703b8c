"""Parts of cluster rollouts that need no cluster: copies for nodes, a node's methods, and refusals."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from art_cli.chat.requests import Sampling
from art_cli.config.compose import load_config
from art_cli.config.schema import RolloutConfig
from art_cli.rollouts.attempt_errors import read_report
from art_cli.rollouts.cluster import ray_driver as travel
from art_cli.rollouts.cluster.cluster_rollout import ClusterRollout
from art_cli.rollouts.cluster.ray_driver import _explain, _setup_error, copy_package, copy_project
from art_cli.rollouts.cluster.ray_node import MAX_OUTPUT, NodeActor, Printed
from art_cli.rollouts.rollout_gateway import Gateway
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import ArtError, ConfigError, RolloutError, UsageError
from art_cli.runtime.processes.process_calls import FROM_PROCESS, Call, Raised, decode, encode, error_named
from tests.support.standins.scripted import Engine, ScriptedBackend


def write(directory: Path, *names: str, size: int = 10) -> None:
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(b"x" * size)


def names_in(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


def test_hidden_files_runs_environments_and_what_is_excluded_are_not_sent(tmp_path: Path) -> None:
    project, target = tmp_path / "project", tmp_path / "sent"
    write(project, "rollout.py", "lib/a.py", "node_modules/b/index.js", "odd näme.txt")
    write(project, ".env", ".env.local", "lib/.netrc", ".git/config", "lib/__pycache__/a.pyc", "out/mine/config.json")
    write(project, "env/pyvenv.cfg", "env/lib/site.py", "data/a.csv", "lib/b.csv", "private/key", "lib/private/c")
    write(project, "large.bin", size=3_000)
    os.mkfifo(project / "pipe")
    (project / "link.py").symlink_to(project / "lib" / "a.py")
    (project / "dangling").symlink_to(project / "nowhere")
    (project / "round").symlink_to(project)
    exclude = ["*.csv", "private/"]
    too_large = copy_project(project, target, runs=project / "out", exclude=exclude, max_file_mb=0.002)
    assert names_in(target) == {"rollout.py", "lib/a.py", "node_modules/b/index.js", "odd näme.txt", "link.py"}
    assert too_large == ["large.bin (0.0 MB)"]
    assert not (target / "link.py").is_symlink()


def test_too_much_is_refused_and_the_largest_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "project", "a.bin", "b.bin", "c.txt", size=1_000)
    monkeypatch.setattr(travel, "MAX_BYTES", 1_500)
    with pytest.raises(UsageError, match=r"would be sent to each node, such as .*b\.bin .*rollout\.cluster\.exclude"):
        copy_project(tmp_path / "project", tmp_path / "sent", runs=tmp_path, exclude=[], max_file_mb=1)


def test_the_package_that_is_sent_plays_on_a_python_without_packages(tmp_path: Path) -> None:
    copy_package(tmp_path / "art_cli")
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".py"}
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import art_cli.rollouts.cluster.ray_node, art_cli.rollouts.cluster.ray_driver
places = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
assert not [place for place in places if "site-packages" in place]
assert all(place.startswith({str(tmp_path)!r}) for place in places if "art_cli" in place)
print("good")
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "good\n", done.stderr


async def ask(actor: NodeActor, method: str, **params: Any) -> Any:
    answer = decode(await actor.answer(encode(Call(1, method, params))), FROM_PROCESS)
    if isinstance(answer, Raised):
        raise error_named(answer.kind, answer.message)
    return answer.value


AGENT = """#!/usr/bin/env python3
import json, os, sys, urllib.request
scenario = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30).read()
print(json.dumps({"reward": scenario["worth"], "metadata": {"here": os.listdir(), "named": os.environ["ART_NAMED"]}}))
"""


async def test_a_node_plays_commands_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "agent.py").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_NAMED", "")  # is set again by the node
    gateway = Gateway(Engine(ScriptedBackend(), step=2), defaults=Sampling(), seed=0, max_turns=5)
    async with gateway.serve() as url:
        actor, key = NodeActor(), gateway.open("t")
        what = {"entry": None, "environment": None, "command": ["./agent.py"], "variables": {"ART_NAMED": "here"}}
        await ask(actor, "load", gateway=url.removesuffix("/v1"), **what)
        given = {"base_url": url, "api_key": key, "model": "policy", "step": 0, "scenario": {"id": "s", "worth": 0.5}}
        ending = read_report(await ask(actor, "play", **given))
        await ask(actor, "close")
    assert ending == Outcome(reward=0.5, metadata={"here": ["agent.py"], "named": "here"})
    assert len(gateway.close(key).turns) == 1


async def test_a_node_that_cannot_reach_the_gateway_says_so_before_it_plays() -> None:
    what: dict[str, Any] = {"entry": "a.py:f", "environment": None, "command": None, "variables": {}}
    with pytest.raises(RolloutError, match=r"cannot reach the gateway at http://127.0.0.1:9: .*refused; set gateway"):
        await ask(NodeActor(), "load", gateway="http://127.0.0.1:9", **what)


async def test_what_is_printed_is_kept_up_to_a_bound_and_the_rest_counted() -> None:
    printed = Printed()
    waiting = asyncio.create_task(printed.take())
    for _ in range(100):
        printed.add("x" * 1_000)
    printed.end()
    text = await waiting
    dropped = 100_000 - MAX_OUTPUT
    assert text == "x" * MAX_OUTPUT + f"\n({dropped:,} more characters were printed)\n"
    assert await printed.take() == ""


@pytest.mark.slow
def test_another_version_is_told_in_a_line_with_both() -> None:
    utils = pytest.importorskip("ray._private.utils")
    with pytest.raises(RuntimeError) as raised:
        utils.check_version_info({"ray_version": "2.9.3", "python_version": "3.10.4"}, "node 10.0.0.1:6379")
    said = _explain(raised.value)
    own = f"Ray {__import__('ray').__version__} on Python {sys.version.split()[0]}"
    assert said.startswith(f"the cluster runs Ray 2.9.3 on Python 3.10.4, and this is {own}; ")
    assert "\n" not in said and "rollout.cluster.python" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"address": "ray://head:10001"}, "this machine must be a node of the cluster"),
        ({"address": "local"}, "expected HOST:PORT, or auto"),
        ({"address": "head:0"}, "expected HOST:PORT, or auto"),
        ({"runtime_env": {"working_dir": "."}}, "the config's directory is sent"),
        ({"runtime_env": {"env_vars": {"A": "b"}}}, "name the variables in rollout.cluster.env"),
        ({"resources": {"CPU": 2}}, "CPU is not a custom resource"),
        ({"cpus": 0}, "greater than 0"),
        ({"env": ["A=b"]}, "is not a variable name"),
        ({"exclude": ["/"]}, "an empty pattern"),
        ({"gateway_url": "10.0.0.1:80"}, "expected http://HOST:PORT"),
        ({"processes": 0}, "the function runs on other machines"),
        ({"python": "/usr/bin/python3"}, "names a Python of this machine"),
        ({"entry": "../rollout.py:rollout"}, "not in the config's directory"),
    ],
)
def test_settings_without_sense_are_refused_by_name_at_load(tmp_path: Path, settings: Any, said: str) -> None:
    outer = {name: settings[name] for name in ("processes", "python", "entry") if name in settings}
    cluster = settings if not outer else "ray"
    rollout = {"entry": "rollout.py:rollout", "scenarios": "s.jsonl", "cluster": cluster, **outer}
    (tmp_path / "config.yaml").write_text(json.dumps({"model": {"base": "builtin:tiny"}, "rollout": rollout}))
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "config.yaml")


def test_why_a_node_cannot_be_set_up_is_the_last_error_that_is_named() -> None:
    tried = "Failed to set up runtime environment.\nTraceback:\n  File\nRuntimeError: Please install virtualenv"
    assert _setup_error(tried) == "RuntimeError: Please install virtualenv"
    pip = "Failed.\nRun cmd failed\nERROR: No matching distribution found for nothing==9\n[notice] a new pip"
    assert _setup_error(pip) == "ERROR: No matching distribution found for nothing==9"
    assert _setup_error("") == "Ray gives no reason"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"address": "127.0.0.1:9"}, "rollout.cluster: nothing answers at 127.0.0.1:9: Connection refused"),
        ({"runtime_env": {"nonsense": 1}}, "rollout.cluster.runtime_env: Ray knows no 'nonsense'; there are conda, "),
        ({}, "rollout.cluster: nothing answers at 127.0.0.1:11: Connection refused"),
        ({"env": ["ART_NOT_SET"]}, "rollout.cluster.env: ART_NOT_SET is not set"),
        ({"python": "bare"}, "has no Ray: No module named 'ray'; pip install"),
    ],
)
async def test_a_cluster_that_cannot_be_used_is_told_in_a_line(
    tmp_path: Path, settings: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:11")  # where nothing listens
    if "python" in settings:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, timeout=120)
        settings = {"python": tmp_path / "bare" / "bin" / "python"}
    config = RolloutConfig(entry="rollout.py:rollout", scenarios="none", cluster=settings)
    (tmp_path / "project").mkdir()
    with pytest.raises(ArtError) as raised:
        rollout = ClusterRollout(config, {}, directory=tmp_path / "project", runs=tmp_path / "runs")
        try:
            await rollout.connect()
        finally:
            await rollout.close()
    assert said in str(raised.value) and "\n" not in str(raised.value)
