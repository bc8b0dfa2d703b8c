"""A waiter's note, for SmolLM2-135M-Instruct: one turn that puts an order in words into one line for the kitchen.

The reward is the share of the note that is right: the table, and each dish with its number.
"""

import random
import re
from typing import Any

from art_cli import Outcome, Policy

SYSTEM = "Write the order as one line for the kitchen."
EXAMPLES = (
    ("Table 12 would like two soups and one salad.", "12: 2 soup, 1 salad"),
    ("One tea and three pies for table 30, please.", "30: 1 tea, 3 pie"),
)
NUMBERS = ("one", "two", "three", "four", "five")
DISHES = ("soup", "salad", "tea", "pie", "coffee", "cake", "toast", "omelette", "burger", "pasta")
TEXTS = (
    "Table {table} would like {first} and {second}.",
    "{first} and {second} for table {table}, please.",
    "The guests at {table} want {first}, and then {second}.",
    "{first} for table {table}. And {second}!",
)


def train() -> list[dict[str, Any]]:
    return _scenarios(512, seed=1)


def evaluation() -> list[dict[str, Any]]:
    return _scenarios(64, seed=2)


def _scenarios(num: int, seed: int) -> list[dict[str, Any]]:
    draw, made = random.Random(seed), []
    for place in range(num):
        table, dishes = str(draw.randrange(2, 60)), draw.sample(DISHES, 2)
        counts = [draw.randrange(1, len(NUMBERS) + 1) for _ in dishes]
        first, second = (f"{NUMBERS[n - 1]} {dish}{'s' * (n > 1)}" for n, dish in zip(counts, dishes, strict=True))
        text = draw.choice(TEXTS).format(table=table, first=first, second=second)
        parts = [table, *(f"{n} {dish}" for n, dish in zip(counts, dishes, strict=True))]
        made.append({"id": f"order-{seed}-{place}", "text": text[0].upper() + text[1:], "parts": parts})
    return made


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for text, note in EXAMPLES:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": note}]
    messages.append({"role": "user", "content": scenario["text"]})
    reply = await policy.client.chat.completions.create(model=policy.model, messages=messages)
    parts = [part.strip().lower() for part in re.split(r"[:,]", reply.choices[0].message.content or "")]
    right = len(set(parts) & set(scenario["parts"]))
    reward = right / max(len(parts), len(scenario["parts"]))
    return Outcome(reward=reward, metrics={"right": reward == 1.0})
