"""One game: the model plays X, one call per move, against a random opponent. An illegal move loses.

The conversation grows move by move, so each prompt goes on from the tokens of the one before it.
"""

from typing import Any

from game import EMPTY, RandomOpponent, find_result, free_cells, put, show

from art_cli import Outcome, Policy

SYSTEM = (
    "You play X in tic-tac-toe. X1 is your mark in cell 1, O2 the other player's in cell 2, and 3 a free cell. "
    "Answer with the number of one free cell. Three in a row wins."
)
REWARDS = {"X": 1.0, "draw": 0.5, "O": 0.0, "illegal": 0.0}


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    opponent = RandomOpponent(scenario["seed"])
    board = EMPTY if scenario["starts"] else opponent.move(EMPTY)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    result, num_moves = None, 0
    while result is None:
        messages.append({"role": "user", "content": show(board)})
        policy.state(board)  # equal boards are compared, also where other moves led to them
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        move = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": move})
        num_moves += 1
        if move not in free_cells(board):
            result = "illegal"
            break
        board = put(board, move, "X")
        result = find_result(board)
        if result is None:
            board = opponent.move(board)
            result = find_result(board)
    return Outcome(
        reward=REWARDS[result],
        metrics={"win": result == "X", "draw": result == "draw", "illegal": result == "illegal", "moves": num_moves},
    )
