"""2048: the rules against slow, obvious ones, demonstrations, what the model is shown, what a game is worth."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_cli.config.compose import load_config
from tests.support.models.recipes import Message, ScriptedPolicy, load
from tests.support.paths import ROOT

recipe = load("2048")
game, rollout, demos, scenarios = recipe.game, recipe.rollout, recipe.demos, recipe.scenarios
TOKENIZER = recipe.model.make_tokenizer()
BOARDS = st.text("0001123456", min_size=16, max_size=16)
STEPS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


def reference_move(board: str, direction: str) -> tuple[str, int]:
    """Each tile goes on cell by cell to the edge or a tile; it joins an equal one that is not joined yet."""
    grid = [[0 if board[4 * row + column] == "0" else 2 ** int(board[4 * row + column]) for column in range(4)]
            for row in range(4)]  # fmt: skip
    down, right = STEPS[direction]
    joined: set[tuple[int, int]] = set()
    score = 0
    inward = sorted(((r, c) for r in range(4) for c in range(4)), key=lambda cell: -cell[0] * down - cell[1] * right)
    for row, column in inward:  # those nearest to the edge that everything goes to come first
        tile, grid[row][column] = grid[row][column], 0
        while tile:
            there = (row + down, column + right)
            is_inside = 0 <= there[0] < 4 and 0 <= there[1] < 4
            if is_inside and grid[there[0]][there[1]] == 0:
                row, column = there
                continue
            if is_inside and grid[there[0]][there[1]] == tile and there not in joined:
                grid[there[0]][there[1]] = 2 * tile
                joined.add(there)
                score += 2 * tile
            else:
                grid[row][column] = tile
            break
    cells = [cell for line in grid for cell in line]
    return "".join(str(cell.bit_length() - 1) if cell else "0" for cell in cells), score


@given(board=BOARDS, direction=st.sampled_from(game.MOVES))
def test_a_move_is_what_tiles_do_one_cell_at_a_time(board: str, direction: str) -> None:
    assert game.move(board, direction) == reference_move(board, direction)


@given(board=BOARDS)
def test_legal_moves_are_those_that_change_something(board: str) -> None:
    assert game.legal_moves(board) == [way for way in STEPS if reference_move(board, way)[0] != board]


@given(board=BOARDS.filter(lambda board: "0" in board), seed=st.integers())
def test_one_tile_comes_on_a_free_cell(board: str, seed: int) -> None:
    after = game.add_tile(board, random.Random(seed))
    changed = [(old, new) for old, new in zip(board, after, strict=True) if old != new]
    assert changed in ([("0", "1")], [("0", "2")])


def test_a_tile_in_ten_is_a_4_and_no_cell_is_preferred() -> None:
    """8,000 tiles: 4s within 3.5 standard errors of 10 %; cells by chi-square, 15 degrees, below its 99.9 % point."""
    draw = random.Random(7)
    tiles = [game.add_tile(game.EMPTY, draw) for _ in range(8000)]
    assert sum("2" in tile for tile in tiles) / 8000 == pytest.approx(0.1, abs=3.5 * (0.09 / 8000) ** 0.5)
    cells = Counter(max(range(16), key=tile.__getitem__) for tile in tiles)
    assert sum((cells[cell] - 500) ** 2 / 500 for cell in range(16)) < 37.7


@pytest.mark.parametrize(("tile", "score"), [(4, 4), (8, 16), (16, 48), (32, 128)])
def test_a_tile_made_of_2s_scores_as_counted_by_hand(tile: int, score: int) -> None:
    """An 8 is two 4s and one 8: 4 + 4 + 8 = 16. A 16 is twice that and 16, and so on."""
    assert game.full_score(tile) == score


@settings(max_examples=50)
@given(board=BOARDS)
def test_a_shown_board_is_read_back_and_takes_as_many_tokens_as_any(board: str) -> None:
    assert game.read(game.show(board)) == board
    assert len(TOKENIZER.encode(game.show(board), add_special_tokens=False)) == 16 + 3


def test_a_move_is_one_token() -> None:
    assert [len(TOKENIZER.encode(move, add_special_tokens=False)) for move in game.MOVES] == [1] * 4


@pytest.mark.slow
def test_demonstrations_are_legal_and_no_move_is_preferred() -> None:
    """In the demonstrations with all four ways open: chi-square with 3 degrees below its 99.9 % point, 16.3."""
    chosen = Counter()
    for demo in demos.moves():
        system, asked, answered = demo["messages"]
        board = game.read(asked["content"])
        assert system["content"] == rollout.SYSTEM
        assert answered["content"] in game.legal_moves(board)
        if len(game.legal_moves(board)) == 4:
            chosen[answered["content"]] += 1
    expected = sum(chosen.values()) / 4
    assert expected > 200
    assert sum((chosen[move] - expected) ** 2 / expected for move in game.MOVES) < 16.3


def test_evaluation_games_are_fixed_and_none_is_trained_on() -> None:
    held_out, trained = list(scenarios.evaluation()), list(scenarios.train())
    assert held_out == list(scenarios.evaluation())
    assert len({scenario["seed"] for scenario in held_out}) == 200
    assert not {scenario["seed"] for scenario in held_out} & {scenario["seed"] for scenario in trained}


def board_of(messages: list[Message]) -> str:
    return str(game.read(messages[-1]["content"]))


def play(choose: Any, **scenario: Any) -> tuple[Any, ScriptedPolicy]:
    policy = ScriptedPolicy(lambda messages: str(choose(board_of(messages))))
    return asyncio.run(rollout.rollout(policy, {"seed": "s", "target": 16, "moves": 12, **scenario})), policy


@pytest.mark.parametrize("answer", ["", "Left", "left right", "middle", "</think>"])
def test_what_is_no_move_ends_the_game_at_once(answer: str) -> None:
    outcome, policy = play(lambda board: answer)
    assert (outcome.reward, outcome.metrics["illegal"], len(policy.seen)) == (0.0, True, 1)


@pytest.mark.parametrize("around", ["{}", " {}\n", "<think>not down</think>\n\n{}"])
def test_thoughts_and_spaces_around_a_move_do_not_count(around: str) -> None:
    outcome, _ = play(lambda board: around.format(game.legal_moves(board)[0]))
    assert (outcome.metrics["illegal"], outcome.metrics["moves"]) == (False, 12)


def test_a_move_that_changes_nothing_ends_the_game_with_the_score_until_then() -> None:
    """Always left: each game ends when left is closed, and is worth half its share of the 48 points of a 16."""
    for seed in range(30):
        outcome, policy = play(lambda board: "left", seed=seed)
        boards = [board_of(messages) for messages in policy.seen]
        score = sum(reference_move(board, "left")[1] for board in boards)
        assert outcome.metrics["illegal"] == (reference_move(boards[-1], "left")[0] == boards[-1])
        assert outcome.reward == (1.0 if outcome.metrics["win"] else 0.5 * score / 48)


def test_each_call_shows_the_present_board_alone_and_names_it_as_the_state() -> None:
    _, policy = play(lambda board: game.legal_moves(board)[0])
    assert all(len(messages) == 2 for messages in policy.seen)
    assert policy.states == [board_of(messages) for messages in policy.seen]
    for before, after, said in zip(policy.seen, policy.seen[1:], policy.said, strict=False):
        moved = reference_move(board_of(before), said)[0]
        assert sum(old != new for old, new in zip(moved, board_of(after), strict=True)) == 1  # the tile that came


def test_the_same_moves_meet_the_same_tiles() -> None:
    """The attempts of a group differ only by what the model says."""
    games = [play(lambda board: game.legal_moves(board)[0], seed="train-3")[1].seen for _ in range(2)]
    assert games[0] == games[1]


@pytest.mark.slow
def test_random_play_wins_as_often_as_by_the_slow_rules() -> None:
    """400 games each, by other random numbers: shares of wins within 3.5 standard errors of their difference, 0.119."""
    draw = random.Random(5)
    played = [play(lambda board: draw.choice(game.legal_moves(board)), seed=seed)[0] for seed in range(400)]
    assert not any(outcome.metrics["illegal"] for outcome in played)
    won = sum(reference_game(draw) for _ in range(400))
    assert sum(outcome.metrics["win"] for outcome in played) / 400 == pytest.approx(won / 400, abs=0.119)


def reference_game(draw: random.Random) -> bool:
    """Whether a game of twelve random legal moves reaches a 16, by the slow rules alone."""
    board = reference_tile(reference_tile("0" * 16, draw), draw)
    for _ in range(12):
        ways = [way for way in STEPS if reference_move(board, way)[0] != board]
        board = reference_tile(reference_move(board, draw.choice(ways))[0], draw)
    return max(board) >= "4"


def reference_tile(board: str, draw: random.Random) -> str:
    cells = list(board)
    free = [place for place in range(16) if cells[place] == "0"]
    cells[draw.choice(free)] = draw.choice("1111111112")
    return "".join(cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["config.yaml", "config-gpu.yaml"])
def test_a_run_may_make_as_many_calls_as_its_games_have_moves(name: str) -> None:
    config = load_config(ROOT / "recipes" / "2048" / name).config
    for entry in (config.rollout.scenarios, config.eval.scenarios):
        for scenario in getattr(scenarios, entry.source.removeprefix("scenarios.py:"))():
            assert scenario["moves"] <= config.rollout.max_turns
