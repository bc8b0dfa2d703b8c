"""The learning benchmark: its table by hand arithmetic, and TRL's side, which plays the same tokens as ours."""

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_cli.config.checks import untrainable
from art_cli.config.compose import load_config
from benchmarks.learning.curves import (
    OLD,
    RECIPE,
    ROOT,
    TASKS,
    Contestant,
    all_settings,
    combine,
    default,
    learning_settings,
    presets,
)
from benchmarks.learning.table import isotonic
from benchmarks.learning.trl_side import Player
from tests.support.paths import TICTACTOE

sys.path.insert(0, str(TICTACTOE))

import game  # noqa: E402
import model  # noqa: E402
import rollout  # noqa: E402
import scenarios  # noqa: E402


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400)), min_size=1, max_size=8))
def test_the_isotonic_curve_is_the_known_formula(points: list[tuple[float, int]]) -> None:
    """y_i = max over a <= i of min over b >= i of the weighted mean of a..b (Robertson, Wright and Dykstra 1988)."""
    curve = [(place, rate, games) for place, (rate, games) in enumerate(points)]

    def middle(a: int, b: int) -> float:
        return sum(r * g for r, g in points[a : b + 1]) / sum(g for _, g in points[a : b + 1])

    num = len(points)
    expected = [max(min(middle(a, b) for b in range(i, num)) for a in range(i + 1)) for i in range(num)]
    assert isotonic(curve) == pytest.approx(expected)


def test_another_loss_leaves_nothing_of_the_recipes_loss(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yaml"
    task = {"entry": "a.py:b", "sampling": {"max_tokens": 4}, "retries": 1}
    learns = {"train": {"steps": 9, "learning_rate": 0.1}, "loss": {"name": "dapo", "clip": 0.1}}
    recipe.write_text(json.dumps({"rollout": task, **learns}))
    found = learning_settings(recipe)
    assert found == ["rollout.retries=1", "train.learning_rate=0.1", "loss=dapo", "loss.clip=0.1"]
    assert combine(found, ["loss=gspo"]) == ["rollout.retries=1", "train.learning_rate=0.1", "loss=gspo"]
    assert combine(found, ["loss.clip=0.2"]) == [*found, "loss.clip=0.2"]
    assert any(one.startswith("train.learning_rate=") for one in learning_settings(ROOT / RECIPE))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_every_contestant_can_be_trained_on_every_task_with_steps_of_its_size(task: str) -> None:
    for one in [Contestant("old", OLD), default(), *presets()]:
        config = load_config(ROOT / TASKS[task].config, all_settings(one)).config
        assert list(untrainable(config)) == []
        size = (1, 64) if one.name == "default" else (8, 32) if one.name == "old" else (8, 8)
        assert (config.rollout.group_size, config.rollout.groups_per_step) == size, one.name
        own = "ppo" if one.name == "default" else one.name.removeprefix("loss=") if one.settings else "grpo"
        assert config.loss.name == ("grpo" if one.name == "old" else own)


class Scripted(Player):
    """Answers every board with its first free cell, and an end; the sixth game forgets the end and is cut off."""

    def _generate(self, rows: list[list[int]]) -> Any:
        for place, ids in enumerate(rows):
            board = self.tokenizer.decode(ids).split("user\n")[-1].split("<|im_end|>")[0]
            move = self.tokenize(next(cell for cell in board.split() if cell.isdigit()))
            yield (move, [-1.0]) if place == 5 else ([*move, self.tokenizer.eos_token_id], [-1.0, 0.0])


def replay(scenario: dict[str, Any]) -> float:
    """The reward of a game in which X takes the first free cell each time."""
    opponent, board = game.RandomOpponent(scenario["seed"]), game.EMPTY
    player = "X" if scenario["starts"] else "O"
    while (result := game.find_result(board)) is None:
        board = game.put(board, game.free_cells(board)[0], "X") if player == "X" else opponent.move(board)
        player = "O" if player == "X" else "X"
    return rollout.REWARDS[result]


def test_trl_plays_the_tokens_of_the_conversation_and_trains_on_the_replies() -> None:
    """All tokens are those of the text, the sampled ones are the moves, and what the cut-off reply lacks is not."""
    tokenizer = model.make_tokenizer()
    games = {scenario["id"]: scenario for scenario in scenarios.evaluation()}
    section = SimpleNamespace(sampling=SimpleNamespace(max_tokens=4), max_turns=5, limit_reward=0.0)
    names = list(games)[:8]
    attempts = asyncio.run(Scripted(rollout.rollout, games, tokenizer, section)._play(names))
    for name, attempt in zip(names, attempts, strict=True):
        sampled = [id for id, is_sampled in zip(attempt.completion, attempt.mask, strict=True) if is_sampled]
        text = tokenizer.decode(attempt.ids)
        assert len(tokenizer.decode(sampled, skip_special_tokens=True)) == attempt.num_turns
        assert text.count("<|im_start|>assistant\n") == attempt.num_turns
        assert tokenizer(text, add_special_tokens=False).input_ids == attempt.ids
        assert len(attempt.logprobs) == len(attempt.mask) == len(attempt.completion)
        assert attempt.reward == replay(games[name])


def test_an_attempt_that_asks_too_often_has_the_reward_of_the_limit() -> None:
    games = {"a": {"seed": 0, "starts": True}}
    section = SimpleNamespace(sampling=SimpleNamespace(max_tokens=4), max_turns=1, limit_reward=-1.0)
    [attempt] = asyncio.run(Scripted(rollout.rollout, games, model.make_tokenizer(), section)._play(["a"]))
    assert (attempt.reward, attempt.num_turns) == (-1.0, 1)
