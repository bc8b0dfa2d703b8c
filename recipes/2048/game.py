"""The rules of 2048 on four by four cells.

A board is a string of sixteen digits, row by row: 0 is a free cell, and any other digit is the power of two of the tile
there, so 3 is the tile 8. "1000300000000000" has a 2 in the upper left corner and an 8 below it.
"""

import random

SIZE = 4
EMPTY = "0" * SIZE * SIZE
MOVES = ("left", "right", "up", "down")


def slide(line: str) -> tuple[str, int]:
    """A line whose tiles have slid to its beginning, and the sum of the tiles that were made by it.

    Two equal tiles that meet become one of twice their value, those nearest to the beginning first. A tile that was
    just made is not joined again: "1111" becomes "2200".
    """
    tiles, made, score = line.replace("0", ""), "", 0
    while tiles:
        if tiles[0] == tiles[1:2]:
            made += str(int(tiles[0]) + 1)
            score += 2 ** int(made[-1])
            tiles = tiles[2:]
        else:
            made += tiles[0]
            tiles = tiles[1:]
    return made.ljust(len(line), "0"), score


def move(board: str, direction: str) -> tuple[str, int]:
    """The board after all tiles have slid in that direction, and the score of it. No new tile has come yet."""
    cells, score = list(board), 0
    for number in range(SIZE):
        places = _line(direction, number)
        line, gained = slide("".join(board[place] for place in places))
        score += gained
        for place, cell in zip(places, line, strict=True):
            cells[place] = cell
    return "".join(cells), score


def _line(direction: str, number: int) -> list[int]:
    """The cells of one row or column, from the edge that the tiles slide to."""
    is_row = direction in ("left", "right")
    places = [SIZE * number + i if is_row else SIZE * i + number for i in range(SIZE)]
    return places if direction in ("left", "up") else places[::-1]


def legal_moves(board: str) -> list[str]:
    """The directions in which anything moves; none when the game is over."""
    return [direction for direction in MOVES if move(board, direction)[0] != board]


def add_tile(board: str, draw: random.Random) -> str:
    """A 2, or once in ten times a 4, comes on a free cell."""
    place = draw.choice([place for place, cell in enumerate(board) if cell == "0"])
    return board[:place] + ("1" if draw.random() < 0.9 else "2") + board[place + 1 :]


def start(draw: random.Random) -> str:
    return add_tile(add_tile(EMPTY, draw), draw)


def best_tile(board: str) -> int:
    return int(2 ** int(max(board)))


def full_score(tile: int) -> int:
    """The score of a tile that was made of nothing but 2s: 48 for a 16, which is 16 + 2 * 8 + 4 * 4."""
    return tile * (tile.bit_length() - 2)


def show(board: str) -> str:
    """Four lines of four digits."""
    return "\n".join(board[row : row + SIZE] for row in range(0, SIZE * SIZE, SIZE))


def read(shown: str) -> str:
    """The board that `show` has written."""
    return shown.replace("\n", "")
