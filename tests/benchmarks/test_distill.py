"""The judge of benchmarks/learning/distill.py: the words it says, and the demos from which they are learned."""

import sys

import pytest

from benchmarks.learning.distill_words import better_moves, games
from tests.support.paths import TICTACTOE

sys.path.insert(0, str(TICTACTOE))

import game  # noqa: E402


def said(*boards_and_moves: tuple[str, str]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "play"}]
    for board, move in boards_and_moves:
        messages += [{"role": "user", "content": game.show(board)}, {"role": "assistant", "content": move}]
    return messages


def test_the_words_name_a_winning_cell_then_a_blocking_one_then_a_legal_one() -> None:
    """X has 1 2 and takes 9: 3 wins. O has 4 5 and X takes 9: 6 stops it. Taking 3 itself, or a free cell, is fine."""
    assert better_moves(said(("123456789", "5"))) == "-"
    assert better_moves(said(("XX3OO6789", "9"))) == "3"
    assert better_moves(said(("XX3OO6789", "3"))) == "-"
    assert better_moves(said(("X23OO678X", "2"))) == "6"
    assert better_moves(said(("X234O6789", "1"))) == "2"
    assert better_moves(said(("123456789", "5"), ("1O3OX6789", "1"))) == "- -"


@pytest.mark.slow
def test_every_second_demo_has_words_that_name_its_own_moves() -> None:
    plain, told = games()[:2]
    assert "better" not in plain["messages"][1]["content"]
    words = told["messages"][1]["content"].partition("better: ")[2].split(" ")
    moves = [message["content"] for message in told["messages"] if message["role"] == "assistant"]
    assert len(words) == len(moves)
    assert all(word in ("-", move) for word, move in zip(words, moves, strict=True))
