"""What the model is shown before it plays: games of random legal moves on both sides; nothing in them is good play."""

import random
from typing import Any

from game import EMPTY, find_result, free_cells, put, show
from rollout import SYSTEM

NUM_GAMES = 3200


def games(count: int = NUM_GAMES) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [_game(draw, model_starts=number % 2 == 0) for number in range(count)]


def _game(draw: random.Random, *, model_starts: bool) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM}]
    board = EMPTY if model_starts else put(EMPTY, draw.choice(free_cells(EMPTY)), "O")
    while find_result(board) is None:
        move = draw.choice(free_cells(board))
        messages += [{"role": "user", "content": show(board)}, {"role": "assistant", "content": move}]
        board = put(board, move, "X")
        if find_result(board) is None:
            board = put(board, draw.choice(free_cells(board)), "O")
    return {"messages": messages}
