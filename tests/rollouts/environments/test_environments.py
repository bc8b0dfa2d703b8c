"""`rollout.environment`: what is refused and in which words, which scenarios it makes, the commands around it."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from art_cli.cli import app as cli
from art_cli.config.compose import load_config
from art_cli.config.schema import EnvironmentConfig
from art_cli.loop.references import check_ready
from art_cli.rollouts import environments
from art_cli.rollouts.environments import Listing, Settings, open_environment, verifiers_tasks
from art_cli.rollouts.scenario_files import RunScenarios
from art_cli.runs.outcome import Outcome
from art_cli.runtime.errors import ConfigError, UsageError
from tests.support.paths import LETTERS, ROOT

TINY = f"model.base='{LETTERS / 'build.py'}:build'"


def configured(directory: Path, rollout: str, rest: str = "") -> Path:
    path = directory / "config.yaml"
    path.write_text(f'model: {{base: "builtin:tiny"}}\nrollout: {rollout}\n{rest}\n')
    return path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings("reasoning_gym/countdow"), "did you mean 'reasoning_gym/countdown'?"),
        (Settings("textarena/TicTacTo-v0"), "did you mean 'textarena/TicTacToe-v0'?"),
        (
            Settings("reasoning_gm/countdown"),
            "no library of environments 'reasoning_gm'; did you mean 'reasoning_gym'?",
        ),
        (Settings("reasoning_gym"), "expected LIBRARY/NAME; `art environments reasoning_gym` lists them"),
        (Settings("reasoning_gym/countdown", {"min_number": 3}), "no 'min_number'; did you mean 'min_numbers'?"),
        (Settings("reasoning_gym/countdown", {"min_numbers": "3"}), "takes a whole number there, not '3'"),
        (Settings("reasoning_gym/countdown", {"min_numbers": True}), "takes a whole number there, not True"),
        (Settings("reasoning_gym/countdown", {"min_numbers": 9}), "AssertionError: max_numbers must be >= min_numbers"),
        (Settings("reasoning_gym/countdown", {"seed": 9}), "no 'seed'"),
        (Settings("textarena/GuessTheNumber-v0", {"num_players": 3}), "number of players has to be 1, received 3"),
        (Settings("textarena/Hangman-v0"), "needs nltk's data 'words': python -m nltk.downloader words"),
        (Settings("textarena/Debate-v0"), "OPENROUTER_API_KEY"),
    ],
)
def test_what_cannot_be_played_is_refused_in_words(
    settings: Settings, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(UsageError) as refusal:
        open_environment(settings)
    assert words in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ("{environment: reasoning_gm/countdown}", "did you mean 'reasoning_gym'?"),
        ("{environment: countdown}", "no library of environments 'countdown'"),
        ("{environment: {name: reasoning_gym/countdown, siz: 3}}", "did you mean 'size'?"),
        ("{environment: reasoning_gym/countdown, entry: 'a.py:b'}", "set exactly one of 'entry'"),
        ("{entry: 'a.py:b'}", "set 'scenarios'"),
        ("{environment: mcp/python server.py}", "brings no scenarios; name a scenario file"),
        ("{environment: {name: reasoning_gym/x, size: 9}, scenarios: s.jsonl}", "remove one key"),
    ],
)
def test_a_configuration_is_refused_before_anything_is_imported(tmp_path: Path, rollout: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_ready(load_config(configured(tmp_path, rollout)))
    assert words in str(refusal.value)


def test_a_library_that_is_not_installed_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'art-cli\[textarena\]'"):
        check_ready(load_config(configured(tmp_path, "{environment: textarena/TicTacToe-v0}")))
    assert cli.run(["environments"]) == 0
    assert [line.rpartition("; ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "pip install 'art-cli[mcp]'",
        "pip install aiohttp",
        "pip install 'art-cli[reasoning-gym]'",
        "pip install 'art-cli[textarena]'",
        "pip install verifiers",
    ]


def test_a_key_below_an_environment_that_is_only_named_leaves_its_name(tmp_path: Path) -> None:
    path = configured(tmp_path, "{environment: reasoning_gym/countdown}")
    chosen = load_config(path, ["rollout.environment.size=3", "rollout.environment.args.min_numbers=3"]).config
    assert chosen.rollout.environment == EnvironmentConfig(
        name="reasoning_gym/countdown", size=3, args={"min_numbers": 3}
    )
    other = load_config(path, ["rollout.environment=textarena/TicTacToe-v0", "rollout.environment.seed=2"]).config
    assert other.rollout.environment == EnvironmentConfig(name="textarena/TicTacToe-v0", seed=2)


def test_scenarios_are_seeds_and_held_out_ones_are_never_trained_on(tmp_path: Path) -> None:
    rollout = "{environment: {name: reasoning_gym/countdown, size: 50, seed: 100}}"
    config = load_config(configured(tmp_path, rollout, "eval: {held_out: 0.3}")).config
    scenarios = RunScenarios(config, tmp_path)
    trained, held_out = scenarios.training, scenarios.evaluation
    assert sorted(each["seed"] for each in trained + held_out) == list(range(100, 150))
    assert trained and held_out


@pytest.mark.slow
def test_art_init_writes_a_configuration_that_trains_and_evaluates_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a smaller model and fewer attempts than it asks for, because of the time."""
    project = tmp_path / "mine"
    assert cli.run(["init", str(project), "--environment", "reasoning_gym/chain_sum"]) == 0
    assert "min_terms: 2" in (project / "config.yaml").read_text()
    small = ["rollout.group_size=2", "rollout.groups_per_step=2", "rollout.sampling.max_tokens=4", "train.steps=1"]
    small += ["rollout.processes=0"]
    small += ["rollout.environment.size=12", "rollout.environment.args.max_terms=2", "eval.held_out=0.2", TINY]
    code = cli.run(["train", str(project / "config.yaml"), *small])
    out, err = capsys.readouterr()
    assert code == 0 or "no signal: rewards within" in err  # random tokens solve hardly any sum
    assert "solved" in out
    assert cli.run(["init", str(project), "--environment", "reasoning_gym/chain_sum"]) == 2
    assert "not empty" in capsys.readouterr().err


class Echo:
    """A library of a user, with one environment."""

    package, extra, about = "", "", "says what it is told"
    takes_one_turn = makes_scenarios = True

    def listed(self) -> Iterator[Listing]:
        yield Listing("echo", "the only one")

    def defaults(self, name: str) -> dict[str, Any]:
        return {}

    def open(self, name: str, settings: Settings) -> "Echo":
        return self

    async def play(self, policy: Any, scenario: dict[str, Any]) -> Outcome:
        return Outcome(reward=scenario["seed"])


class Serving:
    """An environment of verifiers with servers, which start and end when they may."""

    def __init__(self) -> None:
        self.is_open, self.may_open, self.may_close = False, asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await self.may_open.wait()
        self.is_open = True
        yield
        await self.may_close.wait()
        self.is_open = False


async def test_no_attempt_plays_without_the_servers_of_its_environment() -> None:
    """The first attempt ends before the servers run. The third starts while the second attempt's servers stop."""
    env = Serving()
    servers = verifiers_tasks._Servers(env)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), servers.running():
            pass
    env.may_open.set()
    async with asyncio.timeout(5), servers.running():
        assert env.is_open

    async def attempt() -> bool:
        async with servers.running():
            return env.is_open

    third = asyncio.create_task(attempt())
    await asyncio.sleep(0.05)
    env.may_close.set()
    async with asyncio.timeout(5):
        assert await third


@pytest.mark.slow
def test_a_package_adds_a_library_by_an_entry_point(tmp_path: Path) -> None:
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[art_cli.environments]\nmine = {__name__}:Echo\n")
    program = "from art_cli.rollouts.environments import *; print(open_environment(Settings('mine/echo')).about)"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path += {[str(tmp_path), str(ROOT)]!r}; {program}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout == "says what it is told\n", run.stderr


BLOCKED = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mcp", "httpx2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from art_cli.rollouts.environments import Settings, libraries, library_named, open_environment
names = sorted(libraries())
loaded = [name for name in sys.modules if name.startswith("art_cli.rollouts.environments.")]
for name in loaded:
    del sys.modules[name]
print(*names, type(open_environment(Settings("reasoning_gym/countdown"))).__name__)
print(*(name for name in sys.modules if name.startswith("art_cli.rollouts.environments.")))
"""


def test_an_environment_needs_no_other_librarys_package() -> None:
    run = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines() == [
        "mcp openenv reasoning_gym textarena verifiers Generator",
        "art_cli.rollouts.environments.reasoning_gym",
    ], run.stderr


def test_what_another_python_has_is_listed_by_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["environments", "mcp", "--python", sys.executable, "--json"]) == 0
    (mcp,) = json.loads(capsys.readouterr().out)
    assert (mcp["library"], mcp["problem"], mcp["environments"]) == ("mcp", "", [])
    assert cli.run(["environments", "nothing", "--python", sys.executable]) == 2
    assert "no library of environments 'nothing'" in capsys.readouterr().err
    assert cli.run(["environments", "--python", str(tmp_path / "none")]) == 2
    assert "--python" in capsys.readouterr().err


@pytest.mark.slow
def test_the_list_as_json_has_every_environment_and_what_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """At least 70 of textarena's games can be played without a network, data or a key."""
    assert cli.run(["environments", "textarena", "--json"]) == 0
    (library,) = json.loads(capsys.readouterr().out)
    problems = {each["name"]: each["problem"] for each in library["environments"]}
    assert sum(not problem for problem in problems.values()) >= 70
    assert "nltk" in problems["textarena/Hangman-v0"] and problems["textarena/TicTacToe-v0"] == ""
