"""Which of the two numbers in an e-mail is the order's? One turn, for SmolLM2-135M-Instruct, which starts at 0.3."""

import random
import re
from typing import Any

from art_cli import Outcome, Policy

NAMES = ("Ann", "Bo", "Cara", "Dan", "Eve", "Finn", "Gwen", "Hugo", "Ines", "Jo", "Kit", "Lea")
THINGS = ("lamp", "chair", "kettle", "tent", "desk", "rug", "clock", "mirror", "shelf", "drill")
TEXTS = (
    "Hello, I am {name}, customer {customer}. My {thing} from order {order} came broken. What can I do?",
    "Order {order} has not arrived. I am waiting for the {thing}. My customer number is {customer}. Thanks, {name}",
    "Hi! Please cancel the {thing}. Customer: {customer}. Order: {order}. Regards, {name}",
    "{name} here. You charged me twice for the {thing}, see order no. {order} (customer no. {customer}).",
)


def _scenarios(num: int, seed: int) -> list[dict[str, Any]]:
    chance, made = random.Random(seed), []
    for number in range(num):
        customer, order = chance.sample(range(10_000, 99_999), 2)
        text = chance.choice(TEXTS).format(
            name=chance.choice(NAMES), thing=chance.choice(THINGS), customer=customer, order=order
        )
        made.append({"id": f"mail-{seed}-{number}", "text": text, "order": str(order)})
    return made


def train() -> list[dict[str, Any]]:
    return _scenarios(512, seed=1)


def evaluation() -> list[dict[str, Any]]:
    return _scenarios(64, seed=2)


async def rollout(policy: Policy, scenario: dict[str, Any]) -> Outcome:
    question = f"{scenario['text']}\n\nWhat is the order number? Answer with the number only."
    reply = await policy.client.chat.completions.create(
        model=policy.model, messages=[{"role": "user", "content": question}]
    )
    numbers = re.findall(r"\d{5}", reply.choices[0].message.content or "")
    is_right = numbers == [scenario["order"]]
    return Outcome(reward=float(is_right), metrics={"right": is_right, "named": scenario["order"] in numbers})
