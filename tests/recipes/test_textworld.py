"""textworld: games made by their seeds, what an attempt earns, and that held-out games name other things."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from art_cli import Outcome
from art_cli.config.compose import load_config
from art_cli.loop.train import train
from art_cli.runs.run_dir import RunDir
from tests.support.models.recipes import Message, ScriptedPolicy, load
from tests.support.paths import ROOT

textworld = pytest.importorskip("textworld", reason="needs textworld")
pytestmark = pytest.mark.filterwarnings("ignore")  # of textworld and of what it imports
RECIPE = load("textworld")
DIRECTORY = ROOT / "recipes" / "textworld"
SCENARIOS = [next(RECIPE.scenarios.train()), next(RECIPE.scenarios.evaluation())]


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(RECIPE.game, "GAMES", tmp_path)
    return tmp_path


def play(scenario: dict[str, Any], *replies: str) -> tuple[Outcome, list[list[Message]]]:
    """Returns what the rollout returns, and the messages of each call. The last reply is repeated."""
    left = list(replies)
    policy = ScriptedPolicy(lambda messages: left.pop(0) if len(left) > 1 else left[0])
    outcome: Outcome = asyncio.run(RECIPE.rollout.rollout(policy, scenario))
    return outcome, policy.seen


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario["id"])
def test_the_shortest_way_wins_and_text_that_is_no_command_earns_nothing(scenario: dict[str, Any], games: Path) -> None:
    outcome, nonsense = play(scenario, "What a nice day it is!")
    assert (outcome.reward, outcome.metrics) == (0.0, {"won": False, "legal": 0.0}) and len(nonsense) == 4
    way = textworld.Game.load(str(next(games.glob("*.json")))).walkthrough
    assert len(way) == scenario["size"]["commands"]
    outcome, seen = play(scenario, *way)
    assert (outcome.reward, outcome.metrics) == (1.0, {"won": True, "legal": 1.0})
    for command, messages in zip(way, seen, strict=True):
        assert command in messages[-1]["content"].partition("\nCommands:\n")[2].splitlines()
        assert ">" not in messages[-1]["content"]


def test_a_seed_makes_the_same_game_again(games: Path) -> None:
    scenario = SCENARIOS[0]
    first = play(scenario, "look")[1]
    for file in games.iterdir():
        file.unlink()
    assert play(scenario, "look")[1] == first


def test_no_held_out_game_is_a_training_game_with_other_words() -> None:
    """The kinds of things and the ways to win differ from those of the training game of the same number."""
    games = []
    for scenario in (*list(RECIPE.scenarios.train())[:8], *list(RECIPE.scenarios.evaluation())[:8]):
        size = RECIPE.game.Size(**scenario["size"])
        options = RECIPE.game.game_options(scenario["seed"], size, is_held_out=scenario["is_held_out"])
        game = textworld.generator.make_game(options)
        kinds = sorted(info.type for info in game.infos.values())
        games.append((kinds, [action.name for action in game.quests[0].win_events[0].actions]))
    assert sum(one == other for one, other in zip(games[:8], games[8:], strict=True)) <= 2


@pytest.mark.parametrize("reply", ["\\boxed{take key}", "look\ninventory\nlook", "\x00é" * 200, "", "a" * 5000])
def test_a_reply_is_one_line_that_no_interpreter_takes_for_a_command(reply: str, games: Path) -> None:
    """The game answers each with one text, and goes on."""
    outcome, seen = play(SCENARIOS[0], reply, "look")
    assert outcome.metrics["legal"] == 0.0 and len(seen) == 2 * SCENARIOS[0]["size"]["commands"]


def test_things_and_food_of_held_out_games_are_in_no_training_game() -> None:
    names: dict[str, set[str]] = {}
    for scenario in (*list(RECIPE.scenarios.train())[:8], *list(RECIPE.scenarios.evaluation())[:8]):
        size = RECIPE.game.Size(**scenario["size"])
        options = RECIPE.game.game_options(scenario["seed"], size, is_held_out=scenario["is_held_out"])
        infos = textworld.generator.make_game(options).infos.values()
        names.setdefault(scenario["id"].rpartition("-")[0], set()).update(
            info.noun for info in infos if info.type in ("o", "f")
        )
    assert min(map(len, names.values())) >= 8
    assert not names["train"] & names["held-out"]


def test_it_runs_with_a_small_random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model types no command of the game: each attempt earns nothing, and no weight changes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = ["model.base=builtin:tiny", "train.steps=1", "rollout.groups_per_step=1", "eval=null"]
    run = RunDir(asyncio.run(train(load_config(DIRECTORY / "config.yaml", [*settings, f"runs={tmp_path}"]))).root)
    rows = run.scored(0)
    assert [row.reward for row in rows] == [0.0] * 8
    assert json.dumps(rows[0].messages).count("Commands:") == 4 + 4
