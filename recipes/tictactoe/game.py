"""The rules of tic-tac-toe, and an opponent who plays any legal move.

A board is a string of nine cells: "X", "O", or the cell's own number where it is free. "1X3O56789" has X in the middle
of the top row and O at the left of the middle one.
"""

import random

EMPTY = "123456789"
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def free_cells(board: str) -> list[str]:
    return [cell for cell in board if cell.isdigit()]


def put(board: str, cell: str, player: str) -> str:
    return board.replace(cell, player)


def find_result(board: str) -> str | None:
    """ "X" or "O" for a row of three, "draw" for a full board, None while the game goes on."""
    for first, second, third in LINES:
        if board[first] == board[second] == board[third]:
            return board[first]
    return None if free_cells(board) else "draw"


def show(board: str) -> str:
    """Three lines of three cells, each with its number, so that a mark tells where it is: "1 X2 3"."""
    cells = [number if cell == number else cell + number for cell, number in zip(board, EMPTY, strict=True)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def read(shown: str) -> str:
    """The board that `show` has written."""
    return "".join(cell[0] for cell in shown.split())


class RandomOpponent:
    """Plays O: a legal move drawn from its seed, so that the same moves against it meet the same answers."""

    def __init__(self, seed: int | str) -> None:
        self._draw = random.Random(seed)

    def move(self, board: str) -> str:
        return put(board, self._draw.choice(free_cells(board)), "O")
