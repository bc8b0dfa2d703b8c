"""What a game of recipes/tictactoe was worth, told from its conversation alone: the rule of a judge server.

    python -m tests.support.judges.judge_server --rule tests/support/judges/tictactoe_rule.py:rule

The last message is X's last move, on the board shown before it; what O answered is not shown. Where X has neither won
nor filled the board nor moved illegally, O ended the game: by a row of three, or by filling the one cell that was left.
"""

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


def rule(conversations: list[list[tuple[str, str]]]) -> float:
    """1 for a win, 0.5 for a draw, 0 for a loss or an illegal move."""
    (_, shown), (role, move) = conversations[-1][-2:]
    assert role == "assistant", role
    board = "".join(cell[0] for cell in shown.split())
    if move not in [cell for cell in board if cell.isdigit()]:
        return 0.0
    board = board.replace(move, "X")
    if _has_row(board, "X"):
        return 1.0
    free = [cell for cell in board if cell.isdigit()]
    if not free or (len(free) == 1 and not _has_row(board.replace(free[0], "O"), "O")):
        return 0.5
    return 0.0


def _has_row(board: str, player: str) -> bool:
    return any(all(board[cell] == player for cell in line) for line in LINES)
