"""One game: won when the target tile is reached within so many moves. A move that changes nothing ends the game.

Each call is a conversation of its own that shows only the present board, because no earlier one matters. All of them
belong to the one trajectory, and all get its reward.
"""

import random
from typing import Any

from game import add_tile, best_tile, full_score, legal_moves, move, show, start

from art_cli import Outcome, Policy

SYSTEM = (
    "You play 2048. A digit is the power of two on a tile: 3 is the tile 8, and 0 a free cell. "
    "Answer with one move that changes the board: left, right, up or down."
)


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    draw = random.Random(scenario["seed"])
    board, score, num_moves = start(draw), 0, 0
    is_legal = True
    while num_moves < scenario["moves"] and best_tile(board) < scenario["target"] and legal_moves(board):
        policy.state(board)
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": show(board)}]
        reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
        direction = (reply.choices[0].message.content or "").rpartition("</think>")[2].strip()
        is_legal = direction in legal_moves(board)
        if not is_legal:
            break
        board, gained = move(board, direction)
        board, score, num_moves = add_tile(board, draw), score + gained, num_moves + 1
    won = best_tile(board) >= scenario["target"]
    return Outcome(
        reward=1.0 if won else 0.5 * min(1.0, score / full_score(scenario["target"])),
        metrics={"win": won, "illegal": not is_legal, "moves": num_moves, "score": score},
    )
