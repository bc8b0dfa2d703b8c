"""One puzzle, one reply. The reward is the share of who, when, where and what that the reply has right."""

from functools import lru_cache
from typing import Any

from puzzle import Puzzle, Size, make_puzzle, score

from art_cli import Outcome, Policy

SYSTEM = (
    "Who did it, when, where and with what? The culprit was alone in a room, and the tool lay there. "
    "End with a line of four words, such as: Ada 3 kitchen rope"
)
cached = lru_cache(maxsize=64)(make_puzzle)  # the attempts of a group are at the same puzzle


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    puzzle = cached(scenario["seed"], Size(**scenario["size"]))
    reply = await policy.client.chat.completions.create(model=policy.model, messages=ask(puzzle))
    share = score(reply.choices[0].message.content or "", puzzle.solution)
    return Outcome(reward=share, metrics={"solved": share == 1.0})


def ask(puzzle: Puzzle) -> list[Any]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": puzzle.text}]
