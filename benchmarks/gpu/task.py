"""What both loops play: a prompt of common words, a reply of fixed length, a reward that differs within a group.

No dependency, because TRL's side may run in another Python.
"""

import random
from pathlib import Path
from typing import Any

WORDS = Path(__file__).parents[2] / "art_cli" / "models" / "builtin_words.txt"
NUM_SCENARIOS = 64


def prompts(num: int, length: int) -> list[str]:
    """Texts of `length` words, the same in every process."""
    words = WORDS.read_text(encoding="utf-8").split()[:500]
    draw = random.Random(0)
    return [" ".join(draw.choices(words, k=length)) for _ in range(num)]


def prompt_ids(num: int, length: int, *, seed: int, vocabulary: int) -> list[list[int]]:
    """Prompts as token ids; another seed gives others, which no cache holds."""
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(num)]


def reward(text: str) -> float:
    """In [0, 1]: the share of a to m among the reply's letters; 0 without any. No two replies of a group share it, be
    they text or random words, so that every group trains."""
    letters = [letter for letter in text.lower() if "a" <= letter <= "z"]
    return sum(letter < "n" for letter in letters) / len(letters) if letters else 0.0


def scenarios(length: int) -> list[dict[str, Any]]:
    return [{"id": f"s{number}", "text": text} for number, text in enumerate(prompts(NUM_SCENARIOS, length))]


async def rollout(policy: Any, scenario: dict[str, Any]) -> float:
    messages = [{"role": "user", "content": scenario["text"]}]
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    return reward(reply.choices[0].message.content or "")
