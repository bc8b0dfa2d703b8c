"""What the model is shown before it plays: random legal moves on boards that random play leads to."""

import random
from typing import Any

from game import add_tile, best_tile, legal_moves, move, show, start
from rollout import SYSTEM

NUM_GAMES = 600


def moves() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [demo for _ in range(NUM_GAMES) for demo in _game(draw)]


def _game(draw: random.Random) -> list[dict[str, Any]]:
    board, shown = start(draw), []
    while len(shown) < 12 and best_tile(board) < 16 and legal_moves(board):
        direction = draw.choice(legal_moves(board))
        shown.append(_demo(board, direction))
        board = add_tile(move(board, direction)[0], draw)
    return shown


def _demo(board: str, direction: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": show(board)},
            {"role": "assistant", "content": direction},
        ]
    }
