"""What the model is shown before it trains: answers of somebody who overlooks half of the clues and guesses."""

import random
from typing import Any

from puzzle import make_puzzle, solve
from rollout import ask
from scenarios import SMALL

NUM_DEMOS = 4800
SHARE_SEEN = 0.5  # of the clues


def answers() -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [make_demo(f"demo-{number}", draw) for number in range(NUM_DEMOS)]


def make_demo(seed: str, draw: random.Random) -> dict[str, Any]:
    puzzle = make_puzzle(seed, SMALL)
    seen = [clue for clue in puzzle.clues if draw.random() < SHARE_SEEN]
    guessed = draw.choice(solve(SMALL, seen))
    return {"messages": [*ask(puzzle), {"role": "assistant", "content": " ".join(guessed)}]}
