"""What the model is shown before it trains: answers of somebody who overlooks half of the clues and guesses."""

import random
from typing import Any

from puzzle import make_puzzle, solve
from rollout import ask
from scenarios import SMALL, is_held_out

NUM_SEEDS = 6400  # of puzzles; those to evaluate on are left out
SHARE_SEEN = 0.5  # of the clues


def answers() -> list[dict[str, Any]]:
    draw = random.Random(0)
    seeds = (f"demo-{number}" for number in range(NUM_SEEDS))
    return [make_demo(seed, draw) for seed in seeds if not is_held_out(seed)]


def make_demo(seed: str, draw: random.Random) -> dict[str, Any]:
    puzzle = make_puzzle(seed, SMALL)
    seen = [clue for clue in puzzle.clues if draw.random() < SHARE_SEEN]
    guessed = draw.choice(solve(SMALL, seen))
    return {"messages": [*ask(puzzle), {"role": "assistant", "content": " ".join(guessed)}]}
