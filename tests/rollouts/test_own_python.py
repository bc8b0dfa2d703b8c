"""`rollout.python`: the user's function in a separate Python without our packages."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from art_cli.cli import app as cli
from art_cli.rollouts import bootstrap as start
from art_cli.rollouts.attempt_errors import AttemptError, from_exception, is_transport_error, read_report, report
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import ArtError, RolloutError, UsageError
from art_cli.runtime.processes.plain_json import MAX_DEPTH, dump, load
from tests.support.attacks.hostile import NUM_MUTATIONS, mutations
from tests.support.paths import LETTERS, TESTS
from tests.support.processes.stage import Stage

PYENV = Path.home() / ".pyenv" / "versions"

# A client of the standard library, so that the Python needs no package at all.
CALL = """
import json, sys, urllib.request
from art_cli import Outcome
def ask(policy):
    body = json.dumps({"model": policy.model, "messages": [{"role": "user", "content": "hi"}]}).encode()
    headers = {"Authorization": "Bearer " + policy.api_key, "Content-Type": "application/json"}
    request = urllib.request.Request(policy.base_url + "/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an empty virtual environment."""
    home = tmp_path_factory.mktemp("own") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    return home / "bin" / "python"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_the_rollout_process_needs_the_standard_library_alone() -> None:
    """-S omits site-packages, and -I ignores environment variables; `start` loads the package from its path."""
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("start", {start.__file__!r})
start = importlib.util.module_from_spec(spec)
spec.loader.exec_module(start)
start.load_package()
import art_cli.rollouts.process_worker
from art_cli import Outcome, Policy
ours = sorted(name for name in sys.modules if name.partition(".")[0] == "art_cli")
places = [getattr(module, "__file__", None) or "" for module in sys.modules.values()]
assert not [place for place in places if "site-packages" in place]
assert not [name for name in ours if name.count(".") == 1 and name.split(".")[1] in ("trajectory", "config", "loop")]
print(Outcome(reward=1.0))
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "Outcome(reward=1.0, metrics={}, metadata={})\n", done.stderr


async def test_a_function_runs_in_a_python_without_packages_and_sees_none_of_ours(
    stage: Stage, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    source = f"""{CALL}
import importlib.util, os, shutil
def rollout(policy, scenario):
    names = ("msgspec", "torch", "openai", "pytest", "stage", "process", "recorder")
    seen = [name for name in names if importlib.util.find_spec(name)]
    told = {{"prefix": sys.prefix, "seen": seen, "variable": os.environ.get("VIRTUAL_ENV"),
            "path": os.environ.get("PYTHONPATH"), "python": shutil.which("python"),
            "home": os.environ.get("PYTHONHOME")}}
    return Outcome(reward=len(ask(policy)), metrics={{"index": scenario["index"]}}, metadata=told)
"""
    played = await stage.play(source, num=3, python=bare)
    home = bare.parent.parent
    expected = {"prefix": str(home), "variable": str(home), "path": None, "python": str(bare), "seen": [], "home": None}
    assert [trajectory.error for trajectory in played] == [None] * 3
    assert [trajectory.metadata for trajectory in played] == [expected] * 3
    assert [trajectory.metrics["index"] for trajectory in played] == [0, 1, 2]
    assert all(trajectory.returned_reward == 2 and len(trajectory.turns) == 1 for trajectory in played)


@pytest.mark.parametrize("version", ["3.12.1", "3.13.0"])
async def test_it_runs_in_another_version_of_python(stage: Stage, version: str) -> None:
    python = PYENV / version / "bin" / "python3"
    if not python.exists():
        pytest.skip(f"no Python {version} here")
    source = f"{CALL}\ndef rollout(policy, scenario):\n    ask(policy)\n    return sys.version_info[1]\n"
    (trajectory,) = await stage.play(source, python=python)
    assert (trajectory.error, trajectory.returned_reward) == (None, float(version.split(".")[1]))


@pytest.mark.slow
async def test_a_python_that_is_too_old_is_refused_with_its_version(stage: Stage) -> None:
    found = sorted(PYENV.glob("3.10.*/bin/python3")) + sorted(PYENV.glob("3.[6-9].*/bin/python3"))
    if not found:
        pytest.skip("no old Python here")
    for python in found:
        with pytest.raises(UsageError) as raised:
            await stage.play("def rollout(policy, scenario): return 1", python=python)
        version = python.parts[-3]
        said = f"it is Python {version}, and 3.11 or newer is needed (rollout.python: {python})"
        assert str(raised.value) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("import nothing_such", UsageError, "rollout.py:1: ModuleNotFoundError: No module named 'nothing_such'"),
        ("import os; os._exit(4)", RolloutError, "its process ended (status 4) while it was imported"),
        ("def rollout(policy): ...", RolloutError, "must take (policy, scenario)"),
    ],
)
async def test_what_it_cannot_load_is_one_line_with_its_name(
    stage: Stage, bare: Path, source: str, error: type[ArtError], message: str
) -> None:
    with pytest.raises(error) as raised:
        await stage.play(source, python=bare)
    assert message in str(raised.value) and str(raised.value).endswith(f" (rollout.python: {bare})")
    assert "\n" not in str(raised.value)


async def test_a_program_that_is_no_python_is_one_line(stage: Stage) -> None:
    with pytest.raises(RolloutError, match=r"its process ended \(status 1\).*rollout\.python: /bin/false"):
        await stage.play("def rollout(policy, scenario): return 1", python=Path("/bin/false"))


async def test_the_client_says_that_openai_is_missing_there(stage: Stage, bare: Path) -> None:
    source = "def rollout(policy, scenario):\n    policy.sync_client\n"
    (trajectory,) = await stage.play(source, python=bare)
    wanted = (
        f"ModuleNotFoundError: policy.client needs the package openai, which {bare} does not have; install it there"
    )
    assert trajectory.error is not None and trajectory.error.startswith(wanted)


# --- the configuration ------------------------------------------------------------------------------------------------


def configure(place: Path, **rollout: object) -> Path:
    (place / "rollout.py").write_text("import no_package_of_ours\ndef rollout(policy, scenario): return 1\n")
    (place / "scenarios.jsonl").write_text('{"id": "one"}\n')
    section = {"entry": "rollout.py:rollout", "scenarios": "scenarios.jsonl", **rollout}
    (place / "config.yaml").write_text(json.dumps({"model": {"base": "none"}, "rollout": section}))
    return place / "config.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"python": "no/python"}, "no/python: no such file"),
        ({"python": "."}, "bin/python: no such file"),
        ({"python": "scenarios.jsonl"}, "no permission to run it"),
        ({"python": "own", "processes": 0}, "with rollout.processes=0 the function runs in the Python of art"),
        ({"python": "own", "entry": None, "command": ["ls"]}, "rollout.command begins with its own program"),
    ],
)
def test_a_python_that_cannot_be_is_found_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rollout: dict[str, object], said: str
) -> None:
    config = configure(tmp_path, **rollout)
    assert cli.run(["check", str(config)]) == 2
    error = capsys.readouterr().err
    assert "rollout.python: " in error and said in error and f"{config}:1: " in error
    assert "Traceback" not in error


@pytest.mark.slow
def test_the_directory_of_an_environment_names_its_python(tmp_path: Path, bare: Path) -> None:
    from art_cli.config.compose import load_config

    os.symlink(bare.parent.parent, tmp_path / "own")
    for python in ("own", "own/bin/python", "./own/"):
        config = load_config(configure(tmp_path, python=python)).config
        assert config.rollout.python == tmp_path / "own" / "bin" / "python"


@pytest.mark.slow
def test_check_loads_and_plays_the_rollout_in_it_and_names_it(
    tmp_path: Path, bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollout.py").write_text(
        f"{CALL}\nassert 'torch' not in sys.modules\ndef rollout(policy, scenario): return len(ask(policy))\n"
    )
    settings = [f"rollout.entry={tmp_path}/rollout.py:rollout", f"rollout.python={bare}", "rollout.processes=1"]
    code = cli.run(["check", str(LETTERS / "config.yaml"), *settings, f"runs={tmp_path}"])
    out, err = capsys.readouterr()
    assert code == 0, out + err
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"rollout {tmp_path}/rollout.py:rollout in Python {version} at {bare}, judge rollout" in out
    assert "1 turns, " in out


# --- messages ---------------------------------------------------------------------------------------------------------

ENDINGS = [
    Outcome(),
    Outcome(reward=-1.5, metrics={"won": 1.0}, metadata={"board": ["X", "\n"]}),
    AttemptError("KeyError", "'x'\n", is_transport=True),
]


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: type(ending).__name__)
def test_an_ending_comes_back_as_it_was_and_spoiled_it_is_refused(ending: Outcome | AttemptError) -> None:
    written = dump(report(ending))
    found = read_report(load(written))
    assert (
        (found.args, vars(found)) == (ending.args, vars(ending)) if isinstance(ending, Exception) else found == ending
    )
    for spoiled in mutations(written, seed=len(written), count=NUM_MUTATIONS):
        try:
            found = read_report(load(spoiled))
        except ValueError:
            continue
        assert isinstance(found, Outcome | AttemptError)


@pytest.mark.parametrize(
    "change",
    [
        {"reward": "1"},
        {"reward": 1e31},
        {"metrics": {"m": float("nan")}},
        {"metrics": []},
        {"metadata": None},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_no_outcome_is_refused(change: dict[str, object]) -> None:
    good = {"reward": 1.0, "metrics": {"m": 1.0}, "metadata": {}}
    assert read_report({"done": good}) == Outcome(reward=1.0, metrics={"m": 1.0})
    for wrong in ({"done": good | change}, {"done": good, "failed": {}}, {"failed": good}, [], None):
        with pytest.raises(ValueError):
            read_report(load(json.dumps(wrong).encode()))


def test_plain_json_is_what_msgspec_writes_and_reads() -> None:
    """The trajectory is written with msgspec: what the rollout process lets through must be the same there."""
    import datetime
    import decimal
    import enum
    import uuid
    from dataclasses import dataclass

    import msgspec

    @dataclass
    class Point:
        x: int

    class Side(enum.Enum):
        LEFT = "left"

    day = datetime.date(2026, 1, 2)
    values = [{1, 2}, day, decimal.Decimal("1.50"), uuid.UUID(int=5), Side.LEFT, Point(3), b"ab", {4: {"a": (1,)}}]
    values += [float("nan"), 2**64 - 1, 2**64, -(2**63), 10**30, 10**400, "é\u2028\x00", 0.1, 1e300, -0.0]
    for value in values:
        assert repr(load(dump(value))) == repr(msgspec.json.decode(msgspec.json.encode(value)))
    for value in (object(), Path("x"), open):
        with pytest.raises(TypeError, match="Encoding objects of type"):
            dump(value)


@pytest.mark.parametrize("metadata", ["'x', 10**5000", "'x', nest(300)"])
async def test_metadata_that_the_run_could_not_read_again_fail_their_attempt(
    stage: Stage, bare: Path, metadata: str
) -> None:
    source = f"""
from art_cli import Outcome
def nest(depth):
    return [nest(depth - 1)] if depth else 1
def rollout(policy, scenario):
    return Outcome(reward=1, metadata=dict([({metadata})]))
"""
    assert MAX_DEPTH < 300
    (trajectory,) = await stage.play(source, python=bare)
    assert trajectory.error is not None
    assert trajectory.error.startswith("metadata: it cannot be written as JSON: ")


async def test_a_process_that_writes_garbage_to_its_socket_fails_its_attempts_at_once(stage: Stage) -> None:
    source = """
import os, stat, asyncio
async def rollout(policy, scenario):
    for number in range(3, 50):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b'{"type": "Done", "id": 1}\\n')
        except OSError:
            pass
    await asyncio.sleep(60)
"""
    (trajectory,) = await stage.play(source, retries=0, timeout_s=50)
    assert trajectory.error is not None and "it sent an invalid message" in trajectory.error
    assert trajectory.duration_s < 40


# --- errors by name ---------------------------------------------------------------------------------------------------


def test_transport_errors_of_openai_3_and_of_frameworks_around_it_are_known(tmp_path: Path) -> None:
    of_httpx2 = type("ConnectError", (type("TransportError", (Exception,), {"__module__": "httpx2._exceptions"}),), {})
    assert is_transport_error(of_httpx2())
    wrapped = RuntimeError("the model could not be asked")
    wrapped.__cause__ = ConnectionError()
    assert is_transport_error(wrapped)
    own = ValueError("no")
    own.__cause__ = own  # a cycle ends
    assert not is_transport_error(own)
    lacking = from_exception(ModuleNotFoundError("No module named 'x'", name="x"), tmp_path)
    assert lacking.message == f"No module named 'x' in {sys.executable}"
