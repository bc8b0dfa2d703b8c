"""What a customer asks, made from a seed, and the tools that look it up: orders, customers and products of a shop.

Each request asks for one fact of one record. It also holds a number, a name or a product that is not to be looked up.
"""

import json
import random
from typing import NamedTuple

NAMES = """\
Ada Alma Anton Boris Bruno Carla Clara Cyril Dmitri Dora Elena Emil Farid Fiona Greta Gustav Hanna Hugo Ines Ivan \
Jonas Julia Keiko Klaus Lars Lena Luca Marta Milan Nadia Oscar Paula Petra Ralf Rita Sven Tara Tomas Ursula Yara
lamp chair kettle mirror blanket ladder bucket candle drill basket sofa desk rug vase mug spoon fork plate bowl \
pan stove fan heater radio camera phone tablet pencil brush broom towel soap curtain stool bench wardrobe tent rope \
saw torch
Mara Nils Olga Pedro Rosa Samir Tessa Vera
table clock carpet hammer pillow bottle shelf umbrella
Monday Tuesday Wednesday Thursday Friday Saturday
"""
PEOPLE, PRODUCTS, NEW_PEOPLE, NEW_PRODUCTS, DAYS = (line.split() for line in NAMES.splitlines())


class Tool(NamedTuple):
    """What a tool looks up, what it finds, and the requests that need it."""

    key: str
    fact: str
    record: str
    requests: list[str]


TOOLS = {
    "order": Tool(
        "number",
        "day",
        "order {number} arrives on {day}",
        [
            "I am customer {other}. When does my order {number} arrive?",
            "My order is {number}, my customer number {other}. When will it be here?",
        ],
    ),
    "customer": Tool(
        "name",
        "phone",
        "customer {name} has the phone {phone}",
        [
            "{someone} asks: what is the phone number of {name}?",
            "{someone} wants to call {name}. Which number is it?",
        ],
    ),
    "product": Tool(
        "item",
        "price",
        "product {item} costs {price} euros",
        [
            "{someone} has a {another}. How much is a {item}?",
            "I do not want the {another}. What does the {item} cost?",
        ],
    ),
}


class Request(NamedTuple):
    """Example: Request("When does my order 4821 arrive?", "order", "4821", "order 4821 arrives on Friday", "Friday")"""

    text: str
    tool: str
    key: str
    record: str
    answer: str


def make_request(seed: str, *, is_new: bool) -> Request:
    """Returns the request of a seed, always the same one; `is_new`: with people and products kept for evaluation."""
    draw = random.Random(seed)
    number, other = draw.sample(range(1000, 10_000), 2)
    name, someone = draw.sample(NEW_PEOPLE if is_new else PEOPLE, 2)
    item, another = draw.sample(NEW_PRODUCTS if is_new else PRODUCTS, 2)
    values = {
        "number": str(number),
        "other": str(other),
        "name": name,
        "someone": someone,
        "item": item,
        "another": another,
        "day": draw.choice(DAYS),
        "phone": str(draw.randrange(100_000, 1_000_000)),
        "price": str(draw.randrange(10, 100)),
    }
    tool_name, tool = draw.choice(list(TOOLS.items()))
    text = draw.choice(tool.requests).format(**values)
    return Request(text, tool_name, values[tool.key], tool.record.format(**values), values[tool.fact])


def read_call(text: str) -> tuple[str, str] | None:
    """Returns tool and key of a reply that is a call, {"order": "4821"}, or None if it is something else."""
    try:
        called = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(called, dict) or len(called) != 1:
        return None
    [(tool, key)] = called.items()
    return (tool, key) if tool in TOOLS and isinstance(key, str) else None
